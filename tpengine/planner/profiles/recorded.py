"""What becomes of the steps that a run has recorded: files in its directory, and lines for the user.

    trace.json      every rank's timeline, for ui.perfetto.dev
    timeline.svg    one pipeline in the step of median length, above the simulator's prediction from the measured costs
    profile.json    the measured costs: `tpengine schedule --profile` predicts other schedules from them; what each
                    stage holds, by the plan and measured; and what each rank did, for `tpengine diagnose`

Of several pipelines (replicas, tensor-parallel ranks) the one that computes longest is drawn and described. The others
wait for it in their reductions, which would look like slow communication.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from tpengine.distributed.launch import num_cores
from tpengine.files import keep_copy_aside, write_beside
from tpengine.layout.step_plan import gradient_bytes
from tpengine.observe.chrome_trace import TracedRank, TracedStep, chrome_trace
from tpengine.observe.records import MeasuredStep, Recording, beginning_of, computed_until, measured_timeline
from tpengine.plan import Timeline
from tpengine.planner import StepFigures, simulate
from tpengine.planner.draw import Picture, draw_svg
from tpengine.planner.machine import machine_on
from tpengine.planner.modelled.memory import memory_of
from tpengine.planner.profiles.costs import costs_for
from tpengine.planner.profiles.file import StageMemory
from tpengine.planner.profiles.record_costs import profile_of, ranks_of, step_seconds


def write_recording(recording: Recording) -> None:
    """Write the files, then say what they show; if something cannot be written or drawn, a line says so."""
    plan, steps = recording.plan, recording.steps
    measured_costs = profile_of(plan, steps, _bucket_bytes(recording), recording.layout.residency)
    profile = replace(
        measured_costs,
        memory=_memory(recording),
        steps=step_seconds(plan, steps),
        ranks=ranks_of(steps, recording.places, recording.metered),
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
        "trace.json": lambda: _chrome_trace(recording),
        "timeline.svg": lambda: _pictures(recording, drawn, last, predicted),
    }.items():
        _write(recording, name, write)
    if recording.say is None:
        return
    ahead = (max(ends) - min(ends)) * 1e-9
    for line in _lines(recording, drawn, last, ahead, measured, predicted):
        recording.say(line)


def _memory(recording: Recording) -> tuple[StageMemory, ...]:
    """Return what each stage holds: by the plan, and of its ranks the most."""
    device = recording.device
    planned_memory = memory_of(recording.config, recording.layout, recording.plan, machine_on(device))
    stages = []
    for stage, planned in enumerate(planned_memory):
        held = [of_rank for (pp, _, _), of_rank in zip(recording.places, recording.held, strict=True) if pp == stage]
        arenas, measured = (max(values) for values in zip(*held, strict=True))
        measured_as = "allocated by torch" if device == "cuda" else "resident set of the process"
        stages.append(StageMemory(planned.kinds(), planned.peak, planned.action, arenas, measured, measured_as))
    return tuple(stages)


def _bucket_bytes(recording: Recording) -> dict[int, int]:
    item = gradient_bytes(recording.config.train.dtype)
    return {index: bucket.layout.numel * item for index, bucket in recording.layout.buckets.items()}


def _chrome_trace(recording: Recording) -> bytes:
    plan, steps = recording.plan, recording.steps
    origin = beginning_of(steps[0].pipelines)
    timelines = [[measured_timeline(plan, records, origin) for records in step.pipelines] for step in steps]
    ranks = []
    for rank, (pp, dp, tp) in enumerate(recording.places):
        # A pipeline's number is that of its first rank, counted over dp and tp.
        pipeline = dp * recording.layout.tp + tp
        traced = [
            TracedStep(step.step + 1, step.pipelines[pipeline][pp], of_step[pipeline].ranks[pp])
            for step, of_step in zip(steps, timelines, strict=True)
        ]
        ranks.append(TracedRank(rank, f"rank {rank}: pp {pp}, dp {dp}, tp {tp}", traced))
    return chrome_trace(ranks, origin)


def _pictures(recording: Recording, drawn: MeasuredStep, pipeline: int, predicted: Timeline) -> bytes:
    plan = recording.plan
    # From when the ranks began to wait for their samples.
    records = drawn.pipelines[pipeline]
    measured = measured_timeline(plan, records, beginning_of([records]))
    what = f"{plan.schedule}, {plan.num_ranks} ranks, {plan.num_microbatches} micro-batches, step {drawn.step + 1}"
    where = f", {_name_of(recording, pipeline)}" if len(drawn.pipelines) > 1 else ""
    pictures = [
        Picture(f"measured: {what}{where}", measured, "s", plan),
        Picture("predicted from the measured costs", predicted, "s", plan),
    ]
    return draw_svg(pictures).encode()


def _name_of(recording: Recording, pipeline: int) -> str:
    dp, tp = divmod(pipeline, recording.layout.tp)
    return f"dp {dp}, tp {tp}"


def _write(recording: Recording, name: str, content: Callable[[], bytes]) -> None:
    try:
        written = content()
        if recording.say is not None:
            keep_copy_aside(recording.run_dir / name)
        write_beside(recording.run_dir / name, written)
    except (ValueError, OSError) as error:
        print(f"tpengine: what was profiled is not all written: {error}", file=sys.stderr, flush=True)


def _lines(
    recording: Recording, drawn: MeasuredStep, pipeline: int, ahead: float, measured: Timeline, predicted: Timeline
) -> Iterator[str]:
    """Yield lines for the user; `ahead`: how many seconds before this pipeline the first one ended computing."""
    figures = StepFigures.of(recording.plan, measured)
    num_steps, num_pipelines = len(recording.steps), len(drawn.pipelines)
    where = f" at {_name_of(recording, pipeline)}" if num_pipelines > 1 else ""
    of_several = f", the median of {num_steps}" if num_steps > 1 else ""
    yield (
        f"recorded step {drawn.step + 1}{of_several}{where}: bubble {figures.bubble:.1%}, "
        f"exposed communication {figures.exposed:.1%} of the step; {figures.sentence()}"
    )
    if num_pipelines > 1:
        share = ahead / measured.makespan
        yield f"of {num_pipelines} pipelines it computed longest; the first was done {share:.1%} of the step before"
    if recording.device == "cpu" and (crowd := crowding(num_local_ranks(os.environ), num_cores())):
        yield crowd
    error = predicted.makespan / measured.makespan - 1.0
    yield (
        f"its plan took {measured.makespan:.4g} s, predicted {predicted.makespan:.4g} s ({error:+.1%}), of "
        f"{drawn.seconds:.4g} s in all; see trace.json, timeline.svg and profile.json in {recording.run_dir}"
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
