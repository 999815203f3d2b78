"""Products of all pairs: sums over the rows and columns of their exponentials, and the gradients of these sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from scent_lightning.functional.log_mean_exp import LEAST_EXPONENT, at_least_float32

# The columns' sums are in units of exp(their reference), this far below the largest row's: they may be e^±80 apart.
BELOW_LARGEST = 40.0
# Whether torch multiplies bfloat16 into float32 on a GPU (from 2.8 on).
_WIDE_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype")
_BLOCK = 2**19  # entries of a block that stays in a core's cache
_ROWS_OF_SHARES = 1024


@dataclass
class RowSums:
    """Sums over the rows of K = exp(anchors · othersᵀ / τ − r), own entries and those of the own group left out.

    All of shape ``(B,)`` but ``kernel``, ``(B, N)`` or None where it is worked out again when needed. r is the largest
    entry of each row (0 where there is none), or on a GPU the logarithm of the row's sum, which makes K the softmax.
    """

    own: Tensor
    largest: Tensor
    sums: Tensor
    kernel: Tensor | None
    groups: Groups | None = None


class Groups(NamedTuple):
    """Numbers of groups, equal for anchors and others that are no samples of each other.

    Attributes:
        anchors: shape ``(B,)``.
        others: shape ``(N,)``.
    """

    anchors: Tensor
    others: Tensor

    def same(self, part: slice) -> Tensor:
        """Which others are of the group of some anchors, bool."""
        return self.anchors[part].unsqueeze(1) == self.others

    def counts(self) -> Tensor:
        """Number of samples of each anchor, shape ``(B,)``: the others that are not of its group."""
        distinct, sizes = torch.unique(self.others, return_counts=True)
        found: Tensor = len(self.others) - sizes[torch.searchsorted(distinct, self.anchors)]
        return found


def dtype_of_products(image: Tensor, chunk: int | None) -> Callable[[Tensor], Tensor]:
    """What embeddings are turned into before they are multiplied."""
    half = image.is_cuda and chunk is None and multiplied_as_they_are(image)
    return (lambda embeddings: embeddings) if half else at_least_float32


def multiplied_as_they_are(embeddings: Tensor) -> bool:
    """Whether :func:`product` takes them in bfloat16."""
    return embeddings.dtype == torch.bfloat16 and (_WIDE_PRODUCTS or not embeddings.is_cuda)


def product(left: Tensor, right: Tensor) -> Tensor:
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


def _kernel(
    block: Tensor, own: Tensor | None, largest: Tensor | None, start: int, same: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits into K in place; also the own logits and the rows' largest others, found if not given."""
    diagonal = block.diagonal(start)
    if own is None or largest is None:
        own = diagonal.clone()
        diagonal.fill_(-math.inf)
        if same is not None:
            block.masked_fill_(same, -math.inf)
        largest = block.amax(dim=1)
        if same is not None:
            largest = _or_zero(largest)
    elif same is not None:
        block.masked_fill_(same, -math.inf)
    block.sub_(largest.unsqueeze(1)).clamp_(min=LEAST_EXPONENT).exp_().sub_(math.exp(LEAST_EXPONENT))
    diagonal.zero_()
    return block, own, largest


def _or_zero(largest: Tensor) -> Tensor:
    """0 for a row without an entry."""
    return torch.where(largest == -math.inf, 0.0, largest)


def row_sums(
    anchors: Tensor,
    others: Tensor,
    start: int,
    tau: Tensor | float,
    chunk: int | None,
    with_columns: bool = False,
    groups: Groups | None = None,
) -> tuple[RowSums, tuple[Tensor, Tensor] | None]:
    """Sums over the rows, and with ``with_columns`` the columns' reference and sums in units of its exponential."""
    if _in_one_piece(anchors.device, chunk):
        return _softmax_pass(anchors, others, start, tau, with_columns, groups)
    scaled = anchors / tau
    count, total = len(anchors), len(others)
    kernel = anchors.new_empty(count, total) if chunk is None else None
    own, largest, sums = (anchors.new_empty(count) for _ in range(3))
    reference = anchors.new_full((), -math.inf)
    columns = anchors.new_zeros(total)
    for rows in _blocks(count, total, chunk, anchors.device):
        block = torch.mm(scaled[rows], others.T, out=None if kernel is None else kernel[rows])
        same = None if groups is None else groups.same(rows)
        block, own[rows], largest[rows] = _kernel(block, None, None, start + rows.start, same)
        sums[rows] = block.sum(dim=1)
        if with_columns:
            highest = torch.maximum(reference, largest[rows].amax() - BELOW_LARGEST)
            columns = columns * torch.exp(reference - highest) + torch.exp(largest[rows] - highest) @ block
            reference = highest
    return RowSums(own, largest, sums, kernel, groups), (reference, columns) if with_columns else None


def _softmax_pass(
    anchors: Tensor, others: Tensor, start: int, tau: Tensor | float, with_columns: bool, groups: Groups | None
) -> tuple[RowSums, tuple[Tensor, Tensor] | None]:
    """:func:`row_sums` by the fused softmax: the matrix is read and written fewer times."""
    logits = product(anchors, others.T)
    logits = logits.div_(tau.detach() if isinstance(tau, Tensor) else tau)
    diagonal = logits.diagonal(start)[: len(anchors)]
    own = diagonal.clone()
    diagonal.fill_(-math.inf)
    if groups is not None:
        logits.masked_fill_(groups.same(slice(None)), -math.inf)
    largest, place = logits.max(dim=1)
    kernel = torch.softmax(logits, dim=1)
    # The row's largest entry is at least 1/N of its sum: no digit is lost.
    log_sums = largest - kernel.gather(1, place.unsqueeze(1)).squeeze(1).log()
    sums = torch.ones_like(own)
    if groups is not None:
        none = largest == -math.inf
        kernel.masked_fill_(none.unsqueeze(1), 0.0)
        log_sums, sums = log_sums.masked_fill_(none, 0.0), sums.masked_fill_(none, 0.0)
    rows = RowSums(own, log_sums, sums, kernel, groups)
    if not with_columns:
        return rows, None
    reference = log_sums.amax() - BELOW_LARGEST
    return rows, (reference, torch.exp(log_sums - reference) @ kernel)


def _again(scaled: Tensor, others: Tensor, rows: RowSums, part: slice, start: int) -> Tensor:
    """A block of K, kept or worked out again."""
    if rows.kernel is not None:
        return rows.kernel[part]
    block = torch.mm(scaled[part], others.T)
    same = None if rows.groups is None else rows.groups.same(part)
    return _kernel(block, rows.own[part], rows.largest[part], start + part.start, same)[0]


def row_shares(anchors: Tensor, others: Tensor, start: int, tau: Tensor | float, rows: RowSums) -> Tensor:
    """Sum of the squares of what each entry is of its row's sum, shape ``(B,)``: between 1/N and 1."""
    scaled = anchors / tau
    shares = torch.empty_like(rows.sums)
    sums = rows.sums if rows.groups is None else torch.where(rows.sums > 0, rows.sums, 1.0)
    for part in _blocks(len(anchors), len(others), _ROWS_OF_SHARES, anchors.device):
        block = _again(scaled, others, rows, part, start)
        shares[part] = (block / sums[part].unsqueeze(1)).square_().sum(dim=1)
    return shares


def column_shares(
    anchors: Tensor, others: Tensor, tau: Tensor | float, rows: RowSums, columns: tuple[Tensor, Tensor]
) -> Tensor:
    """:func:`row_shares` of the columns."""
    scaled, (reference, sums) = anchors / tau, columns
    shares = torch.zeros_like(sums)
    for part in _blocks(len(anchors), len(others), _ROWS_OF_SHARES, anchors.device):
        block = _again(scaled, others, rows, part, 0)
        shares += (block * torch.exp(rows.largest[part] - reference).unsqueeze(1)).div_(sums).square_().sum(dim=0)
    return shares


def shared_gradient(
    first: Tensor,
    second: Tensor,
    tau: Tensor,
    rows: RowSums,
    columns: tuple[Tensor, Tensor],
    by_image: Tensor,
    by_text: Tensor,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """Gradient of both sides' sums with respect to images and texts, from one K."""
    reference, column_sums = columns
    up = torch.exp(rows.largest - reference)
    own = -(by_image * rows.sums + by_text * column_sums).unsqueeze(1)
    if _in_one_piece(first.device, chunk):
        weights = torch.addr(by_image.unsqueeze(1), up, by_text)
        weights = _times_kernel(weights, rows, first.dtype)
        by_first, by_second = product(weights, second), product(weights.T, first)
        return by_first.addcmul_(own, at_least_float32(second)), by_second.addcmul_(own, at_least_float32(first))
    scaled = first / tau
    by_first, by_second = torch.empty_like(first), torch.zeros_like(second)
    for part in _blocks(len(first), len(second), chunk, first.device):
        kernel = _again(scaled, second, rows, part, 0)
        weights = torch.outer(up[part], by_text).add_(by_image[part].unsqueeze(1)).mul_(kernel)
        torch.mm(weights, second, out=by_first[part])
        by_second.addmm_(weights.T, first[part])
    return by_first.addcmul_(own, second), by_second.addcmul_(own, first)


def _times_kernel(weights: Tensor, rows: RowSums, dtype: torch.dtype) -> Tensor:
    """``weights`` · K, in place or, if it takes part in a product of bfloat16, rounded to that as it is written."""
    kernel = cast(Tensor, rows.kernel)
    if dtype != torch.bfloat16:
        return weights.mul_(kernel)
    return torch.mul(weights, kernel, out=torch.empty_like(weights, dtype=dtype))


def side_gradient(
    anchors: Tensor, others: Tensor, tau: Tensor, rows: RowSums, by_anchor: Tensor, start: int, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Gradient of one side's sums with respect to its anchors and to the others."""
    own = -(by_anchor * rows.sums).unsqueeze(1)
    mine = slice(start, start + len(anchors))
    if _in_one_piece(anchors.device, chunk):
        weights = _times_kernel(by_anchor.unsqueeze(1).repeat(1, len(others)), rows, anchors.dtype)
        by_anchors, by_others = product(weights, others), product(weights.T, anchors)
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
