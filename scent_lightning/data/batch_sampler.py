"""Batches of dataset indices whose order is a function of the seed, the epoch and the place in it, and of nothing else.

That is what makes a run exact under a crash and under any number of processes: where an epoch goes on is one number,
and the rows that all processes take at the same time are those that one process would take.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import Dataset, DistributedSampler

from scent_lightning.random_state import seed_of
from scent_lightning.validation import checked_integer

__all__ = ["BatchRows", "EpochBatchSampler", "SequentialBatchSampler", "ShuffledBatchSampler"]


class BatchRows(list[int]):
    """The dataset indices of a batch, and the epoch it belongs to, which loader processes learn from nowhere else.

    Attributes:
        epoch: number of the epoch.
    """

    def __init__(self, rows: list[int], epoch: int) -> None:
        super().__init__(rows)
        self.epoch = epoch

    def __reduce__(self) -> Any:
        return type(self), (list(self), self.epoch)


class _Batches(Iterator[BatchRows]):
    """One epoch of a sampler; it starts, and reads which epoch it is, at the first batch."""

    def __init__(self, sampler: EpochBatchSampler, done: int) -> None:
        self.sampler = sampler
        self.done = done
        self.epoch: int | None = None
        self.rest: Iterator[list[int]] = iter(())

    def __next__(self) -> BatchRows:
        if self.done >= self.sampler.num_batches:
            raise StopIteration
        if self.epoch is None:
            self.epoch = self.sampler.epoch
            # Not before: a loader with processes asks for two iterators and uses the second.
            self.sampler._resume = 0
            self.rest = self.sampler.batches(0 if self.sampler.is_fixed else self.epoch, self.done)
        batch = BatchRows(next(self.rest), self.epoch)
        self.done += 1
        return batch


class EpochBatchSampler(DistributedSampler[list[int]]):
    """Base of samplers of whole batches; a subclass says what they are in :meth:`batches`.

    In a plain loop: ``DataLoader(dataset, batch_sampler=sampler)``, and ``sampler.set_epoch(epoch)`` before each epoch.
    Under Lightning: ``DataLoader(dataset, sampler=sampler, batch_size=None)`` with a data set whose ``__getitem__``
    takes a list. Lightning then leaves the sampler alone in a distributed run (it is a
    :class:`~torch.utils.data.DistributedSampler`) and sets its epoch. With torchdata's ``StatefulDataLoader`` either
    form continues within an epoch, and so does :class:`~scent_lightning.data.indexed.ResumableLoader`.

    Args:
        rows: number of rows n.
        num_batches: batches of an epoch, in each process.
        global_batch: rows that all processes together take at a time.
        num_replicas: number of processes.
        rank: number of this process, from 0.
        seed: of the order, at least 0.

    Attributes:
        is_fixed: all epochs have the same batches; see :meth:`fixed`.
    """

    is_fixed = False

    def __init__(self, rows: int, num_batches: int, global_batch: int, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(cast(Dataset[Any], range(rows)), num_replicas, rank, seed=seed)
        self.num_batches = num_batches
        self.global_batch = global_batch
        self._resume = 0
        self._epoch_is_set = False
        self._batches: _Batches | None = None

    @abstractmethod
    def batches(self, epoch: int, done: int) -> Iterator[list[int]]:
        """This process's batches of an epoch but the first ``done``."""
        raise NotImplementedError

    def fixed(self) -> EpochBatchSampler:
        """A copy whose epochs all have the same batches, those of the first one, not shuffled if a subclass can."""
        other = copy.copy(self)
        other.is_fixed, other._batches = True, None
        return other

    @property
    def sampler(self) -> EpochBatchSampler:
        """Itself: where this is the ``batch_sampler``, Lightning sets the epoch of ``batch_sampler.sampler``."""
        return self

    def __iter__(self) -> Iterator[list[int]]:
        self._batches = _Batches(self, self._resume)
        return self._batches

    def __len__(self) -> int:
        return self.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch; one that has not begun yet takes it as well.

        Args:
            epoch: number of the epoch, at least 0; another one than before starts at its first batch.
        """
        if epoch != self.epoch:
            self._resume = 0
            if self._batches is not None and self._batches.epoch is None:
                self._batches.done = 0
        self.epoch = epoch
        self._epoch_is_set = True

    @property
    def position(self) -> tuple[int, int]:
        """Epoch of the next iteration, and how many of its batches it leaves out."""
        return self.epoch, self._resume

    def state_dict(self) -> dict[str, int]:
        """The epoch, how many of its batches were taken, and how many rows all processes take at a time."""
        batches = self._batches
        epoch, done = self.position if batches is None else (batches.epoch, batches.done)
        return self.state_at(self.epoch if epoch is None else epoch, done)

    def state_at(self, epoch: int, done: int) -> dict[str, int]:
        """:meth:`state_dict` of a place."""
        return {"epoch": epoch, "batches": done, "global_batch": self.global_batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the next iteration continue where ``state_dict`` was taken.

        Where all processes together take another number of rows at a time than then, it continues at the first batch
        that has rows not taken yet. At the end of an epoch the next one comes, or the one that was set. Only where the
        same epoch was set again has the next iteration no batch.

        Args:
            state_dict: from :meth:`state_dict`.
        """
        epoch, done = state_dict["epoch"], state_dict["batches"]
        done = done * state_dict.get("global_batch", self.global_batch) // self.global_batch
        self._batches = None
        if done < self.num_batches:
            self.epoch, self._resume = epoch, done
        elif not self._epoch_is_set:
            # Lightning lets loader processes fetch ahead before it sets the epoch.
            self.epoch, self._resume = epoch + 1, 0
        else:
            # StatefulDataLoader loads when it is iterated, after the epoch was set for that iteration.
            self._resume = self.num_batches if epoch == self.epoch else 0


class ShuffledBatchSampler(EpochBatchSampler):
    """Every row once an epoch, in a new order each, a batch of all processes at a time.

    As with :class:`~torch.utils.data.DistributedSampler` each process has every P-th row of one order, but no row is
    repeated where the processes do not divide them evenly: a last batch that is not full is shared as evenly as can be,
    and may leave a process without a row where it has fewer rows than there are processes. The orders of different
    seeds are independent. Memory: 8 bytes a row while an epoch lasts.

    Args:
        rows: number of rows n.
        batch_size: rows of a batch in each process.
        num_replicas: number of processes.
        rank: number of this process, from 0.
        seed: of the order, at least 0.
        drop_last: leave out a last batch that is not full.

    Example:
        >>> sampler = ShuffledBatchSampler(rows=5, batch_size=2)
        >>> [list(batch) for batch in sampler]
        [[1, 3], [0, 4], [2]]
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        checked_integer("batch_size", batch_size)
        at_a_time = batch_size * num_replicas
        num_batches = rows // at_a_time if drop_last else -(-rows // at_a_time)
        super().__init__(rows, num_batches, at_a_time, num_replicas, rank, seed)
        self.rows = rows

    def batches(self, epoch: int, done: int) -> Iterator[list[int]]:  # noqa: D102
        if self.is_fixed:
            order = torch.arange(self.rows)
        else:
            # Of seed + epoch, as DistributedSampler has it, runs of neighbouring seeds would share all orders but one.
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
            order = torch.randperm(self.rows, generator=generator)
        for number in range(done, self.num_batches):
            common = order[number * self.global_batch : (number + 1) * self.global_batch]
            yield common[self.rank :: self.num_replicas].tolist()


class SequentialBatchSampler(EpochBatchSampler):
    """Every row once, in order, each by one process: for evaluation.

    All processes have the same number of batches, as what they do together in a batch demands, and the rows are shared
    as evenly as can be: where there are fewer rows than processes, a process has a batch without a row.

    Args:
        rows: number of rows n.
        batch_size: most rows of a batch in each process.
        num_replicas: number of processes.
        rank: number of this process, from 0.
        drop_last: leave out a last batch of all processes that is not full.

    Example:
        >>> [[list(batch) for batch in SequentialBatchSampler(7, 2, num_replicas=2, rank=rank)] for rank in (0, 1)]
        [[[0], [3, 4]], [[1, 2], [5, 6]]]
    """

    def __init__(
        self, rows: int, batch_size: int, num_replicas: int = 1, rank: int = 0, drop_last: bool = False
    ) -> None:
        checked_integer("batch_size", batch_size)
        at_a_time = batch_size * num_replicas
        num_batches = rows // at_a_time if drop_last else -(-rows // at_a_time)
        super().__init__(rows, num_batches, at_a_time, num_replicas, rank, seed=0)
        self.rows = min(rows, num_batches * at_a_time)

    def batches(self, epoch: int, done: int) -> Iterator[list[int]]:  # noqa: D102
        parts = self.num_batches * self.num_replicas
        for number in range(done, self.num_batches):
            part = number * self.num_replicas + self.rank
            yield list(range(part * self.rows // parts, (part + 1) * self.rows // parts))
