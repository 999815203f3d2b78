r"""How probable it is that a sample is in a batch: what makes a mean over some samples estimate the mean over all.

A loss wants the sum over all of :math:`e^{s_k}` and a batch has those of some k only. Weighing each that is there by
the inverse of its probability :math:`q_k` to be there (Horvitz and Thompson 1952) has the sum over all as its
expectation. In the exponent that is the score less :math:`\log q_k`, which is a constant for the gradient.

Rows are drawn without replacement, as a shuffled loader does. For an anchor that is in the batch, the other rows of the
batch are drawn from the other rows of the training set: ``num_rows`` is then n − 1 and ``draws`` is B − 1, where B is
the size of the whole batch, of all processes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scent_lightning.errors import InputError
from scent_lightning.functional.log_mean_exp import at_least_float32, wide_dtype
from scent_lightning.validation import checked_integer

__all__ = [
    "correct_scores",
    "log_expected_occurrences",
    "log_inclusion_beside",
    "log_inclusion_probability",
    "log_inclusion_probability_with_repetition",
]

_LOG_HALF = -math.log(2)


def log_inclusion_probability(counts: Tensor, num_rows: int, draws: int) -> Tensor:
    r"""Logarithm of the probability that a class occurs at least once among rows drawn without replacement.

    .. math:: \log \left( 1 - \prod_{j=0}^{c_k - 1} \left( 1 - \frac{\text{draws}}{\text{num\_rows} - j} \right) \right)

    It belongs to a loss in which a class of the batch counts once, however often it occurs.

    Args:
        counts: number of the rows that carry each class :math:`c_k`, integers, shape ``(K,)``, from 0 to ``num_rows``.
        num_rows: rows that there are, at least 1.
        draws: rows drawn, from 0 to ``num_rows``.

    Returns:
        Shape ``(K,)``, float64 (float32 on devices without it): 0 for a class that cannot be missing, −inf for one that
        cannot occur.

    Raises:
        InputError: counts of another shape, that are no integers or out of range; a number out of its range.

    Example:
        >>> import torch
        >>> counts = torch.tensor([0, 1, 2, 4])
        >>> log_inclusion_probability(counts, num_rows=4, draws=2).exp()
        tensor([0.0000, 0.5000, 0.8333, 1.0000], dtype=torch.float64)
    """
    _check(counts, num_rows, draws)
    if counts.numel() == 0:
        return torch.zeros(0, dtype=wide_dtype(counts.device), device=counts.device)
    # Differences of log-gamma functions would lose all digits where there are many rows.
    most = int(counts.max())
    left = num_rows - torch.arange(most, device=counts.device, dtype=wide_dtype(counts.device))
    log_absent = torch.zeros(most + 1, dtype=left.dtype, device=counts.device)
    torch.cumsum(torch.log1p(-(draws / left).clamp(max=1.0)), dim=0, out=log_absent[1:])
    return _log_of_rest(log_absent).index_select(0, counts.long())


def log_inclusion_beside(counts: Tensor, num_rows: int, batch_rows: int) -> Tensor:
    """Logarithm of the probability that a class other than an anchor's own is in the other rows of its batch.

    Args:
        counts: training rows of each class, integers, shape ``(K,)``.
        num_rows: training rows n.
        batch_rows: rows of the whole batch, of all processes.

    Returns:
        As :func:`log_inclusion_probability` of n − 1 rows and B − 1 draws; a batch is at most all rows.
    """
    others = max(num_rows - 1, 1)
    return log_inclusion_probability(counts.clamp(max=others), others, min(batch_rows - 1, others))


def log_inclusion_probability_with_repetition(probabilities: Tensor, draws: int) -> Tensor:
    r"""Logarithm of the probability that a class occurs at least once in independent draws.

    .. math:: \log \left( 1 - (1 - p_k)^{\text{draws}} \right)

    For classes drawn with repetition of which each counts once, and for frequencies that are only estimated.

    Args:
        probabilities: of each class in one draw, shape ``(K,)``, from 0 to 1.
        draws: number of draws, at least 0.

    Returns:
        Shape ``(K,)``, float64 (float32 on devices without it): 0 for a class that cannot be missing, −inf for one that
        cannot occur.

    Raises:
        InputError: ``draws`` is no integer of at least 0.

    Example:
        >>> import torch
        >>> log_inclusion_probability_with_repetition(torch.tensor([0.0, 0.5, 1.0]), draws=2).exp()
        tensor([0.0000, 0.7500, 1.0000], dtype=torch.float64)
    """
    checked_integer("draws", draws, least=0)
    probabilities = probabilities.to(wide_dtype(probabilities.device))
    if draws == 0:
        return torch.full_like(probabilities, -math.inf)
    return _log_of_rest(draws * torch.log1p(-probabilities))


def log_expected_occurrences(counts: Tensor, num_rows: int, draws: int) -> Tensor:
    r"""Logarithm of how often a class occurs among rows drawn from all, in expectation: draws · counts / num_rows.

    It belongs to a loss in which a class of the batch counts as often as it occurs; with or without replacement.

    Args:
        counts: number of the rows that carry each class, integers, shape ``(K,)``, from 0 to ``num_rows``.
        num_rows: rows that there are, at least 1.
        draws: rows drawn, from 0 to ``num_rows``.

    Returns:
        Shape ``(K,)``, float64 (float32 on devices without it), −inf for a class that cannot occur.

    Raises:
        InputError: as for :func:`log_inclusion_probability`.

    Example:
        >>> import torch
        >>> log_expected_occurrences(torch.tensor([0, 1, 2, 4]), num_rows=4, draws=2).exp()
        tensor([0.0000, 0.5000, 1.0000, 2.0000], dtype=torch.float64)
    """
    _check(counts, num_rows, draws)
    return (counts.to(wide_dtype(counts.device)) * (draws / num_rows)).log()


def correct_scores(scores: Tensor, log_probability: Tensor, population: int, mask: Tensor | None = None) -> Tensor:
    r"""Scores whose mean exponential estimates the mean over a whole population, of which they are a sample.

    .. math:: S_{ij} - \log q_j + \log \frac{m_i}{\text{population}}

    The mean over the :math:`m_i` valid ones of the exponential is then
    :math:`\frac{1}{\text{population}} \sum_j e^{S_{ij}} / q_j`.

    Args:
        scores: shape ``(B, m)``, floating.
        log_probability: log q of each column, shape ``(m,)`` or ``(B, m)``, of one of this module's functions.
        population: size of what the samples are of, each row's own one left out where it is no sample (K − 1 classes).
        mask: bool, shape ``(B, m)``, True where a sample counts; None means all do.

    Returns:
        Shape ``(B, m)``, in float32 or better, with the scores' gradient; no more than numbers where ``mask`` is False.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[1.0, 2.0]])  # two of ten, each in a batch with probability 1 / 5
        >>> correct_scores(scores, torch.tensor([0.2, 0.2]).log(), population=10)
        tensor([[1., 2.]])
    """
    checked_integer("population", population)
    values = at_least_float32(scores)
    counts = scores.shape[1] if mask is None else mask.sum(dim=1, keepdim=True)
    rows = torch.as_tensor(counts, dtype=log_probability.dtype, device=scores.device).clamp(min=1).log()
    return values - (log_probability - (rows - math.log(population))).to(values.dtype)


def _log_of_rest(log_probability: Tensor) -> Tensor:
    """log(1 − p) from log p, each of its two ways where it keeps the digits (Mächler 2012)."""
    near_one = torch.log(-torch.expm1(log_probability))
    return torch.where(log_probability > _LOG_HALF, near_one, torch.log1p(-torch.exp(log_probability)))


def _check(counts: Tensor, num_rows: int, draws: int) -> None:
    checked_integer("num_rows", num_rows)
    checked_integer("draws", draws, least=0, most=num_rows)
    if counts.ndim != 1 or counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
        raise InputError(f"counts must be integers of shape (K,), got {counts.dtype} of shape {tuple(counts.shape)}")
    if counts.numel():
        least, most = (int(value) for value in counts.aminmax())
        if least < 0 or most > num_rows:
            raise InputError(f"counts must be from 0 to num_rows = {num_rows}, got {least if least < 0 else most}")
