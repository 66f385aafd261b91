"""all-gather + matmul in Triton: this rank's shard is multiplied at once, the others' shards as they arrive.

    y[T, F] = all_gather(x[T/tp, D]) @ m[D, F] + bias

A shard can arrive in two ways:

    pull    `publish_kernel` copies x into this rank's block and tells the peers; their blocks are fetched into
            `gathered`, and a flag is raised after each split: by the copy engine (copies.py), so that no processor
            moves data, or by `fetch_kernel`, one launch instead of three for each peer, where shards are small
    push    for few tokens: the matmul's first items write x into a slot of each peer's block and raise its flag

In both, `gather_matmul_kernel` computes tile after tile: this rank's rows first, read where they are, then those of
rank+1, rank+2, ..., each tile once the flag of its split is up. Data that arrives under a flag is read through pointers
(matmul/tiles.py says why), the matrix by TMA if the target has it.
"""

from __future__ import annotations

from torch import Tensor

from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.fused.configs import exchange_config, launch_options
from tpkernels.launch import cdiv, jit, power_of_2, target_of, tl
from tpkernels.ops.matmul.epilogue import finish
from tpkernels.ops.matmul.kernel import Operand, num_parts
from tpkernels.ops.matmul.tiles import multiply, place
from tpkernels.symmetric.signals_kernel import (
    arrived_line,
    begin,
    block_of,
    claim,
    control_at,
    end_launch,
    epoch_of,
    fetched_line,
    is_last_claim,
    notify,
    published_line,
    rank_of,
    report,
    wait,
    wait_for_epoch,
)

# Elements that a program copies at a time: 16 bytes of bfloat16 per thread of 4 warps, 4 times.
_COPY_ELEMENTS = 4096


@jit
def copy_rows(
    p_from: tl.tensor,
    p_to: tl.tensor,
    row: tl.tensor,
    end_row: tl.tensor,
    num_columns: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Copy rows row to row + BLOCK_ROWS, but none from end_row on; rows have no gaps between them."""
    o_row = row + tl.arange(0, BLOCK_ROWS)
    for i_column in range(0, num_columns, BLOCK_COLUMNS):
        o_column = i_column + tl.arange(0, BLOCK_COLUMNS)
        m_inside = (o_row < end_row)[:, None] & (o_column < num_columns)[None, :]
        # [BLOCK_ROWS, BLOCK_COLUMNS]
        b_x = tl.load(p_from + o_row.to(tl.int64)[:, None] * num_columns + o_column[None, :], mask=m_inside)
        tl.store(p_to + o_row.to(tl.int64)[:, None] * num_columns + o_column[None, :], b_x, mask=m_inside)


@jit(do_not_specialize=["num_rows", "generation", "call"])
def publish_kernel(
    p_x: tl.tensor,
    control: tl.int64,
    block_offset: tl.int64,
    num_rows: tl.int32,
    num_columns: tl.int32,
    generation: tl.int32,
    call: tl.int32,
    WORLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Begin a call: copy x[num_rows, num_columns] into this rank's block and let every peer read it."""
    p_control = control_at(control)
    epoch = begin(p_control, generation, call)
    p_block = block_of(p_control, rank_of(p_control), block_offset, p_x.dtype.element_ty)
    num_items = tl.cdiv(num_rows, BLOCK_ROWS)
    item = -1
    while item < num_items:
        item = claim(p_control)
        if item < num_items:
            copy_rows(p_x, p_block, item * BLOCK_ROWS, num_rows, num_columns, BLOCK_ROWS, BLOCK_COLUMNS)
    if is_last_claim(item, num_items):
        rank = rank_of(p_control)
        for i in range(1, WORLD):
            notify(p_control, (rank + i) % WORLD, published_line(rank), epoch, call)
        end_launch(p_control, epoch, generation)


@jit(
    do_not_specialize=[
        "num_tokens",
        "most",
        "first",
        "piece",
        "split_rows",
        "num_splits",
        "num_sources",
        "generation",
        "call",
    ]
)
def fetch_kernel(
    p_full: tl.tensor,
    control: tl.int64,
    block_offset: tl.int64,
    num_tokens: tl.int32,
    most: tl.int32,
    first: tl.int32,
    piece: tl.int32,
    num_columns: tl.int32,
    split_rows: tl.int32,
    num_splits: tl.int32,
    num_sources: tl.int32,
    generation: tl.int32,
    call: tl.int32,
    WORLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Fetch rows first to first + piece of every peer's shard into full[num_tokens, num_columns], as copy engines do.

    It runs beside the kernel that waits for its flags, and after publish_kernel, so it draws no numbers: program p
    takes splits p, p + programs, ... of the peers in turn, those of rank+1 first.

    Args:
        most, block_offset, split_rows: as gather_matmul_kernel's.
        num_sources: WORLD - 1 peers, or WORLD: this rank's own rows too, last.
    """
    p_control = control_at(control)
    epoch = epoch_of(p_control, generation)
    rank = rank_of(p_control)
    for item in range(tl.program_id(0), num_sources * num_splits, tl.num_programs(0)):
        source = (rank + 1 + item // num_splits) % WORLD
        split = item % num_splits
        if source != rank:
            wait(p_control, source, published_line(source), epoch, call)
        num_rows = max(min(min(num_tokens - source * most, most) - first, piece), 0)
        p_block = block_of(p_control, source, block_offset, p_full.dtype.element_ty)
        p_rows = p_full + (source * most + first).to(tl.int64) * num_columns
        end_row = min((split + 1) * split_rows, num_rows)
        for row in range(split * split_rows, end_row, BLOCK_ROWS):
            copy_rows(p_block, p_rows, row, end_row, num_columns, BLOCK_ROWS, BLOCK_COLUMNS)
        if source != rank:
            notify(p_control, rank, fetched_line(source, split), epoch, call)
    # A peer may have given up, run on and raised its flag with garbage. It poisoned the group before that.
    report(p_control)


@jit
def rows_at(address: tl.tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """Return a pointer to rows at an address.

    If ALIGNED, the address is a multiple of 16. The compiler must be told, or it moves one element at a time.
    """
    p_rows = address.to(tl.int64).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        p_rows = tl.multiple_of(p_rows, 16)
    return p_rows


@jit(do_not_specialize=["num_tokens", "most", "first", "piece", "split_rows", "num_splits", "generation", "call"])
def gather_matmul_kernel(
    p_y: tl.tensor,
    p_bias: tl.tensor,
    b: tl.tensor,
    control: tl.int64,
    own: tl.int64,
    others: tl.int64,
    num_tokens: tl.int32,
    most: tl.int32,
    first: tl.int32,
    piece: tl.int32,
    num_columns: tl.int32,
    depth: tl.int32,
    stride_b: tl.int64,
    shard_stride: tl.int64,
    block_offset: tl.int64,
    split_rows: tl.int32,
    num_splits: tl.int32,
    generation: tl.int32,
    call: tl.int32,
    WORLD: tl.constexpr,
    HOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
    TMA_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    PUSH_COLUMNS: tl.constexpr,
) -> None:
    """Multiply rows first to first + piece of every shard by b, each tile once its rows have arrived.

    Args:
        p_y: [num_tokens, num_columns], without gaps.
        own: the address of this rank's rows of the piece.
        others: the address after which the other ranks' rows lie, those of rank s at s * shard_stride elements. Both
            are addresses, not tensors, because what lies there changes during the launch (signals_kernel.control_at).
            There are no gaps between rows.
        ALIGNED: whether all rows begin at multiples of 16 bytes.
        most: the rows of a full shard; the last shards may have fewer.
        block_offset: where this generation's data begins in each rank's memory, in bytes.
        split_rows: the rows under one flag, a multiple of BLOCK_M.
        HOW: how the other ranks' rows come: "pull" by the copy engine or fetch_kernel, "push" by these launches; or
            they are already "there".
    """
    PUSH: tl.constexpr = HOW == "push"
    p_control = control_at(control)
    epoch = epoch_of(p_control, generation)
    if PUSH:
        epoch = begin(p_control, generation, call)
    rank = rank_of(p_control)
    p_own = rows_at(own, p_y.dtype.element_ty, ALIGNED)
    own_rows = max(min(min(num_tokens - rank * most, most) - first, piece), 0)
    num_pushes = num_splits * (WORLD - 1) if PUSH else 0
    num_m = tl.cdiv(piece, BLOCK_M)
    num_n = tl.cdiv(num_columns, BLOCK_N)
    num_items = num_pushes + WORLD * num_m * num_n
    item = -1
    while item < num_items:
        item = claim(p_control)
        if item < num_items:
            if item < num_pushes:
                peer = (rank + 1 + item // num_splits) % WORLD
                split = item % num_splits
                p_slot = block_of(p_control, peer, block_offset, p_y.dtype.element_ty) + rank * shard_stride
                end_row = min((split + 1) * split_rows, own_rows)
                for row in range(split * split_rows, end_row, PUSH_ROWS):
                    copy_rows(p_own, p_slot, row, end_row, depth, PUSH_ROWS, PUSH_COLUMNS)
                notify(p_control, peer, arrived_line(rank, split), epoch, call)
            else:
                i_shard = (item - num_pushes) // (num_m * num_n)
                source = (rank + i_shard) % WORLD
                i_m, i_n = place((item - num_pushes) % (num_m * num_n), num_m, num_n, GROUP_M)
                row, column = i_m * BLOCK_M, i_n * BLOCK_N
                num_rows = max(min(min(num_tokens - source * most, most) - first, piece), 0)
                if row < num_rows:
                    if source != rank:
                        if HOW == "pull":
                            wait_for_epoch(p_control, source, fetched_line(source, row // split_rows), epoch, call)
                        if PUSH:
                            wait(p_control, source, arrived_line(source, row // split_rows), epoch, call)
                    shard_bytes = shard_stride * p_y.dtype.element_ty.primitive_bitwidth // 8
                    p_a = rows_at(
                        own if source == rank else others + source * shard_bytes, p_y.dtype.element_ty, ALIGNED
                    )
                    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                    acc = multiply(
                        acc,
                        p_a,
                        b,
                        row,
                        column,
                        num_rows,
                        num_columns,
                        depth,
                        depth,
                        stride_b,
                        True,
                        B_BY_ROWS,
                        False,
                        TMA_B,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                    )
                    p_rows = p_y + (source * most + first).to(tl.int64) * num_columns
                    finish(acc, p_rows, p_bias, None, row, column, num_rows, num_columns, num_columns, 0, False, PARTS)
    if is_last_claim(item, num_items):
        if PUSH:
            for i in range(1, WORLD):
                source = (rank + i) % WORLD
                for split in range(num_splits):
                    wait(p_control, source, arrived_line(source, split), epoch, call)
        end_launch(p_control, epoch, generation)


def launch_publish(x: Tensor, arena: DeviceArena, generation: int, call: int) -> None:
    """Begin a call: copy x[rows, columns] into this rank's block, then tell the peers."""
    key = "publish", x.shape, generation, arena.processors, arena.reserved_processors
    if arena.launches.again(key, call, x):
        return
    block_columns = min(power_of_2(x.shape[1]), 4096)
    block_rows = max(_COPY_ELEMENTS // block_columns, 1)
    programs = arena.budget(x).programs(cdiv(x.shape[0], block_rows))
    arena.launches.first(
        key,
        {"p_x": x},
        publish_kernel,
        (programs,),
        x,
        arena.address,
        arena.offset_of(generation),
        x.shape[0],
        x.shape[1],
        generation,
        call,
        WORLD=arena.world,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        num_warps=4,
    )


def launch_fetch(
    full: Tensor,
    arena: DeviceArena,
    num_tokens: int,
    first: int,
    piece: int,
    split_rows: int,
    generation: int,
    call: int,
    *,
    keep_own: bool,
) -> None:
    """Fetch rows first to first + piece of every peer's shard into full[num_tokens, columns]; as fetch_kernel's."""
    columns = full.shape[1]
    key = "fetch", num_tokens, first, piece, columns, split_rows, generation, keep_own
    if arena.launches.again(key, call, full):
        return
    num_splits, num_sources = max(cdiv(piece, split_rows), 1), arena.world - 1 + keep_own
    block_columns = min(power_of_2(columns), 4096)
    # Without a limit ptxas gives it 32 for sm_80, and spills. With more, fewer programs fit beside the matmul's.
    limit = {"maxnreg": 64} if target_of(full).backend == "cuda" else {}
    arena.launches.first(
        key,
        {"p_full": full},
        fetch_kernel,
        (num_sources * num_splits,),
        full,
        arena.address,
        arena.offset_of(generation),
        num_tokens,
        cdiv(num_tokens, arena.world),
        first,
        piece,
        columns,
        split_rows,
        num_splits,
        num_sources,
        generation,
        call,
        WORLD=arena.world,
        BLOCK_ROWS=max(_COPY_ELEMENTS // block_columns, 1),
        BLOCK_COLUMNS=block_columns,
        num_warps=4,
        **limit,
    )


def launch_gather_matmul(
    y: Tensor,
    x: Tensor,
    others: Tensor,
    shard_stride: int,
    matrix: Tensor,
    bias: Tensor | None,
    arena: DeviceArena,
    num_tokens: int,
    first: int,
    piece: int,
    split_rows: int,
    generation: int,
    call: int,
    how: str,
) -> None:
    """Multiply rows first to first + piece of every shard by a matrix; arguments as gather_matmul_kernel's.

    Args:
        x: this rank's rows of the piece, without gaps.
        others: starts with the other ranks' rows of the piece; shards are shard_stride elements apart.
    """
    columns, depth = matrix.shape[1], matrix.shape[0]
    bias = None if bias is None else bias.contiguous()
    sizes = matrix.shape, matrix.stride(), x.shape, shard_stride, num_tokens, first, piece, split_rows
    key = "gather_matmul", how, generation, arena.processors, arena.reserved_processors, *sizes
    values = y, bias, matrix, x.data_ptr(), others.data_ptr()
    # A matrix with gaps in both dims is copied, below.
    if 1 in matrix.stride() and arena.launches.again(key, call, *values):
        return
    target = target_of(x)
    most = cdiv(num_tokens, arena.world)
    config = exchange_config(
        most, columns, depth, arena.world, x.dtype, target, reserved=arena.reserved_processors, beside_copies=True
    )
    assert split_rows % config.block_m == 0, f"{split_rows} rows per flag, {config.block_m} per tile"
    right = Operand.of(matrix, target)
    # At least one, since every peer must be notified, even if there are no rows.
    num_splits = max(cdiv(piece, split_rows), 1)
    tiles = arena.world * cdiv(piece, config.block_m) * cdiv(columns, config.block_n)
    item = x.element_size()
    aligned = all(n % 16 == 0 for n in (x.data_ptr(), others.data_ptr(), depth * item, shard_stride * item))
    programs = arena.budget(x).programs(tiles, config.programs_per_processor(item, target), beside_copies=True)
    block_columns = min(power_of_2(depth), 2048)
    arena.launches.first(
        key,
        {"p_y": y, "p_bias": bias, "b": matrix, "own": x.data_ptr(), "others": others.data_ptr()},
        gather_matmul_kernel,
        (programs,),
        y,
        bias,
        right.argument(config.block_k, config.block_n),
        arena.address,
        x.data_ptr(),
        others.data_ptr(),
        num_tokens,
        cdiv(num_tokens, arena.world),
        first,
        piece,
        columns,
        depth,
        right.stride,
        shard_stride,
        arena.offset_of(generation),
        split_rows,
        num_splits,
        generation,
        call,
        WORLD=arena.world,
        HOW=how,
        ALIGNED=aligned,
        B_BY_ROWS=right.by_rows,
        TMA_B=right.by_tma,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        PARTS=num_parts(config),
        PUSH_ROWS=max(_COPY_ELEMENTS // block_columns, 1),
        PUSH_COLUMNS=block_columns,
        **launch_options(config, item, target),
    )
