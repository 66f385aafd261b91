"""The Triton kernels of grouped.py, and their launchers, without checks.

    y[R, N] = x_r w_e(r)  (+ x'_r w'_e(r))        grouped_matmul_kernel: w[E, N, K] transposed, or w[E, K, N] as it is
    buffer[e][F, D] += dy_e.T @ x_e               grouped_wgrad_kernel
    y[offsets[E]:] = 0                            zero_rows_kernel, behind a library that leaves these rows unwritten

Tiles of y never cross from one expert's rows to another's. How many an expert has is known on the device alone: each
program adds up the experts' tiles once and finds its own among them. The rows beyond the last expert's are a group of
their own, whose sums are over nothing. The grid is bounded by what the host knows: E + 1 groups of R rows together.

Nothing of other rows is read into an expert's sums: where a block reaches beyond an expert's K, TMA is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.launch import Target, cdiv, dot, jit, num_processors, power_of_2, product_grid, run, target_of, tl
from tpkernels.ops.matmul.configs import MatmulConfig, config_of
from tpkernels.ops.matmul.epilogue import finish
from tpkernels.ops.matmul.kernel import Operand, num_parts
from tpkernels.ops.matmul.tiles import multiply, place


@jit
def tiles_of_groups(
    p_offsets: tl.tensor, num_experts: tl.tensor, num_rows: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
) -> tl.tensor:
    """Return the number of tiles up to each group's last, a block of BLOCK_E.

    Group e is expert e's rows, group num_experts the rows beyond; later ones are empty.
    """
    o_e = tl.arange(0, BLOCK_E)
    # [BLOCK_E]
    b_start = tl.load(p_offsets + o_e, mask=o_e <= num_experts, other=num_rows)
    # [BLOCK_E]
    b_end = tl.load(p_offsets + o_e + 1, mask=o_e < num_experts, other=num_rows)
    return tl.cumsum(tl.cdiv(b_end - b_start, BLOCK_M), 0)


@jit
def group_of_tile(
    i_m: tl.tensor,
    b_tiles: tl.tensor,
    p_offsets: tl.tensor,
    num_experts: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_M: tl.constexpr,
) -> Any:
    """Return the group of a tile of rows, the tile's first row, and the group's end.

    Args:
        b_tiles: of tiles_of_groups. It alone lives as long as the program: start and end are loaded anew.
    """
    m_before = b_tiles <= i_m
    group = tl.sum(m_before.to(tl.int32), 0)
    before = tl.max(tl.where(m_before, b_tiles, 0), 0)
    end = tl.load(p_offsets + group + 1, mask=group < num_experts, other=num_rows)
    return group, tl.load(p_offsets + group) + (i_m - before) * BLOCK_M, end


@jit
def block_of(
    matrix: tl.tensor,
    first: tl.tensor,
    row: tl.tensor,
    end_row: tl.tensor,
    column: tl.tensor,
    end_column: tl.tensor,
    stride: tl.tensor,
    TMA: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return [ROWS, COLUMNS] of a part of a matrix, from the part's `row` and `column` on.

    From end_row and end_column on pointers load zeros, and TMA whatever the matrix holds. tiles.multiply loads by
    itself: for sm_80, a block of A by columns that is transposed once it is loaded is no asynchronous copy.

    Args:
        matrix: a pointer, or a descriptor if TMA; `stride` between rows.
        first: the matrix's row at which the part begins.
    """
    if TMA:
        return matrix.load([first + row, column])
    else:
        o_row, o_column = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        p_block = matrix + (first + o_row).to(tl.int64)[:, None] * stride + o_column[None, :]
        return tl.load(p_block, mask=(o_row < end_row)[:, None] & (o_column < end_column)[None, :], other=0.0)


@jit
def add_product(
    acc: tl.tensor,
    x: tl.tensor,
    w: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    end_row: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    stride_x: tl.tensor,
    stride_w: tl.tensor,
    TRANSPOSED: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return acc + x[row:] times an expert's weight, from `column` on, for one tile.

    Args:
        x: pointer or descriptor of x[R, K]; stride_x between rows.
        w: of w[E * N, K], or if TRANSPOSED of w[E * K, N]: all experts' one below the other; stride_w between rows.
        num_columns: N.
        depth: K, or 0 where nothing is to be added.
    """
    M: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    for i_k in tl.range(0, depth, BLOCK_K):
        # [M, BLOCK_K]
        b_x = block_of(x, 0, row, end_row, i_k, depth, stride_x, TMA_X, M, BLOCK_K)
        # [BLOCK_K, N]
        if TRANSPOSED:
            b_w = block_of(w, expert * depth, i_k, depth, column, num_columns, stride_w, TMA_W, BLOCK_K, N)
        else:
            first = expert * num_columns
            b_w = tl.trans(block_of(w, first, column, num_columns, i_k, depth, stride_w, TMA_W, N, BLOCK_K))
        acc = dot(b_x, b_w, acc)
    return acc


@jit(do_not_specialize=["num_rows", "num_experts", "num_columns", "depth"])
def grouped_matmul_kernel(
    p_y: tl.tensor,
    x: tl.tensor,
    w: tl.tensor,
    also_x: tl.tensor,
    also_w: tl.tensor,
    p_offsets: tl.tensor,
    num_rows: tl.int32,
    num_experts: tl.int32,
    num_columns: tl.int32,
    depth: tl.int32,
    stride_x: tl.int64,
    stride_also: tl.int64,
    stride_w: tl.int64,
    stride_y: tl.int64,
    ALSO: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_ALSO: tl.constexpr,
    TMA_W: tl.constexpr,
    N_BY_16: tl.constexpr,
    K_BY_16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Compute every num_programs-th tile of y per program. N_BY_16 and K_BY_16 are as in matmul_kernel."""
    if N_BY_16:
        num_columns = num_columns // 16 * 16
    if K_BY_16:
        depth = depth // 16 * 16
    b_tiles = tiles_of_groups(p_offsets, num_experts, num_rows, BLOCK_M, BLOCK_E)
    num_m, num_n = tl.max(b_tiles, 0), tl.cdiv(num_columns, BLOCK_N)
    for i_tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        i_m, i_n = place(i_tile, num_m, num_n, GROUP_M)
        expert, row, end_row = group_of_tile(i_m, b_tiles, p_offsets, num_experts, num_rows, BLOCK_M)
        column = i_n * BLOCK_N
        end_depth = tl.where(expert < num_experts, depth, 0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = add_product(
            acc,
            x,
            w,
            expert,
            row,
            column,
            end_row,
            num_columns,
            end_depth,
            stride_x,
            stride_w,
            TRANSPOSED,
            TMA_X,
            TMA_W,
            BLOCK_K,
        )
        if ALSO:
            acc = add_product(
                acc,
                also_x,
                also_w,
                expert,
                row,
                column,
                end_row,
                num_columns,
                end_depth,
                stride_also,
                stride_w,
                TRANSPOSED,
                TMA_ALSO,
                TMA_W,
                BLOCK_K,
            )
        finish(acc, p_y, None, None, row, column, end_row, num_columns, stride_y, 0, False, PARTS)


def launch_grouped_matmul(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    transposed: bool = False,
    also: tuple[Tensor, Tensor] | None = None,
    fixed: bool = False,
    usual_rows: int = 0,
    config: MatmulConfig | None = None,
    processors: int | None = None,
) -> Tensor:
    """Launch y[R, N] of x[R, K] and w[E, N, K], or w[E, K, N] if transposed; with `also` the sum of two products.

    Args:
        x, w: of one of KERNEL_DTYPES; copied if rows of x, or an expert's weight, have gaps.
        also: another x and w of the same shapes and dtype.
        usual_rows: how many rows experts have together as a rule, by which tiles are chosen, so that nothing is
            compiled for those that come; 0 for all rows of x.
        fixed, config, processors: as launch_matmul.

    Returns: y, new and contiguous.
    """
    (num_rows, k), (num_experts, *_) = x.shape, w.shape
    n = w.shape[2] if transposed else w.shape[1]
    y = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    target = target_of(x)
    rows, below = rows_operand(x, target), weights_operand(w, target)
    also_rows, also_below = (
        (rows, below)
        if also is None
        else (
            rows_operand(also[0], target),
            weights_operand(also[1], target),
        )
    )
    operands = (rows, below, also_rows, also_below)
    config = config or config_by_expert(usual_rows or num_rows, n, k, x, num_experts, operands, fixed)
    # A block beyond an expert's K would hold the next expert's weights.
    by_tma = below.by_tma and also_below.by_tma and not (transposed and k % config.block_k)
    below, also_below = below._replace(by_tma=by_tma), also_below._replace(by_tma=by_tma)
    w_block = (config.block_k, config.block_n) if transposed else (config.block_n, config.block_k)
    x_block = (config.block_m, config.block_k)
    run(
        grouped_matmul_kernel,
        grid_of(num_rows, num_experts, n, x, config, processors),
        y,
        rows.argument(*x_block),
        below.argument(*w_block),
        None if also is None else also_rows.argument(*x_block),
        None if also is None else also_below.argument(*w_block),
        offsets,
        num_rows,
        num_experts,
        n,
        k,
        rows.stride,
        also_rows.stride,
        below.stride,
        n,
        ALSO=also is not None,
        TRANSPOSED=transposed,
        TMA_X=rows.by_tma,
        TMA_ALSO=also_rows.by_tma,
        TMA_W=by_tma,
        N_BY_16=n % 16 == 0,
        K_BY_16=k % 16 == 0 and not (rows.by_tma and by_tma),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_E=power_of_2(num_experts + 1),
        GROUP_M=config.group_m,
        PARTS=num_parts(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y


def rows_operand(x: Tensor, target: Target) -> Operand:
    """Return x as a kernel reads it: by rows without gaps, copied if they have some."""
    return Operand.of(x if x.stride(1) == 1 else x.contiguous(), target)


def weights_operand(w: Tensor, target: Target) -> Operand:
    """Return all experts' weights, one below the other, as a matrix; copied if w has gaps."""
    return Operand.of(w.contiguous().flatten(0, 1), target)


def config_by_expert(
    num_rows: int,
    n: int,
    k: int,
    x: Tensor,
    num_experts: int,
    operands: tuple[Operand, ...],
    fixed: bool,
    gated: bool = False,
) -> MatmulConfig:
    """Return the tiles of an expert's product, as if each had the same share of the rows and of the processors."""
    return config_of(
        cdiv(num_rows, num_experts),
        n,
        k,
        x.dtype,
        target_of(x),
        fixed=fixed,
        gated=gated,
        scattered=any(operand.is_scattered for operand in operands),
        num_processors=max(1, num_processors(x) // num_experts),
    )


def grid_of(
    num_rows: int, num_experts: int, n: int, x: Tensor, config: MatmulConfig, processors: int | None
) -> tuple[int]:
    """Return the number of programs: at most as many as fit onto the GPU, or as there may be tiles."""
    if not num_rows:
        return (0,)
    # E + 1 groups, each of which may end with a tile that is not full.
    most_tiles = (num_rows + (num_experts + 1) * (config.block_m - 1)) // config.block_m * cdiv(n, config.block_n)
    return product_grid(x, most_tiles, config.programs_per_processor(x.element_size(), target_of(x)), processors)


@jit(do_not_specialize=["num_out", "num_in", "tiles_per_expert"])
def grouped_wgrad_kernel(
    p_buffer: tl.tensor,
    p_dy: tl.tensor,
    p_x: tl.tensor,
    p_offsets: tl.tensor,
    num_out: tl.int32,
    num_in: tl.int32,
    tiles_per_expert: tl.int32,
    stride_dy: tl.int64,
    stride_x: tl.int64,
    stride_expert: tl.int64,
    OUT_BY_16: tl.constexpr,
    IN_BY_16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Add one tile of one expert's product to its buffer [num_out, num_in] per program; nothing without rows."""
    if OUT_BY_16:
        num_out = num_out // 16 * 16
    if IN_BY_16:
        num_in = num_in // 16 * 16
    expert = tl.program_id(0) // tiles_per_expert
    start, end = tl.load(p_offsets + expert), tl.load(p_offsets + expert + 1)
    if start < end:
        num_m, num_n = tl.cdiv(num_out, BLOCK_M), tl.cdiv(num_in, BLOCK_N)
        i_m, i_n = place(tl.program_id(0) % tiles_per_expert, num_m, num_n, GROUP_M)
        row, column = i_m * BLOCK_M, i_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # Rows are read by pointers, whose masks end with the expert's.
        acc = multiply(
            acc,
            p_dy + start.to(tl.int64) * stride_dy,
            p_x + start.to(tl.int64) * stride_x,
            row,
            column,
            num_out,
            num_in,
            end - start,
            stride_dy,
            stride_x,
            False,
            True,
            False,
            False,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        p_expert = p_buffer + expert.to(tl.int64) * stride_expert
        finish(acc, p_expert, None, None, row, column, num_out, num_in, num_in, 0, True, PARTS)


def launch_grouped_wgrad(
    buffer: Tensor,
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    *,
    fixed: bool = False,
    usual_rows: int = 0,
    config: MatmulConfig | None = None,
) -> None:
    """Launch buffer[e] += dy_e.T @ x_e.

    Args:
        buffer: [E, F, D], any floating-point dtype; added to as a copy if an expert's has gaps.
        dy, x: [R, F] and [R, D] of one of KERNEL_DTYPES; copied if rows have gaps.
        usual_rows: as launch_grouped_matmul.
        fixed, config: as launch_matmul.
    """
    num_experts, num_out, num_in = buffer.shape
    if not buffer[0].is_contiguous():
        dense = buffer.contiguous()
        launch_grouped_wgrad(dense, dy, x, offsets, fixed=fixed, usual_rows=usual_rows, config=config)
        buffer.copy_(dense)
        return
    dy, x = (t if t.stride(1) == 1 else t.contiguous() for t in (dy, x))
    scattered = any(n % 16 for t in (dy, x) for n in (t.stride(0), t.shape[1], t.data_ptr()))
    config = config or config_of(
        num_out,
        num_in,
        cdiv(usual_rows or len(x), num_experts),
        x.dtype,
        target_of(x),
        fixed=fixed,
        scattered=scattered,
        num_processors=max(1, num_processors(x) // num_experts),
    )
    tiles_per_expert = cdiv(num_out, config.block_m) * cdiv(num_in, config.block_n)
    run(
        grouped_wgrad_kernel,
        (num_experts * tiles_per_expert if len(x) else 0,),
        buffer,
        dy,
        x,
        offsets,
        num_out,
        num_in,
        tiles_per_expert,
        dy.stride(0),
        x.stride(0),
        buffer.stride(0),
        OUT_BY_16=num_out % 16 == 0,
        IN_BY_16=num_in % 16 == 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        PARTS=num_parts(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@jit(do_not_specialize=["num_rows", "num_experts", "num_columns"])
def zero_rows_kernel(
    p_y: tl.tensor,
    p_offsets: tl.tensor,
    num_rows: tl.int32,
    num_experts: tl.int32,
    num_columns: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    """Write zeros to every num_programs-th row of y[num_rows, num_columns] from offsets[num_experts] on."""
    o_column = tl.arange(0, BLOCK)
    first = tl.load(p_offsets + num_experts).to(tl.int64)
    for i_row in tl.range(first + tl.program_id(0), num_rows, tl.num_programs(0)):
        p_row = p_y + i_row * num_columns
        for i_column in tl.range(0, num_columns, BLOCK):
            m_inside = i_column + o_column < num_columns
            tl.store(p_row + i_column + o_column, tl.zeros([BLOCK], p_y.dtype.element_ty), mask=m_inside)


def launch_zero_rows(y: Tensor, offsets: Tensor) -> None:
    """Launch y[offsets[E]:] = 0 for a contiguous y[R, N]."""
    run(
        zero_rows_kernel,
        (min(len(y), num_processors(y)),),
        y,
        offsets,
        len(y),
        len(offsets) - 1,
        y.shape[1],
        BLOCK=1024,
        num_warps=4,
    )
