"""Attention backward in Triton: five products for each tile of scores, or seven, and no order that chance decides.

    p = exp2(s - lse * log2(e));   ds = p * (drop(dy v.T) - delta),  delta = sum(dy * y)
    dv = drop(p).T dy;   dk = ds.T q * scale;   dq = ds k * scale

gradients.py's programs each have a block of keys; dq gets a share from each, in the order of the blocks. Or
a kernel of its own computes dq, and scores a second time. launch.py says which. Here are what runs before and behind,
and the launches: delta, the zeros that dq is added to, the scale and the dtype of dq, the sums of dk and dv where a
group's query heads are divided.

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.launch import LOG2_E, cdiv, jit, run, target_of, tl
from tpkernels.ops.attention.gradients import arrivals_per_turn, gradient_kernel, query_gradient_kernel
from tpkernels.ops.attention.launch import (
    KEY_GRADIENT,
    QUERY_GRADIENT,
    Config,
    Options,
    Rotation,
    Sides,
    Tables,
    are_described,
    block_head,
    config_of,
    constants,
    dropout_numbers,
    five_products_of,
    num_blocks,
    operand,
    sizes,
    takes_several_heads,
)

# Programs that occupy every processor of today's largest GPUs. With fewer, a group's query heads are divided.
_ENOUGH_PROGRAMS = 264
# Rows of queries, of all columns (gradients.py) that are added to at a time. A column's blocks are claimed so far apart
# that none waits for the one before, on 132 processors: a tile of 64 queries takes a step, S / 128 steps are a causal
# block's mean, a block may begin two steps behind the one before. And q, dy and a float32 dq of as many rows, 8 bytes
# per column of a head, fit into an L2 cache of 50 MB: 17 MB for heads of 64, 34 MB for heads of 128. Computed.
_ROWS_AT_A_TIME = 1 << 15


@jit(do_not_specialize=["num_queries"])
def _delta_kernel(
    p_y: tl.tensor,
    p_dy: tl.tensor,
    p_delta: tl.tensor,
    num_queries: tl.int32,
    num_heads: tl.int32,
    stride_dy_batch: tl.int64,
    stride_dy: tl.int64,
    stride_dy_head: tl.int64,
    HEAD: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
) -> None:
    """Compute delta [B, num_heads, num_queries] = sum(dy * y); y is contiguous [B, num_queries, num_heads, HEAD]."""
    o_query = tl.program_id(0).to(tl.int64) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    i_head, i_batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_head = tl.arange(0, BLOCK_HEAD)
    m_inside = (o_query < num_queries)[:, None] & (o_head < HEAD)[None, :]
    o_y = ((i_batch * num_queries + o_query) * num_heads + i_head)[:, None] * HEAD + o_head[None, :]
    # [BLOCK_QUERIES, BLOCK_HEAD]
    b_y = tl.load(p_y + o_y, mask=m_inside, other=0.0).to(tl.float32)
    p_dy += i_batch * stride_dy_batch + i_head * stride_dy_head
    # [BLOCK_QUERIES, BLOCK_HEAD]
    b_dy = tl.load(p_dy + o_query[:, None] * stride_dy + o_head[None, :], mask=m_inside, other=0.0).to(tl.float32)
    o_delta = (i_batch * num_heads + i_head) * num_queries + o_query
    tl.store(p_delta + o_delta, tl.sum(b_y * b_dy, axis=1), mask=o_query < num_queries)


@jit(do_not_specialize=["num_rows", "factor"])
def _finish_kernel(
    p_parts: tl.tensor,
    p_out: tl.tensor,
    num_rows: tl.int32,
    num_heads: tl.int32,
    stride_part: tl.int64,
    stride_batch: tl.int64,
    stride_row: tl.int64,
    stride_head: tl.int64,
    factor: tl.float32,
    NUM_PARTS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """Add parts [NUM_PARTS, B, num_heads, num_rows, HEAD] one after another, and store them times a factor."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i_head, i_batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_head = tl.arange(0, BLOCK_HEAD)
    m_inside = (o_row < num_rows)[:, None] & (o_head < HEAD)[None, :]
    o_part = ((i_batch * num_heads + i_head) * num_rows + o_row)[:, None] * HEAD + o_head[None, :]
    # [BLOCK_ROWS, BLOCK_HEAD]
    b_sum = tl.load(p_parts + o_part, mask=m_inside, other=0.0)
    for i_part in tl.static_range(1, NUM_PARTS):
        # [BLOCK_ROWS, BLOCK_HEAD]
        b_sum += tl.load(p_parts + i_part * stride_part + o_part, mask=m_inside, other=0.0)
    o_out = i_batch * stride_batch + i_head * stride_head + o_row[:, None] * stride_row + o_head[None, :]
    tl.store(p_out + o_out, (b_sum * factor).to(p_out.dtype.element_ty), mask=m_inside)


def launch_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    tables: Tables,
    sides: Sides,
    options: Options,
    config: Config | None = None,
) -> None:
    """Write dq, dk, dv into `gradients`, which have the shapes of q, k, v and no gaps in their last dims.

    `config` is for measuring, of five products; default what launch.py says.
    """
    if tables.cos is not None:
        rotation = Rotation(k, tables, sides, options)
        dq, dk = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
        of_rotated = (dq, dk, gradients[2])
        given = (rotation.forth(q), rotation.forth(k), v, y, lse)
        launch_attention_backward(dy, *given, of_rotated, Tables(None, None), sides, options, config)
        rotation.back(dq, gradients[0])
        rotation.back(dk, gradients[1])
        return
    dq, dk, dv = gradients
    batch, num_queries, num_heads, head = q.shape
    meta = constants(q, k, options)
    delta = torch.empty_like(lse)
    run(
        _delta_kernel,
        (cdiv(num_queries, 32), num_heads, batch),
        y,
        dy,
        delta,
        num_queries,
        num_heads,
        *dy.stride()[:3],
        HEAD=head,
        BLOCK_HEAD=meta["BLOCK_HEAD"],
        BLOCK_QUERIES=32,
        num_warps=4,
    )
    kind = (meta["BLOCK_HEAD"], q.element_size(), options.rate > 0, target_of(q))
    config = config or five_products_of(*kind)
    rest = (lse, delta, dy, q, k, v)
    if config is None:
        _launch_query_gradient(dq, *rest, sides, options, config_of(QUERY_GRADIENT, *kind))
        of_keys = config_of(KEY_GRADIENT, *kind)
        _launch_gradient(None, dk, dv, *rest, sides, options, of_keys, takes_several_heads(*kind))
    else:
        _launch_gradient(dq, dk, dv, *rest, sides, options, config, True)


def _launch_query_gradient(
    dq: Tensor,
    lse: Tensor,
    delta: Tensor,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sides: Sides,
    options: Options,
    config: Config,
) -> None:
    """Write dq by the kernel that computes nothing else."""
    batch, num_queries, num_heads, _ = q.shape
    operands, described = _operands(q, k, v, dy, sides, config)
    run(
        query_gradient_kernel,
        (num_blocks(num_queries, sides.query_starts, config.block_queries), num_heads, batch),
        *operands,
        *sides,
        lse,
        delta,
        dq,
        *sizes(q, k, sides),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dy.stride()[:3],
        *dq.stride()[:3],
        options.scale * LOG2_E,
        options.window,
        *dropout_numbers(k, options),
        BY_TMA=described,
        **constants(q, k, options),
        **config.options,
    )


def _launch_gradient(
    dq: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    lse: Tensor,
    delta: Tensor,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sides: Sides,
    options: Options,
    config: Config,
    takes_several: bool,
) -> None:
    """Write dk and dv, and dq unless it is None; `takes_several`: a program may have several heads of a group."""
    batch, num_queries, num_heads, head = q.shape
    num_groups, heads_per_group = k.shape[2], num_heads // k.shape[2]
    blocks = num_blocks(k.shape[1], sides.key_starts, config.block_keys)
    tiles = num_blocks(num_queries, sides.query_starts, config.block_queries)
    slots = _num_slots(blocks * num_groups * batch, heads_per_group) if takes_several else heads_per_group
    columns = batch * num_groups * slots
    wide_dq = counters = None
    if dq is not None:
        # One tensor, for one launch that zeroes it.
        zeros = torch.zeros(q.numel() + 2 + batch * num_heads * tiles, dtype=torch.float32, device=q.device)
        wide_dq = zeros[: q.numel()].view(1, batch, num_heads, num_queries, head)
        counters = zeros[q.numel() :].view(torch.int32)
    parts: Sequence[Tensor] = (dk, dv)
    if slots > 1:
        shape = (slots, batch, num_groups, k.shape[1], head)
        parts = [torch.empty(shape, dtype=torch.float32, device=q.device).transpose(2, 3) for _ in range(2)]
    operands, described = _operands(q, k, v, dy, sides, config)
    run(
        gradient_kernel,
        (blocks * columns,),
        *operands,
        *sides,
        lse,
        delta,
        counters,
        wide_dq,
        *parts,
        *sizes(q, k, sides),
        blocks,
        tiles,
        columns,
        max(1, _ROWS_AT_A_TIME // max(1, num_queries * (heads_per_group // slots))),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dy.stride()[:3],
        parts[0].stride(0) if slots > 1 else 0,
        *parts[0].stride()[-4:-1],
        *parts[1].stride()[-4:-1],
        options.scale * LOG2_E,
        options.window,
        *dropout_numbers(k, options),
        BY_TMA=described,
        ADDS_DQ=dq is not None,
        ARRIVALS=arrivals_per_turn(target_of(q), config.num_warps),
        NUM_SLOTS=slots,
        **constants(q, k, options),
        **config.options,
    )
    if dq is not None and wide_dq is not None:
        _finish(wide_dq, dq, options.scale)
    if slots > 1:
        for whole, of in zip((dk, dv), parts, strict=True):
            _finish(of.transpose(2, 3), whole, 1.0)


def _operands(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, sides: Sides, config: Config
) -> tuple[tuple[Any, ...], bool]:
    """Return q, k, v, dy as the kernels take them, and whether TMA reads them."""
    described = are_described(target_of(q), sides, q, k, v, dy)
    width = block_head(q)
    of_queries, of_keys = (config.block_queries, width, described), (config.block_keys, width, described)
    return (operand(q, *of_queries), operand(k, *of_keys), operand(v, *of_keys), operand(dy, *of_queries)), described


def _finish(parts: Tensor, out: Tensor, factor: float) -> None:
    """Write the sum of parts[P, B, heads, S, E], float32 without gaps, times a factor, into out[B, S, heads, E]."""
    num_parts, batch, num_heads, num_rows, head = parts.shape
    run(
        _finish_kernel,
        (cdiv(num_rows, 32), num_heads, batch),
        parts,
        out,
        num_rows,
        num_heads,
        parts.stride(0),
        *out.stride()[:3],
        factor,
        NUM_PARTS=num_parts,
        HEAD=head,
        BLOCK_HEAD=block_head(parts),
        BLOCK_ROWS=32,
        num_warps=4,
    )


def _num_slots(num_programs: int, heads_per_group: int) -> int:
    """Return into how many parts a group's query heads are divided, so that every processor has a program.

    It depends on shapes only, so the order of sums does too; each part costs a float32 copy of dk and dv.
    """
    slots = 1
    while num_programs * slots < _ENOUGH_PROGRAMS and heads_per_group % (2 * slots) == 0:
        slots *= 2
    return slots
