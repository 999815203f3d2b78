"""The products of all pairs of the contrastive loss on a GPU, tile by tile: the matrix of pairs is never in memory.

Two Triton kernels. The first makes a tile of logits and keeps what its rows and columns add up to, so that one product
gives ℓ of both sides. The second makes the tile again, ν having moved, and writes each pair's weight in the gradient,
some rows of the matrix at a time; two more products of those rows, by the GPU's own library, give the gradient. Sums
are float32, and the largest logit of each row and column of a tile is taken out of its exponentials, so that no
temperature is too low. Products of bfloat16 take embeddings and weights in bfloat16, all others in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scent_lightning.errors import InputError
from scent_lightning.functional.contrastive.products import Groups, RowSums, multiplied_as_they_are, product
from scent_lightning.functional.log_mean_exp import at_least_float32
from scent_lightning.optional import optional_module

__all__ = ["check_fused", "embeddings_of_products", "gradient", "log_sums"]

ROWS, ACROSS = 128, 128  # of a tile: anchors and others
DEPTH_BYTES = 128  # of the entries of an embedding that a tile takes at a time
TILES = 8  # across which a program adds up its rows
WEIGHTS = 2**27  # entries of the rows of weights that exist at a time
_WHAT = "the fused contrastive loss"
LAUNCH = {"num_warps": 8, "num_stages": 3}


def _kernels() -> Any:
    optional_module("triton", _WHAT)
    from scent_lightning.functional.contrastive import kernels

    return kernels


def _interpreted() -> bool:
    from triton import JITFunction

    return not isinstance(_kernels().log_sums_kernel, JITFunction)


def check_fused(image: Tensor, chunk: int | None) -> None:
    """Raise InputError unless these embeddings can go through the kernels.

    Args:
        image: embeddings, shape ``(B, D)``.
        chunk: as given beside.

    Raises:
        InputError: Triton is not installed, the embeddings are not on a GPU (Triton's interpreter takes any device), or
            are float64; or ``chunk`` is given.
    """
    if chunk is not None:
        raise InputError(f"{_WHAT} keeps no rows of the matrix of pairs: leave chunk out, got {chunk}")
    if image.dtype == torch.float64:
        raise InputError(f"{_WHAT} adds up in float32: embeddings must be float32, bfloat16 or float16, got float64")
    _kernels()
    if image.device.type != "cuda" and not _interpreted():
        raise InputError(f"{_WHAT} needs embeddings on a GPU, got {image.device.type}")


def embeddings_of_products(embeddings: Tensor) -> Tensor:
    """What is multiplied: bfloat16 as it is, all others in float32."""
    return (embeddings if multiplied_as_they_are(embeddings) else at_least_float32(embeddings)).contiguous()


def _common(anchors: Tensor, others: Tensor, tau: Tensor | float, groups: Groups | None) -> tuple[list[Tensor], Any]:
    """The kernels' first arguments and their choices."""
    rate = tau.detach().to(anchors.device) if isinstance(tau, Tensor) else torch.full((), tau, device=anchors.device)
    own, all_groups = (anchors, others) if groups is None else groups  # not read without groups
    return [anchors, others, own.contiguous(), all_groups.contiguous(), rate], {
        "GROUPS": groups is not None,
        "WIDEN": _interpreted() and anchors.dtype == torch.bfloat16,
        "ROWS": ROWS,
        "ACROSS": ACROSS,
        "DEPTH": DEPTH_BYTES // anchors.element_size(),
        **LAUNCH,
    }


def log_sums(
    anchors: Tensor, others: Tensor, start: int, tau: Tensor | float, groups: Groups | None, both: bool
) -> tuple[RowSums, RowSums | None]:
    """Own entries and log-sums over the rows of the matrix of pairs, and with ``both`` over its columns.

    Args:
        anchors: shape ``(B, D)``, float32 or bfloat16.
        others: shape ``(N, D)``, of the same kind.
        start: place among the others of the first anchor's partner.
        tau: temperature.
        groups: of anchors and others, if there are any.
        both: whether the columns are wanted, N being B.

    Returns:
        Of each side the sums less their logarithm: ``sums`` is 1, or 0 (and ``largest`` 0) where there is no sample.
    """
    kernels = _kernels()
    count, total = len(anchors), len(others)
    blocks, stripes = -(-count // ROWS), -(-total // (TILES * ACROSS))
    own = torch.empty(count, dtype=torch.float32, device=anchors.device)
    row_parts = own.new_empty(stripes, count)
    column_parts = own.new_empty(blocks if both else 1, total)
    arguments, choices = _common(anchors, others, tau, groups)
    kernels.log_sums_kernel[(blocks, stripes)](
        *arguments,
        own,
        row_parts,
        column_parts,
        count,
        total,
        anchors.shape[1],
        start,
        kernels.LOG2_E,
        kernels.LN_2,
        BOTH=both,
        TILES=TILES,
        **choices,
    )
    rows = _side(own, row_parts, groups)
    return rows, _side(own, column_parts, groups) if both else None


def _side(own: Tensor, parts: Tensor, groups: Groups | None) -> RowSums:
    found = torch.logsumexp(parts, dim=0)
    sums = torch.ones_like(found)
    if groups is not None:
        none = found == -torch.inf
        found, sums = found.masked_fill_(none, 0.0), sums.masked_fill_(none, 0.0)
    return RowSums(own, found, sums, None, groups)


def gradient(
    anchors: Tensor,
    others: Tensor,
    start: int,
    tau: Tensor,
    rows: RowSums,
    by_row: Tensor,
    columns: RowSums | None = None,
    by_column: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the sums over the rows, and with ``columns`` over the columns, in units of 1/τ.

    Args:
        anchors: shape ``(B, D)``, as given to :func:`log_sums`.
        others: shape ``(N, D)``, likewise.
        start: likewise.
        tau: likewise.
        rows: its result.
        by_row: what each row's sum is multiplied by, shape ``(B,)``, float32.
        columns: its second result; None for the rows alone.
        by_column: likewise of each column, shape ``(N,)``.

    Returns:
        With respect to anchors and others, shapes ``(B, D)`` and ``(N, D)``, float32; and all weights, each times its
        score, added up before they are rounded.
    """
    kernels = _kernels()
    count, total = len(anchors), len(others)
    by_anchors = torch.empty(anchors.shape, dtype=torch.float32, device=anchors.device)
    by_others = torch.zeros(others.shape, dtype=torch.float32, device=anchors.device)
    across, by_across = (rows, by_row) if columns is None else (columns, by_column)  # not read without columns
    moments = []
    size = min(count, max(ROWS, WEIGHTS // total))
    weights = torch.empty(size, total, dtype=anchors.dtype, device=anchors.device)
    for begin in range(0, count, size):
        part = slice(begin, min(begin + size, count))
        mine = anchors[part]
        groups = None if rows.groups is None else Groups(rows.groups.anchors[part], rows.groups.others)
        arguments, choices = _common(mine, others, tau, groups)
        grid = (-(-len(mine) // ROWS), -(-total // ACROSS))
        moments.append(by_anchors.new_empty(grid))
        kernels.weights_kernel[grid](
            *arguments,
            rows.own[part],
            rows.largest[part],
            by_row[part],
            across.own,
            across.largest,
            by_across,
            weights,
            moments[-1],
            len(mine),
            total,
            anchors.shape[1],
            start + begin,
            kernels.LOG2_E,
            kernels.LN_2,
            BOTH=columns is not None,
            **choices,
        )
        some = weights[: len(mine)]
        by_anchors[part] = product(some, others)
        by_others += product(some.T, mine)
    own = by_row * rows.sums
    if columns is not None and by_column is not None:
        own = own + by_column * columns.sums
    partners = slice(start, start + count)
    by_anchors.addcmul_(-own.unsqueeze(1), at_least_float32(others[partners]))
    by_others[partners].addcmul_(-own.unsqueeze(1), at_least_float32(anchors))
    return by_anchors, by_others, torch.stack([part.sum() for part in moments]).sum()
