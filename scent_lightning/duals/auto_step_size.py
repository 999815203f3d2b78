r"""SCENT's step size found during the run: no number to set.

At the optimum ν* is the objective itself, :math:`\log \operatorname{mean} e^{s}`, and SCENT's effective factor of the
moving average is :math:`\gamma = \operatorname{sigmoid}(\log \alpha + \nu)`. So
:math:`\log \alpha = -\text{reference} - c` gives the anchors that are at the reference γ = sigmoid(−c), whatever the
scale of the scores, and faster ones to those that are still above it. The reference is the least objective of any
window so far, as seen in the batches: it can fall and never rise again, for one outlier among the batches would then
take α with it. The first window has none, and α = ∞ (BSGD). c rises linearly, so that the average gets longer as the
model settles, and at last α falls to 0 by a cosine.

How far c rises, to at most 4, is the logarithm of how often the run sees an anchor: an average over more visits than
there are is none. The guard, where none is given, is as large, and at least 1: a weight of :math:`1/\gamma` is
what a step of the average can make of the next batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from scent_lightning.duals.schedules import scheduled_log
from scent_lightning.functional import wide

__all__ = ["AutoStepSize"]

# Fractions of the run: after how much the reference may fall, and when c has risen and α begins to fall.
WINDOW, RISEN = 1 / 300, 0.9
# c at the end of its rise: γ is 0.018 there; with few visits of an anchor less, as there is less to average over.
LARGEST_RISE = 4.0
# Of so few anchors each may be seen many times in a window, and has its own objective over it.
FEW_ANCHORS = 1024


class AutoStepSize(nn.Module):
    """The state of the rule for one table: the reference, and what was seen in the window at hand.

    Args:
        num_anchors: number of rows n of the table.

    Attributes:
        reference: least objective of a window so far; None in the first window.
        epoch: an epoch as a fraction of the run, 0 if unknown. With few anchors a window is at least an epoch: rare
            rows are what matters, and each of them comes once in it.
    """

    def __init__(self, num_anchors: int) -> None:
        super().__init__()
        self.num_anchors = num_anchors
        self.epoch = 0.0
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.reference: float | None = None
        self.rise = LARGEST_RISE
        self._begin(0.0)

    def _begin(self, progress: float) -> None:
        self.begun = progress
        self.visits = 0  # rows seen in this window
        # One anchor: log Σ e^ℓ. Few: the same for each, and how often each was seen. Many: Σ ℓ over the rows.
        self.log_sum = -math.inf
        self.sums: Tensor | None = None
        self.counts: Tensor | None = None

    def log_alpha(self, progress: float) -> float:
        """Log α of the step at ``progress``, ∞ in the first window.

        Args:
            progress: fraction of the run that is done, in [0, 1].
        """
        if self.reference is None:
            return math.inf
        log_alpha = -self.reference - self.rise * min(progress / RISEN, 1.0)
        if progress <= RISEN:
            return log_alpha
        return scheduled_log("cosine", log_alpha, -math.inf, (progress - RISEN) / (1.0 - RISEN))

    @property
    def max_log_weight(self) -> float:
        """The guard that goes with the rise."""
        return max(self.rise, 1.0)

    def turn(self, progress: float) -> None:
        """Close the window if it is over; called before a step."""
        window = max(WINDOW, self.epoch if self.num_anchors <= FEW_ANCHORS else 0.0)
        # Sums of fractions: the epoch's last step is not to fall into the next window by a rounding.
        if progress - self.begun < window * (1 - 1e-9) or self.visits == 0:
            return
        estimate = self._estimate()
        if math.isfinite(estimate):
            if self.reference is None:
                a_run = self.visits / self.num_anchors / (progress - self.begun)
                self.rise = min(LARGEST_RISE, math.log(max(a_run, 1.0)))
                self.reference = estimate
            self.reference = min(self.reference, estimate)
        self._begin(progress)

    def _estimate(self) -> float:
        """Mean over the anchors seen in the window of the log-mean-exp of ℓ over its visits, or with many of ℓ."""
        if self.num_anchors == 1:
            return self.log_sum - math.log(self.visits)
        if self.counts is None:
            return self.sums.item() / self.visits if self.sums is not None else math.nan
        seen = self.counts > 0
        each = self.sums[seen] - self.counts[seen].double().log()  # type: ignore[index]
        return each.mean().item()

    def observe_one(self, log_mean: float) -> None:
        """Take in ℓ of a step of the only anchor."""
        larger, smaller = max(self.log_sum, log_mean), min(self.log_sum, log_mean)
        self.log_sum = larger + math.log1p(math.exp(smaller - larger))
        self.visits += 1

    def observe(self, rows: Tensor, log_mean: Tensor) -> None:
        """Take in ℓ of a step, of the rows of all processes.

        Args:
            rows: dataset indices, shape ``(N,)``, int64.
            log_mean: ℓ of each, equal where an index repeats; −inf where there was no sample.
        """
        log_mean = wide(log_mean)
        if self.num_anchors == 1:
            if len(rows) and (value := log_mean[0].item()) != -math.inf:
                self.observe_one(value)
            return
        has_samples = log_mean != -math.inf
        if self.num_anchors > FEW_ANCHORS:
            # Many: the rows of a batch without samples are too few to wait for the device to count them.
            total = log_mean.masked_fill(~has_samples, 0.0).sum()
            self.sums = total if self.sums is None else self.sums.to(total.device) + total
            self.visits += len(rows)
            return
        rows, log_mean = rows[has_samples], log_mean[has_samples]
        if self.sums is None or self.counts is None:
            self.sums = log_mean.new_full((self.num_anchors,), -math.inf)
            self.counts = torch.zeros(self.num_anchors, dtype=torch.int64, device=log_mean.device)
        self.sums, self.counts = self.sums.to(log_mean.device), self.counts.to(log_mean.device)
        # An index that repeats is one visit: its rows have the same ℓ.
        self.sums[rows] = torch.logaddexp(self.sums[rows], log_mean)
        self.counts[rows] = self.counts[rows] + 1
        self.visits += len(rows)

    # ---------------------------------------------------------------- state

    def get_extra_state(self) -> dict[str, Any]:
        """The state as plain data."""
        kept = {name: getattr(self, name) for name in ("reference", "rise", "begun", "visits", "log_sum")}
        return {**kept, "sums": self.sums, "counts": self.counts}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the state that :meth:`get_extra_state` gave."""
        for name, value in state.items():
            setattr(self, name, value.clone() if isinstance(value, Tensor) else value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # A checkpoint of a run with another step size has no such state, and the rule begins anew.
        if f"{prefix}_extra_state" in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        else:
            self.reset()
