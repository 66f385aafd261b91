"""Exchanges between the ranks of this host through shared memory: messages, sums over replicas, fused matmuls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from tpkernels.exchange.arena import exchange_bytes
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.fused.gather import gather_matmul
from tpkernels.fused.scatter import matmul_scatter
from tpkernels.ops.matmul.host import PreparedMatrix, product

from tpengine.distributed.mesh import SUM_ARENA_BYTES
from tpengine.doctor.measure.clock import CallClock, usual

Points = list[tuple[float, float]]

# How long a rank waits for another that lives: what is measured takes a second.
TIMEOUT_SECONDS = 60.0


def message_seconds(clock: CallClock, sizes_bytes: Sequence[int], group: ProcessGroup | None = None) -> Points:
    """Return (bytes, seconds) of a message from one rank to the next, by size: half of there and back.

    Args:
        clock: lets ranks begin together.
        sizes_bytes: of messages.
        group: the ranks of this host, over gloo; None for all.
    """
    group = _group(group)
    mailbox = Mailbox.open(group, max(sizes_bytes), 3, timeout_seconds=TIMEOUT_SECONDS)
    rank, world, found = dist.get_rank(group), dist.get_world_size(group), []
    for num_bytes in sizes_bytes:
        x = torch.zeros(num_bytes // 4)
        peer = rank ^ 1

        def there_and_back(x: torch.Tensor = x, peer: int = peer) -> None:
            if peer >= world:
                return
            for sender in (0, 1):
                if rank % 2 == sender:
                    mailbox.send(peer, x)
                else:
                    mailbox.receive(peer, x)

        found.append((float(num_bytes), _of_rounds(clock, there_and_back) / 2))
    return found


def _of_rounds(clock: CallClock, call: object, number: int = 20, *, is_cold: bool = False) -> float:
    """Return the time of as many calls on every rank; `is_cold` if their operands were used long ago."""
    assert callable(call)
    call()
    taken = []
    for _ in range(number):
        if is_cold:
            clock.evict()
        clock.together()
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return usual(taken)


def sum_rates(clock: CallClock, sizes_bytes: Sequence[int], group: ProcessGroup | None = None) -> Points:
    """Return the bus bandwidth of half an all-reduce over the ranks of a group, None for all, by bytes.

    Buckets are cold: gradients were written a chunk ago, slices of weights a step ago.
    """
    comm = Communicator(_group(group), arena_bytes=SUM_ARENA_BYTES, timeout_seconds=TIMEOUT_SECONDS)
    found = []
    for num_bytes in sizes_bytes:
        x = torch.zeros(num_bytes // 4)
        seconds = _of_rounds(clock, lambda x=x: comm.start_all_reduce(x).wait(), 10, is_cold=True)
        found.append((float(num_bytes), (comm.size - 1) / comm.size * num_bytes / (seconds / 2)))
    return found


def fused_rates(clock: CallClock, sizes: Sequence[tuple[int, int]], group: ProcessGroup | None = None) -> Points:
    """Return by bytes of the gathered rows what fused matmuls take longer than the same matmuls without an exchange.

    Args:
        clock: times calls.
        sizes: (tokens of all ranks, width); a weight has as many columns.
        group: the ranks of this host, over gloo; None for all.
    """
    group = _group(group)
    world, found = dist.get_world_size(group), []
    for most, width in sizes:
        # Each rank has as many.
        tokens = most // world * world
        arena_bytes = exchange_bytes(tokens, 4 * width, world)
        comm = Communicator(group, arena_bytes=arena_bytes, timeout_seconds=TIMEOUT_SECONDS)
        x, own = torch.randn(tokens, width), torch.randn(tokens // world, width)
        matrix = PreparedMatrix(torch.randn(width, width), tokens // world)

        def gathers(
            own: torch.Tensor = own, matrix: PreparedMatrix = matrix, comm: Communicator = comm, tokens: int = tokens
        ) -> None:
            gather_matmul(own, [matrix], comm, tokens, "all_gather_matmul", keep=True)

        def scatters(x: torch.Tensor = x, matrix: PreparedMatrix = matrix, comm: Communicator = comm) -> None:
            matmul_scatter([(x, matrix)], comm, "matmul_reduce_scatter")

        alone = _of_rounds(clock, lambda x=x, matrix=matrix: product(x, matrix))
        longer = statistics.mean(_of_rounds(clock, of) for of in (gathers, scatters)) - alone
        num_bytes = 4.0 * tokens * width
        found.append((num_bytes, num_bytes / max(longer, 0.02 * alone)))
    return sorted(dict(found).items())


def _group(group: ProcessGroup | None) -> ProcessGroup:
    found = dist.group.WORLD if group is None else group
    assert found is not None, "ranks have a group"
    return found
