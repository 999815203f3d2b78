"""How many of the first k classes are right, where a row has several right ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer, checked_number

__all__ = ["PrecisionAtK", "PropensityScoredPrecision", "RecallAtK", "label_propensities", "right_answers"]


def label_propensities(counts: Tensor, rows: int, a: float = 0.55, b: float = 1.5) -> Tensor:
    r"""How probable it is that a right label was noted down: :math:`1 / (1 + C (N_l + B)^{-A})`.

    With :math:`C = (\log N - 1) (B + 1)^A` (Jain, Prabhu and Varma 2016), for N rows and :math:`N_l` of them with label
    l: rare labels are missing more often than frequent ones.

    Args:
        counts: training rows of each label, shape ``(K,)``.
        rows: number of training rows.
        a: A, above 0; 0.6 and 0.5 are usual for Amazon's and Wikipedia's labels.
        b: B, above 0; 2.6 and 0.4 there.

    Returns:
        Shape ``(K,)``, float32, from 0 to 1.

    Example:
        >>> label_propensities(torch.tensor([0, 10, 1000]), rows=1000)
        tensor([0.1133, 0.2815, 0.8205])
    """
    checked_integer("rows", rows)
    checked_number("a", a, above=0)
    checked_number("b", b, above=0)
    c = max(math.log(rows) - 1, 0.0) * (b + 1) ** a
    found: Tensor = 1 / (1 + c * (counts.double() + b) ** -a)
    return found.float()


def right_answers(classes: Tensor, answers: Tensor) -> Tensor:
    """Whether each of some classes is a right one.

    Args:
        classes: shape ``(B, k)``, int64.
        answers: the right ones of each row, shape ``(B, P)``, int64, −1 where it has no more.

    Returns:
        Bool, shape ``(B, k)``.
    """
    return (classes.unsqueeze(2) == answers.unsqueeze(1)).any(dim=2)


class _RatioAtK(Metric):
    """A ratio of two sums over the rows of all batches and processes; rows without a right class are left out.

    Args:
        k: how many of the first classes count.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    above: Tensor
    below: Tensor

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k: int = checked_integer("k", k)
        self.add_state("above", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("below", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def _first(self, classes: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """The first k classes, and which of them are right."""
        if classes.ndim != 2 or answers.ndim != 2 or len(classes) != len(answers):
            raise InputError(
                "classes and answers must have shape (B, k) and (B, P), got "
                f"{tuple(classes.shape)} and {tuple(answers.shape)}"
            )
        first = classes[:, : self.k]
        return first, right_answers(first, answers)

    def _add(self, above: Tensor, below: Tensor, rows: Tensor) -> None:
        self.above = self.above + above[rows].sum().to(self.above.dtype)
        self.below = self.below + below[rows].sum().to(self.below.dtype)

    def compute(self) -> Tensor:
        """A scalar; NaN where there was no row with a right class."""
        return (self.above / self.below).float()


class PrecisionAtK(_RatioAtK):
    """Fraction of the first k classes that are right, over rows with a right class.

    Args:
        k: how many of the first classes count; fewer classes than k count as if the rest were wrong.

    Raises:
        InputError: k is no integer of at least 1.

    Example:
        >>> metric = PrecisionAtK(2)
        >>> metric.update(torch.tensor([[4, 7, 1], [0, 2, 3]]), torch.tensor([[7, -1], [2, 0]]))
        >>> metric.compute()
        tensor(0.7500)
    """

    def update(self, classes: Tensor, answers: Tensor) -> None:
        """Add rows.

        Args:
            classes: most probable first, shape ``(B, k)`` or wider, int64.
            answers: the right ones, each once, shape ``(B, P)``, int64, −1 where a row has no more.
        """
        hits = self._first(classes, answers)[1].sum(dim=1)
        self._add(hits, torch.full_like(hits, self.k), (answers >= 0).any(dim=1))


class RecallAtK(_RatioAtK):
    """Fraction of a row's right classes that are among the first k, the mean over rows with a right class.

    Args:
        k: how many of the first classes count.

    Raises:
        InputError: k is no integer of at least 1.

    Example:
        >>> metric = RecallAtK(2)
        >>> metric.update(torch.tensor([[4, 7, 1], [0, 2, 3]]), torch.tensor([[7, 5], [2, -1]]))
        >>> metric.compute()
        tensor(0.7500)
    """

    def update(self, classes: Tensor, answers: Tensor) -> None:
        """Add rows; see :meth:`PrecisionAtK.update`."""
        number = (answers >= 0).sum(dim=1)
        hits = self._first(classes, answers)[1].sum(dim=1)
        self._add(hits / number.clamp(min=1), torch.ones_like(hits), number > 0)


class PropensityScoredPrecision(_RatioAtK):
    """Precision of the first k classes in which a right one counts as one over its propensity, over the best possible.

    The ratio of the sums over all rows, as it is reported for extreme classification (Jain, Prabhu and Varma 2016).

    Args:
        k: how many of the first classes count.

    Raises:
        InputError: k is no integer of at least 1.

    Example:
        >>> metric = PropensityScoredPrecision(1)
        >>> metric.update(torch.tensor([[0], [1]]), torch.tensor([[0, 1], [1, -1]]), torch.tensor([1.0, 0.25]))
        >>> metric.compute()  # (1 + 4) / (4 + 4)
        tensor(0.6250)
    """

    def update(self, classes: Tensor, answers: Tensor, propensities: Tensor | None) -> None:
        """Add rows.

        Args:
            classes: most probable first, shape ``(B, k)`` or wider, int64.
            answers: the right ones, each once, shape ``(B, P)``, int64, −1 where a row has no more.
            propensities: of all classes, shape ``(K,)``, see :func:`label_propensities`; None: they are not known, and
                the result is NaN.
        """
        if propensities is None:
            return
        first, right = self._first(classes, answers)
        found = (right / propensities[first]).sum(dim=1)
        worth = (answers >= 0) / propensities[answers.clamp(min=0)]
        best = worth.topk(min(self.k, worth.shape[1]), dim=1).values.sum(dim=1)
        self._add(found, best, best > 0)
