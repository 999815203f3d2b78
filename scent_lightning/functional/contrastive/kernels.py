"""Triton kernels of the contrastive loss: what they take and give is said in :mod:`.fused`.

A tile is some anchors against some others. Its logits are made in float32 and in units of log 2, so that exponentials
are powers of two, and are −inf where the other is no sample of the anchor.
"""

import triton
import triton.language as tl

__all__ = ["LN_2", "LOG2_E", "log_sums_kernel", "weights_kernel"]

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@triton.jit
def _logits(anchors, others, rows, columns, count, total, width, WIDEN: tl.constexpr, DEPTH: tl.constexpr):
    depths = tl.arange(0, DEPTH)
    left = anchors + rows.to(tl.int64)[:, None] * width + depths[None, :]
    right = others + columns.to(tl.int64)[None, :] * width + depths[:, None]
    here, there = (rows < count)[:, None], (columns < total)[None, :]
    logits = tl.zeros((rows.shape[0], columns.shape[0]), dtype=tl.float32)
    for first in range(0, width, DEPTH):
        inside = first + depths < width
        mine = tl.load(left + first, mask=here & inside[None, :], other=0.0)
        theirs = tl.load(right + first, mask=there & inside[:, None], other=0.0)
        if WIDEN:  # Triton's interpreter has no products of bfloat16
            mine, theirs = mine.to(tl.float32), theirs.to(tl.float32)
        logits = tl.dot(mine, theirs, logits, input_precision="ieee")
    return logits


@triton.jit
def _samples_only(logits, rows, columns, anchor_group, other_group, count, total, start, GROUPS: tl.constexpr):
    there = (columns < total)[None, :] & (rows < count)[:, None] & (columns[None, :] != rows[:, None] + start)
    if GROUPS:
        mine = tl.load(anchor_group + rows, mask=rows < count, other=0)
        theirs = tl.load(other_group + columns, mask=columns < total, other=0)
        there = there & (mine[:, None] != theirs[None, :])
    return tl.where(there, logits, float("-inf"))


@triton.jit
def log_sums_kernel(
    anchors,
    others,
    anchor_group,
    other_group,
    tau,
    own,
    row_parts,
    column_parts,
    count,
    total,
    width,
    start,
    log2_e,
    ln_2,
    GROUPS: tl.constexpr,
    BOTH: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES: tl.constexpr,
):
    """Own logits; log-sums of a row over ``TILES`` tiles, and with ``BOTH`` of a column over one."""
    block, stripe = tl.program_id(0), tl.program_id(1)
    rows = block * ROWS + tl.arange(0, ROWS)
    scale = log2_e / tl.load(tau).to(tl.float32)
    highest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    for tile in range(TILES):
        begin = (stripe * TILES + tile) * ACROSS
        columns = begin + tl.arange(0, ACROSS)
        logits = _logits(anchors, others, rows, columns, count, total, width, WIDEN, DEPTH) * scale
        first_own = block * ROWS + start
        if (begin < first_own + ROWS) & (first_own < begin + ACROSS):
            is_own = (columns[None, :] == rows[:, None] + start) & (rows < count)[:, None]
            tl.store(own + rows[:, None] + tl.zeros_like(columns)[None, :], logits * ln_2, mask=is_own)
        logits = _samples_only(logits, rows, columns, anchor_group, other_group, count, total, start, GROUPS)
        found = tl.maximum(highest, tl.max(logits, axis=1))
        reference = tl.where(found == float("-inf"), 0.0, found)
        sums = sums * tl.exp2(highest - reference) + tl.sum(tl.exp2(logits - reference[:, None]), axis=1)
        highest = found
        if BOTH:
            top = tl.max(logits, axis=0)
            top = tl.where(top == float("-inf"), 0.0, top)
            part = top + tl.log2(tl.sum(tl.exp2(logits - top[None, :]), axis=0))
            tl.store(column_parts + block.to(tl.int64) * total + columns, part * ln_2, mask=columns < total)
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    part = (reference + tl.log2(sums)) * ln_2
    tl.store(row_parts + stripe.to(tl.int64) * count + rows, part, mask=rows < count)


@triton.jit
def weights_kernel(
    anchors,
    others,
    anchor_group,
    other_group,
    tau,
    row_own,
    row_log_sums,
    by_row,
    column_own,
    column_log_sums,
    by_column,
    weights,
    moments,
    count,
    total,
    width,
    start,
    log2_e,
    ln_2,
    GROUPS: tl.constexpr,
    BOTH: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """What each pair's logit moves the sums by: its share of its row's sum, and with ``BOTH`` of its column's.

    And what a tile's weights add up to, each times the pair's score: the logit less that of the row or column itself.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    scale = log2_e / tl.load(tau).to(tl.float32)
    logits = _logits(anchors, others, rows, columns, count, total, width, WIDEN, DEPTH) * scale
    shown = _samples_only(logits, rows, columns, anchor_group, other_group, count, total, start, GROUPS)
    reference = tl.load(row_log_sums + rows, mask=rows < count, other=0.0) * log2_e
    weight = tl.load(by_row + rows, mask=rows < count, other=0.0)
    own = tl.load(row_own + rows, mask=rows < count, other=0.0) * log2_e
    found = weight[:, None] * tl.exp2(shown - reference[:, None])
    moment = tl.sum(found * (logits - own[:, None]))
    if BOTH:
        reference = tl.load(column_log_sums + columns, mask=columns < total, other=0.0) * log2_e
        weight = tl.load(by_column + columns, mask=columns < total, other=0.0)
        own = tl.load(column_own + columns, mask=columns < total, other=0.0) * log2_e
        more = weight[None, :] * tl.exp2(shown - reference[None, :])
        moment += tl.sum(more * (logits - own[None, :]))
        found += more
    tl.store(moments + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), moment * ln_2)
    place = weights + rows.to(tl.int64)[:, None] * total + columns[None, :]
    tl.store(place, found.to(weights.dtype.element_ty), mask=(rows < count)[:, None] & (columns < total)[None, :])
