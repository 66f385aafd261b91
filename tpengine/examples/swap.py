"""Exchange and scale in one kernel: y[T, D/tp] = all_to_all(x[T/tp, D] * scale[D]), this rank's columns of all tokens.

An operator of your own: a kernel and its launcher, over tpkernels' signals. kernels/tpkernels/fused/README.md explains
the numbered lines and the protocol, and lists what a public operator needs besides.
"""

from __future__ import annotations

from torch import Tensor
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.launch import cdiv, jit, power_of_2, run, tl
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
    rank_of,
    wait,
)


@jit(do_not_specialize=["num_rows", "generation", "call"])
def swap_kernel(
    p_y: tl.tensor,
    p_x: tl.tensor,
    p_scale: tl.tensor,
    control: tl.int64,
    block_offset: tl.int64,
    slot_elements: tl.int64,
    num_rows: tl.int32,
    width: tl.int32,
    generation: tl.int32,
    call: tl.int32,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Send columns r of x[num_rows, WORLD * width] * scale to rank r; what arrives is y[WORLD * num_rows, width]."""
    p_control = control_at(control)
    epoch = begin(p_control, generation, call)  # 1
    rank = rank_of(p_control)
    num_tiles = max(tl.cdiv(num_rows, ROWS), 1)  # 2
    num_items = 2 * WORLD * num_tiles
    item = -1
    while item < num_items:
        item = claim(p_control)
        if item < num_items:
            peer = (rank + 1 + item // num_tiles) % WORLD
            o_row = (item % num_tiles * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
            o_column = tl.arange(0, COLUMNS)[None, :]
            m_tile = (o_row < num_rows) & (o_column < width)
            if item < WORLD * num_tiles:  # 3
                # [ROWS, COLUMNS], [1, COLUMNS]
                b_x = tl.load(p_x + o_row * (WORLD * width) + peer * width + o_column, mask=m_tile).to(tl.float32)
                b_scale = tl.load(p_scale + peer * width + o_column, mask=o_column < width).to(tl.float32)
                p_slot = block_of(p_control, peer, block_offset, p_x.dtype.element_ty) + rank * slot_elements
                tl.store(p_slot + o_row * width + o_column, (b_x * b_scale).to(p_x.dtype.element_ty), mask=m_tile)
                if count_done(p_control, peer, num_tiles):
                    notify(p_control, peer, arrived_line(rank, 0), epoch, call)
            else:  # 4
                wait(p_control, peer, arrived_line(peer, 0), epoch, call)
                p_slot = block_of(p_control, rank, block_offset, p_x.dtype.element_ty) + peer * slot_elements
                # [ROWS, COLUMNS]
                b_y = tl.load(p_slot + o_row * width + o_column, mask=m_tile)
                tl.store(p_y + (peer * num_rows + o_row) * width + o_column, b_y, mask=m_tile)
    if is_last_claim(item, num_items):  # 5
        end_launch(p_control, epoch, generation)


def swap(x: Tensor, scale: Tensor, arena: DeviceArena) -> Tensor:
    """Return y for x[T/tp, D], contiguous, of equal size on all ranks, D a multiple of tp; x must fit into a slot."""
    num_rows, width = x.shape[0], x.shape[1] // arena.world
    assert num_rows * width * x.element_size() <= arena.slot_bytes, "x must fit into a slot: exchange it in pieces"

    y = x.new_empty(arena.world * num_rows, width)
    generation, call = arena.begin("swap", "pushes", num_rows, x.shape[1], x.dtype, 0)
    columns = power_of_2(width)
    rows = max(2048 // columns, 1)
    programs = arena.budget(x).programs(arena.world * max(cdiv(num_rows, rows), 1))
    run(
        swap_kernel, (programs,), y, x, scale, arena.address, arena.offset_of(generation),
        arena.slot_bytes // x.element_size(), num_rows, width, generation, call,
        WORLD=arena.world, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return y
