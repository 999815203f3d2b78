"""ASGD: gradient steps on the min–min objective."""

from __future__ import annotations

from torch import Tensor

from scent_lightning import functional
from scent_lightning.updates.schedules import Schedule, ScheduledUpdate, scheduled
from scent_lightning.validation import checked_number

__all__ = ["ASGD"]


class ASGD(ScheduledUpdate):
    r"""Alternating SGD on the min–min objective: :math:`\nu \leftarrow \nu - \alpha (1 - e^{\ell - \nu})`.

    Overflows where scores vary by more than a few tens: then a
    :class:`~scent_lightning.errors.DualDivergenceError` is raised.

    Args:
        alpha: step size, above 0.
        schedule: "constant", or "cosine" (published) from ``alpha`` to ``final``.
        final: step size at the end of a cosine schedule; None means 0.
        max_log_weight: the guard (see :class:`~scent_lightning.updates.DualUpdate`); None is the published method.

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
    ) -> None:
        super().__init__(schedule, final, max_log_weight)
        self.alpha = checked_number("alpha", alpha, above=0)
        self.final = checked_number("final", final, least=0, or_none=True)

    def _alpha_at(self, progress: float) -> float:
        return scheduled(self.schedule, self.alpha, self.final or 0.0, progress)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        return functional.asgd_step(nu, log_mean, self._alpha_at(progress))

    def step_sizes(self, progress: float = 0.0) -> dict[str, float]:  # noqa: D102
        return {"alpha": self._alpha_at(progress)}
