"""Sums of slots: what peers have sent of this rank's rows, and the rows that it computed itself, in one order.

    y[rows, columns] = sum over the ranks of their slots, in the balanced tree of tree.py, + bias

What goes into a slot is rounded to the operands' dtype. What this rank computed itself is rounded alike, and stands in
the place of its slot: `add_own` takes it from the registers of a matmul's tile, `sum_slots_kernel` from memory. So the
bits are those of a sum of slots.
"""

from __future__ import annotations

from torch import Tensor

from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.launch import INTERPRETED, cdiv, jit, only_if, run, tl, widened
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.symmetric.signals_kernel import block_of, control_at, rank_of

# Elements that a program of sum_slots_kernel sums at a time: 16 bytes of bfloat16 per thread of 8 warps.
_SUM_ELEMENTS = 2048


@jit
def _added(
    p_slots: tl.tensor,
    own: tl.tensor,
    m_x: tl.tensor,
    rank: tl.tensor,
    slot_elements: tl.tensor,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """Return the sum of slots FIRST to FIRST + COUNT in the balanced tree of tree.py.

    The left subtree has the largest power of two of slots that is less than COUNT.

    Args:
        p_slots: pointers to the elements of slot 0.
        own: the elements that stand in the place of slot `rank`, in its dtype.
    """
    if COUNT == 1:
        # `own` is chosen by the mask of the load: a choice between two values takes more registers.
        return widened(tl.load(p_slots + FIRST * slot_elements, mask=only_if(rank != FIRST, m_x), other=own))
    else:
        LEFT: tl.constexpr = 4 if COUNT > 4 else (2 if COUNT > 2 else 1)
        left = _added(p_slots, own, m_x, rank, slot_elements, FIRST, LEFT)
        return left + _added(p_slots, own, m_x, rank, slot_elements, FIRST + LEFT, COUNT - LEFT)


@jit
def add_own(
    own: tl.tensor,
    p_y: tl.tensor,
    p_slots: tl.tensor,
    p_bias: tl.tensor,
    rank: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    slot_elements: tl.tensor,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Compute a tile of y, from y[row, column] on: the peers' slots, own in the place of this rank's, and bias, added.

    Args:
        own: the tile as it would be in a slot, in its dtype. So the sum has the same bits as one of slots.
        p_slots: slots, like y [num_rows, num_columns] without gaps.
        PARTS: how many parts of the columns are added one after another, a power of two.
    """
    M: tl.constexpr = own.shape[0]
    N: tl.constexpr = own.shape[1]
    if PARTS > 1:
        left, right = tl.split(tl.permute(tl.reshape(own, (M, 2, N // 2)), (0, 2, 1)))
        add_own(
            left,
            p_y,
            p_slots,
            p_bias,
            rank,
            row,
            column,
            num_rows,
            num_columns,
            slot_elements,
            WORLD,
            PARTS // 2,
        )
        add_own(
            right,
            p_y,
            p_slots,
            p_bias,
            rank,
            row,
            column + N // 2,
            num_rows,
            num_columns,
            slot_elements,
            WORLD,
            PARTS // 2,
        )
    else:
        o_m = row + tl.arange(0, M)
        o_n = column + tl.arange(0, N)
        m_n = o_n < num_columns
        m_inside = (o_m < num_rows)[:, None] & m_n[None, :]
        o_y = o_m.to(tl.int64)[:, None] * num_columns + o_n[None, :]
        # [M, N]
        total = _added(p_slots + o_y, own, m_inside, rank, slot_elements, 0, WORLD)
        if p_bias is not None:
            # [N]
            total += widened(tl.load(p_bias + o_n, mask=m_n, other=0.0))[None, :]
        tl.store(p_y + o_y, total.to(p_y.dtype.element_ty), mask=m_inside)


@jit(do_not_specialize=["num_rows"])
def sum_slots_kernel(
    p_y: tl.tensor,
    p_own: tl.tensor,
    p_bias: tl.tensor,
    control: tl.int64,
    block_offset: tl.int64,
    num_rows: tl.int32,
    num_columns: tl.int32,
    slot_elements: tl.int64,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute y[rows, num_columns] = the peers' slots and own, added, + bias, where every peer has filled its slot."""
    p_control = control_at(control)
    rank = rank_of(p_control)
    p_slots = block_of(p_control, rank, block_offset, p_y.dtype.element_ty)
    num_elements = tl.cast(num_rows, tl.int64) * num_columns
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, num_elements, tl.num_programs(0) * BLOCK):
        o_x = first + tl.arange(0, BLOCK)
        m_x = o_x < num_elements
        # [BLOCK]
        own = tl.load(p_own + o_x, mask=m_x, other=0.0)
        total = _added(p_slots + o_x, own, m_x, rank, slot_elements, 0, WORLD)
        if p_bias is not None:
            total += widened(tl.load(p_bias + o_x % num_columns, mask=m_x, other=0.0))
        tl.store(p_y + o_x, total.to(p_y.dtype.element_ty), mask=m_x)


def num_own_parts(config: MatmulConfig) -> int:
    """Return in how many parts `add_own` adds a tile: of 16 elements per thread, in the interpreter 2.

    With 32 per thread, sm_90 and sm_100 spill 16 to 152 bytes.
    """
    if INTERPRETED:
        return 2
    return max(config.block_m * config.block_n // (32 * config.num_warps * 16), 1)


def launch_sum_slots(
    y: Tensor, own: Tensor, bias: Tensor | None, arena: DeviceArena, slot_elements: int, generation: int
) -> None:
    """Launch y[rows, columns] = what every peer has sent and own, added, + bias, by itself: benchmarks compare with it.

    Args:
        own: [rows, columns], without gaps.
    """
    # It waits for nobody: it may take what others want, for a while.
    programs = max(min(4 * arena.budget(y).num_processors, cdiv(y.numel(), _SUM_ELEMENTS)), 1)
    run(
        sum_slots_kernel,
        (programs,),
        y,
        own,
        None if bias is None else bias.contiguous(),
        arena.address,
        arena.offset_of(generation),
        y.shape[0],
        y.shape[1],
        slot_elements,
        WORLD=arena.world,
        BLOCK=_SUM_ELEMENTS,
        num_warps=8,
    )
