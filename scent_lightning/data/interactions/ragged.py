"""Rows of different length in one block of memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Ragged"]


class Ragged:
    """Rows of integers, each of its own length.

    Args:
        values: those of all rows, one after another, shape ``(N,)``.
        offsets: where each row begins, and where the last one ends, shape ``(n + 1,)``, int64.

    Example:
        >>> rows = Ragged.of_lists([[5, 6], [], [7]])
        >>> [part.tolist() for part in rows.entries(torch.tensor([2, 0]))]
        [[0, 1, 1], [7, 5, 6]]
        >>> rows.padded(torch.tensor([2, 0])).tolist()
        [[7, -1], [5, 6]]
    """

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self.values = values
        self.offsets = offsets

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int] | npt.NDArray[np.int64]]) -> Ragged:
        """Of a list of integers for each row."""
        ends = np.cumsum([0, *(len(row) for row in lists)], dtype=np.int64)
        values = np.concatenate([np.asarray(row, dtype=np.int64) for row in lists]) if lists else np.zeros(0, np.int64)
        return cls(torch.from_numpy(values), torch.from_numpy(ends))

    @classmethod
    def grouped(cls, groups: Tensor, values: Tensor, count: int) -> Ragged:
        """The values of each group, in their order.

        Args:
            groups: number of the group of each value, shape ``(N,)``, from 0 to ``count`` − 1.
            values: shape ``(N,)``.
            count: number of groups.
        """
        offsets = torch.zeros(count + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(groups, minlength=count), dim=0, out=offsets[1:])
        return cls(values[torch.argsort(groups, stable=True)], offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def to(self, device: torch.device) -> Ragged:
        """The same on a device."""
        if self.values.device == device:
            return self
        return Ragged(self.values.to(device), self.offsets.to(device))

    def lengths(self) -> Tensor:
        """Length of each row, shape ``(n,)``."""
        return self.offsets.diff()

    def entries(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """What some rows hold.

        Args:
            index: which rows, shape ``(B,)``.

        Returns:
            For each entry the place in ``index`` of its row, and its value, both of shape ``(E,)``.
        """
        starts = self.offsets[index]
        lengths = self.offsets[index + 1] - starts
        ends = lengths.cumsum(dim=0)
        rows = torch.repeat_interleave(torch.arange(len(index), device=index.device), lengths)
        places = torch.arange(len(rows), device=index.device) + (starts - ends + lengths)[rows]
        return rows, self.values[places]

    def padded(self, index: Tensor, filling: int = -1) -> Tensor:
        """Some rows as a matrix of the width of the longest, shape ``(B, L)``.

        Args:
            index: which rows, shape ``(B,)``.
            filling: what stands behind a shorter one.
        """
        starts = self.offsets[index].unsqueeze(1)
        lengths = self.offsets[index + 1].unsqueeze(1) - starts
        width = int(lengths.max()) if len(index) else 0
        columns = torch.arange(width, device=index.device)
        there = columns < lengths
        if not len(self.values):
            return torch.full(there.shape, filling, device=index.device)
        return self.values[(starts + columns).clamp(max=len(self.values) - 1)].masked_fill(~there, filling)
