"""``scent-lightning compare``: runs side by side."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from scent_lightning.commands.parser import CommandParser
from scent_lightning.errors import InputError
from scent_lightning.runs.comparison import Comparison, compare, write_csv
from scent_lightning.runs.reading import Run, find_runs, read_run

__all__ = ["main", "show"]

_DESCRIPTION = """Put the runs in and below folders side by side. Runs that differ by their seed alone are one row: the
settings that differ between rows, the number of runs, and mean ± standard deviation of the metric at the end and of its
best value. The best row comes first. Read are config.yaml and the TensorBoard log beside it."""
_MOST_NAMED = 10


def main(arguments: list[str]) -> None:
    """Print a table of runs, and write what is asked for.

    Raises:
        InputError: there is no such folder, no run in it, or no such metric.
    """
    parser = CommandParser("compare", _DESCRIPTION)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs, such as lightning_logs or sweeps/first")
    parser.add_argument(
        "--metric",
        nargs="+",
        metavar="TAG",
        help="what to compare by, a table each (default: what the runs' task names)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table to a CSV file as well")
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="draw curves and last values to a file (.png, .pdf or .svg); an SVG file comes beside a PNG",
    )
    parser.add_argument("--all", action="store_true", help="count runs that have not ended, or have failed, as well")
    given = parser.parse_args(arguments)
    if given.figure is not None and given.figure.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise InputError(f"figure must end in .png, .pdf or .svg, got {given.figure}")
    for comparison_line in show(given.folders, given.metric, given.all, given.csv, given.figure):
        print(comparison_line)


def show(
    folders: Iterable[Path],
    metrics: list[str] | None = None,
    count_all: bool = False,
    csv_file: Path | None = None,
    figure: Path | None = None,
) -> Iterable[str]:
    """Compare the runs below some folders, and write the files that are asked for.

    Args:
        folders: of the runs.
        metrics: tags; None: the runs' own.
        count_all: count runs without an end, too.
        csv_file: the table goes there.
        figure: the picture goes there; of a second metric with its name added.

    Yields:
        The lines to print.

    Raises:
        InputError: as :func:`main`.
    """
    folders = list(folders)
    found = find_runs(folders)
    if not found:
        raise InputError(f"there is no run below {_list(folders)}: a run has a config.yaml and a TensorBoard log")
    runs, unreadable = _read(found)
    left_out = [run for run in runs if run.status in ("unfinished", "failed") and not count_all]
    counted = [run for run in runs if run not in left_out]
    comparisons = compare(counted, metrics) if counted else []
    for comparison in comparisons:
        yield f"{comparison}\n"
        if comparison.without:
            yield _count(
                "run has", "runs have", [r.folder for r in comparison.without], f" not logged {comparison.metric}"
            )
    silent = [run.folder for run in counted if metrics is None and run.metric() is None]
    if silent:
        yield _count("run has", "runs have", silent, " logged nothing to compare by")
    for status, what in (("unfinished", "not ended"), ("failed", "failed")):
        some = [run.folder for run in left_out if run.status == status]
        if some:
            yield _count("run has", "runs have", some, f" {what} and {'is' if len(some) == 1 else 'are'} not counted")
    for reason in unreadable:
        yield f"passed over: {reason}"
    if csv_file is not None and comparisons:
        write_csv(csv_file, comparisons)
        yield f"Table: {csv_file}"
    if figure is not None and comparisons:
        yield from _draw(figure, comparisons)


def _read(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    runs, unreadable = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except InputError as error:
            unreadable.append(str(error))
    return runs, unreadable


def _draw(figure: Path, comparisons: list[Comparison]) -> Iterable[str]:
    from scent_lightning.runs.picture import draw  # which takes matplotlib

    for number, comparison in enumerate(comparisons):
        name = comparison.metric.replace("/", "_")
        path = figure if number == 0 else figure.with_stem(f"{figure.stem}_{name}")
        yield f"Figure: {draw(path, comparison)}"


def _count(one: str, several: str, folders: list[Path], rest: str) -> str:
    return f"{len(folders)} {one if len(folders) == 1 else several}{rest}: {_list(folders)}"


def _list(folders: list[Path]) -> str:
    shown = [os.path.relpath(folder) for folder in folders[:_MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(folders) - _MOST_NAMED} more" if len(folders) > _MOST_NAMED else "")
