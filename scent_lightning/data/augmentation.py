"""Random transforms that are a function of the seed, the epoch and the row, whoever makes them and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from scent_lightning.random_state import seed_of

Row = TypeVar("Row")

__all__ = ["at_random"]


def at_random(rows: Iterable[int], make: Callable[[int], Row], seed: int, epoch: int) -> Iterator[Row]:
    """What ``make`` gives for each row, with random numbers that depend on seed, epoch and row alone.

    So the same row is augmented alike in an epoch, whatever the number of processes and loader processes, and wherever
    a run was interrupted. torch's global random state is as before afterwards, as after each row.

    Args:
        rows: dataset indices.
        make: draws from torch's global random state.
        seed: of the run.
        epoch: number of the epoch.
    """
    for row in rows:
        before = torch.get_rng_state()
        try:
            torch.default_generator.manual_seed(seed_of(seed, epoch, row))
            made = make(row)
        finally:
            torch.set_rng_state(before)
        yield made
