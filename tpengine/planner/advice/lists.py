"""A schedule's lists as numbers: when its actions can run at the earliest, and what each rank holds at once.

Both need the order of actions alone, so a search works them out once for all layouts with the same schedule:

    Order    the actions of all ranks in an order in which each comes behind what it needs. `play` gives their times if
             each runs when its rank is free and its input has come: the simulator adds gathers, reductions, and links
             that are busy, so it is never earlier
    Held     what a rank holds when an action begins, as numbers of micro-batches by chunk, each state once. Memory
             follows from the list's order (planner/memory.py), so its peak is not below the largest of them
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpengine.plan import Kind, Schedule, make_schedule
from tpengine.plan.actions import INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from tpengine.plan.schedule import chunks_of_rank

# The kinds of compute actions, in the order of their durations in `Order.play`.
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
# Of the 8 places of a chunk those of actions that add to its gradients.
_ADD_WEIGHTS = frozenset(2 * _NUMBER[kind] + again for kind in (Kind.B, Kind.W) for again in (0, 1))


class Played(NamedTuple):
    """When a pipeline's ranks have computed, and when the last action began that adds to a chunk's gradients."""

    ends: tuple[float, ...]
    last_weights: tuple[float, ...]


@dataclass(frozen=True)
class Order:
    """Actions of all ranks, each behind what it needs.

    Attributes:
        num_ranks, num_values: of the pipeline; of what actions make, and one that is there from the beginning.
        steps: rank, place of the duration, number of the value that is needed, and of the one that is made.
        last_weights: by chunk, place of the duration and value of the last action that adds to its gradients.
    """

    num_ranks: int
    num_values: int
    steps: tuple[tuple[int, int, int, int], ...]
    last_weights: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Order:
        """Return the order of a schedule's actions; its lists must be able to finish."""
        number, num_chunks = schedule.num_microbatches, len(schedule.ranks)
        num_values = 1 + 3 * num_chunks * number
        is_made = bytearray(num_values)
        is_made[0] = 1
        lists = [_numbered(actions, schedule.ranks, number) for actions in schedule.compute]
        steps: list[tuple[int, int, int, int]] = []
        cursors, waiting = [0] * schedule.num_ranks, dict[int, int]()
        movable = list(reversed(range(schedule.num_ranks)))
        while movable:
            rank = movable.pop()
            actions = lists[rank]
            for place in range(cursors[rank], len(actions)):
                duration, needs, makes = actions[place]
                if not is_made[needs]:
                    waiting[needs] = rank
                    cursors[rank] = place
                    break
                steps.append((rank, duration, needs, makes))
                is_made[makes] = 1
                if makes in waiting:
                    movable.append(waiting.pop(makes))
        last_weights = [(0, 0)] * num_chunks
        for actions in lists:
            for duration, _, makes in actions:
                if duration % 8 in _ADD_WEIGHTS:
                    last_weights[duration // 8] = duration, makes
        return cls(schedule.num_ranks, num_values, tuple(steps), tuple(last_weights))

    def play(self, durations: Sequence[float], gaps: Sequence[float], hop: float) -> Played:
        """Return when ranks have computed.

        Args:
            durations, gaps: of actions, and what a rank needs between one and the action before it, by `place_of`.
            hop: how long what an action makes takes to another rank.
        """
        free, at = [0.0] * self.num_ranks, [0.0] * self.num_values
        for rank, duration, needs, makes in self.steps:
            start, arrived = free[rank] + gaps[duration], at[needs]
            end = (arrived if arrived > start else start) + durations[duration]
            free[rank] = end
            at[makes] = end + hop
        begun = (at[made] - hop - durations[place] for place, made in self.last_weights)
        return Played(tuple(free), tuple(begun))


def _numbered(actions: Sequence[Action], ranks: Sequence[int], number: int) -> list[tuple[int, int, int]]:
    """Return place of the duration, value needed and value made of a rank's actions, of `number` micro-batches.

    Only what other ranks make is needed: what this one makes is before it in its list.
    """
    num_chunks, rank = len(ranks), ranks[actions[0].piece[0]] if actions else 0
    # By kind: the first value that it makes. By chunk: whether another rank makes its input, or its output's gradient.
    first = {Kind.F: 1, Kind.B: 1 + num_chunks * number, Kind.W: 1 + 2 * num_chunks * number}
    first[Kind.I] = first[Kind.B]
    before = [chunk > 0 and ranks[chunk - 1] != rank for chunk in range(num_chunks)]
    behind = [chunk + 1 < num_chunks and ranks[chunk + 1] != rank for chunk in range(num_chunks)]
    found, last = [], None
    for action in actions:
        kind, (chunk, microbatch) = action.kind, action.piece
        needs = 0
        if kind is Kind.F:
            if before[chunk]:
                needs = first[kind] + (chunk - 1) * number + microbatch
        elif kind is not Kind.W and behind[chunk]:
            needs = first[kind] + (chunk + 1) * number + microbatch
        duration = 8 * chunk + 2 * _NUMBER[kind] + (chunk == last)
        found.append((duration, needs, first[kind] + chunk * number + microbatch))
        last = chunk
    return found


def place_of(kind: Kind, chunk: int, *, again: bool) -> int:
    """Return where the duration of an action is; `again` says that its rank computed the same chunk before it."""
    return 8 * chunk + 2 * _NUMBER[kind] + again


class Held(NamedTuple):
    """What a rank holds when an action begins; tuples have a number for each of its chunks, in model order.

    Attributes:
        kind, place: what begins, and of which of its chunks.
        saved: micro-batches whose backward, or input half, has not ended.
        deferred: micro-batches whose weight half has not ended.
        is_filled: whether weight gradients have been added yet.
        is_in_use: whether its first use has begun, and its last one not ended.
        is_needed: whether this action or the next one uses it, or a weight half that will follow.
    """

    kind: Kind
    place: int
    saved: tuple[int, ...]
    deferred: tuple[int, ...]
    is_filled: tuple[bool, ...]
    is_in_use: tuple[bool, ...]
    is_needed: tuple[bool, ...]


@dataclass(frozen=True)
class RankHeld:
    """What a rank holds.

    Attributes:
        chunks: of the rank, in model order.
        states: those that occur, without those that hold no more than another one with the same action.
        num_forward, num_backward: how many received inputs and gradients are alive at once, at most.
    """

    chunks: tuple[int, ...]
    states: tuple[Held, ...]
    num_forward: int
    num_backward: int

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> RankHeld:
        """Walk through a rank's list."""
        chunks, actions, ranks = chunks_of_rank(schedule.ranks, rank), schedule.compute[rank], schedule.ranks
        places = {chunk: place for place, chunk in enumerate(chunks)}
        receives = [chunk > 0 and ranks[chunk - 1] != rank for chunk in chunks]
        receives_back = [chunk + 1 < len(ranks) and ranks[chunk + 1] != rank for chunk in chunks]
        own = [places[action.piece[0]] for action in actions]
        last_use = {place: number for number, place in enumerate(own)}
        saved, deferred = [0] * len(chunks), [0] * len(chunks)
        is_filled, is_used = [False] * len(chunks), [False] * len(chunks)
        states: dict[Held, None] = {}
        alive, alive_back, most, most_back = 0, 0, 0, 0
        for number, (action, place) in enumerate(zip(actions, own, strict=True)):
            kind = action.kind
            is_used[place] = True
            if kind is Kind.F:
                saved[place] += 1
                alive += receives[place]
            else:
                is_filled[place] = is_filled[place] or kind in WEIGHT_GRADIENT
                alive_back += receives_back[place] and kind in INPUT_GRADIENT
            most, most_back = max(most, alive), max(most_back, alive_back)
            following = own[number + 1] if number + 1 < len(own) else place
            needed = [held > 0 or which in (place, following) for which, held in enumerate(deferred)]
            in_use = [used and number <= last_use[which] for which, used in enumerate(is_used)]
            state = Held(kind, place, *map(tuple, (saved, deferred, is_filled, in_use, needed)))  # type: ignore[arg-type]
            states[state] = None
            if kind in INPUT_GRADIENT:
                saved[place] -= 1
            if kind is Kind.I:
                deferred[place] += 1
            elif kind is Kind.W:
                deferred[place] -= 1
            if kind in WEIGHT_GRADIENT:
                alive -= receives[place]
                alive_back -= receives_back[place]
        return cls(chunks, tuple(_largest(states)), most, most_back)


def _largest(states: Iterable[Held]) -> Iterator[Held]:
    """Yield the states that no other one of the same action and chunk exceeds in every number."""
    kept: dict[tuple[Kind, int], list[tuple[Held, tuple[int, ...]]]] = {}
    for state in states:
        numbers = tuple(itertools.chain(*state[2:]))
        alike = kept.setdefault((state.kind, state.place), [])
        if not any(all(map(operator.ge, other, numbers)) for _, other in alike):
            alike[:] = [entry for entry in alike if not all(map(operator.le, entry[1], numbers))]
            alike.append((state, numbers))
    for alike in kept.values():
        yield from (state for state, _ in alike)


@functools.lru_cache(maxsize=256)
def order_of(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return the order of a schedule of these sizes."""
    return Order.of(make_schedule(name, num_ranks, num_microbatches, num_chunks))


@functools.lru_cache(maxsize=256)
def held_of(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[RankHeld, ...]:
    """Return what the first two ranks of a schedule of these sizes hold, and the last: one of them holds most."""
    schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
    return tuple(RankHeld.of(schedule, rank) for rank in sorted({0, min(1, num_ranks - 1), num_ranks - 1}))
