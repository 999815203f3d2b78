r"""SCENT's step size found during the run: no number to set.

At the optimum ν* is the objective itself, :math:`\log \operatorname{mean} e^{s}`, and SCENT's effective factor of the
moving average is :math:`\gamma = \operatorname{sigmoid}(\log \alpha + \nu)`. So
:math:`\log \alpha = -\text{reference} - c` gives the anchors that are at the reference γ = sigmoid(−c), whatever the
scale of the scores, and faster ones to those that are still above it. The reference is the least mean of ν over a
window of the run so far: it can fall and never rise again, for one outlier among the batches would then take α with it.
The first window has none, and α = ∞ (BSGD).

c is the logarithm of how many visits an anchor's average goes back. It rises linearly from 0, so that the average gets
longer as the model settles, and at last α falls to 0 by a cosine. It rises to 5 (γ = 0.007). One anchor alone is
visited at each step, and its average goes back over 1.2 % of the run at most: the error of a ν that all rows share only
scales the gradient, and what it takes in of its own batch keeps the weights of rare rows in bounds. Three measurements
keep c lower where an average that long is not wanted:

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
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from scent_lightning.updates.schedules import scheduled_log
from scent_lightning.updates.step_size import Observed, StepSizeRule
from scent_lightning.updates.windows import FEW_ANCHORS, Window, WindowSums

__all__ = ["AutoConstants", "AutoStepSize"]


@dataclass(frozen=True)
class AutoConstants:
    """The numbers of the rule, which belong to no problem.

    Attributes:
        window: fraction of the run after which the reference may fall.
        largest_window: the same at the latest, where a window is an epoch.
        risen: fraction of the run at which c has risen and α begins to fall.
        rise: c at the end of its rise, unless noise, visits or lag limit it: γ is 0.007 there.
        share_of_run: that an average goes back over at most where there is but one anchor.
        share: of the visits so far, over which the average goes back while they are few.
        many_visits: from how many visits on it goes back over more.
        variance: of ν that needs no more averaging.
        lag_to_noise: how far ν may lag, in standard deviations of ℓ − ν.
        least_guard: the guard, as the largest log weight: as large as c could be for the visits alone, from this
        largest_guard: to this.
    """

    window: float = 1 / 300
    largest_window: float = 0.2
    risen: float = 0.8
    rise: float = 5.0
    share_of_run: float = 0.012
    share: float = 0.1
    many_visits: float = 30.0
    variance: float = 4e-4
    lag_to_noise: float = 0.18
    least_guard: float = 1.0
    largest_guard: float = 4.0


class AutoStepSize(StepSizeRule):
    """The state of the rule for one table: what was found in the windows so far, and what was seen in the one at hand.

    Args:
        num_anchors: number of rows n of the table.
        max_log_weight: a guard that was given; None is the rule's own.
        constants: its numbers.

    Attributes:
        reference: least mean of ν in a window so far; None in the first window. With few anchors it is the mean over
            them of the log-mean-exp of ℓ over the window, which a short average of ν is well below.
        variance: mean square of ℓ − ν in the last window; None as long as no anchor came twice.
        epoch: an epoch as a fraction of the run, 0 if unknown. With few anchors a window is at least an epoch: rare
            rows are what matters, and each of them comes once in it. In a run of few epochs it is a fifth of the run.
    """

    def __init__(
        self, num_anchors: int, max_log_weight: float | None = None, constants: AutoConstants | None = None
    ) -> None:
        self.given_guard = max_log_weight
        self.constants = constants or AutoConstants()
        super().__init__(num_anchors)

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

    def _begin(self, progress: float) -> None:
        self.begun = progress
        self.window = Window(self.num_anchors)

    def grow(self, num_anchors: int) -> None:
        """Go on with a table that has more anchors now."""
        self.num_anchors = num_anchors
        if not self.window.fit_to(num_anchors):
            self._begin(self.begun)

    def move(self, difference: float) -> None:
        """Go on in a run of another length: what was at a progress p is at p + ``difference`` now."""
        self.begun += difference

    # ---------------------------------------------------------------- what the rule says

    def arguments(self, progress: float, rows: Tensor | None = None) -> dict[str, Any]:
        """Log α, constant within the step, and the guard."""
        guard = self.max_log_weight if self.given_guard is None else self.given_guard
        return {"log_alpha": self.log_alpha(progress), "schedule": "constant", "max_log_weight": guard}

    def log_alpha(self, progress: float) -> float:
        """Log α of the step at ``progress``, ∞ in the first window.

        Args:
            progress: fraction of the run that is done, in [0, 1].
        """
        if self.reference is None:
            return math.inf
        log_alpha, risen = -self.reference - self._c(progress), self.constants.risen
        if progress <= risen:
            return log_alpha
        return scheduled_log("cosine", log_alpha, -math.inf, (progress - risen) / (1.0 - risen))

    def _c(self, progress: float) -> float:
        rise = self.constants.rise
        if self.num_anchors == 1:
            rise = min(rise, self._log_share_of_run())
        if self.variance is not None:
            rise = min(rise, math.log(max(self.variance, 1e-30) / (2.0 * self.constants.variance)))
        c = min(rise * min(progress / self.constants.risen, 1.0), self._c_of_visits())
        if self.fall <= 0 or not self.variance:
            return c
        return min(c, math.log(self.constants.lag_to_noise * math.sqrt(self.variance) / self.fall))

    def _log_share_of_run(self) -> float:
        done = max(self.begun, self.constants.window)  # of the run, when the visits so far had been made
        return math.log(self.constants.share_of_run * self.visits_of_each / done)

    def _c_of_visits(self) -> float:
        visits, many = self.visits_of_each, self.constants.many_visits
        return math.log(self.constants.share * visits * (1.0 + visits / many))

    @property
    def max_log_weight(self) -> float:
        """The guard that goes with it."""
        return min(max(self._c_of_visits(), self.constants.least_guard), self.constants.largest_guard)

    def suggestion(self) -> dict[str, Any] | None:
        """A fixed log α for a run like this one: c is half of what it rises to. And the guard that there was."""
        too_short = self.num_anchors <= FEW_ANCHORS and self.epoch >= 1.0
        if self.reference is None or too_short:
            return None
        log_alpha = -self.reference - self._c(self.constants.risen / 2)
        return {"log_alpha": log_alpha, "max_log_weight": self.max_log_weight}

    def statistics(self) -> dict[str, float]:
        """The reference, once there is one."""
        return {} if self.reference is None else {"reference": self.reference}

    # ---------------------------------------------------------------- what the rule sees

    def observe(self, step: Observed) -> None:
        """Take in a step."""
        self.window.observe(step)

    def observe_one(self, row: int, log_mean: float, nu: float, before: float | None) -> bool:
        """Take in a step of one row, if there is but one anchor."""
        if self.num_anchors > 1:
            return False
        self.window.observe_one(log_mean, before)
        return True

    def turn(self, progress: float, anchors_in_use: Callable[[], int]) -> None:
        """Close the window if it is over."""
        if self.window_is_over(progress) and self.window.seen:
            self.close_window(progress, self.window.sums(), anchors_in_use())

    def window_is_over(self, progress: float) -> bool:
        """Whether it is time to close the window."""
        few = self.num_anchors <= FEW_ANCHORS
        window = max(self.constants.window, min(self.epoch, self.constants.largest_window) if few else 0.0)
        self.begun = min(self.begun, progress)  # the run before is over
        # Sums of fractions: the epoch's last step is not to fall into the next window by a rounding.
        return progress - self.begun >= window * (1 - 1e-9)

    def close_window(self, progress: float, sums: WindowSums, anchors_in_use: int) -> None:
        """Take in a window and begin the next.

        Args:
            progress: fraction of the run that is done, in [0, 1].
            sums: what it saw.
            anchors_in_use: how many anchors were visited so far.
        """
        self.visits += sums.seen
        self.visits_of_each = max(self.visits / max(anchors_in_use, 1), 1.0)
        if sums.known > 0 and math.isfinite(sums.squares):
            self.variance = sums.squares / sums.known
        if sums.with_samples > 0:
            # ν cannot be below the mean ℓ for good: where it is, it was so from the start.
            objective = max(sums.nu, sums.log_mean) / sums.with_samples if sums.objective is None else sums.objective
            self.reference = objective if self.reference is None else min(self.reference, objective)
            self._take_fall(sums.log_mean / sums.with_samples)
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

    # ---------------------------------------------------------------- state

    _STATE = ("reference", "variance", "falls", "fall", "visits", "visits_of_each", "begun")

    def get_extra_state(self) -> dict[str, Any]:
        """The state as plain data."""
        return {name: getattr(self, name) for name in self._STATE} | self.window.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the state that :meth:`get_extra_state` gave."""
        for name in self._STATE:
            setattr(self, name, state[name])
        self.window.load(state)
        self.grow(self.num_anchors)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # A checkpoint of a run with another step size has no such state, and the rule begins anew; so does one of the
        # rule that the first versions had, with other numbers.
        state = state_dict.get(f"{prefix}_extra_state")
        if state is not None and state.keys() == self.get_extra_state().keys():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        else:
            state_dict.pop(f"{prefix}_extra_state", None)
            self.reset()
