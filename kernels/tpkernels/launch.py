"""Launching Triton kernels: compiled on a GPU, interpreted on a CPU, or only observed.

Triton decides when it is imported, by TRITON_INTERPRET=1, whether kernels are interpreted; every operator then takes
its kernels for CPU tensors too. Otherwise CPU tensors take the operator's host path. Where there is no triton (it
exists for Linux alone) the modules still import, and the host paths are all there is.

Everything launches through `run`, or again through `Launches`, so that whoever wants to know what would be launched,
for which target, can look without a GPU (`observed`): benchmarks/launches/compile.py compiles exactly that.

The decision a reader will question: configurations are chosen by small functions of sizes, dtype and target beside each
kernel, not by @triton.autotune, which picks by time, differently on two ranks or in two runs, and which the interpreter
refuses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from tpkernels.known_kernels import KnownKernel, known_kernels
from tpkernels.processors import may_be_held, programs_of_tiles

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


# Of one arena: kept for `Launches.again`.
_MOST_LAUNCHES = 4096
_ANY_DEVICE = torch.empty(0)
_NO_TENSORS = frozenset({int, float, bool, type(None)})
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


def processors_of(target: Target) -> int:
    """Return the processors of the largest GPU of a target, whatever GPU is here: what ranks must decide alike."""
    return _PROCESSORS.get(target.arch, 132)


def num_processors(x: Tensor) -> int:
    """Return the number of programs of a persistent kernel on x: one for each of the GPU's processors.

    In the interpreter it is 4, so that a program has several tiles there too.
    """
    if _observers:
        return processors_of(_observers[-1][0])
    return _device_processors(x.device.index if x.device.index is not None else 0) if x.is_cuda else 4


def product_grid(x: Tensor, num_tiles: int, programs_per_processor: int, processors: int | None) -> tuple[int]:
    """Return the grid of a product on x, whose programs each take every num-programs-th tile.

    Args:
        num_tiles: of the product, or the most that there may be.
        programs_per_processor: how many programs fit onto a processor together.
        processors: how many processors its programs share; None for all, or for a program for each tile where other
            communication may hold some (processors.py).
    """
    may_wait = processors is None and may_be_held(x.get_device()) > 0
    num_programs = (num_processors(x) if processors is None else processors) * programs_per_processor
    return (programs_of_tiles(num_tiles, num_programs, may_wait=may_wait),)


@functools.cache
def _device_processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def run(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, num_stages: int = 1, **constants: Any
) -> Any:
    """Launch a kernel on the device of its first tensor argument, or on the current device if there is none.

    Args:
        kernel: what `jit` made.
        grid: number of programs along each axis; nothing is launched if one is 0.
        arguments: tensors, numbers, or None, in the kernel's order.
        num_warps, num_stages: as triton.
        constants: the kernel's constexpr parameters.

    Returns: what triton compiled; None if nothing was launched, or the kernel was interpreted.
    """
    if 0 in grid:
        return None
    options = {**constants, "num_warps": num_warps, "num_stages": num_stages}
    if _observers:
        _observers[-1][1](kernel, grid, arguments, options)
        return None
    if INTERPRETED:
        return kernel[grid](*arguments, **options)
    driver = triton.runtime.driver.active
    current = driver.get_current_device()
    device = -1
    for x in arguments:
        # isinstance(x, Tensor) takes longer than all else that a launch asks of an argument.
        if type(x) not in _NO_TENSORS and isinstance(x, Tensor):
            device = x.get_device()
            break
    if device in (current, -1):
        return _launched(kernel, grid, arguments, options, driver, current)
    with torch.cuda.device(device):
        return _launched(kernel, grid, arguments, options, driver, device)


def _launched(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any], driver: Any, device: int
) -> Any:
    """Launch on the current device; return what was compiled. Who watches launches has triton make them."""
    runtime = triton.knobs.runtime
    is_watched = kernel.pre_run_hooks or _calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook)
    if is_watched or runtime.add_stages_inspection_hook is not None:
        return kernel[grid](*arguments, **options)
    caches = kernel.device_caches[device]
    known = known_kernels.get(id(caches))
    if known is None:
        known = known_kernels[id(caches)] = KnownKernel(kernel, caches)
    code = known.code(arguments, options)
    if code is None:
        return known.compiled(kernel[grid](*arguments, **options), arguments, options)
    x, y, z = (*grid, 1, 1)[:3]
    compiled, stream = code.compiled, driver.get_current_stream(device)
    function, packed = compiled.function, compiled.packed_metadata
    compiled.run(x, y, z, stream, function, packed, None, None, None, *arguments, *code.constants)
    return compiled


def _calls(hook: Any) -> Any:
    """Return what a hook of triton's calls: a chain that is empty, unless somebody has set something else."""
    return getattr(hook, "calls", hook)


class Launches:
    """Launches that have been made before, by the sizes that they depend on: made again, they cost the host least.

    `run` finds code that is known, but a fused kernel's launcher first computes its tiles, descriptors and some 40
    numbers, which takes longer. Here the code, the grid and all numbers are kept, and only what varies from call to
    call is put in.

    Whether pointers and addresses are multiples of 16, and the dtypes, belong to what code is compiled for. `again`
    looks at them itself; the caller's key stands for all the rest.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Bound] = {}

    def again(self, key: tuple[Any, ...], call: int, *values: Any) -> bool:
        """Make a launch again; return False, without launching, if it has not been made before.

        Args:
            key: the kernel, and everything that its grid, its numbers and its constants are computed from.
            call: the kernel's argument of this name.
            values: what varies, as in `first`: tensors, of which only the pointer counts, addresses or None.
        """
        bound = None if _observers else self._known.get((key, _kinds(values)))
        if bound is None:
            return False
        bound(call, values)
        return True

    def first(
        self,
        key: tuple[Any, ...],
        varying: Mapping[str, Any],
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Launch by `run`, and keep the launch for `again`.

        Args:
            key: as for `again`.
            varying: the values for `again`, by the names of the kernel's arguments.
        """
        compiled = run(kernel, grid, *arguments, **options)
        if compiled is None:
            return
        if len(self._known) >= _MOST_LAUNCHES:  # sizes that change with every call
            self._known.clear()
        constants = [options[name] for name in kernel.arg_names[len(arguments) :]]
        places = [kernel.arg_names.index(name) for name in ("call", *varying)]
        key = (key, _kinds(tuple(varying.values())))
        self._known[key] = _Bound(compiled, grid, [*arguments, *constants], places)


class _Bound:
    """A compiled kernel with its grid and its arguments, of which those at `places` are put in later."""

    def __init__(self, compiled: Any, grid: tuple[int, ...], arguments: list[Any], places: Sequence[int]) -> None:
        self._launch = compiled[(*grid, 1, 1)[:3]]
        self._call, *self._places = places
        # Descriptors without their tensors: what a call was given must not live until the next.
        self._descriptors = [
            {**vars(argument), "base": None} if type(argument).__name__ == "TensorDescriptor" else None
            for argument in (arguments[place] for place in self._places)
        ]
        self._arguments = [None if place in places else argument for place, argument in enumerate(arguments)]

    def __call__(self, call: int, values: tuple[Any, ...]) -> None:
        arguments = self._arguments.copy()
        arguments[self._call] = call
        for place, descriptor, value in zip(self._places, self._descriptors, values, strict=True):
            arguments[place] = value if descriptor is None else _described(descriptor, value)
        with torch.cuda.device_of(values[0] if values else _ANY_DEVICE):
            self._launch(*arguments)


def _described(descriptor: dict[str, Any], base: Tensor) -> Any:
    """Return a TMA descriptor as one that was checked before, of a tensor at another address."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    again = object.__new__(TensorDescriptor)
    again.__dict__.update(descriptor, base=base)
    return again


def _kinds(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what triton compiles for, of tensors, addresses and None."""
    return tuple(
        [
            None if value is None else value % 16 == 0 if type(value) is int else (value.dtype, value.data_ptr() % 16)
            for value in values
        ]
    )


def as_operator(x: Tensor) -> bool:
    """Return whether a Function's own call must go through the registered operator: traced, or without memory.

    The registered operator only returns outputs of the right shape. A kernel would read addresses that do not exist.
    """
    has_memory = type(x) in (Tensor, Parameter) and (not x.is_meta or bool(_observers))
    return torch.compiler.is_compiling() or not has_memory


def refuse_while_captured(device: torch.device, what: str) -> None:
    """Raise RuntimeError while a CUDA graph is captured: what follows copies to the device, or waits for it.

    Args:
        device: where it would.
        what: what is new, for the message.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA graph is captured of what has run before: {what}: run the same once before the capture, on the "
            "same tensors"
        )


_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_while_traced(function: _Function) -> _Function:
    """Have torch.compile call a function while it traces, and take what it returns as a constant.

    For what looks at files: it depends on its arguments alone, which must be constants to torch.compile too. This is
    torch.compiler.assume_constant_result, which would import torch._dynamo here: a second for every process.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


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
def only_if(condition: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return a block's mask if a scalar condition holds, else all False.

    Use it instead of `mask & condition`, of which triton 3.9's interpreter makes integers, and then refuses the mask.
    """
    return tl.where(condition, mask, False)


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
