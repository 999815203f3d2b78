"""Loaders that hand out whole batches, continue within an epoch, and share the rows between processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from scent_lightning.data.batch_sampler import EpochBatchSampler, SequentialBatchSampler, ShuffledBatchSampler
from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer

__all__ = [
    "PlaceInRun",
    "ResumableLoader",
    "batch_loader",
    "check_batch_size",
    "evaluation_loader",
    "fetches",
    "place_in_run",
    "sampled_loader",
    "shuffle_seed",
]


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


def evaluation_loader(
    dataset: Dataset[Any], batch_size: int, trainer: L.Trainer | None, num_workers: int = 0
) -> DataLoader[Any]:
    """Loader of rows in order, each in one process and once.

    Args:
        dataset: has ``__len__``, and gives a whole batch for a list of indices by ``__getitems__`` or ``__getitem__``.
        batch_size: rows of a batch.
        trainer: whose processes share the rows, if there is one. For predict it shares them itself, without repeats,
            unless there are fewer rows than processes.
        num_workers: loader processes; 0 loads in this one.
    """
    replicas, rank, _ = place_in_run(trainer)
    predicts = trainer is not None and trainer.state.fn == TrainerFn.PREDICTING
    if predicts and len(cast(Any, dataset)) >= replicas:
        replicas, rank = 1, 0
    return batch_loader(dataset, batch_size, False, replicas, rank, num_workers)


def shuffle_seed() -> int:
    """The seed that ``seed_everything`` set, in the range of every sampler."""
    return torch.initial_seed() % 2**31


def _identity(batch: Any) -> Any:
    return batch


def fetches(dataset: Dataset[Any]) -> Callable[[Sequence[int]], Any]:
    """What gives a whole batch of a data set."""
    return getattr(dataset, "__getitems__", dataset.__getitem__)


class _Batches(Dataset[Any]):
    """A data set that a DataLoader takes whole batches of.

    Args:
        dataset: has ``__len__``, and gives a batch for a list of indices by ``__getitems__`` or ``__getitem__``.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(cast(Any, self.dataset))

    def __getitem__(self, rows: int | Sequence[int]) -> Any:
        return self.dataset[rows] if isinstance(rows, int) else fetches(self.dataset)(rows)

    def __getitems__(self, rows: Sequence[int]) -> Any:
        return fetches(self.dataset)(rows)


class WholeBatches(_Batches):
    """A data set for a sampler that gives whole batches of indices.

    Args:
        dataset: see :class:`_Batches`.
        sampler: that gives them.
    """

    def __init__(self, dataset: Dataset[Any], sampler: EpochBatchSampler) -> None:
        super().__init__(dataset)
        self.sampler = sampler

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset}  # loader processes are told the rows


class ResumableLoader(DataLoader[Any]):
    """A loader over an :class:`~scent_lightning.data.batch_sampler.EpochBatchSampler` that continues within an epoch.

    Lightning saves and restores its state by itself. It counts the batches that were handed out, not those that loader
    processes have fetched ahead. It takes no random number: a run draws the same ones whether it was interrupted or
    not.
    """

    _taken: tuple[int, int] | None = None

    def __init__(self, dataset: Dataset[Any], *, sampler: Any = None, **arguments: Any) -> None:
        if isinstance(sampler, SequentialSampler) and isinstance(dataset, WholeBatches):
            # Lightning's overfit_batches puts it in the place of every other sampler: the same batches each epoch.
            sampler = dataset.sampler.fixed()
        super().__init__(dataset, sampler=sampler, **arguments)

    def __iter__(self) -> Any:
        sampler = cast(EpochBatchSampler, self.sampler)
        epoch, done = sampler.position
        self._taken = epoch, done
        for batch in super().__iter__():
            done += 1
            self._taken = epoch, done
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where in which epoch this loader is."""
        sampler = cast(EpochBatchSampler, self.sampler)
        return sampler.state_at(*(self._taken or sampler.position))

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the next iteration continue there; see the sampler's."""
        cast(EpochBatchSampler, self.sampler).load_state_dict(state_dict)
        self._taken = None


def sampled_loader(dataset: Dataset[Any], sampler: EpochBatchSampler, num_workers: int = 0) -> ResumableLoader:
    """Training loader of a data set, whole batches at a time, chosen by ``sampler``.

    Args:
        dataset: has ``__len__``, and gives a whole batch for a list of indices by ``__getitems__`` or ``__getitem__``.
        sampler: of batches.
        num_workers: loader processes; 0 loads in this one.
    """
    return ResumableLoader(
        WholeBatches(dataset, sampler),
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_identity,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # else the seeds of loader processes come out of the global one
    )


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
    """Loader of a data set, whole batches at a time.

    Where ``num_replicas`` is above 1, each row is in the batches of one process, and Lightning leaves it at that; else
    Lightning shares the rows of validation and test evenly, and repeats some for it.

    The order of an epoch depends on the seed and the number of the epoch alone (Lightning sets it), not on the global
    random state nor on the number of processes: all of them together take the rows that one would take, each once.

    Args:
        dataset: has ``__len__``, and gives a whole batch for a list of indices by ``__getitems__`` or ``__getitem__``.
        batch_size: rows of a batch, in this process.
        shuffle: new order every epoch (training), or the order of the data set.
        num_replicas: number of processes.
        rank: number of this process.
        num_workers: loader processes; 0 loads in this one.
        seed: of the shuffle; None takes the one ``seed_everything`` set.
        epoch: number of the epoch that comes next.
        drop_last: leave out a last batch that is not full.
    """
    if shuffle:
        rows = len(cast(Any, dataset))
        seed = shuffle_seed() if seed is None else seed
        sampler = ShuffledBatchSampler(rows, batch_size, num_replicas, rank, seed, drop_last)
        sampler.set_epoch(epoch)
        return sampled_loader(dataset, sampler, num_workers)
    if num_replicas > 1:
        in_order = SequentialBatchSampler(len(cast(Any, dataset)), batch_size, num_replicas, rank, drop_last)
        return sampled_loader(dataset, in_order, num_workers)
    return DataLoader(
        dataset if hasattr(dataset, "__getitems__") else _Batches(dataset),
        batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=_identity,
        persistent_workers=num_workers > 0,
        drop_last=drop_last,
        generator=torch.Generator(),
    )


def check_batch_size(batch_size: int, rows: int, what: str = "training rows") -> None:
    """Raise InputError unless 1 ≤ ``batch_size`` ≤ ``rows``."""
    checked_integer("batch_size", batch_size)
    if batch_size > rows:
        raise InputError(f"batch_size {batch_size} is larger than the data: there are {rows} {what}")
