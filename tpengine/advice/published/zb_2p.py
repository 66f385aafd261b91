"""ZB-2p: the zero-bubble schedule that holds twice the activations of 1F1B. Ours do not; published runs do."""

from __future__ import annotations

from collections import deque

from tpengine.plan.actions import Action, Kind
from tpengine.plan.schedules import Schedule


def zb_2p(num_ranks: int, num_microbatches: int) -> Schedule:
    """List forwards until the first gradient can arrive, then input halves and forwards in turns, weight halves behind.

    Rank r begins with 2 (p - r) - 1 forwards, as many as fit before its first gradient if all halves take equally long.
    A weight half runs where its rank would wait, or would hold more than 2 p micro-batches, which is the limit that
    ZB-2p is named after; ZB-H2, which it improves, holds 2 p - 1.

    Args:
        num_ranks: p.
        num_microbatches: m, at least 1.

    Returns:
        The schedule, one chunk per rank.
    Source: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.3, ZB-H2, and the limits of section 4.
    """
    order = [_without_weight_halves(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    put_off: list[deque[Action]] = [deque() for _ in order]
    lists: list[list[Action]] = [[] for _ in order]
    held, most = [0] * num_ranks, 2 * num_ranks
    made: set[tuple[bool, int, int]] = set()
    while any(order) or any(put_off):
        step = []
        for rank in range(num_ranks):
            following = order[rank][0] if order[rank] else None
            is_full = following is not None and following.kind is Kind.F and held[rank] >= most
            needed = None if following is None else _input(following, num_ranks)
            if following is not None and not is_full and (needed is None or needed in made):
                step.append((rank, order[rank].popleft()))
            elif put_off[rank]:
                step.append((rank, put_off[rank].popleft()))
        assert step, f"ZB-2p must not deadlock: no rank can continue, with {num_ranks} ranks"
        for rank, action in step:
            lists[rank].append(action)
            _, microbatch = action.piece
            held[rank] += (action.kind is Kind.F) - (action.kind is Kind.W)
            if action.kind is not Kind.W:
                made.add((action.kind is Kind.F, rank, microbatch))
            if action.kind is Kind.I:
                put_off[rank].append(Action(Kind.W, rank, microbatch))
    return Schedule("zb-2p", tuple(range(num_ranks)), tuple(map(tuple, lists)))


def _without_weight_halves(rank: int, num_ranks: int, num_microbatches: int) -> deque[Action]:
    first = min(num_microbatches, 2 * (num_ranks - rank) - 1)
    actions = deque(Action(Kind.F, rank, i) for i in range(first))
    for microbatch in range(num_microbatches):
        actions.append(Action(Kind.I, rank, microbatch))
        if first + microbatch < num_microbatches:
            actions.append(Action(Kind.F, rank, first + microbatch))
    return actions


def _input(action: Action, num_ranks: int) -> tuple[bool, int, int] | None:
    """Return (is an activation, rank, micro-batch) of what an action needs from another; None for the first rank's."""
    rank, microbatch = action.piece
    if action.kind is Kind.F:
        return (True, rank - 1, microbatch) if rank else None
    return (False, rank + 1, microbatch) if rank < num_ranks - 1 else (True, rank, microbatch)
