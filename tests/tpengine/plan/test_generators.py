"""Rung: pure. Generators list every micro-batch once each way, in order, on the rank of the chunk, and can finish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpengine.plan import SCHEDULES, Action, Kind, Schedule, clock, format_actions, forward_only, make_schedule

NAMES = ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv"]
_PLACEMENTS: dict[str, Callable[[int, int], list[int]]] = {
    "interleaved": lambda p, v: [chunk % p for chunk in range(p * v)],
    "zbv": lambda p, _: [*range(p), *range(p)[::-1]],
}


def test_names() -> None:
    assert sorted(SCHEDULES) == NAMES


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.sampled_from(NAMES), st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
@example("interleaved", 8, 15, 4)
@example("interleaved", 7, 3, 3)
@example("zbv", 16, 1, 2)
@example("zbv", 1, 64, 2)
@example("zb-h1", 16, 5, 1)
def test_training_schedules(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
    assert schedule.name == name
    assert (schedule.num_ranks, schedule.num_microbatches) == (num_ranks, num_microbatches)
    expected = _PLACEMENTS.get(name, lambda p, _: list(range(p)))(num_ranks, num_chunks)
    assert list(schedule.ranks) == expected
    assert schedule.splits_backward is (name in ("zb-h1", "zbv"))
    assert schedule.keeps_order
    kinds = (Kind.F, Kind.I, Kind.W) if schedule.splits_backward else (Kind.F, Kind.B)
    for rank, actions in enumerate(schedule.compute):
        held = [chunk for chunk, holder in enumerate(expected) if holder == rank]
        assert len(actions) == len(kinds) * len(held) * num_microbatches
        for chunk in held:
            for kind in kinds:
                in_order = [Action(kind, chunk, microbatch) for microbatch in range(num_microbatches)]
                assert [action for action in actions if action.kind is kind and action.chunk == chunk] == in_order
        positions = {action: position for position, action in enumerate(actions)}
        for action, position in positions.items():
            if action.kind is Kind.W:
                assert positions[Action(Kind.I, *action.piece)] < position
    clock(schedule.compute)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
def test_forward_only(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    schedule = forward_only(tuple(range(num_ranks)) * num_chunks, num_microbatches)
    for rank, actions in enumerate(schedule.compute):
        for chunk in range(rank, num_ranks * num_chunks, num_ranks):
            of_chunk = tuple(action for action in actions if action.chunk == chunk)
            assert of_chunk == tuple(Action(Kind.F, chunk, i) for i in range(num_microbatches))
        assert len(actions) == num_chunks * num_microbatches
    timeline = clock(schedule.compute)
    assert timeline.peak_live_activations == (1.0 / num_chunks,) * num_ranks
    if num_microbatches % num_ranks == 0:
        # Nobody waits once the first micro-batch has come down.
        assert timeline.makespan == pytest.approx(num_microbatches + (num_ranks - 1) / num_chunks)


@pytest.mark.parametrize(
    ("name", "rank", "text"),
    [
        ("1f1b", 0, "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        ("1f1b", 1, "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"),
        ("1f1b", 2, "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"),
        ("gpipe", 1, "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"),
        ("zb-h1", 0, "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"),
        ("zb-h1", 2, "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"),
    ],
)
def test_lists_of_three_ranks(name: str, rank: int, text: str) -> None:
    assert format_actions(make_schedule(name, 3, 4).compute[rank]) == text


@pytest.mark.parametrize(
    ("name", "rank", "text"),
    [
        # Two groups of two, each through both chunks of the rank.
        ("interleaved", 0, "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"),
        ("interleaved", 1, "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"),
        # Four forwards are held at most, so a weight half goes before the fifth.
        ("zbv", 0, "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 0I2 3W3 0I3 0W2 0W3"),
        ("zbv", 1, "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3"),
    ],
)
def test_lists_of_two_ranks_with_two_chunks(name: str, rank: int, text: str) -> None:
    assert format_actions(make_schedule(name, 2, 4).compute[rank]) == text


def test_uneven_groups() -> None:
    forwards = [action for action in make_schedule("interleaved", 3, 7).compute[2] if action.kind is Kind.F]
    assert format_actions(forwards) == "2F0 2F1 2F2 2F3 5F0 5F1 5F2 5F3 2F4 2F5 2F6 5F4 5F5 5F6"


def test_one_chunk_interleaved_is_1f1b() -> None:
    for p, m in ((1, 1), (4, 3), (4, 9)):
        assert make_schedule("interleaved", p, m, 1).compute == make_schedule("1f1b", p, m).compute


def test_fewer_microbatches_than_ranks() -> None:
    assert [format_actions(actions) for actions in make_schedule("1f1b", 4, 2).compute] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]
    assert [format_actions(actions) for actions in make_schedule("zb-h1", 4, 2).compute] == [
        "0F0 0F1 0I0 0W0 0I1 0W1",
        "1F0 1F1 1I0 1I1 1W0 1W1",
        "2F0 2F1 2I0 2I1 2W0 2W1",
        "3F0 3I0 3F1 3I1 3W0 3W1",
    ]


def test_one_rank_works_alone() -> None:
    for name in NAMES:
        schedule = make_schedule(name, 1, 3)
        assert clock(schedule.compute).bubble == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments(name: str) -> None:
    with pytest.raises(ValueError, match="num_ranks of at least 1: got 0, use 1"):
        make_schedule(name, 0, 1)
    with pytest.raises(ValueError, match="num_microbatches of at least 1: got -2, use 1"):
        make_schedule(name, 1, -2)


def test_bad_arguments_of_one_form() -> None:
    with pytest.raises(ValueError, match="num_chunks of at least 1: got -1, use 1"):
        make_schedule("interleaved", 2, 2, -1)
    assert make_schedule("zbv", 2, 2, -1) == make_schedule("zbv", 2, 2)
    with pytest.raises(ValueError, match="num_ranks of at least 1: got 0, use 1"):
        forward_only((), 1)
    with pytest.raises(ValueError, match="num_microbatches of at least 1: got 0, use 1"):
        forward_only((0,), 0)


def test_unknown_names() -> None:
    with pytest.raises(ValueError) as raised:
        make_schedule("zb-v", 2, 2)
    assert str(raised.value) == (
        "schedule must be one of gpipe, 1f1b, interleaved, zb-h1, zbv, or the path of a file: got 'zb-v': use zbv, "
        "or ./zb-v for a file"
    )


def test_a_path_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("rank 0: 0F0 0B0\n")
    (tmp_path / "gpipe").write_text("rank 0: 0F0 0I0 0W0\n")
    monkeypatch.chdir(tmp_path)
    by_suffix, by_folder = make_schedule("mine.txt", 1, 1), make_schedule("./gpipe", 1, 1)
    assert isinstance(by_suffix, Schedule)
    assert (by_suffix.name, format_actions(by_suffix.compute[0])) == ("mine", "0F0 0B0")
    assert (by_folder.name, format_actions(by_folder.compute[0])) == ("gpipe", "0F0 0I0 0W0")
    assert make_schedule("gpipe", 1, 1).compute == by_suffix.compute


def test_keeps_order_sees_disorder() -> None:
    def order(text: str) -> bool:
        words = [text.split()]
        return Schedule(
            "x", (0,), tuple(tuple(Action(Kind(w[1]), int(w[0]), int(w[2])) for w in line) for line in words)
        ).keeps_order

    assert order("0F0 0F1 0B0 0B1")
    assert not order("0F0 0F1 0B1 0B0")
    assert order("0F0 0F1 0I1 0I0 0W0 0W1")
    assert not order("0F0 0F1 0I0 0I1 0W1 0W0")


def test_table_is_immutable() -> None:
    with pytest.raises(TypeError):
        SCHEDULES["mine"] = SCHEDULES["gpipe"]  # type: ignore[index]
