"""A ranking of all items for each query, of which only a chunk of scores exists at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from scent_lightning.functional.log_mean_exp import at_least_float32

__all__ = ["Entries", "Top", "merged_top", "rank_among_all", "top_of_all"]

Chunks = Iterable[tuple[int, Tensor]]


class Entries(NamedTuple):
    """Some places of a matrix of queries and items: row and item of each, int64, shape ``(E,)``."""

    rows: Tensor
    items: Tensor

    def without(self, others: Entries, num_items: int) -> Entries:
        """Those that are not among others."""
        key, other_keys = (entries.rows * num_items + entries.items for entries in (self, others))
        kept = ~torch.isin(key, other_keys)
        return Entries(self.rows[kept], self.items[kept])

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Those of the items from ``start`` to ``stop`` − 1, as places of the matrix of these items."""
        inside = (self.items >= start) & (self.items < stop)
        return self.rows[inside], self.items[inside] - start


def rank_among_all(
    queries: Tensor, chunks: Chunks, right: Entries, own: Tensor, left_out: Entries, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """How many items come before each right one, and its softmax cross-entropy over all items.

    Of items of the same score the one of the lower number comes first.

    Args:
        queries: vectors, shape ``(B, D)``.
        chunks: number of the first item and vectors ``(m, D)`` of the items, chunk by chunk.
        right: the right items, V of them.
        own: their scores, shape ``(V,)``; −∞ where one is to come last.
        left_out: items that are not ranked; they are in the softmax.
        scale: multiplies the scores.

    Returns:
        Ranks, shape ``(V,)``, int64, and cross-entropies, shape ``(V,)``.

    Example:
        >>> right, nothing = Entries(torch.tensor([0]), torch.tensor([1])), Entries(*torch.zeros(2, 0).long())
        >>> items = torch.tensor([[3.0], [2.0], [1.0]])
        >>> ranks, cross_entropy = rank_among_all(torch.ones(1, 1), [(0, items)], right, torch.tensor([2.0]), nothing)
        >>> ranks.tolist(), round(cross_entropy.item(), 4)
        ([1], 1.4076)
    """
    total = torch.full((len(queries),), -math.inf, dtype=own.dtype, device=own.device)
    ranks = torch.zeros_like(right.items)
    just_below = torch.nextafter(own, torch.full_like(own, -math.inf))
    one_each = len(right.rows) == len(queries) and bool((right.rows[1:] != right.rows[:-1]).all())
    for start, vectors in chunks:
        scores = at_least_float32(queries @ vectors.T) * scale
        total = torch.logaddexp(total, torch.logsumexp(scores, dim=1))
        stop = start + len(vectors)
        scores[left_out.between(start, stop)] = -math.inf
        compared = scores if one_each else scores[right.rows]
        # In a chunk before the right item's, a score that equals its own comes first; in one after it, it does not.
        ranks += _count_above(compared, torch.where(right.items >= stop, just_below, own))
        inside = ((right.items >= start) & (right.items < stop)).nonzero().squeeze(1)
        ranks[inside] += _correction_within(compared[inside], own[inside].unsqueeze(1), right.items[inside] - start)
    return ranks, total[right.rows] - own


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
    best = None
    for start, vectors in chunks:
        scores = at_least_float32(queries @ vectors.T) * scale
        scores[left_out.between(start, start + len(vectors))] = -math.inf
        best = merged_top(best, scores, start, k)
    assert best is not None
    return best.items.masked_fill(best.scores == -math.inf, -1), best.scores


class Top(NamedTuple):
    """The highest scores of each row, and the numbers of what has them, shape ``(B, k)`` each, highest first."""

    scores: Tensor
    items: Tensor


def merged_top(best: Top | None, scores: Tensor, start: int, k: int) -> Top:
    """The k highest of those found so far and of one more chunk.

    Args:
        best: of the chunks before; None: this is the first.
        scores: of this chunk, shape ``(B, m)``.
        start: number of its first item.
        k: how many; fewer as long as there are fewer.
    """
    values, places = scores.topk(min(k, scores.shape[1]), dim=1)
    places = places + start
    if best is not None:
        values, places = torch.cat([best.scores, values], dim=1), torch.cat([best.items, places], dim=1)
        values, kept = values.topk(min(k, values.shape[1]), dim=1)
        places = places.gather(1, kept)
    return Top(values, places)
