"""Attention backward in Triton: a kernel for dq, one for dk and dv, no atomics.

    p = exp2(s - lse * log2(e));   ds = p * (drop(dy v.T) - delta),  delta = sum(dy * y)
    dv = drop(p).T dy;   dk = ds.T q * scale;   dq = ds k * scale

A program of dq (query_gradient.py) has a block of queries of one head and loops over keys. A program of dk and dv
(key_gradient.py) has a block of keys of one KV head and loops over the queries of all query heads of its group, of some
of them, or of one. So every element is written by one program, in an order that depends on shapes only. The price:
scores are computed twice, 7 products, not 5 (configs.py says why). Here are the preparation of both and the launches.

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.launch import LOG2_E, cdiv, jit, run, target_of, tl
from tpkernels.ops.attention.configs import KEY_GRADIENT, QUERY_GRADIENT, config_of, takes_several_heads
from tpkernels.ops.attention.gradient.key_gradient import key_gradient_kernel
from tpkernels.ops.attention.gradient.query_gradient import query_gradient_kernel
from tpkernels.ops.attention.problem import (
    Options,
    Sides,
    Tables,
    constants,
    dropout_numbers,
    num_blocks,
    sizes,
)
from tpkernels.ops.attention.rotation import Rotation

# Programs that occupy every processor of today's largest GPUs. With fewer, a group's query heads are divided.
_ENOUGH_PROGRAMS = 264


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
) -> None:
    """Write dq, dk, dv into `gradients`, which have the shapes of q, k, v and no gaps in their last dims."""
    if tables.cos is not None:
        rotation = Rotation(k, tables, sides, options)
        dq, dk = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
        of_rotated = (dq, dk, gradients[2])
        given = (rotation.forth(q), rotation.forth(k), v, y, lse)
        launch_attention_backward(dy, *given, of_rotated, Tables(None, None), sides, options)
        rotation.back(dq, gradients[0])
        rotation.back(dk, gradients[1])
        return
    dq, dk, dv = gradients
    batch, num_queries, num_heads, head = q.shape
    meta = constants(q, k, options)
    common = (*sizes(q, k, sides), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3])
    numbers = (options.scale * LOG2_E, options.window, *dropout_numbers(k, options))
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
    tensors = (q, k, v, dy, *sides, lse, delta)
    config = config_of(QUERY_GRADIENT, *kind)
    run(
        query_gradient_kernel,
        (num_blocks(num_queries, sides.query_starts, config["BLOCK_QUERIES"]), num_heads, batch),
        *tensors,
        dq,
        *common,
        *dq.stride()[:3],
        *numbers,
        **meta,
        **config,
    )
    config = config_of(KEY_GRADIENT, *kind)
    blocks = num_blocks(k.shape[1], sides.key_starts, config["BLOCK_KEYS"])
    num_slots = meta["NUM_HEADS_PER_GROUP"]
    if takes_several_heads(*kind):
        num_slots = _num_slots(blocks * k.shape[2] * batch, num_slots)
    parts: Sequence[Tensor] = (dk, dv)
    if num_slots > 1:
        parts = tuple(torch.empty(num_slots, *of.shape, dtype=torch.float32, device=of.device) for of in (dk, dv))
    run(
        key_gradient_kernel,
        (blocks, k.shape[2] * num_slots, batch),
        *tensors,
        *parts,
        *common,
        parts[0].stride(0) if num_slots > 1 else 0,
        *parts[0].stride()[-4:-1],
        *parts[1].stride()[-4:-1],
        *numbers,
        NUM_SLOTS=num_slots,
        **meta,
        **config,
    )
    if num_slots > 1:
        for whole, of in zip((dk, dv), parts, strict=True):
            whole.copy_(of.sum(0))


def _num_slots(num_programs: int, heads_per_group: int) -> int:
    """Return into how many parts a group's query heads are divided, so that every processor has a program.

    It depends on shapes only, so the order of sums does too; each part costs a float32 copy of dk and dv.
    """
    slots = 1
    while num_programs * slots < _ENOUGH_PROGRAMS and heads_per_group % (2 * slots) == 0:
        slots *= 2
    return slots
