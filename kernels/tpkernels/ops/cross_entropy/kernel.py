"""The Triton kernels of operator.py, which has the equations, and their launchers.

One kernel reduces a shard's rows to four numbers each, by an online softmax over blocks of columns: it reads a
vocabulary of any size once. The other overwrites each block of logits with its gradient. Neither adds across programs.
"""

from __future__ import annotations

from torch import Tensor

from tpkernels.launch import accumulation_dtype, cdiv, jit, power_of_2, run, tl, widened

# The label of tokens that are ignored.
IGNORED_LABEL = -100


@jit(do_not_specialize=["num_rows", "first_column"])
def _partials_kernel(
    p_logits: tl.tensor,
    p_labels: tl.tensor,
    p_partials: tl.tensor,
    num_rows: tl.int64,
    num_columns: tl.int32,
    first_column: tl.int64,
    stride_logits: tl.int64,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Reduce BLOCK_ROWS rows per program to four numbers each, BLOCK_COLUMNS columns at a time."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_row = o_row < num_rows
    p_row = p_logits + o_row * stride_logits
    row_max = tl.full([BLOCK_ROWS], float("-inf"), p_partials.dtype.element_ty)
    row_sum = tl.zeros([BLOCK_ROWS], p_partials.dtype.element_ty)
    # Kept per column, and summed over the columns once, after the loop.
    b_logit_sum = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], p_partials.dtype.element_ty)
    for first in range(0, num_columns, BLOCK_COLUMNS):
        o_column = first + tl.arange(0, BLOCK_COLUMNS)
        m_inside = m_row[:, None] & (o_column < num_columns)[None, :]
        # [BLOCK_ROWS, BLOCK_COLUMNS]
        b_z = widened(tl.load(p_row[:, None] + o_column[None, :], mask=m_inside, other=float("-inf")))
        b_logit_sum += tl.where(m_inside, b_z, 0.0)
        largest = tl.maximum(row_max, tl.max(b_z, axis=1))
        # Where a row has so far held only -inf, -inf - -inf would be NaN: shift by 0 instead.
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        row_sum = row_sum * tl.exp(row_max - shift) + tl.sum(tl.exp(b_z - shift[:, None]), axis=1)
        row_max = largest
    # [BLOCK_ROWS]
    label = tl.load(p_labels + o_row, mask=m_row, other=-1) - first_column
    m_mine = m_row & (label >= 0) & (label < num_columns)  # an ignored label is negative in every shard
    # [BLOCK_ROWS]
    target = widened(tl.load(p_row + label, mask=m_mine, other=0.0))
    tl.store(p_partials + o_row, row_max, mask=m_row)
    tl.store(p_partials + num_rows + o_row, row_sum, mask=m_row)
    tl.store(p_partials + 2 * num_rows + o_row, target, mask=m_row)
    tl.store(p_partials + 3 * num_rows + o_row, tl.sum(b_logit_sum, axis=1), mask=m_row)


@jit(do_not_specialize=["num_rows", "first_column", "vocab_size"])
def _gradient_kernel(
    p_logits: tl.tensor,
    p_labels: tl.tensor,
    p_max: tl.tensor,
    p_exp_sum: tl.tensor,
    p_slopes: tl.tensor,
    num_rows: tl.int64,
    num_columns: tl.int32,
    all_columns: tl.int32,
    first_column: tl.int64,
    vocab_size: tl.int64,
    stride_logits: tl.int64,
    IGNORED: tl.constexpr,
    ON_TARGET: tl.constexpr,
    ON_OTHERS: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Overwrite one block of the logits per program with its gradient; padding gets 0.

    Columns num_columns to all_columns are padding. ON_TARGET and ON_OTHERS are the target probabilities of the label's
    column and of every other column; label smoothing makes them differ from 1 and 0.
    """
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    m_row = o_row < num_rows
    # [BLOCK_ROWS], four times
    label = tl.load(p_labels + o_row, mask=m_row, other=IGNORED)
    row_max = tl.load(p_max + o_row, mask=m_row, other=0.0)
    exp_sum = tl.load(p_exp_sum + o_row, mask=m_row, other=1.0)
    slope = tl.load(p_slopes + o_row, mask=m_row, other=0.0)
    # A label outside the vocabulary makes the loss NaN, and so its gradient too.
    slope = tl.where((label == IGNORED) | ((label >= 0) & (label < vocab_size)), slope, float("nan"))
    m_counts = (label != IGNORED)[:, None] & (o_column < num_columns)[None, :]
    p_block = p_logits + o_row[:, None] * stride_logits + o_column[None, :]
    # [BLOCK_ROWS, BLOCK_COLUMNS]
    b_z = widened(tl.load(p_block, mask=m_counts, other=0.0))
    b_p = tl.exp(b_z - row_max[:, None]) * (1 / exp_sum)[:, None]
    m_target = o_column[None, :] == (label - first_column)[:, None]
    b_dz = tl.where(m_target, b_p - ON_TARGET, b_p - ON_OTHERS)
    if Z_LOSS != 0:
        b_dz += b_p * (2 * Z_LOSS * (row_max + tl.log(exp_sum)))[:, None]
    # Select with tl.where instead of multiplying by 0: an ignored row may hold NaN or infinity.
    b_dz = tl.where(m_counts, b_dz * slope[:, None], 0.0)
    m_inside = m_row[:, None] & (o_column < all_columns)[None, :]
    tl.store(p_block, b_dz.to(p_logits.dtype.element_ty), mask=m_inside)


def _block(num_columns: int) -> dict[str, int]:
    """Return the block: 4096 elements, of one row or of up to 16 short ones. Not tuned on a GPU yet."""
    columns = min(4096, power_of_2(num_columns))
    rows = min(16, 4096 // columns)
    return {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "num_warps": 8 if rows * columns > 2048 else 4}


def launch_cross_entropy_partials(logits: Tensor, labels: Tensor, first_column: int, num_columns: int) -> Tensor:
    """Run the operator tpkernels::cross_entropy_partials with its kernel."""
    partials = empty_partials(logits)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows = logits.shape[0]
    block = _block(num_columns)
    run(
        _partials_kernel,
        (cdiv(num_rows, block["BLOCK_ROWS"]),),
        logits,
        labels.contiguous(),
        partials,
        num_rows,
        num_columns,
        first_column,
        logits.stride(0),
        **block,
    )
    return partials


def launch_cross_entropy_gradient_(
    logits: Tensor,
    labels: Tensor,
    max_logit: Tensor,
    exp_sum: Tensor,
    slopes: Tensor,
    vocab_size: int,
    first_column: int,
    num_columns: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Run the operator tpkernels::cross_entropy_gradient_ with its kernel."""
    num_rows, all_columns = logits.shape
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    block = _block(all_columns)
    run(
        _gradient_kernel,
        (cdiv(num_rows, block["BLOCK_ROWS"]), cdiv(all_columns, block["BLOCK_COLUMNS"])),
        rows,
        labels.contiguous(),
        max_logit.contiguous(),
        exp_sum.contiguous(),
        slopes.to(max_logit.dtype).contiguous(),
        num_rows,
        num_columns,
        all_columns,
        first_column,
        vocab_size,
        rows.stride(0),
        IGNORED=IGNORED_LABEL,
        ON_TARGET=1 - label_smoothing + label_smoothing / vocab_size,
        ON_OTHERS=label_smoothing / vocab_size,
        Z_LOSS=z_loss,
        **block,
    )
    if rows is not logits:
        logits.copy_(rows)


def empty_partials(logits: Tensor) -> Tensor:
    """Return an empty tensor [4, T] in the dtype in which statistics of logits[T, C] are kept."""
    return logits.new_empty(4, logits.shape[0], dtype=accumulation_dtype(logits.dtype))
