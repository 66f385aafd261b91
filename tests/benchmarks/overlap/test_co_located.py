"""Rungs: interpreter, GPU. Co-located ranks: what their checks say of each case, and on a GPU that all of them pass.

Only a GPU shows that no rank holds what another needs, and that the fused kernels are right between co-located ranks.
No time is measured anywhere: what fusing hides, ranks that share a GPU cannot show.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from support import ROOT
from support.ranks.progress import run_program
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.copies import HostCopies
from tpkernels.symmetric.signals_kernel import PUBLISHED, TIMED_OUT, VERDICT_WORDS

from benchmarks.harness.shapes import Model
from benchmarks.overlap import co_located
from benchmarks.overlap.cases import Case, Operands, cases_of
from benchmarks.overlap.co_located import checks, ways_of
from benchmarks.overlap.ranks import VirtualRanks
from benchmarks.overlap.ways import Reference, Way

TINY = Model("tiny", 24, 4, 2, 16, 20, 96)
CASES = (
    "all_gather_matmul/forward",
    "matmul_reduce_scatter/forward",
    "all_gather_matmul/dgrad",
    "matmul_reduce_scatter/dgrad",
    "all_gather_matmul/backward_regathering",
    "pair/forward",
    "pair/backward",
)
# With what can be pushed, and without.
FEW = CASES[:2]
# At the sizes of a rank of Llama-3 8B: few tokens, which may be pushed, and many tiles, which copy engines fetch.
ON_A_GPU = """
import json, sys
import torch
from benchmarks.harness.shapes import MODELS
from benchmarks.overlap.co_located import checks
from benchmarks.overlap.ranks import RanksClock, VirtualRanks, prepare_environment
prepare_environment()
ranks = VirtualRanks(int(sys.argv[1]), torch.device("cuda", 0))
clock = RanksClock(ranks)
print(json.dumps({f"{name}, {tokens} tokens": check for tokens in (512, 4096)
                  for name, check in checks(MODELS[0], tokens, ranks, clock).items()}))
"""
T = TypeVar("T")


class HostTime:
    """A clock for calls that wait for their own work."""

    def timed(self, call: Callable[[], T], name: object = None) -> tuple[float, T]:
        begin = time.perf_counter()
        result = call()
        return time.perf_counter() - begin, result


def ranks_on(device: str, world: int) -> VirtualRanks:
    return VirtualRanks(world, torch.device(device), [HostCopies() for _ in range(world)])


few_by_default = pytest.mark.parametrize(
    "cases", [FEW, pytest.param(CASES, marks=pytest.mark.slow)], ids=["few", "all"]
)


def checks_with_stand_ins(cases: tuple[str, ...], failing: str) -> dict[str, str]:
    """Checks of some cases; what waits for others is replaced by what does not, and may fail."""

    def chosen(o: Operands) -> list[Case]:
        return [case for case in cases_of(o) if case.name in cases]

    def stand_ins(case: Case, o: Operands, arenas: Any) -> dict[str, Way]:
        ways = ways_of(case, o, arenas)
        replaced: dict[str, Way] = {name: Reference(o.ranks, True) for name in ("fused", "push") if name in ways}
        if failing in replaced:
            verdict = torch.tensor([TIMED_OUT, 1, 0, PUBLISHED, 6, 5, 0])

            def give_up(*_: Any) -> Any:
                arenas[0]._record[:VERDICT_WORDS].copy_(verdict)
                return o.x.full, o.x.full

            replaced[failing].gather = give_up  # type: ignore[method-assign]
        return ways | replaced

    with patch.multiple(co_located, ways_of=stand_ins, cases_of=chosen):
        return checks(TINY, 6, ranks_on("cpu", 2), HostTime(), torch.float32)


@few_by_default
def test_every_case_has_its_check(interpreters: RankPool, cases: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    assert interpreters.run(checks_with_stand_ins, 1, cases, "") == [dict.fromkeys(cases, "passed")]


@few_by_default
def test_a_call_that_was_given_up_is_a_red_check_of_its_case_alone(
    interpreters: RankPool, cases: tuple[str, ...]
) -> None:
    pytest.importorskip("triton")
    (found,) = interpreters.run(checks_with_stand_ins, 1, cases, "fused")
    assert list(found) == list(cases)
    red = {name: check for name, check in found.items() if check != "passed"}
    assert list(red) == [CASES[i] for i in (0, 3, 5, 6) if CASES[i] in cases]
    for check in red.values():
        assert check.startswith("failed: rank 0: group of co-located ranks is poisoned: rank 1 waited in ")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_cuda_ranks_have_the_right_results(num_ranks: int) -> None:
    """In a process of its own: CUDA reads how many hardware queues are asked for when it starts."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", ON_A_GPU, str(num_ranks)]
    done = run_program(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2 * len(CASES) and set(found.values()) == {"passed"}, found
