"""A linear classifier that scores only the classes it is asked for."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from scent_lightning.duals import DenseScores, Exponentials, Samples
from scent_lightning.functional import NO_SCORE, at_least_float32
from scent_lightning.validation import checked_choice, checked_integer, checked_number

__all__ = ["ClassSampledLinear", "Negatives"]

Negatives = Literal["in_batch", "uniform", "all"]
_SMALLEST_NORM = 1e-12  # as torch.nn.functional.normalize


class _Scored(NamedTuple):
    """What the product was made of: inputs ``(B, D)``, the classes' rows ``(m, D)``, classes, and the rows' norms."""

    inputs: Tensor
    rows: Tensor | None
    classes: Tensor
    norms: Tensor | None


def _score(features: Tensor, weight: Tensor, classes: Tensor, normalize: bool, scale: float) -> tuple[Tensor, _Scored]:
    """Logits of some classes, shape ``(B, m)``."""
    rows = weight.index_select(0, classes)
    norms = None
    if normalize:
        norms = rows.norm(dim=1, keepdim=True).clamp(min=_SMALLEST_NORM)
        rows = rows / norms
    inputs = features
    if inputs.dtype != rows.dtype or torch.is_autocast_enabled(features.device.type):
        dtype = _product_dtype(features, rows)
        inputs, rows = features.to(dtype), rows.to(dtype)
    logits = inputs @ rows.T
    return logits if scale == 1 else logits * scale, _Scored(inputs, rows, classes, norms)


class _SampledScores(torch.autograd.Function):
    """Scores of a batch against some classes, in one node of the graph.

    The gradient of the weights is a sparse tensor of one row for each class, sorted and without repeats, so that no
    one has to sort or add up anything later.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        classes: Tensor,
        own: Tensor,
        columns: Tensor | None,
        normalize: bool,
        scale: float,
    ) -> Tensor:
        logits, scored = _score(features, weight, classes, normalize, scale)
        ctx.save_for_backward(*scored, own, columns)
        ctx.shape, ctx.scale, ctx.dtypes = weight.shape, scale, (features.dtype, weight.dtype)
        return (logits if columns is None else logits[:, columns]) - logits.gather(1, own)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, rows, classes, norms, own, columns = ctx.saved_tensors
        by_own = -gradient.sum(dim=1, keepdim=True)
        if columns is not None:
            gradient = gradient.new_zeros(len(gradient), len(classes)).index_add_(1, columns, gradient)
        gradient = gradient.scatter_add(1, own, by_own)
        return *_by_features_and_weight(ctx, gradient, inputs, rows, classes, norms), None, None, None, None, None


def _by_features_and_weight(
    ctx: Any, gradient: Tensor, inputs: Tensor, rows: Tensor, classes: Tensor, norms: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """What the features and the weight get from the gradient of the logits, shape ``(B, number of classes)``."""
    if ctx.scale != 1:
        gradient = gradient * ctx.scale
    by_features = (gradient @ rows).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
    by_rows = (gradient.T @ inputs).to(ctx.dtypes[1])
    if norms is not None:
        rows = rows.to(by_rows.dtype)
        by_rows = (by_rows - rows * (by_rows * rows).sum(dim=1, keepdim=True)) / norms
    by_weight = torch.sparse_coo_tensor(
        classes.unsqueeze(0), by_rows, ctx.shape, is_coalesced=True, check_invariants=False
    )
    return by_features, by_weight


class _InBatchRisk(torch.autograd.Function):
    """A known loss over in-batch negatives as a function of features and weight."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        loss: Tensor,
        by_score: Tensor,
        exponentials: Tensor,
        scored: _Scored,
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
        by_logits = (exponentials * (by_score * gradient).unsqueeze(1)).to(inputs.dtype)
        found = _by_features_and_weight(ctx, by_logits, inputs, rows, classes, norms)
        return *found, None, None, None, None, None


def _product_dtype(features: Tensor, rows: Tensor) -> torch.dtype:
    kind = features.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(features.dtype, rows.dtype)


class ClassSampledLinear(nn.Module):
    r"""Linear classifier without bias over K classes, trained on a few of them at a time.

    The score of anchor i against class k is :math:`h_i^\top (w_k - w_{y_i})` (Wei et al. 2026, algorithm for extreme
    classification). With :math:`\ell` their log-mean-exp over all classes other than :math:`y_i`, the softmax
    cross-entropy is :math:`\log(1 + (K - 1) e^{\ell})`. The gradient of the weights has one row for each class that was
    scored and is a sparse tensor: nothing of size K × D is made in a step, whatever K is.

    **Choosing the negatives.** "in_batch" takes the distinct labels of the batch: no extra rows, and the published
    algorithm, but it sees frequent classes more often, so that it minimises a frequency-weighted loss, and it needs
    batches of many classes. "uniform" draws classes evenly, which is what the theory assumes: as ν converges, the loss
    is the true cross-entropy; it costs one more row a negative, and most draws are easy. "all" is the exact softmax,
    for K of a few thousand at most.

    Args:
        num_features: number of features D.
        num_classes: number of classes K, at least 2.
        negatives: "in_batch", "uniform" or "all".
        num_negatives: classes drawn for a batch; "uniform" only.
        normalize: scale features and class weights to unit norm before scoring (cosine similarity).
        scale: multiplies the scores, above 0; use 10 to 64 with ``normalize``.

    Attributes:
        weight: shape ``(K, D)``; starts at 0, where all classes are equal, or, with
            ``normalize``, at random about the unit sphere.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> head = ClassSampledLinear(num_features=4, num_classes=100_000)
        >>> scores, mask = head(torch.randn(3, 4), torch.tensor([5, 99_999, 5]))
        >>> scores.shape, mask.tolist()
        (torch.Size([3, 2]), [[False, True], [True, False], [False, True]])
        >>> scores.sum().backward()
        >>> head.weight.grad.coalesce().indices().tolist()
        [[5, 99999]]
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        negatives: Negatives = "in_batch",
        num_negatives: int = 128,
        normalize: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        checked_integer("num_features", num_features)
        checked_integer("num_classes", num_classes, least=2)
        checked_integer("num_negatives", num_negatives)
        checked_choice("negatives", negatives, get_args(Negatives))
        checked_number("scale", scale, above=0)
        self.negatives = negatives
        self.num_negatives = num_negatives
        self.normalize = normalize
        self.scale = scale
        self.weight = nn.Parameter(torch.zeros(num_classes, num_features))
        if normalize:
            nn.init.normal_(self.weight, std=num_features**-0.5)

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return self.weight.shape[0]

    def extra_repr(self) -> str:  # noqa: D102
        drawn = f" ({self.num_negatives})" if self.negatives == "uniform" else ""
        return f"{self.weight.shape[1]}, {self.num_classes}, negatives={self.negatives}{drawn}"

    def forward(
        self,
        features: Tensor,
        labels: Tensor,
        all_labels: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores of a batch against sampled classes.

        Args:
            features: shape ``(B, D)``.
            labels: class of each row, shape ``(B,)``, int64, in [0, K).
            all_labels: where a batch is spread over processes, the labels of all of it, for "in_batch".
            generator: of "uniform", on the CPU; None draws from torch's global random state.

        Returns:
            Scores :math:`h_i^T (w_k - w_{y_i})`, shape ``(B, m)``, and the mask of those that count, bool, ``(B, m)``:
            a column of the anchor's own class does not. In a batch of one class "in_batch" leaves no negative.
        """
        if self.normalize:
            features = F.normalize(features, dim=1)
        if self.negatives == "all":
            logits = self._logits(features, self.weight)
            own = labels.unsqueeze(1)
            mask = torch.ones_like(logits, dtype=torch.bool).scatter_(1, own, False)
            return logits - logits.gather(1, own), mask
        if self.negatives == "in_batch":
            classes, own = _distinct(labels, all_labels)
            columns, asked = None, torch.arange(len(classes), device=labels.device)
        else:
            device = labels.device if generator is None else torch.device("cpu")
            drawn = torch.randint(self.num_classes, (self.num_negatives,), generator=generator, device=device)
            drawn = drawn.to(labels.device)
            classes, place = torch.unique(torch.cat([labels, drawn]), return_inverse=True)
            own, columns = place[: len(labels)].unsqueeze(1), place[len(labels) :]
            asked = columns
        scores = _SampledScores.apply(features, self.weight, classes, own, columns, self.normalize, self.scale)
        return cast(Tensor, scores), asked != own

    def samples(
        self,
        features: Tensor,
        labels: Tensor,
        all_labels: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Samples:
        """The scores of :meth:`forward` for a dual variable, without the matrix of them where there is a faster way.

        With in-batch negatives their exponentials are taken here: the same loss and the same gradient in half of the
        passes over the scores and one node of the graph. A subclass that overrides :meth:`forward` gets its scores.

        Args:
            features: as for :meth:`forward`.
            labels: as for :meth:`forward`.
            all_labels: as for :meth:`forward`.
            generator: as for :meth:`forward`.

        Returns:
            What :meth:`~scent_lightning.duals.DualVariableMixin.entropic_risk` takes in place of scores and mask. In a
            batch of one class "in_batch" leaves no negative: a :class:`~scent_lightning.duals.DenseScores` of no valid
            sample.
        """
        samples = None
        if self.negatives == "in_batch" and type(self).forward is ClassSampledLinear.forward:
            samples = self._exponentials(features, labels, all_labels)
        return DenseScores(*self(features, labels, all_labels, generator)) if samples is None else samples

    def _exponentials(self, features: Tensor, labels: Tensor, all_labels: Tensor | None = None) -> Exponentials | None:
        """Exponentials of the scores against in-batch negatives; None where there is no negative."""
        inputs = features
        if self.normalize:
            features = F.normalize(features, dim=1)
        with torch.no_grad():
            classes, own = _distinct(labels, all_labels)
            if len(classes) < 2 or not len(labels):
                return None
            logits, scored = _score(features, self.weight, classes, self.normalize, self.scale)
            logits = at_least_float32(logits)
            own_logits = logits.gather(1, own)
            logits.scatter_(1, own, NO_SCORE)
            largest = logits.amax(dim=1, keepdim=True)
            logits -= largest
            total = logits.sum(dim=1)
            exponentials = logits.exp_()
            sums, count = exponentials.sum(dim=1, keepdim=True), len(classes) - 1
            mean = (sums / count).squeeze(1)
            # A score is a difference of two logits: its own gets the others' gradients, negated.
            exponentials.scatter_(1, own, -sums)

        def with_gradient(loss: Tensor, weight: Tensor) -> Tensor:
            found = _InBatchRisk.apply(  # type: ignore[no-untyped-call]
                features, self.weight, loss, weight, exponentials, scored, self.scale
            )
            return cast(Tensor, found)

        def dense() -> DenseScores:
            return DenseScores(*self(inputs, labels, all_labels))

        def squares() -> Tensor:
            return exponentials.scatter(1, own, 0.0).square().sum(dim=1) / count

        # A score of −∞ is no mask here, so that the sum of the logits has to be finite.
        least = (largest - own_logits).squeeze(1)
        return Exponentials(least, mean, count, False, with_gradient, dense, total, squares)

    def logits(self, features: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Logits of the classes ``start`` to ``stop``, shape ``(B, stop − start)``, for evaluation in chunks.

        Args:
            features: shape ``(B, D)``.
            start: first class.
            stop: class after the last; None is K.
        """
        if self.normalize:
            features = F.normalize(features, dim=1)
        return self._logits(features, self.weight[start:stop])

    def _logits(self, features: Tensor, rows: Tensor) -> Tensor:
        if self.normalize:
            rows = F.normalize(rows, dim=1)
        logits = features @ rows.T
        return logits if self.scale == 1 else self.scale * logits


def _distinct(labels: Tensor, all_labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """The distinct labels of a batch, in order, and where each row's own is among them, shape ``(B, 1)``."""
    if all_labels is None:
        classes, place = torch.unique(labels, return_inverse=True)
    else:
        classes = torch.unique(all_labels)
        place = torch.searchsorted(classes, labels)
    return classes, place.unsqueeze(1)
