"""Losses of a regression's residuals."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

__all__ = ["ResidualLoss", "residual_losses"]

ResidualLoss = Literal["squared", "absolute", "huber"]


def residual_losses(residual: Tensor, loss: ResidualLoss, huber_delta: float = 1.0) -> Tensor:
    """Loss of each row.

    Args:
        residual: prediction less target, any shape.
        loss: "squared" (r²), "absolute" (|r|) or "huber" (r²/2 up to ``huber_delta``, linear beyond).
        huber_delta: above 0.

    Returns:
        The shape of ``residual``.

    Example:
        >>> residual_losses(torch.tensor([-3.0, 0.5]), "huber")
        tensor([2.5000, 0.1250])
    """
    if loss == "squared":
        return residual.square()
    if loss == "absolute":
        return residual.abs()
    return huber_loss(residual, torch.zeros_like(residual), reduction="none", delta=huber_delta)
