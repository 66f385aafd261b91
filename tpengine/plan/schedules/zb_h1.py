"""ZB-H1: 1F1B with the backward cut in two, so that weight halves fill the idle time at the end."""

from __future__ import annotations

from tpengine.plan.actions import Action, Kind
from tpengine.plan.schedules.schedule import Schedule, check_sizes, looping, run


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """List 1F1B with input halves in the place of backwards; on rank r the weight half lags r micro-batches behind.

    A gradient goes up the pipeline after the input half alone, so rank 0 has it sooner than in 1F1B. Rank r postpones r
    weight halves and runs them while the ranks before it drain. Rank r holds its p-r warm-up micro-batches and the r
    with a postponed weight half: min(p, m) on every rank, as 1F1B holds on rank 0.

    If F, I and W take 1 each, it takes max(3 m + p-1, 2 m + 2 p-1) for every p and m, which is 3 m + p-1 from m = p on:
    idle (p-1)/(3 m + p-1). No order of these actions is faster: the last rank gets its first input after p-1 and then
    has 3 m of work; rank 0 gets its first gradient after 2 p-1 and then has 2 m of work. It is never slower than 1F1B,
    which takes 3 (m + p-1).

    Args: num_ranks: pipeline stages p. num_microbatches: m, at least 1; fewer than p is legal.
    Returns: the schedule, one chunk per rank.
    Raises: ValueError: an argument below 1.
    Source: Zero Bubble Pipeline Parallelism (Qi et al. 2023), section 2.3, handcrafted schedule ZB-H1.
    """
    check_sizes(num_ranks, num_microbatches)
    lists = (_rank_list(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("zb-h1", looping(num_ranks, 1), tuple(lists))


def _rank_list(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    num_warmup = min(num_ranks - rank, num_microbatches)
    actions = list(run(Kind.F, rank, 0, num_warmup))
    for microbatch in range(num_microbatches):
        actions.append(Action(Kind.I, rank, microbatch))
        # The weight half goes first: it frees the memory that the next forward takes.
        if microbatch >= rank:
            actions.append(Action(Kind.W, rank, microbatch - rank))
        if microbatch + num_warmup < num_microbatches:
            actions.append(Action(Kind.F, rank, microbatch + num_warmup))
    actions.extend(run(Kind.W, rank, max(0, num_microbatches - rank), num_microbatches))
    return tuple(actions)
