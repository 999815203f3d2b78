"""A linear classifier that scores only the classes it is asked for."""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from scent_lightning.errors import InputError

__all__ = ["ClassSampledLinear", "Negatives"]

Negatives = Literal["in_batch", "uniform", "all"]
_SMALLEST_NORM = 1e-12  # as torch.nn.functional.normalize


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
        rows = weight.index_select(0, classes)
        norms = None
        if normalize:
            norms = rows.norm(dim=1, keepdim=True).clamp(min=_SMALLEST_NORM)
            rows = rows / norms
        dtype = _product_dtype(features, rows)
        inputs, factors = features.to(dtype), rows.to(dtype)
        logits = inputs @ factors.T
        if scale != 1:
            logits = logits * scale
        ctx.save_for_backward(inputs, factors, classes, own, columns, norms)
        ctx.shape, ctx.scale, ctx.dtypes = weight.shape, scale, (features.dtype, weight.dtype)
        return (logits if columns is None else logits[:, columns]) - logits.gather(1, own)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, rows, classes, own, columns, norms = ctx.saved_tensors
        by_own = -gradient.sum(dim=1, keepdim=True)
        if columns is not None:
            gradient = gradient.new_zeros(len(gradient), len(classes)).index_add_(1, columns, gradient)
        gradient = gradient.scatter_add(1, own, by_own)
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
        return by_features, by_weight, None, None, None, None, None


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
        for name, value, least in (
            ("num_features", num_features, 1),
            ("num_classes", num_classes, 2),
            ("num_negatives", num_negatives, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} must be an integer of at least {least}, got {value!r}")
        if negatives not in get_args(Negatives):
            raise InputError(f"negatives must be one of {', '.join(get_args(Negatives))}, got {negatives!r}")
        if not 0 < scale < float("inf"):
            raise InputError(f"scale must be a finite number above 0, got {scale!r}")
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
            if all_labels is None:
                classes, place = torch.unique(labels, return_inverse=True)
            else:
                classes = torch.unique(all_labels)
                place = torch.searchsorted(classes, labels)
            own, columns, asked = place.unsqueeze(1), None, torch.arange(len(classes), device=labels.device)
        else:
            device = labels.device if generator is None else torch.device("cpu")
            drawn = torch.randint(self.num_classes, (self.num_negatives,), generator=generator, device=device)
            drawn = drawn.to(labels.device)
            classes, place = torch.unique(torch.cat([labels, drawn]), return_inverse=True)
            own, columns = place[: len(labels)].unsqueeze(1), place[len(labels) :]
            asked = columns
        scores = _SampledScores.apply(features, self.weight, classes, own, columns, self.normalize, self.scale)
        return cast(Tensor, scores), asked != own

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
