"""Data sets that hand out whole batches together with the dataset index of every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from scent_lightning.errors import InputError

__all__ = ["IndexedTensorDataset", "batch_loader"]


class IndexedTensorDataset(Dataset[tuple[Tensor, ...]]):
    """Tensors of equal length; item ``i`` is row ``i`` of each, and ``i`` itself.

    A :class:`~torch.utils.data.DataLoader` fetches a whole batch at once through ``__getitems__``: with
    :func:`batch_loader` there is no per-sample collation.

    Args:
        *tensors: shape ``(n, …)`` each.

    Example:
        >>> dataset = IndexedTensorDataset(torch.tensor([10.0, 20.0, 30.0]))
        >>> dataset.__getitems__([2, 0])
        (tensor([30., 10.]), tensor([2, 0]))
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return self.tensors[0].shape[0]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return (*(tensor[index] for tensor in self.tensors), torch.tensor(index))

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        index = torch.as_tensor(indices, dtype=torch.int64)
        return (*(tensor[index] for tensor in self.tensors), index)


def _identity(batch: Any) -> Any:
    return batch


def batch_loader(
    dataset: Dataset[Any],
    batch_size: int,
    shuffle: bool,
    num_replicas: int = 1,
    rank: int = 0,
    num_workers: int = 0,
    seed: int | None = None,
) -> DataLoader[Any]:
    """Loader of a data set with ``__getitems__``, whole batches at a time.

    The order of an epoch depends on the seed and the number of the epoch alone (Lightning sets it), not on the global
    random state: a resumed run sees the batches that an uninterrupted one would have seen.

    Args:
        dataset: has ``__len__`` and ``__getitems__``.
        batch_size: rows of a batch, in this process.
        shuffle: new order every epoch (training), or the order of the data set.
        num_replicas: number of processes.
        rank: number of this process.
        num_workers: loader processes; 0 loads in this one.
        seed: of the shuffle; None takes the one ``seed_everything`` set.
    """
    if seed is None:
        seed = torch.initial_seed() % 2**31
    sampler: DistributedSampler[Any] | None = None
    if shuffle:
        sampler = DistributedSampler(dataset, num_replicas, rank, shuffle=True, seed=seed)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_identity,
        persistent_workers=num_workers > 0,
    )


def check_batch_size(batch_size: int, rows: int, what: str = "training rows") -> None:
    """Raise InputError unless 1 ≤ ``batch_size`` ≤ ``rows``."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size must be a positive integer, got {batch_size!r}")
    if batch_size > rows:
        raise InputError(f"batch_size {batch_size} is larger than the data: there are {rows} {what}")
