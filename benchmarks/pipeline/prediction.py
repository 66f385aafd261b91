"""`python -m benchmarks.run pipeline --predict`: is the simulator's time of a step right, from another step's profile?

In every round, one schedule with one number of micro-batches is profiled, with all ranks at work. From that profile
alone, steps of all schedules with other numbers are simulated; they are run in the same round: training steps with
clipping and update. A round's prediction over its measurement is one sample, so that drift over rounds cancels.

    pp ranks, one core each     real stage work
    more ranks than cores       stages that wait as long as theirs would compute, with the same executor: this tests
                                whether the executor does what the simulator assumes, and nothing about the machine

What makes a prediction wrong, and what is done about it. A rank that computes alone is faster than one whose neighbour
uses the same memory bandwidth: the profiled schedule has little bubble, so durations are those of ranks that compute
together. Memory that is returned and faulted in again: the heap keeps it, and the first round is not counted. The
beginning: all ranks start together after a barrier. Clipping and update: they are profiled too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED, Spread, spread_fields
from benchmarks.pipeline.options import Options, config_of, sizes_of
from tpengine.config import Config
from tpengine.distributed.local_ranks import THREADS_PER_RANK, Ranks
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.observe.records import MeasuredStep, decode_record, measured_timeline
from tpengine.plan import Kind, Plan
from tpengine.planner import Costs, simulate
from tpengine.planner.profiles.costs import costs_for
from tpengine.planner.profiles.file import CostProfile
from tpengine.planner.profiles.record_costs import profile_of

# A pause may last a tenth of a millisecond too long.
_SHORTEST_WAIT_SECONDS = 10e-3
_WORK, _WAITS = "layers", "waits"


@dataclass(frozen=True)
class Case:
    """A schedule with a number of micro-batches.

    Attributes:
        config: validated, layout resolved.
        plan: of its step.
    """

    config: Config
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", training_plan(self.config, layout_of(self.config)))

    @property
    def name(self) -> str:
        """The name of the case within a run."""
        return f"{self.plan.schedule}/m{self.plan.num_microbatches}"


@dataclass
class Samples:
    """Seconds of a case's plan, by round."""

    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)


def predict(options: Options, schedules: Sequence[str]) -> int:
    """Profile, predict, measure, and print a table.

    Returns: 0.
    Raises: ValueError: sizes that are not possible, before any process is started.
    """
    profiled = Case(config_of(options, options.profiled_schedule, options.micro_batches))
    numbers = [num for num in options.predicted_micro_batches if num != options.micro_batches]
    if not numbers:
        raise ValueError(
            f"a prediction needs another number of micro-batches than the profile: --predicted-micro-batches "
            f"{options.predicted_micro_batches}, --micro-batches {options.micro_batches}: use 12 16"
        )
    cases = [Case(config_of(options, name, num)) for num in numbers for name in schedules]
    waiting = [Case(config_of(options, name, num, options.waiting_ranks)) for num in numbers[:1] for name in schedules]
    with Progress(*Progress.get_default_columns(), console=Console(stderr=True)) as progress:
        profile, samples = _work(profiled, cases, options.rounds, progress)
        waits = _waits(waiting, profile, options.rounds, progress)
    rows = [
        case_row(profiled, case, of_case, kind)
        for kind, found in ((_WORK, samples), (_WAITS, waits))
        for case, of_case in zip(cases if kind == _WORK else waiting, found, strict=True)
    ]
    Console(width=max(Console().width, 120)).print(table(rows))
    return stored(rows, options.out)


def _work(
    profiled: Case, cases: Sequence[Case], num_rounds: int, progress: Progress
) -> tuple[CostProfile, list[Samples]]:
    """Run rounds of the profiled case and all others; return the last round's profile, and the samples by case."""
    samples = [Samples() for _ in cases]
    configs = {case.name: (case.config, None) for case in (profiled, *cases)}
    profile: CostProfile | None = None
    with Ranks(profiled.plan.num_ranks, "benchmarks.pipeline.steps:Member", configs) as ranks:
        for is_counted in _rounds(num_rounds, progress, "real work"):
            profile = profile_of(profiled.plan, [_step(ranks, profiled)], {})
            for case, of_case in zip(cases, samples, strict=True):
                seconds = _step(ranks, case).seconds
                if is_counted:
                    of_case.measured.append(seconds)
                    of_case.predicted.append(simulate(case.plan, costs_for(profile, case.plan)).makespan)
    assert profile is not None, "there is at least one round"
    return profile, samples


def _waits(cases: Sequence[Case], profile: CostProfile, num_rounds: int, progress: Progress) -> list[Samples]:
    """Run rounds of cases whose stages wait as long as the profile says, or longer by a common factor."""
    lengths = [waits_of(profile, case.plan) for case in cases]
    samples = [Samples() for _ in cases]
    configs = {case.name: (case.config, seconds) for case, seconds in zip(cases, lengths, strict=True)}
    with Ranks(cases[0].plan.num_ranks, "benchmarks.pipeline.steps:Member", configs) as ranks:
        for is_counted in _rounds(num_rounds, progress, "waits"):
            for case, seconds, of_case in zip(cases, lengths, samples, strict=True):
                measured = _step(ranks, case).seconds
                if is_counted:
                    of_case.measured.append(measured)
                    of_case.predicted.append(simulate(case.plan, Costs(seconds)).makespan)
    return samples


def waits_of(profile: CostProfile, plan: Plan) -> dict[tuple[Kind, int], float]:
    """Return how long each action of a plan waits: as profiled, times a factor that makes the shortest long enough."""
    seconds = costs_for(profile, plan).compute
    factor = max(1.0, _SHORTEST_WAIT_SECONDS / min(seconds.values()))
    return {key: factor * length for key, length in seconds.items()}


def _step(ranks: Ranks, case: Case) -> MeasuredStep:
    """Run a step of a case; its time is from the start of the first action to the end of the last, over all ranks."""
    encoded: list[bytes] = ranks.call("run", case.name)
    pipeline = tuple(decode_record(text, actions) for text, actions in zip(encoded, case.plan.actions, strict=True))
    return MeasuredStep(0, measured_timeline(case.plan, pipeline).makespan, (pipeline,))


def _rounds(num_rounds: int, progress: Progress, title: str) -> Iterator[bool]:
    """Yield for each round whether it counts; the first does not."""
    task = progress.add_task(title, total=1 + num_rounds)
    for round_ in range(1 + num_rounds):
        yield round_ > 0
        progress.advance(task)


def case_row(profiled: Case, case: Case, samples: Samples, kind: str) -> dict[str, Any]:
    """Return one row: the prediction, the measurement, and by how much they differ.

    Args:
        kind: real work, or waits.
    """
    ratios = [p / m for p, m in zip(samples.predicted, samples.measured, strict=True)]
    fields: dict[str, Any] = {
        "check": PASSED,
        "stages": kind if kind == _WORK else "waits: tests the executor",
        "profiled_schedule": profiled.plan.schedule,
        "profiled_micro_batches": profiled.plan.num_microbatches,
        "profiled_pp": profiled.plan.num_ranks,
        **sizes_of(case.config),
        **spread_fields("predicted", "seconds", Spread.of(samples.predicted)),
        **spread_fields("measured", "seconds", Spread.of(samples.measured)),
        **spread_fields("predicted_over_measured", "ratio", Spread.of(ratios)),
        "error_percent": 100 * (Spread.of(ratios).median - 1),
        "num_samples": len(ratios),
    }
    return make_row(f"pipeline_prediction/{kind}/{case.name}", threads_per_rank=THREADS_PER_RANK, fields=fields)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table, one line per case."""
    first = rows[0]
    shown = Table(
        title=f"steps predicted from {first['profiled_schedule']}, {first['profiled_micro_batches']} micro-batches, "
        f"pp {first['profiled_pp']}; medians over rounds",
        caption="stages that wait: all times of a plan are multiplied by one factor, so that the shortest can be slept",
        box=box.SIMPLE,
    )
    for i, column in enumerate(("stages", "schedule", "pp", "m", "predicted ms", "measured ms", "error", "p20 to p80")):
        shown.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for row in rows:
        low, high = (100 * (row[f"predicted_over_measured_{which}_ratio"] - 1) for which in ("p20", "p80"))
        shown.add_row(
            row["stages"],
            row["schedule"],
            str(row["pp"]),
            str(row["batch"]["num_micro_batches"]),
            *(f"{row[f'{what}_median_seconds'] * 1e3:.1f}" for what in ("predicted", "measured")),
            f"{row['error_percent']:+.1f} %",
            f"{low:+.1f} to {high:+.1f} %",
        )
    return shown
