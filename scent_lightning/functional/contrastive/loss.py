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
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scent_lightning.errors import InputError
from scent_lightning.functional.contrastive import fused as in_tiles
from scent_lightning.functional.contrastive.products import (
    BELOW_LARGEST,
    Groups,
    RowSums,
    column_shares,
    dtype_of_products,
    row_shares,
    row_sums,
    shared_gradient,
    side_gradient,
)
from scent_lightning.functional.log_mean_exp import at_least_float32, log_mean_exp_from, wide
from scent_lightning.functional.objectives import exponential_objective_from

__all__ = [
    "ContrastiveLogMeans",
    "Everyone",
    "contrastive_log_means",
    "contrastive_log_moments",
    "contrastive_loss",
    "contrastive_scores",
]


@dataclass
class Everyone:
    """Embeddings of all processes, with gradient, and where this process's rows begin.

    Attributes:
        image: shape ``(N, D)``.
        text: shape ``(N, D)``.
        start: place of this process's first row.
        processes: number of processes.
        group: of each pair, shape ``(N,)``; None where there are no groups.
    """

    image: Tensor
    text: Tensor
    start: int
    processes: int
    group: Tensor | None = None


@dataclass
class ContrastiveLogMeans:
    """Result of :func:`contrastive_log_means`.

    Attributes:
        image: ℓ of each image anchor, shape ``(B,)``, float64 (float32 on devices without it).
        text: ℓ of each text anchor, shape ``(B,)``.
        negatives: number of samples of each anchor: N − 1, or, with groups, of shape ``(B,)``.
        rows: number of anchors of all processes that have a sample.
    """

    image: Tensor
    text: Tensor
    negatives: int | Tensor
    rows: int | Tensor
    _sides: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]  # largest score and mean exponential less it
    _rows: RowSums
    _columns: tuple[Tensor, Tensor] | None  # reference and sums of the columns
    _text_rows: RowSums | None
    _chunk: int | None
    _fused: bool


def contrastive_scores(
    image: Tensor,
    text: Tensor,
    tau: Tensor | float,
    everyone: Everyone | None = None,
    group: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scores themselves, for an update that needs them; an ordinary graph of several B × N matrices.

    Args:
        image: embeddings, shape ``(B, D)``.
        text: embeddings, shape ``(B, D)``.
        tau: temperature, above 0.
        everyone: embeddings of all processes; None: there is one process, and N is B.
        group: see :func:`contrastive_log_means`.

    Returns:
        :math:`S^1` and :math:`S^2`, each of shape ``(B, N)``, in float32 or better, and the mask of j ≠ i, and not of
        i's group.
    """
    images, texts, start = (image, text, 0) if everyone is None else (everyone.image, everyone.text, everyone.start)
    with torch.autocast(image.device.type, enabled=False):
        first = at_least_float32(image) @ at_least_float32(texts).T / tau
        second = at_least_float32(text) @ at_least_float32(images).T / tau
    mask = torch.ones_like(first, dtype=torch.bool)
    mask.diagonal(start)[: len(first)] = False
    if (groups := _groups(group, everyone)) is not None:
        mask &= ~groups.same(slice(None))
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
    group: Tensor | None = None,
    fused: bool = False,
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
        group: number of each pair's group, integers, shape ``(B,)``: pairs of one group, as the captions of an image,
            are no samples of each other. A pair whose group has all pairs has no sample, ℓ −∞, and adds nothing to the
            loss. None: each pair is a group.
        fused: make the matrix tile by tile, in two Triton kernels, and keep none of it: for a GPU, without ``chunk``.

    Returns:
        ℓ, and what the loss will need; detached.

    Raises:
        InputError: there is but one pair, or ``fused`` is not possible (no GPU, no Triton, float64, or ``chunk``).

    Example:
        >>> import torch
        >>> e = torch.eye(2)
        >>> contrastive_log_means(e, e, tau=0.5).image.tolist()
        [-2.0, -2.0]
    """
    total = len(image) if everyone is None else len(everyone.image)
    if total < 2:
        raise InputError(f"a contrastive loss needs at least 2 pairs, got {total}")
    if fused:
        in_tiles.check_fused(image, chunk)
    groups = _groups(group, everyone)
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        keep = in_tiles.embeddings_of_products if fused else dtype_of_products(image, chunk)
        first, second = keep(image.detach()), keep(text.detach())
        columns: tuple[Tensor, Tensor] | None = None
        text_rows = None
        if fused and everyone is None:
            rows, text_rows = in_tiles.log_sums(first, second, 0, tau, groups, both=True)
        elif everyone is None:
            rows, columns = row_sums(first, second, 0, tau, chunk, with_columns=True, groups=groups)
            # A column that lies too far below the largest row for one exponential: each side gets its own.
            if columns is not None and not bool((columns[1] >= math.exp(-BELOW_LARGEST)).all()):
                columns = None
            if columns is None:
                text_rows, _ = row_sums(second, first, 0, tau, chunk, groups=groups)
        else:
            images, texts = keep(everyone.image.detach()), keep(everyone.text.detach())
            if fused:
                rows, _ = in_tiles.log_sums(first, texts, everyone.start, tau, groups, both=False)
                text_rows, _ = in_tiles.log_sums(second, images, everyone.start, tau, groups, both=False)
            else:
                rows, _ = row_sums(first, texts, everyone.start, tau, chunk, groups=groups)
                text_rows, _ = row_sums(second, images, everyone.start, tau, chunk, groups=groups)
        negatives, number, valid = _numbers(groups, total)
        image_side = (wide(rows.largest) - wide(rows.own), wide(rows.sums) / number)
        if text_rows is not None:
            text_side = (wide(text_rows.largest) - wide(text_rows.own), wide(text_rows.sums) / number)
        else:
            reference, sums = cast(tuple[Tensor, Tensor], columns)
            text_side = (wide(reference) - wide(rows.own), wide(sums) / number)
        if groups is not None:
            none = cast(Tensor, negatives) == 0
            image_side, text_side = (
                (side[0].masked_fill(none, -math.inf), side[1]) for side in (image_side, text_side)
            )
        image_log_mean, text_log_mean = log_mean_exp_from(*image_side), log_mean_exp_from(*text_side)
        if epsilon > 0:
            floor = torch.full_like(image_log_mean, math.log(epsilon))
            if groups is not None:
                floor = floor.masked_fill(none, -math.inf)
            image_log_mean, text_log_mean = (torch.logaddexp(x, floor) for x in (image_log_mean, text_log_mean))
    sides = (image_side, text_side)
    return ContrastiveLogMeans(
        image_log_mean, text_log_mean, negatives, valid, sides, rows, columns, text_rows, chunk, fused
    )


def _groups(group: Tensor | None, everyone: Everyone | None) -> Groups | None:
    if group is None:
        return None
    return Groups(group, group if everyone is None else cast(Tensor, everyone.group))


def _numbers(groups: Groups | None, total: int) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
    """Samples of each anchor, the same as a divisor, and how many anchors of all processes have one."""
    if groups is None:
        return total - 1, total - 1, total
    counts = groups.counts()
    everyone = Groups(groups.others, groups.others).counts()
    return counts, counts.clamp(min=1), torch.count_nonzero(everyone).clamp(min=1)


def contrastive_log_moments(
    image: Tensor,
    text: Tensor,
    tau: Tensor | float,
    means: ContrastiveLogMeans,
    everyone: Everyone | None = None,
    of_text: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Logarithms of the mean of :math:`e^{S_{ij}}` and of its square over j ≠ i, without ε.

    Args:
        image: as given to :func:`contrastive_log_means`.
        text: the same.
        tau: the same.
        means: its result.
        everyone: as before.
        of_text: of the text anchors in place of the image anchors.

    Returns:
        Shape ``(B,)`` each, detached, float64 (float32 on devices without it).
    """
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        keep = at_least_float32 if means._fused else dtype_of_products(image, means._chunk)
        first, second = keep(image.detach()), keep(text.detach())
        start = 0 if everyone is None else everyone.start
        if not of_text:
            others = second if everyone is None else keep(everyone.text.detach())
            shares = row_shares(first, others, start, tau, means._rows)
        elif means._text_rows is not None:
            others = first if everyone is None else keep(everyone.image.detach())
            shares = row_shares(second, others, start, tau, means._text_rows)
        else:
            shares = column_shares(first, second, tau, means._rows, cast(tuple[Tensor, Tensor], means._columns))
        log_mean = log_mean_exp_from(*means._sides[int(of_text)])
        return log_mean, 2 * log_mean + torch.log(means.negatives * wide(shares))


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
        nu, grouped = (wide(nu_image), wide(nu_text)), isinstance(means.negatives, Tensor)
        found = [
            exponential_objective_from(n, *side, may_be_empty=grouped) for n, side in zip(nu, means._sides, strict=True)
        ]
        # ε inside the logarithm.
        objectives = [objective + epsilon * torch.exp(-n) for n, (objective, _) in zip(nu, found, strict=True)]
        rows = means.rows.to(nu[0].dtype) if isinstance(means.rows, Tensor) else means.rows
        share = (1 if everyone is None else everyone.processes) / rows
        weights, scale = [weight for _, weight in found], share
        if isinstance(means.negatives, Tensor):
            none = means.negatives == 0
            objectives = [objective.masked_fill(none, 0.0) for objective in objectives]
            weights = [weight.masked_fill(none, 0.0) / means.negatives.clamp(min=1) for weight in weights]
        else:
            scale = share / means.negatives
        dtype = means._rows.own.dtype
        means_of_objectives = (share * (objectives[0].sum() + objectives[1].sum())).to(dtype) + 2 * rho
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
        *(weight.to(dtype) for weight in weights),
        scale,
        0 if everyone is None else everyone.start,
    )
    return cast(Tensor, loss), objectives[0], objectives[1]


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
        scale: float | Tensor,
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
            keep = in_tiles.embeddings_of_products if means._fused else dtype_of_products(image, means._chunk)
            first, second = keep(image), keep(text)
            alone = all_image is None
            if alone and (means._fused or means._text_rows is None):
                by_first, by_second, moment = _by_both(first, second, tau, means, by_image, by_text)
                by_all: list[Tensor | None] = [None, None]
            else:
                images, texts = (first, second) if alone else (keep(all_image), keep(all_text))
                text_rows = cast(RowSums, means._text_rows)
                by_first, by_texts, moment = _by_one(first, texts, tau, means, means._rows, by_image, ctx.start)
                by_second, by_images, more = _by_one(second, images, tau, means, text_rows, by_text, ctx.start)
                moment = moment + more
                if alone:
                    by_first, by_second, by_all = by_first + by_images, by_second + by_texts, [None, None]
                else:
                    by_all = [by_images, by_texts]
            factor = gradient * ctx.scale
            kinds = (image.dtype, text.dtype)
            own = [(factor * part).to(kind) for part, kind in zip((by_first, by_second), kinds, strict=True)]
            rest = [None if p is None else (factor * p).to(k) for p, k in zip(by_all, kinds, strict=True)]
            # The scores are proportional to 1/τ, so what τ gets through them is their product with their gradient.
            temperature = (gradient * by_tau - factor * moment).to(tau.dtype).reshape(tau.shape)
        return (*own, *rest, temperature, None, None, None, None, None, None, None)


def _by_both(
    image: Tensor, text: Tensor, tau: Tensor, means: ContrastiveLogMeans, by_image: Tensor, by_text: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of both sides' sums with respect to images and texts, of one process; scores times their gradient."""
    if means._fused:
        return in_tiles.gradient(image, text, 0, tau, means._rows, by_image, means._text_rows, by_text)
    columns = cast(tuple[Tensor, Tensor], means._columns)
    by_images, by_texts = shared_gradient(image, text, tau, means._rows, columns, by_image, by_text, means._chunk)
    return by_images, by_texts, (by_images * image).sum() / tau


def _by_one(
    anchors: Tensor,
    others: Tensor,
    tau: Tensor,
    means: ContrastiveLogMeans,
    rows: RowSums,
    by_anchor: Tensor,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of one side's sums with respect to anchors and others of all processes; scores times their gradient."""
    if means._fused:
        return in_tiles.gradient(anchors, others, start, tau, rows, by_anchor)
    by_anchors, by_others = side_gradient(anchors, others, tau, rows, by_anchor, start, means._chunk)
    return by_anchors, by_others, (by_anchors * anchors).sum() / tau
