"""One look for all pictures: colours that the colour-blind tell apart, a vector file beside each PNG.

Figures are made without pyplot: no global state of matplotlib changes, and no display is needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "METHOD_COLOURS",
    "METHOD_MARKERS",
    "colour_of",
    "look_of",
    "mean_and_range",
    "new_figure",
    "note",
    "save",
    "style",
]

# Okabe & Ito's palette, "Color universal design" (2008), with brown for its yellow, too faint for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A3B00")

# A method has its colour and its marker in every picture.
METHOD_COLOURS = {
    "SCENT": COLOURS[0],
    "SOX": COLOURS[1],
    "BSGD": COLOURS[2],
    "ASGD": COLOURS[3],
    "SoftplusASGD": COLOURS[4],
    "UMax": COLOURS[5],
    "MSVR": COLOURS[6],
    "ProximalPoint": COLOURS[7],
}

METHOD_MARKERS = dict(zip(METHOD_COLOURS, "osD^vP*X", strict=True))
# What stands behind a method's name changes its line, not its colour.
_LINES = {"auto": "--", "tuned": "--", "clip": "--", "guard": "-.", "proximal": ":", "default": ":"}

_LOOK: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "axes.unicode_minus": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "scent_lightning",
}


def colour_of(series: str, among: Sequence[str] = ()) -> str:
    """The colour of a series.

    Args:
        series: name of a dual update, also with more behind it ("SCENT auto"), which has its own colour; or any other.
        among: names of all series of the picture, in order; the others take the colours that are left.
    """
    own = {each: METHOD_COLOURS.get(each.partition(" ")[0]) for each in (series, *among)}
    if (colour := own[series]) is not None:
        return colour
    left = [colour for colour in COLOURS if colour not in own.values()] or list(COLOURS)
    others = [each for each in among if own[each] is None]
    return left[others.index(series) % len(left) if series in others else 0]


def look_of(series: str, among: Sequence[str] = ()) -> dict[str, Any]:
    """Colour, marker and line of a series, as arguments of matplotlib's ``plot``; see :func:`colour_of`."""
    method, _, more = series.partition(" ")
    return {
        "color": colour_of(series, among),
        "marker": METHOD_MARKERS.get(method, "o"),
        "linestyle": _LINES.get(more, "-"),
    }


def mean_and_range(
    axes: Axes, places: Sequence[float], values: Sequence[Sequence[float]], label: str | None = None, **look: Any
) -> None:
    """Draw the mean of some values at each place as a line, and what lies from the least to the largest as a band.

    Args:
        axes: where.
        places: on the horizontal axis.
        values: at each place, those of all seeds.
        label: for the legend.
        look: further arguments of matplotlib's ``plot``.
    """
    axes.plot(places, [statistics.mean(each) for each in values], label=label, **look)
    if max(map(len, values)) > 1:
        low, high = ([of(each) for each in values] for of in (min, max))
        axes.fill_between(places, low, high, color=look.get("color"), alpha=0.18, linewidth=0)


def note(figure: Figure, text: str) -> None:
    """Say below a figure what its lines, bands and bars are."""
    figure.supxlabel(text, fontsize=8, color="#555555")


@contextmanager
def style() -> Iterator[None]:
    """The look of the pictures, within a ``with`` block, or of a function that draws: ``@style()``."""
    import matplotlib
    from matplotlib.rcsetup import cycler

    look: Any = {**_LOOK, "axes.prop_cycle": cycler(color=COLOURS)}
    with matplotlib.rc_context(look):
        yield


def new_figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (4.0, 3.2), **more: Any
) -> tuple[Figure, Any]:
    """A figure in the package's look, and its panels.

    Args:
        rows: number of rows of panels.
        columns: number of panels in a row.
        size: width and height of one panel, in inches.
        more: further arguments of matplotlib's ``Figure.subplots``, such as ``sharey``.

    Returns:
        The figure, and an array of axes of shape ``(rows, columns)``.

    Example:
        >>> figure, panels = new_figure(1, 2)
        >>> panels.shape
        (1, 2)
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.subplots(rows, columns, squeeze=False, **more)


def save(figure: Figure, path: str | Path, vector: bool = True) -> Path:
    """Write a figure as it is named, and as SVG beside it.

    Args:
        figure: any matplotlib figure.
        path: the file; its ending says the format (PNG, PDF, SVG, …). Its folder is made where it is missing.
        vector: write the SVG file, too; for pictures of photographs it would only be larger.

    Returns:
        ``path``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path, dpi=150)
        if vector and path.suffix.lower() not in {".svg", ".pdf"}:
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return path
