"""Data sets that hand out whole batches together with the dataset index of every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from scent_lightning.data.loading import ResumableLoader, batch_loader, sampled_loader
from scent_lightning.errors import InputError

__all__ = ["Batch", "IndexedRows", "IndexedTensorDataset", "ResumableLoader", "batch_loader", "sampled_loader"]

Batch = tuple[Tensor | None, ...]  # None where the rows have no such part, as labels of rows to predict


class IndexedTensorDataset(Dataset[tuple[Tensor | None, ...]]):
    """Tensors of equal length; item ``i`` is row ``i`` of each, and ``i`` itself.

    A list of indices gives a whole batch at once, which is how :func:`batch_loader` fetches it: there is no per-sample
    collation. An ordinary :class:`~torch.utils.data.DataLoader` gives the same batches, row by row and slower.

    Args:
        first, *others: shape ``(n, …)`` each; None, but for the first, gives None.

    Raises:
        InputError: tensors of different lengths.

    Example:
        >>> dataset = IndexedTensorDataset(torch.tensor([10.0, 20.0, 30.0]))
        >>> dataset[2]
        (tensor(30.), tensor(2))
        >>> dataset[[2, 0]]
        (tensor([30., 10.]), tensor([2, 0]))
    """

    def __init__(self, first: Tensor, *others: Tensor | None) -> None:
        self.tensors = (first, *others)
        lengths = [len(tensor) for tensor in self.tensors if tensor is not None]
        if len(set(lengths)) > 1:
            raise InputError(f"tensors must be of equal length, got {', '.join(map(str, lengths))} rows")

    def __len__(self) -> int:
        return cast(Tensor, self.tensors[0]).shape[0]

    def __getitem__(self, index: int | Sequence[int]) -> tuple[Tensor | None, ...]:
        rows = torch.as_tensor(index, dtype=torch.int64)
        return (*(None if tensor is None else tensor[rows] for tensor in self.tensors), rows)


class IndexedRows(Dataset[Batch]):
    """Base of data sets whose rows are read or computed when they are asked for, a whole batch at a time.

    A subclass has ``__len__`` and :meth:`fetch`; item ``i`` is what it fetches of row ``i``, and ``i`` itself.

    Attributes:
        epoch: of the batch at hand, where it is one of training: what augmentation may depend on, besides the row.

    Example:
        >>> class Squares(IndexedRows):
        ...     def __len__(self):
        ...         return 10
        ...
        ...     def fetch(self, index):
        ...         return (torch.from_numpy(index**2),)
        >>> Squares()[[3, 1]]
        (tensor([9, 1]), tensor([3, 1]))
        >>> Squares()[3]
        (tensor(9), tensor(3))
    """

    epoch = 0

    def __len__(self) -> int:
        raise NotImplementedError

    def fetch(self, index: npt.NDArray[np.int64]) -> Batch:
        """What the batches have of the rows ``index``, all in range, shape (B,): tensors of shape (B, …) or None."""
        raise NotImplementedError

    def checked(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """The rows of a batch, shape (B,); notes the epoch they are of.

        Raises:
            IndexError: one is out of range.
        """
        self.epoch = getattr(indices, "epoch", 0)
        index = np.asarray(indices, dtype=np.int64)
        if index.size and (index.min() < 0 or index.max() >= len(self)):
            raise IndexError(f"index out of range: the split has {len(self)} rows")
        return index

    def __getitem__(self, index: int | Sequence[int]) -> Batch:
        if isinstance(index, Sequence):
            return self.__getitems__(index)
        return tuple(None if part is None else part[0] for part in self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        index = self.checked(indices)
        return (*self.fetch(index), torch.from_numpy(index))
