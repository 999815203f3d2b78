"""Data sets that hand out whole batches together with the dataset index of every row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from scent_lightning.errors import InputError

__all__ = ["IndexedTensorDataset", "ShuffledSampler", "batch_loader"]

CHUNK = 65536


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


class ShuffledSampler(DistributedSampler[int]):
    """The order of :class:`~torch.utils.data.DistributedSampler`, without its list of all indices.

    An epoch is one permutation of 8 bytes a row, where torch's own holds a Python list of every index: 0.8 GB at 17
    million rows.

    Args:
        dataset: what is sampled.
        num_replicas: number of processes; where they do not divide the rows, the first rows of the order are repeated.
        rank: number of this process.
        seed: of the shuffle; the order of an epoch depends on it and the number of the epoch alone.
    """

    def __init__(self, dataset: Dataset[Any], num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(cast(Any, self.dataset)), generator=generator)
        if self.total_size > len(order):
            repeats = -(-self.total_size // len(order))
            order = order.repeat(repeats)[: self.total_size]
        mine = order[self.rank : self.total_size : self.num_replicas]
        for part in torch.split(mine, CHUNK):
            yield from part.tolist()


class PlaceInRun(NamedTuple):
    """Which share of the rows a loader has to give, and of which epoch."""

    num_replicas: int
    rank: int
    epoch: int


def place_in_run(trainer: L.Trainer | None) -> PlaceInRun:
    """Number of processes, this one's number, and the epoch that comes next; without a Trainer all of the first."""
    return (
        PlaceInRun(1, 0, 0)
        if trainer is None
        else PlaceInRun(trainer.world_size, trainer.global_rank, trainer.current_epoch)
    )


def shuffle_seed() -> int:
    """The seed that ``seed_everything`` set, in the range of every sampler."""
    return torch.initial_seed() % 2**31


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
    epoch: int = 0,
    drop_last: bool = False,
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
        epoch: number of the epoch that comes next. Loader processes fetch ahead before Lightning sets it, which
            matters in a run that is resumed.
        drop_last: leave out a last batch that is not full.
    """
    if seed is None:
        seed = shuffle_seed()
    sampler = ShuffledSampler(dataset, num_replicas, rank, seed) if shuffle else None
    if sampler is not None:
        sampler.set_epoch(epoch)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_identity,
        persistent_workers=num_workers > 0,
        drop_last=drop_last,
    )


def check_batch_size(batch_size: int, rows: int, what: str = "training rows") -> None:
    """Raise InputError unless 1 ≤ ``batch_size`` ≤ ``rows``."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size must be a positive integer, got {batch_size!r}")
    if batch_size > rows:
        raise InputError(f"batch_size {batch_size} is larger than the data: there are {rows} {what}")
