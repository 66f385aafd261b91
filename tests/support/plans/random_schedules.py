"""Schedules that no generator makes: any order of compute actions in which each comes after what it needs, anywhere."""

from __future__ import annotations

from hypothesis import strategies as st

from tpengine.plan import Action, Kind, Schedule


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 4, max_chunks: int = 3, max_microbatches: int = 4) -> Schedule:
    """Draw p ranks with up to `max_chunks` chunks each, looping, V-shaped or shuffled, and backwards whole or split."""
    num_ranks, num_chunks_each = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_chunks))
    num_microbatches = draw(st.integers(1, max_microbatches))
    num_chunks = num_ranks * num_chunks_each
    down = tuple(range(num_ranks))
    turns = draw(st.sampled_from([(down, down), (down, down[::-1])]))
    looped = tuple(rank for turn in range(num_chunks_each) for rank in turns[turn % 2])
    ranks = draw(st.sampled_from([looped, tuple(draw(st.permutations(looped)))]))
    # One random order over all ranks in which every action comes after its inputs; each rank takes its part.
    lists: list[list[Action]] = [[] for _ in range(num_ranks)]
    chains = []
    for i in range(num_microbatches):
        chain = [Action(Kind.F, c, i) for c in range(num_chunks)]
        halves = [Action(Kind.I, c, i) for c in reversed(range(num_chunks))]
        is_split = draw(st.booleans())
        chains.append([*chain, *(half if is_split else Action(Kind.B, *half.piece) for half in halves)])
    while any(chains):
        chain = draw(st.sampled_from([chain for chain in chains if chain]))
        action = chain.pop(0)
        lists[ranks[action.piece[0]]].append(action)
        if action.kind is Kind.I:
            # On its own it needs its I alone.
            chains.append([Action(Kind.W, *action.piece)])
    return Schedule("random", ranks, tuple(map(tuple, lists)))
