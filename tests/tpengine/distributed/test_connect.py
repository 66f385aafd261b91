"""Rung: gloo ranks. A group whose first exchange fails ends all ranks with one line. NCCL's errors only GPUs show."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.communicator import Communicator

from tpengine.distributed.connect import GroupError, connect_all

CPU = torch.device("cpu")


def connected(fails: int | None) -> tuple[list[str], str]:
    """Connect two pairs and all four; a rank's exchange within its pair may fail, as over a dead link."""
    rank = dist.get_rank()
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    comms = {"dp": Communicator(pair), "world": Communicator(dist.group.WORLD), "alone": Communicator(None)}
    begun: list[str] = []
    all_reduce = dist.all_reduce

    def broken(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is pair:
            raise RuntimeError("Connection closed by peer\n[10.0.0.7]:4711")
        return all_reduce(tensor, *args, group=group, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if rank == fails:
            patch.setattr(dist, "all_reduce", broken)
        try:
            connect_all(comms, CPU, begun.append)
        except GroupError as error:
            return begun, str(error)
    # The same groups connect again, as for another trainer.
    connect_all(comms, CPU, begun.append)
    return begun, ""


def test_every_group_is_connected_and_named_before(ranks: RankPool) -> None:
    for rank, (begun, error) in enumerate(ranks.run(connected, 4, None)):
        pair = "0, 2" if rank % 2 == 0 else "1, 3"
        once = [
            f"connecting group dp of ranks {pair}",
            "connecting group world of ranks 0, 1, 2, 3",
            "hearing whether all groups are connected",
        ]
        assert begun == [*once, *once] and not error


@pytest.mark.parametrize("fails", [0, 3])
def test_a_dead_link_ends_all_ranks_with_one_line(ranks: RankPool, fails: int) -> None:
    pair = "0, 2" if fails == 0 else "1, 3"
    line = (
        f"a group must be able to exchange: the first exchange of dp of ranks {pair} (host {socket.gethostname()}) "
        "failed: Connection closed by peer [10.0.0.7]:4711: check the network between them, and which interface is "
        "used (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
    )
    # The other member of the pair waits in its exchange, the others for all four: none of them for ever.
    assert {error for _, error in ranks.run(connected, 4, fails)} == {line}


def connected_through_memory(how: str) -> str:
    """Rank 2 fails, by a dead link or in its first exchange through memory; the others are in that exchange."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    comms = {
        "tp": Communicator(pairs[rank // 2], arena_bytes=1 << 16),
        "dp": Communicator(dist.group.WORLD, arena_bytes=1 << 16),
    }
    all_reduce = dist.all_reduce

    def broken(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is dist.group.WORLD:
            if how == "memory":
                arena = comms["dp"].arena
                assert arena is not None
                arena.abandon()
            else:
                all_reduce(tensor, *args, group=group)  # so that the others are in memory
                raise RuntimeError("Connection closed by peer\n[10.0.0.7]:4711")
        return all_reduce(tensor, *args, group=group, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(dist, "all_reduce", broken)
        with pytest.raises(GroupError) as caught:
            connect_all(comms, CPU, lambda _: None)
    for comm in comms.values():
        comm.arena_for(torch.zeros(1))  # no thread goes on waiting, and so holds up the end of its process
    return str(caught.value)


@pytest.mark.parametrize("how", ["link", "memory"])
def test_who_waits_in_memory_hears_of_the_others_problem(ranks: RankPool, how: str) -> None:
    """An exchange through memory waits for 300 s; the first reason ends it."""
    (line,) = set(ranks.run(connected_through_memory, 4, how))
    begin = f"the first exchange of dp of ranks 0, 1, 2, 3 (host {socket.gethostname()}) "
    if how == "link":
        assert f"{begin}failed: Connection closed by peer [10.0.0.7]:4711: check the network" in line
    else:
        assert f"{begin}through memory failed: rank 2 failed in all_reduce" in line
        assert line.endswith("see what that rank says, and start again") and "SOCKET_IFNAME" not in line
