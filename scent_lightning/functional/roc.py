"""The ROC curve, partial areas under it, and the objective that maximises them, exact over all rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scent_lightning.errors import InputError
from scent_lightning.functional.log_mean_exp import log_sum_exp, wide, wide_dtype
from scent_lightning.functional.surrogates import check_surrogate, pairwise_surrogate
from scent_lightning.validation import checked_integer, checked_number

__all__ = [
    "check_max_fpr",
    "check_min_tpr",
    "check_scores_and_labels",
    "missing_class",
    "partial_auc",
    "partial_auc_objective",
    "roc_curve",
    "two_way_partial_auc",
]


def roc_curve(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    r"""ROC curve: true positive rate against false positive rate as the threshold falls.

    Rows of the same score pass the threshold together, so they make one point, and the straight line to it counts a
    tied pair as half right. Scores are only compared with each other, so they may have any range.

    Args:
        scores: score of each row, shape ``(n,)``, any real dtype, without NaN; infinities are allowed.
        labels: 1 or True for a positive row, 0 or False for a negative one, shape ``(n,)``, integer or bool.

    Returns:
        False and true positive rates, each of shape ``(k + 1,)`` for k distinct scores, not decreasing, from (0, 0) to
        (1, 1), in float64 (float32 on devices without it).

    Raises:
        InputError: a shape, dtype or value is not as above, or one of the two classes has no row.

    Example:
        >>> import torch
        >>> fpr, tpr = roc_curve(torch.tensor([30.0, 20.0, 20.0, -10.0]), torch.tensor([1, 1, 0, 0]))
        >>> fpr.tolist(), tpr.tolist()
        ([0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0])
    """
    check_scores_and_labels(scores, labels)
    missing = missing_class(labels)
    if missing:
        raise InputError(f"labels must hold both classes, got {missing}")
    order = torch.argsort(scores.detach(), descending=True)
    ordered = scores.detach()[order]
    positives = labels.bool()[order].cumsum(dim=0)
    last_of_tie = torch.cat([ordered[1:] != ordered[:-1], ordered.new_ones(1, dtype=torch.bool)])
    true_positives = positives[last_of_tie]
    false_positives = last_of_tie.nonzero().squeeze(1) + 1 - true_positives
    rates = []
    for counts in (false_positives, true_positives):
        whole = torch.cat([counts.new_zeros(1), counts]).to(wide_dtype(scores.device))
        rates.append(whole / whole[-1])
    return rates[0], rates[1]


def partial_auc(scores: Tensor, labels: Tensor, max_fpr: float, standardized: bool = False) -> Tensor:
    r"""Area under the ROC curve over the false positive rates from 0 to ``max_fpr``.

    The curve is cut at ``max_fpr`` by linear interpolation. The area lies between ``max_fpr**2 / 2`` (chance) and
    ``max_fpr`` (a perfect ranking) unless the ranking is worse than chance. Standardised (McClish 1989), chance gives
    0.5 and a perfect ranking 1, the number of scikit-learn's ``roc_auc_score(max_fpr=...)``:

    .. math:: \frac{1}{2} \Bigl(1 + \frac{A - \text{max\_fpr}^2 / 2}{\text{max\_fpr} - \text{max\_fpr}^2 / 2}\Bigr)

    Args:
        scores: score of each row, shape ``(n,)``, any real dtype and range, without NaN.
        labels: 0 or 1, shape ``(n,)``, integer or bool.
        max_fpr: largest false positive rate, in (0, 1]; 1 gives the AUC, standardised or not.
        standardized: return McClish's standardised area.

    Returns:
        A scalar in float64 (float32 on devices without it).

    Raises:
        InputError: ``max_fpr`` is out of range, or :func:`roc_curve` refuses the scores or labels.

    Example:
        >>> import torch
        >>> scores, labels = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([1, 0, 1, 0])
        >>> partial_auc(scores, labels, max_fpr=0.5).item()
        0.25
        >>> round(partial_auc(scores, labels, max_fpr=0.5, standardized=True).item(), 4)
        0.6667
        >>> partial_auc(scores, labels, max_fpr=1.0).item()
        0.75
    """
    max_fpr = check_max_fpr(max_fpr)
    fpr, tpr = roc_curve(scores, labels)
    area = _area_above(fpr, tpr, 0.0, max_fpr)
    if not standardized or max_fpr == 1:
        return area
    chance = max_fpr**2 / 2
    return 0.5 * (1 + (area - chance) / (max_fpr - chance))


def two_way_partial_auc(scores: Tensor, labels: Tensor, min_tpr: float, max_fpr: float) -> Tensor:
    r"""Two-way partial AUC: area under the ROC curve where FPR is at most ``max_fpr`` and TPR at least ``min_tpr``.

    The area between the curve and the line TPR = ``min_tpr``, as a fraction of the rectangle it lies in, so that a
    perfect ranking gives 1 (Yang et al. 2019, two-way partial AUC):

    .. math:: \frac{1}{(1 - \text{min\_tpr})\, \text{max\_fpr}}
              \int_0^{\text{max\_fpr}} \max(\text{TPR}(f) - \text{min\_tpr}, 0)\, df

    Exact for the piecewise linear curve of :func:`roc_curve`.

    Args:
        scores: score of each row, shape ``(n,)``, any real dtype and range, without NaN.
        labels: 0 or 1, shape ``(n,)``, integer or bool.
        min_tpr: smallest true positive rate, in [0, 1).
        max_fpr: largest false positive rate, in (0, 1].

    Returns:
        A scalar from 0 to 1 in float64 (float32 on devices without it).

    Raises:
        InputError: ``min_tpr`` or ``max_fpr`` is out of range, or :func:`roc_curve` refuses the scores or labels.

    Example:
        >>> import torch
        >>> scores, labels = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([1, 0, 1, 0])
        >>> two_way_partial_auc(scores, labels, min_tpr=0.25, max_fpr=1.0).item()
        0.6666666666666666
    """
    min_tpr, max_fpr = check_min_tpr(min_tpr), check_max_fpr(max_fpr)
    fpr, tpr = roc_curve(scores, labels)
    return _area_above(fpr, tpr, min_tpr, max_fpr) / ((1 - min_tpr) * max_fpr)


def partial_auc_objective(
    positive_scores: Tensor,
    negative_scores: Tensor,
    tau: float,
    surrogate: str = "squared_hinge",
    margin: float = 0.5,
    chunk: int | None = None,
) -> Tensor:
    r"""Objective of one-way partial AUC maximisation over all pairs of a positive and a negative row.

    .. math:: \frac{1}{n_+} \sum_{i=1}^{n_+} \tau \log \frac{1}{n_-} \sum_{j=1}^{n_-}
              \exp\Bigl(\frac{\ell(s_j^- - s_i^+)}{\tau}\Bigr)

    with the surrogate loss :math:`\ell` of :func:`~scent_lightning.functional.pairwise_surrogate` (Wei et al. 2026,
    partial AUC maximisation). Small τ looks at the negatives that score highest, large τ at all of them. Computed in
    float64 without overflow, in :math:`O(n_+ n_-)` time; detached.

    Args:
        positive_scores: shape ``(n_+,)``, any real dtype and range, without NaN. Infinite scores may make the result
            infinite or NaN.
        negative_scores: shape ``(n_-,)``, the same.
        tau: temperature, in the units of the surrogate, above 0.
        surrogate: one of :data:`scent_lightning.functional.SURROGATES`.
        margin: margin of the surrogate, in the units of the scores, at least 0; "logistic" has none.
        chunk: how many pairs exist at a time at most; memory is 8 bytes a pair, a few times over. None: such as a
            cache holds on a CPU, 4 million elsewhere.

    Returns:
        A scalar in float64 (float32 on devices without it), in the units of the surrogate.

    Raises:
        InputError: an argument is not as above, or there is no positive or no negative row.

    Example:
        >>> import torch
        >>> partial_auc_objective(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 0.5]), tau=1.0).item()
        0.0
        >>> partial_auc_objective(torch.tensor([1.0]), torch.tensor([1.0, 1.0]), tau=0.1).item()
        0.25
    """
    tau = checked_number("tau", tau, above=0)
    check_surrogate(surrogate, margin)
    if chunk is None:
        chunk = 2**18 if positive_scores.device.type == "cpu" else 2**22
    checked_integer("chunk", chunk)
    for name, values in (("positive_scores", positive_scores), ("negative_scores", negative_scores)):
        if values.ndim != 1 or values.shape[0] == 0:
            raise InputError(f"{name} must have shape (n,) with n at least 1, got shape {tuple(values.shape)}")
        _check_scores(name, values)
    positive, negative = wide(positive_scores), wide(negative_scores)
    columns = min(chunk, negative.shape[0])
    total = positive.new_zeros(())
    for rows in torch.split(positive, chunk // columns):
        log_sum = torch.full_like(rows, -math.inf)
        for others in torch.split(negative, columns):
            losses = pairwise_surrogate(others.unsqueeze(0) - rows.unsqueeze(1), surrogate, margin)
            log_sum = torch.logaddexp(log_sum, log_sum_exp(losses / tau))
        total = total + (log_sum - math.log(negative.shape[0])).sum()
    return tau * total / positive.shape[0]


def check_max_fpr(max_fpr: float) -> float:
    """Return ``max_fpr`` if it is a number in (0, 1], or raise InputError."""
    return checked_number("max_fpr", max_fpr, above=0, most=1)


def check_min_tpr(min_tpr: float) -> float:
    """Return ``min_tpr`` if it is a number in [0, 1), or raise InputError."""
    return checked_number("min_tpr", min_tpr, least=0, below=1)


def check_scores_and_labels(scores: Tensor, labels: Tensor) -> None:
    """Raise InputError unless ``scores`` and ``labels`` are what :func:`roc_curve` takes (one class may be missing)."""
    if scores.ndim != 1 or labels.shape != scores.shape:
        raise InputError(
            f"scores and labels must both have shape (n,), got shapes {tuple(scores.shape)} and {tuple(labels.shape)}"
        )
    _check_scores("scores", scores)
    if labels.is_floating_point() or labels.is_complex():
        raise InputError(f"labels must be 0 or 1 in an integer or bool dtype, got {labels.dtype}")
    wrong = (labels != 0) & (labels != 1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InputError(f"labels must be 0 or 1, got {labels[row].item()} in row {row}")


def missing_class(labels: Tensor) -> str:
    """What 0/1 ``labels`` lack, in words: "no rows", "no positive rows", "no negative rows", or "" for nothing."""
    positives = int(labels.sum())
    if labels.shape[0] == 0:
        return "no rows"
    if positives == 0:
        return "no positive rows (label 1)"
    return "no negative rows (label 0)" if positives == labels.shape[0] else ""


def _check_scores(name: str, scores: Tensor) -> None:
    if scores.is_complex():
        raise InputError(f"{name} must be real numbers, got {scores.dtype}")
    nan = scores.isnan()
    if bool(nan.any()):
        raise InputError(
            f"{name} must not be NaN, got NaN in {int(nan.sum())} of {len(nan)} rows, first in row "
            f"{int(nan.nonzero()[0])}"
        )


def _area_above(fpr: Tensor, tpr: Tensor, min_tpr: float, max_fpr: float) -> Tensor:
    """Integral of max(TPR − ``min_tpr``, 0) over FPR from 0 to ``max_fpr``, exact for the piecewise linear curve."""
    width, rise = fpr.diff(), tpr.diff()
    # The part of each segment, from 0 at its start to 1 at its end, that lies above min_tpr and left of max_fpr. Where
    # the segment does not rise (or has no width) the division gives ±inf or NaN: it is all in or all out.
    start = torch.where(rise > 0, (min_tpr - tpr[:-1]) / rise, 0.0).clamp(0, 1)
    end = torch.where(width > 0, (max_fpr - fpr[:-1]) / width, 1.0).clamp(0, 1)
    heights = (tpr[:-1] + 0.5 * (start + end) * rise - min_tpr).clamp(min=0)
    return ((end - start).clamp(min=0) * width * heights).sum()
