"""Rung: interpreter, several processes. What is taken out of the fused operators' kernels is noticed.

Only a wrong result, calls that differ, or ranks of which none can go on are a verdict. Where a fault shows only when
one rank is slower than the others, rank 0 waits at that place until nothing that it has done so far lets any other
rank go on (standstill.py): no sleep decides.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.ranks.arena_ranks import cases
from support.ranks.kernel_ranks import kernel_communicator, wrong_results
from support.ranks.rank_pool import RankPool
from support.ranks.standstill import Standstill
from tpkernels.exchange.arena import CallMismatch
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.symmetric.signals import PeerError

pytest.importorskip("triton")

STRATEGIES = ("fused", "push")
# Calls move in several pieces.
ARENA_BYTES = 1 << 13


def skipped(*_: Any, **__: Any) -> Any:
    return 0


def early(control: Any, peer: Any, num_tiles: Any) -> bool:
    """Say that all tiles are done when the first is."""
    from tpkernels.symmetric import signals_kernel

    signals_kernel.count_done(control, peer, num_tiles)
    return True


def first_wrong_case(comm: Communicator, first: int) -> str:
    """The operators over some numbers of tokens, from the case of this number on."""
    many = [*cases((40,), dim=33)[::3], *cases((40,))[1:4:2]]
    return next((wrong for case in many[first:] + many[:first] for wrong in wrong_results(comm, [case])), "")


def first_wrong_sum(comm: Communicator, _: int) -> str:
    """Three sums in a row in one generation of the arena, as a replayed CUDA graph of one call makes them.

    Of several tiles for each owner. No copy engine is waited for, whose rank would not poll meanwhile.
    """
    arena, columns = comm.device_arena, 40
    assert arena is not None
    for number in (1.0, 2.0, 3.0):
        arena._generation = 0  # `begin` takes the other
        # [T, F/tp] @ [D, F/tp]^T, summed over the ranks
        y = matmul_reduce_scatter(torch.full((2 * comm.size, 3), number), torch.ones(columns, 3), comm)
        if not torch.equal(y, torch.full((2, columns), 3 * number * comm.size)):
            return f"rank {comm.rank}: sums of {number} are {y.tolist()}"
    return ""


class Mutation(NamedTuple):
    """What is taken out of the kernels.

    Attributes:
        place: the module of tpkernels and the function in it.
        other: what stands there instead.
        strategy, case: where it is noticed first, of STRATEGIES and `first_wrong_case`.
        late: before this function, of a module, rank 0 waits for all others to wait; none: ranks dawdle at random.
        check: what the ranks run.
    """

    place: tuple[str, str]
    other: Callable[..., Any]
    strategy: str = "fused"
    case: int = 0
    late: tuple[str, str] | None = None
    check: Callable[[Communicator, int], str] = first_wrong_case


MUTATIONS = {
    "tiles do not wait for the copy": Mutation(("fused.gather_kernel", "wait_for_copy"), skipped, case=1),
    "tiles do not wait for what is pushed": Mutation(("fused.gather_kernel", "wait"), skipped, "push"),
    "sums do not wait": Mutation(("fused.on_device", "launch_wait"), skipped, case=2),
    "nobody is told of partial sums": Mutation(("fused.scatter_kernel", "notify"), skipped, case=1),
    "partial sums are announced early": Mutation(
        ("fused.scatter_kernel", "count_done"), early, late=("fused.scatter_kernel", "claim"), check=first_wrong_sum
    ),
    "the copy engine does not wait": Mutation(("exchange.copies", "_has_published"), lambda *_: True),
    "calls of one generation do not meet": Mutation(
        ("symmetric.signals_kernel", "barrier"),
        skipped,
        late=("fused.on_device", "launch_sum_slots"),
        check=first_wrong_sum,
    ),
}
# Ranks of which one is late, and nothing taken out.
CONTROLS = [
    pytest.param("tiles do not wait for the copy", marks=pytest.mark.slow),  # dear, and what test_kernels.py does
    *(name for name, mutation in MUTATIONS.items() if mutation.late),
]


def kept_back(standstill: Standstill, function: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any, **kwargs: Any) -> Any:
        standstill.until_others_wait()
        return function(*args, **kwargs)

    return late


def noticed(name: str, is_control: bool) -> str:
    """What this rank notices of a mutation: a wrong result, calls that differ, or that no rank can go on.

    Nothing else is a verdict: it leaves this function. After the first that any rank notices all stop.
    """
    mutation = MUTATIONS[name]
    for strategy in sorted(STRATEGIES, key=lambda strategy: strategy != mutation.strategy):
        comm = kernel_communicator(dist.group.WORLD, strategy, ARENA_BYTES, most_seconds=2e-2)
        arena, said = comm.device_arena, ""
        assert arena is not None
        standstill = Standstill(arena, dist.group.WORLD)
        with pytest.MonkeyPatch.context() as patch, standstill:
            if not is_control:
                module, function = mutation.place
                patch.setattr(importlib.import_module(f"tpkernels.{module}"), function, mutation.other)
            if mutation.late and comm.rank == 0:
                module, function = mutation.late
                place = importlib.import_module(f"tpkernels.{module}")
                patch.setattr(place, function, kept_back(standstill, getattr(place, function)))
            try:
                said = mutation.check(comm, mutation.case)
            except (PeerError, CallMismatch) as error:
                said = f"{type(error).__name__}: {error}"
            if said:
                with contextlib.suppress(PeerError, CallMismatch):
                    arena.leave()
        num_noticed = torch.tensor(bool(said), dtype=torch.int32)
        dist.all_reduce(num_noticed)
        if num_noticed:
            return said or "another rank noticed"
    return ""


@pytest.mark.parametrize("name", CONTROLS)
def test_nothing_is_noticed_where_nothing_is_taken_out(interpreters: RankPool, name: str) -> None:
    assert interpreters.run(noticed, 3, name, True) == [""] * 3


def test_mutations_of_the_kernels_protocol(interpreters: RankPool, count_mutations: CountMutations) -> None:
    unnoticed = [name for name in MUTATIONS if not any(interpreters.run(noticed, 3, name, False))]
    count_mutations("the kernels' protocol (fused operators)", len(MUTATIONS) - len(unnoticed), len(MUTATIONS))
    assert not unnoticed
