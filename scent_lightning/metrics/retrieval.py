"""Recall of image-text retrieval."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from scent_lightning.errors import InputError
from scent_lightning.functional import at_least_float32
from scent_lightning.validation import checked_integer

__all__ = ["CaptionRecall", "RetrievalRecall", "first_of_each", "retrieval_ranks"]


def retrieval_ranks(
    queries: Tensor,
    items: Tensor,
    group: Tensor | None = None,
    chunk: int = 1024,
    item_group: Tensor | None = None,
    alike: Tensor | None = None,
) -> Tensor:
    """How many wrong items come before each query's own, by inner product; those equally near count as before.

    Args:
        queries: embeddings, shape ``(n, D)``.
        items: embeddings, shape ``(m, D)``; without groups item i is query i's own, and m is n.
        group: integers, shape ``(n,)``: all items of a query's group are its own, and the nearest of them counts.
            None takes each pair as a group.
        chunk: queries at a time; memory is ``chunk`` × m numbers.
        item_group: those of the items, shape ``(m,)``; None: of the queries.
        alike: integers, shape ``(m,)``, equal for items that are the same, as captions of the same words: an item that
            is the same as a query's nearest own one does not come before it.

    Returns:
        Shape ``(n,)``, int64; 0 where an own item is the nearest.

    Example:
        >>> import torch
        >>> retrieval_ranks(torch.eye(3), torch.eye(3).roll(1, 0)).tolist()
        [2, 2, 2]
    """
    queries, items = at_least_float32(queries), at_least_float32(items)
    ranks = []
    for start in range(0, len(queries), chunk):
        scores = queries[start : start + chunk] @ items.T
        if group is None:
            own = scores.diagonal(start)[: len(scores)].unsqueeze(1)
            # The own item is one of those that are as near as itself.
            ranks.append((scores >= own).sum(dim=1) - 1)
        else:
            same = group[start : start + chunk].unsqueeze(1) == (group if item_group is None else item_group)
            own, place = scores.masked_fill(~same, -torch.inf).max(dim=1, keepdim=True)
            right = same if alike is None else same | (alike == alike[place])
            ranks.append(((scores >= own) & ~right).sum(dim=1))
    return torch.cat(ranks) if ranks else torch.zeros(0, dtype=torch.int64)


class _Recall(Metric):
    """Recall at several k, of what is kept from all batches and processes.

    Args:
        ks: which k.

    Raises:
        InputError: no k, or one that is not a positive integer.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    #: Names of the states.
    kept: tuple[str, ...]

    def __init__(self, ks: tuple[int, ...] = (1, 5, 10)) -> None:
        super().__init__()
        if not ks:
            raise InputError(f"ks must hold at least one k, got {ks!r}")
        self.ks = tuple(checked_integer("each of ks", k) for k in ks)
        for name in self.kept:
            self.add_state(name, [], dist_reduce_fx="cat")


class RetrievalRecall(_Recall):
    """Recall at k of images by texts and of texts by images, over all pairs of all batches and processes.

    The names of the results are open_clip's: ``image_to_text_R@1`` is the fraction of images whose own text is the
    nearest of all texts. Each image has one text; where several pairs have the same text, say so by ``group``: any of
    their images is right then. The embeddings of all pairs are kept.

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

    kept = ("images", "texts", "groups", "indices")
    images: list[Tensor]
    texts: list[Tensor]
    groups: list[Tensor]
    indices: list[Tensor]

    def update(self, images: Tensor, texts: Tensor, group: Tensor | None = None, index: Tensor | None = None) -> None:
        """Add pairs; with ``group`` or ``index`` always or never.

        Args:
            images: normalised embeddings, shape ``(B, D)``.
            texts: those of their texts, shape ``(B, D)``.
            group: integers, shape ``(B,)``, equal where the texts are.
            index: dataset indices, shape ``(B,)``: a pair that comes twice, as where processes share rows that do not
                divide evenly, counts once.

        Raises:
            InputError: shapes that do not fit.
        """
        if images.ndim != 2 or images.shape != texts.shape:
            shapes = f"{tuple(images.shape)} and {tuple(texts.shape)}"
            raise InputError(f"images and texts must both have shape (B, D), got {shapes}")
        for name, numbers in (("group", group), ("index", index)):
            if numbers is not None and numbers.shape != images.shape[:1]:
                raise InputError(f"{name} must have shape ({len(images)},), got {tuple(numbers.shape)}")
        self.images.append(at_least_float32(images.detach()))
        self.texts.append(at_least_float32(texts.detach()))
        if group is not None:
            self.groups.append(group.to(images.device))
        if index is not None:
            self.indices.append(index.to(images.device))

    def compute(self) -> dict[str, Tensor]:
        """Recall by name, scalars; 0 if there were no pairs."""
        states = (self.images, self.texts, self.groups, self.indices)
        images, texts, groups, indices = (_joined(state, self.device) for state in states)
        for name, numbers in (("group", groups), ("index", indices)):
            if len(numbers) not in (0, len(images)):
                raise InputError(f"{name} must be given for all pairs or none, got {len(numbers)} of {len(images)}")
        if len(indices):
            first = first_of_each(indices)
            images, texts, groups = (state[first] if len(state) else state for state in (images, texts, groups))
        found: dict[str, Tensor] = {}
        for name, queries, items in (("image_to_text", images, texts), ("text_to_image", texts, images)):
            ranks = retrieval_ranks(queries, items, groups if len(groups) else None)
            for k in self.ks:
                found[f"{name}_R@{k}"] = _fraction(ranks < k)
        return found


class CaptionRecall(_Recall):
    """Recall at k where an image has several captions, as of COCO and Flickr, over all batches and processes.

    ``image_to_text_R@1`` is the fraction of images of which one of their own captions is the nearest of all captions;
    ``text_to_image_R@1`` the fraction of captions whose own image is the nearest of all images. A wrong one that is as
    near as the own one comes before it, but for a caption of the same words. All embeddings are kept.

    Args:
        ks: which k.

    Raises:
        InputError: no k, or one that is not a positive integer.

    Example:
        >>> import torch
        >>> metric = CaptionRecall(ks=(1,))
        >>> captions = torch.tensor([[0.8, 0.6], [0.0, 1.0], [1.0, 0.0]])
        >>> metric.update(torch.eye(2), torch.tensor([0, 1]), captions, torch.tensor([0, 0, 1]))
        >>> {name: round(value.item(), 2) for name, value in metric.compute().items()}
        {'image_to_text_R@1': 0.0, 'text_to_image_R@1': 0.33}
    """

    kept = ("images", "rows", "texts", "owners", "words")
    images: list[Tensor]
    rows: list[Tensor]
    texts: list[Tensor]
    owners: list[Tensor]
    words: list[Tensor]

    def update(self, images: Tensor, rows: Tensor, texts: Tensor, owners: Tensor, words: Tensor | None = None) -> None:
        """Add images, each once in all processes, and captions.

        Args:
            images: normalised embeddings, shape ``(B, D)``; B may be 0.
            rows: dataset index of each, shape ``(B,)``.
            texts: normalised embeddings of captions, shape ``(M, D)``.
            owners: dataset index of the image that each belongs to, shape ``(M,)``.
            words: integers, shape ``(M,)``, equal where the words of two captions are; None: all differ.

        Raises:
            InputError: shapes that do not fit.
        """
        for name, numbers, of in (("rows", rows, images), ("owners", owners, texts), ("words", words, texts)):
            if numbers is not None and (of.ndim != 2 or numbers.shape != of.shape[:1]):
                raise InputError(f"{name} must have shape (B,) of {tuple(of.shape)}, got {tuple(numbers.shape)}")
        self.images.append(at_least_float32(images.detach()))
        self.rows.append(rows.to(images.device))
        self.texts.append(at_least_float32(texts.detach()))
        self.owners.append(owners.to(images.device))
        if words is not None:
            self.words.append(words.to(images.device))

    def compute(self) -> dict[str, Tensor]:
        """Recall by name, scalars; 0 if there was nothing."""
        states = (self.images, self.rows, self.texts, self.owners, self.words)
        images, rows, texts, owners, words = (_joined(state, self.device) for state in states)
        if len(words) not in (0, len(texts)):
            raise InputError(f"words must be given for all captions or none, got {len(words)} of {len(texts)}")
        alike = words if len(words) else None
        ranks = {
            "image_to_text": retrieval_ranks(images, texts, rows, item_group=owners, alike=alike),
            "text_to_image": retrieval_ranks(texts, images, owners, item_group=rows),
        }
        return {f"{way}_R@{k}": _fraction(found < k) for way, found in ranks.items() for k in self.ks}


def _fraction(hits: Tensor) -> Tensor:
    return hits.float().mean() if len(hits) else hits.float().sum()


def first_of_each(indices: Tensor) -> Tensor:
    """Positions of the first occurrence of each value."""
    order = indices.argsort(stable=True)
    ordered = indices[order]
    return order[torch.cat((torch.ones_like(ordered[:1], dtype=torch.bool), ordered[1:] != ordered[:-1]))]


def _joined(state: Any, device: torch.device) -> Tensor:
    if isinstance(state, Tensor):  # gathered over processes
        return state
    return torch.cat(state) if state else torch.zeros(0, 1, device=device)
