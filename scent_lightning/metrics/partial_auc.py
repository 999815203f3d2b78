"""Metrics of the left end of the ROC curve. The functions behind them are in :mod:`scent_lightning.functional.roc`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.utilities.prints import rank_zero_warn

from scent_lightning.functional import check_surrogate, wide, wide_dtype
from scent_lightning.functional.roc import (
    check_max_fpr,
    check_min_tpr,
    check_scores_and_labels,
    missing_class,
    partial_auc,
    partial_auc_objective,
    roc_curve,
    two_way_partial_auc,
)
from scent_lightning.validation import checked_number

__all__ = [
    "OneWayPartialAUC",
    "PartialAUCObjective",
    "ScoresAndLabels",
    "TwoWayPartialAUC",
    "partial_auc",
    "partial_auc_objective",
    "roc_curve",
    "two_way_partial_auc",
]


def _gather_in_wide_dtype(values: Tensor, group: Any = None) -> list[Tensor]:
    # A process without rows offers an empty float32 tensor, whatever the others hold: the dtypes have to be made equal.
    return gather_all_tensors(wide(values), group)


class ScoresAndLabels(Metric):
    """Keep the scores and labels of all rows of all batches and processes; ``compute`` gives both.

    The part that the metrics of this module share.
    """

    is_differentiable = False
    full_state_update = False
    scores: list[Tensor]
    labels: list[Tensor]

    def __init__(self) -> None:
        super().__init__(dist_sync_fn=_gather_in_wide_dtype)
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Add rows.

        Args:
            scores: score of each row, shape ``(B,)``, any real dtype and range, without NaN.
            labels: 0 or 1, shape ``(B,)``, integer or bool.

        Raises:
            InputError: a shape, dtype or value is not as above; nothing is added then.
        """
        check_scores_and_labels(scores, labels)
        self.scores.append(scores.detach() if scores.is_floating_point() else wide(scores))
        self.labels.append(labels.detach().bool().to(scores.device))

    def compute(self) -> Any:
        """Scores and bool labels of all rows so far, each of shape ``(n,)``."""
        return self._rows()

    def _rows(self) -> tuple[Tensor, Tensor]:
        if isinstance(self.scores, Tensor):  # torchmetrics joins them itself when it gathers over processes
            return self.scores, self.labels.bool()  # type: ignore[attr-defined]
        if not self.scores:
            return torch.zeros(0, device=self.device), torch.zeros(0, dtype=torch.bool, device=self.device)
        return torch.cat(self.scores), torch.cat(self.labels)

    def _value(self, function: Callable[[Tensor, Tensor], Tensor], otherwise: float) -> Tensor:
        """``function`` of the scores and labels, or a warning and ``otherwise`` without both classes."""
        scores, labels = self._rows()
        missing = missing_class(labels)
        if missing:
            rank_zero_warn(f"{type(self).__name__} needs both classes but got {missing}; it gives {otherwise}")
            return torch.tensor(otherwise, dtype=wide_dtype(scores.device), device=scores.device)
        return function(scores, labels)


class OneWayPartialAUC(ScoresAndLabels):
    r"""One-way partial AUC of all rows of all batches: area under the ROC curve for FPR from 0 to ``max_fpr``.

    See :func:`partial_auc` for the formulas. Exact: the scores of all rows are kept, and ranked over all processes.

    Args:
        max_fpr: largest false positive rate, in (0, 1]; 1 gives the AUC.
        standardized: False gives the area itself, ``max_fpr`` for a perfect ranking; True gives McClish's
            standardised area, 1 for a perfect ranking and 0.5 for chance.

    Raises:
        InputError: ``max_fpr`` is out of range.

    Example:
        >>> import torch
        >>> metric = OneWayPartialAUC(max_fpr=0.5)
        >>> metric.update(torch.tensor([4.0, 3.0]), torch.tensor([1, 0]))
        >>> metric.update(torch.tensor([2.0, 1.0]), torch.tensor([1, 0]))
        >>> metric.compute().item()
        0.25
    """

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, max_fpr: float = 0.3, standardized: bool = False) -> None:
        super().__init__()
        self.max_fpr = check_max_fpr(max_fpr)
        self.standardized = standardized

    def compute(self) -> Tensor:
        """Partial AUC of all rows so far, a float64 scalar; a warning and 0 if a class is missing."""
        return self._value(lambda scores, labels: partial_auc(scores, labels, self.max_fpr, self.standardized), 0.0)


class TwoWayPartialAUC(ScoresAndLabels):
    r"""Two-way partial AUC of all rows of all batches: where FPR is at most ``max_fpr`` and TPR at least ``min_tpr``.

    See :func:`two_way_partial_auc` for the formula (Yang et al. 2019). Exact: the scores of all rows are kept, and
    ranked over all processes.

    Args:
        min_tpr: smallest true positive rate, in [0, 1).
        max_fpr: largest false positive rate, in (0, 1].

    Raises:
        InputError: ``min_tpr`` or ``max_fpr`` is out of range.

    Example:
        >>> import torch
        >>> metric = TwoWayPartialAUC(min_tpr=0.25, max_fpr=1.0)
        >>> metric.update(torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([1, 0, 1, 0]))
        >>> round(metric.compute().item(), 4)
        0.6667
    """

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, min_tpr: float = 0.5, max_fpr: float = 0.5) -> None:
        super().__init__()
        self.min_tpr = check_min_tpr(min_tpr)
        self.max_fpr = check_max_fpr(max_fpr)

    def compute(self) -> Tensor:
        """Two-way partial AUC of all rows so far, a float64 scalar; a warning and 0 if a class is missing."""
        return self._value(lambda scores, labels: two_way_partial_auc(scores, labels, self.min_tpr, self.max_fpr), 0.0)


class PartialAUCObjective(ScoresAndLabels):
    r"""Objective of one-way partial AUC maximisation over all pairs of all batches, computed exactly.

    See :func:`partial_auc_objective` for the formula (Wei et al. 2026). It takes :math:`O(n_+ n_-)` time.

    Args:
        tau: temperature, in the units of the surrogate, above 0.
        surrogate: one of :data:`scent_lightning.functional.SURROGATES`.
        margin: margin of the surrogate, in the units of the scores, at least 0.

    Raises:
        InputError: an argument is not as above.

    Example:
        >>> import torch
        >>> metric = PartialAUCObjective(tau=0.1)
        >>> metric.update(torch.tensor([1.0, 1.0]), torch.tensor([1, 0]))
        >>> metric.update(torch.tensor([1.0]), torch.tensor([0]))
        >>> metric.compute().item()
        0.25
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    def __init__(self, tau: float, surrogate: str = "squared_hinge", margin: float = 0.5) -> None:
        super().__init__()
        self.tau = checked_number("tau", tau, above=0)
        check_surrogate(surrogate, margin)
        self.surrogate = surrogate
        self.margin = float(margin)

    def compute(self) -> Tensor:
        """Objective of all rows so far, a float64 scalar; a warning and NaN if a class is missing."""
        return self._value(
            lambda scores, labels: partial_auc_objective(
                scores[labels], scores[~labels], self.tau, self.surrogate, self.margin
            ),
            math.nan,
        )
