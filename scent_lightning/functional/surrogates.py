"""Surrogate losses of a pair of a positive and a negative row."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import softplus

from scent_lightning.errors import InputError

__all__ = ["SURROGATES", "check_surrogate", "pairwise_surrogate"]

SURROGATES = ("squared_hinge", "squared", "hinge", "logistic")


def check_surrogate(surrogate: str, margin: float) -> None:
    """Raise InputError for an unknown surrogate, or a margin that is not a finite number of at least 0."""
    if surrogate not in SURROGATES:
        raise InputError(f"surrogate must be one of {', '.join(SURROGATES)}, got {surrogate!r}")
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < math.inf:
        raise InputError(f"margin must be a finite number of at least 0, got {margin!r}")


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
