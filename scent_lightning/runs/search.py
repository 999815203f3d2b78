"""A sweep whose combinations a sampler of optuna chooses, by what the runs before have reached."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scent_lightning.errors import InputError
from scent_lightning.optional import optional_module
from scent_lightning.runs.folders import LOGS
from scent_lightning.runs.grid import RANGE, Grid, Trial
from scent_lightning.runs.reading import read_run
from scent_lightning.runs.sweep import Sweep, Work

__all__ = ["search"]

_JOURNAL = "optuna.log"
_RAN = "ran"


def search(
    grid: Grid, folder: Path, trials: int, jobs: int, metric: str | None, work: Work, say: Callable[[str], Any]
) -> list[Trial]:
    """Run combinations that optuna's TPE sampler asks for; what an earlier call has run counts.

    Args:
        grid: its axes are what is chosen from: values, or a range ``LOW..HIGH``, on a logarithmic scale where it goes
            over a power of ten of positive numbers, and of integers where both are.
        folder: for the runs and for optuna's journal.
        trials: how many combinations in all, each with every seed.
        jobs: how many runs at a time.
        metric: tag of what is optimised; None: what the runs name as their own.
        work: runs the command line of a fit.
        say: takes a line about each run.

    Returns:
        The runs that have failed.

    Raises:
        InputError: optuna is not installed, there is nothing to choose from, or the metric is not in the runs' logs.
    """
    optuna = optional_module("optuna", "--trials")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if not grid.axes:
        raise InputError(
            "--trials needs an option with several values, or with a range such as 1e-4..1, to choose from"
        )
    folder.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(folder / _JOURNAL))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True)
    # Another seed than that of an earlier call, which would draw the same again.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    states = optuna.trial.TrialState
    # What was begun when an earlier call was stopped comes first, with its values, and so goes on with its runs.
    for begun in study.get_trials(states=[states.RUNNING]):
        study.tell(begun.number, state=states.FAIL)
        if begun.params:
            study.enqueue_trial(begun.params)
    failed: list[Trial] = []
    while missing := trials - sum(_RAN in trial.user_attrs for trial in study.trials):
        asked = [study.ask() for _ in range(min(jobs, missing))]
        chosen = [list(_combination(grid, trial).trials()) for trial in asked]
        different = dict.fromkeys((run.name, tuple(run.arguments)) for runs in chosen for run in runs)
        batch = [Trial(name, list(arguments)) for name, arguments in different]
        lost = Sweep(folder, batch, work).run(jobs, say)
        failed += lost
        for trial, runs in zip(asked, chosen, strict=True):
            trial.set_user_attr(_RAN, True)
            if any(run in lost for run in runs):
                study.tell(trial, state=states.FAIL)
            else:
                study.tell(trial, _reached(folder, runs, metric))
    return failed


def _combination(grid: Grid, trial: Any) -> Grid:
    """The grid of one value for each option, those that a trial has."""
    axes = {option: [_suggested(trial, option, values)] for option, values in grid.axes.items()}
    return Grid(grid.configs, axes, grid.fixed, grid.seeds)


def _suggested(trial: Any, option: str, values: list[str]) -> str:
    found = RANGE.fullmatch(values[0]) if len(values) == 1 else None
    if found is None:
        return str(trial.suggest_categorical(option, values))
    try:
        low, high = float(found[1]), float(found[2])
    except ValueError:
        low = high = math.nan
    if not low < high:
        raise InputError(f"{option} {values[0]} must be a range of numbers, the smaller first, such as 1e-4..1")
    is_log = low > 0 and high / low >= 10
    if all(re.fullmatch(r"-?\d+", each) for each in found.groups()):
        return str(trial.suggest_int(option, int(low), int(high), log=is_log))
    return f"{trial.suggest_float(option, low, high, log=is_log):.4g}"


def _reached(folder: Path, runs: list[Trial], metric: str | None) -> float:
    """The mean over seeds of the metric at the end, less being better."""
    values = []
    for each in runs:
        newest = max((folder / LOGS / each.name).glob("version_*"), key=lambda path: int(path.name.partition("_")[2]))
        run = read_run(newest)
        tag = metric or (run.metric() or ("",))[0]
        if tag not in run.curves:
            raise InputError(f"metric {tag or 'of the runs'} is not in the log of {newest}; --metric names one that is")
        sign = 1.0 if run.best_of(tag) == "min" else -1.0
        values.append(sign * float(run.curves[tag][1][-1]))
    return sum(values) / len(values)
