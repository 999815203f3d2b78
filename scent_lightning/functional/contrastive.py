r"""The robust global contrastive loss of CLIP training, in one node of the autograd graph.

With normalised embeddings :math:`e_{1,i}` of images and :math:`e_{2,i}` of texts and a temperature τ, the scores of
image i and of text i as anchors are

.. math:: S^1_{ij} = \frac{e_{1,i}^\top (e_{2,j} - e_{2,i})}{\tau}, \qquad
          S^2_{ij} = \frac{e_{2,i}^\top (e_{1,j} - e_{1,i})}{\tau}, \qquad j \neq i

(Wei et al. 2026, CLIP training; Yuan et al. 2022). The loss is, for each side, τ times the mean over anchors of the
dual objective with :math:`\epsilon e^{-\nu}` added, which belongs to
:math:`\log(\epsilon + \operatorname{mean} e^{S})`, plus :math:`2 \tau \rho`.

It takes two calls, because ν moves in between: :func:`contrastive_log_means` gives ℓ of both sides, a dual update gives
the new ν, and :func:`contrastive_loss` the loss. Both sides share one product of all pairs and one exponential of it,
:math:`K_{ij} = \exp(L_{ij}/\tau - r_i)` with :math:`r_i` the largest entry of row i: the rows give the images' sums,
and the columns, weighted by :math:`e^{r_i}`, the texts'. The gradient is two more products. Everything is float32
(float64 for float64 embeddings), autocast or not; only products of bfloat16 embeddings on a GPU take them as they are,
and add up in float32, and there the gradient's weights are rounded to bfloat16 for theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scent_lightning.errors import InputError
from scent_lightning.functional.duals import at_least_float32, wide

__all__ = ["ContrastiveLogMeans", "Everyone", "contrastive_log_means", "contrastive_loss", "contrastive_scores"]

# exp of it is the smallest that float32 holds with all its digits: smaller ones slow every product they take part in.
_LOWEST = -85.0
# The columns' sums are in units of exp(their reference), this far below the largest row's: they may be e^±80 apart.
_BELOW_LARGEST = 40.0
# Whether torch multiplies bfloat16 into float32 (from 2.8 on).
_WIDE_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype")
_BLOCK = 2**19  # entries of a block that stays in a core's cache


@dataclass
class Everyone:
    """Embeddings of all processes, with gradient, and where this process's rows begin.

    Attributes:
        image: shape ``(N, D)``.
        text: shape ``(N, D)``.
        start: place of this process's first row.
        processes: number of processes.
    """

    image: Tensor
    text: Tensor
    start: int
    processes: int


@dataclass
class _Rows:
    """Sums over the rows of K = exp(anchors · othersᵀ / τ − r), own entries left out.

    All of shape ``(B,)`` but ``kernel``, ``(B, N)`` or None where it is worked out again when needed. r is the largest
    entry of each row, or on a GPU the logarithm of the row's sum, which makes K the softmax.
    """

    own: Tensor
    largest: Tensor
    sums: Tensor
    kernel: Tensor | None


@dataclass
class ContrastiveLogMeans:
    """Result of :func:`contrastive_log_means`.

    Attributes:
        image: ℓ of each image anchor, shape ``(B,)``, float64 (float32 on devices without it).
        text: ℓ of each text anchor, shape ``(B,)``.
        negatives: number of samples of each anchor, N − 1.
    """

    image: Tensor
    text: Tensor
    negatives: int
    _rows: _Rows
    _columns: tuple[Tensor, Tensor] | None  # reference and sums of the columns
    _text_rows: _Rows | None
    _chunk: int | None


def contrastive_scores(
    image: Tensor, text: Tensor, tau: Tensor | float, everyone: Everyone | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The scores themselves, for an update that needs them; an ordinary graph of several B × N matrices.

    Args:
        image: embeddings, shape ``(B, D)``.
        text: embeddings, shape ``(B, D)``.
        tau: temperature, above 0.
        everyone: embeddings of all processes; None: there is one process, and N is B.

    Returns:
        :math:`S^1` and :math:`S^2`, each of shape ``(B, N)``, in float32 or better, and the mask of j ≠ i.
    """
    images, texts, start = (image, text, 0) if everyone is None else (everyone.image, everyone.text, everyone.start)
    with torch.autocast(image.device.type, enabled=False):
        first = at_least_float32(image) @ at_least_float32(texts).T / tau
        second = at_least_float32(text) @ at_least_float32(images).T / tau
    mask = torch.ones_like(first, dtype=torch.bool)
    mask.diagonal(start)[: len(first)] = False
    return (
        first - first.diagonal(start)[: len(first)].unsqueeze(1),
        second - second.diagonal(start)[: len(first)].unsqueeze(1),
        mask,
    )


def contrastive_log_means(
    image: Tensor,
    text: Tensor,
    tau: Tensor | float,
    epsilon: float = 0.0,
    everyone: Everyone | None = None,
    chunk: int | None = None,
) -> ContrastiveLogMeans:
    r"""ℓ of every anchor, :math:`\log(\epsilon + \operatorname{mean}_{j \neq i} e^{S_{ij}})`, for both sides.

    Args:
        image: normalised embeddings of this process's images, shape ``(B, D)``.
        text: normalised embeddings of their texts, shape ``(B, D)``.
        tau: temperature, a number or a scalar tensor, above 0.
        epsilon: ε, at least 0.
        everyone: embeddings of all processes, which are the other samples; None: there is one process.
        chunk: rows of the matrix of pairs that exist at a time; None keeps all B, so that the gradient need not work
            them out again.

    Returns:
        ℓ, and what the loss will need; detached.

    Raises:
        InputError: there is but one pair.

    Example:
        >>> import torch
        >>> e = torch.eye(2)
        >>> contrastive_log_means(e, e, tau=0.5).image.tolist()
        [-2.0, -2.0]
    """
    total = len(image) if everyone is None else len(everyone.image)
    if total < 2:
        raise InputError(f"a contrastive loss needs at least 2 pairs, got {total}")
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        keep = _keeps_dtype(image, chunk)
        first, second = keep(image.detach()), keep(text.detach())
        columns: tuple[Tensor, Tensor] | None = None
        text_rows = None
        if everyone is None:
            rows, columns = _pass(first, second, 0, tau, chunk, with_columns=True)
            # A column that lies too far below the largest row for one exponential: each side gets its own.
            if columns is not None and not bool((columns[1] >= math.exp(-_BELOW_LARGEST)).all()):
                columns = None
            if columns is None:
                text_rows, _ = _pass(second, first, 0, tau, chunk)
        else:
            others = keep(everyone.image.detach()), keep(everyone.text.detach())
            rows, _ = _pass(first, others[1], everyone.start, tau, chunk)
            text_rows, _ = _pass(second, others[0], everyone.start, tau, chunk)
        count = math.log(total - 1)
        image_log_mean = _log_mean(rows, count)
        if text_rows is not None:
            text_log_mean = _log_mean(text_rows, count)
        else:
            reference, sums = cast(tuple[Tensor, Tensor], columns)
            text_log_mean = wide(sums).log() + (wide(reference) - wide(rows.own)) - count
        if epsilon > 0:
            floor = torch.full_like(image_log_mean, math.log(epsilon))
            image_log_mean, text_log_mean = (torch.logaddexp(x, floor) for x in (image_log_mean, text_log_mean))
    return ContrastiveLogMeans(image_log_mean, text_log_mean, total - 1, rows, columns, text_rows, chunk)


def _log_mean(rows: _Rows, count: float) -> Tensor:
    return wide(rows.sums).log() + (wide(rows.largest) - wide(rows.own)) - count


def contrastive_loss(
    image: Tensor,
    text: Tensor,
    tau: Tensor | float,
    means: ContrastiveLogMeans,
    nu_image: Tensor,
    nu_text: Tensor,
    rho: float = 0.0,
    epsilon: float = 0.0,
    everyone: Everyone | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The loss, with its gradient with respect to the embeddings and the temperature, ν constant.

    .. math:: \frac{\tau}{B} \sum_i \Bigl(\operatorname{mean}_j e^{S^1_{ij} - \nu^1_i} + \epsilon e^{-\nu^1_i} + \nu^1_i
              - 1\Bigr) + \text{the same of the texts} + 2 \tau \rho

    Args:
        image: as given to :func:`contrastive_log_means`.
        text: the same.
        tau: the same.
        means: its result.
        nu_image: new dual variables of the images, shape ``(B,)``.
        nu_text: new dual variables of the texts, shape ``(B,)``.
        rho: ρ, how much a high temperature costs; it keeps a learned one from falling to its lower limit.
        epsilon: ε, as before.
        everyone: as before. The loss is then this process's share: the mean over processes is the whole.

    Returns:
        The loss, a scalar; and, detached, the dual objective of each image and of each text, shape ``(B,)`` each.
    """
    if not isinstance(tau, Tensor):
        tau = torch.tensor(tau, dtype=at_least_float32(image).dtype, device=image.device)
    with torch.no_grad():
        rows, count = means._rows, means.negatives
        nu_1, nu_2 = wide(nu_image), wide(nu_text)
        by_image = torch.exp(wide(rows.largest) - wide(rows.own) - nu_1)
        objective_1 = by_image * wide(rows.sums) / count + epsilon * torch.exp(-nu_1) + (nu_1 - 1)
        if means._text_rows is not None:
            text_rows = means._text_rows
            by_text = torch.exp(wide(text_rows.largest) - wide(text_rows.own) - nu_2)
            text_sums = text_rows.sums
        else:
            reference, text_sums = cast(tuple[Tensor, Tensor], means._columns)
            by_text = torch.exp(wide(reference) - wide(rows.own) - nu_2)
        objective_2 = by_text * wide(text_sums) / count + epsilon * torch.exp(-nu_2) + (nu_2 - 1)
        share = 1 / len(image) if everyone is None else everyone.processes / len(everyone.image)
        dtype = rows.own.dtype
        means_of_objectives = (share * (objective_1.sum() + objective_2.sum())).to(dtype) + 2 * rho
        value = tau.detach().to(dtype) * means_of_objectives
    others = (image, text) if everyone is None else (everyone.image, everyone.text)
    loss = _ContrastiveLoss.apply(  # type: ignore[no-untyped-call]
        image,
        text,
        *(others if everyone is not None else (None, None)),
        tau,
        means,
        value,
        means_of_objectives,
        by_image.to(dtype),
        by_text.to(dtype),
        share / count,
        0 if everyone is None else everyone.start,
    )
    return cast(Tensor, loss), objective_1, objective_2


class _ContrastiveLoss(torch.autograd.Function):
    """A known value; two products of all pairs in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        all_image: Tensor | None,
        all_text: Tensor | None,
        tau: Tensor,
        means: ContrastiveLogMeans,
        value: Tensor,
        by_tau: Tensor,
        by_image: Tensor,
        by_text: Tensor,
        scale: float,
        start: int,
    ) -> Tensor:
        ctx.save_for_backward(image, text, all_image, all_text, tau, by_tau, by_image, by_text)
        ctx.means, ctx.scale, ctx.start = means, scale, start
        return value.clone()

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        image, text, all_image, all_text, tau, by_tau, by_image, by_text = ctx.saved_tensors
        means: ContrastiveLogMeans = ctx.means
        with torch.autocast(image.device.type, enabled=False):
            keep = _keeps_dtype(image, means._chunk)
            first, second = keep(image), keep(text)
            alone = all_image is None
            if alone and means._text_rows is None:
                by_first, by_second = _shared_gradient(first, second, tau, means, by_image, by_text)
                own_product = (by_first * first).sum()
                by_all: list[Tensor | None] = [None, None]
            else:
                images, texts = (first, second) if alone else (keep(all_image), keep(all_text))
                text_rows = cast(_Rows, means._text_rows)
                by_first, by_texts = _side_gradient(first, texts, tau, means._rows, by_image, ctx.start, means._chunk)
                by_second, by_images = _side_gradient(second, images, tau, text_rows, by_text, ctx.start, means._chunk)
                own_product = (by_first * first).sum() + (by_second * second).sum()
                if alone:
                    by_first, by_second, by_all = by_first + by_images, by_second + by_texts, [None, None]
                else:
                    by_all = [by_images, by_texts]
            factor = gradient * ctx.scale
            kinds = (image.dtype, text.dtype)
            own = [(factor * part).to(kind) for part, kind in zip((by_first, by_second), kinds, strict=True)]
            rest = [None if p is None else (factor * p).to(k) for p, k in zip(by_all, kinds, strict=True)]
            # The scores are proportional to 1/τ, so what τ gets through them is their product with their gradient.
            temperature = (gradient * by_tau - factor * own_product / tau).to(tau.dtype).reshape(tau.shape)
        return (*own, *rest, temperature, None, None, None, None, None, None, None)


def _keeps_dtype(image: Tensor, chunk: int | None) -> Callable[[Tensor], Tensor]:
    """What embeddings are turned into before they are multiplied."""
    half = image.dtype == torch.bfloat16 and image.is_cuda and chunk is None and _WIDE_PRODUCTS
    return (lambda embeddings: embeddings) if half else at_least_float32


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32 or better; ``left`` is rounded to the dtype of ``right``."""
    if right.dtype != torch.bfloat16:
        return left @ right
    if not right.is_cuda:
        return left.to(right.dtype).float() @ right.float()
    return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)  # type: ignore[call-overload,no-any-return]


def _in_one_piece(device: torch.device, chunk: int | None) -> bool:
    """Whether all of K is made by whole-matrix kernels, which is what a GPU is good at."""
    return device.type == "cuda" and chunk is None


def _blocks(rows: int, columns: int, chunk: int | None, device: torch.device) -> Iterator[slice]:
    size = chunk or (max(16, _BLOCK // columns) if device.type == "cpu" else rows)
    if device.type == "cpu":
        size = min(size, max(16, _BLOCK // columns))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _kernel(block: Tensor, own: Tensor | None, largest: Tensor | None, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits into K in place; also the own logits and the rows' largest others, found if not given."""
    diagonal = block.diagonal(start)
    if own is None or largest is None:
        own = diagonal.clone()
        diagonal.fill_(-math.inf)
        largest = block.amax(dim=1)
    block.sub_(largest.unsqueeze(1)).clamp_(min=_LOWEST).exp_().sub_(math.exp(_LOWEST))
    diagonal.zero_()
    return block, own, largest


def _pass(
    anchors: Tensor, others: Tensor, start: int, tau: Tensor | float, chunk: int | None, with_columns: bool = False
) -> tuple[_Rows, tuple[Tensor, Tensor] | None]:
    """Sums over the rows, and with ``with_columns`` the columns' reference and sums in units of its exponential."""
    if _in_one_piece(anchors.device, chunk):
        return _softmax_pass(anchors, others, start, tau, with_columns)
    scaled = anchors / tau
    count, total = len(anchors), len(others)
    kernel = anchors.new_empty(count, total) if chunk is None else None
    own, largest, sums = (anchors.new_empty(count) for _ in range(3))
    reference = anchors.new_full((), -math.inf)
    columns = anchors.new_zeros(total)
    for rows in _blocks(count, total, chunk, anchors.device):
        block = torch.mm(scaled[rows], others.T, out=None if kernel is None else kernel[rows])
        block, own[rows], largest[rows] = _kernel(block, None, None, start + rows.start)
        sums[rows] = block.sum(dim=1)
        if with_columns:
            highest = torch.maximum(reference, largest[rows].amax() - _BELOW_LARGEST)
            columns = columns * torch.exp(reference - highest) + torch.exp(largest[rows] - highest) @ block
            reference = highest
    return _Rows(own, largest, sums, kernel), (reference, columns) if with_columns else None


def _softmax_pass(
    anchors: Tensor, others: Tensor, start: int, tau: Tensor | float, with_columns: bool
) -> tuple[_Rows, tuple[Tensor, Tensor] | None]:
    """:func:`_pass` by the fused softmax: the matrix is read and written fewer times."""
    logits = _product(anchors, others.T)
    logits = logits.div_(tau.detach() if isinstance(tau, Tensor) else tau)
    diagonal = logits.diagonal(start)[: len(anchors)]
    own = diagonal.clone()
    diagonal.fill_(-math.inf)
    largest, place = logits.max(dim=1)
    kernel = torch.softmax(logits, dim=1)
    # The row's largest entry is at least 1/N of its sum: no digit is lost.
    log_sums = largest - kernel.gather(1, place.unsqueeze(1)).squeeze(1).log()
    rows = _Rows(own, log_sums, torch.ones_like(own), kernel)
    if not with_columns:
        return rows, None
    reference = log_sums.amax() - _BELOW_LARGEST
    return rows, (reference, torch.exp(log_sums - reference) @ kernel)


def _again(scaled: Tensor, others: Tensor, rows: _Rows, part: slice, start: int) -> Tensor:
    """A block of K, kept or worked out again."""
    if rows.kernel is not None:
        return rows.kernel[part]
    block = torch.mm(scaled[part], others.T)
    return _kernel(block, rows.own[part], rows.largest[part], start + part.start)[0]


def _shared_gradient(
    first: Tensor, second: Tensor, tau: Tensor, means: ContrastiveLogMeans, by_image: Tensor, by_text: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of both sides' sums with respect to images and texts, from one K."""
    rows, (reference, column_sums) = means._rows, cast(tuple[Tensor, Tensor], means._columns)
    up = torch.exp(rows.largest - reference)
    own = -(by_image * rows.sums + by_text * column_sums).unsqueeze(1)
    if _in_one_piece(first.device, means._chunk):
        weights = torch.addr(by_image.unsqueeze(1), up, by_text)
        weights = _times_kernel(weights, rows, first.dtype)
        by_first, by_second = _product(weights, second), _product(weights.T, first)
        return by_first.addcmul_(own, at_least_float32(second)), by_second.addcmul_(own, at_least_float32(first))
    scaled = first / tau
    by_first, by_second = torch.empty_like(first), torch.zeros_like(second)
    for part in _blocks(len(first), len(second), means._chunk, first.device):
        kernel = _again(scaled, second, rows, part, 0)
        weights = torch.outer(up[part], by_text).add_(by_image[part].unsqueeze(1)).mul_(kernel)
        torch.mm(weights, second, out=by_first[part])
        by_second.addmm_(weights.T, first[part])
    return by_first.addcmul_(own, second), by_second.addcmul_(own, first)


def _times_kernel(weights: Tensor, rows: _Rows, dtype: torch.dtype) -> Tensor:
    """``weights`` · K, in place or, if it takes part in a product of bfloat16, rounded to that as it is written."""
    kernel = cast(Tensor, rows.kernel)
    if dtype != torch.bfloat16:
        return weights.mul_(kernel)
    return torch.mul(weights, kernel, out=torch.empty_like(weights, dtype=dtype))


def _side_gradient(
    anchors: Tensor, others: Tensor, tau: Tensor, rows: _Rows, by_anchor: Tensor, start: int, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Gradient of one side's sums with respect to its anchors and to the others."""
    own = -(by_anchor * rows.sums).unsqueeze(1)
    mine = slice(start, start + len(anchors))
    if _in_one_piece(anchors.device, chunk):
        weights = _times_kernel(by_anchor.unsqueeze(1).repeat(1, len(others)), rows, anchors.dtype)
        by_anchors, by_others = _product(weights, others), _product(weights.T, anchors)
        by_anchors.addcmul_(own, at_least_float32(others[mine]))
        by_others[mine].addcmul_(own, at_least_float32(anchors))
        return by_anchors, by_others
    scaled = anchors / tau
    by_anchors, by_others = torch.empty_like(anchors), torch.zeros_like(others)
    for part in _blocks(len(anchors), len(others), chunk, anchors.device):
        weights = by_anchor[part].unsqueeze(1) * _again(scaled, others, rows, part, start)
        torch.mm(weights, others, out=by_anchors[part])
        by_others.addmm_(weights.T, anchors[part])
    by_anchors.addcmul_(own, others[mine])
    by_others[mine].addcmul_(own, anchors)
    return by_anchors, by_others
