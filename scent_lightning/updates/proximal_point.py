"""The proximal point method: SCENT's step with the Euclidean distance."""

from __future__ import annotations

from torch import Tensor

from scent_lightning import functional
from scent_lightning.updates.schedules import Schedule, ScheduledUpdate, scheduled
from scent_lightning.validation import checked_number

__all__ = ["ProximalPoint"]


class ProximalPoint(ScheduledUpdate):
    r"""The stochastic proximal point step in ν, which SCENT's Bregman divergence replaces.

    .. math:: \nu \leftarrow \operatorname{argmin}_v\; e^{\ell - v} + v + \frac{(v - \nu)^2}{2 \alpha}
              = \nu - \alpha + W\bigl(\alpha e^{\ell + \alpha - \nu}\bigr)

    with Lambert's function W. It is as stable as SCENT, but its distance does not know the geometry of the objective:
    the step size that suits an anchor depends on where its ν lies (Wei et al. 2026, analysis of the SPMD update).

    Args:
        alpha: step size, above 0.
        schedule: "constant", or "cosine" from ``alpha`` to ``final``.
        final: step size at the end of a cosine schedule; None means 0.
        max_log_weight: the guard (see :class:`~scent_lightning.updates.DualUpdate`); None is the published method.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> ProximalPoint(alpha=1.0).step(torch.zeros(1), torch.full((1, 4), 1.0))
        tensor([0.5571])
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
        return functional.proximal_point_step(nu, log_mean, self._alpha_at(progress))

    def step_sizes(self, progress: float = 0.0) -> dict[str, float]:  # noqa: D102
        return {"alpha": self._alpha_at(progress)}
