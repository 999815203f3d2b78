"""Draw what the DualVariableMonitor logged: a figure from a TensorBoard event file.

A row for each dual variable: ν, the weights, how many samples count, and what lies between 0 and 1. A panel without a
tag is left out: of one anchor there are no quantiles, with the published updates there is no guard.

    python examples/plot_dual_statistics.py lightning_logs/version_0 --out dual_statistics.png
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scent_lightning.figures import COLOURS, new_figure, note, save, style

Scalars = dict[str, tuple[list[int], list[float]]]
NU, WEIGHT, SAMPLES, GAMMA = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[3]


def read(folder: Path) -> Scalars:
    """Steps and values of every scalar tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        points = events.Scalars(tag)
        scalars[tag] = [point.step for point in points], [point.value for point in points]
    return scalars


class Panel:
    """A panel that draws the tags of a dual variable which there are."""

    def __init__(self, axes: Any, scalars: Scalars) -> None:
        self.axes, self.scalars = axes, scalars

    def line(self, key: str, label: str, of: Callable[[float], float] = float, **look: Any) -> None:
        if key in self.scalars:
            steps, values = self.scalars[key]
            self.axes.plot(steps, [of(value) for value in values], label=label, **look)

    def band(self, low: str, high: str, label: str, colour: str, alpha: float = 0.18) -> None:
        if low in self.scalars and high in self.scalars:
            (steps, bottom), (_, top) = self.scalars[low], self.scalars[high]
            self.axes.fill_between(steps, bottom, top, label=label, color=colour, alpha=alpha, linewidth=0)


def of_nu(panel: Panel) -> None:
    """ν of all visited anchors, of one or where there is no table of the batch's, and what its step size is to it."""
    panel.band("table_q01", "table_q99", "1 % to 99 %", NU)
    panel.band("table_q25", "table_q75", "25 % to 75 %", NU, alpha=0.35)
    if "table_q50" in panel.scalars:
        panel.line("table_q50", "median of the table", color=NU)
    else:
        panel.line("mean", "ν", color=NU)
    low, high = panel.axes.get_ylim()
    panel.line("log_alpha", "−log α", lambda value: -value, color="black", linestyle="--", linewidth=1)
    least, most = panel.axes.get_ylim()
    room = 0.5 * (high - low)  # where α goes to 0, −log α would press ν flat
    panel.axes.set_ylim(max(least, low - room), min(most, high + room))
    panel.axes.set(title="dual variable", ylabel="ν (nats)")


def of_weights(panel: Panel) -> None:
    """exp(ℓ − ν)."""
    from matplotlib.ticker import LogLocator

    panel.line("weight_max", "largest of the batch", color=WEIGHT, alpha=0.45, linewidth=1)
    panel.line("weight", "mean of the batch", color=WEIGHT)
    if panel.axes.has_data():
        panel.axes.axhline(1, color="black", linewidth=0.9, linestyle=":", label="1: stationary")
    panel.axes.set(yscale="log", title="weights", ylabel="exp(ℓ − ν)")
    panel.axes.yaxis.set_major_formatter("{x:g}")
    panel.axes.yaxis.set_minor_formatter("{x:g}")
    panel.axes.yaxis.set_minor_locator(LogLocator(subs=(1, 2, 5)))


def of_samples(panel: Panel) -> None:
    """m/κ."""
    panel.line("effective_samples", "mean of the batch", color=SAMPLES)
    panel.axes.set(title="samples that count", ylabel="m/κ (samples an anchor)", ylim=(0, None))


def of_fractions(panel: Panel) -> None:
    """Moving-average factors, and the fractions of anchors."""
    panel.band("effective_gamma_min", "effective_gamma_max", "least to largest", GAMMA)
    panel.line("effective_gamma", "γ = sigmoid(log α + ν)", color=GAMMA)
    panel.line("gamma", "γ", color=GAMMA)
    panel.line("alpha", "α", color=GAMMA)
    panel.line("guarded", "anchors raised by the guard", color=COLOURS[4])
    panel.line("visited", "anchors visited", color=COLOURS[5], linestyle="--")
    panel.axes.set(title="step size, and parts of the anchors", ylabel="fraction", ylim=(-0.03, 1.03))


PANELS = (of_nu, of_weights, of_samples, of_fractions)


@style()
def draw(scalars: Scalars, names: list[str], path: Path) -> None:
    """A row of panels for each dual variable."""
    figure, panels = new_figure(len(names), len(PANELS), size=(3.4, 2.7), sharex=True)
    for name, row in zip(names, panels, strict=True):
        start = f"dual/{name}/"
        mine = {tag.removeprefix(start): points for tag, points in scalars.items() if tag.startswith(start)}
        for draw_panel, axes in zip(PANELS, row, strict=True):
            draw_panel(Panel(axes, mine))
            axes.set_title(f"{name}: {axes.get_title()}")
            axes.set_xlabel("optimiser step")
            if axes.has_data():
                axes.legend(loc="best")
            else:
                axes.set_visible(False)
    note(
        figure,
        "of the batch at each logging step; of the table, which has all visited anchors, at the end of each epoch",
    )
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="folder of the event file, such as lightning_logs/version_0")
    parser.add_argument("--out", type=Path, default=Path("dual_statistics.png"), help="the figure (PNG, PDF or SVG)")
    arguments = parser.parse_args()
    scalars = read(arguments.log)
    names = sorted({tag.split("/")[1] for tag in scalars if tag.startswith("dual/")})
    if not names:
        parser.error(f"{arguments.log} holds no dual/… tags; was the DualVariableMonitor on?")
    draw(scalars, names, arguments.out)
    print(f"figure: {arguments.out}")


if __name__ == "__main__":
    main()
