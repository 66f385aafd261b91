"""matmul + reduce-scatter in Triton: each tile is sent to its owner as soon as it is computed.

    y[T/tp, D] = reduce_scatter(sum_i x_i[T, K_i] @ m_i[K_i, D] + addend[T, D]) + bias

`matmul_scatter_kernel` computes the rows of rank+1 first and this rank's own last. It stores each tile for a peer into
its slot of the owner's block. Every owner's columns are cut into up to 8 splits, computed one after the other, and a
flag goes up after the last tile of each. An own tile stays in registers: its program waits for the same split of every
peer, adds the peers' slots and the tile in float32, in a balanced tree of ranks (tree.py), and stores y. So a call is
one launch, its bits are the same on every run, and own data goes through no slot.

Ranks cannot wait in a circle. Only a program with an own tile waits. Numbers are drawn in order: all tiles for peers
have been drawn by then, by programs that have started. Each program counts its last tile for a peer before it waits. So
all flags go up whatever other ranks do, and one resident program per rank suffices.

The decision a reader will question: a tile is counted one tile late, and the next number is drawn before a tile is
stored. Both are releases, which wait until this program's stores have arrived at their owner. Behind the next tile's
products they have; directly behind the stores the program would stand still for as long as the link takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.fused.configs import exchange_config, launch_options
from tpkernels.fused.kernels.slots import add_own, num_own_parts
from tpkernels.launch import INTERPRETED, cdiv, jit, target_of, tl
from tpkernels.ops.matmul.epilogue import finish, rounded
from tpkernels.ops.matmul.kernel import Operand, num_parts
from tpkernels.ops.matmul.tiles import multiply, place
from tpkernels.symmetric.signals_kernel import (
    arrived_line,
    begin,
    block_of,
    claim,
    control_at,
    count_done,
    end_launch,
    is_last_claim,
    notify,
    published_line,
    rank_of,
    report,
    split_columns,
    wait,
    wait_for_epoch,
)

# The most products that the kernel adds.
MOST_TERMS = 2
# A split has a multiple of so many columns, which is a multiple of every tile's.
_SPLIT_COLUMNS = 16 if INTERPRETED else 256
# What differs between launches of one shape.
_VARYING = ("a", "b", "p_y", "p_bias", "p_addend", "other_a", "other_b")


@jit
def _count(
    p_control: tl.tensor, owner: tl.tensor, split: tl.tensor, num_tiles: tl.tensor, epoch: tl.tensor, call: tl.tensor
) -> None:
    """Count a tile that this program has stored at its owner, and raise the split's flag if it was the last of it."""
    if count_done(p_control, owner, num_tiles, split):
        notify(p_control, owner, arrived_line(rank_of(p_control), split), epoch, call)


@jit(do_not_specialize=["num_tokens", "most", "first", "piece", "generation", "gather_call", "call"])
def matmul_scatter_kernel(
    control: tl.int64,
    p_y: tl.tensor,
    p_bias: tl.tensor,
    p_addend: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    other_a: tl.tensor,
    other_b: tl.tensor,
    depth: tl.int32,
    other_depth: tl.int32,
    stride_a: tl.int64,
    stride_b: tl.int64,
    other_stride_a: tl.int64,
    other_stride_b: tl.int64,
    num_tokens: tl.int32,
    most: tl.int32,
    first: tl.int32,
    piece: tl.int32,
    num_columns: tl.int32,
    stride_addend: tl.int64,
    block_offset: tl.int64,
    slot_elements: tl.int64,
    generation: tl.int32,
    gather_call: tl.int32,
    call: tl.int32,
    WORLD: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    A_BY_ROWS: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    OWN_PARTS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
) -> None:
    """Compute rows first to first + piece of every owner's shard; send peers theirs, add what they send to own ones.

    An owner's block begins at block_offset bytes of its memory; this rank's slot in it is slot `rank`. A tile of y is
    the sum of the peers' slots here and the own tile, + bias.

    Args:
        p_y: this rank's rows of the piece, without gaps; None to neither wait nor add: own tiles go into the own slot.
        a, b, other_a, other_b: the operands of one product or, if TWO_TERMS, of two. Each is a parameter of its own,
            because triton cannot launch descriptors in tuples.
        gather_call: number of the gather that runs beside this call, and began just before it; 0 if there is none.
        A_BY_ROWS, B_BY_ROWS, TMA_A, TMA_B: tuples with one value for each product.
    """
    p_control = control_at(control)
    epoch = begin(p_control, generation, call)
    rank = rank_of(p_control)
    if gather_call != 0:
        # The call before the gather used this generation. A peer that has begun the gather has ended that call.
        for i in range(1, WORLD):
            peer = (rank + i) % WORLD
            wait_for_epoch(p_control, peer, published_line(peer), epoch - 1, gather_call)
    # Every owner has at least one tile, because every peer must be notified, even without rows or columns.
    num_m = max(tl.cdiv(piece, BLOCK_M), 1)
    num_n = max(tl.cdiv(num_columns, BLOCK_N), 1)
    tiles_per_owner = num_m * num_n
    num_items = WORLD * tiles_per_owner
    # Splits are cut by columns alone: they are the same on every rank, whatever tiles it has.
    tl.static_assert(SPLIT_COLUMNS % BLOCK_N == 0, "a tile lies in one split")
    n_per_split = split_columns(num_columns, SPLIT_COLUMNS) // BLOCK_N
    # Nothing is computed with item -1: the first number is drawn where all others are (claim).
    item, uncounted, heard = -1, -1, -1
    uncounted_split, uncounted_tiles = 0, 0
    while item < num_items:
        owner = (rank + 1 + max(item, 0) // tiles_per_owner) % WORLD
        i_tile = max(item, 0) % tiles_per_owner
        split = i_tile // (num_m * n_per_split)
        first_n = split * n_per_split
        n_of_split = min(num_n - first_n, n_per_split)
        i_m, i_n = place(i_tile - num_m * first_n, num_m, n_of_split, GROUP_M)
        i_n += first_n
        row, column = i_m * BLOCK_M, i_n * BLOCK_N
        num_rows = max(min(min(num_tokens - owner * most, most) - first, piece), 0)
        has_rows = (item >= 0) & (row < num_rows)
        first_token = owner * most + first
        # Compute. Without rows nothing is multiplied, nor stored: a tile cannot leave an `if`, and is stored later.
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc = multiply(
            acc,
            a,
            b,
            first_token + row,
            column,
            first_token + num_rows,
            num_columns,
            tl.where(has_rows, depth, 0),
            stride_a,
            stride_b,
            A_BY_ROWS[0],
            B_BY_ROWS[0],
            TMA_A[0],
            TMA_B[0],
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        if TWO_TERMS:
            acc = multiply(
                acc,
                other_a,
                other_b,
                first_token + row,
                column,
                first_token + num_rows,
                num_columns,
                tl.where(has_rows, other_depth, 0),
                other_stride_a,
                other_stride_b,
                A_BY_ROWS[1],
                B_BY_ROWS[1],
                TMA_A[1],
                TMA_B[1],
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
        # Count the tile before, which these products gave the time to arrive, and draw the next number. Both wait for
        # this program's stores, so they come before this tile's.
        if uncounted >= 0:
            _count(p_control, uncounted, uncounted_split, uncounted_tiles, epoch, call)
        next_item = claim(p_control)
        p_added = p_addend
        if p_addend is not None:
            p_added = p_addend + first_token.to(tl.int64) * stride_addend
        rows_here = tl.where(has_rows, num_rows, 0)
        tile = rounded(acc, p_added, row, column, rows_here, num_columns, stride_addend, DTYPE, PARTS)
        is_added = (owner == rank) & (p_y is not None)
        if is_added:
            if p_y is not None:
                # Wait for this split of every peer. No peer waits for this program any more: it has counted its tiles.
                if split != heard:
                    for i in range(1, WORLD):
                        source = (rank + i) % WORLD
                        wait(p_control, source, arrived_line(source, split), epoch, call)
                    heard = split
                # Add.
                add_own(
                    tile,
                    p_y,
                    block_of(p_control, rank, block_offset, DTYPE),
                    p_bias,
                    rank,
                    row,
                    column,
                    rows_here,
                    num_columns,
                    slot_elements,
                    WORLD,
                    OWN_PARTS,
                )
        else:
            # Send; without y also the own tiles, to the own slot.
            p_slot = block_of(p_control, owner, block_offset, DTYPE) + rank * slot_elements
            finish(
                tile,
                p_slot,
                None,
                None,
                row,
                column,
                rows_here,
                num_columns,
                num_columns,
                0,
                False,
                PARTS,
            )
        uncounted = tl.where((item >= 0) & (not is_added), owner, -1)
        uncounted_split, uncounted_tiles = split, num_m * n_of_split
        item = next_item
    if uncounted >= 0:
        _count(p_control, uncounted, uncounted_split, uncounted_tiles, epoch, call)
    # A peer that gave up has poisoned the group before it raised the flags that this program has seen.
    if heard >= 0:
        report(p_control)
    if is_last_claim(item, num_items):
        end_launch(p_control, epoch, generation, gather_call != 0)


def launch_matmul_scatter(
    y: Tensor | None,
    terms: Sequence[tuple[Tensor, Tensor]],
    addend: Tensor | None,
    bias: Tensor | None,
    arena: DeviceArena,
    num_tokens: int,
    first: int,
    piece: int,
    slot_elements: int,
    generation: int,
    call: int,
) -> None:
    """Send rows first to first + piece of sum_i x_i @ m_i + addend to their owners, and add what arrives + bias into y.

    Arguments as the kernel's.

    Args:
        y: this rank's rows of the piece, without gaps; None to neither wait nor add.
        terms: pairs (x_i, m_i), one or two.
    """
    assert len(terms) <= MOST_TERMS, f"the kernel adds at most {MOST_TERMS} products: got {len(terms)} terms"
    x, matrix = terms[0]
    other_x, other_matrix = terms[1] if len(terms) == 2 else (None, None)
    bias = None if bias is None else bias.contiguous()
    gather_call = arena.gather_call
    sizes = [(t.shape, t.stride()) for term in terms for t in term]
    added = None if addend is None else addend.stride()
    room = arena.processors, arena.reserved_processors
    key = "scatter", num_tokens, first, piece, slot_elements, generation, gather_call, *room, added, *sizes
    values = x, matrix, y, bias, addend, other_x, other_matrix
    # Operands with gaps in both dims are copied, below.
    is_read_in_place = all(1 in strides for _, strides in sizes)
    if is_read_in_place and arena.launches.again(key, call, *values):
        return
    columns, target = matrix.shape[1], target_of(x)
    most, depth = cdiv(num_tokens, arena.world), sum(m.shape[0] for _, m in terms)
    config = exchange_config(
        most,
        columns,
        depth,
        arena.world,
        x.dtype,
        target,
        num_terms=len(terms),
        reserved=arena.reserved_processors,
    )
    lefts = [Operand.of(t, target) for t, _ in terms]
    rights = [Operand.of(m, target) for _, m in terms]
    arguments = [one.argument(config.block_m, config.block_k) for one in lefts]
    others = [one.argument(config.block_k, config.block_n) for one in rights]
    two = len(terms) == 2
    tiles = arena.world * max(cdiv(piece, config.block_m), 1) * max(cdiv(columns, config.block_n), 1)
    fitting = config.programs_per_processor(x.element_size(), target)
    programs = arena.budget(x).programs(tiles, fitting, beside_copies=gather_call != 0)
    # TMA descriptors are not tensors, so triton could not find the device from them.
    with torch.cuda.device_of(x):
        arena.launches.first(
            key,
            dict(zip(_VARYING, values, strict=True)),
            matmul_scatter_kernel,
            (programs,),
            arena.address,
            y,
            bias,
            addend,
            arguments[0],
            others[0],
            arguments[1] if two else None,
            others[1] if two else None,
            matrix.shape[0],
            terms[-1][1].shape[0],
            lefts[0].stride,
            rights[0].stride,
            lefts[-1].stride,
            rights[-1].stride,
            num_tokens,
            cdiv(num_tokens, arena.world),
            first,
            piece,
            columns,
            0 if addend is None else addend.stride(0),
            arena.offset_of(generation),
            slot_elements,
            generation,
            gather_call,
            call,
            WORLD=arena.world,
            TWO_TERMS=two,
            A_BY_ROWS=tuple(one.by_rows for one in lefts),
            B_BY_ROWS=tuple(one.by_rows for one in rights),
            TMA_A=tuple(one.by_tma for one in lefts),
            TMA_B=tuple(one.by_tma for one in rights),
            DTYPE=getattr(tl, str(x.dtype).removeprefix("torch.")),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            PARTS=num_parts(config),
            OWN_PARTS=num_own_parts(config),
            SPLIT_COLUMNS=_SPLIT_COLUMNS,
            **launch_options(config, x.element_size(), target),
        )
