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
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid, softplus

__all__ = [
    "NO_SCORE",
    "Exponentials",
    "asgd_step",
    "exponential_objective",
    "exponential_objective_from",
    "guard",
    "log_mean_exp",
    "log_mean_exp_from",
    "may_be_infinite",
    "mean_over",
    "proximal_mirror_descent_step",
    "shift_by_largest",
    "softplus_asgd_step",
    "softplus_objective",
    "sox_step",
    "umax_step",
    "with_gradient",
]

# Stands in for what a score that does not count is below the largest: its exponential is 0. Finite, because the
# exponential of −inf is many times slower, as is one that is 0 for a smaller number's sake only.
NO_SCORE = -1e30


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of everything that is only ``(B,)`` long: float64, or float32 where the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide(value: Tensor) -> Tensor:
    """Detach and convert to float64, or to float32 where the device has no float64."""
    if value.dtype == torch.float64 and not value.requires_grad:
        return value
    return value.detach().to(wide_dtype(value.device))


def at_least_float32(scores: Tensor) -> Tensor:
    """Convert half precision (and integers) to float32; leave float32 and float64 as they are."""
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


class Exponentials(NamedTuple):
    """The one exponential of a step: log-mean-exp, objective and gradient follow from it. Everything is detached.

    Attributes:
        largest: largest score M of each anchor, shape ``(B,)``, −inf where it has no sample.
        shifted: scores minus M, shape ``(B, m)``, or their sum, shape ``(B,)``: not finite where a score is not.
        mean: mean of exp(scores − M) over the samples, shape ``(B,)``, 0 where there is none.
        counts: number of samples of each anchor, shape ``(B,)``, or one number for all.
        may_be_empty: False if it is known that every anchor has a sample.
        with_gradient: makes the loss, a scalar, a function of the scores, with the gradient
            exp(scores − M) · weight for a weight of shape ``(B,)``.
    """

    largest: Tensor
    shifted: Tensor
    mean: Tensor
    counts: Tensor | int
    may_be_empty: bool
    with_gradient: Callable[[Tensor, Tensor], Tensor]


def shift_by_largest(scores: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Largest valid score :math:`M_i` of each row, and the scores minus it.

    Together with :func:`mean_over` this is the one exponential of a step: log-mean-exp and exponential objective
    follow from it with ``(B,)`` numbers, see :func:`log_mean_exp_from` and :func:`exponential_objective_from`.

    Args:
        scores: shape ``(B, m)``, any floating dtype; half precision is raised to float32.
        mask: bool, shape ``(B, m)``, True where a sample counts; None means all do. Values under a False are ignored,
            NaN and infinity included, and get a zero gradient.

    A score of −∞ is a sample of weight 0.

    Returns:
        :math:`M`, shape ``(B,)``, detached, −inf for a row without a valid sample above −∞; and :math:`S - M`, shape
        ``(B, m)``, carrying the gradient, with a number whose exponential is 0 where a sample does not count. Both in
        float32 or float64.
    """
    values = at_least_float32(scores)
    if values.shape[1] == 0:
        return values.detach().new_full((values.shape[0],), -math.inf), values
    if mask is None:
        largest = values.detach().amax(dim=1)
        return largest, values - (_finite(largest) if may_be_infinite(largest) else largest).unsqueeze(1)
    # where() and not a product: the gradient of an invalid entry must be exactly zero, NaN or not.
    if values.device.type == "cpu":  # elsewhere a look at the result takes longer than the general way
        kept = torch.where(mask, values, NO_SCORE)
        largest = kept.detach().amax(dim=1)
        if bool((largest > NO_SCORE).all()):
            return largest, kept - largest.unsqueeze(1)
    largest = torch.where(mask, values.detach(), -math.inf).amax(dim=1)
    return largest, torch.where(mask, values - _finite(largest).unsqueeze(1), NO_SCORE)


def may_be_infinite(largest: Tensor) -> bool:
    """Whether a row's largest score may be −∞, which is no sample. Looked up on the CPU; elsewhere it would be a wait.

    Args:
        largest: shape ``(B,)``.
    """
    return largest.device.type != "cpu" or (largest.numel() > 0 and largest.amin().item() == -math.inf)


def _finite(largest: Tensor) -> Tensor:
    return largest.masked_fill(largest == -math.inf, 0.0)


def mean_over(exponentials: Tensor, counts: Tensor | int) -> Tensor:
    """Mean over the samples that count of exp(:func:`shift_by_largest`'s second result).

    Args:
        exponentials: shape ``(B, m)``, 0 where a sample does not count.
        counts: number of valid samples of each row, shape ``(B,)``, or one number for all.

    Returns:
        Shape ``(B,)``, carrying the gradient; 0 for a row without a valid sample.
    """
    total = exponentials.sum(dim=1)
    return total / (max(counts, 1) if isinstance(counts, int) else counts.clamp(min=1))


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


def log_mean_exp_from(largest: Tensor, mean: Tensor) -> Tensor:
    """Log-mean-exp from the largest score and :func:`mean_over`, shape ``(B,)``, detached, in the wide dtype."""
    return wide(mean).log().add_(largest)


def log_mean_exp(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Log-mean-exp of each row over its valid samples, :math:`\ell_i = \log \frac{1}{m_i} \sum_j \exp S_{ij}`.

    Args:
        scores: shape ``(B, m)``, any floating dtype; half precision is raised to float32 before the exponential.
        mask: bool, shape ``(B, m)``, True where a sample counts; None means all do. Values under a False are ignored,
            NaN and infinity included.

    Returns:
        Shape ``(B,)``, detached, float64 (float32 on devices without it); −inf for a row without a valid sample, or
        with none above −∞.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[0.0, 0.0], [1000.0, 1000.0]])
        >>> log_mean_exp(scores).tolist()
        [0.0, 1000.0]
        >>> log_mean_exp(scores, torch.tensor([[True, True], [True, False]])).tolist()
        [0.0, 1000.0]
    """
    largest, shifted = shift_by_largest(scores.detach(), mask)
    return log_mean_exp_from(largest, mean_over(shifted.exp(), scores.shape[1] if mask is None else mask.sum(dim=1)))


def proximal_mirror_descent_step(nu: Tensor, log_mean: Tensor, log_alpha: float) -> Tensor:
    r"""SCENT's stochastic proximal mirror descent step in closed form (Wei et al. 2026, lemma on the SPMD update).

    .. math:: \nu + \log(1 + \alpha e^{\ell}) - \log(1 + \alpha e^{\nu})

    the minimiser over :math:`v` of :math:`e^{\ell - v} + v + D(v, \nu) / \alpha` with
    :math:`D(a, b) = e^{-a} - e^{-b} + e^{-b} (a - b)`. The result lies between ``nu`` and ``log_mean`` (to rounding in
    float64); it is ``log_mean`` for ``log_alpha = inf`` and ``nu`` for ``log_alpha = -inf``.

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
    # log(e^ν + α e^(ν + ℓ)) − log(1 + α e^ν). Beyond the threshold softplus(x) is x to the last bit of float64.
    shifted = nu + log_alpha
    return torch.logaddexp(nu, shifted + log_mean).sub_(softplus(shifted, threshold=40))


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
