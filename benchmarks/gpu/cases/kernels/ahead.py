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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from tpkernels.launch import Target, observed
from tpkernels.ops.matmul.kernel import launch_matmul

from benchmarks.gpu.cases.kernels.attention_configs import launch_candidates
from benchmarks.gpu.cases.kernels.tiles import CANDIDATES
from benchmarks.harness.shapes import MODELS, WHOLE_MODELS
from benchmarks.launches.compile import TARGETS, describe, pretend
from benchmarks.launches.operators import LAUNCHES, Sizes

# Attention takes the compiler longest; a step launches the others at once. Then comes what is tried beside the tables'
# configurations, and fused operators last.
_FIRST = ("attention", "norm", "matmul", "activation", "rope", "cross_entropy", "adamw", "embedding")
_TRIED = ("tiles", "attention_configs")
_WORLDS = (2, 4, 8)
_MODELS = [model for model in (*WHOLE_MODELS, *MODELS) if model.name in ("llama_1b", "llama3_8b", "llama3_70b")]


class Launch(NamedTuple):
    """A launch that is not made: the kernel, its grid and arguments, and constants with options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> None:
        """Compile it; a kernel that does not compile fails in its case, where it is written down."""
        with contextlib.suppress(Exception):
            self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


def _tiles(sizes: Sizes) -> None:
    """Launch a weight's gradient and a forward product with every candidate: the tile is compiled in, not the sizes."""
    x, weight = (torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta") for _ in range(2))
    sums = torch.empty(2048, 2048, device="meta")
    for config in CANDIDATES:
        launch_matmul(x.T, weight, out=sums, accumulate=True, config=config)
        launch_matmul(x, weight.T, config=config)


def _attention_configs(sizes: Sizes) -> None:
    for model in sizes.models:
        launch_candidates(model)


_LAUNCHES: Mapping[str, Callable[[Sizes], None]] = {
    **LAUNCHES,
    "tiles": _tiles,
    "attention_configs": _attention_configs,
}


def compile_ahead(rows: Path, target: str, processes: int, ops: Sequence[str] = ()) -> None:
    """Compile the launches of operators, by default of all, into triton's cache, the first cases' first."""
    if target not in TARGETS:
        return
    os.nice(10)
    chosen = ops or [*_FIRST, *_TRIED, *(op for op in LAUNCHES if op not in _FIRST)]
    share = functools.partial(_compile_share, target=target, ops=chosen, processes=processes)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(share, range(processes)))


def each_share(target: Target, ops: Sequence[str], place: int, processes: int, do: Callable[[Launch], None]) -> None:
    """Do something with every launch that falls to one of several processes: launches are dealt out one by one.

    Dtypes and models are those of the GPU's cases, and fused operators are launched for 2, 4 and 8 ranks.
    """
    seen = set[object]()

    def deal(*launch: Any) -> None:
        one = Launch(*launch)
        # Of integers the compiler looks at these two properties.
        integers = tuple((n == 1, n % 16 == 0) for n in one.arguments if isinstance(n, int))
        key = one.kernel.fn.__name__, describe(one.kernel, one.arguments, one.options), integers
        if key not in seen:
            seen.add(key)
            if (len(seen) - 1) % processes == place:
                do(one)

    for op in ops:
        # What has no ranks launches the same for any number of them.
        for world in _WORLDS:
            with observed(target, deal):
                _LAUNCHES[op](Sizes((torch.bfloat16,), _MODELS, world))


def _compile_share(place: int, target: str, ops: Sequence[str], processes: int) -> None:
    pretend(TARGETS[target], Path(triton.knobs.cache.dir))
    each_share(TARGETS[target], ops, place, processes, Launch.compile)
