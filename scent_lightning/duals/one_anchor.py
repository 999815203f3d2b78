"""A step of one row on the CPU in plain numbers: the same as the general way, in a quarter of the calls.

With one anchor (a whole training set, as in robust regression) the numbers are few, and calls are what costs: a step
with loss and gradient takes 0.20 ms so and 0.37 ms in general. Updates bring their own form of it, see
:meth:`~scent_lightning.updates.DualUpdate.step_of_one`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from scent_lightning import distributed
from scent_lightning.duals.kappa import Kappa
from scent_lightning.duals.samples import DenseScores, Samples
from scent_lightning.duals.table import DualTable
from scent_lightning.functional import at_least_float32
from scent_lightning.updates.step_size import Observed

_CPU = torch.device("cpu")


class StepOfOne(NamedTuple):
    """A step in plain numbers, as :class:`~scent_lightning.duals.step.DualStep` describes them.

    Attributes:
        rows: dataset index, int64, shape ``(1,)``.
        nu: the new ν.
        seen: whether the anchor had one.
        before: the ν it had, ℓ where it had none.
        log_mean: ℓ.
        unguarded: the new ν before the guard.
        progress: fraction of the run that is done.
        kappa: κ of the samples, where the table measures it.
    """

    rows: Tensor
    nu: float
    seen: bool
    before: float
    log_mean: float
    unguarded: float
    progress: float
    kappa: Kappa | None = None


def applies(tables: Sequence[DualTable], samples: Samples) -> bool:
    """Whether a batch of one row can go this way."""
    if len(tables) > 1 or type(samples) is not DenseScores:
        return False
    if samples.mask is not None or samples.fixed is not None:
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
    kappa = None
    if table.measures_kappa:
        square = shifted.detach().exp().square_().mean().double()
        kappa = Kappa(square / number**2, shifted.numel() * number**2 / square)
    table.__dict__["last"] = StepOfOne(rows, nu, bool(seen), before, log_mean, unguarded, progress, kappa)
    return loss
