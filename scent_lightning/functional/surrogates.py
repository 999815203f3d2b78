"""Surrogate losses of a pair of a positive and a negative row."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from scent_lightning.validation import checked_choice, checked_number

__all__ = ["SURROGATES", "check_surrogate", "pairwise_scores", "pairwise_surrogate"]

SURROGATES = ("squared_hinge", "squared", "hinge", "logistic")


def check_surrogate(surrogate: str, margin: float) -> None:
    """Raise InputError for an unknown surrogate, or a margin that is not a finite number of at least 0."""
    checked_choice("surrogate", surrogate, SURROGATES)
    checked_number("margin", margin, least=0)


def pairwise_surrogate(difference: Tensor, surrogate: str = "squared_hinge", margin: float = 0.5) -> Tensor:
    r"""Surrogate loss of a pair whose negative scores ``difference`` above its positive.

    With :math:`d = s^- - s^+` and the margin c: "squared_hinge" :math:`\max(0, c + d)^2`, "squared" :math:`(c + d)^2`,
    "hinge" :math:`\max(0, c + d)`, "logistic" :math:`\log(1 + e^d)`, which has no margin. All but "squared" do not
    decrease in d, as the partial AUC's surrogate must (Wei et al. 2026, partial AUC maximisation); "squared" also
    punishes pairs that are further apart than the margin.

    Args:
        difference: any shape.
        surrogate: one of ``SURROGATES``.
        margin: c, in the units of the scores.

    Returns:
        The loss, of the same shape.

    Example:
        >>> import torch
        >>> pairwise_surrogate(torch.tensor([-1.0, 0.0, 0.5]))
        tensor([0.0000, 0.2500, 1.0000])
    """
    if surrogate == "logistic":
        return softplus(difference)
    shifted = difference + margin
    if surrogate == "squared":
        return shifted.square()
    hinge = shifted.relu()
    return hinge.square() if surrogate == "squared_hinge" else hinge


class _PairwiseScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, positives: Tensor, negatives: Tensor, surrogate: str, margin: float, tau: float) -> Tensor:
        shifted = negatives.unsqueeze(0) - positives.unsqueeze(1)
        if surrogate == "logistic":
            ctx.save_for_backward(torch.sigmoid(shifted).div_(tau))
            return softplus(shifted).div_(tau)
        shifted.add_(margin)
        if surrogate != "squared":
            shifted.relu_()
        if surrogate == "hinge":
            ctx.save_for_backward((shifted > 0).to(shifted.dtype).div_(tau))
            return shifted.div_(tau)
        slope = shifted * (2 / tau)
        ctx.save_for_backward(slope)
        return shifted.mul_(slope).mul_(0.5)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        by_difference = gradient * slope
        return -by_difference.sum(dim=1), by_difference.sum(dim=0), None, None, None


def pairwise_scores(
    positives: Tensor, negatives: Tensor, surrogate: str = "squared_hinge", margin: float = 0.5, tau: float = 1.0
) -> Tensor:
    r"""Surrogate losses of all pairs over τ, :math:`\ell(s^-_j - s^+_i) / \tau`, in one node of the autograd graph.

    Args:
        positives: scores of the positive rows, shape ``(P,)``.
        negatives: scores of the negative rows, shape ``(N,)``.
        surrogate: one of ``SURROGATES``; see :func:`pairwise_surrogate`.
        margin: margin of the surrogate, in the units of the scores.
        tau: temperature, in the units of the surrogate, above 0.

    Returns:
        Shape ``(P, N)``, a row for each positive.

    Example:
        >>> import torch
        >>> pairwise_scores(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.5]), tau=0.5)
        tensor([[0.0000, 0.0000],
                [0.5000, 2.0000]])
    """
    return cast(Tensor, _PairwiseScores.apply(positives, negatives, surrogate, margin, tau))  # type: ignore[no-untyped-call]
