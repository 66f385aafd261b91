"""Profile a run: trace some steps, gather the records of all ranks, and write timelines and measured costs.

    trace.json      every rank's timeline, for ui.perfetto.dev
    timeline.svg    one pipeline in the step of median length, above the simulator's prediction from the measured costs
    profile.json    the measured costs: `tpengine schedule --profile` predicts other schedules from them; what each
                    stage holds, by the plan and measured; and what each rank did, for `tpengine diagnose`

Of several pipelines (replicas, tensor-parallel ranks) the one that computes longest is drawn and described. The others
wait for it in their reductions, which would look like slow communication.

A traced step runs as always, except that the clock is read twice per action. Records are gathered after the step's time
has been taken. They travel as JSON in a tensor: nothing that another rank sends is unpickled.

A run that chooses its steps by itself (train.profile_steps auto) takes a few of one phase, after its warm-up.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tpengine.config import profiled_steps
from tpengine.distributed.agreement import gather_bytes
from tpengine.distributed.launch import num_cores
from tpengine.distributed.mesh import Shape
from tpengine.files import keep_copy_aside
from tpengine.layout.step_plan import gradient_bytes
from tpengine.observe.chrome_trace import TracedRank, TracedStep, chrome_trace
from tpengine.observe.metrics import peak_memory_bytes
from tpengine.observe.record_costs import MeasuredStep, profile_of, ranks_of, step_seconds
from tpengine.observe.records import (
    RankRecord,
    beginning_of,
    computed_until,
    decode_record,
    encode_record,
    measured_timeline,
)
from tpengine.pipeline.executor import Trace
from tpengine.plan import Plan, Timeline
from tpengine.planner import StepFigures, simulate
from tpengine.planner.draw import Picture, draw_svg, write_beside
from tpengine.planner.machine import machine_on
from tpengine.planner.modelled.memory import memory_of
from tpengine.planner.profiles.costs import costs_for
from tpengine.planner.profiles.file import StageMemory
from tpengine.runs.meter import Meter, clock_of, offsets_of_ranks
from tpengine.training.planned_run import PlannedRun
from tpengine.training.train_step import TrainStep

_NUM_STEPS = 8
# The first steps of a start load kernels, prepare weights and fill caches.
_WARM_UP_STEPS = 4
# One of warm-up, one to record.
_FEWEST_STEPS = 2
# Of all ranks and recorded steps: rank 0 holds them, at some 300 bytes each, until they are written.
_MOST_EVENTS = 200_000


def chosen_steps(planned: PlannedRun, first_step: int) -> range:
    """Return the steps to record of a run that begins or continues at `first_step`, from 0; none if nothing fits.

    They are of one phase, since another has another plan: of that in which the run warms up.
    """
    phase = planned.phases.at(first_step)
    while phase.number + 1 < len(planned.phases) and phase.end_step - first_step < _FEWEST_STEPS:
        phase = planned.phases.at(phase.end_step)
    shape = Shape.of(planned.config.parallel)
    num_events = shape.dp * shape.tp * events_of_pipeline(planned.parts[phase.number].plan)
    return steps_after_warm_up(max(first_step, phase.first_step), phase.end_step, num_events)


def steps_after_warm_up(begin: int, end: int, num_events: int) -> range:
    """Return the steps to record of those from `begin` to `end`; of few steps a third is warm-up, and at least one.

    Args: num_events: that a step records, on all ranks together.
    """
    warm_up = min(_WARM_UP_STEPS, max(1, (end - begin) // 3))
    number = min(_NUM_STEPS, end - begin - warm_up, _MOST_EVENTS // num_events)
    return range(begin + warm_up, begin + warm_up + max(0, number))


def events_of_pipeline(plan: Plan) -> int:
    """Return how many events the ranks of a pipeline record in a step."""
    return sum(1 + len(action.posts) for actions in plan.actions for action in actions)


class Profiler:
    """Profiles the steps that the configuration names.

    Args:
        planned: the run.
        device: where this rank computes.
        run_dir: where files go, on rank 0; None elsewhere.
        first_step: the step at which the run starts or continues.
        say: takes lines for the user; called on rank 0.

    `begin` and `end` are collective in steps that are profiled, and do nothing in others.
    """

    def __init__(
        self,
        planned: PlannedRun,
        device: torch.device,
        run_dir: Path | None,
        first_step: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        self._device, self._run_dir, self._say = device, run_dir, say
        # Of a run that chooses its steps nothing is said, and no copies are kept: each start records some.
        self._chooses = planned.config.train.profile_steps == "auto"
        self._wanted = chosen_steps(planned, first_step) if self._chooses else profiled_steps(planned.config)
        self._steps: list[MeasuredStep] = []
        self._offsets: list[int] = []
        # What was recorded is of one phase: another has another plan, and another step.
        self._part = planned.at(first_step)
        self._meter: Meter | None = None
        # By rank: arenas, and the most held so far; what the meters have.
        self._held: list[tuple[int, int]] = []
        self._metered: list[dict[str, Any]] = []
        if self._wanted and first_step >= self._wanted.stop and run_dir is not None:  # never if they were chosen
            text = planned.config.train.profile_steps
            say(f"nothing is recorded: of the steps {text} none is left, the run goes on at step {first_step + 1}")

    def begin(self, step: int, train_step: TrainStep) -> None:
        """Switch the trace on; call it before the step's time begins.

        Args:
            step: 0-based number.
            train_step: runs it.
        """
        if step not in self._wanted:
            return
        rank = train_step.state.rank
        if self._meter is None or self._meter.train_step is not train_step:
            self._meter = self._enter(train_step)
        rank.activity.begin("setting the clocks")
        self._offsets = offsets_of_ranks(rank.device)
        clock = clock_of(rank.device)
        train_step.executor.trace = Trace(clock)
        self._meter.begin(clock)

    def _enter(self, train_step: TrainStep) -> Meter:
        """Leave out what was recorded in an earlier phase."""
        part = train_step.state.part
        if self._steps and part is not self._part:
            self._say(
                f"recorded steps up to {self._steps[-1].step + 1} are left out: phase "
                f"{part.phase.number + 1} has another plan"
            )
            self._steps = []
        self._part = part
        return Meter(train_step)

    def end(self, step: int, seconds: float) -> None:
        """Gather what the ranks recorded; after the last profiled step, write the files.

        Args: seconds: the step's time.
        """
        meter = self._meter
        if step not in self._wanted or meter is None or (trace := meter.train_step.executor.trace) is None:
            return
        activity = meter.train_step.state.rank.activity
        meter.train_step.executor.trace = None
        meter.end()
        activity.begin("gathering what was recorded")
        records = self._gather(trace, meter.train_step.pipeline.copies)
        self._gather_figures(meter)
        if records:
            shape = Shape.of(self._part.config.parallel)
            firsts = range(shape.dp * shape.tp)
            pipelines = tuple(tuple(records[rank] for rank in shape.pipeline_ranks(first)) for first in firsts)
            self._steps.append(MeasuredStep(step, seconds, pipelines))
        if step + 1 == self._wanted.stop:
            activity.begin("writing what was recorded", timed=False)
            self.finish()

    def go_back(self, num_steps: int) -> None:
        """Forget what was recorded of later steps, which the run repeats."""
        self._steps = [step for step in self._steps if step.step < num_steps]

    def finish(self) -> None:
        """Write what has been recorded so far, if there is anything; a run that is stopped calls this early.

        If something cannot be written or drawn, a line says so, and the run goes on.
        """
        steps, self._steps = self._steps, []
        if not steps or self._run_dir is None:
            return
        plan = self._part.plan
        measured_costs = profile_of(plan, steps, self._bucket_bytes(), self._part.layout.residency)
        shape = Shape.of(self._part.config.parallel)
        places = [(at.pp, at.dp, at.tp) for at in map(shape.coordinates, range(shape.world_size))]
        profile = replace(
            measured_costs,
            memory=self._memory(),
            steps=step_seconds(plan, steps),
            ranks=ranks_of(steps, places, self._metered),
        )
        # Choose the step of median length, and its pipeline that computes longest.
        drawn = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
        ends = [computed_until(pipeline) for pipeline in drawn.pipelines]
        last = ends.index(max(ends))
        measured = measured_timeline(plan, drawn.pipelines[last])
        predicted = simulate(plan, costs_for(profile, plan))
        # Write the files, then say what they show.
        for name, write in {
            "profile.json": profile.to_json,
            "trace.json": lambda: self._chrome_trace(steps),
            "timeline.svg": lambda: self._pictures(drawn, last, predicted),
        }.items():
            self._write(self._run_dir / name, write)
        if self._chooses:
            return
        ahead = (max(ends) - min(ends)) * 1e-9
        for line in self._lines(drawn, len(steps), last, ahead, measured, predicted):
            self._say(line)

    def _gather(self, trace: Trace, copies: Any) -> list[RankRecord]:
        """Return the records of all ranks on rank 0, and an empty list elsewhere; collective."""
        encoded = encode_record(
            [(event.action, event.begin_ns, event.end_ns) for event in trace.events],
            [(w.action, w.begin_ns, w.end_ns, w.was_complete, w.done_ns) for w in trace.awaited],
            copies,
        )
        shape, lists = Shape.of(self._part.config.parallel), self._part.plan.actions
        return [
            decode_record(of_rank, lists[shape.coordinates(rank).pp], self._offsets[rank])
            for rank, of_rank in enumerate(gather_bytes(encoded))
        ]

    def _gather_figures(self, meter: Meter) -> None:
        """Gather on rank 0 what each rank has for exchanging and has held at most, and what it metered; collective."""
        rank = meter.train_step.state.rank
        held = rank.comms.arena_bytes(rank.mailbox), peak_memory_bytes(rank.device)
        mine = json.dumps({"held": held, "metered": meter.figures()})
        everyone = [json.loads(of_rank) for of_rank in gather_bytes(mine.encode())]
        self._held = [tuple(of_rank["held"]) for of_rank in everyone]
        self._metered = [of_rank["metered"] for of_rank in everyone]

    def _memory(self) -> tuple[StageMemory, ...]:
        """Return what each stage holds: by the plan, and of its ranks the most."""
        part, device = self._part, self._device
        shape = Shape.of(part.config.parallel)
        planned_memory = memory_of(part.config, part.layout, part.plan, machine_on(device.type))
        stages = []
        for stage, planned in enumerate(planned_memory):
            held = [of_rank for rank, of_rank in enumerate(self._held) if shape.coordinates(rank).pp == stage]
            arenas, measured = (max(values) for values in zip(*held, strict=True))
            measured_as = "allocated by torch" if device.type == "cuda" else "resident set of the process"
            stages.append(StageMemory(planned.kinds(), planned.peak, planned.action, arenas, measured, measured_as))
        return tuple(stages)

    def _bucket_bytes(self) -> dict[int, int]:
        item = gradient_bytes(self._part.config.train.dtype)
        return {index: bucket.layout.numel * item for index, bucket in self._part.layout.buckets.items()}

    def _chrome_trace(self, steps: list[MeasuredStep]) -> bytes:
        plan, shape = self._part.plan, Shape.of(self._part.config.parallel)
        origin = beginning_of(steps[0].pipelines)
        timelines = [[measured_timeline(plan, records, origin) for records in step.pipelines] for step in steps]
        ranks = []
        for rank in range(shape.world_size):
            at = shape.coordinates(rank)
            # A pipeline's number is that of its first rank, counted over dp and tp.
            pipeline = at.dp * shape.tp + at.tp
            traced = [
                TracedStep(step.step + 1, step.pipelines[pipeline][at.pp], of_step[pipeline].ranks[at.pp])
                for step, of_step in zip(steps, timelines, strict=True)
            ]
            ranks.append(TracedRank(rank, f"rank {rank}: pp {at.pp}, dp {at.dp}, tp {at.tp}", traced))
        return chrome_trace(ranks, origin)

    def _pictures(self, drawn: MeasuredStep, pipeline: int, predicted: Timeline) -> bytes:
        plan = self._part.plan
        # From when the ranks began to wait for their samples.
        records = drawn.pipelines[pipeline]
        measured = measured_timeline(plan, records, beginning_of([records]))
        what = f"{plan.schedule}, {plan.num_ranks} ranks, {plan.num_microbatches} micro-batches, step {drawn.step + 1}"
        where = f", {self._name_of(pipeline)}" if len(drawn.pipelines) > 1 else ""
        pictures = [
            Picture(f"measured: {what}{where}", measured, "s", plan),
            Picture("predicted from the measured costs", predicted, "s", plan),
        ]
        return draw_svg(pictures).encode()

    def _name_of(self, pipeline: int) -> str:
        at = Shape.of(self._part.config.parallel).coordinates(pipeline)
        return f"dp {at.dp}, tp {at.tp}"

    def _write(self, path: Path, content: Callable[[], bytes]) -> None:
        try:
            written = content()
            if not self._chooses:
                keep_copy_aside(path)
            write_beside(path, written)
        except (ValueError, OSError) as error:
            print(f"tpengine: what was profiled is not all written: {error}", file=sys.stderr, flush=True)

    def _lines(
        self, drawn: MeasuredStep, num_steps: int, pipeline: int, ahead: float, measured: Timeline, predicted: Timeline
    ) -> Iterator[str]:
        """Yield lines for the user; `ahead`: how many seconds before this pipeline the first one ended computing."""
        figures = StepFigures.of(self._part.plan, measured)
        num_pipelines = len(drawn.pipelines)
        where = f" at {self._name_of(pipeline)}" if num_pipelines > 1 else ""
        of_several = f", the median of {num_steps}" if num_steps > 1 else ""
        yield (
            f"recorded step {drawn.step + 1}{of_several}{where}: bubble {figures.bubble:.1%}, "
            f"exposed communication {figures.exposed:.1%} of the step; {figures.sentence()}"
        )
        if num_pipelines > 1:
            share = ahead / measured.makespan
            yield f"of {num_pipelines} pipelines it computed longest; the first was done {share:.1%} of the step before"
        if self._device.type == "cpu" and (crowd := crowding(num_local_ranks(os.environ), num_cores())):
            yield crowd
        error = predicted.makespan / measured.makespan - 1.0
        yield (
            f"its plan took {measured.makespan:.4g} s, predicted {predicted.makespan:.4g} s ({error:+.1%}), of "
            f"{drawn.seconds:.4g} s in all; see trace.json, timeline.svg and profile.json in {self._run_dir}"
        )


def crowding(num_ranks: int, num_cores: int) -> str:
    """Return a line that warns if ranks share cores: then times depend on the other ranks as much as on the plan."""
    if num_ranks <= num_cores:
        return ""
    cores = f"{num_cores} cores" if num_cores > 1 else "one core"
    return f"{num_ranks} ranks share {cores} of this host: their times are those of taking turns, and predict no others"


def num_local_ranks(environ: Mapping[str, str]) -> int:
    """Return the number of ranks on this host, as torchrun or train.py set it; 1 by default."""
    return int(environ.get("LOCAL_WORLD_SIZE") or environ.get("WORLD_SIZE") or 1)
