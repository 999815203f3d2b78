"""Accuracy of the k best classes, from the rank of the right one."""

from __future__ import annotations

from torch import Tensor
from torchmetrics import MeanMetric

from scent_lightning.validation import checked_integer

__all__ = ["TopKAccuracy"]


class TopKAccuracy(MeanMetric):
    """Fraction of rows whose right class has fewer than k others before it, over all batches and processes.

    Where the classes are too many for a matrix of scores, the rank is all that is at hand.

    Args:
        k: how many classes count as the best.

    Raises:
        InputError: k is no integer of at least 1.

    Example:
        >>> import torch
        >>> metric = TopKAccuracy(2)
        >>> metric.update(torch.tensor([0, 1, 5]))
        >>> metric.update(torch.tensor([0]))
        >>> metric.compute()
        tensor(0.7500)
    """

    higher_is_better = True  # type: ignore[assignment]

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k: int = checked_integer("k", k)

    def update(self, ranks: Tensor) -> None:  # type: ignore[override]
        """Add rows.

        Args:
            ranks: how many classes come before the right one, shape ``(B,)``.
        """
        super().update((ranks < self.k).float())
