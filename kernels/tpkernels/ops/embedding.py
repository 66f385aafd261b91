"""The embedding lookup, and its gradient: rows of a table added up by token in a fixed order.

    y[T, D] = weight[rows]                                         zeros where a row is not in the table
    dw[V, D]: dw[rows[t]] += dy[t] for every t                     in the order of the tokens

With a vocabulary-sharded table every rank has weight[V/tp, D] and all tokens' rows minus its first row. Rows of other
ranks are outside [0, V/tp) and are ignored, so y is partial(tp). Nothing is compacted, because that would need the
host.

Backward sorts the rows stably, so that a row's tokens are adjacent: a segment. The sorted order is cut into pieces of
32. A program adds the part of one segment that is in one piece, token after token. If that is the whole segment, it
adds the sum to the table. If the segment continues beyond the piece, the sum is partial, and goes to one of the piece's
two places: the first if the segment starts with the piece, else the second. Those places are again a sorted order,
which the next level treats in the same way; the last level is one piece. Text is skewed, and padding even more. With
levels a row of T tokens takes log(T) times 32 additions, not T.

The decision a reader will question: there is one program per token, and most programs find that their token begins
nothing, and end. One program per segment would need the number of segments on the host. And tokens are added one by
one, never by tl.sum, whose order depends on the block and the target: so a sum has the same bits on every GPU.

Source: sorting and partial sums as in torch's embedding_dense_backward (EmbeddingBackwardKernel.cu); sums that cross a
piece's end as in Merrill and Garland, "Merge-based parallel sparse matrix-vector multiplication", SC 2016.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.launch import (
    accumulation_dtype,
    as_operator,
    by_triton,
    cdiv,
    jit,
    only_if,
    power_of_2,
    run,
    tl,
    widened,
)

# Sequential additions per piece. The partial sums are at most 2 in 32 of the gradient's rows.
_PIECE = 32
_MOST_ROWS = 2**31 - 2


def embedding_reference(rows: Tensor, weight: Tensor) -> Tensor:
    """Return y in weight's dtype, for a table with at least one row: the specification."""
    inside = (rows >= 0) & (rows < len(weight))
    return torch.where(inside[..., None], F.embedding(rows.clamp(0, len(weight) - 1), weight), 0)


def embedding_backward_reference(buffer: Tensor, rows: Tensor, dy: Tensor) -> Tensor:
    """Return what embedding_backward_ leaves in the buffer, in the buffer's dtype: the specification."""
    inside = (rows >= 0) & (rows < len(buffer))
    return buffer.index_add(0, rows[inside], dy[inside].to(buffer.dtype))


@jit(do_not_specialize=["num_rows"])
def _embedding_kernel(
    p_rows: tl.tensor,
    p_weight: tl.tensor,
    p_y: tl.tensor,
    num_rows: tl.int64,
    num_columns: tl.int32,
    stride_weight: tl.int64,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Copy BLOCK_COLUMNS columns of one token's row per program; zeros if the table does not have the row."""
    i_token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    m_column = o_column < num_columns
    i_row = tl.load(p_rows + i_token).to(tl.int64)
    m_inside = only_if((i_row >= 0) & (i_row < num_rows), m_column)
    # [BLOCK_COLUMNS]
    b_weight = tl.load(p_weight + i_row * stride_weight + o_column, mask=m_inside, other=0.0)
    tl.store(p_y + i_token * num_columns + o_column, b_weight, mask=m_column)


@jit(do_not_specialize=["num_places", "num_rows"])
def _add_segments_kernel(
    p_rows: tl.tensor,
    p_tokens: tl.tensor,
    p_x: tl.tensor,
    p_next_rows: tl.tensor,
    p_next_x: tl.tensor,
    p_buffer: tl.tensor,
    num_places: tl.int64,
    num_rows: tl.int64,
    num_columns: tl.int32,
    stride_x: tl.int64,
    stride_buffer: tl.int64,
    STRIDE_BUFFER_COLUMN: tl.constexpr,
    PIECE: tl.constexpr,
    UNROLLED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Add the part of a segment that begins at one place of the sorted order: BLOCK_COLUMNS columns per program.

    The part ends where its piece ends. A program ends at once if no part begins at its place. On the first level
    p_tokens holds the token of each place, and x is the gradient. On later levels p_tokens is None, and x is what the
    previous level left in p_next_x.
    """
    i_place = tl.program_id(0).to(tl.int64)
    i_piece = i_place // PIECE
    first = i_piece * PIECE
    last = tl.minimum(first + PIECE, num_places) - 1
    i_row = tl.load(p_rows + i_place)
    if tl.program_id(1) == 0:
        tl.store(p_next_rows + 2 * i_piece, i_row, mask=i_place == first)
        tl.store(p_next_rows + 2 * i_piece + 1, i_row, mask=i_place == last)
    i_row_before = tl.load(p_rows + i_place - 1, mask=i_place > 0, other=-1)
    if (i_row >= 0) & (i_row < num_rows) & ((i_place == first) | (i_row_before != i_row)):
        o_place = first + tl.arange(0, PIECE)
        # [PIECE]
        b_rows = tl.load(p_rows + o_place, mask=o_place <= last, other=-1)
        end = i_place + tl.sum(((b_rows == i_row) & (o_place >= i_place)).to(tl.int32), axis=0)
        i_row_behind = tl.load(p_rows + end, mask=end < num_places, other=-1)
        whole = (i_row_before != i_row) & (i_row_behind != i_row)
        # After the first level, a segment that lies within the two places of one earlier piece was whole in that
        # piece: the level before has already added it to the table.
        done = whole & (i_place // 2 == (end - 1) // 2) & (p_tokens is None)
        if not done:
            o_column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
            m_column = o_column < num_columns
            b_sum = tl.zeros([BLOCK_COLUMNS], p_next_x.dtype.element_ty)
            for start in range(i_place, end, UNROLLED):
                for i in tl.static_range(UNROLLED):
                    i_from = start + i
                    m_from = i_from < end
                    if p_tokens is not None:
                        i_from = tl.load(p_tokens + i_from, mask=m_from, other=0)
                    else:
                        # If both places of an earlier piece have the same row, only the first holds a sum.
                        i_row_beside = tl.load(p_rows + i_from - 1, mask=m_from & (i_from % 2 == 1), other=-1)
                        m_from = m_from & (i_row_beside != i_row)
                    # [BLOCK_COLUMNS]
                    b_x = tl.load(p_x + i_from * stride_x + o_column, mask=only_if(m_from, m_column), other=0.0)
                    b_sum += widened(b_x)
            if whole:
                o_buffer = i_row.to(tl.int64) * stride_buffer + o_column.to(tl.int64) * STRIDE_BUFFER_COLUMN
                # [BLOCK_COLUMNS]
                b_sum += widened(tl.load(p_buffer + o_buffer, mask=m_column, other=0.0))
                tl.store(p_buffer + o_buffer, b_sum.to(p_buffer.dtype.element_ty), mask=m_column)
            else:
                i_next = 2 * i_piece + (i_place != first)
                tl.store(p_next_x + i_next * num_columns + o_column, b_sum, mask=m_column)


def _block(num_columns: int) -> dict[str, int]:
    """Return the columns per program, for four warps: 16 bytes per thread in 16 bits. Not tuned on a GPU yet."""
    return {"BLOCK_COLUMNS": min(1024, power_of_2(num_columns)), "num_warps": 4}


def launch_embedding(rows: Tensor, weight: Tensor) -> Tensor:
    """Run the operator tpkernels::embedding with its kernel."""
    num_rows, num_columns = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    y = weight.new_empty(len(rows), num_columns)
    block = _block(num_columns)
    grid = (len(rows), cdiv(num_columns, block["BLOCK_COLUMNS"]))
    run(_embedding_kernel, grid, rows.contiguous(), weight, y, num_rows, num_columns, weight.stride(0), **block)
    return y


def launch_embedding_backward_(buffer: Tensor, rows: Tensor, dy: Tensor) -> None:
    """Run the operator tpkernels::embedding_backward_ with its kernel, one launch per level."""
    num_rows, num_columns = buffer.shape
    # int32 halves the bytes to sort; rows of other ranks become -1 and num_rows.
    sorted_rows, order = rows.clamp(-1, num_rows).to(torch.int32).sort(stable=True)
    tokens: Tensor | None = order
    x = dy if dy.stride(1) == 1 else dy.contiguous()
    block = _block(num_columns)
    while len(sorted_rows):
        num_places, num_pieces = len(sorted_rows), cdiv(len(sorted_rows), _PIECE)
        next_rows = torch.empty(2 * num_pieces, dtype=torch.int32, device=dy.device)
        next_x = torch.empty(2 * num_pieces, num_columns, dtype=accumulation_dtype(dy.dtype), device=dy.device)
        run(
            _add_segments_kernel,
            (num_places, cdiv(num_columns, block["BLOCK_COLUMNS"])),
            sorted_rows,
            tokens,
            x,
            next_rows,
            next_x,
            buffer,
            num_places,
            num_rows,
            num_columns,
            x.stride(0),
            buffer.stride(0),
            STRIDE_BUFFER_COLUMN=buffer.stride(1),
            PIECE=_PIECE,
            UNROLLED=4,
            **block,
        )
        if num_pieces == 1:
            break
        sorted_rows, tokens, x = next_rows, None, next_x


def _on_host(rows: Tensor, weight: Tensor) -> Tensor:
    inside = (rows >= 0) & (rows < len(weight))
    if inside.all():
        return weight.index_select(0, rows)
    y = weight.new_zeros(len(rows), weight.shape[1])
    y[inside] = weight[rows[inside]]
    return y


def _backward_on_host_(buffer: Tensor, rows: Tensor, dy: Tensor) -> None:
    inside = (rows >= 0) & (rows < len(buffer))
    if not inside.all():
        rows, dy = rows[inside], dy[inside]
    wide = dy.to(accumulation_dtype(dy.dtype))
    if buffer.dtype == wide.dtype:
        buffer.index_add_(0, rows, wide)
        return
    touched, places = rows.unique(return_inverse=True)
    sums = buffer[touched].to(wide.dtype).index_add_(0, places, wide)
    buffer.index_copy_(0, touched, sums.to(buffer.dtype))


def _lookup(rows: Tensor, weight: Tensor) -> Tensor:
    return (launch_embedding if by_triton(weight) else _on_host)(rows, weight)


def _add_rows_(buffer: Tensor, rows: Tensor, dy: Tensor) -> None:
    (launch_embedding_backward_ if by_triton(dy) else _backward_on_host_)(buffer, rows, dy)


@torch.library.custom_op("tpkernels::embedding", mutates_args=())
def embedding_op(rows: Tensor, weight: Tensor) -> Tensor:
    """Return y for flat rows."""
    return _lookup(rows, weight)


@embedding_op.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("tpkernels::embedding_backward_", mutates_args=("buffer",))
def embedding_backward_op_(buffer: Tensor, rows: Tensor, dy: Tensor) -> None:
    """Run embedding_backward_ for flat rows."""
    _add_rows_(buffer, rows, dy)


@embedding_backward_op_.register_fake
def _(buffer: Tensor, rows: Tensor, dy: Tensor) -> None:
    return None


def embedding_forward(rows: Tensor, weight: Tensor) -> Tensor:
    """Return y[T, D] for rows[T]; for the forward of a Function, without checks."""
    return (embedding_op if as_operator(weight) else _lookup)(rows, weight)


def add_rows_(buffer: Tensor, rows: Tensor, dy: Tensor) -> None:
    """Run embedding_backward_ for rows[T] and dy[T, D]; for the backward of a Function, without checks."""
    if as_operator(buffer):
        embedding_backward_op_(buffer, rows, dy)
        return
    _add_rows_(buffer, rows, dy)
    # Autograd does not notice what a kernel writes.
    torch.autograd.graph.increment_version(buffer)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    rows, weight = inputs
    ctx.save_for_backward(rows)
    ctx.shape = weight.shape


@differentiable_once
def _backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
    dweight = dy.new_zeros(ctx.shape)
    embedding_backward_op_(dweight, ctx.saved_tensors[0], dy)
    return None, dweight


embedding_op.register_autograd(_backward, setup_context=_setup_context)


def check_rows_and_table(rows: Tensor, table: Tensor, name: str) -> None:
    of_rows, of_table = rows.dtype in (torch.int32, torch.int64), table.dim() == 2 and table.is_floating_point()
    if not of_rows or not of_table or len(table) > _MOST_ROWS:
        raise ValueError(
            f"an embedding takes int32 or int64 rows of a {name}[V, D] of floating-point numbers, V to {_MOST_ROWS}: "
            f"rows {rows.dtype}, {name} {tuple(table.shape)} {table.dtype}: convert the rows, pass a matrix"
        )


def embedding(rows: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of a table; a row that the table does not have gives zeros.

        y[T, D] = weight[rows[T]]
        dw[V, D]: dw[rows[t]] += dy[t]

    With a vocabulary-sharded table weight[V/tp, D], and rows minus the shard's first row, y is partial(tp).

    Args:
        rows: [...] of int32 or int64, any strides, also outside [0, V).
        weight: [V, D], floating point, any strides.

    Returns:
        [..., D] of weight's dtype, new and contiguous.

    Raises:
        ValueError: dtypes or shapes that do not fit.

    Cost: forward reads and writes one row per token. Backward writes zeros to all of dw, then does embedding_backward_;
    a caller with a gradient buffer saves the zeros and the addition.
    Numerics: forward is exact; backward as embedding_backward_.
    Source: see the module.
    """
    check_rows_and_table(rows, weight, "weight")
    refuse_tangents("embedding", weight)
    y: Tensor = embedding_op(rows.reshape(-1), weight)
    return y.view(*rows.shape, weight.shape[1])


def embedding_backward_(buffer: Tensor, rows: Tensor, dy: Tensor) -> Tensor:
    """Accumulate the gradient of an embedding in place.

        buffer[rows[t]] += dy[t] for every t                       rows outside [0, V) are ignored

    Args:
        buffer: [V, D], of dy's dtype or its accumulation dtype, any strides.
        rows: [...] of int32 or int64, any strides; may repeat.
        dy: [..., D], floating point, any strides.

    Returns:
        buffer.

    Raises:
        ValueError: dtypes or shapes that do not fit.

    Cost: for tokens whose rows are inside, reads dy once and reads and writes each row of the buffer once; sorts T
    numbers of 4 bytes; extra memory about 32 bytes and D/15 numbers of the accumulation dtype per token. Nothing waits
    for the host. A CPU uses torch's index_add_.
    Numerics: a row's tokens are added in float32, or float64 for float64, then added to the buffer, and rounded once.
    Deterministic and equal on every GPU: tokens are added in their order, in a tree that depends on T and the rows
    only. The result is the same however the vocabulary is cut, because rows outside also have places in that order.
    Source: see the module.
    """
    check_rows_and_table(rows, buffer, "buffer")
    fits = dy.shape == (*rows.shape, buffer.shape[1]) and buffer.dtype in (dy.dtype, accumulation_dtype(dy.dtype))
    if not fits:
        raise ValueError(
            f"dw[V, D] += dy[T, D] at rows[T] needs dw of dy's dtype or {accumulation_dtype(dy.dtype)}: "
            f"dw {tuple(buffer.shape)} {buffer.dtype}, rows {tuple(rows.shape)}, dy {tuple(dy.shape)} {dy.dtype}: "
            "pass dy and rows of one lookup, or convert dw"
        )
    embedding_backward_op_(buffer, rows.reshape(-1), dy.reshape(rows.numel(), buffer.shape[1]))
    return buffer
