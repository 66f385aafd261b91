"""Rung: gloo ranks. Gathers and reduce-scatters that go on while their caller does something else.

What only GPUs check: the same over NCCL.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.communicator import Communicator

# An arena into which the tensors fit, one in which they move in pieces, and none.
ARENAS = (1 << 16, 1 << 10, 0)


def exchanged(arena_bytes: int, size: int) -> dict[str, Any]:
    """Two of each under way at a time, into and out of parts of the wholes themselves."""
    assert dist.group.WORLD is not None
    comm = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    own = slice(comm.rank * size, (comm.rank + 1) * size)
    wholes = [torch.full((comm.size * size,), -1.0) for _ in range(2)]
    sums = [torch.arange(comm.size * size).remainder(7).add(comm.rank + i).float() for i in range(2)]
    works = []
    for i, (whole, terms) in enumerate(zip(wholes, sums, strict=True)):
        whole[own] = 10.0 * i + comm.rank
        works += [comm.start_all_gather(whole[own], whole), comm.start_reduce_scatter(terms, terms[own])]
    # A blocking call in between comes after them on all ranks.
    total = comm.all_reduce_(torch.ones(3))
    for work in works:
        work.wait()
        assert work.is_complete()
    return {"wholes": wholes, "parts": [terms[own] for terms in sums], "total": total}


@pytest.mark.parametrize("arena_bytes", ARENAS)
@pytest.mark.parametrize("world", [1, 3])
def test_what_is_started_ends_in_order(ranks: RankPool, world: int, arena_bytes: int) -> None:
    size = 600
    everyone = ranks.run(exchanged, world, arena_bytes, size)
    for i in range(2):
        whole = torch.cat([torch.full((size,), 10.0 * i + rank) for rank in range(world)])
        total = sum(torch.arange(world * size).remainder(7).add(rank + i).float() for rank in range(world))
        assert isinstance(total, torch.Tensor)
        for rank, found in enumerate(everyone):
            assert torch.equal(found["wholes"][i], whole)
            assert torch.equal(found["parts"][i], total[rank * size : (rank + 1) * size])
            assert found["total"].tolist() == [world] * 3
