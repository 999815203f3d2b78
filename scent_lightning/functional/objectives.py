"""The dual objectives, with ν a constant for the gradient."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from scent_lightning.functional.log_mean_exp import at_least_float32, mean_over, shift_by_largest

__all__ = ["exponential_objective", "exponential_objective_from", "softplus_objective", "with_gradient"]


def exponential_objective_from(nu: Tensor, largest: Tensor, mean: Tensor, may_be_empty: bool) -> tuple[Tensor, Tensor]:
    """:func:`exponential_objective` from the largest score and :func:`mean_over`, with no other exponential of scores.

    Args:
        nu: dual variables, shape ``(B,)``.
        largest: largest valid score M of each row, shape ``(B,)``.
        mean: mean of exp(S − M), shape ``(B,)``; may carry a gradient.
        may_be_empty: whether a row may be without a valid sample (its ``largest`` is −inf and its result 0).

    Returns:
        The objective and its derivative by ``mean``, exp(M − ν), each of shape ``(B,)``.
    """
    nu = nu.detach()
    weight = (largest - nu).exp_().to(mean.dtype)
    objective = torch.addcmul((nu - 1).to(mean.dtype), mean, weight)
    if may_be_empty:
        objective = torch.where(largest == -math.inf, objective.new_zeros(()), objective)
    return objective, weight


def exponential_objective(nu: Tensor, scores: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Dual objective of each anchor, :math:`\frac{1}{m_i} \sum_j e^{S_{ij} - \nu_i} + \nu_i - 1`.

    ν is a constant, so the gradient is exactly :math:`\frac{1}{m_i} \sum_j e^{S_{ij} - \nu_i} \nabla S_{ij}`. The value
    is never below the row's log-mean-exp, and equal to it where ν is (Wei et al. 2026, the min–min formulation).

    Args:
        nu: dual variables, shape ``(B,)``.
        scores: shape ``(B, m)``; carries the gradient.
        mask: bool, shape ``(B, m)``, True where a sample counts.

    Returns:
        Shape ``(B,)``, float32 or float64; 0 for a row without a valid sample; infinite where a weight
        :math:`e^{S - \nu}` is too large for that dtype.
    """
    largest, shifted = shift_by_largest(scores, mask)
    mean = mean_over(shifted.exp(), scores.shape[1] if mask is None else mask.sum(dim=1))
    return exponential_objective_from(nu, largest, mean, may_be_empty=True)[0]


def softplus_objective(nu: Tensor, scores: Tensor, rho: float, mask: Tensor | None = None) -> Tensor:
    r"""Softplus dual objective of each anchor (Gladin et al. 2025).

    .. math:: \frac{1}{m_i} \sum_j \frac{\log(1 + \rho e^{S_{ij} - \nu_i})}{\rho} + \nu_i - 1

    Args:
        nu: dual variables, shape ``(B,)``; a constant for the gradient.
        scores: shape ``(B, m)``; carries the gradient.
        rho: how strongly the exponential is truncated; exact as it goes to 0.
        mask: bool, shape ``(B, m)``, True where a sample counts.

    Returns:
        Shape ``(B,)``, float32 or float64; 0 for a row without a valid sample.
    """
    values = at_least_float32(scores)
    nu = nu.detach().to(values.dtype)
    if mask is None and scores.shape[1] > 0:
        objective = (softplus(values - nu.unsqueeze(1) + math.log(rho)) / rho).mean(dim=1) + (nu - 1)
        return torch.where(values.detach().amax(dim=1) == -math.inf, objective.new_zeros(()), objective)
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    counts = mask.sum(dim=1).masked_fill(~(mask & (values.detach() != -math.inf)).any(dim=1), 0)
    values = torch.where(mask, values, nu.unsqueeze(1))
    terms = softplus(values - nu.unsqueeze(1) + math.log(rho)) / rho
    objective = terms.masked_fill(~mask, 0.0).sum(dim=1) / counts.clamp(min=1) + (nu - 1)
    return torch.where(counts > 0, objective, objective.new_zeros(()))


class _WithGradient(torch.autograd.Function):
    """A known value as a function of the scores, of known gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor, exponentials: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(exponentials, weights)
        ctx.dtype = scores.dtype
        return value.clone()

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, weights = ctx.saved_tensors
        return (exponentials * (weights * gradient).unsqueeze(1)).to(ctx.dtype), None, None, None


def with_gradient(scores: Tensor, value: Tensor, exponentials: Tensor, weights: Tensor) -> Tensor:
    """``value``, a scalar, with the gradient ``exponentials * weights[:, None]`` with respect to ``scores``.

    One node of the autograd graph for a loss that was computed without one.

    Args:
        scores: shape ``(B, m)``.
        value: a scalar.
        exponentials: shape ``(B, m)``, float32 or float64.
        weights: shape ``(B,)``, of the same dtype.
    """
    return cast(Tensor, _WithGradient.apply(scores, value, exponentials, weights))  # type: ignore[no-untyped-call]
