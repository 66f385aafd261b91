"""The Triton kernel of swiglu.py: two products of the same x, gate and up, and their SwiGLU before anything is stored.

    gate[T, F], up[T, F] = x[T, D] @ weight[2F, D].T               y[T, 2F] = (gate, up) side by side, if asked for
    h[T, F] = act(gate) * up                                       act: silu, gelu or gelu_tanh (GeGLU)

A program has the same columns of gate and up in two sums, and reads x once for both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.launch import cdiv, dot, jit, num_processors, product_grid, run, target_of, tl
from tpkernels.ops.activation import activated
from tpkernels.ops.matmul.configs import MatmulConfig, config_of
from tpkernels.ops.matmul.kernel import Operand, num_parts
from tpkernels.ops.matmul.tiles import place


@jit
def _multiply_pair(
    gate: tl.tensor,
    up: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    stride_x: tl.tensor,
    stride_weight: tl.tensor,
    TMA_X: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    """Return (gate, up) plus their products over all of K; columns from num_columns on hold arbitrary values."""
    o_m = row + tl.arange(0, BLOCK_M)
    o_n = column + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < num_rows, o_n < num_columns
    for i_k in tl.range(0, depth, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < depth
        # [BLOCK_M, BLOCK_K]
        if TMA_X:
            b_x = x.load([row, i_k])
        else:
            p_x = x + o_m.to(tl.int64)[:, None] * stride_x + o_k[None, :]
            b_x = tl.load(p_x, mask=m_m[:, None] & m_k[None, :], other=0.0)
        # [BLOCK_N, BLOCK_K] twice
        if TMA_WEIGHT:
            b_gate = weight.load([column, i_k])
            b_up = weight.load([num_columns + column, i_k])
        else:
            p_gate = weight + o_n.to(tl.int64)[:, None] * stride_weight + o_k[None, :]
            m_weight = m_n[:, None] & m_k[None, :]
            b_gate = tl.load(p_gate, mask=m_weight, other=0.0)
            b_up = tl.load(p_gate + num_columns.to(tl.int64) * stride_weight, mask=m_weight, other=0.0)
        gate = dot(b_x, tl.trans(b_gate), gate)
        up = dot(b_x, tl.trans(b_up), up)
    return gate, up


@jit
def finish_pair(
    gate: tl.tensor,
    up: tl.tensor,
    p_h: tl.tensor,
    p_y: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Store h, and also gate and up if p_y is not None; in PARTS parts of the columns, one after another."""
    M: tl.constexpr = gate.shape[0]
    N: tl.constexpr = gate.shape[1]
    if PARTS > 1:
        left_gate, right_gate = tl.split(tl.permute(tl.reshape(gate, (M, 2, N // 2)), (0, 2, 1)))
        left_up, right_up = tl.split(tl.permute(tl.reshape(up, (M, 2, N // 2)), (0, 2, 1)))
        finish_pair(left_gate, left_up, p_h, p_y, row, column, num_rows, num_columns, KIND, PARTS // 2)
        finish_pair(right_gate, right_up, p_h, p_y, row, column + N // 2, num_rows, num_columns, KIND, PARTS // 2)
    else:
        o_m = (row + tl.arange(0, M)).to(tl.int64)
        o_n = column + tl.arange(0, N)
        m_inside = (o_m < num_rows)[:, None] & (o_n < num_columns)[None, :]
        o_h = o_m[:, None] * num_columns + o_n[None, :]
        dtype: tl.constexpr = p_h.dtype.element_ty
        if p_y is not None:
            p_gate = p_y + o_h + o_m[:, None] * num_columns
            tl.store(p_gate, gate.to(dtype), mask=m_inside)
            tl.store(p_gate + num_columns, up.to(dtype), mask=m_inside)
        tl.store(p_h + o_h, (activated(gate, KIND) * up).to(dtype), mask=m_inside)


@jit(do_not_specialize=["num_rows", "num_columns", "depth"])
def matmul_swiglu_kernel(
    p_h: tl.tensor,
    p_y: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    num_rows: tl.int32,
    num_columns: tl.int32,
    depth: tl.int32,
    stride_x: tl.int64,
    stride_weight: tl.int64,
    TMA_X: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    N_BY_16: tl.constexpr,
    K_BY_16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Compute every num_programs-th tile of h per program.

    The rows of x and weight have no gaps; p_y may be None. N_BY_16 and K_BY_16 are as in matmul_kernel.
    """
    if N_BY_16:
        num_columns = num_columns // 16 * 16
    if K_BY_16:
        depth = depth // 16 * 16
    num_m, num_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    for i_tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        i_m, i_n = place(i_tile, num_m, num_n, GROUP_M)
        row, column = i_m * BLOCK_M, i_n * BLOCK_N
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        gate, up = _multiply_pair(
            gate,
            up,
            x,
            weight,
            row,
            column,
            num_rows,
            num_columns,
            depth,
            stride_x,
            stride_weight,
            TMA_X,
            TMA_WEIGHT,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        finish_pair(gate, up, p_h, p_y, row, column, num_rows, num_columns, KIND, PARTS)


def launch_matmul_swiglu(
    x: Tensor,
    weight: Tensor,
    keeps_y: bool,
    *,
    kind: str = "silu",
    fixed: bool = False,
    config: MatmulConfig | None = None,
    processors: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch h[T, F] = SwiGLU of x[T, D] and weight[2F, D]; without checks.

    Args:
        x, weight: of one dtype of KERNEL_DTYPES, any strides; copied if rows have gaps.
        keeps_y: whether y[T, 2F] is stored too.
        kind: of the gate's activation, as activation.py.
        fixed, config, processors: as launch_matmul.

    Returns: h and y; y has no elements if it is not stored.
    """
    (m, k), n = x.shape, len(weight) // 2
    h = torch.empty(m, n, dtype=x.dtype, device=x.device)
    y = torch.empty((m, 2 * n) if keeps_y else 0, dtype=x.dtype, device=x.device)
    target = target_of(x)
    rows, columns = (Operand.of(_with_dense_rows(matrix), target) for matrix in (x, weight))
    if config is None:
        scattered = rows.is_scattered or columns.is_scattered
        config = config_of(
            m, n, k, x.dtype, target, fixed=fixed, gated=True, scattered=scattered, num_processors=num_processors(x)
        )
    num_tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    run(
        matmul_swiglu_kernel,
        product_grid(x, num_tiles, 8 // config.num_warps, processors),
        h,
        y if keeps_y else None,
        rows.argument(config.block_m, config.block_k),
        columns.argument(config.block_n, config.block_k),
        m,
        n,
        k,
        rows.stride,
        columns.stride,
        TMA_X=rows.by_tma,
        TMA_WEIGHT=columns.by_tma,
        N_BY_16=n % 16 == 0,
        K_BY_16=k % 16 == 0 and not (rows.by_tma and columns.by_tma),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        KIND=kind,
        PARTS=num_parts(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return h, y


def _with_dense_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.clone(memory_format=torch.contiguous_format)
