r"""Scores of rows with several right answers: of sampled classes, and of lists of documents.

Row i has the right answers :math:`P_i` with shares :math:`p_{ik}` that sum to 1. Its cross-entropy is

.. math:: \log \sum_k e^{z_{ik}} - \sum_{k \in P_i} p_{ik} z_{ik} = \log \sum_k e^{S_{ik}},
          \qquad S_{ik} = z_{ik} - \sum_{k' \in P_i} p_{ik'} z_{ik'}

(the listwise loss of Cao et al. 2007, ListNet, with the top-one probabilities of the relevance). With these scores the
dual objective is the loss itself: one ν for each row, whatever the number of its right answers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scent_lightning.functional.log_mean_exp import at_least_float32

__all__ = ["is_answer", "list_scores", "padded_answers", "scores_of_answers", "shares_of"]


def padded_answers(offsets: Tensor, classes: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Right answers in rows of different length as one matrix.

    Args:
        offsets: where each row's begin in ``classes``, and the end of the last: shape ``(B + 1,)``, int64, as a CSR
            matrix has them.
        classes: shape ``(N,)``, int64.
        weights: shape ``(N,)``.

    Returns:
        Classes, shape ``(B, P)``, −1 where a row has no more; and their weights, 0 there; None where none are given.

    Example:
        >>> padded_answers(torch.tensor([0, 2, 2, 3]), torch.tensor([4, 7, 1]))[0].tolist()
        [[4, 7], [-1, -1], [1, -1]]
    """
    counts = offsets.diff()
    most = int(counts.max()) if len(counts) else 0
    there = torch.arange(most, device=classes.device) < counts.unsqueeze(1)
    padded = classes.new_full(there.shape, -1).masked_scatter(there, classes[offsets[0] : offsets[-1]])
    if weights is None:
        return padded, None
    return padded, weights.new_zeros(there.shape).masked_scatter(there, weights[offsets[0] : offsets[-1]])


def shares_of(weights: Tensor) -> Tensor:
    """Weights of each row over their sum.

    Args:
        weights: at least 0, shape ``(B, P)``.

    Returns:
        Shape ``(B, P)``; a row of zeros stays one.
    """
    total = weights.sum(dim=1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def scores_of_answers(
    logits: Tensor,
    columns: Tensor,
    own_logits: Tensor,
    answers: Tensor,
    weights: Tensor | None = None,
    offsets: Tensor | None = None,
    total: float = 1.0,
) -> tuple[Tensor, Tensor]:
    r"""Scores of sampled classes and of all right answers of each row.

    The log-mean-exp of a row's scores estimates its cross-entropy less log(total): right answers are known and count
    once, at their own place; a sampled class that is one of them counts nothing; the others count as their offset says.

    Args:
        logits: of the sampled classes, shape ``(B, m)``; carries the gradient.
        columns: which classes they are, shape ``(m,)``, int64; may hold one several times.
        own_logits: of the right answers, shape ``(B, P)``; carries the gradient.
        answers: the right answers of each row, each once, shape ``(B, P)``, int64, −1 where it has no more.
        weights: what each counts among the row's, at least 0, shape ``(B, P)``; None: all alike. One of weight 0 counts
            in the sum all the same.
        offsets: added to the logits of the sampled classes, shape ``(m,)`` or ``(B, m)``: minus the log of the
            probability that the class is in the sample, or of how often it is expected there, makes the sum one over
            all classes. None: 0.
        total: what the sum is divided by, such as the number of other classes; 1 leaves it.

    Returns:
        Scores, shape ``(B, m + P)``, float32 or better, and their mask. A row without a right answer has no sample.

    Example:
        >>> logits = torch.tensor([[1.0, 2.0, 3.0]])  # of all classes 0, 1, 2, where 0 and 2 are right
        >>> scores, mask = scores_of_answers(
        ...     logits, torch.arange(3), logits[:, [0, 2]], torch.tensor([[0, 2]]), torch.tensor([[3.0, 1.0]])
        ... )
        >>> mask.tolist()
        [[False, True, False, True, True]]
        >>> round((scores[mask].exp().mean().log() - (logits.logsumexp(1) - 0.75 * 1 - 0.25 * 3)).abs().item(), 6)
        0.0
    """
    there = answers >= 0
    weights = there.to(torch.float32) if weights is None else weights.masked_fill(~there, 0.0)
    own = at_least_float32(own_logits).masked_fill(~there, 0.0)
    mean = (shares_of(weights.to(own.dtype)) * own).sum(dim=1, keepdim=True)
    sampled = at_least_float32(logits) - mean
    if offsets is not None:
        sampled = sampled + offsets
    counts = ~is_answer(columns, answers) & there.any(dim=1, keepdim=True)
    mask = torch.cat([counts, there], dim=1)
    # The mean over a row's samples times their number is the sum.
    number = mask.sum(dim=1, keepdim=True).clamp(min=1).to(own.dtype).log() - math.log(total)
    return torch.cat([sampled, own - mean], dim=1) + number, mask


def is_answer(columns: Tensor, answers: Tensor) -> Tensor:
    """Whether a class is one of a row's right answers, in memory of B · (m + P).

    Args:
        columns: classes, shape ``(m,)``, int64; may hold one several times.
        answers: shape ``(B, P)``, int64, −1 where a row has no more.

    Returns:
        Bool, shape ``(B, m)``.

    Example:
        >>> is_answer(torch.tensor([4, 2, 4]), torch.tensor([[4, -1], [0, 2]])).tolist()
        [[True, False, True], [False, True, False]]
    """
    distinct, place = torch.unique(columns, return_inverse=True)
    if len(distinct) == 0:
        return torch.zeros(len(answers), 0, dtype=torch.bool, device=answers.device)
    where = torch.searchsorted(distinct, answers).clamp(max=len(distinct) - 1)
    found = torch.where(distinct[where] == answers, where, len(distinct))  # the last column is for those not there
    marks = torch.zeros(len(answers), len(distinct) + 1, dtype=torch.bool, device=answers.device)
    return marks.scatter_(1, found, True)[:, place]


def list_scores(logits: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of lists of documents, some of which are relevant.

    Args:
        logits: shape ``(B, L)``; carries the gradient.
        weights: what each document counts among the relevant ones of its list, 0 where it is not: shape ``(B, L)``.
        mask: shape ``(B, L)``: bool, True where there is a document; or how many documents of the list each stands for,
            0 where there is none, where the list is sampled.

    Returns:
        Scores, whose log-mean-exp is the list's cross-entropy (or estimates its exponential), shape ``(B, L)``, and
        their mask. A list without a relevant document has no sample.

    Example:
        >>> weights, mask = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1.0, 4.0, 0.0]])
        >>> scores, mask = list_scores(torch.zeros(1, 3), weights, mask)
        >>> round(scores[mask].exp().mean().item(), 4)  # one document that is relevant, and one for four others
        5.0
    """
    there = mask > 0
    logits = at_least_float32(logits).masked_fill(~there, 0.0)
    shares = shares_of(weights.to(logits.dtype).masked_fill(~there, 0.0))
    valid = there & (shares > 0).any(dim=1, keepdim=True)
    offset = valid.sum(dim=1, keepdim=True).clamp(min=1).to(logits.dtype).log()
    if mask.dtype != torch.bool:
        offset = offset + torch.where(valid, mask, 1.0).to(logits.dtype).log()
    return logits - (shares * logits).sum(dim=1, keepdim=True) + offset, valid
