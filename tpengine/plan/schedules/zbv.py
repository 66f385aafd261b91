"""ZB-V: two chunks a rank in the shape of a V, the backward cut in two: idle only while the pipeline fills.

Forwards and input halves follow a closed pattern. Weight halves, which nobody else waits for, are put where a rank
would wait when the pattern is played with actions of one length.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from tpengine.plan.actions import Action, Kind
from tpengine.plan.clock import Value, inputs, output
from tpengine.plan.schedules.schedule import ComputeLists, Schedule, check_sizes, vee


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """List micro-batches down the ranks and up again, gradients the same way back, weight halves in the gaps.

    Rank 0 holds the first chunk and the last, so a micro-batch's backward starts where its forward did, and every
    rank holds the same: min(p, m) micro-batches' activations at most, exactly p from m = p on.

    With F, I and W of a chunk of length 1/2 each it takes the largest of

        3 m + (p-1)/2       the work of a rank after the first micro-batch has come down: idle (p-1)/(6 m + p-1)
        2 m + (3 p-1)/2     larger where p/2 < m < p
        m + (4 p-1)/2       larger where m < p/2: the way of one micro-batch, then the I and W of rank 0

    for every p and m, so 3 m + (p-1)/2 from m = p on, and never more than 1F1B's 3 (m + p-1).

    Args: num_ranks: p. num_microbatches: m, at least 1; fewer than p is legal.
    Returns: the schedule; rank r holds chunks r and 2 p-1-r.
    Raises: ValueError: an argument below 1.
    Cost: linear in the number of actions.
    Source: Pipeline Parallelism with Controllable Memory (Qi et al. 2024), ZB-V. The order of forwards and input halves
        is theirs, which fixes the weight halves too and reaches the formula from m = 3 p/2 on; where we put the weight
        halves is ours.
    """
    check_sizes(num_ranks, num_microbatches)
    order = [_forwards_and_input_halves(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return Schedule("zbv", vee(num_ranks), _with_weight_halves(order))


def _forwards_and_input_halves(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Return the rank's actions but for the weight halves.

    What the pattern names after the last micro-batch is left out, so it empties the pipeline as well, and serves fewer
    micro-batches than the 2p-1 it takes to fill.
    """
    below = num_ranks - 1 - rank
    down, up = rank, 2 * num_ranks - 1 - rank
    f_down, f_up, i_down, i_up = (Kind.F, down), (Kind.F, up), (Kind.I, down), (Kind.I, up)
    pattern = [
        # The first micro-batch needs `below` steps down the V from here and as many up again.
        *[f_down] * (2 * below + 1),
        # And `rank` steps more up to rank 0, where its gradient begins and comes down to here.
        *[f_up, f_down] * rank,
        # With the next forward 2p are held. That gradient goes on to the last rank and back: only `up` has any yet.
        *[f_up, i_up] * (below + 1),
        *[f_down, i_down, f_up, i_up] * num_microbatches,
    ]
    count: Counter[tuple[Kind, int]] = Counter()
    actions = []
    for kind, chunk in pattern:
        if count[kind, chunk] < num_microbatches:
            actions.append(Action(kind, chunk, count[kind, chunk]))
        count[kind, chunk] += 1
    return actions


def _with_weight_halves(order: Sequence[Sequence[Action]]) -> ComputeLists:
    """Put each weight half where its rank would wait: for an input, or for memory to begin another forward.

    Played in steps of one action a rank. A rank holds 2p forwards of its chunks at most. Of several weight halves the
    oldest goes first, so each chunk's run in the order of its input halves.
    """
    num_ranks = len(order)
    last_chunk = 2 * num_ranks - 1
    left = [deque(actions) for actions in order]
    put_off: list[deque[Action]] = [deque() for _ in order]
    num_held = [0] * num_ranks
    lists: list[list[Action]] = [[] for _ in order]
    made: set[Value] = set()
    while any(left) or any(put_off):
        step = []
        for rank in range(num_ranks):
            following = left[rank][0] if left[rank] else None
            has_room = following is None or following.kind is not Kind.F or num_held[rank] < 2 * num_ranks
            if following is not None and has_room and made.issuperset(inputs(following, last_chunk)):
                step.append((rank, left[rank].popleft()))
            elif put_off[rank]:
                step.append((rank, put_off[rank].popleft()))
        assert step, f"the pattern of ZB-V stands still with {num_ranks} ranks"
        # What a step makes is there for the next one.
        for rank, action in step:
            lists[rank].append(action)
            made.add(output(action))
            num_held[rank] += (action.kind is Kind.F) - (action.kind is Kind.W)
            if action.kind is Kind.I:
                put_off[rank].append(Action(Kind.W, *action.piece))
    return tuple(map(tuple, lists))
