"""Interactions of queries with items."""

from __future__ import annotations

import torch
from torch import Tensor

from scent_lightning.data.interactions.ragged import Ragged
from scent_lightning.errors import InputError
from scent_lightning.words import listed

__all__ = ["Interactions"]


class Interactions:
    """Pairs of a query and an item, by number.

    Args:
        queries: shape ``(n,)``, int64, from 0 to ``num_queries`` − 1.
        items: shape ``(n,)``, int64, from 0 to ``num_items`` − 1.
        num_queries: number of queries.
        num_items: number of items.

    Raises:
        InputError: shapes that differ, or a number out of range.

    Example:
        >>> pairs = Interactions(torch.tensor([0, 2, 0]), torch.tensor([1, 1, 3]), num_queries=3, num_items=4)
        >>> pairs.counts.tolist(), pairs.items_of(torch.tensor([2, 0])).tolist()
        ([0, 2, 0, 1], [[1, -1], [1, 3]])
    """

    def __init__(self, queries: Tensor, items: Tensor, num_queries: int, num_items: int) -> None:
        if queries.ndim != 1 or queries.shape != items.shape:
            shapes = f"{tuple(queries.shape)} and {tuple(items.shape)}"
            raise InputError(f"queries and items must both have shape (n,), got {shapes}")
        for name, numbers, count in (("queries", queries, num_queries), ("items", items, num_items)):
            wrong = numbers[(numbers < 0) | (numbers >= count)]
            if len(wrong):
                raise InputError(f"{name} must be from 0 to {count - 1}, got {listed(wrong[:3].tolist())}")
        self.queries, self.items = queries, items
        self.num_queries, self.num_items = num_queries, num_items
        self.counts = torch.bincount(items, minlength=num_items)
        self.of_query = Ragged.grouped(queries, items, num_queries)

    def __len__(self) -> int:
        return len(self.queries)

    def to(self, device: torch.device) -> Interactions:
        """The same on a device."""
        if self.queries.device == device:
            return self
        moved = object.__new__(Interactions)
        moved.queries, moved.items, moved.counts = (t.to(device) for t in (self.queries, self.items, self.counts))
        moved.num_queries, moved.num_items = self.num_queries, self.num_items
        moved.of_query = self.of_query.to(device)
        return moved

    def items_of(self, queries: Tensor) -> Tensor:
        """Items of some queries, shape ``(B, L)``, filled up with −1."""
        return self.of_query.padded(queries)
