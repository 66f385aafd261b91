"""Launching Triton kernels: compiled on a GPU, interpreted on a CPU, or only observed.

Triton decides when it is imported, by TRITON_INTERPRET=1, whether kernels are interpreted; every operator then takes
its kernels for CPU tensors too. Otherwise CPU tensors take the operator's host path. Where there is no triton (it
exists for Linux alone) the modules still import, and the host paths are all there is.

Everything launches through `run`, so that whoever wants to know what would be launched, for which target, can look
without a GPU (`observed`): benchmarks/compile.py compiles exactly that.

The decision a reader will question: configurations are chosen by small functions of sizes, dtype and target beside each
kernel, not by @triton.autotune, which picks by time, differently on two ranks or in two runs, and which the interpreter
refuses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

try:
    import triton
except ImportError:  # not on Linux: operators use their host paths
    triton = None

# What kernels are written in. Each module that has kernels must hold it as a global: the interpreter looks there.
tl: Any = None if triton is None else triton.language

LOG2_E = math.log2(math.e)

INTERPRETED: bool = triton is not None and triton.knobs.runtime.interpret


class Target(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        backend: "cuda" or "hip".
        arch: 80, 90, 100 for sm_80 ...; "gfx942".
    """

    backend: str
    arch: int | str

    @property
    def shared_memory_bytes(self) -> int:
        """Return the most shared memory that a program may have."""
        if self.backend == "hip":
            return 64 << 10
        return {80: 163, 87: 163, 86: 99, 89: 99, 120: 99, 121: 99}.get(int(self.arch), 227) << 10


_ANY_DEVICE = torch.empty(0)

Observer = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_observers: list[tuple[Target, Observer]] = []


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Apply `triton.jit` with its options; without triton return the function as it is, which nothing then launches."""
    if function is None:
        return functools.partial(jit, **options)
    return function if triton is None else triton.jit(function, **options)


def by_triton(x: Tensor) -> bool:
    """Return whether operators on x use their Triton kernels: on a GPU, and on a CPU where they are interpreted.

    Raises:
        RuntimeError: x is on a GPU and there is no triton.
    """
    if x.device.type == "cpu":
        return INTERPRETED
    if triton is None:
        raise RuntimeError(f"operators on {x.device} need triton, which is not installed: pip install triton")
    return True


def target_of(x: Tensor) -> Target:
    """Return what kernels on x are compiled for; sm_90 where they are interpreted."""
    if _observers:
        return _observers[-1][0]
    return _target(x.device.index if x.device.index is not None else 0) if x.is_cuda else Target("cuda", 90)


@functools.cache
def _target(device: int) -> Target:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0])
    return Target("cuda", 10 * properties.major + properties.minor)


# Multiprocessors (NVIDIA) and compute units (AMD) of the GPUs that each target is compiled for when none is there.
_PROCESSORS = MappingProxyType({80: 108, 90: 132, 100: 148, "gfx942": 304})


def num_processors(x: Tensor) -> int:
    """Return the number of programs of a persistent kernel on x: one for each of the GPU's processors.

    In the interpreter it is 4, so that a program has several tiles there too.
    """
    if _observers:
        return _PROCESSORS.get(_observers[-1][0].arch, 132)
    return _device_processors(x.device.index if x.device.index is not None else 0) if x.is_cuda else 4


@functools.cache
def _device_processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def run(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, num_stages: int = 1, **constants: Any
) -> None:
    """Launch a kernel on the device of its first tensor argument, or on the current device if there is none.

    Args:
        kernel: what `jit` made.
        grid: number of programs along each axis; nothing is launched if one is 0.
        arguments: tensors, numbers, or None, in the kernel's order.
        num_warps, num_stages: as triton.
        constants: the kernel's constexpr parameters.
    """
    if 0 in grid:
        return
    options = constants | {"num_warps": num_warps, "num_stages": num_stages}
    if _observers:
        _observers[-1][1](kernel, grid, arguments, options)
        return
    with torch.cuda.device_of(next((x for x in arguments if isinstance(x, Tensor)), _ANY_DEVICE)):
        kernel[grid](*arguments, **options)


def as_operator(x: Tensor) -> bool:
    """Return whether a Function's own call must go through the registered operator: traced, or without memory.

    The registered operator only returns outputs of the right shape. A kernel would read addresses that do not exist.
    """
    has_memory = type(x) in (Tensor, Parameter) and (not x.is_meta or bool(_observers))
    return torch.compiler.is_compiling() or not has_memory


@contextmanager
def observed(target: Target, observer: Observer) -> Iterator[None]:
    """Tell `observer` of every launch instead of making it, as if for `target`; tensors may then be of device meta.

    Args:
        observer: called with kernel, grid, arguments, and constants with options.
    """
    _observers.append((target, observer))
    try:
        yield
    finally:
        _observers.pop()


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def signed(word: int, num_bits: int) -> int:
    """Return the signed integer with the same bits, which an argument of num_bits holds without being widened."""
    return word - (1 << num_bits) if word >> (num_bits - 1) else word


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def exp_(x: Tensor) -> Tensor:
    """Compute exp in place, for host paths, by exp2: on AMD's processors MKL's exp takes three times as long."""
    return x.mul_(LOG2_E).exp2_()


if tl is not None:
    _INTERPRETED = tl.constexpr(INTERPRETED)


@jit
def widened(b: tl.tensor) -> tl.tensor:
    """Return a loaded block in the dtype to compute in: float32, or float64 as it is.

    Call it before any other operation on a block: the interpreter handles bfloat16 correctly in this conversion only.
    """
    return b if b.dtype == tl.float64 else b.to(tl.float32)


@jit
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return total + a @ b, with sums in float32.

    float32 operands are not rounded to tf32, so they do not use NVIDIA's matrix units. The interpreter converts
    bfloat16 operands to float32, which is exact: its tl.dot would multiply their bits as integers.
    """
    if _INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
