"""Batches with a fixed number of rows of each of two classes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scent_lightning.data.batch_sampler import EpochBatchSampler
from scent_lightning.errors import InputError
from scent_lightning.random_state import seed_of
from scent_lightning.validation import checked_integer

__all__ = ["StratifiedBatchSampler"]


def check_class_size(name: str, count: int, num_replicas: int, rows: int, kind: str) -> None:
    """Raise InputError if a batch of all processes needs more different rows of a class than there are."""
    if num_replicas * count > rows:
        processes = "" if num_replicas == 1 else f" in each of {num_replicas} processes"
        allowed = f"1 to {rows // num_replicas}" if num_replicas <= rows else f"at most {rows} processes"
        raise InputError(f"{name} {count}{processes} is more than the {rows} {kind} rows there are; allowed: {allowed}")


def _generator(*key: int) -> torch.Generator:
    """Random numbers of their own for each key."""
    return torch.Generator().manual_seed(seed_of(*key))


def _turn(size: int, count: int, epoch: int, *key: int) -> Tensor:
    """Which ``count`` of ``size`` positions have their turn in ``epoch``: all equally often over epochs, to within one.

    Epoch after epoch takes its part of permutation after permutation, each found from its number alone. ``count`` is at
    most half of ``size``.
    """

    def permutation(number: int) -> tuple[Tensor, int]:
        """The permutation, and how many of its last positions the epoch at its end takes."""
        return torch.randperm(size, generator=_generator(*key, number)), (number + 1) * size % count

    number, start = divmod(epoch * count, size)
    order, last = permutation(number)
    if number > 0:
        # The first epoch in it has taken the last positions of the permutation before: those come later in this one.
        # Its own last positions stay where they are, so that no permutation depends on more than the one before.
        before, taken = permutation(number - 1)
        early, end = order[: size - last], order[size - last :]
        late = torch.isin(early, before[size - taken :])
        order = torch.cat((early[~late], early[late], end))
    if start + count <= size:
        return order[start : start + count]
    tail = order[start:]
    following, last = permutation(number + 1)
    early = following[: size - last]
    return torch.cat((tail, early[~torch.isin(early, tail)][: count - len(tail)]))


class _Stream:
    """Positions 0…``size`` − 1 of one epoch, permutation after permutation, without a repeat within one :meth:`take`.

    Where the epoch's ``total`` is not a multiple of the size, the epoch begins with the rest: with rows whose turn it
    is, so that all rows are taken equally often over many epochs, too.
    """

    def __init__(self, size: int, total: int, epoch: int, *key: int) -> None:
        self.size = size
        self.generator = _generator(*key, 0, epoch)
        rest = total % size
        chosen = _turn(size, min(rest, size - rest), epoch, *key, 1) if rest else torch.arange(0)
        if rest > size - rest:
            left_out = torch.zeros(size, dtype=torch.bool)
            left_out[chosen] = True
            chosen = (~left_out).nonzero().squeeze(1)
        self.order = chosen[torch.randperm(len(chosen), generator=self.generator)]
        self.start = 0

    def take(self, count: int) -> Tensor:
        """The next ``count`` positions, shape ``(count,)``; ``count`` is at most the size."""
        end = self.start + count
        if end <= len(self.order):
            taken = self.order[self.start : end]
            self.start = end
            return taken
        tail = self.order[self.start :]
        self.order = torch.randperm(self.size, generator=self.generator)
        self.start = count - len(tail)
        # Among the first `count` at most len(tail) are in the tail, so that enough others are left.
        head = self.order[:count]
        repeated = torch.isin(head, tail)
        self.order[:count] = torch.cat((head[~repeated], head[repeated]))
        return torch.cat((tail, self.order[: self.start]))

    def skip(self, batches: int, count: int) -> None:
        """Go where ``batches`` calls of ``take(count)`` lead."""
        while batches > 0:
            whole = min(batches, (len(self.order) - self.start) // count)
            self.start += whole * count
            batches -= whole
            if batches > 0:
                self.take(count)
                batches -= 1


class StratifiedBatchSampler(EpochBatchSampler):
    """Lists of dataset indices: first ``positives`` rows with label 1, then ``negatives`` rows with label 0.

    Each class is shuffled, used up and shuffled anew, also within an epoch: in an epoch all rows of a class appear
    equally often, to within one, and rows that come once less have their turn in a later epoch. No row appears twice in
    a batch, nor in the batches that several processes take at the same time; there, the first process has the first
    part of one common batch, the second process the next, so that two processes with half of the rows see what one
    process would. The order of an epoch depends on ``seed`` and the number of the epoch alone.

    For how to use it in a loop and under Lightning, see
    :class:`~scent_lightning.data.batch_sampler.EpochBatchSampler`. Memory: 8 bytes a row, and 8 more while an epoch
    lasts.

    Args:
        labels: shape ``(n,)``, 0 or 1, of any type.
        positives: rows with label 1 in each batch of this process, S+.
        negatives: rows with label 0 in each batch of this process, S−.
        num_batches: batches of an epoch; None takes n // (``num_replicas`` · (S+ + S−)), at least 1.
        seed: of the shuffle, at least 0.
        num_replicas: number of processes.
        rank: number of this process, from 0.

    Raises:
        InputError: labels of a wrong shape, other than 0 and 1 or all the same, more rows in a batch than the class
            has, or an argument out of range.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 0, 1, 1, 0, 0])
        >>> sampler = StratifiedBatchSampler(labels, positives=1, negatives=3)
        >>> len(sampler)
        2
        >>> for batch in sampler:
        ...     print(labels[batch].tolist())
        [1, 0, 0, 0]
        [1, 0, 0, 0]
        >>> sorted(index for batch in sampler for index in batch)
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(
        self,
        labels: Tensor,
        positives: int,
        negatives: int,
        num_batches: int | None = None,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        labels = torch.as_tensor(labels)
        if labels.ndim != 1:
            raise InputError(f"labels must have shape (n,), got {tuple(labels.shape)}")
        checked_integer("positives", positives)
        checked_integer("negatives", negatives)
        checked_integer("num_replicas", num_replicas)
        checked_integer("num_batches", num_batches, or_none=True)
        checked_integer("seed", seed, least=0)
        checked_integer("rank", rank, least=0, most=num_replicas - 1)
        positive = labels == 1
        other = ~(positive | (labels == 0))
        if other.any():
            row = int(other.to(torch.uint8).argmax())
            raise InputError(f"labels must be 0 or 1, got {labels[row].item()} in row {row} (counted from 0)")
        positive_rows = positive.nonzero().squeeze(1)
        negative_rows = (~positive).nonzero().squeeze(1)
        for rows, kind, label in ((positive_rows, "positive", 1), (negative_rows, "negative", 0)):
            if len(rows) == 0:
                raise InputError(f"labels must have rows of both classes, got no {kind} row (label {label})")
        check_class_size("positives", positives, num_replicas, len(positive_rows), "positive")
        check_class_size("negatives", negatives, num_replicas, len(negative_rows), "negative")
        at_a_time = num_replicas * (positives + negatives)
        if num_batches is None:
            num_batches = max(1, len(labels) // at_a_time)
        super().__init__(len(labels), num_batches, at_a_time, num_replicas, rank, seed)
        self.groups = ((positive_rows, positives), (negative_rows, negatives))

    def batches(self, epoch: int, done: int) -> Iterator[list[int]]:  # noqa: D102
        streams = []
        for label, (rows, count) in enumerate(self.groups):
            # A key each: the order of a class does not depend on the size of the other.
            common = self.num_replicas * count
            stream = _Stream(len(rows), common * self.num_batches, epoch, self.seed, label)
            stream.skip(done, common)
            streams.append(stream)
        for _ in range(done, self.num_batches):
            batch: list[int] = []
            for (rows, count), stream in zip(self.groups, streams, strict=True):
                positions = stream.take(self.num_replicas * count)
                batch += rows[positions[self.rank * count : (self.rank + 1) * count]].tolist()
            yield batch
