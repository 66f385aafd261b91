"""What is done to all elements of many tensors in place, in one launch: clearing gradients, multiplying them.

A launch for each tensor costs the host more than the GPU; torch's own passes over lists are several launches
(tensor_table.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tpkernels.launch import as_operator, by_triton, jit, tl, widened
from tpkernels.ops.tensor_table import chunk_of, is_dense, launch_over, load_inside, table_of, tensor_at, triton_dtype

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@jit
def _multiplied(
    p_block: tl.tensor, factor: tl.tensor, m_inside: tl.tensor, DTYPE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Multiply a block by a factor; write zeros if that is None."""
    if factor is None:
        tl.store(p_block, tl.zeros([BLOCK], DTYPE), mask=m_inside)
    else:
        # [BLOCK]
        b_x = widened(load_inside(p_block, m_inside))
        tl.store(p_block, (b_x * factor.to(b_x.dtype)).to(DTYPE), mask=m_inside)


@jit
def _multiply_kernel(
    p_places: tl.tensor,
    p_chunks: tl.tensor,
    p_factor: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Multiply a chunk of a tensor by p_factor[0]; without, clear it."""
    _, p_place, first, num_elements = chunk_of(p_places, p_chunks, COLUMNS, CHUNK)
    factor = None
    if p_factor is not None:
        factor = tl.load(p_factor)
    o_element = tl.arange(0, BLOCK)
    p_x = tensor_at(p_place, 0, DTYPE, ALIGNED) + first + o_element
    for i in range(0, num_elements // BLOCK):
        _multiplied(p_x + i * BLOCK, factor, None, DTYPE, BLOCK)
    rest = num_elements % BLOCK
    if rest != 0:
        _multiplied(p_x + (num_elements - rest), factor, o_element < rest, DTYPE, BLOCK)


def launch_multiply_(tensors: Sequence[Tensor], factor: Tensor | None) -> None:
    """Run the operator tpkernels::multiply_ with its kernel."""
    launch_over(
        table_of(tensors),
        _multiply_kernel,
        factor,
        DTYPE=triton_dtype(tensors[0].dtype),
        # Two times 16 bytes of float32 per thread. Not tuned on a GPU yet.
        BLOCK=1024,
        num_warps=4,
    )


def _by_torch_(tensors: Sequence[Tensor], factor: Tensor | None) -> None:
    for x in tensors:
        if factor is None:
            x.zero_()
        else:
            x.mul_(factor)


@torch.library.custom_op("tpkernels::multiply_", mutates_args=("tensors",))
def multiply_op_(tensors: Sequence[Tensor], factor: Tensor | None) -> None:
    """Multiply all elements of tensors of one dtype and device; without a factor clear them."""
    (launch_multiply_ if by_triton(tensors[0]) else _by_torch_)(tensors, factor)


@multiply_op_.register_fake
def _(*_: Any) -> None:
    return None


def zero_all_(tensors: Iterable[Tensor]) -> None:
    """Clear many tensors, in place.

    Args:
        tensors: of any dtypes and devices.

    Cost: a launch for each dtype and device, two where some do not begin at a multiple of 16 bytes. On a CPU, of
        tensors with gaps, and of dtypes that are not floating point of 16 to 64 bits, each by itself.
    """
    _each_kind(tensors, lambda device: None)


def scale_all_(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply many tensors by one number, in place.

    Args:
        tensors: floating point, of any dtypes and devices.
        factor: float32 or float64 [], on any device.

    Cost: as zero_all_.
    Numerics: in float32, or float64 for float64, rounded once.
    """
    _each_kind(tensors, lambda device: factor.to(device))


def _each_kind(tensors: Iterable[Tensor], factor_on: Callable[[torch.device], Tensor | None]) -> None:
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = defaultdict(list)
    for x in tensors:
        # Tensors with gaps, classes that mean more than their memory, and dtypes of other kinds are torch's.
        is_ours = x.dtype in _DTYPES and type(x) in (Tensor, Parameter) and is_dense(x)
        kinds[x.dtype, x.device, is_ours].append(x)
    for (_, device, is_ours), alike in kinds.items():
        factor = factor_on(device)
        if not is_ours:
            _by_torch_(alike, factor)
        elif as_operator(alike[0]):
            multiply_op_(alike, factor)
        elif by_triton(alike[0]):
            launch_multiply_(alike, factor)
            # Autograd does not notice what a kernel writes.
            torch.autograd.graph.increment_version(alike)
        else:
            _by_torch_(alike, factor)
