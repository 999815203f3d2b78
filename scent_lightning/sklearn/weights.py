"""Rows that count differently: what comes as ``sample_weight``, and anchors with weights of their own in a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.validation import check_array, check_consistent_length
from torch import Tensor

from scent_lightning.duals.samples import DenseScores, Place, Side
from scent_lightning.errors import InputError

__all__ = ["WeightedAnchors", "weights_of"]


def weights_of(sample_weight: Any, rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """What each row counts, shape ``(n,)``: numbers, one number for all, or None, which is 1.

    Raises:
        ValueError: other than one number for each row, below 0, or 0 everywhere.
    """
    if sample_weight is None or isinstance(sample_weight, int | float):
        return np.full(len(rows), 1.0 if sample_weight is None else float(sample_weight))
    weight: npt.NDArray[np.float64] = check_array(
        sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight"
    )
    if weight.ndim != 1:
        raise InputError(f"sample_weight must be 1D, with a number for each row; got shape {weight.shape}")
    check_consistent_length(rows, weight)
    if (weight < 0).any():
        raise InputError(f"sample_weight must be at least 0, got {weight.min():g}")
    if not weight.any():
        raise InputError("sample_weight must be above 0 in some row: at least one non-zero number is needed")
    return weight


class WeightedAnchors(DenseScores):
    r"""Scores of anchors that count differently: the loss is :math:`\frac{1}{B} \sum_i w_i` times their objectives.

    ν of an anchor is that of its samples, whatever it counts. For a process by itself, and anchors that are in a batch
    once.

    Args:
        scores: shape ``(B, m)``, any floating dtype.
        weight: what each anchor counts, shape ``(B,)``, 1 on average over the training set.
    """

    def __init__(self, scores: Tensor, weight: Tensor) -> None:
        super().__init__(scores)
        self.weight = weight

    def sides(self) -> tuple[Side]:
        """As for all scores."""
        sides = super().sides()
        self._log_mean = sides[0].log_mean
        return sides

    def loss(self, places: Sequence[Place]) -> tuple[Tensor, tuple[Tensor]]:
        """The weighted sum over the number of anchors."""
        self._place = places[0]
        return super().loss([places[0]._replace(row_weight=self.weight / len(self))])

    def terms(self) -> tuple[float, float]:
        """By what the loss, and the exponentials in it, are more than the plain mean."""
        nu = self._place.nu.to(self._log_mean.dtype)
        if self._place.update.has_exponential_objective:
            shares = torch.softmax(self._log_mean - nu, dim=0)
            return float((self.weight * shares).sum()), 0.0
        return 1.0, float(((self.weight - 1) * (nu - 1)).mean())
