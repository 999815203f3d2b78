"""The proximal point method: SCENT's step with the Euclidean distance."""

from __future__ import annotations

from torch import Tensor

from scent_lightning import functional
from scent_lightning.updates.schedules import ScheduledAlpha

__all__ = ["ProximalPoint"]


class ProximalPoint(ScheduledAlpha):
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

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        return functional.proximal_point_step(nu, log_mean, self._alpha_at(progress))
