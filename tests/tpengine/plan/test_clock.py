"""Rung: pure. Makespan, bubble and live activations of every generator against the known figures and formulas.

The formulas are checked over a grid of sizes by default, over all sizes up to 16 ranks, 64 micro-batches and 4 chunks
when slow; with durations that are whole numbers, so that equal means equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tpengine.plan import Kind, Plan, Schedule, clock, make_schedule, parse_actions

Size = tuple[int, int, int]

# Which v a generator is checked with.
_CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (1, 2, 3, 4), "zb-h1": (1,), "zbv": (2,)}
_NAMES = sorted(_CHUNKS)


@pytest.mark.parametrize(
    ("name", "num_chunks", "sizes", "makespan", "bubble"),
    [
        ("1f1b", 1, (4, 8), 33.0, 0.273),
        ("1f1b", 1, (4, 16), 57.0, 0.158),
        ("1f1b", 1, (8, 16), 69.0, 0.304),
        ("1f1b", 1, (8, 32), 117.0, 0.179),
        ("gpipe", 1, (4, 8), 33.0, 0.273),
        ("gpipe", 1, (4, 16), 57.0, 0.158),
        ("gpipe", 1, (8, 16), 69.0, 0.304),
        ("gpipe", 1, (8, 32), 117.0, 0.179),
        ("interleaved", 2, (4, 8), 28.5, 0.158),
        ("interleaved", 2, (4, 16), 52.5, 0.086),
        ("interleaved", 2, (8, 16), 58.5, 0.179),
        ("interleaved", 2, (8, 32), 106.5, 0.099),
        ("interleaved", 4, (4, 8), 26.25, 0.086),
        ("interleaved", 4, (4, 16), 50.25, 0.045),
        ("interleaved", 4, (8, 16), 53.25, 0.099),
        ("interleaved", 4, (8, 32), 101.25, 0.052),
        ("zb-h1", 1, (4, 8), 27.0, 0.111),
        ("zb-h1", 1, (4, 16), 51.0, 0.059),
        ("zb-h1", 1, (8, 16), 55.0, 0.127),
        ("zb-h1", 1, (8, 32), 103.0, 0.068),
        ("zbv", 2, (4, 8), 25.5, 0.059),
        ("zbv", 2, (4, 16), 49.5, 0.030),
        ("zbv", 2, (8, 16), 51.5, 0.068),
        ("zbv", 2, (8, 32), 99.5, 0.035),
    ],
)
def test_goldens(name: str, num_chunks: int, sizes: tuple[int, int], makespan: float, bubble: float) -> None:
    timeline = clock(make_schedule(name, *sizes, num_chunks).compute)
    assert timeline.makespan == makespan
    assert round(timeline.bubble, 3) == bubble


@pytest.mark.parametrize(
    ("name", "sizes", "peak"),
    [
        ("1f1b", (4, 8), (4.0, 3.0, 2.0, 1.0)),
        ("1f1b", (8, 16), (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)),
        ("gpipe", (4, 8), (8.0,) * 4),
        ("interleaved", (4, 8), (5.5, 4.5, 3.5, 2.5)),
        ("interleaved", (4, 16), (5.5, 4.5, 3.5, 2.5)),
        ("interleaved", (8, 16), (11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5)),
        ("interleaved", (8, 32), (11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5)),
        ("zb-h1", (4, 8), (4.0,) * 4),
        ("zbv", (4, 8), (4.0,) * 4),
        ("zbv", (4, 16), (4.0,) * 4),
        ("zbv", (8, 16), (8.0,) * 8),
        ("zbv", (8, 32), (8.0,) * 8),
    ],
)
def test_golden_peaks(name: str, sizes: tuple[int, int], peak: tuple[float, ...]) -> None:
    assert clock(make_schedule(name, *sizes).compute).peak_live_activations == peak


@pytest.mark.parametrize("name", _NAMES)
def test_formulas(name: str) -> None:
    for p in (1, 2, 3, 4, 7):
        around = {1, 2, p // 2, (3 * p) // 4, p - 1, p, p + 1, (3 * p) // 2, 2 * p - 1, 2 * p, 2 * p + 3, 41}
        for m, v in itertools.product(sorted(around - {0}), _CHUNKS[name]):
            _check_formulas(name, (p, m, v))


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_formulas_of_all_sizes(name: str) -> None:
    for p, m, v in itertools.product(range(1, 17), range(1, 65), _CHUNKS[name]):
        _check_formulas(name, (p, m, v))


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_formulas_of_many_micro_batches(name: str) -> None:
    _check_formulas(name, (32, 130, max(_CHUNKS[name])))


def _check_formulas(name: str, size: Size) -> None:
    p, m, v = size
    timeline = clock(make_schedule(name, *size).compute, _whole_durations(p * v))
    makespan = _makespan(name, size)
    assert timeline.makespan == makespan, size
    # v as long as 1f1b's, in these units.
    assert makespan <= 3 * v * (m + p - 1), size
    assert timeline.bubble == pytest.approx(1 - 3 * m * v / makespan, abs=1e-12), size
    assert timeline.peak_live_activations == tuple(live / v for live in _live_chunks(name, size)), size


def _whole_durations(num_chunks: int) -> dict[tuple[Kind, int], float]:
    """A chunk's forward takes 1, so a rank's takes v."""
    units = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
    return {(kind, chunk): unit for kind, unit in units.items() for chunk in range(num_chunks)}


def _makespan(name: str, size: Size) -> int:
    p, m, v = size
    match name:
        case "gpipe" | "1f1b":
            return 3 * (m + p - 1)
        case "interleaved":
            return 3 * v * m + 3 * (p - 1) if m >= p else 3 * v * p + 3 * (m - 1)
        case "zb-h1":
            return max(3 * m + p - 1, 2 * m + 2 * p - 1)
    assert name == "zbv"
    return max(6 * m + p - 1, 4 * m + 3 * p - 1, 2 * m + 4 * p - 1)


def _live_chunks(name: str, size: Size) -> Iterator[int]:
    """Give each rank's peak: micro-batches times chunks of the rank."""
    p, m, v = size
    first_group = -(-m // max(1, m // p))
    for rank in range(p):
        below = p - 1 - rank
        match name:
            case "gpipe":
                yield m
            case "interleaved" if v > 1:
                yield min(m * v, (v - 1) * first_group + 2 * below + 1)
            case "1f1b" | "interleaved":
                yield min(m, below + 1)
            case "zb-h1":
                yield min(m, p)
            case "zbv":
                yield 2 * min(m, p)


def test_bubbles_as_they_are_written() -> None:
    for p, m in ((2, 2), (4, 7), (8, 23), (16, 64)):
        bubbles = {
            "gpipe": (p - 1) / (m + p - 1),
            "1f1b": (p - 1) / (m + p - 1),
            "interleaved": (p - 1) / (3 * m + p - 1),
            "zb-h1": (p - 1) / (3 * m + p - 1),
            "zbv": (p - 1) / (6 * m + p - 1),
        }
        for name, bubble in bubbles.items():
            assert clock(make_schedule(name, p, m, 3).compute).bubble == pytest.approx(bubble, abs=1e-12), (name, p, m)


def test_a_plan_runs_like_its_compute_lists(build_plan: Callable[..., Plan]) -> None:
    planned = clock(build_plan("1f1b", 4, 8).actions)
    bare = clock(make_schedule("1f1b", 4, 8).compute)
    assert planned.makespan == bare.makespan
    assert [[(span.start, span.end) for span in rank.compute] for rank in planned.ranks] == [
        [(span.start, span.end) for span in rank.compute] for rank in bare.ranks
    ]


def test_split_backward_holds_until_both_halves_are_done() -> None:
    lists = [parse_actions("0F0 0F1 0I0 0I1 0W0 0W1"), parse_actions("1F0 1I0 1W0 1F1 1I1 1W1")]
    timeline = clock(lists)
    assert [(str(span.action), span.start) for span in timeline.ranks[0].compute] == [
        ("0F0", 0.0), ("0F1", 1.0), ("0I0", 3.0), ("0I1", 6.0), ("0W0", 7.0), ("0W1", 8.0),
    ]  # fmt: skip
    assert timeline.peak_live_activations == (2.0, 1.0)


def test_two_chunks_of_a_rank_count_half() -> None:
    lists = [parse_actions("0F0 2F0 2B0 0B0"), parse_actions("1F0 3F0 3B0 1B0")]
    assert clock(lists).peak_live_activations == (1.0, 1.0)
    # The micro-batch goes through all four chunks alone: 4 halves of 1, then of 2.
    assert clock(lists).makespan == 6.0


def test_durations_are_the_callers() -> None:
    lists = make_schedule("gpipe", 2, 3).compute
    durations = {(Kind.F, 0): 0.5, (Kind.F, 1): 0.5, (Kind.B, 0): 1.5, (Kind.B, 1): 1.5}
    assert clock(lists, durations).makespan == 8.0
    # A chunk that is slower holds up the other: its three forwards and backwards, and one of each on rank 0.
    assert clock(lists, {**durations, (Kind.F, 1): 1.0, (Kind.B, 1): 2.0}).makespan == 0.5 + 3 * 1.0 + 3 * 2.0 + 1.5
    with pytest.raises(ValueError, match="duration above 0: B of chunk 1 has None"):
        clock(lists, {key: value for key, value in durations.items() if key != (Kind.B, 1)})
    with pytest.raises(ValueError, match=r"duration above 0: F of chunk 0 has 0\.0"):
        clock(lists, {**durations, (Kind.F, 0): 0.0})


def test_nothing_takes_no_time() -> None:
    timeline = clock([()])
    assert (timeline.makespan, timeline.bubble, timeline.peak_live_activations) == (0.0, 0.0, (0.0,))


def test_lists_that_cannot_finish() -> None:
    with pytest.raises(ValueError, match="rank 0 waits in 0B0 for 0F0"):
        clock([parse_actions("0B0 0F0")])
    with pytest.raises(ValueError, match="rank 0 waits in 0B0 for 1B0"):
        clock([parse_actions("0F0 0B0"), parse_actions("1F0")])
    with pytest.raises(ValueError, match="rank 0 waits in 0W0 for 0B0"):
        clock([parse_actions("0F0 0W0 0I0")])


def test_a_schedule_knows_its_sizes() -> None:
    schedule = make_schedule("zbv", 3, 5)
    assert isinstance(schedule, Schedule)
    assert (schedule.num_ranks, schedule.num_microbatches, schedule.ranks) == (3, 5, (0, 1, 2, 2, 1, 0))
