"""Scores of rows with several right classes: against sampled classes in training, against all in evaluation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from scent_lightning.duals import DenseScores
from scent_lightning.functional import at_least_float32, is_answer, scores_of_answers, shares_of
from scent_lightning.modules.class_chunks import MostProbable, most_probable
from scent_lightning.modules.class_sampled_linear import ClassSampledLinear
from scent_lightning.modules.sampled_scores import Scoring, rows_gradient, score

__all__ = ["Answers", "answer_scores", "cross_entropy_and_most_probable"]


class Answers(NamedTuple):
    """The right classes of a batch.

    Attributes:
        classes: of each row, each once, int64, shape ``(B, P)``, −1 where it has no more.
        weights: what each counts among the row's, at least 0, shape ``(B, P)``; None: all alike.
        hard: classes that are to be in the row's sum, none of them right, each once, int64, shape ``(B, h)``, −1 where
            a row has no more; None: none.
    """

    classes: Tensor
    weights: Tensor | None = None
    hard: Tensor | None = None

    def in_sum(self) -> tuple[Tensor, Tensor | None]:
        """All classes that are in the sum for sure, and their weights: right answers of weight 0 are hard ones."""
        if self.hard is None:
            return self.classes, self.weights
        weights = (self.classes >= 0).to(torch.float32) if self.weights is None else self.weights
        none = torch.zeros_like(self.hard, dtype=weights.dtype)
        return torch.cat([self.classes, self.hard], dim=1), torch.cat([weights, none], dim=1)


class _SampledLogits(torch.autograd.Function):
    """Logits of some classes, with a sparse gradient of one row for each class, sorted and without repeats."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, classes: Tensor, scoring: Scoring) -> Tensor:
        logits, scored = score(features, weight, classes, scoring)
        ctx.save_for_backward(*scored)
        ctx.shape, ctx.scale, ctx.dtypes = weight.shape, scoring.scale, (features.dtype, weight.dtype)
        return logits

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, rows, classes, norms = ctx.saved_tensors
        return *rows_gradient(ctx, gradient.to(inputs.dtype), inputs, rows, classes, norms), None, None


def answer_scores(
    head: ClassSampledLinear,
    features: Tensor,
    answers: Answers,
    of_batch: Tensor,
    batch_rows: int,
    generator: torch.Generator | None = None,
) -> DenseScores:
    r"""Scores of a batch for one ν a row, which comes to the log of the sum over all classes, divided by K − 1.

    Right answers are in the sum at their own place and are never negatives. Of the others "in_batch" has the right
    answers of the batch's other rows, each divided by its probability to be one of them (``correction`` "frequency") or
    as if they were drawn evenly; "uniform" has draws of all classes; "all" has all of them. A row's hard negatives are
    in its sum as they are, and not once more where they are drawn: the sum over all classes is still the expectation,
    with less noise where the hard ones have most of it.

    Args:
        head: without a margin.
        features: shape ``(B, D)``.
        answers: of each row.
        of_batch: the right classes of the whole batch, of all processes, in whatever order, with repeats.
        batch_rows: rows of the whole batch.
        generator: of "uniform", on the CPU; None draws from torch's global random state.
    """
    if head.normalize:
        features = F.normalize(features, dim=1)
    classes, weights = answers.in_sum()
    if head.negatives == "all":
        logits, columns = head.logits(features), torch.arange(head.num_classes, device=classes.device)
        own = logits.gather(1, classes.clamp(min=0))
        return _dense(*scores_of_answers(logits, columns, own, classes, weights, total=head.num_classes - 1), answers)
    known = torch.unique(of_batch) if len(of_batch) else of_batch.new_zeros(1)
    offsets: Tensor | None
    if head.negatives == "uniform":
        device = classes.device if generator is None else torch.device("cpu")
        drawn = torch.randint(head.num_classes, (head.num_negatives,), generator=generator, device=device)
        drawn = drawn.to(classes.device)
        scored = torch.unique(torch.cat([classes[classes >= 0], drawn]))
        columns = drawn
        offsets = torch.full(drawn.shape, math.log(head.num_classes / head.num_negatives), device=drawn.device)
    else:
        scored = columns = known
        if answers.hard is not None:
            scored = torch.unique(torch.cat([known, answers.hard[answers.hard >= 0]]))
        offsets = _in_batch_offsets(head, classes, known, of_batch, batch_rows)
    logits = cast(Tensor, _SampledLogits.apply(features, head.weight, scored, head.scoring))  # type: ignore[no-untyped-call]
    own = logits.gather(1, _places(scored, classes))
    if columns is not scored:
        logits = logits[:, torch.searchsorted(scored, columns)]
    return _dense(*scores_of_answers(logits, columns, own, classes, weights, offsets, head.num_classes - 1), answers)


def _dense(scores: Tensor, mask: Tensor, answers: Answers) -> DenseScores:
    """Scores of which those of the right answers, less their own mean, stay about what they are."""
    right = answers.classes >= 0 if answers.weights is None else (answers.classes >= 0) & (answers.weights > 0)
    first = scores.shape[1] - answers.in_sum()[0].shape[1]
    columns = scores.shape[1] - first - right.shape[1]
    return DenseScores(scores, mask, fixed=F.pad(right, (first, columns)))


def _places(distinct: Tensor, classes: Tensor) -> Tensor:
    """Where classes are among the distinct ones, in order; anywhere for −1."""
    return torch.searchsorted(distinct, classes).clamp(max=max(len(distinct) - 1, 0))


def _in_batch_offsets(
    head: ClassSampledLinear, in_sum: Tensor, known: Tensor, of_batch: Tensor, batch_rows: int
) -> Tensor:
    """What each class of the batch counts for a row that does not have it in its sum, as a logarithm."""
    if head.uses_frequencies:
        frequencies = head.frequencies
        # Estimated frequencies are those of one right answer among all of them.
        draws = batch_rows if frequencies.are_given else len(of_batch)
        others = draws - 1 if frequencies.are_given else round(draws * (1 - 1 / batch_rows))
        return -frequencies.log_inclusion(known, others).to(torch.float32)
    number = (in_sum >= 0).sum(dim=1, keepdim=True)
    there = (~is_answer(known, in_sum)).sum(dim=1, keepdim=True)
    return ((head.num_classes - number).clamp(min=1) / there.clamp(min=1)).log()


def cross_entropy_and_most_probable(
    head: ClassSampledLinear, features: Tensor, answers: Answers, k: int, chunk: int
) -> tuple[Tensor, MostProbable]:
    """Softmax cross-entropy over all classes, weighed over the right ones, and the k most probable classes.

    Args:
        head: with K classes.
        features: shape ``(B, D)``.
        answers: of each row.
        k: from 1 to K.
        chunk: classes scored at a time; memory is B times as many numbers.

    Returns:
        Shape ``(B,)``, NaN for a row without a right answer; and the classes.

    Raises:
        IndexError: on the CPU, an answer that is no class.
    """
    there = answers.classes >= 0
    rows = F.embedding(answers.classes.clamp(min=0), head.weight)
    if head.normalize:
        rows = F.normalize(rows, dim=2)
    inputs = F.normalize(features, dim=1) if head.normalize else features
    own = at_least_float32(torch.einsum("bd,bpd->bp", inputs, rows)) * head.scale
    weights = there.to(own.dtype) if answers.weights is None else answers.weights.to(own.dtype) * there
    found = most_probable(head, features, k, chunk)
    losses = found.log_total - (shares_of(weights) * own).sum(dim=1)
    return torch.where(there.any(dim=1), losses, torch.nan), found
