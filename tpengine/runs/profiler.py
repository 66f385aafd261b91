"""Profile a run: trace some steps, gather the records of all ranks, and hand them to what writes and draws them.

A traced step runs as always, except that the clock is read twice per action. Records are gathered after the step's time
has been taken. They travel as JSON in a tensor: nothing that another rank sends is unpickled.

A run that chooses its steps by itself (train.profile_steps auto) takes a few of one phase, after its warm-up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpengine.config import profiled_steps
from tpengine.distributed.agreement import gather_bytes
from tpengine.distributed.mesh import Shape
from tpengine.observe.metrics import peak_memory_bytes
from tpengine.observe.records import MeasuredStep, RankRecord, Recording, decode_record, encode_record
from tpengine.pipeline.executor import Trace
from tpengine.plan import Plan
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
        write: takes what was recorded, on rank 0.
        first_step: the step at which the run starts or continues.
        say: takes lines for the user; called on rank 0.

    `begin` and `end` are collective in steps that are profiled, and do nothing in others.
    """

    def __init__(
        self,
        planned: PlannedRun,
        device: torch.device,
        run_dir: Path | None,
        write: Callable[[Recording], None],
        first_step: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        self._device, self._run_dir, self._write, self._say = device, run_dir, write, say
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
        """Gather what the ranks recorded; after the last profiled step, hand it over.

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
        """Hand over what has been recorded so far, if there is anything; a run that is stopped calls this early."""
        steps, self._steps = self._steps, []
        if not steps or self._run_dir is None:
            return
        part, shape = self._part, Shape.of(self._part.config.parallel)
        places = [(at.pp, at.dp, at.tp) for at in map(shape.coordinates, range(shape.world_size))]
        say = None if self._chooses else self._say
        phase, device = (part.config, part.layout, part.plan), self._device.type
        self._write(Recording(*phase, steps, device, places, self._held, self._metered, self._run_dir, say))

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
