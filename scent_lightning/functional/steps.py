r"""How ν moves: the steps of the dual updates in closed form, and the guard.

``nu`` is the dual variable :math:`\nu` and ``log_mean`` the log-mean-exp :math:`\ell` of the batch's scores, both of
shape ``(B,)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from scent_lightning.functional.lambert import lambert_w
from scent_lightning.functional.log_mean_exp import at_least_float32, wide

__all__ = [
    "asgd_step",
    "guard",
    "msvr_step",
    "proximal_mirror_descent_step",
    "proximal_point_step",
    "softplus_asgd_step",
    "sox_step",
    "umax_step",
]


def proximal_mirror_descent_step(
    nu: Tensor, log_mean: Tensor, log_alpha: float | Tensor, multiplier: float = 1.0
) -> Tensor:
    r"""SCENT's stochastic proximal mirror descent step in closed form (Wei et al. 2026, lemma on the SPMD update).

    .. math:: \nu + \log(1 + \alpha e^{\ell}) - \log(1 + \alpha e^{\nu})

    the minimiser over :math:`v` of :math:`e^{\ell - v} + v + D(v, \nu) / \alpha` with
    :math:`D(a, b) = e^{-a} - e^{-b} + e^{-b} (a - b)`. The result lies between ``nu`` and ``log_mean`` (to rounding in
    float64); it is ``log_mean`` for ``log_alpha = inf`` and ``nu`` for ``log_alpha = -inf``.

    It is a moving average of :math:`e^\nu` of the factor :math:`\gamma = \sigma(\log \alpha + \nu)`. A ``multiplier``
    m takes :math:`\gamma = \sigma(\log \alpha + m \nu)` instead, which goes from SOX (0) to this step (1).

    Args:
        nu: dual variables, shape ``(B,)``.
        log_mean: log-mean-exp of the batch's scores, shape ``(B,)``.
        log_alpha: natural logarithm of the step size, or of each row's, shape ``(B,)``.
        multiplier: m, at least 0.

    Returns:
        The new dual variables, shape ``(B,)``, in the wide dtype.
    """
    nu, log_mean = wide(nu), wide(log_mean)
    if isinstance(log_alpha, float | int) and log_alpha == math.inf:
        return log_mean.clone()
    if isinstance(log_alpha, Tensor) or multiplier != 1.0:
        logit = log_alpha + multiplier * nu
        return torch.logaddexp(nu + logsigmoid(-logit), log_mean + logsigmoid(logit))
    # log(e^ν + α e^(ν + ℓ)) − log(1 + α e^ν). Beyond the threshold softplus(x) is x to the last bit of float64.
    shifted = nu + log_alpha
    return torch.logaddexp(nu, shifted + log_mean).sub_(softplus(shifted, threshold=40))


def proximal_point_step(nu: Tensor, log_mean: Tensor, alpha: float) -> Tensor:
    r"""Stochastic proximal point step: SCENT's with the Euclidean distance in place of the Bregman divergence.

    .. math:: \nu - \alpha + W\bigl(\alpha e^{\ell + \alpha - \nu}\bigr)

    with Lambert's function W: the minimiser over :math:`v` of
    :math:`e^{\ell - v} + v + (v - \nu)^2 / (2 \alpha)` (Wei et al. 2026, section on the analysis of the SPMD update).
    The result lies between ``nu`` and ``log_mean``.

    Args:
        nu: dual variables, shape ``(B,)``.
        log_mean: log-mean-exp of the batch's scores, shape ``(B,)``.
        alpha: step size, at least 0.

    Returns:
        The new dual variables, shape ``(B,)``, in the wide dtype.
    """
    nu, log_mean = wide(nu), wide(log_mean)
    if alpha == 0:
        return nu
    difference = log_mean - nu
    w = lambert_w(math.log(alpha) + alpha + difference, from_log=True)
    # Where W is near a large α, W − α has lost digits. It solves x + log(1 + x/α) = ℓ − ν: steps of Newton's method.
    near = w > alpha / 2
    x = torch.where(near, w - alpha, 0.0)
    for _ in range(2):
        x = x - (x + torch.log1p(x / alpha) - difference) / (1 + 1 / (alpha + x))
    return nu + torch.where(near, x, w - alpha)


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


def msvr_step(nu: Tensor, log_mean: Tensor, previous: Tensor, gamma: float, beta: float, floor: float) -> Tensor:
    r"""Moving average with the correction of MSVR (Jiang et al. 2022), in the log domain.

    .. math:: \log \max\bigl(u + \beta (e^{\ell} - e^{\ell'}),\; f u\bigr), \qquad
              u = (1 - \gamma) e^{\nu} + \gamma e^{\ell}

    Args:
        nu: dual variables, shape ``(B,)``.
        log_mean: log-mean-exp :math:`\ell` of the batch's scores, shape ``(B,)``.
        previous: log-mean-exp :math:`\ell'` of the scores of the same samples at the previous weights, shape ``(B,)``;
            −inf where all of them were −inf.
        gamma: weight of the new estimate, in [0, 1].
        beta: weight of the correction, at least 0.
        floor: f, the least share of the moving average that a correction leaves, in (0, 1].

    Returns:
        The new dual variables, shape ``(B,)``, in the wide dtype.
    """
    average = sox_step(nu, log_mean, gamma)
    if beta == 0:
        return average
    log_mean = wide(log_mean)
    fall = wide(previous) - log_mean
    # log of β|e^ℓ − e^ℓ'| / u, from the difference of ℓ and ℓ': those of a small step share most of their digits.
    log_size = fall.clamp(min=0) + torch.log(-torch.expm1(-fall.abs()))
    log_share = math.log(beta) + (log_mean - average) + log_size
    kept = (1 - log_share.exp()).clamp(min=floor).log()
    return average + torch.where(fall > 0, kept, softplus(log_share, threshold=40))


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


def umax_step(nu: Tensor, log_mean: Tensor, alpha: float, delta: float, compare: str = "new") -> Tensor:
    r"""U-max (Fagan & Iyengar 2018): the ASGD step, reset to :math:`\ell` where ν falls below :math:`\ell - \delta`.

    Args:
        nu: dual variables, shape ``(B,)``.
        log_mean: log-mean-exp of the batch's scores, shape ``(B,)``.
        alpha: step size.
        delta: how far below the batch's log-mean-exp ν may lie before it is reset.
        compare: which ν is compared: "new" (after the step) or "old" (before it, which also spares the step its
            overshoot where ν lies far below).

    Returns:
        The new dual variables, shape ``(B,)``, in the wide dtype.
    """
    log_mean = wide(log_mean)
    moved = asgd_step(nu, log_mean, alpha)
    return torch.where((moved if compare == "new" else wide(nu)) < log_mean - delta, log_mean, moved)


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
    nu = wide(nu)
    if scores.shape[1] == 0:
        return nu
    has_sample = scores != -math.inf
    if mask is None:
        mean = wide(weights.mean(dim=1))
    else:
        has_sample &= mask
        mean = wide(weights.masked_fill(~mask, 0.0).sum(dim=1)) / mask.sum(dim=1).clamp(min=1)
    return torch.where(has_sample.any(dim=1), nu - alpha * (1 - mean), nu)


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
