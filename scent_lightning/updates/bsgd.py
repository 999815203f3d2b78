"""BSGD: no memory between batches."""

from __future__ import annotations

from torch import Tensor

from scent_lightning import functional
from scent_lightning.updates.base import DualUpdate

__all__ = ["BSGD"]


class BSGD(DualUpdate):
    r"""Biased SGD: ν is the batch's own log-mean-exp, :math:`\nu \leftarrow \ell`.

    The usual mini-batch softmax, and OpenCLIP's loss. No memory between batches, hence a bias that does not go away
    (Hu et al. 2020; Wei et al. 2026 show it is SCENT with an infinite step size).

    Args:
        max_log_weight: the guard, in nats, or None, as every update takes it; without effect here, since ν = ℓ.

    Example:
        >>> import torch
        >>> BSGD().step(torch.zeros(1), torch.full((1, 4), 3.0))
        tensor([3.])
    """

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        return functional.wide(log_mean).clone()

    def step_of_one(self, nu: float, log_mean: float, progress: float = 0.0) -> float:  # noqa: D102
        return log_mean
