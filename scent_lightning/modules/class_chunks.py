"""All classes of a head, a chunk of them at a time: what evaluation needs of them without the matrix of all logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scent_lightning.functional import at_least_float32
from scent_lightning.functional.full_ranking import Top, merged_top
from scent_lightning.modules.class_sampled_linear import ClassSampledLinear

__all__ = ["MostProbable", "cross_entropy_and_rank", "most_probable"]


class MostProbable(NamedTuple):
    """Classes and their probabilities, shape ``(B, k)`` each, most probable first; and the log of the sum over all.

    Attributes:
        log_total: log-sum-exp of the logits of all classes, shape ``(B,)``.
    """

    classes: Tensor
    probabilities: Tensor
    log_total: Tensor


def _chunks(head: ClassSampledLinear, features: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """First class and logits in float32 or better of each chunk of classes."""
    for start in range(0, head.num_classes, chunk):
        yield start, at_least_float32(head.logits(features, start, start + chunk))


def cross_entropy_and_rank(
    head: ClassSampledLinear, features: Tensor, labels: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Softmax cross-entropy over all classes, and how many come before the right one.

    Args:
        head: with K classes.
        features: shape ``(B, D)``.
        labels: int64, shape ``(B,)``, from 0 to K − 1.
        chunk: classes scored at a time; memory is B times as many numbers.

    Returns:
        Both of shape ``(B,)``; equal logits are in the order of the classes.

    Raises:
        IndexError: on the CPU, a label that is no class.
    """
    own_rows = torch.nn.functional.embedding(labels, head.weight)
    one = torch.nn.functional.normalize if head.normalize else (lambda rows, dim: rows)
    own = at_least_float32((one(features, dim=1) * one(own_rows, dim=1)).sum(dim=1, keepdim=True)) * head.scale
    total = torch.full((len(labels),), -math.inf, device=own.device, dtype=own.dtype)
    rank = torch.zeros_like(labels)
    for start, logits in _chunks(head, features, chunk):
        total = torch.logaddexp(total, torch.logsumexp(logits, dim=1))
        classes = torch.arange(start, start + logits.shape[1], device=labels.device)
        earlier = classes < labels.unsqueeze(1)
        others = classes != labels.unsqueeze(1)
        rank += (others & ((logits > own) | (earlier & (logits == own)))).sum(dim=1)
    return total - own.squeeze(1), rank


def most_probable(head: ClassSampledLinear, features: Tensor, k: int, chunk: int) -> MostProbable:
    """The k most probable classes of each row.

    Args:
        head: with K classes.
        features: shape ``(B, D)``.
        k: from 1 to K.
        chunk: classes scored at a time.
    """
    best: Top | None = None
    total = torch.full((len(features),), -math.inf, device=features.device)
    for start, logits in _chunks(head, features, chunk):
        total = torch.logaddexp(total, torch.logsumexp(logits, dim=1))
        best = merged_top(best, logits, start, k)
    assert best is not None
    return MostProbable(best.items, torch.exp(best.scores - total.unsqueeze(1)), total)
