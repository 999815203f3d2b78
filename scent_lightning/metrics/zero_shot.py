"""Accuracy of zero-shot classification."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer

__all__ = ["ZeroShotAccuracy"]


class ZeroShotAccuracy(Metric):
    """Accuracy over all rows of all batches and processes, under the names of open_clip and CLIP benchmark.

    ``top1`` and, for more than five classes, ``top5`` are the fractions of rows whose class is among those of the one
    or five highest scores. ``mean_per_class_recall`` is the mean of ``top1`` over the classes that have rows (where
    torchmetrics' macro average counts a class without rows as 0 once it is predicted). All are NaN without rows.

    Args:
        num_classes: number of classes K, at least 2.

    Raises:
        InputError: fewer than two classes; scores and labels that do not fit.

    Example:
        >>> import torch
        >>> metric = ZeroShotAccuracy(num_classes=3)
        >>> metric.update(torch.eye(3)[[0, 0, 0, 1]], torch.tensor([0, 0, 0, 0]))
        >>> metric.update(torch.eye(3)[[2]], torch.tensor([1]))
        >>> {name: round(value.item(), 3) for name, value in metric.compute().items()}
        {'top1': 0.6, 'mean_per_class_recall': 0.375}
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    hits: Tensor
    rows: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        checked_integer("num_classes", num_classes, least=2)
        self.ks = (1, 5) if num_classes > 5 else (1,)
        self.add_state("hits", torch.zeros(len(self.ks), num_classes, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Add rows.

        Args:
            scores: of each class, shape ``(B, K)``; B may be 0.
            labels: classes, shape ``(B,)``, int64, from 0 to K − 1.
        """
        num_classes = len(self.rows)
        if scores.ndim != 2 or scores.shape[1] != num_classes or labels.shape != scores.shape[:1]:
            raise InputError(
                f"scores and labels must have shapes (B, {num_classes}) and (B,), got {tuple(scores.shape)} and "
                f"{tuple(labels.shape)}"
            )
        nearest = scores.topk(self.ks[-1], dim=1).indices == labels.unsqueeze(1)
        self.rows += torch.bincount(labels, minlength=num_classes)
        for position, k in enumerate(self.ks):
            self.hits[position] += torch.bincount(labels[nearest[:, :k].any(dim=1)], minlength=num_classes)

    def compute(self) -> dict[str, Tensor]:
        """Fractions by name, scalars."""
        found = {f"top{k}": hits.sum() / self.rows.sum() for k, hits in zip(self.ks, self.hits, strict=True)}
        there = self.rows > 0
        found["mean_per_class_recall"] = (self.hits[0][there] / self.rows[there]).mean()
        return found
