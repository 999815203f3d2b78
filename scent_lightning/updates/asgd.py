"""ASGD: gradient steps on the min–min objective."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from scent_lightning import functional
from scent_lightning.errors import InputError
from scent_lightning.updates.schedules import Schedule, ScheduledAlpha
from scent_lightning.validation import checked_number

__all__ = ["ASGD"]


class ASGD(ScheduledAlpha):
    r"""Alternating SGD on the min–min objective: :math:`\nu \leftarrow \nu - \alpha (1 - e^{\ell - \nu})`.

    Overflows where scores vary by more than a few tens: then a
    :class:`~scent_lightning.errors.DualDivergenceError` is raised.

    Args:
        alpha: step size, above 0.
        schedule: "constant", or "cosine" (published) from ``alpha`` to ``final``.
        final: step size at the end of a cosine schedule; None means 0.
        max_log_weight: the guard (see :class:`~scent_lightning.updates.DualUpdate`); None is the published method.
        bounds: the least and the largest ν, on which the step is projected; None does not. With the bounds of the
            scores it is the SGD that the analysis compares SCENT with (Wei et al. 2026).

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> ASGD(alpha=0.5).step(torch.zeros(1), torch.full((1, 4), 1.0))
        tensor([0.8591])
    """

    def __init__(
        self,
        alpha: float,
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(alpha, schedule, final, max_log_weight)
        self.bounds = _checked_bounds(bounds)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        moved = functional.asgd_step(nu, log_mean, self._alpha_at(progress))
        return moved if self.bounds is None else moved.clamp(*self.bounds)


def _checked_bounds(bounds: Any) -> tuple[float, float] | None:
    """The bounds as two numbers, the first below the second.

    Raises:
        InputError: they are not.
    """
    if bounds is None:
        return None
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        raise InputError(f"bounds must be None or two numbers, the least and the largest ν, got {bounds!r}")
    low, high = (checked_number("bounds", bound) for bound in bounds)
    if not low < high:
        raise InputError(f"bounds must rise, the least ν before the largest, got {bounds!r}")
    return low, high
