"""What the batches of interactions are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scent_lightning.data.indexed import Batch, IndexedRows
from scent_lightning.data.interactions.pairs import Interactions
from scent_lightning.data.interactions.ragged import Ragged

__all__ = ["QueryRows", "TrainingRows"]


def _inputs(texts: Ragged | None, queries: Tensor) -> Tensor:
    """What a tower reads of queries: their hashed n-grams, shape ``(B, L)``, or their numbers, shape ``(B,)``."""
    return queries if texts is None else texts.padded(queries)


class TrainingRows(IndexedRows):
    """A row for each interaction: query, number of the item, index.

    Args:
        pairs: the interactions.
        texts: of the queries; None: their numbers.
    """

    def __init__(self, pairs: Interactions, texts: Ragged | None) -> None:
        self.pairs, self.texts = pairs, texts

    def __len__(self) -> int:
        return len(self.pairs)

    def fetch(self, index: npt.NDArray[np.int64]) -> Batch:
        """Queries and items."""
        rows = torch.from_numpy(index)
        return _inputs(self.texts, self.pairs.queries[rows]), self.pairs.items[rows]


class QueryRows(IndexedRows):
    """A row for each query: query, numbers of its right items filled up with −1, number of the query.

    Args:
        queries: numbers of the queries, shape ``(n,)``.
        right: interactions that are to be found; None: the items are None.
        texts: of the queries; None: their numbers.
    """

    def __init__(self, queries: Tensor, right: Interactions | None, texts: Ragged | None) -> None:
        self.queries, self.right, self.texts = queries, right, texts

    def __len__(self) -> int:
        return len(self.queries)

    def fetch(self, index: npt.NDArray[np.int64]) -> Batch:
        """Queries and their right items."""
        queries = self.queries[torch.from_numpy(index)]
        return _inputs(self.texts, queries), None if self.right is None else self.right.items_of(queries)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        index = self.checked(indices)
        return (*self.fetch(index), self.queries[torch.from_numpy(index)])
