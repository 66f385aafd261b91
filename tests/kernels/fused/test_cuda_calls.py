"""Rung: GPU. Fused calls that go wrong, that are under way while the host goes on, and in CUDA graphs.

Two and four ranks share a GPU. One small case of each check is interpreted, so that it runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.arena_ranks import Case, cases, expected, inputs_of, results
from support.ranks.gpu_ranks import ROOMY, Run, agreements, hostile, moved, rungs, settle, wrong_results
from support.ranks.standstill import Standstill
from torch import Tensor
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter

pytest.importorskip("triton")

HALF = torch.float16


def raised_by(comm: Communicator, call: Callable[[], Any]) -> str:
    try:
        call()
        settle(comm)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# A GPU counts polls, whatever the machine does. But a rank's host may be late with its launch.
BOUND_SECONDS = 3.0


def waits_that_end(device: str, arena: DeviceArena) -> AbstractContextManager[object]:
    """Where kernels are interpreted, time passes when no rank can go on."""
    return nullcontext() if device == "cuda" else Standstill(arena, dist.group.WORLD)


def gather_some(device: str, comm: Communicator, rows: int) -> None:
    all_gather_matmul(torch.ones(rows, 5, device=device), [torch.ones(4, 5, device=device)], comm)


def scatter_some(device: str, comm: Communicator, rows: int) -> None:
    matmul_reduce_scatter(torch.ones(rows * comm.size, 5, device=device), torch.ones(4, 5, device=device), comm)


def push_some(device: str, comm: Communicator, rows: int) -> None:
    comm.strategy = "push"
    try:
        gather_some(device, comm, rows)
    finally:
        comm.strategy = "fused"


# What a call is named in messages, and how it exchanges.
CALLS = {
    "all_gather_matmul, which pulls": gather_some,
    "all_gather_matmul, which pushes": push_some,
    "matmul_reduce_scatter, which scatters": scatter_some,
}


def errors_when_a_rank_stays_away(device: str, name: str) -> tuple[str, str]:
    """Rank 1 makes no call, and then comes; afterwards all reset, and go on."""
    patient = hostile(device, "fused", ROOMY)
    # Nobody compiles later, when others wait for a bound only.
    assert not wrong_results(device, patient, cases((7,))[3:4])
    CALLS[name](device, patient, 3)
    settle(patient)
    comm = hostile(device, "fused", ROOMY, timeout_seconds=BOUND_SECONDS)
    assert comm.device_arena is not None
    error = ""
    with waits_that_end(device, comm.device_arena):
        if comm.rank != 1:
            error = raised_by(comm, lambda: CALLS[name](device, comm, 3))
    dist.barrier()
    again = raised_by(comm, lambda: CALLS[name](device, comm, 3))
    dist.barrier()
    comm.device_arena.reset(dist.group.WORLD)
    assert not wrong_results(device, comm, cases((7,))[3:4])
    return error, again


@rungs(
    "world, name",
    (2, "all_gather_matmul, which pulls"),
    *((world, name) for world in (2, 4) for name in CALLS),
)
def test_a_rank_that_stays_away_is_named_by_all(run: Run, device: str, world: int, name: str) -> None:
    operation, how = name.split(", ")
    for rank, (during, after) in enumerate(run(device, world, errors_when_a_rank_stays_away, name)):
        assert f"{operation} of {3 * world} x " in after and f"float32 from row 0, {how}, epoch 1 (seen 0)" in after
        assert "is poisoned: rank" in after and "of rank 1, which gave no signal for about 3 s" in after
        assert after.startswith("PeerTimeout" if f"rank {rank} waited" in after else "GroupPoisoned")
        assert rank == 1 or during == after


def errors_of_different_calls(device: str, name: str) -> str:
    comm = hostile(device, "fused", ROOMY)
    assert comm.device_arena is not None
    message = raised_by(comm, lambda: CALLS[name](device, comm, 3 if comm.rank else 4))
    dist.barrier()
    comm.device_arena.reset(dist.group.WORLD)
    assert not wrong_results(device, comm, cases((7,))[3:4])
    return message


@rungs("name", ("matmul_reduce_scatter, which scatters",), *((name,) for name in CALLS))
def test_different_calls_are_named(run: Run, device: str, name: str) -> None:
    operation, _ = name.split(", ")
    for rank, message in enumerate(run(device, 2, errors_of_different_calls, name)):
        assert message.startswith("CallMismatch: every rank of group")
        assert "rank 0 and rank 1 do not" in message or "rank 1 and rank 0 do not" in message
        assert f"rank {rank} calls {operation} of {6 if rank else 8} x" in message


def errors_of_a_bad_call(device: str) -> str:
    comm = hostile(device, "fused", ROOMY)
    weight = torch.ones(4, 5 if comm.rank == 1 else 3, device=device)
    return raised_by(comm, lambda: all_gather_matmul(torch.ones(2, 3, device=device), [weight], comm))


@rungs("world", (2,), (4,))
def test_a_bad_call_of_one_rank_ends_on_all(run: Run, device: str, world: int) -> None:
    messages = run(device, world, errors_of_a_bad_call)
    assert messages.pop(1).startswith("ValueError: all_gather_matmul needs x[T/tp, D]")
    assert all(m.startswith("CallMismatch") and "rank 1 refused its own" in m for m in messages)


@contextmanager
def waiting_is_an_error(is_error: bool) -> Iterator[None]:
    """Have torch raise where it would wait for the device."""
    if not is_error:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_host_goes_on(device: str, strategy: str, many: Sequence[Case]) -> None:
    """A call returns before any peer has made it, and nothing in it waits for the device."""
    comm = Communicator(dist.group.WORLD, arena_bytes=ROOMY, device=torch.device(device), strategy=strategy)
    everyone = [moved(device, inputs_of(case, comm.rank, comm.size)) for case in many]
    # At first memory is allocated and kernels are loaded, for which a device may stop.
    for ahead in (False, device == "cuda"):
        if ahead and comm.rank:
            dist.barrier()
        with waiting_is_an_error(ahead):
            got = [results(case, comm, inputs) for case, inputs in zip(many, everyone, strict=True)]
        if ahead and not comm.rank:
            dist.barrier()
        settle(comm)
        dist.barrier()
    for case, tensors in zip(many, got, strict=True):
        assert all(agreements(tensors, expected(case, comm.rank, comm.size))), case


@pytest.mark.by_default("cuda-2-push", "cuda-2-fused")
@rungs("world, strategy", (2, "push"), (2, "fused"), (2, "push"))
def test_the_host_goes_on(run: Run, device: str, world: int, strategy: str) -> None:
    many = cases((40,), dim=16, dtype=HALF)
    run(device, world, check_host_goes_on, strategy, many[3:4] if device == "cpu" else many)


def captured(compute: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
    """A CUDA graph of what is computed, to be replayed, and its results."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            compute()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = compute()
    return graph.replay, got


def check_replays(device: str, strategy: str, many: Sequence[Case], is_odd: bool) -> None:
    """Forward and backward in one graph, of an odd or an even number of calls; then calls outside of it.

    Without biases y and dx are multiplied by what x and dy are multiplied by, and dw by its square.
    """
    comm = Communicator(dist.group.WORLD, arena_bytes=ROOMY, device=torch.device(device), strategy=strategy)
    arena = comm.device_arena
    assert arena is not None
    drawn = [inputs_of(case, comm.rank, comm.size) for case in many]
    everyone = [moved(device, inputs) for inputs in drawn]

    def compute() -> list[list[Tensor]]:
        return [results(case, comm, inputs) for case, inputs in zip(many, everyone, strict=True)]

    before = arena.generation
    # Captured, it has been computed three times: an odd number of times too.
    replay, got = captured(compute) if device == "cuda" else (lambda: None, compute())
    assert (arena.generation != before) == is_odd
    wants = [expected(case, comm.rank, comm.size) for case in many]
    for factor in (2, -1, 3, -2, 1) if device == "cuda" else (2,):
        for inputs, original in zip(everyone, drawn, strict=True):
            for t, value in zip([inputs.x, *inputs.dys], [original.x, *original.dys], strict=True):
                t.copy_(factor * value)
        replay()
        got = got if device == "cuda" else compute()
        settle(comm)
        for case, tensors, (y, dx, dweight) in zip(many, got, wants, strict=True):
            want = [factor * y, factor * dx, factor * factor * dweight]
            assert agreements(tensors, want) == [True] * 3, f"rank {comm.rank}, times {factor}: {case}"
    wrong = wrong_results(device, comm, cases((7,))[:4])
    assert not wrong, "\n".join(wrong)


GRAPHS = {
    # Gather and scatter, and in backward each the other.
    "even": (
        [Case("all_gather_matmul", 40, 16, (24,), HALF), Case("matmul_reduce_scatter", 40, 16, (24,), HALF)],
        False,
    ),
    # A gather, then one that is hidden behind a scatter.
    "odd": ([Case("all_gather_matmul", 40, 16, (24,), HALF, keep_gathered=False)], True),
    # A gather without a matmul comes first in nothing that has begun.
    "all-reduce": ([Case("matmul_all_reduce", 40, 16, (24,), HALF)], False),
}


@pytest.mark.by_default(
    *(f"cuda-2-{strategy}-{graph}" for strategy in ("fused", "push") for graph in GRAPHS),
    *("cuda-4-fused-even", "cuda-4-fused-odd"),
)
@rungs(
    "world, strategy, graph",
    (2, "push", "odd"),
    *((2, strategy, graph) for strategy in ("fused", "push") for graph in GRAPHS),
    (4, "fused", "even"),
    (4, "fused", "odd"),
)
def test_cuda_graphs_replay(run: Run, device: str, world: int, strategy: str, graph: str) -> None:
    run(device, world, check_replays, strategy, *GRAPHS[graph])


def check_each_kind(device: str, strategies: Sequence[str], graphs: Sequence[str]) -> None:
    for strategy in strategies:
        for name in graphs:
            check_replays(device, strategy, *GRAPHS[name])


@pytest.mark.by_default("cuda-2-strategies1-graphs1")
@rungs("world, strategies, graphs", (2, ("fused",), ("all-reduce",)), (2, ("fused", "push"), tuple(GRAPHS)))
def test_each_kind_replays(run: Run, device: str, world: int, strategies: Sequence[str], graphs: Sequence[str]) -> None:
    """For a GPU that is lent for minutes: processes start once for all that the tests above start them for each."""
    run(device, world, check_each_kind, strategies, graphs)
