"""The end of a matmul's tile, as device functions: add to the sum, round once, store.

All additions are in float32. A tile is finished in parts of its columns if the added values would not fit into
registers beside the whole tile.
"""

from __future__ import annotations

from tpkernels.launch import jit, tl, widened


@jit
def finish(
    acc: tl.tensor,
    p_c: tl.tensor,
    p_bias: tl.tensor,
    p_residual: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    stride_c: tl.tensor,
    stride_residual: tl.tensor,
    ACCUMULATE: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Add bias, residual and the old C to acc, as far as they are given, and store it from C[row, column] on.

    Args:
        p_bias: [num_columns], or None.
        p_residual: [num_rows, num_columns] with stride_residual between rows, or None.
        ACCUMULATE: add to C.
        PARTS: how many parts of the columns are finished one after another, a power of two.
    """
    M: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    if PARTS > 1:
        left, right = tl.split(tl.permute(tl.reshape(acc, (M, 2, N // 2)), (0, 2, 1)))
        finish(
            left,
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
            PARTS // 2,
        )
        finish(
            right,
            p_c,
            p_bias,
            p_residual,
            row,
            column + N // 2,
            num_rows,
            num_columns,
            stride_c,
            stride_residual,
            ACCUMULATE,
            PARTS // 2,
        )
    else:
        o_m = row + tl.arange(0, M)
        o_n = column + tl.arange(0, N)
        m_n = o_n < num_columns
        m_inside = (o_m < num_rows)[:, None] & m_n[None, :]
        if p_bias is not None:
            # [N]
            acc += widened(tl.load(p_bias + o_n, mask=m_n, other=0.0))[None, :]
        if p_residual is not None:
            p_added = p_residual + o_m.to(tl.int64)[:, None] * stride_residual + o_n[None, :]
            # [M, N]
            acc += widened(tl.load(p_added, mask=m_inside, other=0.0))
        p_tile = p_c + o_m.to(tl.int64)[:, None] * stride_c + o_n[None, :]
        if ACCUMULATE:
            # [M, N]
            acc += widened(tl.load(p_tile, mask=m_inside, other=0.0))
        tl.store(p_tile, acc.to(p_c.dtype.element_ty), mask=m_inside)


@jit
def rounded(
    acc: tl.tensor,
    p_addend: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    stride_addend: tl.tensor,
    DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Return a tile acc + the addend from p_addend[row, column] on, if there is one, rounded to DTYPE.

    Args:
        p_addend: [num_rows, num_columns] with stride_addend between rows, or None.
        PARTS: in how many parts of the columns it is added, a power of two.
    """
    M: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    if p_addend is None:
        return acc.to(DTYPE)
    elif PARTS > 1:
        left, right = tl.split(tl.permute(tl.reshape(acc, (M, 2, N // 2)), (0, 2, 1)))
        left = rounded(left, p_addend, row, column, num_rows, num_columns, stride_addend, DTYPE, PARTS // 2)
        middle = column + N // 2
        right = rounded(right, p_addend, row, middle, num_rows, num_columns, stride_addend, DTYPE, PARTS // 2)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (M, N))
    else:
        o_m = row + tl.arange(0, M)
        o_n = column + tl.arange(0, N)
        m_inside = (o_m < num_rows)[:, None] & (o_n < num_columns)[None, :]
        p_added = p_addend + o_m.to(tl.int64)[:, None] * stride_addend + o_n[None, :]
        # [M, N]
        return (acc + widened(tl.load(p_added, mask=m_inside, other=0.0))).to(DTYPE)
