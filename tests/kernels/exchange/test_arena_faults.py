"""Rung: gloo ranks. Ranks that do not come, fail, die or call something else: all hear, and who it was.

No clock of the machine's decides: bounds are reached when all other ranks wait (standstill.py), and where nobody is to
reach one the clock stands still.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.arena_ranks import Case, cases, differences, hostile_communicator
from support.ranks.rank_pool import RankError, RankPool
from support.ranks.standstill import Standstill
from tpkernels.exchange.arena import Arena, CallMismatch
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.matmul_all_reduce import matmul_all_reduce
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.symmetric.signals import GroupPoisoned, PeerError, PeerGone, PeerTimeout

TIMEOUT_SECONDS = 1.0
OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
# By default there is a rank besides the one at fault and the one that finds it.
groups = pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])


def arena_of(comm: Communicator) -> Arena:
    assert comm.arena is not None
    return comm.arena


def communicator_without_time(group: dist.ProcessGroup | None = None, **options: Any) -> Communicator:
    """One whose ranks wait for ever, were it not for what they hear."""
    group = dist.group.WORLD if group is None else group
    comm = hostile_communicator(group, 1 << 13, **{"timeout_seconds": TIMEOUT_SECONDS, **options})
    arena_of(comm).signals.clock = lambda: 0.0
    return comm


def check_all_is_well(comm: Communicator) -> None:
    wrong = [differences(case, comm) for case in cases((1, 7))]
    assert not any(wrong), "\n".join(filter(None, wrong))


def forward(operator: str, comm: Communicator) -> None:
    ones = torch.ones
    if operator == "all_gather_matmul":
        all_gather_matmul(ones(2, 3), [ones(4, 3)], comm)
    elif operator == "matmul_reduce_scatter":
        matmul_reduce_scatter(ones(5, 3), ones(4, 3), comm)
    else:
        matmul_all_reduce(ones(5, 3), ones(4, 3), comm)


def check_a_rank_that_skips_a_call() -> None:
    """The last rank never signals; the others raise within the bound; nobody goes on before all have reset."""
    comm = communicator_without_time()
    arena, late = arena_of(comm), comm.size - 1
    for operator in OPERATIONS:
        check_all_is_well(comm)
        standstill = Standstill(arena, dist.group.WORLD)
        epoch = arena.epoch + 1
        if comm.rank == late:
            standstill.leave()
        else:
            with standstill, pytest.raises((PeerTimeout, GroupPoisoned)) as error:
                forward(operator, comm)
            text = str(error.value)
            for part in (f"for rank {late}", operator, f"epoch {epoch}", "1 s", "reset it on every rank"):
                assert part in text, (part, text)
        dist.barrier()
        for other in OPERATIONS:
            with pytest.raises(GroupPoisoned, match=f"for rank {late}"):
                forward(other, comm)
        dist.barrier()
        arena.reset()
    check_all_is_well(comm)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_skips_a_call(ranks: RankPool, world: int) -> None:
    ranks.run(check_a_rank_that_skips_a_call, world)


def check_names_among_all_processes() -> None:
    """In a group of ranks 1 and 3, its rank 1 is called rank 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    comm = communicator_without_time(groups[rank % 2])
    standstill = Standstill(arena_of(comm), groups[rank % 2])
    if rank >= 2:
        standstill.leave()
    else:
        with standstill, pytest.raises(PeerTimeout, match=f"rank {rank} waited in .* for rank {rank + 2},"):
            forward("all_gather_matmul", comm)


def test_ranks_are_named_as_the_user_knows_them(ranks: RankPool) -> None:
    ranks.run(check_names_among_all_processes, 4)


class Planted(Exception):
    """The failure that a test causes."""


def fail_in_partial(arena: Arena) -> None:
    def partial(rows: slice, out: torch.Tensor | None) -> torch.Tensor:
        raise Planted

    arena.reduce_scatter(6, 3, torch.float32, partial, "reduce_scatter")


def fail_before_own_rows(arena: Arena) -> None:
    def partial(rows: slice, out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            raise Planted
        return out.zero_()

    arena.reduce_scatter(6, 3, torch.float32, partial, "reduce_scatter")


def fail_at_the_first_shard(arena: Arena) -> None:
    for _ in arena.gather(torch.ones(6 // arena.world, 3), 6, "all_gather"):
        raise Planted


def fail_at_the_last_shard(arena: Arena) -> None:
    for count, _ in enumerate(arena.gather(torch.ones(6 // arena.world, 3), 6, "all_gather"), 1):
        if count == arena.world:
            raise Planted


def leave_early(arena: Arena) -> None:
    for _ in arena.gather(torch.ones(6 // arena.world, 3), 6, "all_gather"):
        break
    raise Planted


FAILURES = (fail_in_partial, fail_before_own_rows, fail_at_the_first_shard, fail_at_the_last_shard, leave_early)


def check_failures_in_the_middle() -> None:
    """Rank 0 raises what it raised; the others hear in that call or in the next, without waiting for their bound."""
    comm = communicator_without_time()
    arena = arena_of(comm)
    for failure in FAILURES:
        with pytest.raises(
            Planted if comm.rank == 0 else GroupPoisoned, match=None if comm.rank == 0 else "rank 0 failed"
        ):
            if comm.rank == 0:
                failure(arena)
            operation = "reduce_scatter" if "partial" in failure.__name__ or "own" in failure.__name__ else "all_gather"
            for _ in range(2):
                if operation == "all_gather":
                    comm.all_gather(torch.ones(6 // comm.size, 3))
                else:
                    comm.reduce_scatter(torch.ones(6, 3))
        with pytest.raises(GroupPoisoned, match="rank 0 failed in"):
            forward("matmul_all_reduce", comm)
        dist.barrier()
        arena.reset()
        check_all_is_well(comm)


@groups
def test_a_rank_that_fails_in_the_middle_of_a_call(ranks: RankPool, world: int) -> None:
    ranks.run(check_failures_in_the_middle, world)


def check_reset_without_a_rank() -> None:
    comm = communicator_without_time()
    arena, absent = arena_of(comm), comm.size - 1
    with contextlib.suppress(PeerError, Planted):
        fail_at_the_first_shard(arena) if comm.rank == 0 else comm.all_gather(torch.ones(6 // comm.size, 3))
    standstill = Standstill(arena, dist.group.WORLD)
    if comm.rank == absent:
        standstill.leave()
    else:
        with standstill, pytest.raises(PeerTimeout, match=f"rank {absent} took no part in .*reset"):
            arena.reset()
        with pytest.raises(GroupPoisoned):
            forward("all_gather_matmul", comm)
    dist.barrier()
    arena.reset()
    check_all_is_well(comm)


@groups
def test_reset_where_one_rank_does_not_come(ranks: RankPool, world: int) -> None:
    ranks.run(check_reset_without_a_rank, world)


def check_resets_one_after_the_other() -> None:
    """Each rank's reset fails alone: the group stays poisoned, and no call takes data of the call that failed."""
    comm = communicator_without_time()
    arena = arena_of(comm)
    standstill = Standstill(arena, dist.group.WORLD)
    if comm.rank == 0:
        with standstill, pytest.raises(PeerTimeout):
            comm.all_gather(torch.full((1, 3), 5.0))
    standstill.leave()
    for turn in (1, 0):
        dist.barrier()
        if comm.rank == turn:
            with standstill, pytest.raises(PeerTimeout):
                arena.reset()
    dist.barrier()
    if comm.rank == 1:
        with pytest.raises(GroupPoisoned):
            comm.all_gather(torch.full((1, 3), 7.0))
    dist.barrier()
    if comm.rank == 0:
        with pytest.raises(GroupPoisoned):
            comm.all_gather(torch.full((1, 3), 9.0))
    dist.barrier()
    arena.reset()
    check_all_is_well(comm)


def test_resets_that_fail_one_after_the_other(ranks: RankPool) -> None:
    ranks.run(check_resets_one_after_the_other, 2)


def call_of(operation: str, columns: int, dtype: torch.dtype = torch.float32) -> Callable[[Communicator], Any]:
    """Exchange 2 rows per rank, without a matmul."""
    if operation == "all_gather":
        return lambda comm: comm.all_gather(torch.ones(2, columns, dtype=dtype))
    if operation == "reduce_scatter":
        return lambda comm: comm.reduce_scatter(torch.ones(2 * comm.size, columns, dtype=dtype))
    return lambda comm: forward(operation, comm)


def forward_of_a_gather(comm: Communicator) -> object:
    """What one operator does forwards ..."""
    return list(arena_of(comm).gather(torch.ones(2, 3), 2 * comm.size, "all_gather_matmul"))


def its_dual(comm: Communicator) -> object:
    """... and backwards, with the same name and sizes."""

    def partial(rows: slice, out: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(rows.stop - rows.start, 3) if out is None else out.zero_()

    return arena_of(comm).reduce_scatter(2 * comm.size, 3, torch.float32, partial, "all_gather_matmul")


# What rank 0 calls, what the others do, and how either is described.
DIFFERENT = (
    (call_of("all_gather", 3), call_of("reduce_scatter", 3), "all_gather of 4 x 3", "reduce_scatter of 4 x 3"),
    (call_of("all_gather", 3), call_of("all_gather", 5), "all_gather of 4 x 3", "all_gather of 4 x 5"),
    (call_of("all_gather", 3), call_of("all_gather", 3, torch.bfloat16), "4 x 3 float32", "4 x 3 bfloat16"),
    (call_of("matmul_all_reduce", 3), call_of("matmul_reduce_scatter", 3), "all_reduce", "reduce_scatter"),
    (call_of("all_gather", 3), call_of("all_gather", 2000), "all_gather of 4 x 3", "all_gather of 4 x 2000"),
    (call_of("reduce_scatter", 3), call_of("reduce_scatter", 333), "of 4 x 3", "of 4 x 333"),
    (forward_of_a_gather, its_dual, "from row 0, which gathers rows", "from row 0, which scatters sums"),
)  # fmt: skip


def check_different_calls(first: int, last: int) -> None:
    """Every rank hears of both calls; the next correct call works, without a reset."""
    comm = hostile_communicator(dist.group.WORLD, 1 << 14)
    for round_ in range(3):
        for mine, theirs, my_text, their_text in DIFFERENT[first:last]:
            with pytest.raises(CallMismatch) as error:
                (mine if comm.rank == round_ % comm.size else theirs)(comm)
            text = str(error.value).replace(f" of {2 * comm.size} x", " of 4 x").replace(f" {2 * comm.size} x", " 4 x")
            assert my_text in text and their_text in text and "make both the same" in text, text
            assert not differences(Case("matmul_reduce_scatter", 7), comm)
    check_all_is_well(comm)


@groups
def test_ranks_that_call_different_things(ranks: RankPool, world: int) -> None:
    ranks.run(check_different_calls, world, 0, 4)


@groups
def test_ranks_of_which_one_moves_in_pieces(ranks: RankPool, world: int) -> None:
    ranks.run(check_different_calls, world, 4, 7)


def check_reset_after_a_sum_in_the_background() -> None:
    """A background sum that failed is past once the group was reset."""
    comm = communicator_without_time()
    standstill = Standstill(arena_of(comm), dist.group.WORLD)
    if comm.rank:
        with standstill:
            pending = comm.start_all_reduce(torch.ones(7))
            with pytest.raises(PeerError):
                pending.wait()
    standstill.leave()
    dist.barrier()
    arena_of(comm).reset()
    check_all_is_well(comm)
    x = torch.full((7,), float(comm.rank))
    comm.start_all_reduce(x).wait()
    assert torch.equal(x, torch.full((7,), float(sum(range(comm.size)))))


def test_reset_after_a_sum_in_the_background(ranks: RankPool) -> None:
    ranks.run(check_reset_after_a_sum_in_the_background, 2)


def check_bad_arguments_on_one_rank() -> None:
    comm = communicator_without_time()
    ones = torch.ones
    bad: tuple[Callable[[], Any], ...] = (
        lambda: all_gather_matmul(ones(2, 3), [ones(4, 5)], comm),
        lambda: all_gather_matmul(ones(3, 3), [ones(4, 3)], comm, num_tokens=2 * comm.size),
        lambda: matmul_reduce_scatter(ones(5, 3), ones(4, 5), comm),
        lambda: matmul_all_reduce(ones(5, 3), ones(4, 3).double(), comm),
        lambda: list(arena_of(comm).gather(ones(3, 3), 2 * comm.size, "all_gather")),
    )
    for round_ in range(2):
        for call, operator in zip(bad, (*OPERATIONS[:1] * 2, *OPERATIONS[1:], OPERATIONS[0]), strict=True):
            guilty = round_ % comm.size
            with pytest.raises(ValueError) as error:
                call() if comm.rank == guilty else forward(operator, comm)
            assert isinstance(error.value, CallMismatch) == (comm.rank != guilty)
            if comm.rank != guilty:
                assert f"rank {guilty} something it refused" in str(error.value) and operator in str(error.value)
            assert not differences(Case("all_gather_matmul", 7), comm)
    for call in bad:  # on every rank alike
        with pytest.raises(ValueError) as error:
            call()
        assert not isinstance(error.value, CallMismatch)
    check_all_is_well(comm)


@groups
def test_bad_arguments_on_one_rank(ranks: RankPool, world: int) -> None:
    ranks.run(check_bad_arguments_on_one_rank, world)


def outcome_of_a_row_too_wide_on_one_rank() -> str:
    comm = communicator_without_time()
    try:
        comm.all_gather(torch.ones(1, 3000 if comm.rank == 0 else 3))
    except (ValueError, PeerError) as error:
        return type(error).__name__
    return ""


def test_a_row_too_wide_on_one_rank_only(ranks: RankPool) -> None:
    assert ranks.run(outcome_of_a_row_too_wide_on_one_rank, 2) == ["ValueError", "CallMismatch"]


def shards_read(comm: Communicator, value: float, pause: Callable[[], object] = lambda: None) -> list[float]:
    """Gather a number from each rank; look at a peer's shard after a pause."""
    found = [0.0] * comm.size
    for rows, shard in arena_of(comm).gather(torch.full((1, 3), value), comm.size, "all_gather"):
        if rows.start != comm.rank:
            pause()
        found[rows.start] = float(shard[0, 0])
    return found


def check_what_a_peer_reads(name: str) -> None:
    """The others make a call that fails and the next one, while the last rank still reads what they published before.

    It reads when all others wait for it, and have done what they could.
    """
    call = {"refuses": refuse_on_rank_0, "differs": differ_in_columns}[name]
    comm = communicator_without_time(most_seconds=0.0, timeout_seconds=math.inf)
    standstill, rank = Standstill(arena_of(comm), dist.group.WORLD), comm.rank
    want = [float(rank) for rank in range(comm.size)]
    if rank == comm.size - 1:
        standstill.leave()
        assert shards_read(comm, rank, lambda: wait_for(standstill)) == want
        with pytest.raises(ValueError):
            call(comm)
        assert shards_read(comm, 10.0 + rank) == [10 + value for value in want]
    else:
        with standstill:
            assert shards_read(comm, rank) == want
            with pytest.raises(ValueError):
                call(comm)
            assert shards_read(comm, 10.0 + rank) == [10 + value for value in want]


def wait_for(standstill: Standstill) -> None:
    while not standstill.is_still():
        time.sleep(1e-4)


def refuse_on_rank_0(comm: Communicator) -> None:
    if comm.rank == 0:
        arena_of(comm).refuse("planted")
    comm.all_gather(torch.ones(1, 3))


def differ_in_columns(comm: Communicator) -> None:
    comm.all_gather(torch.ones(1, 3 + comm.rank % 2))


@groups
@pytest.mark.parametrize("name", ["refuses", "differs"])
def test_a_failed_call_does_not_overwrite_what_a_peer_reads(ranks: RankPool, name: str, world: int) -> None:
    ranks.run(check_what_a_peer_reads, world, name)


def die_in_the_middle(directory: str) -> None:
    """The last rank is killed in a call; the others note what they hear, which is not that their time is over."""
    comm = hostile_communicator(dist.group.WORLD, 1 << 16)
    arena_of(comm).signals.clock = lambda: 0.0
    check_all_is_well(comm)

    def partial(rows: slice, out: torch.Tensor | None) -> torch.Tensor:
        if comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(rows.stop - rows.start, 3) if out is None else out.zero_()

    try:
        arena_of(comm).reduce_scatter(6, 3, torch.float32, partial, "reduce_scatter")
    except PeerError as error:
        heard = type(error).__name__, str(error)
        Path(directory, str(comm.rank)).write_text(json.dumps(heard))
    with pytest.raises(GroupPoisoned):
        check_all_is_well(comm)
    with pytest.raises(PeerGone, match=f"rank {comm.size - 1} took no part"):
        arena_of(comm).reset()


@pytest.fixture
def mortal_ranks() -> Iterator[RankPool]:
    """A pool of its own, whose workers may be killed."""
    pool = RankPool()
    yield pool
    pool.close()


def test_a_rank_that_is_killed(mortal_ranks: RankPool, tmp_path: Path) -> None:
    names = sorted(os.listdir("/dev/shm"))
    with pytest.raises(RankError) as error:
        mortal_ranks.run(die_in_the_middle, 3, str(tmp_path))
    assert str(error.value) == "rank 2: the process died", "the others end as they should"
    kinds = set()
    for rank in range(2):
        kind, text = json.loads((tmp_path / str(rank)).read_text())
        kinds.add(kind)
        assert "for rank 2, which is gone" in text and "reduce_scatter" in text
    assert "PeerGone" in kinds <= {"PeerGone", "GroupPoisoned"}
    mortal_ranks.close()
    assert sorted(os.listdir("/dev/shm")) == names
