"""Any data set of one's own, with the index of each row added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from scent_lightning.errors import InputError

__all__ = ["WithIndex"]


class WithIndex(Dataset[Any]):
    """A map-style data set whose rows end with their index, which tells a dual variable whose turn it is.

    A row that is a tuple or a list becomes a tuple with the index at its end, a mapping a dictionary with the index
    under ``key``, and anything else the pair of itself and the index. An ordinary
    :class:`~torch.utils.data.DataLoader` collates the indices to a tensor of shape ``(B,)``, int64.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; where it has ``__getitems__``, rows are fetched by it.
        key: where the index is in a row that is a mapping.

    Raises:
        InputError: a data set without numbered rows; in use: a row that has ``key`` already.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> rows = WithIndex(TensorDataset(torch.tensor([0.5, 1.5, 2.5]), torch.tensor([0, 1, 1])))
        >>> rows[2]
        (tensor(2.5000), tensor(1), 2)
        >>> features, labels, index = next(iter(DataLoader(rows, batch_size=2)))
        >>> index
        tensor([0, 1])
        >>> WithIndex([{"text": "a"}, {"text": "b"}])[1]
        {'text': 'b', 'index': 1}
    """

    def __init__(self, dataset: Any, key: str = "index") -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise InputError(
                "dataset must have numbered rows (__getitem__ and __len__), as ν is stored by them; got "
                f"{type(dataset).__name__}"
            )
        self.dataset = dataset
        self.key = key

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index < 0:
            index += len(self)
        return self._with_index(self.dataset[index], index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        fetch = getattr(self.dataset, "__getitems__", None)
        rows = [self.dataset[index] for index in indices] if fetch is None else fetch(indices)
        return [self._with_index(row, index) for row, index in zip(rows, indices, strict=True)]

    def _with_index(self, row: Any, index: int) -> Any:
        if isinstance(row, tuple | list):
            return (*row, index)
        if not isinstance(row, Mapping):
            return row, index
        if self.key in row:
            raise InputError(f"row {index} of {type(self.dataset).__name__} has {self.key!r} already: give another key")
        return {**row, self.key: index}
