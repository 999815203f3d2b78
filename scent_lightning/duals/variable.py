"""The table of dual variables: one float32 ν and one visited flag per anchor, addressed by dataset index."""

from __future__ import annotations

import copy
import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from scent_lightning import functional
from scent_lightning.compiling import outside_graphs
from scent_lightning.duals import exchange
from scent_lightning.duals.auto_step_size import AutoStepSize
from scent_lightning.duals.updates import DualUpdate
from scent_lightning.errors import DualDivergenceError, InputError
from scent_lightning.functional import Exponentials, wide

__all__ = ["DualStep", "DualVariable"]

Placement = Literal["module", "cpu"]
IfChanged = Literal["error", "grow", "reset"]
_CPU = torch.device("cpu")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class DualStep(NamedTuple):
    """One step of the table: what :meth:`DualVariable.propose` computed and :meth:`DualVariable.commit` writes.

    The first five describe this process's rows, shape ``(B,)``; the ``all_*`` ones the rows of all processes, in rank
    order. Everything is detached. ``log_mean`` is the log-mean-exp over all samples that the anchor has in the step
    (repeats and other processes included; −inf if there is none), ``nu_before`` the ν that the step started from
    (``log_mean`` where the anchor was never seen), ``unguarded`` the new ν before the guard. ``all_visited`` are the
    flags before the step, ``all_seen`` those after it, or None where every row had a valid sample. ``row_weight`` says
    what each row of this process counts in the loss, so that the mean over processes is the mean over the anchors of
    the step; None where each counts alike.
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


# The arguments of DualVariable.commit: a step, its loss, the objective of each row, and the scores.
Evidence: TypeAlias = tuple[DualStep, Tensor, Tensor | None, Tensor | None]


class DualVariable(nn.Module):
    """A table of ν with the update that moves it.

    ``torch.compile`` leaves the table out of its graphs: what a step does depends on the numbers in it.

    ν is float32 whatever the module is cast to. Both tables move with the module and are in its state dict, but they
    are no buffers: an average of the weights (:class:`torch.optim.swa_utils.AveragedModel` and the callbacks built on
    it) leaves them alone, and its copy of the module reads the tables of the one that is trained. A row is written only
    through :meth:`commit` (or :meth:`scatter`).

    Args:
        num_anchors: number of rows n, the length of the training set.
        update: the dual update, as an object or in the form of :meth:`DualUpdate.config`.
        name: how errors call this dual.
        placement: "module" keeps the table on the module's device; "cpu" keeps it in main memory (5 bytes an anchor)
            and moves only the batch's rows.

    Attributes:
        nu: shape ``(n,)``, float32; 0 where never visited.
        visited: shape ``(n,)``, bool.
        update: the :class:`DualUpdate`.
        if_changed: what becomes of a state of another number of anchors when it is loaded: with "error" it can be
            evaluated with but not trained on; "grow" keeps the first rows' ν where there are more rows now, and the
            others start unvisited; "reset" starts all rows unvisited.

    Raises:
        InputError: ``num_anchors`` is not a positive integer, or ``placement`` is unknown.

    Example:
        >>> import torch
        >>> from scent_lightning.duals import SCENT, DualVariable
        >>> variable = DualVariable(num_anchors=10, update=SCENT(log_alpha=0.0))
        >>> loss = variable.entropic_risk(torch.zeros(2, 5), torch.tensor([3, 7]))
        >>> variable.visited.nonzero().flatten().tolist()
        [3, 7]
    """

    def __init__(
        self,
        num_anchors: int,
        update: DualUpdate | dict[str, Any],
        name: str = "nu",
        placement: Placement = "module",
    ) -> None:
        super().__init__()
        if isinstance(num_anchors, bool) or not isinstance(num_anchors, int) or num_anchors < 1:
            raise InputError(f"num_anchors of dual variable {name!r} must be a positive integer, got {num_anchors!r}")
        if placement not in ("module", "cpu"):
            raise InputError(f"placement of dual variable {name!r} must be 'module' or 'cpu', got {placement!r}")
        self.name = name
        self.placement = placement
        self._shared = False
        self._last: DualStep | None = None
        self._last_of_one: tuple[Any, ...] | None = None
        self.if_changed: IfChanged = "error"
        # Set when a state of another size was loaded: reading still works, training does not.
        self.loaded_anchors: int | None = None
        self._warned: set[str] = set()
        zeros = _zeros_in_main_memory if placement == "cpu" else torch.zeros
        self._table = _Table(zeros(num_anchors, dtype=torch.float32), zeros(num_anchors, dtype=torch.bool))
        self.use(update)

    @property
    def nu(self) -> Tensor:
        """ν of every anchor, shape ``(n,)``, float32; 0 where never visited."""
        return self._table.nu

    @nu.setter
    def nu(self, values: Tensor) -> None:
        self._table.nu = values

    @property
    def visited(self) -> Tensor:
        """Which anchors were visited, shape ``(n,)``, bool."""
        return self._table.visited

    @visited.setter
    def visited(self, flags: Tensor) -> None:
        self._table.visited = flags

    @property
    def is_shared(self) -> bool:
        """Whether this belongs to averaged weights, which read the table of the model that is trained."""
        return self._shared

    def share(self) -> None:
        """Use the table and the rule of the variable that this one was copied from, if there still is one."""
        if self._table.copied_from is not None and (table := self._table.copied_from()) is not None:
            self._table, self.auto, self._shared = table, table.auto, True

    @property
    def num_anchors(self) -> int:
        """Number of rows n."""
        return self.nu.shape[0]

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.num_anchors}, update={self.update!r}, placement={self.placement!r}"

    # ---------------------------------------------------------------- access

    def use(self, update: DualUpdate | dict[str, Any]) -> None:
        """Move ν by another update from now on; ν stays.

        Args:
            update: as an object or in the form of :meth:`DualUpdate.config`.

        Raises:
            InputError: neither of them.
        """
        if isinstance(update, dict):
            update = DualUpdate.from_config(update)
        if not isinstance(update, DualUpdate):
            raise InputError(f"update of dual variable {self.name!r} must be a DualUpdate, got {type(update).__name__}")
        self.update = update
        self.auto = self._table.auto = AutoStepSize(self.num_anchors) if update.is_auto else None
        # The same class, which may say more than SCENT does, with a number in place of "auto".
        found: Any = copy.copy(update) if update.is_auto else None
        if found is not None:
            found.log_alpha, found.schedule = 0.0, "constant"
        self._found = found
        self._steps_of_one = update.has_step_of_one

    def update_at(self, progress: float) -> DualUpdate:
        """The update as it is at ``progress``: ``update`` itself, or a copy with the step size found so far."""
        if self.auto is None or self._found is None:
            return self.update
        self.auto.turn(progress, lambda: int(self.visited.sum()))
        self._found.log_alpha = self.auto.log_alpha(progress)
        limit = self.update.max_log_weight
        self._found.max_log_weight = self.auto.max_log_weight if limit is None else limit
        return cast(DualUpdate, self._found)

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """ν (float32) and visited flags (bool) at ``index``, on the index's device.

        Args:
            index: dataset indices, shape ``(B,)``, any integer dtype.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`check_index`.
        """
        return self._read(self.check_index(index), index.device)

    def _read(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        nu, visited = self.nu, self.visited
        if nu.device != device or index.device != device:
            index = index.to(nu.device)
            return nu.index_select(0, index).to(device), visited.index_select(0, index).to(device)
        return nu.index_select(0, index), visited.index_select(0, index)

    def read(self, rows: Tensor, log_mean: Tensor) -> Tensor:
        """ν where an anchor was visited and ℓ where it was not, float32, on the device of ``log_mean``.

        Args:
            rows: dataset indices, int64, shape ``(B,)``, already checked.
            log_mean: ℓ of each row, shape ``(B,)``.
        """
        nu, visited = self._read(rows, log_mean.device)
        return torch.where(visited, nu, log_mean.float())

    def scatter(self, index: Tensor, nu: Tensor) -> None:
        """Write ν at ``index`` and mark those anchors visited.

        Args:
            index: dataset indices, shape ``(B,)``, any integer dtype.
            nu: shape ``(B,)``; where an index repeats, its values must be equal.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`check_index`.
        """
        rows = self.check_index(index, nu.shape[0]).to(self.nu.device)
        self.nu[rows] = nu.detach().to(self.nu)
        self.visited[rows] = True

    def reset(self) -> None:
        """Forget every ν: all anchors count as never visited."""
        self.nu.zero_()
        self.visited.zero_()
        if self.auto is not None:
            self.auto.reset()
        self._last = self._last_of_one = None
        self.loaded_anchors = None

    def grow(self, num_anchors: int) -> None:
        """Make room for rows that were appended to the data set; they start unvisited, the others keep their ν.

        Args:
            num_anchors: new number of rows n, at least the old one.

        Raises:
            InputError: fewer than there are, or no integer.
        """
        if isinstance(num_anchors, bool) or not isinstance(num_anchors, int) or num_anchors < self.num_anchors:
            raise InputError(
                f"num_anchors of dual variable {self.name!r} must be an integer of at least the {self.num_anchors} "
                f"that it has, got {num_anchors!r}"
            )
        more = num_anchors - self.num_anchors
        if self.auto is not None:
            self.auto.grow(num_anchors)
        self.nu, self.visited = (torch.cat([old, old.new_zeros(more)]) for old in (self.nu, self.visited))
        self._last = self._last_of_one = None

    def check_index(self, index: Tensor, rows: int | None = None) -> Tensor:
        """Validate dataset indices and return them as int64.

        Args:
            index: what came.
            rows: the length it must have, or None for any.

        Raises:
            TypeError: not a tensor of integers.
            ValueError: not one-dimensional, or not ``rows`` long.
            IndexError: an index negative or not below the number of anchors.
        """
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        if kind not in _INTEGERS:
            raise TypeError(f"index of dual variable {self.name!r} must be a tensor of integers, got {kind}")
        if index.ndim != 1 or (rows is not None and index.shape[0] != rows):
            expected = "(B,)" if rows is None else f"({rows},), one index for each row of the scores"
            got = tuple(index.shape)
            raise ValueError(f"index of dual variable {self.name!r} must have shape {expected}, got {got}")
        if index.numel():
            if index.shape[0] <= exchange.FEW and index.device.type == "cpu":
                numbers = index.tolist()
                low, high = min(numbers), max(numbers)
            else:
                low, high = torch.stack(torch.aminmax(index)).tolist()
            if low < 0 or high >= self.num_anchors:
                raise IndexError(
                    f"index {low if low < 0 else high} of dual variable {self.name!r} is out of range: valid are 0 to "
                    f"{self.num_anchors - 1} ({self.num_anchors} anchors)"
                )
        return index.long()

    def check_trainable(self) -> None:
        """Raise if the table that was loaded belongs to a training set of another size.

        Raises:
            InputError: with both sizes and the way out.
        """
        if self.loaded_anchors is not None:
            raise InputError(
                f"cannot train dual variable {self.name!r}: the checkpoint holds {self.loaded_anchors} anchors and "
                f"this model has {self.num_anchors}; train on the data set of the checkpoint, or set if_changed_data "
                '(--if_changed_data) to "grow" if rows were appended to it, or to "reset" to start every ν anew'
            )

    # ---------------------------------------------------------------- training

    @outside_graphs
    def entropic_risk(
        self, scores: Tensor, index: Tensor, mask: Tensor | None = None, progress: float | None = None
    ) -> Tensor:
        """Update ν at ``index`` and return the mean dual objective over the anchors that have a valid sample.

        An anchor that occurs several times counts once, by the mean over all its samples. A score of −∞ is a sample of
        weight 0; a row of nothing else has no sample.

        Args:
            scores: shape ``(B, m)``, any floating dtype; carries the gradient.
            index: dataset indices of the rows, shape ``(B,)``, any integer dtype and device.
            mask: bool, shape ``(B, m)``, True where a sample counts; None means all do.
            progress: fraction of the run that is done, in [0, 1], for the schedule; None is 0, with one warning if
                the step size depends on it.

        Returns:
            A scalar in float32 (float64 for float64 scores); 0, with a zero gradient, if no row has a valid sample. In
            a distributed run it is this process's share, of which the mean over processes is the whole.

        Raises:
            TypeError, ValueError, IndexError: an index, scores or mask that does not fit; nothing is written.
            DualDivergenceError: a score that is NaN or +∞, or a ν or objective that is not finite; nothing is written.
        """
        self.check_trainable()
        if progress is None:
            progress = self.unknown_progress()
        if exchange.distributed():
            rows = exchange.checked(self._check_batch, scores, index, mask)
        else:
            rows = self._check_batch(scores, index, mask)
            if (
                mask is None
                and scores.shape[0] == 1
                and scores.shape[1] > 0
                and scores.device == self.nu.device == _CPU
            ):
                loss = self._one_anchor(scores, rows, progress)
                if loss is not None:
                    return loss
        loss, evidence = self._prepare(scores, rows, mask, progress)
        self.commit(*evidence)
        return loss

    @outside_graphs
    def prepare(
        self, scores: Tensor, index: Tensor, mask: Tensor | None = None, progress: float | None = None
    ) -> tuple[Tensor, Evidence]:
        """:meth:`entropic_risk` with nothing written yet, for a loss over several tables.

        Arguments and errors as :meth:`entropic_risk`.

        Returns:
            What it returns; and the arguments of :meth:`verify` and :meth:`commit`, which raise if it is not finite.
        """
        self.check_trainable()
        if progress is None:
            progress = self.unknown_progress()
        check: Callable[..., Tensor] = self._check_batch
        many = exchange.distributed()
        rows = exchange.checked(check, scores, index, mask) if many else check(scores, index, mask)
        return self._prepare(scores, rows, mask, progress)

    def _prepare(self, scores: Tensor, rows: Tensor, mask: Tensor | None, progress: float) -> tuple[Tensor, Evidence]:
        with torch.no_grad():
            counts, may_be_empty = count_valid(scores, mask)
            largest, shifted = functional.shift_by_largest(scores, mask)
            if functional.may_be_infinite(largest):
                counts, may_be_empty = torch.where(largest == -math.inf, 0, counts), True
            exponentials = shifted.exp()
            mean = functional.mean_over(exponentials, counts)
        # The gradient of the exponential objective is known in closed form: one node of the graph, and no graph before.
        samples = Exponentials(
            largest,
            shifted,
            mean,
            counts,
            may_be_empty,
            lambda loss, weight: functional.with_gradient(scores, loss, exponentials, weight),
        )
        update, step_scores = self.update, None
        if update.needs_scores:
            step_scores = partial(self._step_scores, scores.detach(), mask, progress)
        if update.has_exponential_objective:
            return self._prepare_from(samples, rows, progress, step_scores)
        with torch.no_grad():
            step = self._propose_from(samples, rows, progress, step_scores)
        objective = update.objective(step.nu, scores, mask)
        loss = _mean(objective, step, counts)
        return loss, (step, loss, objective, shifted)

    @outside_graphs
    def entropic_risk_from(self, samples: Exponentials, index: Tensor, progress: float | None = None) -> Tensor:
        """:meth:`entropic_risk` for a module that takes the exponentials of its scores itself.

        Args:
            samples: what it found.
            index: dataset indices of the rows, shape ``(B,)``, any integer dtype and device.
            progress: as for :meth:`entropic_risk`.

        Returns:
            A scalar, and errors, as :meth:`entropic_risk`; also

        Raises:
            InputError: the update is not one that the log-mean-exp is enough for: see :attr:`takes_exponentials`.
        """
        if not self.takes_exponentials:
            raise InputError(f"{self.update!r} of dual variable {self.name!r} needs the scores themselves")
        self.check_trainable()
        if progress is None:
            progress = self.unknown_progress()
        size = samples.largest.shape[0]
        if exchange.distributed():
            rows = exchange.checked(self.check_index, index, size)
        else:
            rows = self.check_index(index, size)
        loss, evidence = self._prepare_from(samples, rows, progress)
        self.commit(*evidence)
        return loss

    @property
    def takes_exponentials(self) -> bool:
        """Whether ν and the objective follow from the log-mean-exp of the scores: all updates but softplus ASGD."""
        return self.update.has_exponential_objective and not self.update.needs_scores

    def _propose_from(
        self,
        samples: Exponentials,
        rows: Tensor,
        progress: float,
        step_scores: Callable[[Tensor], Tensor] | None,
    ) -> DualStep:
        log_mean = functional.log_mean_exp_from(samples.largest, samples.mean)
        return self.propose(rows, log_mean, samples.counts, progress, step_scores)

    def _prepare_from(
        self,
        samples: Exponentials,
        rows: Tensor,
        progress: float,
        step_scores: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Evidence]:
        """The mean exponential objective at the new ν."""
        counts = samples.counts
        with torch.no_grad():
            step = self._propose_from(samples, rows, progress, step_scores)
            objective, weight = functional.exponential_objective_from(
                step.nu, samples.largest, samples.mean, samples.may_be_empty
            )
            loss = _mean(objective, step, counts)
            number = max(counts, 1) if isinstance(counts, int) else counts.clamp(min=1)
            if step.row_weight is None:
                weight = weight / (valid_rows(objective, counts) * number)
            else:
                weight = weight * step.row_weight.to(weight.dtype) / number
        return samples.with_gradient(loss, weight), (step, loss, objective, samples.shifted)

    def _one_anchor(self, scores: Tensor, rows: Tensor, progress: float) -> Tensor | None:
        """:meth:`entropic_risk` of one row on the CPU in plain numbers: the same, in a quarter of the calls.

        None where the update has no such form, or where something is not finite: the general way says what.
        """
        if not (self._steps_of_one and self.update.has_exponential_objective):
            return None
        values = functional.at_least_float32(scores)
        row, largest = int(rows), values.detach().max().item()
        shifted = values - largest
        mean = shifted.exp().mean()
        number = mean.item()
        if not (math.isfinite(largest) and math.isfinite(shifted.detach().sum().item()) and number > 0):
            return None
        log_mean = largest + math.log(number)
        table, visited = self.nu, self.visited
        seen = visited[row].item()
        before = table[row].item() if seen else log_mean
        update = self.update_at(progress)
        unguarded = update.step_of_one(before, log_mean, progress)
        if unguarded is None:
            return None
        limit = update.max_log_weight
        guarded = unguarded if limit is None else max(unguarded, log_mean - limit)
        nu = ctypes.c_float(guarded).value
        if not math.isfinite(nu) or largest - nu > 88.0:
            return None
        loss = mean * math.exp(largest - nu) + (nu - 1.0)
        table.index_fill_(0, rows, nu)
        if not seen:
            visited.index_fill_(0, rows, True)
        if self.auto is not None:
            if self.num_anchors == 1:
                self.auto.observe_one(log_mean, before if seen else None)
            else:
                log_means, new, old = torch.tensor([[log_mean], [nu], [before]], dtype=torch.float64)
                self.auto.observe(rows, log_means, new, old, torch.tensor([bool(seen)]), None)
        self.__dict__["_last_of_one"] = (rows, nu, seen, before, log_mean, unguarded, progress)
        return loss

    @property
    def last_step(self) -> DualStep | None:
        """The latest committed :class:`DualStep`, for monitors; None before the first."""
        if self._last_of_one is not None:
            rows, nu, seen, *numbers, progress = self._last_of_one
            before, log_mean, unguarded = (torch.tensor([number], dtype=torch.float64) for number in numbers)
            new, visited = torch.tensor([nu]), torch.tensor([bool(seen)])
            return DualStep(
                rows, new, before, log_mean, unguarded, rows, new, log_mean, before, visited, None, progress
            )
        return self._last

    def _step_scores(self, scores: Tensor, mask: Tensor | None, progress: float, nu: Tensor) -> Tensor:
        update = self.update
        limit, update.max_log_weight = update.max_log_weight, None  # the guard is the table's: see propose
        try:
            return update.step(nu, scores, mask, progress)
        finally:
            update.max_log_weight = limit

    def unknown_progress(self) -> float:
        """The progress where nobody says it: 0, with one warning if the step size depends on it."""
        if self.update.needs_progress:
            self._warn_once(
                "progress",
                f"the step size of dual variable {self.name!r} ({self.update!r}) depends on how much of the run is "
                "done, and nobody says so: it stays as at the start. Without a Trainer pass progress (0 to 1) to "
                "entropic_risk, or call set_dual_progress of the module before each step",
            )
        return 0.0

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            rank_zero_warn(message)

    @outside_graphs
    def evaluate(self, scores: Tensor, index: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean dual objective with the ν at hand, read only; an anchor never visited takes ν = ℓ.

        Arguments, result and errors as :meth:`entropic_risk`, but a non-finite result is returned.
        """
        nu = self.read(self._check_batch(scores, index, mask), functional.log_mean_exp(scores, mask))
        objective = self.update.objective(nu, scores, mask)
        return objective.sum() / valid_rows(objective, count_valid(scores, mask)[0])

    def propose(
        self,
        index: Tensor,
        log_mean: Tensor,
        counts: Tensor | int,
        progress: float = 0.0,
        step_scores: Callable[[Tensor], Tensor] | None = None,
    ) -> DualStep:
        r"""Compute the new ν of a batch without writing it. For losses that compute :math:`\ell` on their own.

        An anchor that occurs several times in the step, in this process or in several, is moved once, by the
        log-mean-exp over all the samples it has; an update that needs the scores moves each occurrence by itself, and
        the anchor to the mean of the results weighted by the number of samples.

        Args:
            index: dataset indices, int64, shape ``(B,)``, already checked.
            log_mean: log-mean-exp of each row, shape ``(B,)``, −inf for a row without samples.
            counts: number of valid samples of each row, shape ``(B,)``, or one number for all.
            progress: fraction of the run that is done, in [0, 1].
            step_scores: for an update that needs the scores: maps ν of shape ``(B,)`` to the new ν of those rows.

        Returns:
            The step, to be handed to :meth:`commit`; ``step.nu`` is float32 on the device of ``log_mean``.
        """
        device, home = log_mean.device, self.nu.device
        all_rows, all_log_mean, mine = index, wide(log_mean), None
        if exchange.distributed():
            if isinstance(counts, int):
                counts = torch.full_like(all_log_mean, counts)
            (all_rows, all_log_mean, counts), mine = exchange.gather(all_rows, all_log_mean, counts)
        if all_rows.device != home:
            all_rows = all_rows.to(home)
        if device != home:
            all_log_mean = all_log_mean.to(home)
            counts = counts if isinstance(counts, int) else counts.to(home)
        all_log_mean, groups = exchange.merge(all_rows, all_log_mean, counts)
        stored, visited = self._read(all_rows, home)
        before = torch.where(visited, stored, all_log_mean)
        update = self.update_at(progress)
        if step_scores is None:
            unguarded = update.step_from_log_mean(before, all_log_mean, progress)
        else:
            proposed = wide(step_scores((before if mine is None else before[mine]).float().to(device)))
            if mine is not None:
                (proposed,), _ = exchange.gather(proposed)
            unguarded = exchange.merge_mean(proposed.to(home), counts, groups)
        all_nu = update.guard(unguarded, all_log_mean).float()
        all_seen = None
        if not isinstance(counts, int) or counts == 0:
            seen = all_log_mean != -math.inf
            all_nu = torch.where(seen, all_nu, stored)
            all_seen = visited | seen
        here = [all_nu, before, all_log_mean, unguarded]
        if mine is not None or groups is not None:
            here.append(exchange.processes() * exchange.row_weights(counts, groups, len(all_rows)))
        if mine is not None or device != home:
            here = [(values if mine is None else values[mine]).to(device) for values in here]
        nu, nu_before, own_log_mean, own_unguarded, *weight = here
        everyone = (all_rows, all_nu, all_log_mean, before, visited, all_seen)
        return DualStep(
            index, nu, nu_before, own_log_mean, own_unguarded, *everyone, progress, weight[0] if weight else None
        )

    def commit(
        self, step: DualStep, loss: Tensor, objective: Tensor | None = None, scores: Tensor | None = None
    ) -> None:
        """Write a proposed step into the table, unless something is not finite: :meth:`verify`, then :meth:`write`.

        Args:
            step: from :meth:`propose`.
            loss: this process's loss, a scalar.
            objective: the dual objective of each row, shape ``(B,)``: names the rows in an error.
            scores: the scores less the largest of each row, shape ``(B, m)``: likewise; or the sum of each row, shape
                ``(B,)``, which has to be finite.

        Raises:
            DualDivergenceError: ν or the loss is not finite, in any process; nothing is written.
        """
        self.verify(step, loss, objective, scores)
        self.write(step)

    def verify(
        self, step: DualStep, loss: Tensor, objective: Tensor | None = None, scores: Tensor | None = None
    ) -> None:
        """Raise unless all of a proposed step is finite; arguments and errors as :meth:`commit`."""
        checked = [loss.detach()]
        if scores is not None and scores.ndim == 1:  # of a head, whose −∞ is no mask
            checked.append(_sum(scores))
        if not self.update.has_exponential_objective:  # which is infinite wherever ν is
            checked.append(_sum(step.all_nu))
        if loss.device.type == "cpu":
            total = sum(value.item() for value in checked)
        else:  # one wait for the device, not three
            total = torch.stack([value.to(loss.device, torch.float32) for value in checked]).sum().item()
        # A sum of finite numbers may overflow, so this is a suspicion; it costs one pass, the certainty several.
        suspicious = not math.isfinite(total)
        if total == 0.0 and step.all_seen is not None and not bool((step.all_log_mean > -math.inf).any()):
            self._warn_once(
                "empty",
                f"a batch has no valid sample in any row for dual variable {self.name!r}: its loss is 0, and no ν "
                "moves. This is said once",
            )
        if exchange.any_rank(suspicious) if exchange.distributed() else suspicious:
            self._raise_if_diverged(step, loss, objective, scores)

    def write(self, step: DualStep) -> None:
        """Write a verified step into the table. A loss over several tables verifies all before it writes any."""
        if self.auto is not None:
            has_samples = None if step.all_seen is None else step.all_log_mean != -math.inf
            self.auto.observe(
                step.all_rows, step.all_log_mean, step.all_nu, step.all_nu_before, step.all_visited, has_samples
            )
        self.nu.index_copy_(0, step.all_rows, step.all_nu)
        if step.all_seen is None:
            self.visited.index_fill_(0, step.all_rows, True)
        else:
            self.visited.index_copy_(0, step.all_rows, step.all_seen)
        # Not by way of nn.Module's __setattr__, which looks for parameters first.
        self.__dict__.update(_last=step, _last_of_one=None)

    def _check_batch(self, scores: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
        if not isinstance(scores, Tensor) or scores.ndim != 2 or not scores.is_floating_point():
            got = f"{scores.dtype} of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else repr(scores)
            raise ValueError(f"scores of dual variable {self.name!r} must be floating with shape (B, m), got {got}")
        if mask is not None and not (
            isinstance(mask, Tensor) and mask.shape == scores.shape and mask.dtype == torch.bool
        ):
            got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(
                f"mask of dual variable {self.name!r} must be bool with the shape of the scores {tuple(scores.shape)}, "
                f"got {got}"
            )
        return self.check_index(index, scores.shape[0])

    def _raise_if_diverged(self, step: DualStep, loss: Tensor, objective: Tensor | None, scores: Tensor | None) -> None:
        def rows_of(bad: Tensor | None) -> Tensor:
            if bad is None:
                return step.rows[:0]
            return step.rows[(bad if bad.ndim == 1 else bad.any(dim=1)).to(step.rows.device)]

        lost = torch.isnan(step.all_log_mean)
        # In a row of scores −∞ is a sample of weight 0; NaN and +∞ are NaN less the largest.
        bad = None if scores is None else ~scores.detach().isfinite() if scores.ndim == 1 else scores.detach().isnan()
        found = rows_of(bad)
        bad_scores = torch.cat([found, step.all_rows[lost].to(step.rows.device)])
        bad_nu = step.all_rows[~torch.isfinite(step.all_nu)]
        bad_objective = rows_of(None if objective is None else ~torch.isfinite(objective.detach()))
        diverged = bool(bad_scores.numel() or bad_nu.numel() or bad_objective.numel()) or not math.isfinite(loss.item())
        if not (exchange.any_rank(diverged) if exchange.distributed() else diverged):
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
        raise DualDivergenceError(self.name, repr(self.update), rows.numel(), first, cause, hint)

    # ---------------------------------------------------------------- state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DualVariable:
        """Follow the module to another device, but never to another dtype, and nowhere if placed on the CPU."""
        if self.placement == "cpu":
            return self
        if not self._shared:
            probe = fn(torch.empty(0, dtype=torch.float32, device=self.nu.device))
            if probe.dtype == torch.float32:
                self.nu, self.visited = fn(self.nu), fn(self.visited)
            else:
                self.nu, self.visited = self.nu.to(probe.device), self.visited.to(probe.device)
        self._last = self._last_of_one = None
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination.update({f"{prefix}nu": self.nu, f"{prefix}visited": self.visited})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if self.auto is None:
            state_dict.pop(f"{prefix}auto._extra_state", None)
        loaded = state_dict.get(f"{prefix}nu")
        if loaded is not None and loaded.shape != self.nu.shape:
            grows = self.if_changed == "grow" and loaded.shape[0] < self.num_anchors
            if not grows:  # the rule's state belongs to the ν that it was found with
                state_dict.pop(f"{prefix}auto._extra_state", None)
            if grows or self.if_changed == "reset":
                self.reset()
            else:
                # Evaluation needs no ν, so a state of another size is not an error yet: see check_trainable.
                self.loaded_anchors = loaded.shape[0]
            if grows:
                self.nu[: loaded.shape[0]] = loaded
                self.visited[: loaded.shape[0]] = state_dict[f"{prefix}visited"]
            return
        self._load_tables(state_dict, prefix, *args)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.loaded_anchors = None
        self._last = self._last_of_one = None

    def _load_tables(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *others: list[str],
    ) -> None:
        for name in ("nu", "visited"):
            loaded, own = state_dict.pop(f"{prefix}{name}", None), getattr(self, name)
            if loaded is None:
                missing_keys += [f"{prefix}{name}"] if strict else []
            elif local_metadata.get("assign_to_params_buffers", False):
                setattr(self, name, loaded.to(own.dtype))
            else:
                own.copy_(loaded)


class _Table:
    """The tensors of a table, and its rule: one object, so that several variables can share it."""

    def __init__(self, nu: Tensor, visited: Tensor) -> None:
        self.nu = nu
        self.visited = visited
        self.auto: AutoStepSize | None = None
        # What this is a deep copy of, for as long as that is in use.
        self.copied_from: weakref.ref[_Table] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Table:
        copied = memo[id(self)] = _Table(copy.deepcopy(self.nu, memo), copy.deepcopy(self.visited, memo))
        copied.auto, copied.copied_from = copy.deepcopy(self.auto, memo), weakref.ref(self)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "copied_from": None}


def _share_with_average(average: nn.Module, name: str, module: nn.Module | None) -> None:
    """Let the copy of a module that averages its weights use the tables of the module itself."""
    if isinstance(average, AveragedModel) and module is not None:
        for part in module.modules():
            if isinstance(part, DualVariable):
                part.share()


# torch asks this at every assignment of a module to a module; the average takes its copy so.
register_module_module_registration_hook(_share_with_average)


def verify_together(parts: Sequence[tuple[DualVariable, DualStep, Tensor]], loss: Tensor) -> None:
    """Raise unless the steps of several tables with one loss are all finite; the error is of the table at fault.

    Args:
        parts: each table with its step and the exponential objective of each of its rows, shape ``(B,)``, which is
            infinite wherever ν is.
        loss: this process's loss over all of them, a scalar.

    Raises:
        DualDivergenceError: something is not finite, in any process; nothing is written.
    """
    suspicious = not math.isfinite(loss.item())
    if not (exchange.any_rank(suspicious) if exchange.distributed() else suspicious):
        return
    for variable, step, objective in parts:
        seen = objective.to(loss.dtype)  # a wider one may hold what the loss cannot
        variable._raise_if_diverged(step, seen.mean(), seen, None)
    variable, step, objective = parts[0]
    variable._raise_if_diverged(step, loss, objective, None)


def _zeros_in_main_memory(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros, shape ``(size,)``, in memory that random rows are read from quickly.

    NumPy asks the system for large pages, torch does not. A batch's rows of a large table lie in as many pages, and to
    look up where each page is takes longer than to read the row: at 10⁸ anchors a step of 128 took 14 % longer than
    with a small table, and takes 9 % longer so.
    """
    kind = {torch.float32: np.float32, torch.bool: np.bool_}[dtype]
    return torch.from_numpy(np.empty(size, dtype=kind)).zero_()


def _sum(values: Tensor) -> Tensor:
    return values.squeeze() if values.numel() == 1 else values.sum()


def _mean(objective: Tensor, step: DualStep, counts: Tensor | int) -> Tensor:
    """Mean objective over the anchors of the step, as this process's share of it."""
    if step.row_weight is None:
        return objective.sum() / valid_rows(objective, counts)
    return (objective * step.row_weight.to(objective.dtype)).sum()


def count_valid(scores: Tensor, mask: Tensor | None) -> tuple[Tensor | int, bool]:
    """Number of valid samples of each row, one number where it is the same for all; and whether it may be 0."""
    if mask is None or scores.shape[0] == 0:
        return scores.shape[1], scores.shape[1] == 0
    counts = mask.sum(dim=1)
    if counts.device.type != "cpu":  # not worth a wait for the device
        return counts, True
    numbers = counts.tolist()
    fewest = min(numbers)
    return fewest if fewest == max(numbers) else counts, fewest == 0


def valid_rows(objective: Tensor, counts: Tensor | int) -> Tensor | int:
    """Number of rows that have a valid sample, at least 1."""
    return max(objective.shape[0], 1) if isinstance(counts, int) else torch.count_nonzero(counts).clamp(min=1)
