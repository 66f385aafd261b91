"""ZB-V: two chunks per rank in the shape of a V, the backward cut in two: idle only while the pipeline fills.

Forwards and input halves follow a closed pattern. No rank waits for a weight half, so weight halves are put where their
own rank would wait, found by simulating the pattern with actions of equal length.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from tpengine.plan.actions import Action, Kind
from tpengine.plan.clock import Value, inputs, output
from tpengine.plan.schedule import ComputeLists, Schedule, check_sizes, vee


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """List micro-batches down the ranks and up again, gradients back the same way, weight halves in the gaps.

    Rank 0 holds the first and the last chunk, so a micro-batch's backward starts where its forward did. Every rank
    holds the same: at most min(p, m) micro-batches' activations, exactly p from m = p on.

    If F, I and W of a chunk take 1/2 each, it takes the largest of

        3 m + (p-1)/2       the work of a rank after the first micro-batch has arrived: idle (p-1)/(6 m + p-1)
        2 m + (3 p-1)/2     larger where p/2 < m < p
        m + (4 p-1)/2       larger where m < p/2: the path of one micro-batch, then the I and W of rank 0

    for every p and m, so 3 m + (p-1)/2 from m = p on, and never more than 1F1B's 3 (m + p-1).

    Args: num_ranks: p. num_microbatches: m, at least 1; fewer than p is legal.
    Returns: the schedule; rank r holds chunks r and 2 p-1-r.
    Raises: ValueError: an argument below 1.
    Cost: linear in the number of actions.
    Source: Pipeline Parallelism with Controllable Memory (Qi et al. 2024), ZB-V. The order of forwards and input halves
        is theirs; it determines the weight halves and reaches the formula from m = 3 p/2 on. Where the weight halves
        are put is ours.
    """
    check_sizes(num_ranks, num_microbatches)
    order = [_forwards_and_input_halves(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return Schedule("zbv", vee(num_ranks), _with_weight_halves(order))


def _forwards_and_input_halves(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Return the rank's actions without the weight halves.

    The pattern is longer than needed: actions of micro-batches after the last are left out. So it also drains the
    pipeline, and works for fewer than the 2p-1 micro-batches that fill it.
    """
    below = num_ranks - 1 - rank
    down, up = rank, 2 * num_ranks - 1 - rank
    f_down, f_up, i_down, i_up = (Kind.F, down), (Kind.F, up), (Kind.I, down), (Kind.I, up)
    pattern = [
        # The first micro-batch needs `below` steps down the V from here and as many up again.
        *[f_down] * (2 * below + 1),
        # From there it takes `rank` steps more up to rank 0, where its gradient begins and comes down to here.
        *[f_up, f_down] * rank,
        # The next forward makes 2p held. That gradient goes on to the last rank and back: until then only `up` has any.
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
    """Put each weight half where its rank would wait for an input, or for memory to begin another forward.

    Simulated in rounds of one action per rank. A rank holds at most 2p forwards of its chunks. The oldest postponed
    weight half goes first, so each chunk's weight halves run in the order of its input halves.
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
        assert step, f"the pattern of ZB-V must not deadlock: no rank can continue, with {num_ranks} ranks"
        # What is produced in a round can be used in the next one.
        for rank, action in step:
            lists[rank].append(action)
            made.add(output(action))
            num_held[rank] += (action.kind is Kind.F) - (action.kind is Kind.W)
            if action.kind is Kind.I:
                put_off[rank].append(Action(Kind.W, *action.piece))
    return tuple(map(tuple, lists))
