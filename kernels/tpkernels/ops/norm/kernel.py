"""The Triton kernels of operator.py, which has the equations, and their launchers.

A forward program has some rows. A backward program has more, one block of rows after another: it reads the weight
once, loads the next blocks while it computes one, adds its part of dw and db in registers, and writes one partial row.
A second kernel adds the partial rows. How many rows a program has depends only on their total number, not on the GPU's
processors, and so does the order of the sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.launch import Target, accumulation_dtype, cdiv, jit, power_of_2, run, target_of, tl, widened


@jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    p_x: tl.tensor,
    p_residual: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    p_total: tl.tensor,
    p_mean: tl.tensor,
    p_rstd: tl.tensor,
    num_rows: tl.int64,
    num_columns: tl.int32,
    stride_x: tl.int64,
    stride_residual: tl.int64,
    EPS: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Normalise BLOCK_ROWS rows per program; p_bias, and p_residual together with p_total, may be None."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_column = tl.arange(0, BLOCK_COLUMNS)
    m_row, m_column = o_row < num_rows, o_column < num_columns
    m_inside = m_row[:, None] & m_column[None, :]
    o_dense = o_row[:, None] * num_columns + o_column[None, :]
    # [BLOCK_ROWS, BLOCK_COLUMNS]
    b_x = tl.load(p_x + o_row[:, None] * stride_x + o_column[None, :], mask=m_inside, other=0.0)
    b_total = widened(b_x)
    if p_residual is not None:
        # [BLOCK_ROWS, BLOCK_COLUMNS]
        b_residual = tl.load(
            p_residual + o_row[:, None] * stride_residual + o_column[None, :], mask=m_inside, other=0.0
        )
        # Normalise the rounded sum, as it is stored: backward reads only the stored one.
        b_sum = (b_total + widened(b_residual)).to(b_x.dtype)
        tl.store(p_total + o_dense, b_sum, mask=m_inside)
        b_total = widened(b_sum)
    if CENTERED:
        mean = tl.sum(b_total, axis=1) / num_columns
        tl.store(p_mean + o_row, mean, mask=m_row)
        b_total = tl.where(m_column[None, :], b_total - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(b_total * b_total, axis=1) / num_columns + EPS)
    tl.store(p_rstd + o_row, rstd, mask=m_row)
    # [BLOCK_COLUMNS]
    b_weight = widened(tl.load(p_weight + o_column, mask=m_column, other=0.0))
    b_y = b_total * rstd[:, None] * b_weight[None, :]
    if p_bias is not None:
        # [BLOCK_COLUMNS]
        b_y += widened(tl.load(p_bias + o_column, mask=m_column, other=0.0))[None, :]
    tl.store(p_y + o_dense, b_y.to(b_x.dtype), mask=m_inside)


@jit(do_not_specialize=["num_chunk_rows", "programs_per_chunk", "rows_per_program"])
def _norm_backward_kernel(
    p_dy: tl.tensor,
    p_dtotal: tl.tensor,
    p_total: tl.tensor,
    p_weight: tl.tensor,
    p_mean: tl.tensor,
    p_rstd: tl.tensor,
    p_dx: tl.tensor,
    p_dw: tl.tensor,
    p_db: tl.tensor,
    num_chunk_rows: tl.int64,
    programs_per_chunk: tl.int32,
    rows_per_program: tl.int32,
    num_columns: tl.int32,
    stride_dy: tl.int64,
    stride_dtotal: tl.int64,
    stride_total: tl.int64,
    CENTERED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Write dx of rows_per_program rows of one chunk per program, and one row of p_dw and of p_db.

    A program takes BLOCK_ROWS rows at a time, which divides rows_per_program, and loads LOOP_STAGES - 1 blocks ahead.
    Wide rows are divided into NUM_SPLITS blocks of columns, and each block belongs to a program of its own. That
    program also reads the other blocks, but only for the rows' means. p_db may be None, and so may p_dtotal, the
    gradient that reaches total from its other use.
    """
    i_split = tl.program_id(0) % NUM_SPLITS
    i_program = (tl.program_id(0) // NUM_SPLITS).to(tl.int64)
    i_chunk, i_part = i_program // programs_per_chunk, i_program % programs_per_chunk
    first = i_part * rows_per_program
    o_own = i_split * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # [BLOCK_COLUMNS]
    b_own_weight = widened(tl.load(p_weight + o_own, mask=o_own < num_columns, other=0.0))
    b_dw = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], p_dw.dtype.element_ty)
    b_db = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], p_dw.dtype.element_ty)
    for step in tl.range(0, rows_per_program, BLOCK_ROWS, num_stages=LOOP_STAGES):
        o_chunk_row = first + step + tl.arange(0, BLOCK_ROWS)
        m_row = o_chunk_row < num_chunk_rows
        o_row = i_chunk * num_chunk_rows + o_chunk_row
        rstd = tl.load(p_rstd + o_row, mask=m_row, other=0.0)
        sum_gh = tl.zeros_like(rstd)
        sum_g = tl.zeros_like(rstd)
        for i in tl.static_range(1, NUM_SPLITS + 1):  # the last is the program's own block, used below
            if i == NUM_SPLITS:
                o_column = o_own
                b_weight = b_own_weight
            else:
                o_column = (i_split + i) % NUM_SPLITS * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
                # [BLOCK_COLUMNS], again for every block of rows: all of them kept would take too many registers
                b_weight = widened(tl.load(p_weight + o_column, mask=o_column < num_columns, other=0.0))
            m_inside = m_row[:, None] & (o_column < num_columns)[None, :]
            # [BLOCK_ROWS, BLOCK_COLUMNS]
            b_total = tl.load(p_total + o_row[:, None] * stride_total + o_column[None, :], mask=m_inside, other=0.0)
            # [BLOCK_ROWS, BLOCK_COLUMNS]
            b_dy = tl.load(p_dy + o_row[:, None] * stride_dy + o_column[None, :], mask=m_inside, other=0.0)
            b_h, b_dy = widened(b_total), widened(b_dy)
            if CENTERED:
                mean = tl.load(p_mean + o_row, mask=m_row, other=0.0)
                b_h = tl.where(m_inside, b_h - mean[:, None], 0.0)
            b_h *= rstd[:, None]
            b_g = b_dy * b_weight[None, :]
            sum_gh += tl.sum(b_g * b_h, axis=1)
            sum_g += tl.sum(b_g, axis=1)
        b_dx = b_g - b_h * (sum_gh / num_columns)[:, None]
        if CENTERED:
            b_dx -= (sum_g / num_columns)[:, None]
        b_dx *= rstd[:, None]
        if p_dtotal is not None:
            # [BLOCK_ROWS, BLOCK_COLUMNS]
            b_dx += widened(
                tl.load(p_dtotal + o_row[:, None] * stride_dtotal + o_own[None, :], mask=m_inside, other=0.0)
            )
        o_dense = o_row[:, None] * num_columns + o_own[None, :]
        tl.store(p_dx + o_dense, b_dx.to(p_dx.dtype.element_ty), mask=m_inside)
        # The rows of a block are added behind the loop: here that would be an exchange between warps for each block.
        b_dw += b_dy * b_h
        if p_db is not None:
            b_db += b_dy
    tl.store(p_dw + i_program * num_columns + o_own, tl.sum(b_dw, axis=0), mask=o_own < num_columns)
    if p_db is not None:
        tl.store(p_db + i_program * num_columns + o_own, tl.sum(b_db, axis=0), mask=o_own < num_columns)


@jit(do_not_specialize=["num_parts"])
def _sum_parts_kernel(
    p_parts: tl.tensor,
    p_sum: tl.tensor,
    num_parts: tl.int32,
    num_columns: tl.int32,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Sum parts[chunk, num_parts, num_columns] over num_parts, in an order that depends only on num_parts."""
    o_column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    m_column = o_column < num_columns
    i_chunk = tl.program_id(1).to(tl.int64)
    b_sum = tl.zeros([BLOCK_PARTS, BLOCK_COLUMNS], p_sum.dtype.element_ty)
    for first in range(0, num_parts, BLOCK_PARTS):
        o_part = first + tl.arange(0, BLOCK_PARTS)
        m_inside = (o_part < num_parts)[:, None] & m_column[None, :]
        o_parts = (i_chunk * num_parts + o_part)[:, None] * num_columns + o_column[None, :]
        # [BLOCK_PARTS, BLOCK_COLUMNS]
        b_sum += tl.load(p_parts + o_parts, mask=m_inside, other=0.0)
    tl.store(p_sum + i_chunk * num_columns + o_column, tl.sum(b_sum, axis=0), mask=m_column)


def _block(num_columns: int, elements: int, elements_per_warp: int) -> dict[str, int]:
    """Return one to 16 rows, of about `elements` elements together, for 4 to 16 warps. Not tuned on a GPU yet."""
    columns = power_of_2(num_columns)
    rows = min(16, max(1, elements // columns))
    return {
        "BLOCK_ROWS": rows,
        "BLOCK_COLUMNS": columns,
        "num_warps": min(16, max(4, power_of_2(rows * columns // elements_per_warp))),
    }


def launch_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the operator tpkernels::norm with its kernel."""
    y, total, mean, rstd = empty_outputs(x, residual, centered)
    num_rows, num_columns = x.shape
    x, residual = _rows_without_gaps(x), None if residual is None else _rows_without_gaps(residual)
    block = _block(num_columns, 2048, 1024)
    run(
        _norm_kernel,
        (cdiv(num_rows, block["BLOCK_ROWS"]),),
        x,
        residual,
        weight.contiguous(),
        bias if bias is None else bias.contiguous(),
        y,
        total if residual is not None else None,
        mean if centered else None,
        rstd,
        num_rows,
        num_columns,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        EPS=eps,
        CENTERED=centered,
        **block,
    )
    return y, total, mean, rstd


class BackwardConfig(NamedTuple):
    """How a program of the backward kernel goes through its rows.

    Attributes:
        block_bytes: of one operand that a program takes at a time: whole rows, or a block of a wide row's columns.
        elements_per_warp: of such a block; half as many with a bias, whose gradient has sums of its own.
        num_stages: blocks in shared memory at most, of which all but one are loaded ahead; 1 loads into registers.
        most_programs: among which the rows of a chunk are divided, 64 rows each at most; the order of dw's sum.
    """

    block_bytes: int = 8192
    elements_per_warp: int = 512
    num_stages: int = 3
    most_programs: int = 256


def backward_config(target: Target) -> BackwardConfig:
    """Return the configuration of a target; no GPU has timed them yet.

    Memory is kept busy by what is on its way: 26 KB per processor of an H200 (4.3 TB/s, 0.8 us). Two programs of 8
    warps have three operands of two blocks each on their way, 96 KB at most, where one row loaded when the last one was
    done were 16 KB: 61 % of a copy's bandwidth. AMD's have 64 KB of shared memory: there blocks go into registers.
    """
    return BackwardConfig(num_stages=1) if target.backend == "hip" else BackwardConfig()


def launch_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_chunks: int,
    centered: bool,
    has_bias: bool,
    config: BackwardConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the operator tpkernels::norm_backward with its kernels.

    Args:
        config: for benchmarks; None for that of the target.
    """
    num_rows, num_columns = total.shape
    chunk_rows = num_rows // num_chunks
    config = config or backward_config(target_of(total))
    # The values read and the sums (one row or two) must fit into registers, beside the columns of other blocks.
    num_splits = cdiv(num_columns, 4096 if has_bias or num_columns > 8192 else 8192)
    columns = power_of_2(cdiv(num_columns, num_splits))
    rows = min(16, max(1, config.block_bytes // (columns * total.element_size())))
    # What is loaded ahead must fit into shared memory: of each block total and dy, and the other gradient.
    stage_bytes = (2 * num_splits + (dtotal is not None)) * rows * columns * total.element_size()
    num_stages = max(1, min(config.num_stages, target_of(total).shared_memory_bytes // stage_bytes))
    # So many programs per chunk, with 64 rows each if possible: then partial rows are 1 to 4 % of the bytes moved.
    fewest, most = (power_of_2(cdiv(chunk_rows, programs)) for programs in (2048, config.most_programs))
    rows_per_program = max(rows, fewest, min(64, most))
    num_parts = cdiv(chunk_rows, rows_per_program)
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    parts = torch.empty(1 + has_bias, num_chunks, num_parts, num_columns, dtype=rstd.dtype, device=dx.device)
    sums = torch.empty(1 + has_bias, num_chunks, num_columns, dtype=rstd.dtype, device=dx.device)
    dy, total = _rows_without_gaps(dy), _rows_without_gaps(total)
    dtotal = None if dtotal is None else _rows_without_gaps(dtotal)
    run(
        _norm_backward_kernel,
        (num_splits * num_chunks * num_parts,),
        dy,
        dtotal,
        total,
        weight.contiguous(),
        mean if centered else None,
        rstd,
        dx,
        parts[0],
        parts[1] if has_bias else None,
        chunk_rows,
        num_parts,
        rows_per_program,
        num_columns,
        dy.stride(0),
        0 if dtotal is None else dtotal.stride(0),
        total.stride(0),
        CENTERED=centered,
        NUM_SPLITS=num_splits,
        LOOP_STAGES=num_stages,
        BLOCK_ROWS=rows,
        BLOCK_COLUMNS=columns,
        num_warps=min(16, max(4, power_of_2((1 + has_bias) * rows * columns // config.elements_per_warp))),
    )
    # 32 columns per program: many programs, each of which waits for memory once or twice.
    run(
        _sum_parts_kernel,
        (cdiv(num_columns, 32), (1 + has_bias) * num_chunks),
        parts,
        sums,
        num_parts,
        num_columns,
        BLOCK_PARTS=128,
        BLOCK_COLUMNS=32,
        num_warps=4,
    )
    return dx, sums


def _rows_without_gaps(x: Tensor) -> Tensor:
    """Return x, or a copy of it, without gaps between columns; rows may have any stride."""
    return x if x.stride(1) == 1 else x.contiguous()


def empty_outputs(x: Tensor, residual: Tensor | None, centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty y, total, mean, rstd; total without a residual, and mean if not centered, have no elements."""
    wide = accumulation_dtype(x.dtype)
    rows = x.new_empty(x.shape[0], dtype=wide)
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        torch.empty_like(rows) if centered else x.new_empty(0, dtype=wide),
        rows,
    )
