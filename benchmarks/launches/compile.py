"""`python -m benchmarks.run compile`: compile every kernel that would be launched, for every target, without a GPU.

No list of launches exists: operators run on tensors without memory, for the per-rank shapes of harness/shapes.py, and
what they would launch is compiled instead (tpkernels.launch.observed). So the dtypes, constants and alignment are those
of a launch, and no configuration can be forgotten.

`--lock` stores the results in results/compile.jsonl, under a key of everything that a kernel is compiled from, and only
compiles what is not there yet. The tests use results in the lock, and compile a part of them again that changes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import triton
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from tpkernels.launch import Target, observed
from triton.backends.compiler import GPUTarget

from benchmarks.harness.journal import append
from benchmarks.harness.revision import ROOT
from benchmarks.harness.rows import make_row
from benchmarks.launches.operators import LAUNCHES
from tpengine.files import write_beside

TARGETS = {
    "sm_80": Target("cuda", 80),
    "sm_90": Target("cuda", 90),
    "sm_100": Target("cuda", 100),
    "gfx942": Target("hip", "gfx942"),
}
LOCK = ROOT / "benchmarks" / "results" / "compile.jsonl"
_MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma")


@dataclass(frozen=True)
class Options:
    """What to compile."""

    op: tuple[str, ...] = tuple(LAUNCHES)
    """Operators."""
    target: tuple[str, ...] = tuple(TARGETS)
    """Targets."""
    jobs: int = 2
    """Processes."""
    out: Path | None = None
    """Append one JSON line per kernel and target to this file."""
    lock: bool = False
    """Compile only what is not in benchmarks/results/compile.jsonl, and add it there."""


@dataclass(frozen=True)
class Compiled:
    """One kernel at one configuration for one target.

    Attributes:
        op: operator whose launch it is.
        kernel: the kernel's name.
        target: as TARGETS.
        config: dtypes of the tensors, constants and options, as text.
        registers: per thread.
        spilled_bytes: stack and local memory per thread.
        shared_bytes: per program.
        shared_limit_bytes: the most shared memory that a program may have.
        has_dot: whether the source multiplies matrices of 16-bit numbers; float32 has no matrix units.
        matrix_instructions: those found in the code: "wgmma.mma_async".
        error: why it does not compile; then there are no numbers.
        key: hash of its sources, arguments and options, the target and triton's release.
    """

    op: str
    kernel: str
    target: str
    config: str
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    shared_limit_bytes: int = 0
    has_dot: bool = False
    matrix_instructions: tuple[str, ...] = ()
    error: str = ""
    key: str = ""

    @property
    def fault(self) -> str:
        """What is wrong with the kernel; empty if nothing is."""
        faults = [f"does not compile: {self.error}"] if self.error else []
        if self.spilled_bytes:
            faults.append(f"spills {self.spilled_bytes} bytes per thread")
        if self.shared_bytes > self.shared_limit_bytes:
            faults.append(f"needs {self.shared_bytes} bytes of shared memory, the limit is {self.shared_limit_bytes}")
        if self.has_dot and not self.matrix_instructions:
            faults.append("multiplies matrices without matrix instructions")
        return "; ".join(faults)


def main(options: Options) -> int:
    """Compile and print a table; return 1 if anything is wrong with a kernel."""
    for flag, chosen, names in (("--op", options.op, LAUNCHES), ("--target", options.target, TARGETS)):
        if unknown := [name for name in chosen if name not in names]:
            raise ValueError(f"{flag} must be of {', '.join(names)}: got {', '.join(unknown)}: leave it out for all")
    pairs = [(op, target) for op in options.op for target in options.target]
    known = read_lock() if options.lock else {}
    every = compile_all(pairs, options.jobs, track, known=known)
    if options.lock:
        others = [one for one in known.values() if (one.op, one.target) not in pairs and one.op in LAUNCHES]
        write_lock([*others, *every])
    table = Table(title="compiled, not run", box=box.SIMPLE)
    for name in ("operator", "kernel", "target", "registers", "spilled", "shared", "matrix instructions", "constants"):
        table.add_column(name, justify="right" if name in ("registers", "spilled", "shared") else "left")
    for one in every:
        numbers = [str(n) for n in (one.registers, one.spilled_bytes, one.shared_bytes)]
        matrix = ", ".join(one.matrix_instructions)
        constants = " ".join(word for word in one.config.split() if "=" in word)
        table.add_row(one.op, one.kernel, one.target, *numbers, matrix, constants, style="red" if one.fault else None)
    Console(width=max(Console().width, 200)).print(table)
    for one in every:
        if one.fault:
            print(f"{one.op}: {one.kernel} for {one.target} {one.fault}: {one.config}")
        if options.out is not None:
            fields = {name: value for name, value in asdict(one).items() if name not in ("op", "key")}
            row = make_row(f"compile/{one.op}", threads_per_rank=1, fields={**fields, "fault": one.fault})
            append(options.out, row)
    return int(any(one.fault for one in every))


def compile_all(
    pairs: Sequence[tuple[str, str]],
    jobs: int,
    progress: Callable[..., Any] = lambda them, **_: them,
    cache: Path | None = None,
    known: Mapping[str, Compiled] = MappingProxyType({}),
) -> list[Compiled]:
    """Compile what each (operator, target) would launch, in `jobs` processes.

    Args:
        pairs: operators and targets.
        jobs: number of processes.
        progress: wraps the iterable, to show progress.
        cache: the directory of triton's cache; None for a temporary one.
        known: results by key that need not be compiled.
    """
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        jobs_of = [
            (op, target, [one for one in known.values() if (one.op, one.target) == (op, target)])
            for op, target in pairs
        ]
        done = pool.map(functools.partial(_compile_one, cache=cache), *zip(*jobs_of, strict=True))
        return [one for some in progress(done, total=len(pairs), description="compiling") for one in some]


def read_lock(path: Path = LOCK) -> dict[str, Compiled]:
    """Return earlier results by key; empty if there is no such file."""
    if not path.exists():
        return {}
    rows = map(json.loads, path.read_text().splitlines())
    every = (replace(Compiled(**row), matrix_instructions=tuple(row["matrix_instructions"])) for row in rows)
    return {one.key: one for one in every}


def write_lock(every: Iterable[Compiled], path: Path = LOCK) -> None:
    """Replace the file; what did not compile is left out, so that it is tried again."""
    rows = {one.key: json.dumps(asdict(one)) for one in every if not one.error}
    ordered = sorted(rows.values())
    write_beside(path, "".join(f"{row}\n" for row in ordered).encode())


def _compile_one(
    op: str, target_name: str, known: Sequence[Compiled] = (), cache: Path | None = None
) -> list[Compiled]:
    """Return what an operator launches, compiled for a target; `known` rows are taken by their key, not compiled."""
    target = TARGETS[target_name]
    known_by_key = {one.key: one for one in known}
    found: dict[tuple[str, str], Compiled] = {}
    with tempfile.TemporaryDirectory() as directory:
        pretend(target, cache or Path(directory))

        def compile_launch(
            kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
        ) -> None:
            name, config = kernel.fn.__name__, describe(kernel, arguments, options)
            if (name, config) in found:
                return
            key = _key(op, kernel, arguments, options, target_name)
            if key in known_by_key:
                found[name, config] = known_by_key[key]
                return
            try:
                compiled = kernel.warmup(*arguments, grid=grid, **options)
            except Exception as error:  # any compiler error: the other kernels are compiled all the same
                text = " ".join(str(error).split())[:200]
                found[name, config] = Compiled(op, name, target_name, config, error=f"{type(error).__name__}: {text}")
                return
            found[name, config] = replace(_look_at(compiled, op, name, target_name, config, Path(directory)), key=key)

        with observed(target, compile_launch):
            LAUNCHES[op]()
    return list(found.values())


def specialised(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> tuple[object, ...]:
    """Return all of which triton compiles another variant."""
    of_arguments: list[object] = []
    for parameter, value in zip(kernel.params, arguments, strict=False):
        if isinstance(value, int):
            of_arguments.append(
                None if parameter.do_not_specialize else (value % 16 == 0, value == 1, value.bit_length() > 31)
            )
        else:
            of_arguments.append(value.dtype if isinstance(value, Tensor) else type(value).__name__)
    return kernel.fn.__name__, *of_arguments, *sorted(options.items())


def _key(op: str, kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any], target_name: str) -> str:
    """Return the key: the kernel with all functions it calls, arguments, target, compiler, and how results are read."""
    of_launch = repr(specialised(kernel, arguments, options))
    source = source_key(kernel)
    text = (op, source, of_launch, repr(TARGETS[target_name]), triton.__version__, _source_of_looks())
    return hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]


_SOURCE_KEYS: dict[Callable[..., Any], str] = {}


def source_key(kernel: Any) -> str:
    """Return a hash of a kernel's code and of all it calls; comments, docstrings and places in a file do not matter.

    It is triton's, of sources without comments, and as if nothing had been compiled in this process before: triton's
    hash of a function contains the constants of those functions it calls whose own hashes were there already.
    """
    if kernel.fn not in _SOURCE_KEYS:
        ours = [vars(module) for name, module in sys.modules.items() if name.startswith("tpkernels")]
        for function in [value for names in (*ours, kernel.fn.__globals__) for value in names.values()]:
            if isinstance(function, triton.JITFunction):
                function._unsafe_update_src(_code(function.src))
                function.used_global_vals, function.starting_line_number = {}, 0
        _SOURCE_KEYS[kernel.fn] = kernel.cache_key
    return _SOURCE_KEYS[kernel.fn]


@functools.cache
def _code(source: str) -> str:
    """Return a function's source without comments and docstring."""
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function) is not None:
        function.body[0] = ast.Pass()
    return ast.unparse(tree)


@functools.cache
def _source_of_looks() -> str:
    return "".join(inspect.getsource(look) for look in (_look_at, _nvidia_resources, _amd_resources))


def describe(kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> str:
    """Return what the compiled code depends on, for readers: dtypes, absent tensors, constants, options."""
    words = [_word(name, value) for name, value in zip(kernel.arg_names, arguments, strict=False)]
    words += [f"{name}={value}" for name, value in options.items()]
    return " ".join(word for word in words if word)


def _word(name: str, value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{name.removeprefix('p_')}:{str(value.dtype).removeprefix('torch.')}"
    return f"{name.removeprefix('p_')}:none" if value is None else ""


def pretend(target: Target, cache: Path) -> None:
    """Make triton compile for a target that need not be here, from now on in this process."""

    class Driver:
        """The part of triton's driver that compiling without a launch needs."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32)

        def get_current_device(self) -> Target:
            return target  # kernels cache what they compiled by device

        def get_current_stream(self, device: Target) -> int:
            return 0

    triton.knobs.cache.dir = str(cache)
    triton.runtime.driver.set_active(Driver())


def _look_at(compiled: Any, op: str, kernel: str, target_name: str, config: str, directory: Path) -> Compiled:
    target = TARGETS[target_name]
    if target.backend == "hip":
        code = compiled.asm["amdgcn"]
        registers, spilled = _amd_resources(code)
    else:
        code = compiled.asm["ptx"]
        registers, spilled = _nvidia_resources(compiled.asm["cubin"], directory)
    return Compiled(
        op=op,
        kernel=kernel,
        target=target_name,
        config=config,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        shared_limit_bytes=target.shared_memory_bytes,
        has_dot=re.search(r"tt\.dot .*xb?f16>", compiled.asm["ttir"]) is not None,
        matrix_instructions=tuple(name for name in _MATRIX_INSTRUCTIONS if name in code),
    )


def _nvidia_resources(cubin: bytes, directory: Path) -> tuple[int, int]:
    path = directory / "kernel.cubin"
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+) ", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd_resources(assembly: str) -> tuple[int, int]:
    # Scalar registers spill into lanes of vector registers; what leaves the registers is in the private segment.
    names = ("vgpr_count", "private_segment_fixed_size")
    registers, private_bytes = (int(re.findall(rf"\.{name}:\s*(\d+)", assembly)[0]) for name in names)
    return registers, private_bytes
