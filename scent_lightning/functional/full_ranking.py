"""A ranking of all items for each query, of which only a chunk of scores exists at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scent_lightning.functional.log_mean_exp import at_least_float32, log_sum_exp

__all__ = ["Entries", "RanksAmongAll", "Top", "TopAmongAll", "rank_among_all", "tiles", "top_of_all"]

Chunks = Iterable[tuple[int, Tensor]]
_TILE = 256, 1024  # rows and items: a few copies of so many scores stay in a core's cache


class Entries(NamedTuple):
    """Some places of a matrix of queries and items: row and item of each, int64, shape ``(E,)``."""

    rows: Tensor
    items: Tensor

    def without(self, others: Entries, num_items: int) -> Entries:
        """Those that are not among others."""
        key, other_keys = (entries.rows * num_items + entries.items for entries in (self, others))
        kept = ~torch.isin(key, other_keys)
        return Entries(self.rows[kept], self.items[kept])

    def of_rows(self, rows: slice) -> Entries | None:
        """Those of some rows, which count from 0; None where there is none."""
        inside = (self.rows >= rows.start) & (self.rows < rows.stop)
        return Entries(self.rows[inside] - rows.start, self.items[inside]) if bool(inside.any()) else None

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Those of the items from ``start`` to ``stop`` − 1, as places of the matrix of these items."""
        inside = (self.items >= start) & (self.items < stop)
        return self.rows[inside], self.items[inside] - start


def tiles(rows: int, items: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Rows and items of the pieces of a matrix of scores that are worked on at a time: on a CPU such as a cache holds.

    Args:
        rows: of the matrix.
        items: its columns.
        device: where it is.
    """
    high, wide = _TILE if device.type == "cpu" else (max(rows, 1), max(items, 1))
    for row in range(0, max(rows, 1), high):  # one without rows where there are none
        for item in range(0, items, wide):
            yield slice(row, min(row + high, rows)), slice(item, min(item + wide, items))


class _LeftOut:
    """Takes entries out of the scores, piece by piece; those of a piece's rows are looked up once."""

    def __init__(self, entries: Entries | None) -> None:
        self._entries, self._here = entries, entries
        self._rows: slice | None = None

    def take_out(self, scores: Tensor, rows: slice, start: int) -> None:
        """Of the scores ``(rows, m)`` of the items from ``start``, in place."""
        if self._entries is None:
            return
        if rows != self._rows:
            self._rows, self._here = rows, self._entries.of_rows(rows)
        if self._here is not None:
            scores[self._here.between(start, start + scores.shape[1])] = -math.inf


def _pieces(queries: Tensor, chunks: Chunks, scale: float) -> Iterator[tuple[slice, int, Tensor]]:
    """Rows, first item and scores, in float32 or better, of each piece of the matrix of all scores."""
    for start, vectors in chunks:
        for rows, items in tiles(len(queries), len(vectors), queries.device):
            scores = at_least_float32(queries[rows] @ vectors[items].T)
            yield rows, start + items.start, scores if scale == 1 else scores.mul_(scale)


class RanksAmongAll:
    """Takes in the scores of all items, piece by piece: how many come before each right one, and the softmax.

    Of items of the same score the one of the lower number comes first.

    Args:
        queries: how many.
        right: the right items, V of them, in the order of their rows.
        own: their scores, shape ``(V,)``, float32 or float64; −∞ where one is to come last.
        left_out: items that are not ranked; they are in the softmax. None: no item is.
    """

    def __init__(self, queries: int, right: Entries, own: Tensor, left_out: Entries | None = None) -> None:
        self.right, self.own = right, own
        self._left_out = _LeftOut(left_out)
        self._total = torch.full((queries,), -math.inf, dtype=own.dtype, device=own.device)
        self._ranks = torch.zeros_like(right.items)
        self._just_below = torch.nextafter(own, torch.full_like(own, -math.inf))
        self._one_each = len(right.rows) == queries and bool((right.rows[1:] != right.rows[:-1]).all())
        self._rows: slice | None = None

    def add(self, rows: slice, start: int, scores: Tensor) -> None:
        """Take in a piece.

        Args:
            rows: the queries, with their ends.
            start: number of the first item.
            scores: float32 or float64, shape ``(rows, m)``; may be overwritten.
        """
        if rows != self._rows:
            self._turn_to(rows)
        total = self._total[rows]
        torch.logaddexp(total, log_sum_exp(scores), out=total)
        stop = start + scores.shape[1]
        self._left_out.take_out(scores, rows, start)
        if not self._one_each:
            scores = scores[self._right.rows]
        places, own, items = self._places, self.own[self._places], self._right.items
        # In a piece before the right item's, a score that equals its own comes first; in one after it, it does not.
        found = _count_above(scores, torch.where(items >= stop, self._just_below[places], own))
        inside = ((items >= start) & (items < stop)).nonzero().squeeze(1)
        if len(inside):
            found[inside] += _correction_within(scores[inside], own[inside].unsqueeze(1), items[inside] - start)
        self._ranks[places] += found

    def _turn_to(self, rows: slice) -> None:
        """Find what belongs to the rows of a piece."""
        self._rows = rows
        if self._one_each:
            self._places = rows
        else:
            first = torch.searchsorted(self.right.rows, torch.tensor([rows.start, rows.stop], device=self.own.device))
            self._places = slice(*first.tolist())
        self._right = Entries(self.right.rows[self._places] - rows.start, self.right.items[self._places])

    def found(self) -> tuple[Tensor, Tensor]:
        """Ranks, shape ``(V,)``, int64, and softmax cross-entropies, shape ``(V,)``."""
        return self._ranks, self._total[self.right.rows] - self.own


def rank_among_all(
    queries: Tensor, chunks: Chunks, right: Entries, own: Tensor, left_out: Entries | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """How many items come before each right one, and its softmax cross-entropy over all items.

    Args:
        queries: vectors, shape ``(B, D)``.
        chunks: number of the first item and vectors ``(m, D)`` of the items, chunk by chunk.
        right: as for :class:`RanksAmongAll`.
        own: as for :class:`RanksAmongAll`.
        left_out: as for :class:`RanksAmongAll`.
        scale: multiplies the scores.

    Returns:
        Ranks, shape ``(V,)``, int64, and cross-entropies, shape ``(V,)``.

    Example:
        >>> right = Entries(torch.tensor([0]), torch.tensor([1]))
        >>> items = torch.tensor([[3.0], [2.0], [1.0]])
        >>> ranks, cross_entropy = rank_among_all(torch.ones(1, 1), [(0, items)], right, torch.tensor([2.0]))
        >>> ranks.tolist(), round(cross_entropy.item(), 4)
        ([1], 1.4076)
    """
    ranking = RanksAmongAll(len(queries), right, own, left_out)
    for rows, start, scores in _pieces(queries, chunks, scale):
        ranking.add(rows, start, scores)
    return ranking.found()


def _count_above(scores: Tensor, threshold: Tensor) -> Tensor:
    """How many scores of each row are above a threshold; a sum of numbers takes half of the time of one of bools."""
    above = torch.gt(scores, threshold.unsqueeze(1), out=torch.empty_like(scores))
    return above.sum(dim=1).long()


def _correction_within(scores: Tensor, own: Tensor, place: Tensor) -> Tensor:
    """What a count of the scores above ``own`` lacks: equal ones before it; and whether it has counted itself."""
    place = place.unsqueeze(1)
    equal_before = (scores == own) & (torch.arange(scores.shape[1], device=own.device) < place)
    # By a product of another shape, an item's score may differ from itself in the last digit.
    return equal_before.sum(dim=1) - (scores.gather(1, place) > own).squeeze(1).long()


def top_of_all(queries: Tensor, chunks: Chunks, k: int, left_out: Entries, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The items of the highest scores.

    Args:
        queries: vectors, shape ``(B, D)``.
        chunks: as for :func:`rank_among_all`.
        k: how many.
        left_out: items that are not ranked.
        scale: multiplies the scores.

    Returns:
        Their numbers, int64, −1 where no item is left, and scores, each of shape ``(B, min(k, K))``, highest first.

    Example:
        >>> items = torch.tensor([[3.0], [2.0], [1.0]])
        >>> left_out = Entries(torch.tensor([0]), torch.tensor([0]))
        >>> [found.tolist() for found in top_of_all(torch.ones(1, 1), [(0, items)], 2, left_out)]
        [[[1, 2]], [[2.0, 1.0]]]
    """
    top, leave_out = TopAmongAll(k), _LeftOut(left_out)
    for rows, start, scores in _pieces(queries, chunks, scale):
        leave_out.take_out(scores, rows, start)
        top.add(rows, start, scores)
    best = top.found()
    return best.items.masked_fill(best.scores == -math.inf, -1), best.scores


class Top(NamedTuple):
    """The highest scores of each row, and the numbers of what has them, shape ``(B, k)`` each, highest first."""

    scores: Tensor
    items: Tensor


class TopAmongAll:
    """Takes in the scores of all items, piece by piece, and keeps the highest of each row.

    Args:
        k: how many; fewer where there are fewer.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._best: dict[int, Top] = {}

    def add(self, rows: slice, start: int, scores: Tensor) -> None:
        """Take in a piece, one of the same rows for all items.

        Args:
            rows: the queries, with their ends.
            start: number of the first item.
            scores: shape ``(rows, m)``.
        """
        values, places = scores.topk(min(self.k, scores.shape[1]), dim=1)
        items = places + start
        if (best := self._best.get(rows.start)) is not None:
            values, items = torch.cat([best.scores, values], dim=1), torch.cat([best.items, items], dim=1)
            values, kept = values.topk(min(self.k, values.shape[1]), dim=1)
            items = items.gather(1, kept)
        self._best[rows.start] = Top(values, items)

    def found(self) -> Top:
        """The highest of all rows."""
        return Top(*(torch.cat(parts) for parts in zip(*self._best.values(), strict=True)))
