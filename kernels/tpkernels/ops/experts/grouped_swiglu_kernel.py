"""The Triton kernel of grouped_swiglu.py: gate and up of an expert's rows, and their SwiGLU before anything is stored.

    gate_r[F], up_r[F] = x_r w_gate_e(r).T, x_r w_up_e(r).T        y[R, 2F] = (gate, up) side by side, if asked for
    h[R, F] = silu(gate) * up

As matmul/swiglu_kernel.py, with tiles that end where an expert's rows end (grouped_kernel.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.launch import dot, jit, power_of_2, run, target_of, tl
from tpkernels.ops.experts.grouped_kernel import (
    block_of,
    config_by_expert,
    grid_of,
    group_of_tile,
    rows_operand,
    tiles_of_groups,
    weights_operand,
)
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.ops.matmul.kernel import num_parts
from tpkernels.ops.matmul.swiglu_kernel import finish_pair
from tpkernels.ops.matmul.tiles import place


@jit
def _multiply_pair(
    gate: tl.tensor,
    up: tl.tensor,
    x: tl.tensor,
    w_gate: tl.tensor,
    w_up: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    end_row: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    stride_x: tl.tensor,
    stride_w: tl.tensor,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    """Return (gate, up) plus their products over `depth`; columns from num_columns on hold arbitrary values."""
    M: tl.constexpr = gate.shape[0]
    N: tl.constexpr = gate.shape[1]
    first = expert * num_columns
    for i_k in tl.range(0, depth, BLOCK_K):
        # [M, BLOCK_K]
        b_x = block_of(x, 0, row, end_row, i_k, depth, stride_x, TMA_X, M, BLOCK_K)
        # [N, BLOCK_K] twice
        b_gate = block_of(w_gate, first, column, num_columns, i_k, depth, stride_w, TMA_W, N, BLOCK_K)
        b_up = block_of(w_up, first, column, num_columns, i_k, depth, stride_w, TMA_W, N, BLOCK_K)
        gate = dot(b_x, tl.trans(b_gate), gate)
        up = dot(b_x, tl.trans(b_up), up)
    return gate, up


@jit(do_not_specialize=["num_rows", "num_experts", "num_columns", "depth"])
def grouped_swiglu_kernel(
    p_h: tl.tensor,
    p_y: tl.tensor,
    x: tl.tensor,
    w_gate: tl.tensor,
    w_up: tl.tensor,
    p_offsets: tl.tensor,
    num_rows: tl.int32,
    num_experts: tl.int32,
    num_columns: tl.int32,
    depth: tl.int32,
    stride_x: tl.int64,
    stride_w: tl.int64,
    TMA_X: tl.constexpr,
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
    """Compute every num_programs-th tile of h per program; p_y may be None. Constants as grouped_matmul_kernel."""
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
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        gate, up = _multiply_pair(
            gate,
            up,
            x,
            w_gate,
            w_up,
            expert,
            row,
            column,
            end_row,
            num_columns,
            tl.where(expert < num_experts, depth, 0),
            stride_x,
            stride_w,
            TMA_X,
            TMA_W,
            BLOCK_K,
        )
        finish_pair(gate, up, p_h, p_y, row, column, end_row, num_columns, "silu", PARTS)


def launch_grouped_swiglu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    offsets: Tensor,
    keeps_y: bool,
    *,
    fixed: bool = False,
    usual_rows: int = 0,
    config: MatmulConfig | None = None,
    processors: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch h[R, F] = silu(x_r w_gate_e(r).T) * (x_r w_up_e(r).T); without checks.

    Args:
        x, w_gate, w_up: of one of KERNEL_DTYPES; copied if rows of x, or an expert's weight, have gaps.
        keeps_y: whether y[R, 2F] is stored too.
        usual_rows: as launch_grouped_matmul.
        fixed, config, processors: as launch_matmul.

    Returns: h and y; y has no elements if it is not stored.
    """
    (num_rows, k), (num_experts, n, _) = x.shape, w_gate.shape
    h = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    y = torch.empty((num_rows, 2 * n) if keeps_y else 0, dtype=x.dtype, device=x.device)
    target = target_of(x)
    rows, gates, ups = rows_operand(x, target), weights_operand(w_gate, target), weights_operand(w_up, target)
    operands = rows, gates, ups
    config = config or config_by_expert(usual_rows or num_rows, n, k, x, num_experts, operands, fixed, gated=True)
    by_tma = gates.by_tma and ups.by_tma
    gates, ups = gates._replace(by_tma=by_tma), ups._replace(by_tma=by_tma)
    run(
        grouped_swiglu_kernel,
        grid_of(num_rows, num_experts, n, x, config, processors),
        h,
        y if keeps_y else None,
        rows.argument(config.block_m, config.block_k),
        gates.argument(config.block_n, config.block_k),
        ups.argument(config.block_n, config.block_k),
        offsets,
        num_rows,
        num_experts,
        n,
        k,
        rows.stride,
        gates.stride,
        TMA_X=rows.by_tma,
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
    return h, y
