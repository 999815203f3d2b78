"""What a rule is that finds a dual update's step size while the run goes on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["Observed", "StepSizeRule"]


class Observed(NamedTuple):
    """One step of a table, of the rows of all processes in rank order, each of shape ``(N,)``; everything detached.

    Attributes:
        rows: dataset indices, int64.
        log_mean: ℓ of each, in float64 (float32 on devices without it), equal where an index repeats; −inf where there
            was no sample.
        nu: the new ν of each, float32.
        before: the ν it had, in the dtype of ``log_mean``; ℓ where it had none.
        visited: whether it had one, bool.
        has_samples: whether there was a sample, bool; None if every row had one.
    """

    rows: Tensor
    log_mean: Tensor
    nu: Tensor
    before: Tensor
    visited: Tensor
    has_samples: Tensor | None


class StepSizeRule(nn.Module):
    """Base class of the rules that find a step size during the run.

    An update gives one by :meth:`~scent_lightning.updates.DualUpdate.step_size_rule`; the table owns it, tells it every
    step, and asks for the update's :meth:`arguments` before each. It depends on what it is told alone, so that every
    process of a run finds the same. Its state is plain data (:meth:`get_extra_state`), saved with the table.

    Args:
        num_anchors: number of rows n of the table.

    Attributes:
        epoch: an epoch as a fraction of the run, 0 if unknown; set as training starts.
        needs_progress: whether the rule has to know how much of the run is done.

    Example:
        >>> import math
        >>> import torch
        >>> from scent_lightning.updates import SOX
        >>> class Harmonic(StepSizeRule):  # the average of all steps so far
        ...     def reset(self):
        ...         self.steps = 0
        ...     def observe(self, step):
        ...         self.steps += 1
        ...     def arguments(self, progress, rows=None):
        ...         return {"gamma": 1 / (self.steps + 1)}
        ...     def get_extra_state(self):
        ...         return {"steps": self.steps}
        ...     def set_extra_state(self, state):
        ...         self.steps = state["steps"]
        >>> class Mean(SOX):
        ...     def step_size_rule(self, num_anchors):
        ...         return Harmonic(num_anchors)
        >>> from scent_lightning.duals import DualVariable
        >>> variable = DualVariable(1, Mean(gamma=1.0))
        >>> for score in (0.0, 2.0, 1.0):
        ...     loss = variable.entropic_risk(torch.tensor([[score]]), torch.tensor([0]), progress=0.0)
        >>> round(variable.nu.exp().item(), 4) == round((1 + math.exp(2) + math.exp(1)) / 3, 4)
        True
    """

    needs_progress = True

    def __init__(self, num_anchors: int) -> None:
        super().__init__()
        self.num_anchors = num_anchors
        self.epoch = 0.0
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Begin anew."""

    @abstractmethod
    def observe(self, step: Observed) -> None:
        """Take in a step, after it was written."""

    @abstractmethod
    def arguments(self, progress: float, rows: Tensor | None = None) -> dict[str, Any]:
        """Arguments of the update for a step, by their names.

        Args:
            progress: fraction of the run that is done, in [0, 1].
            rows: dataset indices of the step, of all processes, shape ``(N,)``, for arguments that differ between
                anchors; None where only one number is asked for.
        """

    def observe_one(self, row: int, log_mean: float, nu: float, before: float | None) -> bool:
        """:meth:`observe` of a step of one row in plain numbers; False where there is no such form.

        An optional shortcut, for a table with one anchor.

        Args:
            row: dataset index.
            log_mean: ℓ.
            nu: the new ν.
            before: the ν it had, None if it had none.
        """
        return False

    def turn(self, progress: float, anchors_in_use: Callable[[], int]) -> None:
        """Take stock, where it is time for it; called before every step.

        Args:
            progress: fraction of the run that is done, in [0, 1].
            anchors_in_use: says how many anchors were visited so far.
        """

    def grow(self, num_anchors: int) -> None:
        """Go on with a table that has more anchors now.

        Args:
            num_anchors: new number of rows n, at least the old one.
        """
        self.num_anchors = num_anchors

    def move(self, difference: float) -> None:
        """Go on in a run of another length: what was at a progress p is at p + ``difference`` now."""

    def adopt(self, visited: Tensor) -> None:
        """Begin with a table that was loaded; the rule's own state, if there is one, is loaded next.

        Args:
            visited: which anchors have a ν, bool, shape ``(n,)``.
        """

    def suggestion(self) -> dict[str, Any] | None:
        """Arguments for a run like this one with a fixed step size; None where too little was seen."""
        return None

    def statistics(self) -> dict[str, float]:
        """What is worth watching, by name: logged as ``dual/NAME/…``."""
        return {}
