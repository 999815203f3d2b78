"""A step of the tables: propose the new ν of a batch, verify that all is finite, write.

This is the one way from samples to a loss, see :func:`entropic_risk`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scent_lightning import distributed
from scent_lightning.duals import one_anchor
from scent_lightning.duals.kappa import Kappa
from scent_lightning.duals.one_anchor import StepOfOne
from scent_lightning.duals.samples import Place, Samples, Side
from scent_lightning.duals.separate import SeparateSamples
from scent_lightning.duals.table import DualTable
from scent_lightning.errors import DualDivergenceError, InputError
from scent_lightning.functional import repeats, wide
from scent_lightning.updates.step_size import Observed

__all__ = ["DualStep", "entropic_risk", "evaluate", "propose", "verify", "write"]


class DualStep(NamedTuple):
    """One step of a table: what :func:`propose` computed and :func:`write` writes.

    The first five describe this process's rows, shape ``(B,)``; the ``all_*`` ones the rows of all processes, in rank
    order. Everything is detached. ``log_mean`` is the log-mean-exp over all samples that the anchor has in the step
    (repeats and other processes included; −inf if there is none), ``nu_before`` the ν that the step started from
    (``log_mean`` where the anchor was never seen), ``unguarded`` the new ν before the guard. ``all_visited`` are the
    flags before the step, ``all_seen`` those after it, or None where every row had a valid sample. ``row_weight`` says
    what each row of this process counts in the loss, so that the mean over processes is the mean over the anchors of
    the step; None where each counts alike. ``kappa`` is there where the table measures it. Where other samples move ν
    than those of the loss, ``log_mean`` is that of each row's samples in the loss, all else is of those that move ν.
    """

    rows: Tensor
    nu: Tensor
    nu_before: Tensor
    log_mean: Tensor
    unguarded: Tensor
    all_rows: Tensor
    all_nu: Tensor
    all_log_mean: Tensor
    all_nu_before: Tensor
    all_visited: Tensor
    all_seen: Tensor | None
    progress: float
    row_weight: Tensor | None = None
    kappa: Kappa | None = None

    @staticmethod
    def of_one(step: StepOfOne) -> DualStep:
        """The general form of a step in plain numbers."""
        numbers = (step.before, step.log_mean, step.unguarded)
        before, log_mean, unguarded = (torch.tensor([number], dtype=torch.float64) for number in numbers)
        nu, visited = torch.tensor([step.nu]), torch.tensor([step.seen])
        everyone = (step.rows, nu, log_mean, before, visited, None)
        return DualStep(step.rows, nu, before, log_mean, unguarded, *everyone, step.progress, kappa=step.kappa)


def entropic_risk(tables: Sequence[DualTable], samples: Samples, index: Tensor, progress: float) -> Tensor:
    """Update ν at ``index`` and return the loss at the new ν.

    An anchor that occurs several times, in this process or in several, is moved once, by all the samples it has, and
    counts once. All tables are verified before one is written.

    Args:
        tables: one for each side of the samples.
        samples: what the anchors are compared with.
        index: dataset indices of the anchors, shape ``(B,)``, any integer dtype and device.
        progress: fraction of the run that is done, in [0, 1], for step sizes that depend on it.

    Returns:
        A scalar; in a distributed run this process's share, of which the mean over processes is the whole.

    Raises:
        TypeError, ValueError, IndexError: an index or samples that do not fit; nothing is written.
        DualDivergenceError: a score that is NaN or +∞, or a ν or objective that is not finite; nothing is written.
        InputError: a table was loaded from a checkpoint of another size, an update needs scores that there are not, or
            samples that move ν are of another number of rows.
    """
    for table in tables:
        table.check_trainable()
        if table.needs_previous:
            _check_previous(table, samples)
    rows, distinct = _checked(tables, samples, index)
    if len(rows) == 1 and one_anchor.applies(tables, samples):
        loss = one_anchor.step(tables[0], samples, rows, progress)
        if loss is not None:
            return loss
    samples = _as_needed(tables, samples)
    with torch.no_grad():
        steps = [
            propose(table, rows, side, progress, samples, i, distinct)
            for i, (table, side) in enumerate(zip(tables, samples.sides(), strict=True))
        ]
    places = [Place(step.nu, step.row_weight, table.update) for table, step in zip(tables, steps, strict=True)]
    loss, objectives = samples.loss(places)
    verify(tables, steps, samples, loss, objectives)
    for table, step in zip(tables, steps, strict=True):
        write(table, step)
    return loss


def evaluate(tables: Sequence[DualTable], samples: Samples, index: Tensor) -> Tensor:
    """The loss with the ν at hand, read only; an anchor never visited takes ν = ℓ.

    Arguments, result and errors as :func:`entropic_risk`, but a non-finite result is returned.
    """
    rows, _ = _checked(tables, samples, index)
    samples = _as_needed(tables, samples)
    with torch.no_grad():
        places = [
            Place(table.read(rows, (side.in_loss or side).log_mean), None, table.update)
            for table, side in zip(tables, samples.sides(), strict=True)
        ]
    return samples.loss(places)[0]


def _checked(tables: Sequence[DualTable], samples: Samples, index: Tensor) -> tuple[Tensor, bool | None]:
    """The rows, and whether none of them repeats; None in a distributed run, where others may have them too."""
    if distributed.is_distributed():
        return distributed.checked(_check, tables, samples, index)[0], None
    return _check(tables, samples, index)


def _check(tables: Sequence[DualTable], samples: Samples, index: Tensor) -> tuple[Tensor, bool]:
    samples.check(tables[0].name)
    checked = tables[0].check_index_of_step(index, len(samples))
    for table in tables[1:]:
        if table.num_anchors != tables[0].num_anchors:
            table.check_index(index, len(samples))
    return checked


def _check_previous(table: DualTable, samples: Samples) -> None:
    if not (isinstance(samples, SeparateSamples) and samples.has_previous):
        raise InputError(
            f"dual variable {table.name!r} with {table.update!r} needs previous_scores, the scores of the same samples "
            "at the weights before the last optimiser step: at_previous_weights works them out"
        )


def _as_needed(tables: Sequence[DualTable], samples: Samples) -> Samples:
    """Samples with their scores, if an update wants more than ℓ."""
    for table in tables:
        if not table.takes_exponentials:
            return samples.dense()
    return samples


def propose(
    table: DualTable,
    index: Tensor,
    side: Side,
    progress: float = 0.0,
    samples: Samples | None = None,
    which: int = 0,
    distinct: bool | None = None,
) -> DualStep:
    r"""Compute the new ν of a batch without writing it.

    An anchor that occurs several times in the step is moved once, by the log-mean-exp over all the samples it has; an
    update that needs the scores moves each occurrence by itself, and the anchor to the mean of the results weighted by
    the number of samples.

    Args:
        table: which.
        index: dataset indices, int64, shape ``(B,)``, already checked.
        side: ℓ of each row, and the numbers of samples.
        progress: fraction of the run that is done, in [0, 1].
        samples: has the scores, for an update that needs them.
        which: of its sides.
        distinct: whether no index of any process repeats, where that is known.

    Returns:
        The step, to be handed to :func:`write`; ``step.nu`` is float32 on the device of ℓ.
    """
    device, home = side.log_mean.device, table.nu.device
    all_rows, all_log_mean, counts, previous, loss_counts, mine = _of_all_processes(index, side, home)
    if previous is not None:
        previous = repeats.merge(all_rows, previous, counts, distinct)[0]
    all_log_mean, groups = repeats.merge(all_rows, all_log_mean, counts, distinct)
    stored, visited = table.look_up(all_rows, home)
    before = torch.where(visited, stored, all_log_mean)
    update = table.update_at(progress, all_rows)
    if update.needs_scores and samples is not None:
        scores, mask = samples.scores(which)
        mine_before = (before if mine is None else before[mine]).float().to(device)
        proposed = wide(update.step_from_scores(mine_before, scores, mask, progress))
        if mine is not None:
            (proposed,), _ = distributed.gather(proposed)
        unguarded = repeats.merge_mean(proposed.to(home), counts, groups)
    elif previous is not None:
        previous = torch.where(visited & ~_were_moved(table, all_rows), previous, all_log_mean)
        unguarded = update.step_with_previous(before, all_log_mean, previous, progress)
    else:
        unguarded = update.step_from_log_mean(before, all_log_mean, progress)
    all_nu = update.guard(unguarded, all_log_mean).float()
    all_seen = None
    if not isinstance(counts, int) or counts == 0:
        seen = all_log_mean != -math.inf
        all_nu = torch.where(seen, all_nu, stored)
        all_seen = visited | seen
    here = [all_nu, before, all_log_mean, unguarded]
    if mine is not None or groups is not None or (side.in_loss is not None and not isinstance(loss_counts, int)):
        here.append(distributed.processes() * repeats.row_weights(loss_counts, groups, len(all_rows)))
    if mine is not None or device != home:
        here = [(values if mine is None else values[mine]).to(device) for values in here]
    nu, nu_before, own_log_mean, own_unguarded, *weight = here
    if side.in_loss is not None:
        own_log_mean = wide(side.in_loss.log_mean)
        if all_seen is not None:
            # A row may have samples in the loss and none that move ν: without a ν it takes ℓ, as in evaluation.
            without = ~(all_seen if mine is None else all_seen[mine]).to(device) & (own_log_mean != -math.inf)
            nu = torch.where(without, own_log_mean.float(), nu)
    everyone = (all_rows, all_nu, all_log_mean, before, visited, all_seen)
    row_weight = weight[0] if weight else None
    kappa = None
    if table.measures_kappa and samples is not None:
        kappa = Kappa.of(samples.moments(which), all_rows, counts, groups is None)
    return DualStep(index, nu, nu_before, own_log_mean, own_unguarded, *everyone, progress, row_weight, kappa)


class _Everyone(NamedTuple):
    """What the rows of all processes have, in rank order and on the table's device; and which are this process's."""

    rows: Tensor
    log_mean: Tensor
    counts: Tensor | int
    previous: Tensor | None
    loss_counts: Tensor | int
    mine: slice | None  # None: all


def _of_all_processes(index: Tensor, side: Side, home: torch.device) -> _Everyone:
    log_mean, counts, previous, in_loss = side
    log_mean, mine = wide(log_mean), None
    loss_counts = counts if in_loss is None else in_loss.counts
    if distributed.is_distributed():
        counts = _for_each(log_mean, counts)
        others = [values for values in (previous, None if in_loss is None else loss_counts) if values is not None]
        columns = (index, log_mean, counts, *(_for_each(log_mean, values) for values in others))
        (index, log_mean, counts, *gathered), mine = distributed.gather(*columns)
        loss_counts = counts if in_loss is None else gathered[-1]
        previous = None if previous is None else gathered[0]
    if index.device != home:
        index = index.to(home)
    if log_mean.device != home:
        log_mean, counts, loss_counts = log_mean.to(home), _to(counts, home), _to(loss_counts, home)
        previous = None if previous is None else previous.to(home)
    return _Everyone(index, log_mean, counts, previous, loss_counts, mine)


def _for_each(rows: Tensor, values: Tensor | int) -> Tensor:
    return torch.full_like(rows, values) if isinstance(values, int) else values


def _to(counts: Tensor | int, device: torch.device) -> Tensor | int:
    return counts if isinstance(counts, int) else counts.to(device)


def _were_moved(table: DualTable, rows: Tensor) -> Tensor:
    """Which anchors have had the change of the last optimiser step already, in an earlier batch of the next one."""
    if not table.moved:
        return torch.zeros_like(rows, dtype=torch.bool)
    return torch.isin(rows, torch.cat(table.moved).to(rows.device))


def verify(
    tables: Sequence[DualTable], steps: Sequence[DualStep], samples: Samples, loss: Tensor, objectives: Sequence[Tensor]
) -> None:
    """Raise unless all of the proposed steps and their loss is finite.

    Args:
        tables: whose steps these are.
        steps: from :func:`propose`.
        samples: what they were made of: names the rows in an error.
        loss: this process's loss, a scalar.
        objectives: the dual objective of each row, shape ``(B,)``, of each table: likewise.

    Raises:
        DualDivergenceError: something is not finite, in any process; nothing is written. It is of the table at fault.
    """
    checked = [loss.detach()]
    if samples.must_be_finite is not None:
        checked.append(_sum(samples.must_be_finite))
    for table, step in zip(tables, steps, strict=True):
        if not table.update.has_exponential_objective:  # which is infinite wherever ν is
            checked.append(_sum(step.all_nu))
    if loss.device.type == "cpu":
        total = sum(value.item() for value in checked)
    else:  # one wait for the device, not three
        total = torch.stack([value.to(loss.device, torch.float32) for value in checked]).sum().item()
    if total == 0.0:
        _warn_if_empty(tables, steps)
    # A sum of finite numbers may overflow, so this is a suspicion; it costs one pass, the certainty several.
    suspicious = not math.isfinite(total)
    if distributed.any_rank(suspicious) if distributed.is_distributed() else suspicious:
        _raise_if_diverged(tables, steps, samples, loss, objectives)


def write(table: DualTable, step: DualStep) -> None:
    """Write a verified step into its table."""
    if table.auto is not None:
        has_samples = None if step.all_seen is None else step.all_log_mean != -math.inf
        table.auto.observe(
            Observed(step.all_rows, step.all_log_mean, step.all_nu, step.all_nu_before, step.all_visited, has_samples)
        )
    if table.moved is not None:
        table.moved.append(step.all_rows if step.all_seen is None else step.all_rows[step.all_log_mean > -math.inf])
    table.nu.index_copy_(0, step.all_rows, step.all_nu)
    if step.all_seen is None:
        table.visited.index_fill_(0, step.all_rows, True)
    else:
        table.visited.index_copy_(0, step.all_rows, step.all_seen)
    # Not by way of nn.Module's __setattr__, which looks for parameters first.
    table.__dict__["last"] = step


def _warn_if_empty(tables: Sequence[DualTable], steps: Sequence[DualStep]) -> None:
    for table, step in zip(tables, steps, strict=True):
        if step.all_seen is not None and not bool((step.all_log_mean > -math.inf).any()):
            table.warn_once(
                "empty",
                f"a batch has no valid sample in any row for dual variable {table.name!r}: its loss is 0, and no ν "
                "moves. This is said once",
            )


def _raise_if_diverged(
    tables: Sequence[DualTable], steps: Sequence[DualStep], samples: Samples, loss: Tensor, objectives: Sequence[Tensor]
) -> None:
    several = len(tables) > 1
    for i, (table, step, objective) in enumerate(zip(tables, steps, objectives, strict=True)):
        seen = objective.detach().to(loss.dtype)  # a wider one may hold what the loss cannot
        _raise_for(table, step, seen, samples.bad_rows(i), seen.mean() if several else loss)
    if several:
        _raise_for(tables[0], steps[0], objectives[0].detach(), None, loss)


def _raise_for(table: DualTable, step: DualStep, objective: Tensor, bad: Tensor | None, loss: Tensor) -> None:
    def rows_of(which: Tensor | None) -> Tensor:
        return step.rows[:0] if which is None else step.rows[which.to(step.rows.device)]

    lost = torch.isnan(step.all_log_mean)
    bad_scores = torch.cat([rows_of(bad), step.all_rows[lost].to(step.rows.device)])
    bad_nu = step.all_rows[~torch.isfinite(step.all_nu)]
    bad_objective = rows_of(~torch.isfinite(objective))
    diverged = bool(bad_scores.numel() or bad_nu.numel() or bad_objective.numel()) or not math.isfinite(loss.item())
    if not (distributed.any_rank(diverged) if distributed.is_distributed() else diverged):
        return
    if bad_scores.numel():
        rows, cause = bad_scores, "the scores are not finite (NaN or +∞)"
        hint = "Lower the learning rate of the model, or look for bad values in the data at that index."
    elif bad_nu.numel():
        rows, cause = bad_nu, "the update gave a value that float32 cannot hold"
        hint = "Lower its step size, or set max_log_weight (2, say)."
    elif diverged and not bad_objective.numel():
        rows, cause = step.rows, "the sum of the objective is too large for float32"
        hint = "Lower the learning rate of the model, or look for scores of such a size in the data."
    else:
        rows, cause = bad_objective, "a weight exp(score − ν) is too large for float32"
        hint = "Raise the step size so that ν can follow, set max_log_weight (2, say), or lower the learning rate."
    if not diverged:
        cause = "non-finite values in another process"
    rows = torch.unique(rows)
    first = int(rows[0]) if rows.numel() else -1
    raise DualDivergenceError(table.name, repr(table.update), rows.numel(), first, cause, hint)


def _sum(values: Tensor) -> Tensor:
    return values.squeeze() if values.numel() == 1 else values.sum()
