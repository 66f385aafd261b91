"""Rung: pure. Profiles in files, whole and damaged; what they predict of other schedules, where the truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.plans.records import recorded

from tpengine.observe.records import MeasuredStep
from tpengine.plan import Chunk, Kind, Plan, Reduced, Residency, TensorSpec, Weights, lower, make_schedule, verify
from tpengine.planner import Costs, simulate
from tpengine.planner.costs import spec_bytes
from tpengine.planner.profiles.costs import LayerFit, costs_for, plan_for
from tpengine.planner.profiles.file import (
    BucketProfile,
    ChunkProfile,
    CostProfile,
    StageMemory,
    read_profile,
)
from tpengine.planner.profiles.ranks import ActionProfile, RankProfile, StepSeconds
from tpengine.planner.profiles.record_costs import profile_of

CountMutations = Callable[[str, int, int], None]
BOUNDARY = TensorSpec((64, 32), "float32")
NUM_LAYERS = 12
# Seconds of a layer, of the embedding, and of head and loss.
LAYER = {Kind.F: 1.0, Kind.B: 1.9, Kind.I: 1.0, Kind.W: 0.9}
FIRST = {Kind.F: 0.125, Kind.B: 0.05, Kind.I: 0.0, Kind.W: 0.05}
LAST = {Kind.F: 0.5, Kind.B: 0.875, Kind.I: 0.5, Kind.W: 0.375}


def plan_of(schedule: str, p: int, m: int, v: int = 2) -> Plan:
    """A plan over layers split as evenly as they can be, without buckets."""
    made = make_schedule(schedule, p, m, v)
    num_chunks = len(made.ranks)
    bounds = [round(chunk * NUM_LAYERS / num_chunks) for chunk in range(num_chunks + 1)]
    chunks = [
        Chunk(
            rank,
            (bounds[chunk], bounds[chunk + 1]),
            BOUNDARY if chunk else None,
            BOUNDARY if chunk < num_chunks - 1 else None,
        )
        for chunk, rank in enumerate(made.ranks)
    ]
    return lower(made, chunks, [], [], m, NUM_LAYERS, training=True)


def true_costs(plan: Plan) -> Costs:
    most_layers = max(
        sum(c.layers[1] - c.layers[0] for c in plan.chunks if c.rank == rank) for rank in range(plan.num_ranks)
    )
    return Costs(
        compute={
            (kind, index): (chunk.layers[1] - chunk.layers[0]) * LAYER[kind]
            + (index == 0) * FIRST[kind]
            + (index == len(plan.chunks) - 1) * LAST[kind]
            for index, chunk in enumerate(plan.chunks)
            for kind in LAYER
        },
        bytes_per_time=64 * 32 * 4 / 0.02,
        clip=0.125 * most_layers,
        step=0.25 * most_layers,
    )


def profiled(schedule: str, p: int, m: int, v: int = 2) -> CostProfile:
    plan = plan_of(schedule, p, m, v)
    timeline = simulate(plan, true_costs(plan))
    return profile_of(plan, [MeasuredStep(0, timeline.makespan, (recorded(plan, timeline),))], {})


@pytest.mark.parametrize("measured", [("1f1b", 4, 8), ("zbv", 2, 6), ("interleaved", 2, 4)])
@pytest.mark.parametrize("asked", [("gpipe", 4, 12), ("1f1b", 4, 16), ("interleaved", 4, 12), ("1f1b", 3, 7)])
def test_other_schedules_are_predicted(measured: tuple[str, int, int], asked: tuple[str, int, int]) -> None:
    """From four chunks or more both ends are known, and B is I and W together: the prediction is the truth."""
    profile, plan = profiled(*measured), plan_of(*asked)
    true = simulate(plan, true_costs(plan)).makespan
    assert simulate(plan, costs_for(profile, plan)).makespan == pytest.approx(true, abs=1e-3)


def test_halves_are_predicted_from_halves_and_as_halves_of_whole_backwards() -> None:
    asked = plan_of("zbv", 4, 8)
    from_halves, from_wholes = (costs_for(profiled(name, 4, 8), asked).compute for name in ("zb-h1", "1f1b"))
    for index, chunk in enumerate(asked.chunks):
        num_layers = chunk.layers[1] - chunk.layers[0]
        if 0 < index < len(asked.chunks) - 1:
            assert from_halves[Kind.I, index] == pytest.approx(num_layers * 1.0, abs=1e-6)
            assert from_halves[Kind.W, index] == pytest.approx(num_layers * 0.9, abs=1e-6)
        assert from_wholes[Kind.I, index] == from_wholes[Kind.W, index]
        assert from_wholes[Kind.I, index] + from_wholes[Kind.W, index] == pytest.approx(from_wholes[Kind.B, index])


def test_a_whole_backward_is_split_as_those_that_were_split() -> None:
    split = ChunkProfile(1, (6, 12), {Kind.F: 0.11, Kind.I: 0.15, Kind.W: 0.05})
    profile = example(chunks=(example().chunks[0], split), send_seconds=0.0, receive_seconds=0.0)
    costs = costs_for(profile, plan_of("zb-h1", 2, 4)).compute
    assert (costs[Kind.I, 0], costs[Kind.W, 0]) == pytest.approx((0.15, 0.05))
    assert costs[Kind.B, 1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("chunks", "fit"),
    [
        ([(4, 8.0)], (2.0, 0.0, 0.0)),
        ([(4, 8.0), (4, 9.0)], (2.0, 0.0, 1.0)),
        # The last would take less than nothing: both are layers.
        ([(4, 8.0), (4, 7.0)], (1.875, 0.0, 0.0)),
        ([(2, 5.0), (3, 6.0), (1, 2.5)], (2.0, 1.0, 0.5)),
        ([(2, 3.0), (2, 4.0), (2, 4.5)], (1.75, 0.0, 1.0)),
        ([(1, 2.25), (2, 4.0), (2, 4.0), (4, 8.0), (1, 2.0)], (2.0, 0.25, 0.0)),
    ],
)
def test_a_fit_by_hand(chunks: list[tuple[int, float]], fit: tuple[float, float, float]) -> None:
    found = LayerFit.over(chunks)
    assert (found.layer, found.first, found.last) == pytest.approx(fit)


def rank_of(stage: int, forward: float, exchange: float) -> RankProfile:
    """What a rank did that is the only one of its stage."""
    actions = {
        (kind, stage): ActionProfile(seconds, seconds, exchange, 0.01, None if stage else 0.02, 0.0 if stage else 0.01)
        for kind, seconds in {Kind.F: forward, Kind.B: 2 * forward}.items()
    }
    return RankProfile(stage, 0, 0, actions, 0.05, 0.01, 0)


def example(**changes: Any) -> CostProfile:
    fields: dict[str, Any] = {
        "schedule": "1f1b",
        "num_microbatches": 8,
        "chunks": (
            ChunkProfile(0, (0, 6), {Kind.F: 0.1, Kind.B: 0.2}),
            ChunkProfile(1, (6, 12), {Kind.F: 0.11, Kind.B: 0.22}),
        ),
        "boundary": BOUNDARY,
        "send_seconds": 0.001,
        "receive_seconds": 0.002,
        "link_seconds": 0.004,
        "buckets": {
            0: BucketProfile((0,), 0.03, 1000, 0.0, Weights.WHOLE, Reduced.STEP),
            2: BucketProfile((1,), 0.06, 2000, 0.0, Weights.WHOLE, Reduced.STEP),
        },
        "ties": 0.0,
        "clip": 0.01,
        "step": 0.02,
        "plan_seconds": 3.0,
        "outside_seconds": 0.1,
        "memory": (
            StageMemory({"weights": 10, "receive slots": 4}, 12, "0B3", 3, 40, "resident set of the process"),
            StageMemory({"weights": 11}, 11, "1F0", 3, 39, "resident set of the process"),
        ),
        "steps": (StepSeconds(3, 3.2, 3.0), StepSeconds(4, 3.1, 3.1)),
        "ranks": (rank_of(0, 0.1, 0.0), rank_of(1, 0.11, 0.01)),
    }
    return CostProfile(**{**fields, **changes})


def test_what_a_rank_does_for_transfers_goes_into_its_actions() -> None:
    plan = plan_of("1f1b", 2, 4)
    costs = costs_for(example(), plan)
    assert costs.compute[Kind.F, 0] == pytest.approx(0.1 + 0.001)
    assert costs.compute[Kind.F, 1] == pytest.approx(0.11 + 0.002)
    assert costs.compute[Kind.B, 1] == pytest.approx(0.22 + 0.001)
    assert costs.compute[Kind.B, 0] == pytest.approx(0.2 + 0.002)
    assert spec_bytes(BOUNDARY) / costs.bytes_per_time == pytest.approx(0.004)
    # Chunks 1 and 2 of a V lie on one rank: nothing crosses between them.
    vee = plan_of("zbv", 2, 4)
    shared = costs_for(example(), vee).compute
    assert [chunk.rank for chunk in vee.chunks] == [0, 1, 1, 0]
    assert shared[Kind.F, 1] == pytest.approx(0.1 / 6 * 3 + 0.002)
    assert shared[Kind.F, 2] == pytest.approx(0.1 / 6 * 3 + 0.001)
    assert shared[Kind.W, 2] == pytest.approx(0.2 / 6 * 3 / 2)


def test_reductions_follow_the_layers() -> None:
    profile = example()
    plan = plan_for(profile, make_schedule("interleaved", 2, 4, 2))
    verify(plan)
    assert [bucket.chunks for bucket in plan.buckets] == [(0,), (1,), (2,), (3,)]
    found = costs_for(profile, plan).reductions
    layers = [chunk.layers[1] - chunk.layers[0] for chunk in plan.chunks]
    assert [found[index] for index in range(3)] == pytest.approx([0.005 * n for n in layers[:3]])
    assert found[3] == pytest.approx(0.005 * layers[3] + 0.03)
    assert sum(layers) == NUM_LAYERS


@pytest.mark.parametrize("residency", Residency)
def test_a_sharded_run_predicts_others_with_their_gathers(residency: Residency) -> None:
    """Of a profile of zero 3, another schedule gathers, frees and reduces as often as one that was lowered so."""
    buckets = {
        index: BucketProfile((index,), 0.03, 1000, 0.006, Weights.SLICED, Reduced.MICROBATCH) for index in (0, 1)
    }
    profile = example(buckets=buckets, residency=residency)
    plan = plan_for(profile, make_schedule("interleaved", 2, 4, 2))
    verify(plan)
    gathers = [str(sub) for actions in plan.actions for action in actions for sub in action.gathers]
    assert {text: gathers.count(text) for text in gathers} == {
        f"g{bucket}": 1 if residency is Residency.STEP else 2 * 4 for bucket in range(4)
    }
    layers = [chunk.layers[1] - chunk.layers[0] for chunk in plan.chunks]
    costs = costs_for(profile, plan)
    assert [costs.gathers[bucket] for bucket in range(4)] == pytest.approx([0.001 * n for n in layers])
    slow = simulate(plan, replace(costs, gathers=dict.fromkeys(range(4), 10.0))).makespan
    assert slow > simulate(plan, costs).makespan + 10.0


def test_a_profile_is_of_one_model() -> None:
    model_of_20 = example(chunks=(ChunkProfile(0, (0, 20), {Kind.F: 0.1, Kind.B: 0.2}),), buckets={})
    with pytest.raises(ValueError, match="it has 20 layers, the plan 12: profile a run of that model"):
        costs_for(model_of_20, plan_of("1f1b", 2, 4))
    with pytest.raises(ValueError, match="a profile of one stage has none"):
        plan_for(example(chunks=model_of_20.chunks, buckets={}, boundary=None), make_schedule("1f1b", 2, 4))


def test_a_file_gives_the_profile_back(tmp_path: Path) -> None:
    sharded = BucketProfile((0, 1), 0.03, 1000, 0.5, Weights.SLICED, Reduced.MICROBATCH)
    for profile in (
        example(),
        profiled("zbv", 2, 4),
        example(buckets={1: sharded}, residency=Residency.USE),
        example(steps=(), ranks=()),
    ):
        (tmp_path / "profile.json").write_bytes(profile.to_json())
        assert read_profile(tmp_path / "profile.json") == profile


def test_a_file_of_before_there_was_memory_or_zero_or_ranks_is_read(tmp_path: Path) -> None:
    content = json.loads(example().to_json())
    del content["memory"], content["residency"], content["steps"], content["ranks"]
    for bucket in content["buckets"]:
        del bucket["gather_seconds"], bucket["weights"], bucket["reduced"]
    (tmp_path / "profile.json").write_text(json.dumps(content))
    assert read_profile(tmp_path / "profile.json") == example(memory=(), steps=(), ranks=())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ranks: ranks.pop(), "not those of a mesh with 2 stages"),
        (lambda ranks: ranks[1].update(pp=0), "not those of a mesh with 2 stages"),
        (lambda ranks: ranks[1].update(tp=1), "not those of a mesh with 2 stages"),
        (lambda ranks: ranks[1]["actions"].pop(), "pp 1, dp 0, tp 0 has not the actions of its stage"),
        (lambda ranks: ranks[1]["actions"][0].update(chunk=0), "pp 1, dp 0, tp 0 has not the actions of its stage"),
        (lambda ranks: ranks[0]["actions"][0].update(kind="STEP"), "are F, B, I and W: got 'STEP'"),
        (
            lambda ranks: ranks[0]["actions"][0].update(exchange_seconds=0.2),
            "its exchange and reductions no longer than the",
        ),
        (
            lambda ranks: ranks[0]["actions"][0].update(ends_seconds=0.2, starved_seconds=0.0),
            "at least as long as the model's ends in it",
        ),
        (
            lambda ranks: ranks[0]["actions"][0].update(ends_seconds=0.0, starved_seconds=0.2),
            "at least as long as the model's ends in it, and its host in line",
        ),
    ],
)
def test_ranks_that_are_those_of_no_run_are_refused(
    tmp_path: Path, change: Callable[[list[Any]], None], reason: str
) -> None:
    content = json.loads(example().to_json())
    change(content["ranks"])
    (tmp_path / "profile.json").write_text(json.dumps(content))
    assert reason in message_of(tmp_path / "profile.json")


def test_a_step_is_no_shorter_than_its_plan(tmp_path: Path) -> None:
    content = json.loads(example().to_json())
    content["steps"][1]["plan_seconds"] = 3.2
    (tmp_path / "profile.json").write_text(json.dumps(content))
    assert "a step takes at least as long as its plan: got 3.1 s and 3.2 s" in message_of(tmp_path / "profile.json")


def message_of(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        read_profile(path)
    text = str(error.value)
    assert "\n" not in text and str(path) in text and text.endswith("run with --train.profile-steps"), text
    return text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "must be in an object"),
        (b"{}", "it has no format"),
        (b'{"format": "other"}', "its format is not"),
        (b'{"format": "tpengine profile", "version": 2}', "its version is 2"),
        (b'{"format": "tpengine profile", "version": true}', "version is True"),
    ],
)
def test_what_is_no_profile_is_said_in_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    assert reason in message_of(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in message_of(tmp_path / "absent.json")
    assert "it is not a regular file" in message_of(tmp_path)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(64_000_001)
    assert "more than 64000000 bytes" in message_of(tmp_path / "large.json")


WRONG = (None, True, -1, "x", [], {}, float("nan"), float("inf"), 1e300, [[]], 2**70)


def mutations(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Every place in a profile with every wrong value, of another type or out of range."""
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    found = [mutation for key, item in inside for mutation in mutations(item, (*path, key))]
    return found + [(path, value) for value in WRONG if path]


@pytest.mark.slow
def test_every_damage_to_a_file_is_noticed(tmp_path: Path, count_mutations: CountMutations) -> None:
    whole = example().to_json()
    path = tmp_path / "profile.json"
    killed, survivors = 0, []
    for place, value in mutations(json.loads(whole)):
        content = json.loads(whole)
        *outer, last = place
        target = content
        for key in outer:
            target = target[key]
        target[last] = value
        path.write_text(json.dumps(content))
        try:
            read_profile(path)
        except ValueError as error:
            assert str(error).count("\n") == 0
            killed += 1
        else:
            survivors.append((place, value))
    # Legal others: any name of a schedule or an action, no bucket, no boundary's dims, no memory.
    legal = [(("schedule",), "x"), (("buckets",), []), (("boundary", "shape"), []), (("memory",), [])]
    legal += [(("steps",), []), (("ranks",), [])]
    for stage in range(2):
        legal += [(("memory", stage, name), "x") for name in ("action", "measured_as")]
        legal += [(("memory", stage, "bytes"), {})]
    assert survivors == [mutation for mutation in survivors if mutation in legal], survivors
    count_mutations("profiles", killed, killed + len(survivors) - len(legal))
    assert killed > 300
