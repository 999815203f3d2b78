r"""Pure tensor functions: the log-mean-exp, the six dual updates and the dual objectives.

Notation: ``scores`` is :math:`S` with one row per anchor, shape ``(B, m)``; ``mask`` is True where a sample counts;
:math:`\ell_i = \log \frac{1}{m_i} \sum_j \exp S_{ij}` is the log-mean-exp over the valid samples of row ``i``; ``nu``
is the dual variable :math:`\nu`, shape ``(B,)``. All quantities are dimensionless (scores are already divided by the
temperature).

Everything that is only ``(B,)`` long is computed in float64 (float32 on devices without it), because the updates
subtract numbers of similar size; what is ``(B, m)`` long is computed in float32, or float64 if it came so, and never in
half precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

__all__ = [
    "asgd_step",
    "exponential_objective",
    "guard",
    "log_mean_exp",
    "proximal_mirror_descent_step",
    "softplus_asgd_step",
    "softplus_objective",
    "sox_step",
    "umax_step",
    "valid_counts",
]


def wide(value: Tensor) -> Tensor:
    """Detach and convert to float64, or to float32 where the device has no float64."""
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)


def at_least_float32(scores: Tensor) -> Tensor:
    """Convert half precision (and integers) to float32; leave float32 and float64 as they are."""
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


def valid_counts(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Number of samples that count in each row, shape ``(B,)``, wide float."""
    if mask is None:
        return wide(torch.full((scores.shape[0],), float(scores.shape[1]), device=scores.device))
    return wide(mask.sum(dim=1))


def log_mean_exp(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Log-mean-exp of each row over its valid samples, :math:`\ell_i = \log \frac{1}{m_i} \sum_j \exp S_{ij}`.

    Args:
        scores: shape ``(B, m)``, any floating dtype; half precision is raised to float32 before the exponential.
        mask: bool, shape ``(B, m)``, True where a sample counts; None means all do. Values under a False are ignored,
            NaN and infinity included.

    Returns:
        Shape ``(B,)``, detached, float64 (float32 on devices without it); −inf for a row without a valid sample.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[0.0, 0.0], [1000.0, 1000.0]])
        >>> log_mean_exp(scores).tolist()
        [0.0, 1000.0]
        >>> log_mean_exp(scores, torch.tensor([[True, True], [True, False]])).tolist()
        [0.0, 1000.0]
    """
    values = at_least_float32(scores.detach())
    if mask is not None:
        values = values.masked_fill(~mask, -math.inf)
    if values.shape[1] == 0:
        return wide(values.new_full((values.shape[0],), -math.inf))
    largest = values.amax(dim=1, keepdim=True)
    # A row of −inf has nothing to subtract; +inf and NaN must stay visible in the result.
    shift = largest.masked_fill(largest == -math.inf, 0.0)
    total = (values - shift).exp_().sum(dim=1)
    return wide(shift.squeeze(1)) + (wide(total) / valid_counts(scores, mask).clamp(min=1)).log()


def proximal_mirror_descent_step(nu: Tensor, log_mean: Tensor, log_alpha: float) -> Tensor:
    r"""SCENT's stochastic proximal mirror descent step in closed form (Wei et al. 2026, lemma on the SPMD update).

    .. math:: \nu + \log(1 + \alpha e^{\ell}) - \log(1 + \alpha e^{\nu})

    the minimiser over :math:`v` of :math:`e^{\ell - v} + v + D(v, \nu) / \alpha` with
    :math:`D(a, b) = e^{-a} - e^{-b} + e^{-b} (a - b)`. The result lies between ``nu`` and ``log_mean``; it is
    ``log_mean`` for ``log_alpha = inf`` and ``nu`` for ``log_alpha = -inf``.

    Args:
        nu: dual variables, shape ``(B,)``.
        log_mean: log-mean-exp of the batch's scores, shape ``(B,)``.
        log_alpha: natural logarithm of the step size.

    Returns:
        The new dual variables, shape ``(B,)``, in the wide dtype.
    """
    nu, log_mean = wide(nu), wide(log_mean)
    if log_alpha == math.inf:
        return log_mean.clone()
    zero = torch.zeros((), dtype=nu.dtype, device=nu.device)
    moved = nu + (torch.logaddexp(log_alpha + log_mean, zero) - torch.logaddexp(log_alpha + nu, zero))
    return moved.clamp(torch.minimum(nu, log_mean), torch.maximum(nu, log_mean))


def sox_step(nu: Tensor, log_mean: Tensor, gamma: float) -> Tensor:
    r"""Moving average of the inner function in the log domain: SOX (Wang & Yang 2022), SCGD for a single anchor.

    .. math:: \log((1 - \gamma) e^{\nu} + \gamma e^{\ell})

    Args:
        nu: dual variables, shape ``(B,)``.
        log_mean: log-mean-exp of the batch's scores, shape ``(B,)``.
        gamma: weight of the new estimate, in [0, 1].

    Returns:
        The new dual variables, shape ``(B,)``, in the wide dtype.
    """
    nu, log_mean = wide(nu), wide(log_mean)
    log_keep = math.log1p(-gamma) if gamma < 1 else -math.inf
    log_new = math.log(gamma) if gamma > 0 else -math.inf
    return torch.logaddexp(nu + log_keep, log_mean + log_new)


def asgd_step(nu: Tensor, log_mean: Tensor, alpha: float) -> Tensor:
    r"""Stochastic gradient step on the min–min objective in ν: :math:`\nu - \alpha (1 - e^{\ell - \nu})` (ASGD).

    Args:
        nu: dual variables, shape ``(B,)``.
        log_mean: log-mean-exp of the batch's scores, shape ``(B,)``.
        alpha: step size.

    Returns:
        The new dual variables, shape ``(B,)``, in the wide dtype; infinite where the exponential overflows.
    """
    nu, log_mean = wide(nu), wide(log_mean)
    if alpha == 0:
        return nu
    return nu + alpha * torch.expm1(log_mean - nu)


def umax_step(nu: Tensor, log_mean: Tensor, alpha: float, delta: float) -> Tensor:
    r"""U-max (Fagan & Iyengar 2018): the ASGD step, reset to :math:`\ell` where it falls below :math:`\ell - \delta`.

    Args:
        nu: dual variables, shape ``(B,)``.
        log_mean: log-mean-exp of the batch's scores, shape ``(B,)``.
        alpha: step size.
        delta: how far below the batch's log-mean-exp ν may lie before it is reset.

    Returns:
        The new dual variables, shape ``(B,)``, in the wide dtype.
    """
    log_mean = wide(log_mean)
    moved = asgd_step(nu, log_mean, alpha)
    return torch.where(moved < log_mean - delta, log_mean, moved)


def softplus_asgd_step(nu: Tensor, scores: Tensor, alpha: float, rho: float, mask: Tensor | None = None) -> Tensor:
    r"""Gradient step in ν on the softplus approximation of Gladin et al. (2025).

    .. math:: \nu - \alpha \Bigl(1 - \frac{1}{m_i} \sum_j \frac{\sigma(S_{ij} - \nu + \log \rho)}{\rho}\Bigr)

    Args:
        nu: dual variables, shape ``(B,)``.
        scores: shape ``(B, m)``.
        alpha: step size.
        rho: how strongly the exponential is truncated; exact as it goes to 0.
        mask: bool, shape ``(B, m)``, True where a sample counts.

    Returns:
        The new dual variables, shape ``(B,)``, in the wide dtype; unchanged for a row without a valid sample.
    """
    # sigmoid(x)/ρ is a weight like exp(S − ν): its logarithm keeps full relative precision where it is tiny.
    argument = at_least_float32(scores.detach()) - at_least_float32(nu.detach()).unsqueeze(1) + math.log(rho)
    weights = torch.exp(logsigmoid(argument) - math.log(rho))
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    counts = valid_counts(scores, mask)
    mean = wide(weights.sum(dim=1)) / counts.clamp(min=1)
    nu = wide(nu)
    return torch.where(counts > 0, nu - alpha * (1 - mean), nu)


def guard(nu: Tensor, log_mean: Tensor, max_log_weight: float) -> Tensor:
    r"""Raise ν to at least :math:`\ell` − ``max_log_weight``, so that no mean weight :math:`e^{\ell - \nu}` exceeds it.

    Args:
        nu: dual variables, shape ``(B,)``.
        log_mean: log-mean-exp of the batch's scores, shape ``(B,)``.
        max_log_weight: natural logarithm of the largest mean weight allowed, at least 0.

    Returns:
        The guarded dual variables, shape ``(B,)``, in the wide dtype.
    """
    return torch.maximum(wide(nu), wide(log_mean) - max_log_weight)


def _shifted(nu: Tensor, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores minus ν with invalid entries (whatever they hold) set to 0, and ν, in at least float32."""
    values = at_least_float32(scores)
    dtype = torch.promote_types(values.dtype, at_least_float32(nu).dtype)
    values, nu = values.to(dtype), nu.detach().to(dtype)
    if mask is not None:
        # where() and not a product: the gradient of an invalid entry must be exactly zero, NaN or not.
        values = torch.where(mask, values, nu.unsqueeze(1))
    return values - nu.unsqueeze(1), nu


def _objective(values: Tensor, nu: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of ``values`` over the valid samples of each row, plus ν − 1; 0 for a row that has none."""
    if mask is None and values.shape[1] > 0:
        return values.mean(dim=1) + (nu - 1)
    counts = torch.zeros_like(nu) if mask is None else mask.sum(dim=1).to(values.dtype)
    if mask is not None:
        values = values.masked_fill(~mask, 0.0)
    objective = values.sum(dim=1) / counts.clamp(min=1) + (nu - 1)
    return torch.where(counts > 0, objective, objective.new_zeros(()))


def exponential_objective(nu: Tensor, scores: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Dual objective of each anchor, :math:`\frac{1}{m_i} \sum_j e^{S_{ij} - \nu_i} + \nu_i - 1`.

    ν is a constant, so the gradient is exactly :math:`\frac{1}{m_i} \sum_j e^{S_{ij} - \nu_i} \nabla S_{ij}`. The value
    is never below the row's log-mean-exp, and equal to it where ν is (Wei et al. 2026, the min–min formulation).

    Args:
        nu: dual variables, shape ``(B,)``.
        scores: shape ``(B, m)``; carries the gradient.
        mask: bool, shape ``(B, m)``, True where a sample counts.

    Returns:
        Shape ``(B,)``, float32 or float64; 0 for a row without a valid sample.
    """
    shifted, nu = _shifted(nu, scores, mask)
    return _objective(torch.exp(shifted), nu, mask)


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
    shifted, nu = _shifted(nu, scores, mask)
    return _objective(softplus(shifted + math.log(rho)) / rho, nu, mask)
