r"""The learning rate found during the run: no number to set.

A proximal step says by itself whether the learning rate is too large: W(a) is what a step takes off its own batch's
log E, in nats, and where it is not small the step is limited (see :mod:`scent_lightning.duals.weight_step`). So the
rate rises from where steps do next to nothing, by the same factor each step, until the mean of W(a) reaches a limit.
It falls from there over the rest of the run. This is a learning rate range test (Smith 2017) within the run itself.
W(a) is a number of nats whatever the problem is, and rates have no unit of their own: features of another scale change
what is found, and nothing else.

* The first step is at a rate of practically nothing, and tells how a depends on the rate. The second has a = 1e-4.
* From there the rate rises by a power of ten in each 4 % of the run. The mean of W(a) goes back over as many steps:
  rare rows are what limits steps, and they are to have been there. Where they are very rare and lie very far out, few
  steps are limited, but by many nats: the root mean square of W(a), divided by 4.5, counts where it is more than the
  mean.
* The limit depends on what a step knows of the next ones. With a single anchor, whose ν all batches share, it is 0.2
  nats, with a rate that falls by four powers of ten, and at last to 0: it passes all rates on its way, so that its top
  may be above the best one. With many anchors a batch has few of them, all of which move the same weights: 0.005, with
  a cosine. Where batches move weights of their own, such as rows of classes: 3, with a cosine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from scent_lightning.duals.weight_step import takes_proximal
from scent_lightning.errors import InputError
from scent_lightning.progress import ProgressLR, cosine, geometric, run_length, run_progress
from scent_lightning.validation import checked_choice, checked_number

if TYPE_CHECKING:
    from scent_lightning.duals.mixin import DualVariableMixin

__all__ = ["AutoLR", "AutoRate", "Fall"]

Fall = Literal["geometric", "cosine"]

_MEASURING = 1e-30  # the rate of the first step
_FIRST_A = 1e-4
# By how much the root mean square of W(a) is above the mean where few steps are limited, and by many nats.
_FAR = 4.5
# As fractions of the run from the first step: in which the rate rises by a power of ten, and where it stops.
_WINDOW = 0.04
_LATEST_TOP = 0.3


class AutoRate:
    """The rule by itself: told of each step, it says the rate of the next.

    Args:
        limit: mean of W(a), in nats, at which the rate stops rising; above 0.
        fall: how the rate falls from its top: "geometric", to a ten-thousandth and over its last twentieth to 0, or
            "cosine", to 0.

    Attributes:
        log_rate: logarithm of the rate while it rises; None before the first step.
        mean: of W(a) over the last 4 % of the run.
        mean_square: of W(a) over as much.
        top: logarithm of the largest rate; None while it rises.
        since: progress of the run at the top.
        begun: progress of the run at the first step; None before. A run that had another rate until then may go on.
        progress: of the run at the latest step.

    Raises:
        InputError: ``limit`` or ``fall`` is out of its range.

    Example:
        >>> rate = AutoRate(limit=0.2)
        >>> rate.at(0.0)
        1e-30
        >>> rate.observe(decrease=1e-28, progress=0.01)  # a would be 100 at a rate of 1
        >>> round(rate.at(0.01), 12)
        1e-06
        >>> rate.observe(decrease=5.0, progress=0.02)  # the step was limited
        >>> rate.at(0.02) > rate.at(0.5) > rate.at(1.0)
        True
    """

    def __init__(self, limit: float = 0.2, fall: Fall = "geometric") -> None:
        self.limit: float = checked_number("limit", limit, above=0)
        self.fall: Fall = checked_choice("fall", fall, get_args(Fall))
        self.log_rate: float | None = None
        self.mean = self.mean_square = 0.0
        self.top: float | None = None
        self.since = 0.0
        self.begun: float | None = None
        self.progress = 0.0

    def observe(self, decrease: float | None, progress: float) -> None:
        """Take in a step.

        Args:
            decrease: its W(a), in nats; None where it is not known.
            progress: fraction of the run that is done with it, in [0, 1].
        """
        passed, self.progress = max(progress - self.progress, 0.0), progress
        self.begun = progress if self.begun is None else self.begun
        if self.top is not None:
            return
        if self.log_rate is None:
            if decrease is not None and decrease > 0:
                self.log_rate = math.log(_MEASURING) + math.log(_FIRST_A) - (math.log(decrease) + decrease)  # a = W e^W
            return
        rest = max(1 - self.begun, 1e-9)
        windows = passed / (_WINDOW * rest)
        if decrease is not None:
            part = -math.expm1(-windows)
            self.mean += part * (decrease - self.mean)
            self.mean_square += part * (decrease**2 - self.mean_square)
        limited = max(self.mean, self.mean_square**0.5 / _FAR) > self.limit
        if limited or progress > self.begun + _LATEST_TOP * rest:
            self.top, self.since = self.log_rate, progress
        else:
            self.log_rate += windows * math.log(10)

    def at(self, progress: float) -> float:
        """The rate of the next step.

        Args:
            progress: fraction of the run that is done before it, in [0, 1].
        """
        if self.top is None:
            return _MEASURING if self.log_rate is None else math.exp(self.log_rate)
        fallen = min(max((progress - self.since) / (1 - self.since), 0.0), 1.0)
        return math.exp(self.top) * (cosine if self.fall == "cosine" else geometric)(fallen)

    def state_dict(self) -> dict[str, Any]:
        """What was found, as plain data."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what was found; the limit and the fall stay this one's."""
        vars(self).update({**state_dict, "limit": self.limit, "fall": self.fall})


class AutoLR(ProgressLR):
    """The learning rate of a module with proximal steps, found during the run; for ``"interval": "step"``.

    Args:
        optimizer: of SGD's kind. The rates of its parameter groups are multiplied by what is found: 1 for all, or
            their ratios.
        module: that it trains, under a Trainer, with ``weight_step`` "proximal".
        limit: mean of W(a), in nats, at which the rate stops rising; above 0. See
            :mod:`scent_lightning.duals.auto_rate`.
        fall: "geometric" or "cosine".

    Raises:
        InputError: the steps are not proximal, the run has no end that is known, or an argument is out of its range;
            in training no step tells of a rate.

    Example:
        >>> import lightning as L, torch
        >>> from scent_lightning.duals import AutoLR, DualVariableMixin
        >>> class Module(DualVariableMixin, L.LightningModule):
        ...     def configure_optimizers(self):
        ...         optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)
        ...         return AutoLR(optimizer, self).each_step()
    """

    def __init__(
        self, optimizer: Optimizer, module: DualVariableMixin, limit: float = 0.2, fall: Fall = "geometric"
    ) -> None:
        if module.weight_step != "proximal" or not takes_proximal(optimizer):
            raise InputError(
                "a learning rate that is found needs proximal steps: weight_step 'proximal' and an optimiser of SGD's "
                f"kind; got weight_step {module.weight_step!r} and {type(optimizer).__name__}"
            )
        run_length(module.trainer, "a learning rate that is found")
        self.found = AutoRate(limit, fall)
        self._module = module
        super().__init__(optimizer, lambda progress, _: self.found.at(progress), module.trainer)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group now, after a step that counts, or at the start."""
        if self.last_epoch > 0:
            step, rising = self._module.last_weight_step, self.found.top is None
            progress = run_progress(self.trainer) or 0.0
            self.found.observe(None if step is None else step.decrease, progress)
            since = progress - (self.found.begun or 0.0)
            if self.found.log_rate is None and since > _WINDOW:
                raise InputError(
                    f"no learning rate was found: in {100 * since:.0f} % of the run no loss with a gradient was "
                    "made of entropic_risk"
                )
            if rising and self.found.top is not None:
                rank_zero_info(f"The learning rate has risen to {math.exp(self.found.top):.3g}, and falls from here.")
        return super().get_lr()

    def state_dict(self) -> dict[str, Any]:
        """What was found, the rates and how many steps were taken, as plain data."""
        return {**super().state_dict(), "found": self.found.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of this schedule; of another one how many steps were taken."""
        if (found := state_dict.get("found")) is not None:
            self.found.load_state_dict(found)
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "found"})
