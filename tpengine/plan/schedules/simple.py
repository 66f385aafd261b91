"""Schedules with one chunk per rank and a whole backward: GPipe and 1F1B; and forward only, with any placement."""

from __future__ import annotations

from tpengine.plan.actions import Action, Kind
from tpengine.plan.schedules.schedule import Schedule, check_sizes, looping, run


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """List all forwards, then all backwards. Holds all micro-batches' activations; idle (p-1)/(m+p-1).

    Args: num_ranks: pipeline stages p. num_microbatches: m, at least 1; fewer than p is legal.
    Returns: the schedule.
    Raises: ValueError: an argument below 1.
    Source: GPipe (Huang et al. 2019), section 2.3, with backward in forward's order instead of reversed.
    """
    check_sizes(num_ranks, num_microbatches)
    lists = (
        run(Kind.F, rank, 0, num_microbatches) + run(Kind.B, rank, 0, num_microbatches) for rank in range(num_ranks)
    )
    return Schedule("gpipe", looping(num_ranks, 1), tuple(lists))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """List p-r-1 warm-up forwards on rank r, then forward and backward in turn, then the remaining backwards.

    Rank r holds at most p-r micro-batches' activations; idle (p-1)/(m+p-1) as GPipe.

    Args: num_ranks: pipeline stages p. num_microbatches: m, at least 1; fewer than p is legal.
    Returns: the schedule.
    Raises: ValueError: an argument below 1.
    Source: PipeDream-Flush (Narayanan et al. 2021), section 2.2.
    """
    check_sizes(num_ranks, num_microbatches)
    lists = (_one_f_one_b_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("1f1b", looping(num_ranks, 1), tuple(lists))


def forward_only(ranks: tuple[int, ...], num_microbatches: int) -> Schedule:
    """List all forwards and nothing else, for evaluation and sampling.

    A rank with several chunks runs the last chunk that has an input. So the number of micro-batches under way is
    bounded by the number of chunks. Chunk by chunk, all micro-batches would wait between two chunks.

    Args: ranks: the rank of each chunk, in model order. num_microbatches: m, at least 1.
    Returns: the schedule.
    Raises: ValueError: an argument below 1.
    """
    num_ranks = 1 + max(ranks, default=-1)
    check_sizes(num_ranks, num_microbatches)
    lists: list[list[Action]] = [[] for _ in range(num_ranks)]
    done = [0] * len(ranks)
    # Each round is one forward per rank; the next round can use its results.
    while done[-1] < num_microbatches:
        available = [num_microbatches, *done[:-1]]
        deepest = {rank: chunk for chunk, rank in enumerate(ranks) if done[chunk] < available[chunk]}
        for rank, chunk in deepest.items():
            lists[rank].append(Action(Kind.F, chunk, done[chunk]))
            done[chunk] += 1
    return Schedule("forward_only", ranks, tuple(map(tuple, lists)))


def _one_f_one_b_rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    num_warmup = min(num_ranks - rank - 1, num_microbatches)
    num_steady = num_microbatches - num_warmup
    steady = tuple(
        action
        for step in range(num_steady)
        for action in (Action(Kind.F, rank, num_warmup + step), Action(Kind.B, rank, step))
    )
    cool_down = run(Kind.B, rank, num_steady, num_microbatches)
    return run(Kind.F, rank, 0, num_warmup) + steady + cool_down
