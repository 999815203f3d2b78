"""What the processes of a distributed run tell each other at a step, and how repeated indices are merged.

Without ``torch.distributed`` (or with one process) every function here is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def num_ranks() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _to_backend(tensor: Tensor) -> Tensor:
    """Move a tensor to where the process group's backend can send it from."""
    if "nccl" not in dist.get_backend():
        return tensor.cpu()
    return tensor if tensor.is_cuda else tensor.cuda()


def any_rank(flags: Tensor) -> Tensor:
    """Logical or of a bool tensor over the processes."""
    if num_ranks() == 1:
        return flags
    counts = _to_backend(flags.to(torch.int32))
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return counts.bool()


def checked(check: Callable[[], T]) -> T:
    """Run ``check`` in every process; if it raises in one, all raise, so that none waits for the others for ever."""
    if num_ranks() == 1:
        return check()
    error: Exception | None = None
    try:
        result = check()
    except (TypeError, ValueError, IndexError) as caught:
        error = caught
    failed = bool(any_rank(torch.tensor([error is not None])).any())
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("another process of this run got a batch that cannot be used; see its error")
    return result


def gather(*columns: Tensor) -> tuple[tuple[Tensor, ...], slice]:
    """Rows of all processes in rank order, and which of them are this process's.

    Args:
        *columns: tensors of shape ``(B,)``; B may differ between processes. They travel as float64, which is exact
            for indices below 2⁵³.

    Returns:
        The columns, each of shape ``(ΣB,)``, and the slice of this process's rows.
    """
    if num_ranks() == 1:
        return columns, slice(0, columns[0].shape[0])
    rows = _to_backend(torch.stack([column.double() for column in columns], dim=1))
    size = torch.tensor([rows.shape[0]], device=rows.device)
    sizes = [torch.empty_like(size) for _ in range(num_ranks())]
    dist.all_gather(sizes, size)
    lengths = [int(length) for length in sizes]
    padded = torch.cat([rows, rows.new_zeros(max(lengths) - rows.shape[0], rows.shape[1])])
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    start = sum(lengths[: dist.get_rank()])
    everyone = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    gathered = tuple(everyone[:, i].to(column) for i, column in enumerate(columns))
    return gathered, slice(start, start + columns[0].shape[0])


def merge(index: Tensor, log_mean: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Log-mean-exp over all the samples that an anchor has in the step.

    Args:
        index: dataset indices, shape ``(N,)``.
        log_mean: log-mean-exp of each row, shape ``(N,)``.
        counts: number of samples behind each row, shape ``(N,)``.

    Returns:
        The merged log-mean-exp and the merged counts, shape ``(N,)``, equal for rows of equal index, whatever the
        order of the rows; and the number of each row's group, or None where no index repeats.
    """
    if index.shape[0] < 2:
        return log_mean, counts, None
    # Sorted by value within each group, so that sums do not depend on the order of the rows.
    order = torch.argsort(log_mean)
    order = order[torch.argsort(index[order], stable=True)]
    ordered = index[order]
    new_group = ordered[1:] != ordered[:-1]
    if index.device.type == "cpu" and bool(new_group.all()):
        return log_mean, counts, None
    groups = torch.zeros_like(index)
    groups[1:] = new_group.cumsum(dim=0)
    values, sizes = log_mean[order], counts[order]
    largest = torch.full_like(values, -math.inf).scatter_reduce(0, groups, values, "amax")
    shift = largest.masked_fill(largest == -math.inf, 0.0)
    totals = torch.zeros_like(values).index_add(0, groups, sizes * torch.exp(values - shift[groups]))
    group_counts = torch.zeros_like(values).index_add(0, groups, sizes)
    group_log_mean = shift + torch.log(totals / group_counts.clamp(min=1))
    segments = torch.empty_like(groups)
    segments[order] = groups
    return group_log_mean[segments], group_counts[segments], segments


def merge_mean(values: Tensor, counts: Tensor, segments: Tensor | None) -> Tensor:
    """Mean of ``values`` over each group of equal index, weighted by ``counts``; equal for all rows of a group.

    Args:
        values: shape ``(N,)``.
        counts: number of samples behind each row, shape ``(N,)``.
        segments: from :func:`merge`; None where no index repeats.
    """
    if segments is None:
        return values
    order = torch.argsort(values)
    groups = segments[order]
    weighted = torch.where(counts > 0, values * counts, torch.zeros_like(values))
    totals = torch.zeros_like(values).index_add(0, groups, weighted[order])
    sizes = torch.zeros_like(values).index_add(0, groups, counts[order])
    return (totals / sizes.clamp(min=1))[segments]
