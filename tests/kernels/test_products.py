"""Rung: pure: compiles the first step, runs nothing. No kernel adds up matrix products as triton compiles wrongly.

Only a GPU of sm_100 shows that nothing else is wrong there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels.product_rules import faults
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")

import triton
from tpkernels.launch import dot, jit, observed, run, tl

from benchmarks.launches.compile import TARGETS, describe, pretend
from benchmarks.launches.operators import LAUNCHES

# Operators whose kernels multiply matrices.
OPERATORS = ("all_gather_matmul", "attention", "grouped", "matmul", "matmul_reduce_scatter")


class FirstStepDoneError(Exception):
    """Raised instead of compiling further than ttir."""


def ttir_of(launch: Callable[[], None]) -> dict[str, str]:
    """Return the ttir of every kernel that a function would launch on sm_100, by its name and configuration."""
    found: dict[str, str] = {}

    def only_ttir(_: Any = None, stages: Any = None, *__: Any) -> tuple[str, str]:
        def stop(source: Any, _: Any) -> None:
            found[name] = str(source)
            raise FirstStepDoneError

        if stages is not None:
            stages["ttgir"] = stop
        return "ttir", "ttir"

    def compile_launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal name
        name = f"{kernel.fn.__name__} {describe(kernel, arguments, options)}"
        if name not in found:
            with pytest.raises(FirstStepDoneError):
                kernel.warmup(*arguments, grid=grid, **options)

    name = ""
    with tempfile.TemporaryDirectory() as cache:
        pretend(TARGETS["sm_100"], Path(cache))
        triton.knobs.runtime.add_stages_inspection_hook = only_ttir
        try:
            with observed(TARGETS["sm_100"], compile_launch):
                launch()
        finally:
            triton.knobs.runtime.add_stages_inspection_hook = None
    return found


def faults_of_operator(op: str) -> tuple[int, list[str]]:
    """Return how many programs multiply matrices, and what is wrong with them."""
    multiply = {name: text for name, text in ttir_of(LAUNCHES[op]).items() if "tt.dot " in text}
    return len(multiply), [f"{name}: {line}" for name, text in multiply.items() for line in faults(text)]


# By default the two that multiply most differently.
@pytest.mark.by_default("matmul")
@pytest.mark.parametrize(
    "op", [op if op in ("attention", "matmul") else pytest.param(op, marks=pytest.mark.slow) for op in OPERATORS]
)
def test_no_kernel_multiplies_as_is_compiled_wrongly(compilers: RankPool, op: str) -> None:
    num_programs, found = compilers.run(faults_of_operator, 1, op)[0]
    assert num_programs and found == []


@jit
def two_products_kernel(p_a: tl.tensor, p_y: tl.tensor, num: int, KIND: tl.constexpr) -> None:
    """Two products in a loop, one way or another."""
    o_a = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    zeros = tl.zeros([64, 64], tl.float32)
    b_y, b_z = zeros, zeros
    for i in range(num):
        # [64, 64]
        b_a = tl.load(p_a + i * 4096 + o_a)
        if KIND == "chained":
            b_y = dot(b_a, b_a, dot(b_a, b_a, b_y))
        elif KIND == "chained and scaled":
            b_y = dot(b_a, b_a, 0.5 * dot(b_a, b_a, 0.25 * b_y))
        elif KIND == "chained where asked":
            b_y = dot(b_a, b_a, b_y)
            if i % 2 == 0:
                b_y = dot(b_a, b_a, b_y)
        elif KIND == "a factor":
            b_z = dot(b_y.to(tl.float16), b_a, b_z)
            b_y = dot(b_a, b_a, 0.5 * b_y)
        elif KIND == "a factor afterwards":
            b_y = dot(b_a, b_a, b_y)
            b_z += tl.sum(dot(b_y.to(tl.float16), b_a, zeros), axis=1)[:, None]
        elif KIND == "apart":
            b_y = dot(b_a, b_a, b_y)
            b_z = dot(b_a, b_a, b_z)
        elif KIND == "attention":
            # What is carried is scaled; the product that makes the factor begins anew.
            b_s = dot(b_a, b_a, dot(b_a, b_a, zeros))
            b_y = dot(b_s.to(tl.float16), b_a, b_y * tl.max(b_s, axis=1)[:, None])
        elif KIND == "two loops":
            for _ in range(num):
                b_z = dot(b_a, b_a, b_z)
            for _ in range(num):
                b_z = dot(b_a, b_a, b_z)
    tl.store(p_y + o_a, b_y + b_z)


WRONG = {
    "chained": "2 products are added",
    "chained and scaled": "2 products are added",
    "chained where asked": "2 products are added",
    "a factor": "is a factor",
    "a factor afterwards": "is a factor",
}
RIGHT = ("apart", "attention", "two loops")


def faults_of_kind(kind: str) -> list[str]:
    def launch() -> None:
        a, y = torch.empty(64, 64, dtype=torch.float16, device="meta"), torch.empty(64, 64, device="meta")
        run(two_products_kernel, (1,), a, y, 7, KIND=kind, num_warps=4)

    ((_, text),) = ttir_of(launch).items()
    assert "tt.dot " in text
    return faults(text)


def test_what_is_compiled_wrongly_is_found(compilers: RankPool) -> None:
    for kind, message in WRONG.items():
        found = compilers.run(faults_of_kind, 1, kind)[0]
        assert found and all(message in line for line in found), (kind, found)


def test_what_is_compiled_rightly_is_left_alone(compilers: RankPool) -> None:
    for kind in RIGHT:
        assert compilers.run(faults_of_kind, 1, kind)[0] == [], kind


def test_a_while_that_carries_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="a while that carries a tensor"):
        faults("%b = scf.while (%c = %d) : (tensor<4xf32>) -> tensor<4xf32> {")
