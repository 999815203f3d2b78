"""A step of one row on the CPU in plain numbers: the same as the general way, in a quarter of the calls.

With one anchor (a whole training set, as in robust regression) the numbers are few, and calls are what costs: a step
with loss and gradient takes 0.20 ms so and 0.37 ms in general. Updates bring their own form of it, see
:meth:`~scent_lightning.updates.DualUpdate.step_of_one`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from scent_lightning import distributed
from scent_lightning.duals.samples import DenseScores, Samples
from scent_lightning.duals.table import DualTable
from scent_lightning.functional import at_least_float32
from scent_lightning.updates.step_size import Observed

if TYPE_CHECKING:
    from scent_lightning.duals.step import DualStep

_CPU = torch.device("cpu")


class StepOfOne:
    """A step in plain numbers; :meth:`as_step` makes the general form of it for whoever looks."""

    __slots__ = ("before", "log_mean", "nu", "progress", "rows", "seen", "unguarded")

    def __init__(
        self,
        rows: Tensor,
        nu: float,
        seen: bool,
        before: float,
        log_mean: float,
        unguarded: float,
        progress: float,
    ) -> None:
        self.rows = rows
        self.nu = nu
        self.seen = seen
        self.before = before
        self.log_mean = log_mean
        self.unguarded = unguarded
        self.progress = progress

    def as_step(self) -> DualStep:
        """The general form."""
        from scent_lightning.duals.step import DualStep

        numbers = (self.before, self.log_mean, self.unguarded)
        before, log_mean, unguarded = (torch.tensor([number], dtype=torch.float64) for number in numbers)
        nu, visited = torch.tensor([self.nu]), torch.tensor([self.seen])
        everyone = (self.rows, nu, log_mean, before, visited, None)
        return DualStep(self.rows, nu, before, log_mean, unguarded, *everyone, self.progress)


def applies(tables: Sequence[DualTable], samples: Samples) -> bool:
    """Whether a batch of one row can go this way."""
    if len(tables) > 1 or type(samples) is not DenseScores or samples.mask is not None:
        return False
    table, scores = tables[0], samples.values
    plain = table.has_step_of_one and table.update.has_exponential_objective
    here = scores.shape[1] > 0 and scores.device == table.nu.device == _CPU
    return plain and here and not distributed.is_distributed()


def step(table: DualTable, samples: Samples, rows: Tensor, progress: float) -> Tensor | None:
    """Update ν and return the loss; None where something is not finite: the general way says what.

    Args:
        table: which.
        samples: dense scores, shape ``(1, m)``.
        rows: dataset index, int64, shape ``(1,)``, already checked.
        progress: fraction of the run that is done, in [0, 1].
    """
    values = at_least_float32(cast(DenseScores, samples).values)
    row, largest = int(rows), values.detach().max().item()
    shifted = values - largest
    mean = shifted.exp().mean()
    number = mean.item()
    if not (math.isfinite(largest) and math.isfinite(shifted.detach().sum().item()) and number > 0):
        return None
    log_mean = largest + math.log(number)
    stored, visited = table.nu, table.visited
    seen = visited[row].item()
    before = stored[row].item() if seen else log_mean
    update = table.update_at(progress, rows)
    unguarded = update.step_of_one(before, log_mean, progress)
    if unguarded is None:
        return None
    limit = update.max_log_weight
    guarded = unguarded if limit is None else max(unguarded, log_mean - limit)
    nu = ctypes.c_float(guarded).value
    if not math.isfinite(nu) or largest - nu > 88.0:
        return None
    loss = mean * math.exp(largest - nu) + (nu - 1.0)
    stored.index_fill_(0, rows, nu)
    if not seen:
        visited.index_fill_(0, rows, True)
    if table.auto is not None and not table.auto.observe_one(row, log_mean, nu, before if seen else None):
        log_means, new, old = torch.tensor([[log_mean], [nu], [before]], dtype=torch.float64)
        table.auto.observe(Observed(rows, log_means, new, old, torch.tensor([bool(seen)]), None))
    table.__dict__["last"] = StepOfOne(rows, nu, bool(seen), before, log_mean, unguarded, progress)
    return loss
