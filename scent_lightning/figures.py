"""One look for all pictures: colours that the colour-blind tell apart, a vector file beside each PNG.

Figures are made without pyplot: no global state of matplotlib changes, and no display is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "METHOD_COLOURS", "colour_of", "new_figure", "save", "style"]

# Okabe & Ito's palette, "Color universal design" (2008); its yellow is too faint for lines on white.
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


def colour_of(method: str, among: list[str] | None = None) -> str:
    """The colour of a method; of another series, the one of its place ``among`` all of the picture.

    Args:
        method: name of a dual update, also with more behind it ("SCENT auto"), or of any other series.
        among: names of all series of the picture, in order.
    """
    if (exact := METHOD_COLOURS.get(method)) is not None:
        return exact
    return COLOURS[among.index(method) % len(COLOURS) if among and method in among else 0]


@contextmanager
def style() -> Iterator[None]:
    """The look of the pictures, within a ``with`` block, or of a function that draws: ``@style()``."""
    import matplotlib
    from cycler import cycler

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
