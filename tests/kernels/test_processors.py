"""Rung: pure; interpreter and gloo ranks for some. What kernels leave free, so that ranks cannot wait for room.

Every launch of the fused calls is observed, with the stream that it is on, and what may be resident at once is added
up: a kernel waits if its source does. Whether a GPU places programs so, and NCCL holds no more, only GPUs show.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.ranks.arena_ranks import cases
from support.ranks.kernel_ranks import kernel_communicator, wrong_results
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")

from tpkernels import processors
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.copies import CopiedArea, Fetch
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.fused import gather
from tpkernels.fused.kernels.counts_kernel import launch_counts
from tpkernels.fused.kernels.rows_kernel import launch_return, launch_take
from tpkernels.fused.scatter import scatter_by_kernels
from tpkernels.fused.strategy import decide
from tpkernels.launch import Target, num_processors, observed
from tpkernels.processors import Budget
from tpkernels.symmetric.wait_kernels import launch_wait

from benchmarks.overlap.ranks import VirtualRanks

TARGETS = (Target("cuda", 80), Target("cuda", 90), Target("cuda", 100), Target("hip", "gfx942"))
WORLD = 4
# Device functions that wait for another rank.
WAITS = {"wait", "wait_for_epoch", "barrier"}


class Launched(NamedTuple):
    """One launch: its kernel, what the kernel was given, and whether it is on the stream that copies."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    copies: bool


class NotedCopies:
    """A copy engine that launches what a stream's does, copies nothing, and says which launches are its own."""

    def __init__(self) -> None:
        self.is_launching = False

    def launch(self, kernel: Callable[[], None], target: torch.Tensor) -> None:
        self.is_launching = True
        kernel()
        self.is_launching = False

    def start(self, arena: CopiedArea, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        for fetch in fetches:
            if fetch.peer != arena.rank:
                self.launch(lambda peer=fetch.peer: launch_wait(arena, peer, 1, generation, call), torch.empty(0))  # type: ignore[misc]

    def join(self) -> None: ...
    def reset(self) -> None: ...


def launches_of(target: Target, reserved: int) -> tuple[int, list[list[Launched]]]:
    """The processors of a target's GPU, and what each fused call launches there: gathers, scatters, both, and rows."""
    calls: list[list[Launched]] = []
    copies = NotedCopies()

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        calls[-1].append(Launched(kernel, grid[0], named, copies.is_launching))

    with observed(target, note):
        arena = VirtualRanks(WORLD, torch.device("meta"), [copies] * WORLD).arenas(64 << 20)[0]
        arena.processors, arena.reserved_processors = None, reserved
        for dtype in (torch.bfloat16, torch.float32):
            for tokens in (64, 4096):
                for call in (gathered, pushed, scattered, both, moved):
                    for engine_bytes in (0, 1 << 60):
                        arena.engine_bytes = engine_bytes
                        calls.append([])
                        call(arena, tokens, dtype)
        return num_processors(torch.empty(0, device="meta")), calls


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gathered(arena: DeviceArena, tokens: int, dtype: torch.dtype, strategy: str = "fused") -> None:
    x, w = empty(tokens // WORLD, 1024, dtype=dtype), empty(1024, 2048, dtype=dtype)
    decision = decide(arena, strategy, "gather", x, tokens, [2048, 2048], 1024)
    assert decision is not None
    gather.gather_by_kernels(x, [w, w], [None, None], arena, tokens, "all_gather_matmul", decision, keep=False)


def pushed(arena: DeviceArena, tokens: int, dtype: torch.dtype) -> None:
    gathered(arena, tokens, dtype, "push")


def scattered(arena: DeviceArena, tokens: int, dtype: torch.dtype) -> None:
    x, w = empty(tokens, 2048, dtype=dtype), empty(2048, 1024, dtype=dtype)
    decision = decide(arena, "fused", "scatter", x, tokens, [1024], 2048)
    assert decision is not None
    scatter_by_kernels([(x, w)], None, None, arena, "matmul_reduce_scatter", decision)


def both(arena: DeviceArena, tokens: int, dtype: torch.dtype) -> None:
    gather.start_gather(empty(tokens // WORLD, 1024, dtype=dtype), arena, tokens, "all_gather_matmul")
    scattered(arena, tokens, dtype)
    gather.finish_gather(arena)


def moved(arena: DeviceArena, tokens: int, dtype: torch.dtype) -> None:
    """Rows of experts: one call after another."""
    own, k, num_experts = tokens // WORLD, 2, 8
    x, rows = empty(own, 1024, dtype=dtype), empty(tokens * k, 1024, dtype=dtype)
    order = empty(own * k, dtype=torch.int32)
    segments, offsets, spilled = launch_counts(empty(num_experts, dtype=torch.int32), len(rows), arena, 0, 1)
    launch_take(rows, x, order, None, segments, offsets, arena, k, 4096, 0, 0, 1)
    launch_return(rows, len(order), segments, offsets, spilled, arena, 0, 1)


def waits(kernel: Any) -> bool:
    """Whether a kernel, or a device function that it calls, waits for other ranks."""
    seen: set[Any] = set()
    left = [kernel]
    while left:
        function = left.pop()
        if function in seen:
            continue
        seen.add(function)
        names = re.findall(r"\b(\w+)\(", inspect.getsource(function.fn))
        if WAITS & set(names):
            return True
        module = function.fn.__globals__
        left += [module[name] for name in names if hasattr(module.get(name), "fn")]
    return False


def held(call: Sequence[Launched]) -> int:
    """The most processors that one call's kernels hold while they wait: of each stream one, a program counts as one."""
    most = {False: 0, True: 0}
    all_have_published = False
    for one in call:
        name = one.kernel.fn.__name__
        if one.copies and name == "wait_kernel":
            all_have_published = one.arguments["count"] == WORLD - 1
        # Behind a wait for all, what fetches finds its flags up.
        if waits(one.kernel) and not (name == "fetch_kernel" and all_have_published):
            most[one.copies] = max(most[one.copies], one.programs)
    return sum(most.values())


def overdrawn(target: Target, reserved: int) -> list[str]:
    """The calls that, with what else may be held, need more processors than there are."""
    num, calls = launches_of(target, reserved)
    return [str([one.kernel.fn.__name__ for one in call]) for call in calls if held(call) + reserved > num]


def test_kernels_that_wait_are_found() -> None:
    _, calls = launches_of(TARGETS[1], 8)
    found = {one.kernel.fn.__name__: waits(one.kernel) for call in calls for one in call}
    waiting = ("publish", "gather_matmul", "matmul_scatter", "fetch", "wait", "counts", "take", "return")
    assert found == {f"{name}_kernel": True for name in waiting}
    from tpkernels.fused.kernels.slots import sum_slots_kernel
    from tpkernels.ops.matmul.kernel import matmul_kernel

    assert not waits(sum_slots_kernel) and not waits(matmul_kernel)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_all_that_may_wait_at_once_has_room(target: Target) -> None:
    """Of pipelines, replicas and experts: 2 to 4 for each, up to all of 32 channels, and whatever leaves one."""
    with observed(target, lambda *_: None):
        num = num_processors(torch.empty(0, device="meta"))
    for reserved in (1, 2, 8, 32, num - 2):
        assert overdrawn(target, reserved) == []


def test_alone_they_take_what_they_did() -> None:
    """All of the GPU, but room for what copies beside."""
    num, calls = launches_of(TARGETS[1], 0)
    grids: dict[str, int] = {}
    for one in (one for call in calls for one in call):
        grids[one.kernel.fn.__name__] = max(grids.get(one.kernel.fn.__name__, 0), one.programs)
    assert (grids["publish_kernel"], grids["wait_kernel"], grids["fetch_kernel"]) == (num, 1, WORLD * 8)
    # Two programs of 4 warps fit onto a processor.
    assert (grids["gather_matmul_kernel"], grids["matmul_scatter_kernel"]) == (2 * (num - 1), 2 * num)
    assert (grids["counts_kernel"], grids["take_kernel"], grids["return_kernel"]) == (1, 4 * num, 4 * num)


def test_a_budget_that_is_overdrawn_is_found(monkeypatch: pytest.MonkeyPatch, count_mutations: CountMutations) -> None:
    mutants: dict[str, tuple[Any, str, Any]] = {
        "one processor, whatever is reserved": (processors, "left_free", lambda reserved, *, beside_copies: 1),
        "none for copies": (processors, "left_free", lambda reserved, *, beside_copies: reserved),
        "two programs on a processor": (processors, "programs_together", lambda reserved, fitting: fitting),
        "all that fetch wait": (gather, "wait_for", lambda *_: True),
    }
    found = 0
    for module, name, other in mutants.values():
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            found += bool(overdrawn(TARGETS[1], 8))
    count_mutations("processors left free", found, len(mutants))
    assert found == len(mutants)


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        (Budget(132, 0), ""),
        (Budget(1, 0), ""),
        (Budget(132, 130), ""),
        (
            Budget(132, 131),
            "fused kernels need a processor: of 132 other communication may hold 131 and copies 1: reserve at most "
            "130, by less max_ctas per group, or use plain collectives",
        ),
        (
            Budget(132, -1),
            "reserved_processors must not be negative: got -1: pass 0 if nothing else communicates",
        ),
    ],
)
def test_a_budget_without_a_processor_is_refused(budget: Budget, problem: str) -> None:
    assert budget.problem() == problem


def test_every_kernel_has_a_program() -> None:
    assert Budget(132, 8).programs(1000, 2, beside_copies=True) == 123
    assert Budget(132, 0).programs(1000, 2, beside_copies=True) == 262
    assert Budget(132, 0).programs(0) == Budget(1, 0).programs(9, beside_copies=True) == 1
    # In turn of nothing but its own waits: none is left for copies.
    assert Budget(132, 0).programs(1000) == 132


def what_open_says(reserved: int) -> str:
    """Interpreted, a GPU has 4 processors."""
    try:
        Communicator(dist.group.WORLD, arena_bytes=1 << 14, reserved_processors=reserved)
        DeviceArena.open(dist.group.WORLD, 1 << 14, torch.device("cpu"), reserved_processors=reserved + dist.get_rank())
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_refuse_alike(interpreters: RankPool) -> None:
    need = "fused kernels need a processor: of 4 other communication may hold 3 and copies 1: reserve at most 2, "
    for said in interpreters.run(what_open_says, 2, 3):
        assert said.startswith(need)
    differs = "all ranks of a group must reserve as many processors: got [1, 2] by rank: pass the most on all"
    assert interpreters.run(what_open_says, 2, 1) == [differs] * 2
    assert all("must not be negative" in said for said in interpreters.run(what_open_says, 2, -1))


def check_with_one_program() -> None:
    for strategy in ("fused", "push", "fetch"):
        comm = kernel_communicator(dist.group.WORLD, strategy, 1 << 18, reserved_processors=2)
        assert comm.device_arena is not None and comm.device_arena.budget(torch.empty(0)) == (4, 2)
        wrong = wrong_results(comm, cases((7,))[:: 7 if strategy == "fused" else 11])
        assert not wrong, "\n".join(wrong)


def test_one_program_of_each_kernel_is_enough(interpreters: RankPool) -> None:
    """Where others may hold 2 of 4 processors, and a kernel fetches behind a wait of its own."""
    interpreters.run(check_with_one_program, 2)


def test_the_most_that_may_be_held_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "_MAY_BE_HELD", {})
    assert processors.may_be_held(0) == 0
    for num in (4, 9, 2):
        processors.hold(0, num)
    assert processors.may_be_held(0) == 9 and processors.may_be_held(1) == 0


def test_products_beside_others_have_a_program_for_each_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpkernels.ops.experts.grouped_kernel import launch_grouped_matmul
    from tpkernels.ops.experts.grouped_swiglu_kernel import launch_grouped_swiglu
    from tpkernels.ops.matmul.kernel import launch_matmul
    from tpkernels.ops.matmul.swiglu_kernel import launch_matmul_swiglu

    grids: list[int] = []
    configs: set[tuple[Any, ...]] = set()
    x, w = empty(8192, 4096, dtype=torch.bfloat16), empty(8192, 4096, dtype=torch.bfloat16)
    experts, offsets = empty(8, 1024, 4096, dtype=torch.bfloat16), torch.empty(9, dtype=torch.int32, device="meta")

    def note(kernel: Any, grid: tuple[int, ...], _: tuple[Any, ...], options: dict[str, Any]) -> None:
        grids.append(grid[0])
        configs.add((kernel.fn.__name__, *(options[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps"))))

    def launch_all(**options: int) -> list[int]:
        grids.clear()
        launch_matmul(x, w.T, **options)
        launch_matmul_swiglu(x, w, False, **options)
        launch_grouped_matmul(x, experts, offsets, **options)
        launch_grouped_swiglu(x, experts, experts, offsets, False, **options)
        return list(grids)

    with observed(Target("cuda", 90), note):
        alone = launch_all()
        few = launch_all(processors=100)
        monkeypatch.setitem(processors._MAY_BE_HELD, -1, 8)
        beside = launch_all()
        # Who says how many gets as many.
        assert launch_all(processors=100) == few
    assert alone[:2] == [132, 132] and few[:2] == [100, 100]
    # 64 x 32 tiles of 128 x 256; 64 x 32 of gate's 128 columns and up's.
    assert beside[:2] == [2048, 2048]
    assert all(one <= 2 * 132 < other for one, other in zip(alone[2:], beside[2:], strict=True))
    assert len(configs) == 4, "tiles do not depend on it, and so bits do not"
