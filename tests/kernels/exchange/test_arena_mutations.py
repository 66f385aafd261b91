"""Rung: gloo ranks. The protocol broken on purpose: the operators over a hostile arena must give other results.

A mutation patches the arena of every rank, and undoes it: the ranks live on. What a broken rank raises counts as
noticed, as does a wait that nobody can end (standstill.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from support.kernels.mutations import survivors
from support.ranks.arena_ranks import HostileArena, cases, differences, hostile_communicator
from support.ranks.rank_pool import RankPool
from support.ranks.standstill import Standstill
from torch import Tensor
from tpkernels.exchange import arena
from tpkernels.fused import scatter
from tpkernels.symmetric import signals

WORLD = 3


class NotifiesBeforeTheData(HostileArena):
    def begin(self, call: tuple[int, ...]) -> int:
        generation = super().begin(call)
        for peer in self._peers:
            self.signals.notify(peer, self.epoch)
        return generation


class DoesNotWaitForOnePeer(HostileArena):
    def wait(self, peer: int, generation: int, call: tuple[int, ...]) -> None:
        if peer != (self.rank + 1) % self.world:
            super().wait(peer, generation, call)


class WaitsForTheEpochBefore(HostileArena):
    def wait(self, peer: int, generation: int, call: tuple[int, ...]) -> None:
        self.signals.wait(peer, signals.wrapped(self.epoch - 1), call[0])


class SkipsEmptyShards(HostileArena):
    """Does not wait for peers that have nothing to give, and so runs away from them."""

    def wait(self, peer: int, generation: int, call: tuple[int, ...]) -> None:
        if call[0] != arena.OPERATIONS.index("all_gather_matmul") or peer == 0:
            super().wait(peer, generation, call)


class ReadsTheOtherGeneration(HostileArena):
    def block(self, owner: int, generation: int, *rest: Any) -> Tensor:
        return super().block(owner, generation if owner == self.rank else 1 - generation, *rest)


class ReadsTheSlotOfAnotherRank(HostileArena):
    def block(self, owner: int, generation: int, offset_bytes: int, *rest: Any) -> Tensor:
        if owner != self.rank and offset_bytes:
            offset_bytes = offset_bytes // self.rank * (self.rank - 1)
        return super().block(owner, generation, offset_bytes, *rest)


class ReadsItsOwnShardForAPeers(HostileArena):
    def block(self, owner: int, *rest: Any) -> Tensor:
        return super().block(self.rank if owner == WORLD - 1 else owner, *rest)


def sum_without_the_last_peer(slots: list[Tensor], rank: int, own: Tensor, out: Tensor) -> None:
    others = [slot for peer, slot in enumerate(slots) if peer != rank]
    out.copy_(own)
    for slot in others[:-1]:
        out.add_(slot)


def sum_with_own_twice(slots: list[Tensor], rank: int, own: Tensor, out: Tensor) -> None:
    out.copy_(2 * own)
    for peer, slot in enumerate(slots):
        if peer != rank:
            out.add_(slot)


def rows_of_the_next_rank(num_rows: int, world: int, rank: int) -> slice:
    most = -(-num_rows // world)
    rank = (rank + 1) % world
    return slice(min(rank * most, num_rows), min((rank + 1) * most, num_rows))


def first_piece_only(rows: slice, first: int, num_rows: int) -> slice:
    return slice(rows.start, min(rows.start + num_rows, rows.stop))


def without_addend(terms: Any, comm: Any, operation: str, addend: Tensor | None = None) -> Tensor:
    return scatter.matmul_scatter(terms, comm, operation)


# The class of the arena, or what replaces which name.
MUTATIONS: dict[str, type[HostileArena] | tuple[str, Any]] = {
    "no mutation": HostileArena,
    "notify before the data is written": NotifiesBeforeTheData,
    "no wait for one peer": DoesNotWaitForOnePeer,
    "wait for the epoch before": WaitsForTheEpochBefore,
    "no wait for peers without rows": SkipsEmptyShards,
    "one generation": ("tpkernels.exchange.arena.NUM_GENERATIONS", 1),
    "the other generation": ReadsTheOtherGeneration,
    "the slot of another rank": ReadsTheSlotOfAnotherRank,
    "own memory for a peer's": ReadsItsOwnShardForAPeers,
    "a sum without the last peer": ("tpkernels.exchange.arena.add_to_own", sum_without_the_last_peer),
    "own partial sum twice": ("tpkernels.exchange.arena.add_to_own", sum_with_own_twice),
    "own rows of another rank": ("tpkernels.exchange.arena.shard_rows", rows_of_the_next_rank),
    "the first piece again and again": ("tpkernels.exchange.arena.piece_of", first_piece_only),
    "epochs compared without wrapping": (
        "tpkernels.symmetric.signals.reached",
        lambda seen, expected: seen >= expected,
    ),
    "gradient of the gathered x dropped": ("tpkernels.fused.all_gather_matmul.matmul_scatter", without_addend),
}


@contextlib.contextmanager
def applied(mutation: str) -> Iterator[type[HostileArena]]:
    change = MUTATIONS[mutation]
    if isinstance(change, tuple):
        with patch(*change):
            yield HostileArena
    else:
        yield change


def outcome_of(mutation: str) -> str:
    """What this rank notices in some calls across the largest epoch, in pieces and with empty shards."""
    with applied(mutation) as kind:
        comm = hostile_communicator(dist.group.WORLD, 1 << 13, seed=1, kind=kind, first_epoch=2**31 - 40)
        assert comm.arena is not None
        try:
            with Standstill(comm.arena, dist.group.WORLD):
                for case in cases((1, 63, 2, 7) * 2, dim=33):
                    wrong = differences(case, comm)
                    if wrong:
                        return wrong
        except (ValueError, RuntimeError, AssertionError) as error:
            return repr(error)
        finally:
            # A rank that has seen enough leaves: let the others not wait for it.
            with contextlib.suppress(RuntimeError):
                comm.arena.signals.fail(0, comm.arena.epoch)
            dist.barrier()
    return ""


def compare(outcomes: list[str]) -> None:
    noticed = [outcome for outcome in outcomes if outcome and "failed in a refused call" not in outcome]
    assert not noticed, "\n".join(noticed)


EVERY = tuple(mutation for mutation in MUTATIONS if mutation != "no mutation")


@pytest.mark.parametrize("broken", [EVERY[:2], pytest.param(EVERY, marks=pytest.mark.slow)], ids=["two", "all"])
def test_every_mutation_of_the_protocol_is_noticed(
    ranks: RankPool, count_mutations: Callable[[str, int, int], None], broken: tuple[str, ...]
) -> None:
    assert ranks.run(outcome_of, WORLD, "no mutation") == [""] * WORLD
    unnoticed = survivors(broken, lambda mutation: ranks.run(outcome_of, WORLD, mutation), compare)
    count_mutations("the arena's protocol (hostile operators)", len(broken) - len(unnoticed), len(broken))
    assert not unnoticed, f"right results in spite of {unnoticed}"
