"""Scores of a batch against some classes, and their gradient by the rows of the weight that were scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from scent_lightning.duals import Exponentials, Samples
from scent_lightning.functional import NO_SCORE
from scent_lightning.functional.log_mean_exp import LEAST_EXPONENT
from scent_lightning.modules.margins import MarginType, with_margin

__all__ = ["SampledScores", "Scored", "Scoring", "distinct", "exponentials_of", "rows_gradient", "score"]

SMALLEST_NORM = 1e-12  # as torch.nn.functional.normalize
_FEW_LOGITS = 2**16
_LOGITS_AT_A_TIME = 2**18


class Scoring(NamedTuple):
    """How the logits of a head are made, see :class:`~scent_lightning.modules.ClassSampledLinear`."""

    normalize: bool = False
    scale: float = 1.0
    margin: float = 0.0
    margin_type: MarginType = "cosine"

    def own(self, logits: Tensor) -> tuple[Tensor, Tensor | float]:
        """Own logits with their margin, and their derivative by what they were."""
        return (logits, 1.0) if self.margin == 0 else with_margin(logits, self.margin, self.margin_type, self.scale)


class Scored(NamedTuple):
    """What the product was made of: inputs ``(B, D)``, the classes' rows ``(m, D)``, classes, and the rows' norms.

    Without ``classes`` it was made of all of them.
    """

    inputs: Tensor
    rows: Tensor | None
    classes: Tensor | None
    norms: Tensor | None


def score(features: Tensor, weight: Tensor, classes: Tensor | None, scoring: Scoring) -> tuple[Tensor, Scored]:
    """Logits of some classes, or of all, shape ``(B, m)``, without a margin."""
    rows = weight if classes is None else weight.index_select(0, classes)
    norms = None
    if scoring.normalize:
        norms = rows.norm(dim=1, keepdim=True).clamp(min=SMALLEST_NORM)
        rows = rows / norms
    inputs = features
    if inputs.dtype != rows.dtype or torch.is_autocast_enabled(features.device.type):
        dtype = _product_dtype(features, rows)
        inputs, rows = features.to(dtype), rows.to(dtype)
    logits = inputs @ rows.T
    return logits if scoring.scale == 1 else logits * scoring.scale, Scored(inputs, rows, classes, norms)


class SampledScores(torch.autograd.Function):
    """Scores of a batch against some classes, in one node of the graph.

    The gradient of the weights is a sparse tensor of one row for each class, sorted and without repeats, so that no
    one has to sort or add up anything later.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        classes: Tensor,
        own: Tensor,
        columns: Tensor | None,
        scoring: Scoring,
    ) -> Tensor:
        logits, scored = score(features, weight, classes, scoring)
        ctx.save_for_backward(*scored, own, columns)
        ctx.shape, ctx.scale, ctx.dtypes = weight.shape, scoring.scale, (features.dtype, weight.dtype)
        own_logits, ctx.slope = scoring.own(logits.gather(1, own))
        return (logits if columns is None else logits[:, columns]) - own_logits

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        inputs, rows, classes, norms, own, columns = ctx.saved_tensors
        by_own = -gradient.sum(dim=1, keepdim=True) * ctx.slope
        if columns is not None:
            gradient = gradient.new_zeros(len(gradient), len(classes)).index_add_(1, columns, gradient)
        gradient = gradient.scatter_add(1, own, by_own)
        return *rows_gradient(ctx, gradient, inputs, rows, classes, norms), None, None, None, None


def rows_gradient(
    ctx: Any,
    gradient: Tensor,
    inputs: Tensor,
    rows: Tensor,
    classes: Tensor | None,
    norms: Tensor | None,
    factor: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """What the features and the weight get from the gradient of the logits, shape ``(B, number of classes)``.

    With ``factor``, shape ``(B, 1)``, the gradient of a row is to be multiplied by it.
    """
    if ctx.scale != 1:
        gradient, factor = (gradient * ctx.scale, None) if factor is None else (gradient, factor * ctx.scale)
    by_features = None
    if ctx.needs_input_grad[0]:
        by_features = gradient @ rows
        by_features = (by_features if factor is None else by_features * factor).to(ctx.dtypes[0])
    by_rows = (gradient.T @ (inputs if factor is None else inputs * factor)).to(ctx.dtypes[1])
    if norms is not None:
        rows = rows.to(by_rows.dtype)
        by_rows = (by_rows - rows * (by_rows * rows).sum(dim=1, keepdim=True)) / norms
    if classes is None:
        return by_features, by_rows
    by_weight = torch.sparse_coo_tensor(
        classes.unsqueeze(0), by_rows, ctx.shape, is_coalesced=True, check_invariants=False
    )
    return by_features, by_weight


class _SampledRisk(torch.autograd.Function):
    """A known loss over in-batch negatives, or all of them, as a function of features and weight."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        loss: Tensor,
        by_score: Tensor,
        exponentials: Tensor,
        scored: Scored,
        scale: float,
    ) -> Tensor:
        rows = scored.rows if ctx.needs_input_grad[0] or scored.norms is not None else None
        ctx.save_for_backward(by_score, exponentials, *scored._replace(rows=rows))
        ctx.shape, ctx.scale, ctx.dtypes = weight.shape, scale, (features.dtype, weight.dtype)
        return loss.clone()

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_score, exponentials, inputs, rows, classes, norms = ctx.saved_tensors
        factor = (by_score * gradient).unsqueeze(1)
        if exponentials.shape[1] > 2 * inputs.shape[1] and inputs.dtype == exponentials.dtype == factor.dtype:
            found = rows_gradient(ctx, exponentials, inputs, rows, classes, norms, factor)  # of the thin ones
        else:
            by_logits = (exponentials * factor).to(inputs.dtype)
            found = rows_gradient(ctx, by_logits, inputs, rows, classes, norms)
        return *found, None, None, None, None, None


def exponentials_of(
    logits: Tensor,
    own: Tensor,
    features: Tensor,
    weight: Tensor,
    scored: Scored,
    scoring: Scoring,
    offsets: Tensor | None = None,
    dense: Callable[[], Samples] | None = None,
) -> Exponentials:
    """The samples of a softmax by its logits: in half of the passes over them, and one node of the graph.

    Args:
        logits: detached, in float32 or better, shape ``(B, m)``, m at least 2; they are overwritten.
        own: place of each row's own logit, which is no sample, shape ``(B, 1)``.
        features: with their graph, shape ``(B, D)``.
        weight: with its graph; its rows, all or those of ``scored``, are what the features were multiplied with.
        scored: what was multiplied.
        scoring: how.
        offsets: what the logits of the others get, shape ``(m,)`` or broadcast to ``(B, m)``.
        dense: gives the scores themselves, for an update that needs them.
    """
    with torch.no_grad():
        own_logits, slope = scoring.own(logits.gather(1, own))
        if offsets is not None:
            logits += offsets
        exponentials, count = logits.scatter_(1, own, NO_SCORE), logits.shape[1] - 1
        largest, total, sums = _exponentiate(logits)
        # A score is a difference of two logits: its own gets the others' gradients, negated.
        exponentials.scatter_(1, own, -sums * slope if isinstance(slope, Tensor) else -sums)

    def with_gradient(loss: Tensor, by_score: Tensor) -> Tensor:
        found = _SampledRisk.apply(features, weight, loss, by_score, exponentials, scored, scoring.scale)  # type: ignore[no-untyped-call]
        return cast(Tensor, found)

    def squares() -> Tensor:
        return exponentials.scatter(1, own, 0.0).square().sum(dim=1) / count

    # A score of −∞ is no mask here, so that the sum of the logits has to be finite.
    least, mean = (largest - own_logits).squeeze(1), (sums / count).squeeze(1)
    return Exponentials(least, mean, count, False, with_gradient, dense, total, squares)


def _product_dtype(features: Tensor, rows: Tensor) -> torch.dtype:
    kind = features.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(features.dtype, rows.dtype)


def distinct(labels: Tensor, all_labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """The distinct labels of a batch, in order, and where each row's own is among them, shape ``(B, 1)``."""
    if all_labels is None:
        classes, place = torch.unique(labels, return_inverse=True)
    else:
        classes = torch.unique(all_labels)
        place = torch.searchsorted(classes, labels)
    return classes, place.unsqueeze(1)


def _exponentiate(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits in place into exp(logit − the largest of its row); many of them on a CPU such as a cache holds.

    Returns:
        The largest of each row, shape ``(B, 1)``; the sum of the differences, shape ``(B,)``, which is not finite where
        a logit is not; and the sum of the exponentials, shape ``(B, 1)``.
    """
    if logits.device.type == "cpu" and logits.numel() > _FEW_LOGITS:
        parts = [
            _exponentiate_rows(rows, True) for rows in torch.split(logits, max(1, _LOGITS_AT_A_TIME // logits.shape[1]))
        ]
        largest, total, sums = (torch.cat(each) for each in zip(*parts, strict=True))
        return largest, total, sums
    return _exponentiate_rows(logits, False)


def _exponentiate_rows(logits: Tensor, cut: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_exponentiate`; ``cut`` makes 0 of exponentials so small that they would be slow."""
    largest = logits.amax(dim=1, keepdim=True)
    logits -= largest
    total = logits.sum(dim=1)
    if cut:
        logits.clamp_(min=LEAST_EXPONENT)
    logits.exp_()
    if cut:
        F.threshold(logits, 1.01 * math.exp(LEAST_EXPONENT), 0.0, inplace=True)
    return largest, total, logits.sum(dim=1, keepdim=True)
