"""How many rows a temperature looks at."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scent_lightning.errors import InputError
from scent_lightning.validation import checked_number

__all__ = ["effective_rows", "temperature_for"]

_PRECISION = 1e-4  # of the logarithm of a temperature


def effective_rows(losses: Tensor, tau: float) -> Tensor:
    r"""Effective number of rows of the worst-case weights :math:`p_i \propto \exp(\text{loss}_i/\tau)`.

    .. math:: \frac{1}{\sum_i p_i^2}

    (Kish 1965, the effective sample size of weighted rows.) It is n where all losses are equal, and 1 where one row has
    all the weight; it never falls as τ rises.

    Args:
        losses: loss of each row, shape ``(n,)``, n at least 1.
        tau: temperature in the units of the loss, above 0.

    Returns:
        A float64 scalar from 1 to n.

    Raises:
        InputError: there are no losses, or ``tau`` is not a finite number above 0.

    Example:
        >>> effective_rows(torch.tensor([3.0, 3.0, 0.0]), tau=0.01)
        tensor(2., dtype=torch.float64)
    """
    return _effective(_gaps(losses), 1 / checked_number("tau", tau, above=0))


def temperature_for(losses: Tensor, rows: float) -> float:
    """The temperature at which so many rows are effective; the inverse of :func:`effective_rows`.

    Args:
        losses: loss of each row, shape ``(n,)``, n at least 1.
        rows: the effective number, in [1, n).

    Returns:
        τ in the units of the loss, to a relative 1e-4. 0 where even the least temperature has as many, since so many
        losses are equal to the largest.

    Raises:
        InputError: there are no losses, or ``rows`` is below 1, or not below n.

    Example:
        >>> losses = torch.tensor([0.0, 1.0])
        >>> round(effective_rows(losses, temperature_for(losses, 1.5)).item(), 3)
        1.5
    """
    gaps = _gaps(losses)
    if not 1 <= rows < len(gaps):
        raise InputError(f"rows must be at least 1 and below the {len(gaps)} losses, got {rows}")
    below = gaps[gaps > 0]
    if len(gaps) - len(below) >= rows:
        return 0.0
    # At the lower end only the largest losses have any weight, at the upper one all have the same.
    low, high = math.log(below.min().item()) - 7, math.log(below.max().item()) + 40
    while high - low > _PRECISION:
        middle = (low + high) / 2
        if _effective(gaps, math.exp(-middle)) < rows:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _gaps(losses: Tensor) -> Tensor:
    """How far each loss is below the largest, in float64."""
    if losses.ndim != 1 or len(losses) == 0:
        raise InputError(f"losses must be of shape (n,) with n at least 1, got {tuple(losses.shape)}")
    values = losses.detach().double()
    return values.max() - values


def _effective(gaps: Tensor, sharpness: float) -> Tensor:
    weights = torch.exp(-sharpness * gaps)
    return weights.sum() ** 2 / (weights**2).sum()
