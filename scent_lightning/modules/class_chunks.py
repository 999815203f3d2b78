"""All classes of a head, a chunk of them at a time: what evaluation needs of them without the matrix of all logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scent_lightning.functional import at_least_float32, log_sum_exp
from scent_lightning.functional.full_ranking import Entries, RanksAmongAll, TopAmongAll, tiles
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


def _pieces(head: ClassSampledLinear, features: Tensor, chunk: int) -> Iterator[tuple[slice, int, Tensor]]:
    """Rows, first class and logits, in float32 or better, of each piece of the matrix of all logits."""
    for start in range(0, head.num_classes, chunk):
        for rows, classes in tiles(len(features), min(chunk, head.num_classes - start), features.device):
            first = start + classes.start
            yield rows, first, at_least_float32(head.logits(features[rows], first, start + classes.stop))


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
    own = at_least_float32((one(features, dim=1) * one(own_rows, dim=1)).sum(dim=1)) * head.scale
    ranking = RanksAmongAll(len(labels), Entries(torch.arange(len(labels), device=labels.device), labels), own)
    for rows, start, logits in _pieces(head, features, chunk):
        ranking.add(rows, start, logits)
    rank, cross_entropy = ranking.found()
    return cross_entropy, rank


def most_probable(head: ClassSampledLinear, features: Tensor, k: int, chunk: int) -> MostProbable:
    """The k most probable classes of each row.

    Args:
        head: with K classes.
        features: shape ``(B, D)``.
        k: from 1 to K.
        chunk: classes scored at a time.
    """
    top, total = TopAmongAll(k), torch.empty(0)
    for rows, start, logits in _pieces(head, features, chunk):
        if not len(total):
            total = logits.new_full((len(features),), -math.inf)
        total[rows] = torch.logaddexp(total[rows], log_sum_exp(logits))
        top.add(rows, start, logits)
    best = top.found()
    return MostProbable(best.items, torch.exp(best.scores - total.unsqueeze(1)), total)
