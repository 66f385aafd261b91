"""Bytes that the programs of a Triton kernel load and store, counted in the interpreter, without a GPU.

They are what the source asks for: what a second program asks for again, a GPU may find in its caches. The least is
every operand once. Of a large grid some programs are interpreted: along the first axis all or some, since a causal
kernel's programs differ there, and along the others the first.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

# Programs that are interpreted along the grid's first axis: all, if there are no more than these, or so many of them.
_ALL, _SOME = 32, 8


class Operand(NamedTuple):
    """A tensor without its memory, and the block of its descriptor if it has one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    block: tuple[int, ...] | None = None


class Call(NamedTuple):
    """A launch, as another process can make it: arguments are operands or numbers."""

    module: str
    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @classmethod
    def of(cls, call: tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]) -> Call:
        """Return an observed launch."""
        kernel, grid, arguments, options = call
        return cls(kernel.fn.__module__, kernel.fn.__name__, grid, tuple(map(_operand, arguments)), options)


def _operand(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return Operand(tuple(argument.shape), argument.stride(), argument.dtype)
    if type(argument).__name__ == "TensorDescriptor":
        base = argument.base
        return Operand(tuple(base.shape), base.stride(), base.dtype, tuple(argument.block_shape))
    return argument


def moved_bytes(calls: Sequence[Call], num_processes: int = 1) -> list[int]:
    """Return the bytes that each launch loads and stores, about, if its programs are sampled."""
    # Triton asks when it is imported whether it is to interpret.
    interprets = patch.dict(os.environ, {"TRITON_INTERPRET": "1"})
    with interprets, ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_moved, calls))


def _moved(call: Call) -> int:
    from triton.runtime.interpreter import interpreter_builder

    kernel = getattr(importlib.import_module(call.module), call.kernel)
    first, *others = call.grid
    xs = range(first) if first <= _ALL else [first * i // _SOME for i in range(_SOME)]
    moved = 0

    def counting(method: str, places: tuple[int, int]) -> Any:
        """Return a method of the builder that counts: the pointers' and the mask's places in its arguments."""
        own = getattr(interpreter_builder, method)

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal moved
            pointers, mask = (arguments[place] for place in places)
            item = pointers.get_element_ty().primitive_bitwidth // 8
            # A descriptor's mask is the array itself.
            moved += int(np.asarray(mask.data).sum()) * item
            return own(*arguments, **options)

        return patch.object(interpreter_builder, method, counted)

    set_dim, set_idx = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    arguments = [_with_memory(argument) for argument in call.arguments]
    # What a GPU's warps pass on each by itself, one thread passes on for all here (attention/gradients.py).
    one_thread = {"ARRIVALS": 1} if "ARRIVALS" in call.constants else {}
    with (
        counting("create_masked_load", (0, 1)),
        counting("create_masked_store", (0, 2)),
        counting("create_atomic_rmw", (1, 3)),
        patch.object(interpreter_builder, "set_grid_dim", lambda *_: set_dim(*(*call.grid, 1, 1)[:3])),
        patch.object(interpreter_builder, "set_grid_idx", lambda x, y, z: set_idx(xs[x], y, z)),
    ):
        kernel[(len(xs),)](*arguments, **call.constants | one_thread)
    scale = first / len(xs)
    for size in others:
        scale *= size
    return round(moved * scale)


def _with_memory(argument: Any) -> Any:
    """Return an operand as zeros of its size and strides."""
    if not isinstance(argument, Operand):
        return argument
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride, strict=True))
    x = torch.zeros(last + 1, dtype=argument.dtype).as_strided(argument.shape, argument.stride)
    if argument.block is None:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(argument.shape), list(argument.stride), list(argument.block))
