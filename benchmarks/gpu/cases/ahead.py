"""What runs beside the first cases: the compiler, for everything that will be launched.

A GPU waits for the compiler whenever a process launches a kernel that is in no cache. What is compiled here lies in
triton's cache under the keys of a launch on the GPU: sources are as they are, while `benchmarks.run compile` leaves
comments out. It is only a help: if it fails, cases compile what they need.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
from tpkernels.launch import observed

from benchmarks.compile import TARGETS, pretend
from benchmarks.launches import LAUNCHES

# The dearest first.
_FIRST = ("attention", "matmul", "all_gather_matmul", "matmul_reduce_scatter")


def compile_ahead(rows: Path, target: str, processes: int, ops: Sequence[str] = ()) -> None:
    """Compile the launches of operators, by default of all, into triton's cache; cases come first."""
    if target not in TARGETS:
        return
    os.nice(10)
    chosen = ops or [*_FIRST, *(op for op in LAUNCHES if op not in _FIRST)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(functools.partial(_compile, target=target), chosen))


def _compile(op: str, target: str) -> None:
    pretend(TARGETS[target], Path(triton.knobs.cache.dir))

    def compile_launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        # A kernel that does not compile fails in its case, where it is written down.
        with contextlib.suppress(Exception):
            kernel.warmup(*arguments, grid=grid, **options)

    with observed(TARGETS[target], compile_launch):
        LAUNCHES[op]()
