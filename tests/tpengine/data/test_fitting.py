"""Rung: pure. Pieces are put where the least room stays, as a search among all samples finds it."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.data.fitting import best_fit, pieces_of


def searched(lengths: list[int], capacity: int) -> list[int]:
    """The rooms that stay, by looking at every sample for every piece."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        enough = [room for room in rooms if room >= length]
        if enough:
            rooms[rooms.index(min(enough))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(st.integers(1, 40).flatmap(lambda most: st.tuples(st.lists(st.integers(1, most), max_size=60), st.just(most))))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_the_least_room_stays(drawn: tuple[list[int], int]) -> None:
    lengths, capacity = drawn
    of_piece = best_fit(np.array(lengths, dtype=np.int64), capacity)
    filled = np.bincount(of_piece, lengths).astype(int) if lengths else np.empty(0, int)
    assert sorted((capacity - filled).tolist()) == searched(lengths, capacity)
    # Numbered in the order of their first pieces.
    assert list(dict.fromkeys(of_piece.tolist())) == list(range(len(filled)))


def test_the_longest_samples_take_no_more_memory_than_short_ones() -> None:
    """Nor time, which goes with it: nothing in the search is as long as a sample."""
    lengths = np.arange(1, 200, dtype=np.int64)
    tracemalloc.start()
    try:
        best_fit(lengths, 1 << 24)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_longer_documents_are_cut_from_their_beginning() -> None:
    starts, lengths, goes_on = pieces_of(np.array([0, 3, 11, 15]), np.array([3, 8, 4, 9]), 4)
    assert starts.tolist() == [0, 3, 7, 11, 15, 19, 23]
    assert lengths.tolist() == [3, 4, 4, 4, 4, 4, 1]
    assert goes_on.tolist() == [0, 1, 0, 0, 1, 1, 0]
