"""``scent-lightning sweep``: a grid of fits."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from scent_lightning.commands.compare import show
from scent_lightning.commands.parser import CommandParser
from scent_lightning.configurations import with_configurations
from scent_lightning.errors import InputError
from scent_lightning.runs.grid import Trial, grid_of
from scent_lightning.runs.search import search
from scent_lightning.runs.sweep import Sweep, Work, command_of, in_a_process

__all__ = ["main"]

_DESCRIPTION = """Run a grid of fits in processes, and compare them. An option with several values is an axis of the
grid, one with a single value is for all runs, as in `scent-lightning fit`. A class may bring arguments of its own."""
_USAGE = """scent-lightning sweep CONFIG [CONFIG ...] [--OPTION VALUE [VALUE ...]] [--seeds SEED [SEED ...]]
                             [--jobs N] [--trials N] [--out DIR] [--metric TAG] [--dry_run]"""
_EXAMPLE = """example:
  scent-lightning sweep dro_diabetes --model.tau 0.2 1 5 --dual SCENT SOX:gamma=0.5 --seeds 0 1 2 --jobs 2

The same command goes on where it was stopped: runs that are finished are passed over, those that were interrupted or
have failed go on from their last checkpoint. A run that fails does not stop the others; the exit code is then 1."""


def main(arguments: list[str], work: Work = in_a_process) -> None:
    """Run a grid.

    Args:
        arguments: of the command line.
        work: runs the command line of one fit.

    Raises:
        InputError: a wrong argument, or a folder with another sweep.
        SystemExit: with code 1 where a run has failed, 130 where the user stops it.
    """
    parser = CommandParser("sweep", _DESCRIPTION, _EXAMPLE, _USAGE)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="a run for each (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, which share the cores (1)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the runs (default: sweeps/CONFIG, by the last of them)"
    )
    parser.add_argument("--dry_run", action="store_true", help="print the commands of what is missing, and run nothing")
    parser.add_argument(
        "--metric", metavar="TAG", help="what the table compares by (default: what the task names as its own)"
    )
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="instead of all combinations run N that optuna's TPE sampler chooses, of the values and of ranges such as "
        "1e-4..1; needs the extra 'sweep'",
    )
    # What comes before the first option is for the grid; so is every option that is not of the sweep.
    given, others = parser.parse_known_args(arguments)
    if given.jobs < 1:
        raise InputError(f"jobs must be at least 1, got {given.jobs}")
    if given.trials is not None and given.trials < 1:
        raise InputError(f"trials must be at least 1, got {given.trials}")
    grid = grid_of(others, given.seeds, ranges=given.trials is not None)
    folder = given.out or Path("sweeps") / Path(grid.configs[-1]).stem
    with_configurations([part for config in grid.configs for part in ("--config", config)])  # or say which is not there
    if given.trials is not None:
        if given.dry_run:
            raise InputError("dry_run cannot know what --trials will choose; leave one out")
        print(f"{given.trials} combinations in {folder}, {given.jobs} runs at a time")
        _finish(folder, given.metric, lambda: search(grid, folder, given.trials, given.jobs, given.metric, work, _say))
        return
    sweep = Sweep(folder, grid.trials(), work)
    if given.dry_run:
        for trial in sweep.missing():
            print(f"scent-lightning {shlex.join(command_of(trial, folder))}")
        return
    print(f"{len(sweep.trials)} runs in {folder}, {given.jobs} at a time; TensorBoard: tensorboard --logdir {folder}")
    _finish(folder, given.metric, lambda: sweep.run(given.jobs, _say))


def _say(line: str) -> None:
    print(line, flush=True)


def _finish(folder: Path, metric: str | None, run: Callable[[], list[Trial]]) -> None:
    """Run, print the table, and exit with what became of it."""
    try:
        failed = run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if failed:
        how_many = "1 run has" if len(failed) == 1 else f"{len(failed)} runs have"
        print(f"{how_many} failed; what was printed is in {folder / 'output'}")
    if any(folder.rglob("config.yaml")):
        print()
        for line in show([folder], [metric] if metric else None):
            print(line)
    if failed:
        raise SystemExit(1)
