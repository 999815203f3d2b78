"""Measures of a ranking, from the ranks of the right items alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer

__all__ = [
    "RankHitRate",
    "RankNDCG",
    "RankRecall",
    "ReciprocalRank",
    "rank_hit_rate",
    "rank_ndcg",
    "rank_recall",
    "reciprocal_rank",
]


def rank_recall(ranks: Tensor, k: int) -> Tensor:
    """Fraction of a query's right items that are among its first k.

    Args:
        ranks: how many items come before each right one, shape ``(B, P)``, integers; a row of fewer is filled up
            with −1.
        k: at least 1.

    Returns:
        Shape ``(B,)``.

    Example:
        >>> rank_recall(torch.tensor([[0, 7], [3, -1]]), k=5)
        tensor([0.5000, 1.0000])
    """
    there = ranks >= 0
    return (there & (ranks < k)).sum(dim=1) / there.sum(dim=1)


def rank_ndcg(ranks: Tensor, k: int) -> Tensor:
    r"""Normalised discounted cumulative gain of the first k; an item is right or not (Järvelin & Kekäläinen 2002).

    .. math:: \sum_{r < k} \frac{1}{\log_2(r + 2)} \Big/ \sum_{r < \min(k, P)} \frac{1}{\log_2(r + 2)}

    The first sum is over the ranks r of the right items.

    Args:
        ranks: as for :func:`rank_recall`.
        k: at least 1.

    Returns:
        Shape ``(B,)``.

    Example:
        >>> rank_ndcg(torch.tensor([[0, 1], [2, -1]]), k=5)
        tensor([1.0000, 0.5000])
    """
    there = ranks >= 0
    gains = torch.where(there & (ranks < k), 1 / torch.log2(ranks.clamp(min=0) + 2.0), 0.0).sum(dim=1)
    most = min(k, ranks.shape[1])
    best = (1 / torch.log2(torch.arange(most, device=ranks.device) + 2.0)).cumsum(dim=0)
    return gains / best[there.sum(dim=1).clamp(max=most) - 1]


def rank_hit_rate(ranks: Tensor, k: int) -> Tensor:
    """1 where a right item is among the first k, else 0.

    Args:
        ranks: as for :func:`rank_recall`.
        k: at least 1.

    Returns:
        Shape ``(B,)``.

    Example:
        >>> rank_hit_rate(torch.tensor([[9, 4], [5, -1]]), k=5)
        tensor([1., 0.])
    """
    return ((ranks >= 0) & (ranks < k)).any(dim=1).float()


def reciprocal_rank(ranks: Tensor) -> Tensor:
    """1 divided by the place of the first right item, counted from 1.

    Args:
        ranks: as for :func:`rank_recall`.

    Returns:
        Shape ``(B,)``.

    Example:
        >>> reciprocal_rank(torch.tensor([[9, 3], [0, -1]]))
        tensor([0.2500, 1.0000])
    """
    return 1 / (ranks.masked_fill(ranks < 0, torch.iinfo(ranks.dtype).max).amin(dim=1) + 1.0)


class _RankMetric(MeanMetric):
    """Mean over the queries of all batches and processes."""

    higher_is_better = True  # type: ignore[assignment]

    def _of_queries(self, ranks: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self, ranks: Tensor) -> None:  # type: ignore[override]
        """Add queries.

        Args:
            ranks: how many items come before each right one, shape ``(B, P)``, integers; a row of fewer is filled up
                with −1.

        Raises:
            InputError: another shape, or a query without a right item.
        """
        if ranks.ndim != 2 or ranks.is_floating_point():
            raise InputError(f"ranks must be integers of shape (B, P), got {ranks.dtype} of {tuple(ranks.shape)}")
        if not len(ranks):
            return
        if ranks.device.type == "cpu" and not bool((ranks >= 0).any(dim=1).all()):
            row = int((ranks < 0).all(dim=1).nonzero()[0])
            raise InputError(f"ranks must have a right item for each query, row {row} has none")
        super().update(self._of_queries(ranks))


class _AtK(_RankMetric):
    """Of the first k.

    Args:
        k: how many items count as found.

    Raises:
        InputError: k is no integer of at least 1.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k: int = checked_integer("k", k)


class RankRecall(_AtK):
    """Mean over queries of :func:`rank_recall`.

    Args:
        k: how many items count as found.

    Raises:
        InputError: k is no integer of at least 1.

    Example:
        >>> metric = RankRecall(5)
        >>> metric.update(torch.tensor([[0, 7], [3, -1]]))
        >>> metric.compute()
        tensor(0.7500)
    """

    def _of_queries(self, ranks: Tensor) -> Tensor:
        return rank_recall(ranks, self.k)


class RankNDCG(_AtK):
    """Mean over queries of :func:`rank_ndcg`.

    Args:
        k: how many items count as found.

    Raises:
        InputError: k is no integer of at least 1.

    Example:
        >>> metric = RankNDCG(5)
        >>> metric.update(torch.tensor([[0, 1], [2, -1]]))
        >>> metric.compute()
        tensor(0.7500)
    """

    def _of_queries(self, ranks: Tensor) -> Tensor:
        return rank_ndcg(ranks, self.k)


class RankHitRate(_AtK):
    """Mean over queries of :func:`rank_hit_rate`.

    Args:
        k: how many items count as found.

    Raises:
        InputError: k is no integer of at least 1.

    Example:
        >>> metric = RankHitRate(5)
        >>> metric.update(torch.tensor([[9, 4], [5, -1]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    def _of_queries(self, ranks: Tensor) -> Tensor:
        return rank_hit_rate(ranks, self.k)


class ReciprocalRank(_RankMetric):
    """Mean over queries of :func:`reciprocal_rank` (MRR).

    Example:
        >>> metric = ReciprocalRank()
        >>> metric.update(torch.tensor([[9, 3], [0, -1]]))
        >>> metric.compute()
        tensor(0.6250)
    """

    def _of_queries(self, ranks: Tensor) -> Tensor:
        return reciprocal_rank(ranks)
