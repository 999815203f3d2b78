"""Scores of a batch against some classes, and their gradient by the rows of the weight that were scored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scent_lightning.modules.margins import MarginType, with_margin

__all__ = ["SampledRisk", "SampledScores", "Scored", "Scoring", "distinct", "rows_gradient", "score"]

SMALLEST_NORM = 1e-12  # as torch.nn.functional.normalize


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


class SampledRisk(torch.autograd.Function):
    """A known loss over in-batch negatives, or all of them, as a function of features and weight."""

    @staticmethod
    def forward(  # noqa: D102
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        by_score, exponentials, inputs, rows, classes, norms = ctx.saved_tensors
        factor = (by_score * gradient).unsqueeze(1)
        if exponentials.shape[1] > 2 * inputs.shape[1] and inputs.dtype == exponentials.dtype == factor.dtype:
            found = rows_gradient(ctx, exponentials, inputs, rows, classes, norms, factor)  # of the thin ones
        else:
            by_logits = (exponentials * factor).to(inputs.dtype)
            found = rows_gradient(ctx, by_logits, inputs, rows, classes, norms)
        return *found, None, None, None, None, None


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
