"""How the rows of an anchor that occurs several times in a step are merged."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["FEW", "are_distinct", "look_at", "merge", "merge_mean", "row_weights"]

# So many numbers in main memory are looked at faster one by one than by several calls of torch.
FEW = 1024


def are_distinct(index: Tensor) -> bool:
    """Whether no index repeats."""
    return len(index) < 2 or look_at(index)[2]


def look_at(index: Tensor) -> tuple[int, int, bool]:
    """The least and the largest index, and whether none repeats, with one wait for a device; of at least one index."""
    if len(index) <= FEW and index.device.type == "cpu":
        numbers = index.tolist()
        return min(numbers), max(numbers), len(set(numbers)) == len(numbers)
    ordered = torch.sort(index).values
    again = (ordered[1:] == ordered[:-1]).any().to(ordered.dtype)
    low, high, repeated = torch.stack([ordered[0], ordered[-1], again]).tolist()
    return low, high, not repeated


def merge(
    index: Tensor, log_mean: Tensor, counts: Tensor | int, distinct: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    r"""Log-mean-exp over all the samples that an anchor has in the step.

    Args:
        index: dataset indices, shape ``(N,)``.
        log_mean: log-mean-exp of each row, shape ``(N,)``, −inf for a row without samples.
        counts: number of samples behind each row, shape ``(N,)``, or one number for all.
        distinct: whether no index repeats, where that is known.

    Returns:
        The merged log-mean-exp, shape ``(N,)``, equal for rows of equal index, whatever the order of the rows; and the
        number of each row's group, shape ``(N,)``, or None where no index repeats.
    """
    if are_distinct(index) if distinct is None else distinct:
        return log_mean, None
    ordered = torch.sort(index).values
    # Sorted by value within each group, so that sums do not depend on the order of the rows.
    order = torch.argsort(log_mean)
    order = order[torch.argsort(index[order], stable=True)]
    sorted_groups = torch.zeros_like(index)
    sorted_groups[1:] = (ordered[1:] != ordered[:-1]).cumsum(dim=0)
    values = log_mean[order]
    sizes = torch.ones_like(values) if isinstance(counts, int) else counts[order].to(values.dtype)
    largest = torch.full_like(values, -math.inf).scatter_reduce(0, sorted_groups, values, "amax")
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    totals = torch.zeros_like(values).index_add(0, sorted_groups, sizes * torch.exp(values - largest[sorted_groups]))
    weights = torch.zeros_like(values).index_add(0, sorted_groups, sizes)
    groups = torch.empty_like(index)
    groups[order] = sorted_groups
    return (largest + torch.log(totals / weights.clamp(min=1)))[groups], groups


def row_weights(counts: Tensor | int, groups: Tensor | None, rows: int) -> Tensor:
    """Weight of each row's objective in the mean over the different anchors that have a sample.

    An anchor's objective is the mean over all its samples, whichever rows and processes they are in.

    Args:
        counts: number of samples behind each row, shape ``(N,)``, or one number for all.
        groups: from :func:`merge`; None where no index repeats.
        rows: N.

    Returns:
        Shape ``(N,)``, float64; the sum is 1, or 0 if there is no sample.
    """
    sizes = torch.full((rows,), float(counts), dtype=torch.float64) if isinstance(counts, int) else counts.double()
    if groups is None:
        has_samples = (sizes > 0).double()
        return has_samples / has_samples.sum().clamp(min=1)
    groups = groups.to(sizes.device)
    totals = torch.zeros_like(sizes).index_add(0, groups, sizes)
    return sizes / (totals.clamp(min=1)[groups] * torch.count_nonzero(totals).clamp(min=1))


def merge_mean(values: Tensor, counts: Tensor | int, groups: Tensor | None) -> Tensor:
    """Mean of ``values`` over each group of equal index, weighted by ``counts``; equal for all rows of a group.

    Args:
        values: shape ``(N,)``.
        counts: number of samples behind each row, shape ``(N,)``, or one number for all.
        groups: from :func:`merge`; None where no index repeats.
    """
    if groups is None:
        return values
    order = torch.argsort(values)
    sizes = torch.ones_like(values) if isinstance(counts, int) else counts.to(values.dtype)
    totals = torch.zeros_like(values).index_add(0, groups[order], (values * sizes)[order])
    weights = torch.zeros_like(values).index_add(0, groups, sizes)
    return (totals / weights.clamp(min=1))[groups]
