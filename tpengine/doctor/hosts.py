"""Between ranks by messages: how long one takes by its size, and how far the clocks of two hosts are apart.

All ranks make the same calls; those that take no part wait, so that nothing disturbs the pair that is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpengine.doctor.measure.clock import usual

MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
_ROUNDS, _ROUNDS_OF_CLOCKS = 10, 20
_WARM_UP = 2


def messages_between(
    one: int,
    other: int,
    sizes_bytes: Sequence[int] = MESSAGE_BYTES,
    *,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
) -> tuple[list[tuple[float, float]], str]:
    """Time messages between two ranks by their size, and compare what comes with what was sent; collective.

    Args:
        one, other: their global ranks.
        sizes_bytes: of messages, multiples of 4.
        group: over which; None for the default group.
        device: where the group's tensors live; None for the host.

    Returns:
        (bytes, seconds) of a message, half of there and back; and what came wrong, in words, empty if nothing did. Of
        other ranks than the two nothing. Who got wrong bytes makes the same calls as before: nobody waits for it.
    """
    found, wrong = [], ""
    rank = dist.get_rank()
    for num_bytes in sizes_bytes:
        dist.barrier()
        if rank in (one, other):
            seconds, differs = _there_and_back(one, other, num_bytes, group, device)
            found.append((float(num_bytes), seconds))
            wrong = wrong or (differs and f"{num_bytes} bytes between ranks {one} and {other} came wrong: {differs}")
    dist.barrier()
    return found, wrong


def _there_and_back(
    one: int, other: int, num_bytes: int, group: ProcessGroup | None, device: torch.device | None
) -> tuple[float, str]:
    """Return half of what a message and its answer take on `one` or `other`, and how they differ."""
    sent = torch.arange(num_bytes // 4, dtype=torch.int32, device=device)
    came = torch.zeros_like(sent)
    rank = dist.get_rank()
    taken = []
    for _ in range(_WARM_UP + _ROUNDS):
        begin = time.perf_counter()
        if rank == one:
            dist.send(sent, other, group=group)
            dist.recv(came, other, group=group)
        else:
            dist.recv(came, one, group=group)
            dist.send(came, one, group=group)
        if came.is_cuda:
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - begin) / 2)
    return usual(taken[_WARM_UP:]), _difference(sent, came, rank)


def _difference(sent: Tensor, came: Tensor, rank: int) -> str:
    """Return how many numbers of a message came wrong on a rank, and the first of them; empty if none did."""
    wrong = (sent != came).nonzero()
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return f"rank {rank} got {len(wrong)} of {len(sent)} numbers wrong, number {first} as {int(came[first])}"


def clocks_apart(firsts: Sequence[int]) -> list[dict[str, Any]]:
    """Return on rank 0 how far the clock of each other host is before its own; empty on all other ranks.

    Args:
        firsts: the first rank of each host, rank 0 among them, over the default group.

    Returns:
        For each host but rank 0's its first "rank", "seconds" that its clock shows more, and "within", half of the
        fastest way there and back: the clock was read somewhere in between.
    """
    found = []
    for peer in (first for first in firsts if first != 0):
        dist.barrier()
        if dist.get_rank() == 0:
            found.append({"rank": peer, **_asked(peer)})
        elif dist.get_rank() == peer:
            _answering()
    dist.barrier()
    return found


def _asked(peer: int) -> dict[str, float]:
    best: tuple[float, float] | None = None
    told = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS_OF_CLOCKS):
        before = time.time()
        dist.send(told, peer)
        dist.recv(told, peer)
        after = time.time()
        half = (after - before) / 2
        if best is None or half < best[0]:
            best = half, float(told) - (before + after) / 2
    assert best is not None
    return {"seconds": best[1], "within": best[0]}


def _answering() -> None:
    told = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS_OF_CLOCKS):
        dist.recv(told, 0)
        told[0] = time.time()
        dist.send(told, 0)
