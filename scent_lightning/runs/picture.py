"""A figure of runs side by side: the curves of a metric, and its last value for each seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scent_lightning.figures import COLOURS, METHOD_COLOURS, mean_and_range, new_figure, save, style
from scent_lightning.runs.comparison import Comparison, Group, in_words

__all__ = ["draw"]

_DASHES = ("-", "--", ":", "-.")


def draw(path: Path, comparison: Comparison) -> Path:
    """Draw a comparison and write the figure, and an SVG file beside it.

    On the left the mean over seeds by the step, with the range of the seeds as a band; on the right the last values,
    a dot for each seed and a bar for the mean, the best group on top.

    Args:
        path: the file; its ending says the format.
        comparison: what is drawn.

    Returns:
        ``path``.
    """
    with style():
        groups = comparison.groups
        size = (4.6, max(2.8, 0.9 + 0.36 * len(groups)))
        figure, panels = new_figure(1, 2, size=size, width_ratios=[1.3, 1.0])
        curves, dots = panels[0]
        for number, (group, look) in enumerate(zip(groups, _looks(groups), strict=True)):
            _draw_curve(curves, comparison.metric, group, look)
            _draw_dots(dots, len(groups) - 1 - number, group, look)
        several = any(len(group.runs) > 1 for group in groups)
        curves.set(xlabel="step", ylabel=comparison.metric)
        curves.set_title("Mean over seeds; band: least to largest" if several else "By step", loc="left")
        _limit(curves, comparison)
        labels = [_wrapped(group.label or "all runs") for group in reversed(groups)]
        dots.set_yticks(range(len(groups)), labels=labels)
        dots.set(xlabel=comparison.metric, ylim=(-0.6, len(groups) - 0.4))
        dots.tick_params(axis="y", length=0)
        dots.grid(axis="y", visible=False)
        dots.margins(x=0.15)
        dots.set_title("At the end; bar: mean" if several else "At the end", loc="left")
    return save(figure, path)


def _looks(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Colour and dashes of each group: a dual update has its own colour, and what else differs has the dashes."""
    duals = [str(group.settings.get("dual", "")) for group in groups]
    methods = [dual.partition("(")[0] for dual in duals]
    if not all(method in METHOD_COLOURS for method in methods):
        return [_look(COLOURS[number % len(COLOURS)], number // len(COLOURS)) for number in range(len(groups))]
    # Of one method's arguments the first come with solid lines, as do the first of the other settings.
    of_method = {method: list(dict.fromkeys(d for d in duals if d.partition("(")[0] == method)) for method in methods}
    rest = [
        (of_method[method].index(dual), *(repr(value) for name, value in group.settings.items() if name != "dual"))
        for method, dual, group in zip(methods, duals, groups, strict=True)
    ]
    distinct = list(dict.fromkeys(rest))
    return [_look(METHOD_COLOURS[method], distinct.index(each)) for method, each in zip(methods, rest, strict=True)]


def _look(colour: str, dashes: int) -> dict[str, Any]:
    return {"color": colour, "linestyle": _DASHES[dashes % len(_DASHES)]}


def _draw_curve(axes: Any, metric: str, group: Group, look: dict[str, Any]) -> None:
    steps, values = _on_common_steps([run.curves[metric] for run in group.runs])
    marker = "o" if len(steps) < 20 else None
    mean_and_range(axes, steps.tolist(), values.T.tolist(), marker=marker, markersize=3, **look)


def _draw_dots(axes: Any, height: int, group: Group, look: dict[str, Any]) -> None:
    spread = np.linspace(-0.13, 0.13, len(group.last)) if len(group.last) > 1 else np.zeros(1)
    colour = look["color"]
    axes.plot(group.last, height + spread, "o", color=colour, alpha=0.6, markersize=4.5, markeredgewidth=0)
    mean = float(group.last.mean())
    axes.plot([mean, mean], [height - 0.27, height + 0.27], color=colour, linewidth=2.2)
    beside = axes.get_yaxis_transform()
    axes.plot([0, 0.07], [height, height], transform=beside, **look)  # as in the other panel
    axes.text(1.02, height, in_words(group.last), transform=beside, va="center", fontsize=8)


def _on_common_steps(
    curves: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Steps that all seeds have logged, shape ``(s,)``, and the values there, shape ``(runs, s)``.

    Where there are none, those of the first, between which the others are interpolated.
    """
    steps = curves[0][0]
    for others, _ in curves[1:]:
        steps = np.intersect1d(steps, others)
    if len(steps):
        return steps, np.stack([values[np.searchsorted(at, steps)] for at, values in curves])
    steps = curves[0][0]
    return steps, np.stack([np.interp(steps, at, values) for at, values in curves])


def _limit(axes: Any, comparison: Comparison) -> None:
    """Leave a start that is far off out of the picture: what matters is where the curves end."""
    values = [run.curves[comparison.metric][1] for group in comparison.groups for run in group.runs]
    points = np.concatenate(values)
    points = points[np.isfinite(points)]
    ends = np.concatenate([group.last for group in comparison.groups])
    ends = ends[np.isfinite(ends)]
    if not len(points) or not len(ends):
        return
    low, high = float(points.min()), float(points.max())
    least, largest = float(ends.min()), float(ends.max())
    inner = max(largest - least, 0.1 * max(abs(least), abs(largest)), 1e-12)
    if comparison.better == "min" and high > largest + 4 * inner:
        axes.set_ylim(low - 0.1 * inner, largest + 3 * inner)
    elif comparison.better == "max" and low < least - 4 * inner:
        axes.set_ylim(least - 3 * inner, high + 0.1 * inner)


def _wrapped(label: str, width: int = 34) -> str:
    """A label on as many lines as it takes, broken between settings."""
    lines = [""]
    for part in label.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) > width and lines[-1]:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] = joined
    return "\n".join(lines)
