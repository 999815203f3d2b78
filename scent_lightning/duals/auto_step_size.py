r"""SCENT's step size found during the run: no number to set.

At the optimum ν* is the objective itself, :math:`\log \operatorname{mean} e^{s}`, and SCENT's effective factor of the
moving average is :math:`\gamma = \operatorname{sigmoid}(\log \alpha + \nu)`. So
:math:`\log \alpha = -\text{reference} - c` gives the anchors that are at the reference γ = sigmoid(−c), whatever the
scale of the scores, and faster ones to those that are still above it. The reference is the least mean of ν over a
window of the run so far: it can fall and never rise again, for one outlier among the batches would then take α with it.
The first window has none, and α = ∞ (BSGD).

c is the logarithm of how many visits an anchor's average goes back. It rises linearly from 0, so that the average gets
longer as the model settles, and at last α falls to 0 by a cosine. Three measurements keep c lower where an average that
long is not wanted:

* **noise**: it rises to :math:`\log(r / 2\sigma^2)` at most, where r is the mean square of ℓ − ν, as seen in the
  batches, and σ² the variance of ν below which more averaging gains nothing: ν varies by :math:`\gamma r / 2`. Without
  noise that is BSGD, as it should be.
* **visits**: the average goes back over a share of the v visits of an anchor so far that grows with them,
  :math:`e^c \le \frac{v}{10} (1 + \frac{v}{30})`: what was seen long ago belongs to another model.
* **lag**: ℓ falls while the model learns, and an average of it lags by its length times the fall at a visit, d, taken
  over the latter half of the visits so far. The lag stays below 0.18 of the noise, so that there is more to gain
  from an average than to lose: :math:`e^c \le 0.18 \sqrt r / d`.

The guard, where none is given, is what the visits allow c to be, between 1 and 4: a weight of :math:`e^c` is what the
next batch can be worth to an average over as many.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scent_lightning.duals.schedules import scheduled_log

__all__ = ["AutoStepSize"]

# Fractions of the run: after how much the reference may fall, at the latest after how much, and when c has risen and α
# begins to fall.
WINDOW, LARGEST_WINDOW, RISEN = 1 / 300, 0.2, 0.8
# c at the end of its rise, unless noise, visits or lag limit it: γ is 0.018 there.
LARGEST_RISE = 4.0
# The average goes back over this share of the visits so far while they are few, and more where they are many.
SHARE, MANY_VISITS = 0.1, 30.0
# Variance of ν that needs no more averaging; how far ν may lag, in standard deviations of ℓ − ν.
SMALL_VARIANCE, LAG_TO_NOISE = 4e-4, 0.18
# The guard, as the largest log weight: as large as c could be for the visits alone, between these.
LEAST_GUARD, LARGEST_GUARD = 1.0, 4.0
# Of so few anchors each may be seen many times in a window, and has its own objective over it.
FEW_ANCHORS = 1024


class AutoStepSize(nn.Module):
    """The state of the rule for one table: what was found in the windows so far, and what was seen in the one at hand.

    Args:
        num_anchors: number of rows n of the table.

    Attributes:
        reference: least mean of ν in a window so far; None in the first window. With few anchors it is the mean over
            them of the log-mean-exp of ℓ over the window, which a short average of ν is well below.
        variance: mean square of ℓ − ν in the last window; None as long as no anchor came twice.
        epoch: an epoch as a fraction of the run, 0 if unknown. With few anchors a window is at least an epoch: rare
            rows are what matters, and each of them comes once in it. In a run of few epochs it is a fifth of the run.
    """

    def __init__(self, num_anchors: int) -> None:
        super().__init__()
        self.num_anchors = num_anchors
        self.epoch = 0.0
        self.log_sums: Tensor | None
        self.counts: Tensor | None
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.reference: float | None = None
        # Visits at the end of each window, and the least mean ℓ of one by then; not ν, which falls no faster than its
        # average lets it. By them, how far ℓ falls at a visit.
        self.falls: tuple[tuple[float, float], ...] = ()
        self.fall = 0.0
        self.variance: float | None = None
        self.visits = 0  # rows seen in all windows that are over
        self.visits_of_each = 1.0  # the same for one of the anchors that are in use
        self._begin(0.0)

    def grow(self, num_anchors: int) -> None:
        """Go on with a table that has more anchors now.

        Args:
            num_anchors: new number of rows n, at least the old one.
        """
        self.num_anchors = num_anchors
        self._fit_to_anchors()

    def _fit_to_anchors(self) -> None:
        """What is kept for each anchor, as long as there are anchors, if they are few."""
        if self.log_sums is None or self.counts is None:
            if self.seen and 1 < self.num_anchors <= FEW_ANCHORS:
                self._begin(self.begun)  # of a table with one anchor, which has sums of its own
            return
        more = self.num_anchors - len(self.counts)
        if self.num_anchors > FEW_ANCHORS:
            self.log_sums = self.counts = None
        elif more:
            self.log_sums = torch.cat([self.log_sums, self.log_sums.new_full((more,), -math.inf)])
            self.counts = torch.cat([self.counts, self.counts.new_zeros(more)])

    def move(self, difference: float) -> None:
        """Go on in a run of another length: what was at a progress p is at p + ``difference`` now."""
        self.begun += difference

    def _begin(self, progress: float) -> None:
        self.begun = progress
        self.seen = 0  # rows seen in this window
        # Σ (ℓ − ν)² and how many rows had a ν; Σ of the new ν, Σ ℓ and how many rows had samples.
        self.totals: Tensor | None = None
        # One anchor: log Σ e^ℓ, Σ ℓ, and the first two totals. Few: log Σ e^ℓ of each, and how often each was seen.
        self.log_sum, self.sum, self.squares, self.known = -math.inf, 0.0, 0.0, 0
        self.log_sums = self.counts = None

    def log_alpha(self, progress: float) -> float:
        """Log α of the step at ``progress``, ∞ in the first window.

        Args:
            progress: fraction of the run that is done, in [0, 1].
        """
        if self.reference is None:
            return math.inf
        log_alpha = -self.reference - self._c(progress)
        if progress <= RISEN:
            return log_alpha
        return scheduled_log("cosine", log_alpha, -math.inf, (progress - RISEN) / (1.0 - RISEN))

    def _c(self, progress: float) -> float:
        rise = LARGEST_RISE
        if self.variance is not None:
            rise = min(rise, math.log(max(self.variance, 1e-30) / (2.0 * SMALL_VARIANCE)))
        c = min(rise * min(progress / RISEN, 1.0), self._c_of_visits())
        if self.fall <= 0 or not self.variance:
            return c
        return min(c, math.log(LAG_TO_NOISE * math.sqrt(self.variance) / self.fall))

    def _c_of_visits(self) -> float:
        return math.log(SHARE * self.visits_of_each * (1.0 + self.visits_of_each / MANY_VISITS))

    @property
    def max_log_weight(self) -> float:
        """The guard that goes with it."""
        return min(max(self._c_of_visits(), LEAST_GUARD), LARGEST_GUARD)

    def suggestion(self) -> float | None:
        """A fixed log α for a run like this one: c is half of what it rises to; None where too little was seen."""
        too_short = self.num_anchors <= FEW_ANCHORS and self.epoch >= 1.0
        return None if self.reference is None or too_short else -self.reference - self._c(RISEN / 2)

    def turn(self, progress: float, anchors_in_use: Callable[[], int]) -> None:
        """Close the window if it is over; called before a step.

        Args:
            progress: fraction of the run that is done, in [0, 1].
            anchors_in_use: says how many anchors were visited so far.
        """
        window = max(WINDOW, min(self.epoch, LARGEST_WINDOW) if self.num_anchors <= FEW_ANCHORS else 0.0)
        self.begun = min(self.begun, progress)  # the run before is over
        # Sums of fractions: the epoch's last step is not to fall into the next window by a rounding.
        if progress - self.begun < window * (1 - 1e-9) or self.seen == 0:
            return
        self.visits += self.seen
        self.visits_of_each = max(self.visits / max(anchors_in_use(), 1), 1.0)
        squares, known, nu, log_mean, count = (
            (self.squares, self.known, 0.0, self.sum, self.seen) if self.totals is None else self.totals.tolist()
        )
        if known > 0 and math.isfinite(squares):
            self.variance = squares / known
        if count > 0:
            # ν cannot be below the mean ℓ for good: where it is, it was so from the start.
            objective = self._objective() if self.num_anchors <= FEW_ANCHORS else max(nu, log_mean) / count
            self.reference = objective if self.reference is None else min(self.reference, objective)
            self._take_fall(log_mean / count)
        self._begin(progress)

    def _take_fall(self, log_mean: float) -> None:
        """Take in the mean ℓ of a window."""
        if not self.falls:
            self.falls = ((0.0, log_mean),)
        least = min(log_mean, self.falls[-1][1])
        visits = max(self.visits_of_each, self.falls[-1][0])  # fewer where many anchors have come to be in use
        begun, before = self.falls[bisect.bisect_right(self.falls, (visits / 2, math.inf)) - 1]
        self.fall = (before - least) / (visits - begun)
        self.falls = (*self.falls, (visits, least))

    def _objective(self) -> float:
        """Mean over the few anchors seen in the window of the log-mean-exp of ℓ over its visits."""
        if self.log_sums is None or self.counts is None:
            return self.log_sum - math.log(self.seen)
        seen = self.counts > 0
        return (self.log_sums[seen] - self.counts[seen].double().log()).mean().item()

    def observe_one(self, log_mean: float, before: float | None) -> None:
        """Take in a step of the only anchor: ℓ, and the ν it had, None if it had none."""
        larger, smaller = max(self.log_sum, log_mean), min(self.log_sum, log_mean)
        self.log_sum = larger + math.log1p(math.exp(smaller - larger))
        self.sum += log_mean
        self.seen += 1
        if before is not None:
            self.squares += (log_mean - before) ** 2
            self.known += 1

    def observe(
        self, rows: Tensor, log_mean: Tensor, nu: Tensor, before: Tensor, visited: Tensor, has_samples: Tensor | None
    ) -> None:
        """Take in a step, of the rows of all processes.

        Args:
            rows: dataset indices, shape ``(N,)``, int64.
            log_mean: ℓ of each, in the wide dtype, equal where an index repeats; −inf where there was no sample.
            nu: the new ν of each.
            before: the ν it had, in the wide dtype, and ℓ where it had none.
            visited: whether it had one.
            has_samples: whether there was a sample, bool, shape ``(N,)``; None if every row had one.
        """
        if self.num_anchors == 1:
            if len(rows) and (value := log_mean[0].item()) != -math.inf:
                self.observe_one(value, before[0].item() if visited[0].item() else None)
            return
        self.seen += len(rows)
        difference, count = log_mean - before, log_mean.new_full((), len(rows))
        sums = log_mean
        if has_samples is not None:
            difference, nu, sums = (each.masked_fill(~has_samples, 0.0) for each in (difference, nu, log_mean))
            visited, count = visited & has_samples, has_samples.sum()
        parts = [torch.dot(difference, difference), visited.sum(), nu.sum(dtype=sums.dtype), sums.sum(), count]
        if log_mean.device.type == "cpu":
            totals = torch.tensor([part.item() for part in parts], dtype=log_mean.dtype)
        else:  # no wait for the device
            totals = torch.stack([part.to(log_mean.dtype) for part in parts])
        self.totals = totals if self.totals is None else self.totals.to(totals.device) + totals
        if self.num_anchors > FEW_ANCHORS:
            return
        if has_samples is not None:
            rows, log_mean = rows[has_samples], log_mean[has_samples]
        if self.log_sums is None or self.counts is None:
            self.log_sums = log_mean.new_full((self.num_anchors,), -math.inf)
            self.counts = torch.zeros(self.num_anchors, dtype=torch.int64, device=log_mean.device)
        self.log_sums, self.counts = self.log_sums.to(log_mean.device), self.counts.to(log_mean.device)
        # An index that repeats is one visit: its rows have the same ℓ.
        self.log_sums[rows] = torch.logaddexp(self.log_sums[rows], log_mean)
        self.counts[rows] = self.counts[rows] + 1

    # ---------------------------------------------------------------- state

    _STATE = (
        "reference", "variance", "falls", "fall", "visits", "visits_of_each", "begun", "seen", "log_sum", "sum",
        "squares", "known", "totals", "log_sums", "counts",
    )  # fmt: skip

    def get_extra_state(self) -> dict[str, Any]:
        """The state as plain data."""
        return {name: getattr(self, name) for name in self._STATE}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the state that :meth:`get_extra_state` gave."""
        for name, value in state.items():
            setattr(self, name, value.clone() if isinstance(value, Tensor) else value)
        self._fit_to_anchors()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # A checkpoint of a run with another step size has no such state, and the rule begins anew; so does one of the
        # rule that the first versions had, with other numbers.
        state = state_dict.get(f"{prefix}_extra_state")
        if state is not None and state.keys() == self.get_extra_state().keys():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        else:
            state_dict.pop(f"{prefix}_extra_state", None)
            self.reset()
