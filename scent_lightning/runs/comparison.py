"""Runs side by side: those that differ by their seed alone are one row, with mean and standard deviation."""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scent_lightning.errors import InputError
from scent_lightning.runs.reading import Best, Run
from scent_lightning.runs.settings import SEED, Setting

__all__ = ["Comparison", "Group", "compare", "differing", "in_words", "write_csv"]

_MISSING = "–"


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, of different seeds.

    Attributes:
        settings: those that differ from other groups', by name; a setting that these runs lack is not in it.
        runs: of the group.
        last: the metric at the end of each run, shape ``(runs,)``.
        best: the best value of each run, shape ``(runs,)``.
    """

    settings: dict[str, Setting]
    runs: list[Run]
    last: npt.NDArray[np.float64]
    best: npt.NDArray[np.float64]

    @property
    def label(self) -> str:
        """The settings that tell it from the others, on one line."""
        return ", ".join(
            str(value) if name in ("dual", "task", "data") else f"{name} {value}"
            for name, value in self.settings.items()
        )


@dataclass(frozen=True)
class Comparison:
    """Groups of runs by one metric.

    Attributes:
        metric: its tag.
        better: "min" or "max".
        columns: names of the settings that differ.
        groups: the best first.
        without: runs that have not logged the metric.
    """

    metric: str
    better: Best
    columns: list[str]
    groups: list[Group]
    without: list[Run]

    def rows(self) -> list[list[str]]:
        """The table as texts, its head first."""
        head = [*self.columns, "runs", f"{self.metric} last", f"best ({self.better})"]
        rows = [
            [
                *(str(group.settings.get(name, _MISSING)) for name in self.columns),
                str(len(group.runs)),
                in_words(group.last),
                in_words(group.best),
            ]
            for group in self.groups
        ]
        return [head, *rows]

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        left = len(self.columns)
        lines = [
            "  ".join(
                text.ljust(width) if column < left else text.rjust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])


def compare(runs: Sequence[Run], metrics: Sequence[str] | None = None) -> list[Comparison]:
    """Compare runs.

    Args:
        runs: any.
        metrics: tags of the metrics, one comparison each; None: those that the runs name as their own.

    Returns:
        One for each metric; where runs of several tasks name metrics of their own, each has those runs.

    Raises:
        InputError: no run has logged a metric that is asked for.
    """
    if metrics is None:
        own = {run.folder: run.metric() for run in runs}
        names = dict.fromkeys(metric[0] for metric in own.values() if metric is not None)
        chosen = [(name, [run for run in runs if (own[run.folder] or ("",))[0] == name]) for name in names]
    else:
        chosen = [(name, list(runs)) for name in dict.fromkeys(metrics)]
    return [_comparison(name, of_metric) for name, of_metric in chosen]


def _comparison(metric: str, runs: list[Run]) -> Comparison:
    have = [run for run in runs if metric in run.curves]
    if not have:
        logged = sorted({tag for run in runs for tag in run.curves})
        close = difflib.get_close_matches(metric, logged, n=5, cutoff=0.4) or [
            tag for tag in logged if tag.startswith("val/")
        ]
        raise InputError(
            f"metric {metric} is not in the log of any run; there is {', '.join(close or logged[:20]) or 'nothing'}"
        )
    better = have[0].best_of(metric)
    columns = differing(run.settings for run in have)
    by_settings: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in have:
        key = tuple(sorted((name, repr(value)) for name, value in run.settings.items() if name != SEED))
        by_settings.setdefault(key, []).append(run)
    groups = [_group(of_group, columns, metric, better) for of_group in by_settings.values()]
    sign = 1.0 if better == "min" else -1.0
    groups.sort(key=lambda group: _last_if_nan(sign * float(group.last.mean())))
    return Comparison(metric, better, columns, groups, [run for run in runs if metric not in run.curves])


def _group(runs: list[Run], columns: list[str], metric: str, better: Best) -> Group:
    settings = {name: runs[0].settings[name] for name in columns if name in runs[0].settings}
    values = [run.curves[metric][1] for run in runs]
    return Group(
        settings, runs, np.array([each[-1] for each in values]), np.array([_best(each, better) for each in values])
    )


def _best(values: npt.NDArray[np.float64], better: Best) -> float:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return math.nan
    return float(finite.min() if better == "min" else finite.max())


def _last_if_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value


def differing(settings: Iterable[dict[str, Setting]]) -> list[str]:
    """Names of the settings, other than the seed, that are not the same for all runs; classes come first."""
    every = list(settings)
    names = dict.fromkeys(name for each in every for name in each if name != SEED)
    found = [name for name in names if len({repr(each.get(name)) for each in every}) > 1]
    first = [name for name in ("task", "data", "dual") if name in found]
    return first + [name for name in found if name not in first]


def in_words(values: npt.NDArray[np.float64]) -> str:
    """Mean and standard deviation (of a sample), as far as the deviation leaves digits that say something.

    Example:
        >>> import numpy as np
        >>> in_words(np.array([0.12345, 0.12401, 0.12502]))
        '0.12416 ± 0.00080'
        >>> in_words(np.array([12.5]))
        '12.5'
    """
    mean = float(values.mean())
    if len(values) < 2 or not math.isfinite(mean):
        return f"{mean:.5g}"
    deviation = float(values.std(ddof=1))
    if deviation == 0:
        return f"{mean:.5g} ± 0"
    digits = max(0, 1 - math.floor(math.log10(deviation)))
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}" if digits < 10 else f"{mean:.5g} ± {deviation:.1e}"


def write_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write a row for each group: its settings, the metric, means, deviations, seeds and folders.

    Args:
        path: the file; its folder is made where it is missing.
        comparisons: all of them go into the one file.
    """
    columns = list(dict.fromkeys(name for each in comparisons for name in each.columns))
    statistics = ["last_mean", "last_std", "best_mean", "best_std"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, "metric", "runs", *statistics, "seeds", "folders"])
        writer.writeheader()
        for comparison in comparisons:
            for group in comparison.groups:
                writer.writerow(_csv_row(comparison.metric, group))


def _csv_row(metric: str, group: Group) -> dict[str, Any]:
    of_seeds = {
        f"{name}_{what}": f"{number:.9g}"
        for name, values in (("last", group.last), ("best", group.best))
        for what, number in (("mean", values.mean()), ("std", values.std(ddof=1) if len(values) > 1 else math.nan))
    }
    return {
        **group.settings,
        "metric": metric,
        "runs": len(group.runs),
        **of_seeds,
        "seeds": " ".join(str(run.settings.get(SEED, _MISSING)) for run in group.runs),
        "folders": " ".join(str(run.folder) for run in group.runs),
    }
