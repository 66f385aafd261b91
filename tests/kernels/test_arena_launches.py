"""Rung: pure: compiles, runs nothing. Launches of an arena that are made again: what they pass to the driver.

The driver is none (still_gpu.py) and notes what it is given. Only a GPU shows that it launches.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CountMutations
from support.kernels.compiled import CACHE_VARIABLE
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")

import triton
from tpkernels import launch
from tpkernels.fused.scatter import matmul_scatter
from tpkernels.launch import Launches

from benchmarks.harness.still_gpu import still_gpu, why_not_still
from benchmarks.launches.host_time import CALLS, Rank

needs_still_gpu = pytest.mark.skipif(why_not_still() is not None, reason=str(why_not_still()))


def passed(arguments: Sequence[Any]) -> list[Any]:
    """What the driver is passed: addresses instead of tensors."""
    return [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]


def both_ways(name: str) -> list[tuple[list[Any], list[Any]]]:
    """What the driver is passed by each launch of a call that was made before: made again, and bound by triton."""
    triton.knobs.cache.dir = str(Path(os.environ[CACHE_VARIABLE]) / "triton")
    strategy, call = CALLS[name]
    rank, launched, pairs = Rank.of(3, strategy), [], []
    kept = Launches.again

    def again_and_anew(self: Launches, key: tuple[Any, ...], call: int, *values: Any) -> bool:
        if kept(self, key, call, *values):
            pairs.append(launched[-1])
        return False  # so that the launcher goes on to `first`

    with still_gpu(lambda *arguments: launched.append(passed(arguments))), pytest.MonkeyPatch.context() as patch:
        for _ in range(2):  # both generations
            call(rank)
        patch.setattr(Launches, "again", again_and_anew)
        patch.setattr(
            launch, "_launched", lambda kernel, grid, arguments, options, *_: kernel[grid](*arguments, **options)
        )
        num_before = len(launched)
        call(rank)
    made = launched[num_before:]
    assert made[::2] == pairs
    return list(zip(made[::2], made[1::2], strict=True))


# By default what has descriptors, and is one kernel to compile.
@pytest.mark.slow
@needs_still_gpu
@pytest.mark.parametrize(
    ("name", "num_launches"),
    [
        ("gather_matmul/push", 1),
        pytest.param("gather_matmul/kernel/keep", 3, marks=pytest.mark.slow),
        pytest.param("scatter_and_gather/kernel", 3, marks=pytest.mark.slow),
        pytest.param("gather_matmul/engine", 4, marks=pytest.mark.slow),
    ],
)
def test_a_launch_made_again_is_the_one_that_triton_binds(compilers: RankPool, name: str, num_launches: int) -> None:
    ((*pairs,),) = compilers.run(both_ways, 1, name)
    assert len(pairs) == num_launches
    for again, anew in pairs:
        assert again == anew


def launches_made_again(misaligned: bool, *, blind: bool = False) -> list[bool]:
    """Of four scatters, whether each is made again; the operands of the last are of another dtype or alignment."""
    triton.knobs.cache.dir = str(Path(os.environ[CACHE_VARIABLE]) / "triton")
    rank, made = Rank.of(2, "kernel"), []
    kept = Launches.again

    def noted(self: Launches, *arguments: Any) -> bool:
        made.append(kept(self, *arguments))
        return made[-1]

    odd = torch.zeros(rank.wide.numel() + 1, dtype=rank.wide.dtype)[1:].view_as(rank.wide)
    other = (odd, rank.weight) if misaligned else (rank.wide.half(), rank.weight.half())
    with still_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launches, "again", noted)
        if blind:
            patch.setattr(launch, "_kinds", lambda values: ())
        for x, weight in ((rank.wide, rank.weight),) * 3 + (other,):
            matmul_scatter([(x, weight.T)], rank.comm, "matmul_reduce_scatter")
    return made


@needs_still_gpu
@pytest.mark.slow
@pytest.mark.parametrize("misaligned", [False, True], ids=["dtype", "alignment"])
def test_a_launch_is_not_made_again_for_what_was_not_compiled(
    compilers: RankPool, count_mutations: CountMutations, misaligned: bool
) -> None:
    """Generations alternate, so the third call is the first that has been made before."""
    (made,) = compilers.run(launches_made_again, 1, misaligned)
    assert made == [False, False, True, False]
    (made,) = compilers.run(blindly, 1, misaligned)
    count_mutations("launches made again", int(made != [False, False, True, False]), 1)
    assert made == [False, False, True, True]


def blindly(misaligned: bool) -> list[bool]:
    """A key without dtypes and alignment takes the wrong code."""
    return launches_made_again(misaligned, blind=True)
