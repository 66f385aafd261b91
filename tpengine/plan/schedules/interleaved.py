"""The interleaved schedule: v chunks per rank, so that filling and draining the pipeline takes 1/v of 1F1B's time."""

from __future__ import annotations

from itertools import chain, pairwise

from tpengine.plan.actions import Action, Kind
from tpengine.plan.schedules.schedule import Schedule, check_sizes, looping


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """List 1F1B over v chunks per rank: micro-batches pass the chunks of a rank in groups, chunk after chunk.

    If all chunks of a rank together take 1 for a forward and 2 for a backward, m >= p takes 3 m + 3 (p-1)/v: idle
    (p-1)/(v m + p-1). Fewer micro-batches take 3 p + 3 (m-1)/v: one micro-batch passes all chunks and back without
    overlap, and the others follow it.

    A group has p micro-batches or a few more: there are m // p groups, the larger ones first. So a group's first
    micro-batch is back at the rank before the whole group has passed, and no rank waits, whatever m is. A smaller group
    with the remainder would make every rank wait once per chunk. The price is memory: with g the size of the first
    group (p if p divides m), rank r holds at most ((v-1) g + 2 (p-1-r) + 1) / v micro-batches' activations, never more
    than m. With one chunk per rank this is 1F1B, which holds p-r.

    Args: num_ranks: p. num_microbatches: m, at least 1; fewer than p is legal. num_chunks: v, at least 1.
    Returns: the schedule; chunk c is on rank c mod p.
    Raises: ValueError: an argument below 1.
    Source: Megatron-LM (Narayanan et al. 2021), section 2.2, which asks for p to divide m; the uneven groups are ours.
    """
    check_sizes(num_ranks, num_microbatches, num_chunks)
    groups = _groups(num_ranks, num_microbatches)
    lists = (_rank_list(rank, num_ranks, num_chunks, groups) for rank in range(num_ranks))
    return Schedule("interleaved", looping(num_ranks, num_chunks), tuple(lists))


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Cut the micro-batches into as many groups of at least p as possible, whose sizes differ by at most one."""
    num_groups = max(1, num_microbatches // num_ranks)
    smaller, num_larger = divmod(num_microbatches, num_groups)
    starts = [group * smaller + min(group, num_larger) for group in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _rank_list(rank: int, num_ranks: int, num_chunks: int, groups: list[range]) -> tuple[Action, ...]:
    chunks = [rank + loop * num_ranks for loop in range(num_chunks)]
    forwards = [Action(Kind.F, chunk, i) for group in groups for chunk in chunks for i in group]
    backwards = [Action(Kind.B, chunk, i) for group in groups for chunk in reversed(chunks) for i in group]
    # The first backward is that of the rank's last chunk, which the first group enters after v-1 other chunks. Two more
    # forwards for each rank below this one keep it busy until that backward arrives: the first micro-batch takes p-1-r
    # steps down to the last rank, and its gradient, which takes twice as long, as many steps up again. In 1F1B one
    # forward per rank below is enough, because its last rank needs no other chunk first.
    per_rank_below = 2 if num_chunks > 1 else 1
    num_warmup = (num_chunks - 1) * len(groups[0]) + per_rank_below * (num_ranks - 1 - rank)
    num_warmup = min(num_warmup, len(forwards))
    num_steady = len(forwards) - num_warmup
    steady = chain.from_iterable(zip(forwards[num_warmup:], backwards, strict=False))
    return (*forwards[:num_warmup], *steady, *backwards[num_steady:])
