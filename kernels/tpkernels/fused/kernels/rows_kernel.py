"""Rows of experts between ranks, read and written in their owners' memory in place: `take_kernel`, `return_kernel`.

    take     rows[bound, D] at the experts' owner, from x[t, D] of all ranks, times the pairs' weights if there are any
    return   block[R, D] at the tokens' owner, in its arena, from h[bound, D] of all ranks

Who gets what is read from the tables of counts_kernel.py, which are on the device: the host waits for nothing.

**Take.** A rank publishes its tokens once, whatever k is, and which pair (token, choice) each of its sorted rows is.
When all its items that publish are counted, one program tells every peer. The other items are blocks of rows of its own
experts: each row's segment says whose it is, and which of that rank's sorted rows. Its pair, and then its token's
columns, are read from there. Rows between the last expert's and `bound` are zeros.

**Return.** Items are blocks of rows of this rank's experts; each row is stored at its token's owner, where that one has
it among its sorted rows: R rows, a number that every rank knows of itself. So nothing that is sent depends in its size
on how tokens are spread. A row that did not fit at its expert's owner has not been computed; its token's owner stores
zeros in its place, so that no memory is read that nobody wrote.

The order of rows follows from the tables alone, and every row has one writer: bits do not depend on who comes first.

Ranks cannot wait in a circle: only items that take wait, and those that publish have lower numbers. In `return_kernel`
only the program that draws the last number waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.launch import INTERPRETED, cdiv, jit, power_of_2, target_of, tl, widened
from tpkernels.symmetric.signals_kernel import (
    arrived_line,
    begin,
    block_of,
    claim,
    control_at,
    count_done,
    end_launch,
    is_last_claim,
    memory_of,
    notify,
    published_line,
    rank_of,
    wait,
)

# Bytes of rows that a program moves at a time: 16 per thread of 4 warps, 4 times.
_BYTES = 8192
# Elements, where rows are no multiples of 16 bytes: each has an address of its own, and more would spill.
_UNALIGNED_ELEMENTS = 1024
# Comparisons of rows with segments at a time, 8 per thread; with twice as many, and rows, sm_90 has to spill.
_COMPARISONS = 1024
_MOST_ROWS = 8
# Programs of a processor: rows come from afar, and few are on their way at a time in each. Not tuned on GPUs yet.
# Beside other communication it is one (processors.py).
_PROGRAMS_PER_PROCESSOR = 1 if INTERPRETED else 4


@jit
def segments_of(
    o_row: tl.tensor, p_begins: tl.tensor, num_segments: tl.tensor, stride: tl.tensor, BLOCK_E: tl.constexpr
) -> tl.tensor:
    """Return the segment of each row [BLOCK_ROWS]: the last that begins at or before it, counted from p_begins's first.

    Segments without rows begin where the next one does, so none of them is the last.
    """
    o_e = tl.arange(0, BLOCK_E)
    # [BLOCK_E]
    b_begins = tl.load(p_begins + o_e * stride, mask=o_e < num_segments, other=0) - tl.load(p_begins)
    m_before = (b_begins[None, :] <= o_row[:, None]) & (o_e < num_segments)[None, :]
    return tl.sum(m_before.to(tl.int32), 1) - 1


@jit
def pointers_at(address: tl.tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """Return pointers to addresses, a block of them, of which each is a multiple of 16 if ALIGNED."""
    p_rows = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        p_rows = tl.multiple_of(p_rows, 16)
    return p_rows


@jit(do_not_specialize=["num_tokens", "bound", "num_experts", "generation", "call"])
def take_kernel(
    p_rows: tl.tensor,
    p_x: tl.tensor,
    p_order: tl.tensor,
    p_weights: tl.tensor,
    p_segments: tl.tensor,
    p_offsets: tl.tensor,
    control: tl.int64,
    block_offset: tl.int64,
    order_offset: tl.int64,
    weights_offset: tl.int64,
    num_tokens: tl.int32,
    bound: tl.int32,
    num_columns: tl.int32,
    num_experts: tl.int32,
    stride_x: tl.int64,
    stride_rows: tl.int64,
    generation: tl.int32,
    call: tl.int32,
    WORLD: tl.constexpr,
    K: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Publish num_columns columns of x, and take the rows of this rank's experts from where their tokens are.

    Args:
        p_weights: [num_tokens, K], which rows are multiplied by, or None.
        order_offset, weights_offset: where a rank's order and weights lie in its memory, in bytes; x's columns lie at
            block_offset, without gaps.
        ALIGNED: whether rows of so many columns are multiples of 16 bytes.
    """
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    p_control = control_at(control)
    epoch = begin(p_control, generation, call)
    rank = rank_of(p_control)
    # At least one, since every peer must be notified, even without tokens.
    num_published = max(tl.cdiv(num_tokens, BLOCK_ROWS), 1)
    num_items = num_published + tl.cdiv(bound, BLOCK_ROWS)
    num_rows = tl.load(p_offsets + num_experts // WORLD)
    # This rank's segments of each table.
    p_places = p_segments + num_experts * WORLD + rank * num_experts
    p_firsts = p_places + num_experts * WORLD
    row_bytes = num_columns.to(tl.int64) * (DTYPE.primitive_bitwidth // 8)
    has_heard = False
    item = -1
    while item < num_items:
        item = claim(p_control)
        if item < num_published:
            # Publish.
            p_block = block_of(p_control, rank, block_offset, DTYPE)
            o_token = item * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            m_token = o_token < num_tokens
            for first in range(0, num_columns, BLOCK_COLUMNS):
                o_column = first + tl.arange(0, BLOCK_COLUMNS)
                m_x = m_token[:, None] & (o_column < num_columns)[None, :]
                # [BLOCK_ROWS, BLOCK_COLUMNS]
                b_x = tl.load(p_x + o_token.to(tl.int64)[:, None] * stride_x + o_column[None, :], mask=m_x)
                tl.store(p_block + o_token.to(tl.int64)[:, None] * num_columns + o_column[None, :], b_x, mask=m_x)
            o_pair = tl.arange(0, BLOCK_PAIRS)
            m_pair = (o_pair < BLOCK_ROWS * K) & (item * (BLOCK_ROWS * K) + o_pair < num_tokens * K)
            o_pair += item * (BLOCK_ROWS * K)
            # [BLOCK_PAIRS]
            b_order = tl.load(p_order + o_pair, mask=m_pair)
            tl.store(block_of(p_control, rank, order_offset, tl.int32) + o_pair, b_order, mask=m_pair)
            if p_weights is not None:
                WIDE: tl.constexpr = p_weights.dtype.element_ty
                # [BLOCK_PAIRS]
                b_weights = tl.load(p_weights + o_pair, mask=m_pair)
                tl.store(block_of(p_control, rank, weights_offset, WIDE) + o_pair, b_weights, mask=m_pair)
            if count_done(p_control, rank, num_published):
                for i in range(1, WORLD):
                    notify(p_control, (rank + i) % WORLD, published_line(rank), epoch, call)
        elif item < num_items:
            # Take. Rows behind the last expert's are nobody's.
            row = (item - num_published) * BLOCK_ROWS
            if (row < num_rows) & (not has_heard):
                for i in range(1, WORLD):
                    source = (rank + i) % WORLD
                    wait(p_control, source, published_line(source), epoch, call)
                has_heard = True
            o_row = row + tl.arange(0, BLOCK_ROWS)
            m_row = o_row < num_rows
            segment = segments_of(o_row, p_places, num_experts, 1, BLOCK_E)
            begin_row = tl.load(p_places + segment) - tl.load(p_places)
            sorted_row = tl.load(p_firsts + segment) + o_row - begin_row
            # [BLOCK_ROWS], int64
            b_memory = memory_of(p_control, segment % WORLD)
            p_pair = (b_memory + order_offset).to(tl.pointer_type(tl.int32)) + sorted_row
            # [BLOCK_ROWS]
            b_pair = tl.load(p_pair, mask=m_row, other=0)
            p_token = pointers_at(b_memory + block_offset + (b_pair // K).to(tl.int64) * row_bytes, DTYPE, ALIGNED)
            for first in range(0, num_columns, BLOCK_COLUMNS):
                o_column = first + tl.arange(0, BLOCK_COLUMNS)
                m_column = (o_column < num_columns)[None, :]
                # [BLOCK_ROWS, BLOCK_COLUMNS]
                b_x = tl.load(p_token[:, None] + o_column[None, :], mask=m_row[:, None] & m_column, other=0.0)
                if p_weights is not None:
                    p_weight = (b_memory + weights_offset).to(tl.pointer_type(p_weights.dtype.element_ty)) + b_pair
                    b_wide = widened(b_x)
                    b_scale = tl.load(p_weight, mask=m_row, other=0.0).to(b_wide.dtype)
                    b_x = (b_wide * b_scale[:, None]).to(DTYPE)
                p_out = p_rows + o_row.to(tl.int64)[:, None] * stride_rows + o_column[None, :]
                tl.store(p_out, b_x, mask=(o_row < bound)[:, None] & m_column)
    if is_last_claim(item, num_items):
        for i in range(1, WORLD):
            source = (rank + i) % WORLD
            wait(p_control, source, published_line(source), epoch, call)
        end_launch(p_control, epoch, generation)


@jit(do_not_specialize=["num_sorted", "bound", "num_experts", "generation", "call"])
def return_kernel(
    p_h: tl.tensor,
    p_segments: tl.tensor,
    p_offsets: tl.tensor,
    p_spilled: tl.tensor,
    control: tl.int64,
    block_offset: tl.int64,
    num_sorted: tl.int32,
    bound: tl.int32,
    num_columns: tl.int32,
    num_experts: tl.int32,
    stride_h: tl.int64,
    generation: tl.int32,
    call: tl.int32,
    WORLD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Store num_columns columns of this rank's experts' rows at their tokens' owners.

    When the launch has ended, this rank's block has its own tokens' rows, sorted by expert.

    Args:
        num_sorted: R, rows of this rank's tokens.
    """
    DTYPE: tl.constexpr = p_h.dtype.element_ty
    p_control = control_at(control)
    epoch = begin(p_control, generation, call)
    rank = rank_of(p_control)
    num_rows = tl.load(p_offsets + num_experts // WORLD)
    spilled = tl.load(p_spilled)
    for owner in range(1, WORLD):
        spilled = tl.maximum(spilled, tl.load(p_spilled + owner))
    # At least one, since every peer must be notified, even without rows.
    num_sent = max(tl.cdiv(num_rows, BLOCK_ROWS), 1)
    num_items = num_sent + tl.where(spilled > 0, tl.cdiv(num_sorted, BLOCK_ROWS), 0)
    p_places = p_segments + num_experts * WORLD
    p_firsts = p_places + num_experts * WORLD
    row_bytes = num_columns.to(tl.int64) * (DTYPE.primitive_bitwidth // 8)
    item = -1
    while item < num_items:
        item = claim(p_control)
        if item < num_sent:
            # Send.
            o_row = item * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            m_row = o_row < num_rows
            p_own = p_places + rank * num_experts
            segment = segments_of(o_row, p_own, num_experts, 1, BLOCK_E)
            begin_row = tl.load(p_own + segment) - tl.load(p_own)
            sorted_row = tl.load(p_firsts + rank * num_experts + segment) + o_row - begin_row
            # [BLOCK_ROWS], int64
            b_memory = memory_of(p_control, segment % WORLD)
            p_to = pointers_at(b_memory + block_offset + sorted_row.to(tl.int64) * row_bytes, DTYPE, ALIGNED)
            for first in range(0, num_columns, BLOCK_COLUMNS):
                o_column = first + tl.arange(0, BLOCK_COLUMNS)
                m_h = m_row[:, None] & (o_column < num_columns)[None, :]
                # [BLOCK_ROWS, BLOCK_COLUMNS]
                b_h = tl.load(p_h + o_row.to(tl.int64)[:, None] * stride_h + o_column[None, :], mask=m_h)
                tl.store(p_to[:, None] + o_column[None, :], b_h, mask=m_h)
            if count_done(p_control, rank, num_sent):
                for i in range(1, WORLD):
                    notify(p_control, (rank + i) % WORLD, arrived_line(rank, 0), epoch, call)
        elif item < num_items:
            # Zeros for own rows that did not fit where their expert is: nobody else writes there.
            o_row = (item - num_sent) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            expert = segments_of(o_row, p_firsts + rank, num_experts, WORLD, BLOCK_E)
            per_rank = num_experts // WORLD
            o_segment = expert * WORLD + rank
            begin_row = tl.load(p_places + o_segment) - tl.load(p_places + expert // per_rank * per_rank * WORLD)
            place = begin_row + o_row - tl.load(p_firsts + o_segment)
            m_spilled = (o_row < num_sorted) & (place >= bound)
            p_to = block_of(p_control, rank, block_offset, DTYPE)
            for first in range(0, num_columns, BLOCK_COLUMNS):
                o_column = first + tl.arange(0, BLOCK_COLUMNS)
                m_zero = m_spilled[:, None] & (o_column < num_columns)[None, :]
                p_zero = p_to + o_row.to(tl.int64)[:, None] * num_columns + o_column[None, :]
                tl.store(p_zero, tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], DTYPE), mask=m_zero)
    if is_last_claim(item, num_items):
        for i in range(1, WORLD):
            source = (rank + i) % WORLD
            wait(p_control, source, arrived_line(source, 0), epoch, call)
        end_launch(p_control, epoch, generation)


def blocks_of(x: Tensor, num_experts: int) -> dict[str, int]:
    """Return the rows, columns and experts of a block, and whether rows of x's columns are multiples of 16 bytes."""
    num_columns, item_bytes = x.shape[1], x.element_size()
    aligned, block_e = num_columns * item_bytes % 16 == 0, power_of_2(num_experts)
    rows = max(min(_COMPARISONS // block_e, _MOST_ROWS), 1)
    elements = _BYTES // item_bytes if aligned else _UNALIGNED_ELEMENTS
    columns = min(power_of_2(num_columns), elements // rows)
    return {"ALIGNED": aligned, "BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "BLOCK_E": block_e}


def launch_take(
    rows: Tensor,
    x: Tensor,
    order: Tensor,
    weights: Tensor | None,
    segments: Tensor,
    offsets: Tensor,
    arena: DeviceArena,
    k: int,
    order_bytes: int,
    weights_bytes: int,
    generation: int,
    call: int,
) -> None:
    """Take columns of all ranks' x into rows[bound, columns]; arguments as take_kernel's.

    Args:
        rows, x: some columns of rows without gaps in them.
        k: choices of a token.
        order_bytes, weights_bytes: where order and weights lie in a generation.
    """
    num_tokens, num_columns = x.shape
    num_experts = segments.shape[1]
    sizes = len(rows), x.shape, x.stride(0), rows.stride(0), num_experts, order_bytes, weights_bytes
    key = "take", k, generation, arena.processors, *sizes
    values = {"p_rows": rows, "p_x": x, "p_order": order, "p_weights": weights}
    tables = {"p_segments": segments, "p_offsets": offsets}
    if arena.launches.again(key, call, *values.values(), *tables.values()):
        return
    blocks = blocks_of(x, num_experts)
    block_rows = blocks["BLOCK_ROWS"]
    begin = arena.offset_of(generation)
    arena.launches.first(
        key,
        {**values, **tables},
        take_kernel,
        (_programs(x, cdiv(num_tokens, block_rows) + cdiv(len(rows), block_rows), arena),),
        rows,
        x,
        order,
        weights,
        segments,
        offsets,
        arena.address,
        begin,
        begin + order_bytes,
        begin + weights_bytes,
        num_tokens,
        len(rows),
        num_columns,
        num_experts,
        x.stride(0),
        rows.stride(0),
        generation,
        call,
        WORLD=arena.world,
        K=k,
        BLOCK_PAIRS=power_of_2(block_rows * k),
        **blocks,
        **_options(x),
    )


def launch_return(
    h: Tensor,
    num_sorted: int,
    segments: Tensor,
    offsets: Tensor,
    spilled: Tensor,
    arena: DeviceArena,
    generation: int,
    call: int,
) -> None:
    """Store columns h[bound, columns] of experts' rows in their tokens' owners' blocks; as return_kernel's."""
    num_rows, num_columns = h.shape
    num_experts = segments.shape[1]
    key = "return", generation, arena.processors, num_sorted, h.shape, h.stride(0), num_experts
    values = {"p_h": h, "p_segments": segments, "p_offsets": offsets, "p_spilled": spilled}
    if arena.launches.again(key, call, *values.values()):
        return
    blocks = blocks_of(h, num_experts)
    arena.launches.first(
        key,
        values,
        return_kernel,
        (_programs(h, cdiv(num_rows, blocks["BLOCK_ROWS"]), arena),),
        *values.values(),
        arena.address,
        arena.offset_of(generation),
        num_sorted,
        num_rows,
        num_columns,
        num_experts,
        h.stride(0),
        generation,
        call,
        WORLD=arena.world,
        **blocks,
        **_options(h),
    )


def _programs(x: Tensor, num_items: int, arena: DeviceArena) -> int:
    return arena.budget(x).programs(num_items, _PROGRAMS_PER_PROCESSOR)


def _options(x: Tensor) -> dict[str, int]:
    """Return the options of a launch: as many registers as let all programs of a processor be resident."""
    limit = {"maxnreg": 128} if target_of(x).backend == "cuda" else {}
    return {"num_warps": 4, **limit}


def returned(arena: DeviceArena, generation: int, num_sorted: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Return a view of what `launch_return` has brought here; the next call but one overwrites it."""
    return arena.block(arena.rank, generation, (num_sorted, num_columns), dtype)
