"""The interleaved schedule: v chunks a rank, so that filling and draining the pipeline takes 1/v of 1F1B's time."""

from __future__ import annotations

from itertools import chain, pairwise

from tpengine.plan.actions import Action, Kind
from tpengine.plan.schedules.schedule import Schedule, check_sizes, looping


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """List 1F1B over v chunks a rank: micro-batches pass the chunks of a rank in groups, chunk after chunk.

    With a forward of all chunks of a rank of length 1 and a backward of 2, m >= p takes 3 m + 3 (p-1)/v: idle
    (p-1)/(v m + p-1). Fewer micro-batches take 3 p + 3 (m-1)/v: a micro-batch that goes alone through all chunks and
    back, and the others behind it.

    Groups have p micro-batches or a few more: as many groups as p goes into m, the larger ones first. So a group's
    first micro-batch is back at the rank before the group has passed, and no rank waits, whatever m is. A group of
    what is left over, which is fewer than p, would make every rank wait once a chunk. The price is memory: with g the
    size of the first group, p where p divides m, rank r holds at most ((v-1) g + 2 (p-1-r) + 1) / v micro-batches'
    activations, never more than m. One chunk a rank is 1F1B itself, which holds p-r.

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
    """Cut the micro-batches into as many groups of at least p as there are, sizes differing by one at most."""
    num_groups = max(1, num_microbatches // num_ranks)
    smaller, num_larger = divmod(num_microbatches, num_groups)
    starts = [group * smaller + min(group, num_larger) for group in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _rank_list(rank: int, num_ranks: int, num_chunks: int, groups: list[range]) -> tuple[Action, ...]:
    chunks = [rank + loop * num_ranks for loop in range(num_chunks)]
    forwards = [Action(Kind.F, chunk, i) for group in groups for chunk in chunks for i in group]
    backwards = [Action(Kind.B, chunk, i) for group in groups for chunk in reversed(chunks) for i in group]
    # The first backward belongs to the rank's last chunk, which the first group enters after v-1 others. Two more
    # forwards a rank below this one keep it busy until that backward arrives: the first micro-batch takes p-1-r
    # steps down to the last rank, and its gradient, of twice the length, as many up again. 1F1B has time for half of
    # that, since its last rank needs no other chunk first.
    per_rank_below = 2 if num_chunks > 1 else 1
    num_warmup = (num_chunks - 1) * len(groups[0]) + per_rank_below * (num_ranks - 1 - rank)
    num_warmup = min(num_warmup, len(forwards))
    num_steady = len(forwards) - num_warmup
    steady = chain.from_iterable(zip(forwards[num_warmup:], backwards, strict=False))
    return (*forwards[:num_warmup], *steady, *backwards[num_steady:])
