"""ASGD on the softplus approximation."""

from __future__ import annotations

from torch import Tensor

from scent_lightning import functional
from scent_lightning.updates.asgd import ASGD
from scent_lightning.updates.base import DualUpdate
from scent_lightning.updates.schedules import Schedule
from scent_lightning.validation import checked_number

__all__ = ["SoftplusASGD"]


class SoftplusASGD(ASGD):
    r"""ASGD on the softplus approximation (Gladin et al. 2025), which replaces exp(x) by softplus(x + log ρ)/ρ.

    .. math:: \nu \leftarrow \nu - \alpha \Bigl(1 - \frac{1}{m} \sum_j \frac{\sigma(S_j - \nu + \log \rho)}{\rho}\Bigr)

    Args:
        alpha: step size, above 0.
        rho: how strongly the exponential is truncated, above 0; exact as it goes to 0. Published: 1e-3.
        schedule: "constant", or "cosine" (published) from ``alpha`` to ``final``.
        final: step size at the end of a cosine schedule; None means 0.
        max_log_weight: the guard (see :class:`~scent_lightning.updates.DualUpdate`); None is the published method.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> SoftplusASGD(alpha=0.5, rho=1e-3).step(torch.zeros(1), torch.full((1, 4), 1.0))
        tensor([0.8555])
    """

    def __init__(
        self,
        alpha: float,
        rho: float,
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
    ) -> None:
        super().__init__(alpha, schedule, final, max_log_weight)
        self.rho = checked_number("rho", rho, above=0)

    def step_from_scores(  # noqa: D102
        self, nu: Tensor, scores: Tensor, mask: Tensor | None = None, progress: float = 0.0
    ) -> Tensor:
        return functional.softplus_asgd_step(nu, scores, self._alpha_at(progress), self.rho, mask)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:
        """Raise NotImplementedError: the softplus step needs the scores themselves."""
        return DualUpdate.step_from_log_mean(self, nu, log_mean, progress)

    def objective(self, nu: Tensor, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Softplus dual objective (see :func:`scent_lightning.functional.softplus_objective`), shape ``(B,)``."""
        return functional.softplus_objective(nu, scores, self.rho, mask)
