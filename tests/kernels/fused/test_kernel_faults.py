"""Rung: interpreter, several processes. Calls of fused operators that cannot go well: all ranks raise and say why.

Ranks are those of test_kernels.py. What only a GPU shows is in test_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.arena_ranks import cases, results
from support.ranks.kernel_ranks import kernel_communicator, wrong_results
from support.ranks.rank_pool import RankPool
from support.ranks.standstill import Standstill
from tpkernels.fused import scatter
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.kernels import scatter_kernel
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter

pytest.importorskip("triton")

ROOMY = 1 << 18
STRATEGIES = ("fused", "push")


def raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors_when_a_rank_stays_away() -> list[str]:
    """Rank 1 makes no call; then all reset, and go on."""
    comm = kernel_communicator(dist.group.WORLD, "fused", ROOMY, timeout_seconds=0.5)
    arena = comm.device_arena
    assert arena is not None
    case = cases((7,))[3]
    messages = []
    for strategy, operator in (("fused", 0), ("push", 0), ("fused", 3)):
        comm.strategy = strategy
        case = cases((7,))[operator]
        error = ""
        standstill = Standstill(arena, dist.group.WORLD)
        if comm.rank == 1:
            standstill.leave()
        else:
            with standstill:
                error = raised_by(lambda case=case: results(case, comm))  # type: ignore[misc]
        dist.barrier()
        # Who was away hears of it when it comes.
        again = raised_by(lambda case=case: results(case, comm))  # type: ignore[misc]
        messages += [error, again]
        dist.barrier()
        arena.reset(dist.group.WORLD)
        with Standstill(arena, dist.group.WORLD):
            wrong = wrong_results(comm, cases((7,))[:4])
            assert not wrong, "\n".join(wrong)
    return messages


@pytest.mark.slow
def test_a_rank_that_stays_away_is_named_by_all(interpreters: RankPool) -> None:
    everyone = interpreters.run(errors_when_a_rank_stays_away, 3)
    for rank, messages in enumerate(everyone):
        for during, after in zip(messages[::2], messages[1::2], strict=True):
            assert "is poisoned: rank" in after and "of rank 1, which gave no signal for about 0.5 s" in after
            assert rank == 1 or during == after
        assert "the shard of rank 1" in messages[1] and "all_gather_matmul of 7 x 5 float32" in messages[1]
        assert "split 0 of what is sent of rank 1" in messages[3] and "split 0 of what is sent of rank 1" in messages[5]
        for message in messages[1::2]:
            assert message.startswith("PeerTimeout" if f"rank {rank} waited" in message else "GroupPoisoned")


def errors_of_different_calls() -> list[str]:
    comm = kernel_communicator(dist.group.WORLD, "fused", ROOMY)
    arena = comm.device_arena
    assert arena is not None
    tokens = 6 if comm.rank else 8
    messages = []
    for strategy in STRATEGIES:
        comm.strategy = strategy
        rows = tokens // 2
        call = lambda rows=rows: all_gather_matmul(torch.ones(rows, 3), [torch.ones(4, 3)], comm)  # noqa: E731
        messages.append(raised_by(call))
        dist.barrier()
        arena.reset(dist.group.WORLD)
    messages.append(raised_by(lambda: matmul_reduce_scatter(torch.ones(tokens, 3), torch.ones(4, 3), comm)))
    dist.barrier()
    arena.reset(dist.group.WORLD)
    assert not wrong_results(comm, cases((7,))[:4])
    return messages


def test_different_calls_are_named(interpreters: RankPool) -> None:
    for rank, messages in enumerate(interpreters.run(errors_of_different_calls, 2)):
        assert all(f"rank {rank} calls" in message for message in messages)
        assert all(message.startswith("CallMismatch: every rank of group") for message in messages)
        assert all("rank 0 and rank 1 do not" in m or "rank 1 and rank 0 do not" in m for m in messages)
        assert "calls all_gather_matmul of" in messages[0] and "calls matmul_reduce_scatter of" in messages[2]


def errors_of_different_kinds() -> list[str]:
    """One gathers, the other scatters, or gathers in another way; nobody waits until the time is over."""
    comm = kernel_communicator(dist.group.WORLD, "fused", ROOMY)
    assert comm.device_arena is not None
    x, weight = torch.ones(4, 3), torch.ones(4, 3)
    gather, scatter = (lambda: all_gather_matmul(x, [weight], comm)), (lambda: matmul_reduce_scatter(x, weight, comm))
    messages = []
    for strategies, calls in ((("fused",) * 2, (gather, scatter)), (("fused", "push"), (gather,) * 2)):
        comm.strategy = strategies[comm.rank]
        messages.append(raised_by(calls[comm.rank]))
        dist.barrier()
        comm.device_arena.reset(dist.group.WORLD)
    return messages


def test_different_kinds_of_call_are_no_timeout(interpreters: RankPool) -> None:
    for messages in interpreters.run(errors_of_different_kinds, 2):
        assert all(message.startswith("CallMismatch: every rank of group") for message in messages), messages


def errors_heard_without_a_call() -> tuple[str, str]:
    """Rank 1 leaves, as for want of memory; the others only ask, once at what their host knows, once at the device."""
    comm = kernel_communicator(dist.group.WORLD, "fused", ROOMY)
    arena = comm.device_arena
    assert arena is not None
    if comm.rank == 1:
        arena.leave()
    dist.barrier()
    return raised_by(arena.check), raised_by(comm.check)


def test_check_hears_of_what_no_kernel_has_seen(interpreters: RankPool) -> None:
    for rank, (at_once, after) in enumerate(interpreters.run(errors_heard_without_a_call, 3)):
        assert "rank 1 refused its own" in after
        assert at_once == (after if rank == 1 else "")


def errors_when_memory_is_short() -> str:
    """A rank fails in the middle of a call: the others hear of it at once."""
    comm = kernel_communicator(dist.group.WORLD, "fused", ROOMY)
    if comm.rank == 1:
        scatter.launch_matmul_scatter = failing
    try:
        return raised_by(lambda: [matmul_reduce_scatter(torch.ones(4, 3), torch.ones(4, 3), comm) for _ in range(2)])
    finally:
        scatter.launch_matmul_scatter = scatter_kernel.launch_matmul_scatter


def failing(*_: Any) -> None:
    raise MemoryError("no memory left")


def test_a_rank_that_fails_in_a_call_is_named(interpreters: RankPool) -> None:
    first, second, third = interpreters.run(errors_when_memory_is_short, 3)
    assert second == "MemoryError: no memory left"
    assert first == third and "rank 1 refused its own" in first


def errors_of_a_bad_call() -> str:
    comm = kernel_communicator(dist.group.WORLD, "fused", ROOMY)
    weight = torch.ones(4, 5 if comm.rank == 1 else 3)
    return raised_by(lambda: all_gather_matmul(torch.ones(2, 3), [weight], comm))


def test_a_bad_call_of_one_rank_ends_on_all(interpreters: RankPool) -> None:
    first, second, third = interpreters.run(errors_of_a_bad_call, 3)
    assert second.startswith("ValueError: all_gather_matmul needs x[T/tp, D]")
    assert first == third and first.startswith("CallMismatch") and "rank 1 refused its own" in first


def check_unsupported_dtypes() -> None:
    """All ranks refuse the dtypes before anything is poisoned."""
    comm = kernel_communicator(dist.group.WORLD, "fused", ROOMY)
    assert comm.device_arena is not None
    for dtype in (torch.float8_e4m3fn, torch.int64, torch.complex64):
        x = torch.ones(2, 4).to(dtype)
        with pytest.raises(ValueError, match=f"all_gather_matmul multiplies .*: got {dtype}"):
            all_gather_matmul(x, [x], comm)
        with pytest.raises(ValueError, match=f"matmul_reduce_scatter multiplies .*: got {dtype}"):
            matmul_reduce_scatter(x, x, comm)
        comm.check()
    wrong = wrong_results(comm, cases((7,))[3:4])
    assert not wrong, "\n".join(wrong)


def test_dtypes_that_no_kernel_takes_leave_the_group_usable(interpreters: RankPool) -> None:
    interpreters.run(check_unsupported_dtypes, 2)


def errors_of_wide_rows() -> list[str]:
    comm = kernel_communicator(dist.group.WORLD, "fused", 1 << 12)
    rows = torch.ones(2, 2000)
    return [
        raised_by(lambda: all_gather_matmul(rows, [torch.ones(3, 2000)], comm)),
        raised_by(lambda: matmul_reduce_scatter(torch.ones(4, 3), torch.ones(2000, 3), comm)),
    ]


def test_a_row_wider_than_the_arena_is_refused_on_every_rank(interpreters: RankPool) -> None:
    first, second = interpreters.run(errors_of_wide_rows, 2)
    assert first == second
    assert all("a row must fit into the arena: rows of 8000 bytes" in message for message in first)
