"""Clipping without a pass over the gradients: their squares in one launch and a small one, and what follows from them.

    figures[place of a tensor] = |g|^2                           square_sums; the caller sums them over ranks
    norm = sqrt(sum of figures) / loss_scale                     judged
    factor = min(1, clip_norm / norm) / loss_scale
    spike = loss or norm is finite, and above its limit;   skip = loss or norm is not finite, or spike, or not usable

AdamW multiplies by the factor where it reads a gradient, and skips by the flag (adamw.py): both stay on the device.

The decision a reader will question: squares are taken and added in float32 within a lane of a chunk, in float64 beyond.
So a norm that is finite means that every square is finite in float32, as the second moments must be. The order of all
sums follows from the sizes alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from tpkernels.launch import as_operator, by_triton, jit, refuse_while_captured, run, tl, widened
from tpkernels.ops.tensor_table import (
    CHUNK,
    chunk_of,
    is_dense,
    launch_over,
    load_inside,
    table_of,
    tensor_at,
    triton_dtype,
)


class Judged(IntEnum):
    """Where each number lies in what `judged` returns."""

    LOSS = 0
    NORM = 1
    SKIP = 2
    SPIKE = 3
    USABLE = 4
    FACTOR = 5


@jit
def _squares_kernel(
    p_places: tl.tensor,
    p_chunks: tl.tensor,
    p_sums: tl.tensor,
    DTYPE: tl.constexpr,
    SUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the sum of squares of a chunk to p_sums[its number among all chunks]."""
    _, p_place, first, num_elements = chunk_of(p_places, p_chunks, COLUMNS, CHUNK)
    o_element = tl.arange(0, BLOCK)
    p_x = tensor_at(p_place, 0, DTYPE, ALIGNED) + first + o_element
    b_sum = tl.zeros([BLOCK], SUM)
    for i in range(0, num_elements // BLOCK):
        # [BLOCK]
        b_x = widened(load_inside(p_x + i * BLOCK, None))
        b_sum += b_x * b_x
    rest = num_elements % BLOCK
    if rest != 0:
        # [BLOCK]
        b_x = widened(load_inside(p_x + (num_elements - rest), o_element < rest))
        b_sum += b_x * b_x
    i_chunk = tl.load(p_place + 1) + first // CHUNK
    tl.store(p_sums + i_chunk, tl.sum(b_sum.to(tl.float64)))


@jit
def _figures_kernel(
    p_places: tl.tensor,
    p_tensors: tl.tensor,
    p_sums: tl.tensor,
    p_figures: tl.tensor,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the sums of all chunks of the tensor whose figure is this program's; zero if it is no tensor's."""
    i_figure = tl.program_id(0).to(tl.int64)
    i_tensor = tl.load(p_tensors + i_figure)
    p_place = p_places + tl.maximum(i_tensor, 0) * COLUMNS
    num_chunks = tl.where(i_tensor < 0, 0, (tl.load(p_place) + (CHUNK - 1)) // CHUNK)
    p_first = p_sums + tl.load(p_place + 1)
    o_chunk = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float64)
    for i in range(0, tl.cdiv(num_chunks, BLOCK)):
        # [BLOCK]
        b_sum += tl.load(p_first + i * BLOCK + o_chunk, mask=o_chunk < num_chunks - i * BLOCK, other=0.0)
    tl.store(p_figures + i_figure, tl.sum(b_sum))


def launch_square_sums(tensors: Sequence[Tensor], places: Sequence[int], num_figures: int) -> Tensor:
    """Run the operator tpkernels::square_sums with its kernels."""
    first = tensors[0]
    table = table_of(tensors)
    sums, figures = (first.new_empty(size, dtype=torch.float64) for size in (table.num_chunks, num_figures))
    launch_over(
        table,
        _squares_kernel,
        sums,
        DTYPE=triton_dtype(first.dtype),
        SUM=triton_dtype(torch.promote_types(first.dtype, torch.float32)),
        # Two loads of 16 bytes of float32 per thread. Not tuned on a GPU yet.
        BLOCK=1024,
        num_warps=4,
    )
    run(
        _figures_kernel,
        (num_figures,),
        table.places,
        _tensor_of_figure(first.device, tuple(places), num_figures),
        sums,
        figures,
        COLUMNS=table.places.shape[1],
        CHUNK=CHUNK,
        BLOCK=256,
        num_warps=4,
    )
    return figures


@functools.cache  # not fewer: a captured graph may read them
def _tensor_of_figure(device: torch.device, places: tuple[int, ...], num_figures: int) -> Tensor:
    """Return int64 [num_figures]: the tensor that each figure is of, -1 for none."""
    refuse_while_captured(device, "figures are of tensors that no call has had")
    tensor_of = torch.full((num_figures,), -1)
    tensor_of[torch.tensor(places)] = torch.arange(len(places))
    return tensor_of.to(device)


def _square_sums_on_host(tensors: Sequence[Tensor], places: Sequence[int], num_figures: int) -> Tensor:
    figures = tensors[0].new_zeros(num_figures, dtype=torch.float64)
    norms = torch._foreach_norm(list(tensors))
    figures[torch.tensor(places, device=figures.device)] = torch.stack(norms).double().square()
    return figures


def _square_sums(tensors: Sequence[Tensor], places: Sequence[int], num_figures: int) -> Tensor:
    return (launch_square_sums if by_triton(tensors[0]) else _square_sums_on_host)(tensors, places, num_figures)


@torch.library.custom_op("tpkernels::square_sums", mutates_args=())
def square_sums_op(tensors: Sequence[Tensor], places: Sequence[int], num_figures: int) -> Tensor:
    """Run square_sums, without checks."""
    return _square_sums(tensors, places, num_figures)


@square_sums_op.register_fake
def _(tensors: Sequence[Tensor], places: Sequence[int], num_figures: int) -> Tensor:
    return tensors[0].new_empty(num_figures, dtype=torch.float64)


def square_sums(tensors: Sequence[Tensor], places: Sequence[int], num_figures: int) -> Tensor:
    """Return the sums of squares of many tensors, each at a place of its own; zeros at the others.

        figures[places[i]] = sum over elements of tensors[i] ** 2

    Args:
        tensors: at least one, of one floating-point dtype and device, dense in any order of their dims.
        places: of each, in [0, num_figures), all different.
        num_figures: places that there are.

    Returns:
        float64 [num_figures], new.

    Raises:
        ValueError: dtypes or devices differ, a place is given twice or does not exist.

    Cost: reads every element once. Two launches; three where some tensors do not begin at a multiple of 16 bytes.
    Numerics: with the kernels as the module's head says; a square beyond float32 gives infinity. A CPU takes torch's
        norms in the tensors' dtype. Deterministic.
    """
    first = tensors[0]
    if any(x.dtype != first.dtype or x.device != first.device or not x.is_floating_point() for x in tensors):
        raise ValueError(
            "square_sums takes floating-point tensors of one dtype and device: got "
            f"{sorted({f'{x.dtype} on {x.device}' for x in tensors})}: call it for each dtype"
        )
    if gaps := [i for i, x in enumerate(tensors) if not is_dense(x)]:
        raise ValueError(
            f"square_sums takes tensors without gaps: numbers {gaps} of {len(tensors)} have some: pass contiguous ones"
        )
    if len(places) != len(tensors) or len(set(places)) != len(places) or not all(0 <= p < num_figures for p in places):
        raise ValueError(
            f"square_sums has a place in [0, {num_figures}) for each of {len(tensors)} tensors, all different: got "
            f"{list(places)}: number them anew"
        )
    return (square_sums_op if as_operator(first) else _square_sums)(tensors, places, num_figures)


@jit
def _judge_kernel(
    p_figures: tl.tensor,
    p_loss: tl.tensor,
    p_usable: tl.tensor,
    p_judged: tl.tensor,
    num_figures: tl.int64,
    most_loss: tl.float64,
    most_norm: tl.float64,
    clip_norm: tl.float64,
    loss_scale: tl.float64,
    BLOCK: tl.constexpr,
) -> None:
    """Write the numbers of a step, of one program."""
    # Only tl.full works in the interpreter: there the numbers are Python floats, and every other conversion makes them
    # float32.
    most_loss = tl.full([], most_loss, tl.float64)
    most_norm = tl.full([], most_norm, tl.float64)
    clip_norm = tl.full([], clip_norm, tl.float64)
    loss_scale = tl.full([], loss_scale, tl.float64)
    o_figure = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float64)
    for i in range(0, tl.cdiv(num_figures, BLOCK)):
        # [BLOCK]
        b_sum += tl.load(p_figures + i * BLOCK + o_figure, mask=o_figure < num_figures - i * BLOCK, other=0.0)
    norm = tl.sqrt(tl.sum(b_sum)) / loss_scale
    loss, usable = tl.load(p_loss), tl.load(p_usable) != 0
    # A comparison with infinity is false for NaN too.
    is_finite = (tl.abs(loss) < float("inf")) & (norm < float("inf"))
    is_spike = is_finite & ((loss > most_loss) | (norm > most_norm))
    is_applied = is_finite & usable & (is_spike == 0)
    # 0 does not clip.
    ratio = tl.where(clip_norm == 0, tl.full([], 1, tl.float64), clip_norm / tl.maximum(norm, clip_norm))
    tl.store(p_judged, loss)
    tl.store(p_judged + 1, norm)
    tl.store(p_judged + 2, (is_applied == 0).to(tl.float64))
    tl.store(p_judged + 3, is_spike.to(tl.float64))
    tl.store(p_judged + 4, usable.to(tl.float64))
    tl.store(p_judged + 5, ratio / loss_scale)


def launch_judged(
    squares: Tensor, loss: Tensor, usable: Tensor, most_loss: float, most_norm: float, clip_norm: float, scale: float
) -> Tensor:
    """Run the operator tpkernels::judged with its kernel."""
    judged = squares.new_empty(len(Judged))
    run(
        _judge_kernel,
        (1,),
        squares,
        loss,
        usable.view(torch.uint8),
        judged,
        len(squares),
        most_loss,
        most_norm,
        clip_norm,
        scale,
        BLOCK=256,
        num_warps=4,
    )
    return judged


def judged_reference(
    squares: Tensor, loss: Tensor, usable: Tensor, most_loss: float, most_norm: float, clip_norm: float, scale: float
) -> Tensor:
    """Return what `judged` does, by torch: the specification, and what a CPU runs."""
    norm = squares.sum().sqrt() / scale
    is_finite = loss.isfinite() & norm.isfinite()
    is_spike = is_finite & ((loss > most_loss) | (norm > most_norm))
    skip = ~(is_finite & usable) | is_spike
    ratio = torch.ones_like(norm) if clip_norm == 0 else clip_norm / norm.clamp_min(clip_norm)
    return torch.stack([loss, norm, skip.double(), is_spike.double(), usable.double(), ratio / scale])


def _judged(*arguments: Any) -> Tensor:
    return (launch_judged if by_triton(arguments[0]) else judged_reference)(*arguments)


@torch.library.custom_op("tpkernels::judged", mutates_args=())
def judged_op(
    squares: Tensor, loss: Tensor, usable: Tensor, most_loss: float, most_norm: float, clip_norm: float, scale: float
) -> Tensor:
    """Run judged with all its arguments."""
    return _judged(squares, loss, usable, most_loss, most_norm, clip_norm, scale)


@judged_op.register_fake
def _(squares: Tensor, *_: Any) -> Tensor:
    return squares.new_empty(len(Judged))


def judged(
    squares: Tensor,
    loss: Tensor,
    usable: Tensor,
    *,
    most_loss: float = math.inf,
    most_norm: float = math.inf,
    clip_norm: float = 0.0,
    loss_scale: float = 1.0,
) -> Tensor:
    """Return what follows from a step's loss and the squares of its gradients; the host waits for nothing.

    Args:
        squares: float64 [n], whose sum is the square of the norm, times loss_scale^2.
        loss: float64 [].
        usable: bool [], whether the step may be applied for other reasons.
        most_loss, most_norm: limits; a step above one of them is a spike.
        clip_norm: of the gradients, at most; 0 does not clip.
        loss_scale: that the gradients were multiplied by.

    Returns:
        float64 [6], new, at the places of Judged: the loss, the norm without the loss scale, whether to skip, whether
        that is for a spike, whether the step is usable, and the factor of the gradients.

    Cost: one launch of one program.
    Numerics: float64; the order of the sum follows from n alone.
    """
    judge = judged_op if as_operator(squares) else _judged
    return judge(squares, loss, usable, most_loss, most_norm, clip_norm, loss_scale)
