"""Rung: gloo ranks. Profiled steps of real runs: the trace is the plan, communication is asynchronous by the order of
what is recorded, and the files say what ran.

What only a GPU checks: the clock of CUDA events (clocks.DeviceClock). What only several hosts check: meetings to set
their clocks, whose arithmetic is in tests/tpengine/observe/test_records.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch
from support.engine.parity import config_of
from support.programs import Running, finish_all
from support.ranks.rank_pool import RankPool

from tpengine.cli import main
from tpengine.config import Config, TrainConfig, phases_of, profiled_steps, validate, validate_run
from tpengine.data import open_corpora, open_corpus
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.observe.records import (
    RankRecord,
    beginning_of,
    decode_record,
    encode_record,
    input_waits,
    measured_timeline,
)
from tpengine.pipeline.executor import Handler, Trace
from tpengine.plan import Action, Kind, Plan
from tpengine.plan.actions import COMPUTE, RECEIVES, SENDS, TRANSFERS, WEIGHT_GRADIENT
from tpengine.planner.modelled.memory import memory_of
from tpengine.planner.profiles.file import read_profile
from tpengine.planner.profiles.recorded import crowding, num_local_ranks, write_recording
from tpengine.runs.meter import clock_of
from tpengine.runs.profiler import Profiler
from tpengine.runs.trainer import Trainer

CPU = torch.device("cpu")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


def config_for(schedule: str, dp: int = 2, pp: int = 2, steps: str = "1:3") -> Config:
    """A small model with ties, reduced in several buckets."""
    config = config_of(dp, 1, pp, tied=True, kv_heads=1, schedule=schedule, num_layers=8, num_micro_batches=4 * dp)
    return replace(config, train=replace(config.train, profile_steps=steps))


def plan_of(config: Config) -> Plan:
    return training_plan(config, layout_of(config))


def recorded_step(config: Config, has_mailbox: bool) -> tuple[int, bytes]:
    """Train two steps; return the rank's stage and what it records of the second."""
    with contextlib.nullcontext() if has_mailbox else patch("tpengine.runs.trainer.open_mailbox", lambda *_: None):
        trainer = Trainer(config, open_corpus(config), CPU)
    trainer.step.run(0)
    trace = trainer.step.executor.trace = Trace()
    trainer.step.run(1)
    ran = [(event.action, event.begin_ns, event.end_ns) for event in trace.events]
    waited = [(w.action, w.begin_ns, w.end_ns, w.was_complete, w.done_ns) for w in trace.awaited]
    return trainer.state.rank.mesh.at.pp, encode_record(ran, waited, trainer.step.pipeline.copies)


def records_of(ranks: RankPool, config: Config, has_mailbox: bool = True) -> tuple[Plan, list[tuple[int, RankRecord]]]:
    """Every rank's stage and record; that what ran is the plan's list, action for action, is checked by decoding."""
    plan = plan_of(config)
    world = (config.parallel.dp or 1) * (config.parallel.pp or 1)
    found = ranks.run(recorded_step, world, config, has_mailbox)
    return plan, [(stage, decode_record(encoded, plan.actions[stage])) for stage, encoded in found]


def place_of(record: RankRecord, kind: Kind, member: Action) -> int:
    """The place in the list of the action of this kind that is, posts or awaits `member`."""
    (found,) = (
        place
        for place, ran in enumerate(record.ran)
        if (ran.action.kind is Kind.WAIT) == (kind is Kind.WAIT) and member in (ran.action, *ran.action.subs)
    )
    return found


# By default one schedule through memory, and one that splits its backward through collectives.
@pytest.mark.by_default("1f1b-True")
@pytest.mark.parametrize(
    ("schedule", "has_mailbox"),
    [
        pytest.param(name, has_mailbox, marks=() if (name == "1f1b") == has_mailbox else pytest.mark.slow)
        for name, has_mailbox in (*((name, True) for name in SCHEDULES), ("zbv", False))
    ],
)
def test_everything_is_posted_early_and_waited_for_where_it_is_consumed(
    ranks: RankPool, schedule: str, has_mailbox: bool
) -> None:
    """What ran shows it: nothing is waited for before the action that needs it, and nothing blocks in between.

    A receive is consumed by the action of its micro-batch, a send is waited for where the next of its kind leaves from
    its chunk, or where backward lets go of its graph; reductions are waited for after the last backward.
    """
    _, records = records_of(ranks, config_for(schedule), has_mailbox)
    num_hidden = 0
    for _, record in records:
        assert record.copies is has_mailbox
        kinds = [ran.action.kind for ran in record.ran]
        last_compute = max(place for place, kind in enumerate(kinds) if kind in COMPUTE)
        transfers = [ran.action for ran in record.ran if ran.action.kind in TRANSFERS]
        assert transfers and record.starts
        for transfer in transfers:
            post, wait = place_of(record, Kind.F, transfer), place_of(record, Kind.WAIT, transfer)
            assert post < wait and record.ran[post].end_ns <= record.waited[transfer][0].begin_ns
            num_hidden += any(kind in COMPUTE for kind in kinds[post:wait])
            after = next((ran.action for ran in record.ran[wait + 1 :] if ran.action.kind is not Kind.WAIT), None)
            assert after is not None and is_consumed_by(transfer, after, last_compute < wait), (transfer, after)
        for reduction, (start,) in record.starts.items():
            place = next(place for place, ran in enumerate(record.ran) if reduction in ran.action.reduces)
            started_in, wait = record.ran[place], place_of(record, Kind.WAIT, reduction)
            assert started_in.action.kind in WEIGHT_GRADIENT
            # Begun while it runs, and nobody has asked for it before it has ended.
            assert started_in.begin_ns < start < started_in.end_ns <= record.waited[reduction][0].begin_ns
            assert place <= last_compute < wait
    assert num_hidden > 0, "nothing was computed between any transfer's post and its wait"


def is_consumed_by(transfer: Action, after: Action, is_last: bool) -> bool:
    """Whether what follows a wait is what the transfer was awaited for."""
    if transfer.kind is Kind.RECV_F:
        return after.kind is Kind.F and after.piece == transfer.piece
    if transfer.kind is Kind.RECV_B:
        return after.kind in (Kind.B, Kind.I) and after.piece == transfer.piece
    is_next = after.kind is transfer.kind and after.piece[0] == transfer.piece[0]
    return is_last or is_next or (after.kind in (Kind.B, Kind.I) and after.piece == transfer.piece)


@pytest.mark.slow
def test_what_is_gathered_often_is_recorded_as_often(ranks: RankPool) -> None:
    config = config_for("zbv")
    config = replace(config, parallel=replace(config.parallel, zero=3, residency="use"))
    plan, records = records_of(ranks, config)
    # Of each stage the first replica.
    pipeline = [next(record for stage, record in records if stage == wanted) for wanted in range(plan.num_ranks)]
    timeline = measured_timeline(plan, pipeline)
    for stage, (lanes, record) in enumerate(zip(timeline.ranks, pipeline, strict=True)):
        listed = Counter(sub for action in plan.actions[stage] for sub in (*action.gathers, *action.reduces))
        assert Counter(span.action for span in (*lanes.gathers, *lanes.reductions)) == listed
        assert max(listed.values()) > 1
        for action, number in listed.items():
            assert len(record.waited[action]) == number


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zbv", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_times_are_ordered_and_waits_lie_in_their_actions(ranks: RankPool, schedule: str) -> None:
    plan, records = records_of(ranks, config_for(schedule))
    for stage, record in records:
        for before, after in zip(record.ran, record.ran[1:], strict=False):
            assert before.begin_ns <= before.end_ns <= after.begin_ns
        computed = Counter((*ran.action.piece, ran.action.kind) for ran in record.ran if ran.action.kind in COMPUTE)
        assert set(computed.values()) == {1}
        assert {(chunk, mb) for chunk, mb, _ in computed} == {
            (chunk, mb) for chunk in plan.chunks_of(stage) for mb in range(plan.num_microbatches)
        }
        awaited = {sub for ran in record.ran if ran.action.kind is Kind.WAIT for sub in ran.action.subs}
        # Ends of the pipeline wait for their samples, in the name of their first F, before their list begins.
        (first, *_) = (ran.action for ran in record.ran if ran.action.kind is Kind.F)
        reads = stage in (plan.chunks[0].rank, plan.chunks[-1].rank)
        assert record.waited.keys() - awaited == ({first} if reads else set()) and awaited <= record.waited.keys()
        for _, wait in input_waits(record):
            assert wait.begin_ns <= wait.end_ns <= record.ran[0].begin_ns
        for ran in record.ran:
            begin = ran.begin_ns
            for sub in ran.action.subs if ran.action.kind is Kind.WAIT else ():
                (waited,) = record.waited[sub]
                assert begin <= waited.begin_ns <= waited.end_ns <= ran.end_ns
                begin = waited.end_ns
                if sub.kind is Kind.REDUCE:
                    assert waited.done_ns is not None and record.starts[sub][0] < waited.done_ns <= waited.end_ns
                elif sub.kind in SENDS:
                    assert waited.was_complete

    # It is on the timeline that begins that early, and on no other: the plan's own time does not count it.
    pipeline = [next(record for stage, record in records if stage == wanted) for wanted in range(plan.num_ranks)]
    for begin, is_shown in ((beginning_of([pipeline]), True), (None, False)):
        for stage, lanes in enumerate(measured_timeline(plan, pipeline, begin).ranks):
            waits_for_samples = [span for span in lanes.waits if span.action.kind is Kind.F and span.start >= 0.0]
            assert len(waits_for_samples) == (is_shown and bool(input_waits(pipeline[stage])))


def profiled_run(config: Config, run_dir: str, lose_run_dir: bool, num_steps: int) -> list[str]:
    """Run steps with a profiler, and stop after some; return what it says."""
    said: list[str] = []
    trainer = Trainer(config, open_corpus(config), CPU)
    is_first = torch.distributed.get_rank() == 0
    profiler = Profiler(trainer.planned, CPU, Path(run_dir) if is_first else None, write_recording, say=said.append)
    if is_first and lose_run_dir:
        shutil.rmtree(run_dir)
    for step in range(num_steps):
        profiler.begin(step, trainer.step)
        assert (trainer.step.executor.trace is not None) == (step in profiled_steps(config))
        trainer.step.run(step)
        profiler.end(step, 1.0)
        assert trainer.step.executor.trace is None
    profiler.finish()
    return said


def test_a_run_leaves_trace_picture_and_profile(ranks: RankPool, tmp_path: Path) -> None:
    config = config_for("zbv")
    plan = plan_of(config)
    said, *others = ranks.run(profiled_run, 4, config, str(tmp_path), False, 3)
    assert not any(others), "only rank 0 speaks"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json", "timeline.svg", "trace.json"]
    figures, pipelines, times = said
    assert re.fullmatch(
        r"of 2 pipelines it computed longest; the first was done \d+\.\d% of the step before", pipelines
    )
    assert re.search(r"recorded step [23], the median of 2 at dp [01], tp 0: ", figures)
    assert figures.startswith("recorded step") and "bubble" in figures and "exposed communication" in figures
    assert "waits" in figures and "predicted" in times and str(tmp_path) in times
    check_trace(json.loads((tmp_path / "trace.json").read_text()), plan, dp=2, steps=[2, 3])
    check_picture(tmp_path / "timeline.svg", plan)
    profile = read_profile(tmp_path / "profile.json")
    assert [chunk.layers for chunk in profile.chunks] == [chunk.layers for chunk in plan.chunks]
    assert all(chunk.seconds.keys() == {Kind.F, Kind.I, Kind.W} for chunk in profile.chunks)
    layout = layout_of(config)
    assert {index: bucket.num_bytes for index, bucket in profile.buckets.items()} == {
        bucket.index: 8 * layout.buckets[bucket.index].layout.numel for bucket in plan.buckets
    }
    assert (profile.num_microbatches, profile.boundary) == (4, plan.chunks[0].output)
    # Beside what was measured stands what the run's first lines say.
    for held, said_first in zip(profile.memory, memory_of(config, layout, plan), strict=True):
        assert (held.kinds, held.peak, held.action) == (said_first.kinds(), said_first.peak, said_first.action)
        assert held.measured_as == "resident set of the process"
        assert held.measured_peak > held.peak and held.measured_peak > held.arenas > 0
    # Every rank says what it did; only the stages at the model's ends read.
    assert [step.step for step in profile.steps] == [1, 2]
    assert [(rank.pp, rank.dp, rank.tp) for rank in profile.ranks] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    for rank in profile.ranks:
        assert rank.actions.keys() == {(kind, chunk) for chunk in plan.chunks_of(rank.pp) for kind in "FIW"}
        # The host's time lies within that of the trace, and without tp nothing is exchanged.
        assert all(0.0 < act.issue <= act.seconds and act.exchange == 0.0 for act in rank.actions.values())
        assert (rank.read > 0.0) == (rank.pp == 0) and rank.allocator_retries == 0
        # The model's ends are in its first and last chunk, on one stage, in F and I; of W it is not known.
        for (kind, chunk), act in rank.actions.items():
            assert act.ends is not None and 0.0 <= act.ends < act.seconds
            assert (act.ends > 0.0) == (chunk in (0, 3) and kind is not Kind.W), (kind, chunk, act)


def slow_where(config: Config, run_dir: str, slow: str) -> None:
    """Profile a run in which the head, or a block, comes late, forward and back."""
    trainer = Trainer(config, open_corpus(config), CPU)
    is_first = torch.distributed.get_rank() == 0
    if trainer.state.model.is_last:
        module = trainer.state.model.lm_head if slow == "head" else next(reversed(trainer.state.model.layers.values()))

        def late_both_ways(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            nap(inputs[0])
            inputs[0].register_hook(nap)

        module.register_forward_pre_hook(late_both_ways)
    profiler = Profiler(trainer.planned, CPU, Path(run_dir) if is_first else None, write_recording, say=lambda _: None)
    for step in range(2):
        profiler.begin(step, trainer.step)
        trainer.step.run(step)
        profiler.end(step, 1.0)


def nap(_: torch.Tensor) -> None:
    time.sleep(0.02)


@pytest.mark.parametrize("slow", ["head", pytest.param("block", marks=pytest.mark.slow)])
def test_what_the_head_takes_is_told_from_what_its_stage_takes(ranks: RankPool, tmp_path: Path, slow: str) -> None:
    config = config_for("1f1b", dp=1, steps="1:2")
    ranks.run(slow_where, 2, config, str(tmp_path), slow)
    last = read_profile(tmp_path / "profile.json").ranks[1]
    for act in last.actions.values():
        assert act.seconds >= 0.019 and act.ends is not None
        assert (act.ends >= 0.019) if slow == "head" else (act.seconds - act.ends >= 0.019)


def profiled_phases(config: Config, run_dir: str) -> list[str]:
    """Run all steps of a run with phases."""
    said: list[str] = []
    phases = phases_of(config)
    corpora = open_corpora(phases)
    trainer = Trainer(config, corpora[0], CPU, corpora=corpora)
    profiler = Profiler(trainer.planned, CPU, Path(run_dir), write_recording, say=said.append)
    for step in range(config.train.steps):
        trainer.enter_phase_of(step)
        profiler.begin(step, trainer.step)
        trainer.step.run(step)
        profiler.end(step, 1.0)
    profiler.finish()
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "recorded", "num_micro_batches"),
    [("1:4", [2, 3], 8), pytest.param("0:2", [0, 1], 4, marks=pytest.mark.slow)],
)
def test_of_steps_in_two_phases_the_later_are_recorded(
    ranks: RankPool, tmp_path: Path, steps: str, recorded: list[int], num_micro_batches: int
) -> None:
    """Their plans differ: costs of both together would be those of none."""
    file = tmp_path / "given.toml"
    file.write_text("[[phase]]\nuntil = 2\n[[phase]]\nmicro_batches = 8\n")
    base = config_of(1, 1, 1, tied=False, kv_heads=2, num_micro_batches=4)
    train = replace(base.train, profile_steps=steps, steps=4)
    config = validate_run(replace(base, train=train, phases=str(file)), 1)
    ((*_, times),) = said = ranks.run(profiled_phases, 1, config, str(tmp_path))
    profile = read_profile(tmp_path / "profile.json")
    assert [step.step for step in profile.steps] == recorded and profile.num_microbatches == num_micro_batches
    left_out = "recorded steps up to 2 are left out: phase 2 has another plan"
    assert (left_out in said[0]) == (steps == "1:4") and "predicted" in times


def ranks_with_a_late_one(config: Config, run_dir: str) -> None:
    """Profile a run in which rank 1 comes late to every action."""
    trainer = Trainer(config, open_corpus(config), CPU)
    rank = torch.distributed.get_rank()
    if rank == 1:
        trainer.step.executor.handlers = {
            kind: late(handler) for kind, handler in trainer.step.executor.handlers.items()
        }
    profiler = Profiler(trainer.planned, CPU, Path(run_dir) if rank == 0 else None, write_recording, say=lambda _: None)
    for step in range(2):
        profiler.begin(step, trainer.step)
        trainer.step.run(step)
        profiler.end(step, 1.0)


def late(handler: Handler) -> Handler:
    def handle(action: Action) -> None:
        time.sleep(0.02)
        handler(action)

    return handle


@pytest.mark.slow
def test_a_rank_says_how_long_it_waited_for_its_tp_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """One rank comes late: the other has waited for as long, and itself it has computed as before."""
    config = config_of(1, 2, 1, tied=False, kv_heads=2)
    config = replace(config, train=replace(config.train, profile_steps="1:2"))
    ranks.run(ranks_with_a_late_one, 2, config, str(tmp_path))
    waiting, late_one = read_profile(tmp_path / "profile.json").ranks
    for kind in (Kind.F, Kind.B):
        waits, comes_late = waiting.actions[kind, 0], late_one.actions[kind, 0]
        assert waits.exchange >= 0.019 and waits.issue >= waits.exchange
        assert comes_late.issue - comes_late.exchange >= 0.019 > 0.0


def test_ranks_that_share_cores_are_said_to() -> None:
    assert crowding(2, 2) == "" == crowding(1, 1)
    assert crowding(4, 2).startswith("4 ranks share 2 cores of this host: ")
    assert num_local_ranks({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}) == 8
    assert num_local_ranks({}) == 1


def check_trace(content: dict[str, Any], plan: Plan, dp: int, steps: list[int]) -> None:
    events = content["traceEvents"]
    world = dp * plan.num_ranks
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}: pp {rank // dp}, dp {rank % dp}, tp 0" for rank in range(world)}
    for rank in range(world):
        actions = plan.actions[rank // dp]
        threads = {e["args"]["name"]: e["tid"] for e in events if e["pid"] == rank and e["name"] == "thread_name"}
        assert {"compute", "sends", "receives", "reductions"} <= threads.keys()
        mine = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        for step in steps:
            of_step = [e for e in mine if e["args"]["step"] == step]
            listed = [e for e in of_step if e["tid"] == threads["compute"] and "was_complete" not in e["args"]]
            assert [e["name"] for e in listed] == [str(action) for action in actions]
            for lane, kinds in (("sends", SENDS), ("receives", RECEIVES), ("reductions", {Kind.REDUCE})):
                tids = {tid for name, tid in threads.items() if name.startswith(lane)}
                subs = [posted for action in actions for posted in action.posts]
                assert sorted(e["name"] for e in of_step if e["tid"] in tids) == sorted(
                    str(sub) for sub in subs if sub.kind in kinds
                )
        for tid in set(threads.values()):
            ends: list[float] = []
            for event in sorted((e for e in mine if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"])):
                while ends and ends[-1] <= event["ts"] + 1e-3:
                    ends.pop()
                assert not ends or event["ts"] + event["dur"] <= ends[-1] + 2e-3, "spans of a thread nest"
                ends.append(event["ts"] + event["dur"])
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == set(steps)


def check_picture(path: Path, plan: Plan) -> None:
    """Every computed action is a box, once measured and once predicted, on its rank's row."""
    root = ElementTree.parse(path).getroot()
    rows = [group for group in root.iter() if group.get("class") == "rank"]
    assert len(rows) == 2 * plan.num_ranks
    for number, row in enumerate(rows):
        boxes = [rect.get("data-action") for rect in row if rect.get("class", "").partition(" ")[0] in "FBIW"]
        wanted = [str(a).partition("[")[0] for a in plan.actions[number % plan.num_ranks] if a.kind in COMPUTE]
        assert sorted(filter(None, boxes)) == sorted(wanted)
    text = " ".join(root.itertext())
    assert "measured: zbv" in text and "predicted from the measured costs" in text


def test_a_run_that_stops_early_writes_what_it_has(ranks: RankPool, tmp_path: Path) -> None:
    config = config_for("1f1b", dp=1, steps="0:3")
    (said, _) = ranks.run(profiled_run, 2, config, str(tmp_path), False, 2)
    assert len(said) == 2
    check_trace(json.loads((tmp_path / "trace.json").read_text()), plan_of(config), dp=1, steps=[1, 2])
    before = (tmp_path / "profile.json").read_bytes()
    ranks.run(profiled_run, 2, config, str(tmp_path), False, 1)
    assert (tmp_path / "profile.1.json").read_bytes() == before, "an earlier profile is kept aside"


@pytest.mark.slow
def test_what_cannot_be_written_is_said_and_ends_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """Standard error gets one line per file; the figures are printed all the same."""
    run_dir = tmp_path / "gone"
    run_dir.mkdir()
    (said, errors), _ = ranks.run(heard_run, 2, config_for("1f1b", dp=1), str(run_dir))
    assert len(said) == 2
    assert [line.partition(": ")[2].partition(":")[0] for line in errors] == [
        "what was profiled is not all written"
    ] * 3
    for line, name in zip(errors, ("profile.json", "trace.json", "timeline.svg"), strict=True):
        assert str(run_dir / name) in line


def heard_run(config: Config, run_dir: str) -> tuple[list[str], list[str]]:
    """A profiled run that loses its directory; return what it says, and its lines on standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        said = profiled_run(config, run_dir, True, 3)
    return said, [line for line in errors.getvalue().splitlines() if line.startswith("tpengine")]


def resumed_profiler(config: Config, run_dir: str) -> list[str]:
    said: list[str] = []
    planned = Trainer(config, open_corpus(config), CPU).planned
    Profiler(planned, CPU, Path(run_dir), write_recording, first_step=3, say=said.append)
    return said


def test_a_run_that_goes_on_behind_the_steps_says_so(ranks: RankPool, tmp_path: Path) -> None:
    (said,) = ranks.run(resumed_profiler, 1, config_for("1f1b", dp=1, pp=1), str(tmp_path))
    assert said == ["nothing is recorded: of the steps 1:3 none is left, the run goes on at step 4"]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("3", "use 3:10"),
        ("5:3", "use 5:6"),
        ("3:3", "use 3:4"),
        ("3:11", "use 3:10"),
        ("12:15", "use 9:10"),
        ("-1:3", "use 3:4"),
        ("a:b", "use 3:4"),
        ("1:2:3", "use 3:4"),
        ("\N{ARABIC-INDIC DIGIT ONE}:3", "use 3:4"),
        (f"1:{'9' * 30}", "use 3:4"),
    ],
)
def test_which_steps_must_be_said_rightly(text: str, remedy: str) -> None:
    config = Config(train=TrainConfig(steps=10, profile_steps=text))
    with pytest.raises(ValueError) as error:
        validate(config, 1)
    message = str(error.value)
    remedy = remedy if text != "3" else "use 3:4"
    assert (
        message.startswith("train.profile_steps must be auto, or A:B")
        and message.endswith(remedy)
        and "\n" not in message
    )
    first, end = map(int, remedy.removeprefix("use ").split(":"))
    assert profiled_steps(replace(config, train=replace(config.train, profile_steps=f"{first}:{end}")))


def test_few_steps_are_profiled() -> None:
    assert profiled_steps(Config()) == range(0)
    config = Config(train=TrainConfig(steps=1000, profile_steps="3:5"))
    assert profiled_steps(validate(config, 1)) == range(3, 5)
    with pytest.raises(ValueError, match="at most 100: got '3:500': use 3:103"):
        validate(replace(config, train=replace(config.train, profile_steps="3:500")), 1)


@pytest.mark.slow
def test_an_interrupted_run_leaves_its_profile(tmp_path: Path) -> None:
    running = Running(
        *("tpengine.train", "--model.hidden-size", "32", "--model.ffn-size", "48"),
        *("--train.seq-len", "32", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2"),
        *("--train.steps", "100000", "--train.profile-steps", "0:100", "--device", "cpu", "--run-dir", "out"),
        cwd=tmp_path,
    )
    running.wait_until(lambda running: "\nstep 1/" in running.said(), "the run makes no step")
    running.send_signal(signal.SIGINT)
    (end,) = finish_all(running)
    output, errors = end.stdout, end.stderr
    assert end.returncode == 130, errors
    assert errors.count("\n") == 1 and "continue with --run-dir out --resume" in errors
    assert "recorded step" in output and "no stage waits on another" in output
    assert read_profile(tmp_path / "out" / "profile.json").schedule == "1f1b"
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"trace.json", "timeline.svg"}


@pytest.mark.slow
def test_the_command_predicts_another_schedule(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(profiled_run, 2, config_for("1f1b", dp=1), str(tmp_path), False, 3)
    path, drawn = tmp_path / "profile.json", tmp_path / "drawn.svg"
    command = ["schedule", "--profile", str(path), "--schedule", "zbv", "--pp", "2", "--micro-batches", "6"]
    assert main([*command, "--draw", str(drawn)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["rank", "0"], ["rank", "1"]]
    assert re.fullmatch(r"a column is \S+ s", lines[2])
    assert lines[3].startswith("makespan ") and "profiled: 1f1b, 4 micro-batches" in lines[3]
    assert lines[-2].startswith("exposed communication") and lines[-1] == f"wrote {drawn}"
    rows = [group for group in ElementTree.parse(drawn).getroot().iter() if group.get("class") == "rank"]
    boxes = Counter(rect.get("class", "")[0] for row in rows for rect in row if rect.get("data-action"))
    assert (len(rows), boxes["F"], boxes["I"], boxes["W"]) == (2, 24, 24, 24)
    for arguments, message in (
        (("--link", "1"), "--profile says what actions cost: got --link too: leave --link out"),
        (("--times", "F=2"), "--profile says what actions cost: got --times too: leave --times out"),
        (("--tp", "2"), "--tp is for a model: got --profile, which has its own: leave --tp out"),
        (("--machine", "cpu"), "--machine is for a model: got --profile, which has its own: leave --machine out"),
        (("--pp", "8"), "needs a layer: got 16 chunks on 8 ranks, and a profile of 8 layers: use --pp 4"),
        (
            ("--schedule", "interleaved", "--chunks", "9"),
            "and a profile of 8 layers: use a schedule of at most 8 chunks",
        ),
        (("--profile", str(drawn)), f"a profile must be the profile.json of a run: {drawn}: it is not JSON"),
    ):
        assert main([*command, *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_times_of_a_gpu_are_those_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic, on a stream that is made up: events reach it late, and are read when the step has ended."""
    stream_ms = iter([100.0, 100.5, 103.25])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at_ms: float | None = None
            self.is_read = False

        def record(self) -> None:
            self.at_ms = next(stream_ms)

        def synchronize(self) -> None:
            self.is_read = True

        def elapsed_time(self, end: Event) -> float:
            assert self.at_ms is not None and end.at_ms is not None and end.is_read
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr("time.perf_counter_ns", lambda: 7_000_000)
    trace = Trace(clock_of(torch.device("cuda", 0)))
    action = Action(Kind.F, 0, 0)
    trace.span(action, trace.now(), 0)
    assert [(e.action, e.begin_ns, e.end_ns) for e in trace.events] == [("0F0", 7_500_000, 10_250_000)]
