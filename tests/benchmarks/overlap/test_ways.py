"""Rungs: pure, interpreter. The ways in which co-located ranks compute: what they launch, and that it is right.

Interpreted, the ways that wait for nobody compute in one process, and are compared with what is right; what the others
launch is looked at. Only a GPU shows that those are right between co-located ranks (test_co_located.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.copies import CopiedArea, Fetch
from tpkernels.launch import Target, observed
from tpkernels.symmetric.wait_kernels import launch_wait

from benchmarks.harness.shapes import MODELS, Model
from benchmarks.overlap.cases import Case, Operands, cases_of
from benchmarks.overlap.co_located import arenas_for, check, ways_of
from benchmarks.overlap.ranks import VirtualRanks
from benchmarks.overlap.ways import Way

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
T = TypeVar("T")


class HostTime:
    """A clock for calls that wait for their own work."""

    def timed(self, call: Callable[[], T], name: object = None) -> tuple[float, T]:
        begin = time.perf_counter()
        result = call()
        return time.perf_counter() - begin, result


class LookedAt:
    """A copy engine that launches what a stream's does, and copies nothing."""

    def launch(self, kernel: Callable[[], None], target: torch.Tensor) -> None:
        kernel()

    def start(self, arena: CopiedArea, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        for fetch in fetches:
            if fetch.peer != arena.rank:
                launch_wait(arena, fetch.peer, 1, generation, call)

    def join(self) -> None: ...
    def reset(self) -> None: ...


def ranks_on(device: str, world: int) -> VirtualRanks:
    return VirtualRanks(world, torch.device(device), [LookedAt() for _ in range(world)])


def launched(case_name: str, model: Model, tokens: int, world: int) -> dict[str, Counter[str]]:
    """How often each variant of a case launches each kernel on a Hopper GPU."""
    counts: dict[str, Counter[str]] = {}
    with observed(Target("cuda", 90), lambda kernel, grid, *_: None):
        o = Operands(model, tokens, ranks_on("meta", world))
        (case,) = [case for case in cases_of(o) if case.name == case_name]
        ways = ways_of(case, o, arenas_for(o))
    for name, way in ways.items():
        count = counts[name] = Counter()
        with observed(Target("cuda", 90), lambda kernel, *_, count=count: count.update([kernel.fn.__name__])):
            case.compute(way)
    return counts


MATMUL, GATHERING, SCATTERING = "matmul_kernel", "gather_matmul_kernel", "matmul_scatter_kernel"
PUBLISH, WAIT = "publish_kernel", "wait_kernel"
FETCH = "fetch_kernel"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("case", CASES)
def test_each_bar_launches_what_it_stands_for(case: str, model: Model) -> None:
    """Count what four ranks launch; copies launch nothing of ours."""
    pytest.importorskip("triton")
    gathers = case in (CASES[0], CASES[3], CASES[5], CASES[6])
    scatters = case in (CASES[1], CASES[2], CASES[4], CASES[5], CASES[6])
    num_wgrads = {CASES[4]: 1, CASES[6]: 2}.get(case, 0)
    products = 4 * (gathers + scatters)
    wgrads = {MATMUL: 4 * num_wgrads}
    gathered = {GATHERING: 4} if gathers else {}
    scattered = Counter({SCATTERING: 4} if scatters else {})
    want = {
        "kernel": {MATMUL: products + 4 * num_wgrads},
        "own": wgrads | gathered | ({SCATTERING: 4} if scatters else {}),
        "fused": Counter(wgrads | gathered) + scattered,
    }
    pushes = {"push": Counter(wgrads | gathered) + scattered} if gathers else {}
    # Small shards are fetched by a kernel, large ones by copy engines behind a wait for each peer.
    pulls = gathers or case == CASES[4]
    fetched, copied = ({PUBLISH: 4, FETCH: 4}, {PUBLISH: 4, WAIT: 12}) if pulls else ({}, {})
    for tokens, expected, more in ((512, want | pushes, fetched), (4096, want, copied)):
        counts = {name: Counter(count) for name, count in expected.items()}
        counts["fused"] += Counter(more)
        assert launched(case, model, tokens, 4) == counts


def test_programs_keep_to_a_ranks_part_of_the_processors() -> None:
    """Large tiles take a processor each: four ranks' programs are all resident on 132 of them."""
    pytest.importorskip("triton")
    grids: dict[str, set[int]] = {}

    def note(kernel: Any, grid: tuple[int, ...], *_: Any) -> None:
        grids.setdefault(kernel.fn.__name__, set()).add(grid[0])

    with observed(Target("cuda", 90), note):
        ranks = ranks_on("meta", 4)
        assert ranks.processors == 33
        o = Operands(MODELS[2], 4096, ranks)
        case = cases_of(o)[-1]
        for way in ways_of(case, o, arenas_for(o)).values():
            case.compute(way)
    assert grids[GATHERING] == {32} and grids[SCATTERING] == {33} and max(grids[MATMUL]) <= 33
    assert grids[PUBLISH] == {33}


def interpreted_ways(case: Case, o: Operands, arenas: Any) -> dict[str, Way]:
    """Return the ways, except those that wait for ranks whose turn in this process is later."""
    ways = ways_of(case, o, arenas)
    return {name: way for name, way in ways.items() if name not in ("fused", "push")}


def check_variants(world: int, tokens: int) -> None:
    o = Operands(TINY, tokens, ranks_on("cpu", world), torch.float32)
    assert [case.name for case in cases_of(o)] == list(CASES)
    for case in cases_of(o):
        arenas = arenas_for(o)
        check(case, o, interpreted_ways(case, o, arenas), arenas, HostTime())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "tokens"), [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((3, 19), (4, 7)))]
)
def test_what_waits_for_nobody_is_right(interpreters: RankPool, world: int, tokens: int) -> None:
    pytest.importorskip("triton")
    interpreters.run(check_variants, 1, world, tokens)


def broken(case_name: str, variant: str, break_: Callable[[Way], Any]) -> str:
    """What the check says of a variant that is broken in a case; empty if it does not notice."""
    o = Operands(TINY, 10, ranks_on("cpu", 3), torch.float32)
    (case,) = [case for case in cases_of(o) if case.name == case_name]
    arenas = arenas_for(o)
    way = ways_of(case, o, arenas)[variant]
    with break_(way):
        try:
            check(case, o, {variant: way}, arenas, HostTime())
        except AssertionError as error:
            return str(error)
    return ""


def check_that_errors_are_noticed() -> None:
    """A slot nobody fills, or at another place, a gradient nobody adds, a kernel that computes something else."""
    scatter, gather, backward = CASES[1], CASES[0], CASES[6]
    unwritten = patch("benchmarks.overlap.ways.launch_matmul_scatter", lambda *_: None)
    elsewhere = patch(
        "benchmarks.overlap.ways.slot_of", lambda arena, owner, *_: torch.empty(4, 24)[: 4 - 2 * (owner > 1)]
    )
    breaks: list[tuple[str, str, Callable[[Way], Any]]] = [
        (scatter, "own", lambda way: elsewhere),
        (scatter, "own", lambda way: unwritten),
        (gather, "own", lambda way: patch("benchmarks.overlap.ways.launch_gather_matmul", lambda *_: None)),
        (gather, "kernel", lambda way: patch.object(way, "product", lambda a, b: a @ b + 1)),
        (backward, "kernel", lambda way: patch.object(way, "wgrad", lambda *_: None)),
    ]
    for case, variant, break_ in breaks:
        found = broken(case, variant, break_)
        assert found.startswith(f"{variant}: differs by up to "), (case, variant, found)


def test_a_wrong_variant_is_noticed(interpreters: RankPool) -> None:
    pytest.importorskip("triton")
    interpreters.run(check_that_errors_are_noticed, 1)
