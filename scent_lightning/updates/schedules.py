"""How a step size moves over a run: constant, or along half a cosine.

``progress`` is the fraction of the run that is done, from 0 at the first batch to 1 at the end.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from scent_lightning.updates.base import DualUpdate
from scent_lightning.validation import checked_choice, checked_number

__all__ = ["Schedule", "ScheduledAlpha", "ScheduledUpdate", "scheduled", "scheduled_log"]

Schedule = Literal["constant", "cosine"]


def _remaining(progress: float) -> float:
    """Weight of the start value, (1 + cos π·progress) / 2, from 1 to 0."""
    return (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2.0


def scheduled(schedule: str, start: float, final: float, progress: float) -> float:
    """Value of a step size at ``progress``: ``start`` throughout, or from ``start`` to ``final`` along half a cosine.

    Example:
        >>> scheduled("cosine", 1.0, 0.5, 0.5)
        0.75
    """
    if schedule == "constant":
        return start
    weight = _remaining(progress)
    return final + (start - final) * weight


def scheduled_log(schedule: str, log_start: float, log_final: float, progress: float) -> float:
    """The same for a step size given by its logarithm: the cosine runs over the step size itself, not its logarithm.

    Exact for logarithms of any size, and −inf for a step size of 0.

    Example:
        >>> round(scheduled_log("cosine", 700.0, float("-inf"), 0.5), 6)
        699.306853
    """
    if schedule == "constant":
        return log_start
    weight = _remaining(progress)
    terms = [log + math.log(part) for log, part in ((log_start, weight), (log_final, 1.0 - weight)) if part > 0]
    largest = max(terms)
    if math.isinf(largest):
        return largest
    return largest + math.log(sum(math.exp(term - largest) for term in terms))


class ScheduledUpdate(DualUpdate):
    """Base class of the updates with a step size that follows a schedule.

    A subclass works its step size out from ``self.schedule`` and ``self.final`` by :func:`scheduled` (or
    :func:`scheduled_log`), and names it in :meth:`~scent_lightning.updates.DualUpdate.step_sizes`, which is what is
    logged.

    Args:
        schedule: "constant" or "cosine".
        final: what the step size is at the end of a cosine schedule; None is the subclass's own.
        max_log_weight: the guard (see :class:`~scent_lightning.updates.DualUpdate`); None is without.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> class Halfway(ScheduledUpdate):
        ...     def share(self, progress):
        ...         return scheduled(self.schedule, 0.5, self.final or 0.0, progress)
        ...     def step_from_log_mean(self, nu, log_mean, progress=0.0):
        ...         return nu + self.share(progress) * (log_mean - nu)
        ...     def step_sizes(self, progress=0.0):
        ...         return {"share": self.share(progress)}
        >>> Halfway("cosine").step(torch.zeros(1), torch.full((1, 4), 3.0), progress=0.5)
        tensor([0.7500])
    """

    def __init__(
        self, schedule: Schedule = "constant", final: float | None = None, max_log_weight: float | None = None
    ) -> None:
        super().__init__(max_log_weight=max_log_weight)
        self.schedule = checked_choice("schedule", schedule, get_args(Schedule))
        self.final = final


class ScheduledAlpha(ScheduledUpdate):
    """Base class of the updates with a step size α of their own units, which a cosine takes to ``final``.

    Args:
        alpha: step size, above 0.
        schedule: "constant", or "cosine" from ``alpha`` to ``final``.
        final: step size at the end of a cosine schedule; None means 0.
        max_log_weight: the guard (see :class:`~scent_lightning.updates.DualUpdate`); None is without.

    Raises:
        InputError: an argument out of its range.
    """

    def __init__(
        self,
        alpha: float,
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
    ) -> None:
        super().__init__(schedule, final, max_log_weight)
        self.alpha = checked_number("alpha", alpha, above=0)
        self.final = checked_number("final", final, least=0, or_none=True)

    def _alpha_at(self, progress: float) -> float:
        return scheduled(self.schedule, self.alpha, self.final or 0.0, progress)

    def step_sizes(self, progress: float = 0.0) -> dict[str, float]:
        """α at ``progress``."""
        return {"alpha": self._alpha_at(progress)}
