"""The Triton kernel of operator.py's matmul, and its launcher, which the engine and fused operators call directly.

    C[M, N] = A[M, K] @ B[K, N] + bias[N] + residual[M, N]
    C[M, N] += A[M, K] @ B[K, N]                                     accumulating, in float32, C in the operands' dtype
                                                                     or wider

Persistent: as many programs as fit onto the GPU, each computing tiles of C one after another (tiles.py). Beside other
communication there is a program for each tile: processors.py says why, and why no numbers are drawn from a counter. The
inner loop covers all of K, so nothing is added by atomics, and the order of a sum depends on K only, not on the grid.

TMA loads an operand if the target has it and the operand's rows begin at multiples of 16 bytes; else pointers do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.launch import Target, cdiv, jit, num_processors, product_grid, run, target_of, tl
from tpkernels.ops.matmul.configs import MatmulConfig, config_of
from tpkernels.ops.matmul.epilogue import finish
from tpkernels.ops.matmul.tiles import described, may_be_described, multiply, place
from tpkernels.ops.matmul.tuned import tuned_config

# Dtypes of the kernels; in float64 a GPU's own library is as good.
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@jit(do_not_specialize=["num_rows", "num_columns", "depth"])
def matmul_kernel(
    p_c: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    p_bias: tl.tensor,
    p_residual: tl.tensor,
    num_rows: tl.int32,
    num_columns: tl.int32,
    depth: tl.int32,
    stride_a: tl.int64,
    stride_b: tl.int64,
    stride_c: tl.int64,
    stride_residual: tl.int64,
    ACCUMULATE: tl.constexpr,
    A_BY_ROWS: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    M_BY_16: tl.constexpr,
    N_BY_16: tl.constexpr,
    K_BY_16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
) -> None:
    """Compute every num_programs-th tile of C per program.

    a and b are as in tiles.multiply; p_bias and p_residual may be None. M_BY_16, N_BY_16 and K_BY_16 state that a size
    is a multiple of 16: in a dim without gaps one mask then holds for 16 bytes, and loads take as many at once. The
    launcher states it only where that matters: elsewhere, another number of tokens must not compile another kernel.
    """
    if M_BY_16:
        num_rows = num_rows // 16 * 16
    if N_BY_16:
        num_columns = num_columns // 16 * 16
    if K_BY_16:
        depth = depth // 16 * 16
    num_m, num_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    for i_tile in tl.range(
        tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=False, warp_specialize=WARP_SPECIALIZE
    ):
        i_m, i_n = place(i_tile, num_m, num_n, GROUP_M)
        row, column = i_m * BLOCK_M, i_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = multiply(
            acc,
            a,
            b,
            row,
            column,
            num_rows,
            num_columns,
            depth,
            stride_a,
            stride_b,
            A_BY_ROWS,
            B_BY_ROWS,
            TMA_A,
            TMA_B,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        finish(
            acc,
            p_c,
            p_bias,
            p_residual,
            row,
            column,
            num_rows,
            num_columns,
            stride_c,
            stride_residual,
            ACCUMULATE,
            PARTS,
        )


class Operand(NamedTuple):
    """A matrix as a kernel reads it.

    Attributes:
        lines: its rows or its columns, whichever have no gaps, as rows.
        by_rows: whether the lines are its rows.
        by_tma: whether TMA reads it; else pointers do.
    """

    lines: Tensor
    by_rows: bool
    by_tma: bool

    @classmethod
    def of(cls, matrix: Tensor, target: Target) -> Operand:
        """Return a matrix as an operand; copied if both its dims have gaps."""
        if matrix.stride(1) != 1 and matrix.stride(0) != 1:
            matrix = matrix.clone(memory_format=torch.contiguous_format)
        by_rows = matrix.stride(1) == 1
        lines = matrix if by_rows else matrix.T
        # Overlapping lines, as of an expanded tensor, are read by pointers.
        return cls(lines, by_rows, may_be_described(lines, target) and lines.stride(0) >= lines.shape[1])

    def argument(self, block_rows: int, block_columns: int) -> Any:
        """Return the kernel argument for reading blocks: a descriptor, or the tensor for its pointer."""
        block = (block_rows, block_columns) if self.by_rows else (block_columns, block_rows)
        return described(self.lines, block) if self.by_tma else self.lines

    @property
    def stride(self) -> int:
        """Return the distance between lines in elements, for pointers."""
        return 0 if self.by_tma else self.lines.stride(0)

    @property
    def is_scattered(self) -> bool:
        """Return whether pointers must read it element by element, because lines begin or end anywhere."""
        lines = self.lines
        return not self.by_tma and any(n % 16 for n in (lines.stride(0), lines.shape[1], lines.data_ptr()))


def num_parts(config: MatmulConfig) -> int:
    """Return in how many parts a tile is finished: with 64 sums or more per thread, added values would spill."""
    return 4 if config.block_m * config.block_n >= 64 * 32 * config.num_warps else 1


def launch_matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
    fixed: bool = False,
    config: MatmulConfig | None = None,
    processors: int | None = None,
) -> Tensor:
    """Launch C[M, N] = A[M, K] @ B[K, N] + bias[N] + residual[M, N]; without checks.

    Args:
        a, b: of one of KERNEL_DTYPES, any strides; copied if both dims have gaps.
        bias, residual: any floating-point dtype.
        out: where C is written, any floating-point dtype; default a new tensor.
        accumulate: add to `out` instead of writing it.
        dtype: of a new C; default a's.
        fixed: use the configuration that is the same for all sizes.
        config: use this one; `warp_specialize` is passed on if triton can compile it.
        processors: how many processors its programs share; None: all, or a program for each tile if others may hold
            some (launch.product_grid).

    Returns: C; `out` if given.
    """
    (m, k), n = a.shape, b.shape[1]
    if out is None:
        out = torch.empty(m, n, dtype=dtype or a.dtype, device=a.device)
    elif out.stride(1) != 1 and n > 1:
        dense = out.contiguous() if accumulate else torch.empty(m, n, dtype=out.dtype, device=out.device)
        launch_matmul(
            a,
            b,
            bias=bias,
            residual=residual,
            out=dense,
            accumulate=accumulate,
            fixed=fixed,
            config=config,
            processors=processors,
        )
        return out.copy_(dense)
    target = target_of(a)
    left, right = Operand.of(a, target), Operand.of(b, target)
    if config is None:
        scattered = left.is_scattered or right.is_scattered
        config = None if fixed or scattered else tuned_config(a, n, left.by_rows, right.by_rows, accumulate)
        config = config or config_of(
            m, n, k, a.dtype, target, fixed=fixed, scattered=scattered, num_processors=num_processors(a)
        )
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    num_tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    run(
        matmul_kernel,
        product_grid(a, num_tiles, config.programs_per_processor(a.element_size(), target), processors),
        out,
        left.argument(config.block_m, config.block_k),
        right.argument(config.block_k, config.block_n),
        None if bias is None else bias.contiguous(),
        residual,
        m,
        n,
        k,
        left.stride,
        right.stride,
        out.stride(0),
        0 if residual is None else residual.stride(0),
        ACCUMULATE=accumulate,
        A_BY_ROWS=left.by_rows,
        B_BY_ROWS=right.by_rows,
        TMA_A=left.by_tma,
        TMA_B=right.by_tma,
        M_BY_16=m % 16 == 0 and not (left.by_tma or left.by_rows),
        N_BY_16=n % 16 == 0,
        K_BY_16=k % 16 == 0 and ((left.by_rows and not left.by_tma) or not (right.by_tma or right.by_rows)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        PARTS=num_parts(config),
        WARP_SPECIALIZE=config.warp_specialize and config.may_specialize and left.by_tma and right.by_tma,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
