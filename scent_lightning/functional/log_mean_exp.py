"""The log-mean-exp of scores, and in which precision what is computed.

Everything that is only ``(B,)`` long is computed in float64 (float32 on devices without it), because the updates
subtract numbers of similar size; what is ``(B, m)`` long is computed in float32, or float64 if it came so, and never in
half precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "LEAST_EXPONENT",
    "NO_SCORE",
    "at_least_float32",
    "log_mean_exp",
    "log_mean_exp_from",
    "log_sum_exp",
    "may_be_infinite",
    "mean_over",
    "shift_by_largest",
    "wide",
    "wide_dtype",
]

# Stands in for what a score that does not count is below the largest: its exponential is 0. Finite, because the
# exponential of −inf is many times slower, as is one that is 0 for a smaller number's sake only.
NO_SCORE = -1e30
# exp of it is the smallest that float32 holds with all its digits. On CPUs exponentials of less are ten to fifty times
# slower, as is every product that they take part in; beside 1 they are nothing.
LEAST_EXPONENT = -85.0


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


def log_sum_exp(scores: Tensor) -> Tensor:
    r"""Log-sum-exp of each row, :math:`\log \sum_j \exp S_{ij}`, however far apart the scores are.

    As ``torch.logsumexp``, but on a CPU several times faster where scores are more than 87 apart. For evaluation: it
    carries no gradient.

    Args:
        scores: shape ``(B, m)``, any floating dtype, m at least 1; half precision is raised to float32.

    Returns:
        Shape ``(B,)``, float32 or float64.

    Example:
        >>> log_sum_exp(torch.tensor([[0.0, -1000.0], [500.0, 500.0]])).tolist()
        [0.0, 500.6931457519531]
    """
    scores = at_least_float32(scores.detach())
    largest = scores.amax(dim=1)
    reference = torch.where(largest.isinf(), 0.0, largest)
    shifted = (scores - reference.unsqueeze(1)).clamp_(min=LEAST_EXPONENT)
    found = shifted.exp_().sum(dim=1).log_().add_(reference)
    return torch.where(largest == -math.inf, largest, found)
