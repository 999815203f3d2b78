"""Recall of image-text retrieval."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from scent_lightning.errors import InputError
from scent_lightning.functional import at_least_float32

__all__ = ["RetrievalRecall", "retrieval_ranks"]


def retrieval_ranks(queries: Tensor, items: Tensor, chunk: int = 1024) -> Tensor:
    """How many items come before each query's own, by inner product; items that are equally near count as before.

    Args:
        queries: embeddings, shape ``(n, D)``.
        items: embeddings, shape ``(n, D)``; item i is query i's own.
        chunk: queries at a time; memory is ``chunk`` × n numbers.

    Returns:
        Shape ``(n,)``, int64; 0 where the own item is the nearest.

    Example:
        >>> import torch
        >>> retrieval_ranks(torch.eye(3), torch.eye(3).roll(1, 0)).tolist()
        [2, 2, 2]
    """
    queries, items = at_least_float32(queries), at_least_float32(items)
    ranks = []
    for start in range(0, len(queries), chunk):
        scores = queries[start : start + chunk] @ items.T
        own = scores.diagonal(start)[: len(scores)].unsqueeze(1)
        # The own item is one of those that are as near as itself.
        ranks.append((scores >= own).sum(dim=1) - 1)
    return torch.cat(ranks) if ranks else torch.zeros(0, dtype=torch.int64)


class RetrievalRecall(Metric):
    """Recall at k of images by texts and of texts by images, over all pairs of all batches and processes.

    The names of the results are open_clip's: ``image_to_text_R@1`` is the fraction of images whose own text is the
    nearest of all texts. Each image has one text. The embeddings of all pairs are kept.

    Args:
        ks: which k.

    Raises:
        InputError: no k, or one that is not a positive integer.

    Example:
        >>> import torch
        >>> metric = RetrievalRecall(ks=(1, 2))
        >>> metric.update(torch.eye(2), torch.eye(2))
        >>> metric.update(torch.tensor([[0.6, 0.8]]), torch.tensor([[-1.0, 0.0]]))
        >>> {name: round(value.item(), 2) for name, value in metric.compute().items()}
        {'image_to_text_R@1': 0.67, 'image_to_text_R@2': 0.67, 'text_to_image_R@1': 0.67, 'text_to_image_R@2': 1.0}
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    images: list[Tensor]
    texts: list[Tensor]

    def __init__(self, ks: tuple[int, ...] = (1, 5, 10)) -> None:
        super().__init__()
        if not ks or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in ks):
            raise InputError(f"ks must be positive integers, at least one, got {ks!r}")
        self.ks = tuple(ks)
        self.add_state("images", [], dist_reduce_fx="cat")
        self.add_state("texts", [], dist_reduce_fx="cat")

    def update(self, images: Tensor, texts: Tensor) -> None:
        """Add pairs.

        Args:
            images: normalised embeddings, shape ``(B, D)``.
            texts: those of their texts, shape ``(B, D)``.
        """
        if images.ndim != 2 or images.shape != texts.shape:
            shapes = f"{tuple(images.shape)} and {tuple(texts.shape)}"
            raise InputError(f"images and texts must both have shape (B, D), got {shapes}")
        self.images.append(at_least_float32(images.detach()))
        self.texts.append(at_least_float32(texts.detach()))

    def compute(self) -> dict[str, Tensor]:
        """Recall by name, scalars; 0 if there were no pairs."""
        images, texts = (_joined(state, self.device) for state in (self.images, self.texts))
        found: dict[str, Tensor] = {}
        for name, queries, items in (("image_to_text", images, texts), ("text_to_image", texts, images)):
            ranks = retrieval_ranks(queries, items)
            for k in self.ks:
                hits = (ranks < k).float()
                found[f"{name}_R@{k}"] = hits.mean() if len(hits) else hits.sum()
        return found


def _joined(state: Any, device: torch.device) -> Tensor:
    if isinstance(state, Tensor):  # gathered over processes
        return state
    return torch.cat(state) if state else torch.zeros(0, 1, device=device)
