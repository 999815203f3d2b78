"""The table of dual variables: one float32 ν and one visited flag per anchor, addressed by dataset index."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scent_lightning.duals import exchange
from scent_lightning.duals.updates import DualUpdate
from scent_lightning.errors import DualDivergenceError, InputError
from scent_lightning.functional import log_mean_exp, valid_counts, wide

__all__ = ["DualStep", "DualVariable"]

Placement = Literal["module", "cpu"]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class DualStep:
    """One step of the table: what :meth:`DualVariable.propose` computed and :meth:`DualVariable.commit` writes.

    The first five describe this process's rows, shape ``(B,)``; the ``all_*`` ones the rows of all processes, in rank
    order. Everything is detached. ``log_mean`` is the log-mean-exp over all samples that the anchor has in the step
    (repeats and other processes included; −inf if there is none), ``nu_before`` the ν that the step started from
    (``log_mean`` where the anchor was never seen), ``guarded`` whether the guard raised ν.
    """

    index: Tensor
    nu: Tensor
    nu_before: Tensor
    log_mean: Tensor
    guarded: Tensor
    all_index: Tensor
    all_nu: Tensor
    all_log_mean: Tensor
    progress: float


class DualVariable(nn.Module):
    """A table of ν with the update that moves it.

    ν is float32 whatever the module is cast to. Both tables are buffers: they move with the module and are in its
    state dict. A row is written only through :meth:`commit` (or :meth:`scatter`).

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
        last_step: the latest committed :class:`DualStep`, for monitors; None before the first.

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

    nu: Tensor
    visited: Tensor

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
        if isinstance(update, dict):
            update = DualUpdate.from_config(update)
        if not isinstance(update, DualUpdate):
            raise InputError(f"update of dual variable {name!r} must be a DualUpdate, got {type(update).__name__}")
        self.name = name
        self.update = update
        self.placement = placement
        self.last_step: DualStep | None = None
        # Set when a state of another size was loaded: reading still works, training does not.
        self.loaded_anchors: int | None = None
        device = torch.device("cpu") if placement == "cpu" else None
        self.register_buffer("nu", torch.zeros(num_anchors, dtype=torch.float32, device=device))
        self.register_buffer("visited", torch.zeros(num_anchors, dtype=torch.bool, device=device))

    @property
    def num_anchors(self) -> int:
        """Number of rows n."""
        return self.nu.shape[0]

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.num_anchors}, update={self.update!r}, placement={self.placement!r}"

    # ---------------------------------------------------------------- access

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """ν (float32) and visited flags (bool) at ``index``, on the index's device.

        Args:
            index: dataset indices, shape ``(B,)``, any integer dtype.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`check_index`.
        """
        return self._read(self.check_index(index), index.device)

    def _read(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        index = index.to(self.nu.device)
        return self.nu[index].to(device), self.visited[index].to(device)

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
        self.last_step = None
        self.loaded_anchors = None

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
                f"this model has {self.num_anchors}; train on the data set of the checkpoint, or load only the weights "
                "and call reset() on the dual variable to start it anew"
            )

    # ---------------------------------------------------------------- training

    def entropic_risk(self, scores: Tensor, index: Tensor, mask: Tensor | None = None, progress: float = 0.0) -> Tensor:
        """Update ν at ``index`` and return the mean dual objective over the anchors that have a valid sample.

        Args:
            scores: shape ``(B, m)``, any floating dtype; carries the gradient.
            index: dataset indices of the rows, shape ``(B,)``, any integer dtype and device.
            mask: bool, shape ``(B, m)``, True where a sample counts; None means all do.
            progress: fraction of the run that is done, in [0, 1], for the schedule.

        Returns:
            A scalar in float32 (float64 for float64 scores); 0, with a zero gradient, if no row has a valid sample.

        Raises:
            TypeError, ValueError, IndexError: an index, scores or mask that does not fit; nothing is written.
            DualDivergenceError: a non-finite score, ν or objective; nothing is written.
        """
        self.check_trainable()
        rows = exchange.checked(lambda: self._check_batch(scores, index, mask))
        counts = valid_counts(scores, mask)
        log_mean = log_mean_exp(scores, mask)
        if scores.shape[1] > 0:
            # NaN and +inf show in the log-mean-exp; a single −inf among finite scores does not.
            valid_scores = scores.detach() if mask is None else scores.detach().masked_fill(~mask, 0.0)
            log_mean = log_mean.masked_fill(valid_scores.amin(dim=1) == -math.inf, math.nan)
        step_scores = None
        if self.update.needs_scores:
            step_scores = lambda nu: self.update.step(nu, scores.detach(), mask, progress)  # noqa: E731
        step = self.propose(rows, log_mean, counts, progress, step_scores)
        objective = self.update.objective(step.nu, scores, mask)
        self.commit(step, objective)
        return mean_over_valid(objective, counts)

    def evaluate(self, scores: Tensor, index: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean dual objective with the ν at hand, read only; an anchor never visited takes ν = ℓ.

        Arguments, result and errors as :meth:`entropic_risk`, but a non-finite result is returned.
        """
        nu, visited = self._read(self._check_batch(scores, index, mask), scores.device)
        nu = torch.where(visited, nu, log_mean_exp(scores, mask).float())
        return mean_over_valid(self.update.objective(nu, scores, mask), valid_counts(scores, mask))

    def propose(
        self,
        index: Tensor,
        log_mean: Tensor,
        counts: Tensor,
        progress: float = 0.0,
        step_scores: Callable[[Tensor], Tensor] | None = None,
    ) -> DualStep:
        r"""Compute the new ν of a batch without writing it. For losses that compute :math:`\ell` on their own.

        An anchor that occurs several times in the step, in this process or in several, is moved once, by the
        log-mean-exp over all the samples it has; an update that needs the scores moves each occurrence by itself, and
        the anchor to the mean of the results weighted by the number of samples.

        Args:
            index: dataset indices, int64, shape ``(B,)``, already checked.
            log_mean: log-mean-exp of each row, shape ``(B,)``; NaN marks a row as diverged.
            counts: number of valid samples of each row, shape ``(B,)``.
            progress: fraction of the run that is done, in [0, 1].
            step_scores: for an update that needs the scores: maps ν of shape ``(B,)`` to the new ν of those rows.

        Returns:
            The step, to be handed to :meth:`commit`; ``step.nu`` is float32 on the device of ``log_mean``.
        """
        device, home = log_mean.device, self.nu.device
        (all_index, row_log_mean, row_counts), mine = exchange.gather(index, log_mean, counts)
        all_index, row_log_mean, row_counts = all_index.to(home), row_log_mean.to(home), row_counts.to(home)
        all_log_mean, all_counts, groups = exchange.merge(all_index, row_log_mean, row_counts)
        stored = self.nu[all_index]
        before = torch.where(self.visited[all_index], wide(stored), all_log_mean)
        if step_scores is None:
            moved = wide(self.update.step_from_log_mean(before, all_log_mean, progress))
            raised = wide(self.update.guard(moved, all_log_mean))
            guarded = raised > moved
        else:
            proposed = step_scores(before[mine].float().to(device))
            (row_nu,), _ = exchange.gather(wide(proposed))
            raised = exchange.merge_mean(row_nu.to(home), row_counts, groups)
            raised = wide(self.update.guard(raised, all_log_mean))
            guarded = raised <= self.update.guard(torch.full_like(raised, -math.inf), all_log_mean)
        all_nu = torch.where(all_counts > 0, raised.float(), stored)
        return DualStep(
            index=index,
            nu=all_nu[mine].to(device),
            nu_before=before[mine].to(device),
            log_mean=all_log_mean[mine].to(device),
            guarded=guarded[mine].to(device),
            all_index=all_index,
            all_nu=all_nu,
            all_log_mean=all_log_mean,
            progress=progress,
        )

    def commit(self, step: DualStep, objective: Tensor | None = None) -> None:
        """Write a proposed step into the table.

        Args:
            step: from :meth:`propose`.
            objective: the dual objective of this process's rows, shape ``(B,)`` or scalar, checked to be finite.

        Raises:
            DualDivergenceError: ν or the objective of a row is not finite, in any process; nothing is written.
        """
        flags = ~torch.isfinite(step.all_nu).all().reshape(1)
        if objective is not None:
            flags = torch.cat([flags, ~torch.isfinite(objective.detach()).all().reshape(1).to(flags.device)])
        if any(exchange.any_rank(flags).tolist()):
            self._raise_divergence(step, objective)
        self.nu[step.all_index] = step.all_nu
        self.visited[step.all_index] |= step.all_log_mean > -math.inf
        self.last_step = step

    def _check_batch(self, scores: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
        if not isinstance(scores, Tensor) or scores.ndim != 2 or not scores.is_floating_point():
            got = f"{scores.dtype} of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else repr(scores)
            raise ValueError(f"scores of dual variable {self.name!r} must be floating with shape (B, m), got {got}")
        if mask is not None and (mask.shape != scores.shape or mask.dtype != torch.bool):
            raise ValueError(
                f"mask of dual variable {self.name!r} must be bool with the shape of the scores {tuple(scores.shape)}, "
                f"got {mask.dtype} of shape {tuple(mask.shape)}"
            )
        return self.check_index(index, scores.shape[0])

    def _raise_divergence(self, step: DualStep, objective: Tensor | None) -> None:
        lost = torch.isnan(step.all_log_mean)
        overflowed = ~torch.isfinite(step.all_nu)
        if bool(lost.any()):
            rows = step.all_index[lost]
            cause = "the scores are not finite"
            hint = "Lower the learning rate of the model, or look for bad values in the data at that index."
        elif bool(overflowed.any()):
            rows = step.all_index[overflowed]
            cause = "the update gave a value that float32 cannot hold"
            hint = "Lower its step size, or set max_log_weight (2, say)."
        else:
            unbounded = torch.zeros_like(step.nu, dtype=torch.bool)
            if objective is not None:
                unbounded |= ~torch.isfinite(objective.detach())
            rows = step.index[unbounded.to(step.index.device)]
            cause = "a weight exp(score − ν) is too large for float32"
            hint = "Raise the step size so that ν can follow, set max_log_weight (2, say), or lower the learning rate."
        rows = torch.unique(rows)
        first = int(rows[0]) if rows.numel() else -1
        raise DualDivergenceError(self.name, repr(self.update), rows.numel(), first, cause, hint)

    # ---------------------------------------------------------------- state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DualVariable:
        """Follow the module to another device, but never to another dtype, and nowhere if placed on the CPU."""
        if self.placement == "cpu":
            return self
        probe = fn(torch.empty(0, dtype=torch.float32, device=self.nu.device))
        if probe.dtype == torch.float32:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        else:
            self.nu = self.nu.to(probe.device)
            self.visited = self.visited.to(probe.device)
        self.last_step = None
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        loaded = state_dict.get(f"{prefix}nu")
        if loaded is not None and loaded.shape != self.nu.shape:
            # Evaluation needs no ν, so a state of another size is not an error yet: see check_trainable.
            self.loaded_anchors = loaded.shape[0]
            return
        if loaded is not None:
            state_dict[f"{prefix}nu"] = loaded.float()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.loaded_anchors = None
        self.last_step = None


def mean_over_valid(objective: Tensor, counts: Tensor) -> Tensor:
    """Mean of the per-anchor objective over the rows with a valid sample; 0 with a zero gradient if there is none."""
    return objective.sum() / (counts > 0).sum().clamp(min=1).to(objective.dtype)
