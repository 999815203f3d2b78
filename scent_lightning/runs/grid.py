"""A grid of fits: which runs there are, what each is called, and its command line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scent_lightning.errors import InputError
from scent_lightning.runs.folders import name_of_settings

__all__ = ["RANGE", "Grid", "Trial", "grid_of"]

RANGE = re.compile(r"([-+.\deE]*\d)\.\.([-+.\deE]*\d)")

_OF_CLASSES = ("--dual", "--model", "--data")
# Of these the sweep itself takes care.
_NOT_IN_A_SWEEP = {
    "--name": "each run has the name of its settings",
    "--ckpt_path": "an interrupted run is resumed by itself",
    "--trainer.default_root_dir": "the folder is --out",
    "--trainer.logger": "runs are compared by their TensorBoard logs",
    "--seed_everything": "the seeds are --seeds",
}


@dataclass(frozen=True)
class Trial:
    """One run of a grid.

    Attributes:
        name: by the settings that differ, the seed last.
        arguments: of ``scent-lightning fit``, without those of the place.
    """

    name: str
    arguments: list[str]


@dataclass(frozen=True)
class Grid:
    """What a sweep is to run.

    Attributes:
        configs: ``--config`` of every run, in their order.
        axes: option → its values, for the options with several.
        fixed: further arguments of every run.
        seeds: one run each.
    """

    configs: list[str]
    axes: dict[str, list[str]]
    fixed: list[str]
    seeds: list[int]

    def trials(self) -> Iterator[Trial]:
        """All combinations of the values and seeds, the seeds innermost."""
        common = [part for config in self.configs for part in ("--config", config)]
        for values in itertools.product(*self.axes.values()):
            chosen = [(option, _given(option, value)) for option, value in zip(self.axes, values, strict=True)]
            # A class goes before the arguments that are for it.
            classes = [part for option, parts in chosen if option in _OF_CLASSES for part in parts]
            others = [part for option, parts in chosen if option not in _OF_CLASSES for part in parts]
            for seed in self.seeds:
                of_seed = ["--seed_everything", str(seed)]
                name = name_of_settings([part for _, parts in chosen for part in parts] + of_seed)
                yield Trial(name, [*common, *classes, *self.fixed, *others, *of_seed])


def grid_of(arguments: Sequence[str], seeds: Sequence[int], ranges: bool = False) -> Grid:
    """The grid that a command line asks for.

    Args:
        arguments: ``CONFIG …`` or ``--config CONFIG``, options with one value (for all runs) and with several (a run
            each). A class may bring arguments of its own: ``SOX:gamma=0.5,schedule=cosine``.
        seeds: one run each for every combination.
        ranges: whether a value such as 1e-4..1 is an axis, too, of all numbers between.

    Raises:
        InputError: there is no configuration, a value twice, or an option that the sweep itself takes care of.
    """
    configs: list[str] = []
    axes: dict[str, list[str]] = {}
    fixed: list[str] = []
    for option, values in _options(arguments):
        if option in (None, "--config", "-c"):
            configs += values
            continue
        if option in _NOT_IN_A_SWEEP or option.startswith("--trainer.logger."):
            raise InputError(f"{option} cannot be set in a sweep: {_NOT_IN_A_SWEEP.get(option, 'see --help')}")
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise InputError(f"{option} has the value {twice} more than once")
        if option in axes:
            raise InputError(f"{option} is given twice; give its values in one place: {option} VALUE VALUE")
        if len(values) > 1 or (ranges and any(map(RANGE.fullmatch, values))):
            axes[option] = values
        else:
            fixed += _given(option, values[0]) if values else [option]
    if not configs:
        raise InputError("a sweep needs a configuration: scent-lightning sweep CONFIG --model.tau 0.2 1 5")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"seeds must be different, got {' '.join(map(str, seeds))}")
    grid = Grid(configs, axes, fixed, list(seeds))
    names = [trial.name for trial in grid.trials()]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"two runs of the sweep would have the same name, {twice}: their values read alike")
    return grid


def _options(arguments: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Each option with what follows it up to the next; None for what comes before the first."""
    option: str | None = None
    values: list[str] = []
    for argument in arguments:
        if not argument.startswith("-") or _is_number(argument):
            values.append(argument)
            continue
        if option is not None or values:
            yield option, values
        option, equals, value = argument.partition("=")
        values = [value] if equals else []
    if option is not None or values:
        yield option, values


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|-inf", text) is not None


def _given(option: str, value: str) -> list[str]:
    """An option with a value as ``fit`` takes it."""
    name, colon, inside = value.partition(":")
    if option not in _OF_CLASSES or not colon:
        return [option, value]
    parts = [option, name]
    for argument in inside.split(","):
        key, equals, of_key = argument.partition("=")
        if not equals or not key:
            raise InputError(f"{option} {value} must be like SOX:gamma=0.5,schedule=cosine")
        parts += [f"{option}.{key}", of_key]
    return parts
