"""Schedules: in which order each pipeline rank computes. Compute actions only; `make_schedule` finds one by its name.

    gpipe, one_f_one_b   one chunk per rank and a whole backward
    interleaved          v chunks per rank, so that filling and draining the pipeline takes 1/v of 1F1B's time
    zb_h1                1F1B with the backward cut in two, so that weight halves fill the idle time at the end
    zbv                  two chunks per rank, and halves too: in zbv.py
    forward_only         no backward, with any placement: for evaluation and sampling

In all of them each chunk runs its actions of one kind in the order of the micro-batches, so gradients are added in the
same order and have the same bits with every schedule. A user's own file (schedule_file.py) may use another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType

from tpengine.plan.actions import Action, Kind
from tpengine.plan.schedule import Schedule, check_sizes, looping, run
from tpengine.plan.schedule_file import read_schedule
from tpengine.plan.zbv import zbv
from tpengine.spelling import use


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
    lists = (_interleaved_rank(rank, num_ranks, num_chunks, groups) for rank in range(num_ranks))
    return Schedule("interleaved", looping(num_ranks, num_chunks), tuple(lists))


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Cut the micro-batches into as many groups of at least p as possible, whose sizes differ by at most one."""
    num_groups = max(1, num_microbatches // num_ranks)
    smaller, num_larger = divmod(num_microbatches, num_groups)
    starts = [group * smaller + min(group, num_larger) for group in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _interleaved_rank(rank: int, num_ranks: int, num_chunks: int, groups: list[range]) -> tuple[Action, ...]:
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
    lists = (_zb_h1_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("zb-h1", looping(num_ranks, 1), tuple(lists))


def _zb_h1_rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
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


@dataclass(frozen=True)
class Form:
    """A kind of schedule that a user can name.

    Args:
        generate: (ranks p, micro-batches m, chunks per rank v) -> schedule.
        num_chunks: v if the form fixes it; None if the user chooses it.
    """

    generate: Callable[[int, int, int], Schedule]
    num_chunks: int | None = 1


# The schedules that train, by the name a user gives.
SCHEDULES: Mapping[str, Form] = MappingProxyType(
    {
        "gpipe": Form(lambda p, m, _: gpipe(p, m)),
        "1f1b": Form(lambda p, m, _: one_f_one_b(p, m)),
        "interleaved": Form(interleaved, num_chunks=None),
        "zb-h1": Form(lambda p, m, _: zb_h1(p, m)),
        "zbv": Form(lambda p, m, _: zbv(p, m), num_chunks=2),
    }
)


def make_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Generate the schedule of that name, or read it from a file.

    Args:
        name: one of `SCHEDULES`, or the path of a file (schedule_file.py): a name with a "/" in it or ending in ".txt".
        num_ranks, num_microbatches: p and m.
        num_chunks: chunks per rank v, where the form leaves it open; other forms and files ignore it.
    Returns: the schedule; it is not verified here.
    Raises: ValueError: an unknown name, a size below 1, a file that cannot be read or is wrong.
    """
    form = SCHEDULES.get(name)
    if form is not None:
        return form.generate(num_ranks, num_microbatches, form.num_chunks or num_chunks)
    if "/" in name or name.endswith(".txt"):
        return read_schedule(name, num_ranks, num_microbatches)
    raise ValueError(
        f"schedule must be one of {', '.join(SCHEDULES)}, or the path of a file: got {name!r}: {use(name, SCHEDULES)}, "
        f"or ./{name} for a file"
    )
