"""The evidence: what a run has left in its directory, read and compared.

config.toml says what was to run, profile.json what the recorded steps cost, metrics.jsonl how long every step took. The
profile must be of the plan that config.toml describes: a directory may have been used twice. Of a run with phases the
plan and the steps are those of the phase that was recorded.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpengine.architectures.model_path import architecture_of_run
from tpengine.config import Config, phases_of, validate_run
from tpengine.config.lengths import first_of_rows
from tpengine.config.toml import load_toml
from tpengine.layout.phase_layouts import phase_layouts
from tpengine.layout.step_plan import Layout, training_plan
from tpengine.plan import SCHEDULES, Plan
from tpengine.simulate.modelled.memory import memory_of
from tpengine.simulate.profiles.file import CostProfile, read_profile

_MAX_METRICS_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Evidence:
    """What a run has left.

    Attributes:
        config: validated, its layout resolved; of the phase that was recorded, and without the others.
        layout, plan: of that configuration; the plan is verified.
        profile: of that plan, with what each rank did.
        step_seconds: of every step of that phase that metrics.jsonl has, but for its first, which loads kernels, and
            those that are recorded.
    """

    config: Config
    layout: Layout
    plan: Plan
    profile: CostProfile
    step_seconds: tuple[float, ...]

    @property
    def step(self) -> float:
        """Return the seconds of a recorded step, the median."""
        return statistics.median(step.seconds for step in self.profile.steps)

    @property
    def spread(self) -> float:
        """Return by what share of itself the run's step varies: 0 if that is not known.

        The largest of three: half of all other steps lie within this range around their median; the median of the
        recorded steps is this far from the slowest and the fastest of them, on average; it is this far from the median
        of the others.
        """
        recorded = [step.seconds for step in self.profile.steps]
        found = (max(recorded) - min(recorded)) / (2 * self.step)
        if len(self.step_seconds) > 2:
            median = statistics.median(self.step_seconds)
            # Not quartiles: of three steps one that is long would move them.
            near = statistics.median(abs(seconds - median) for seconds in self.step_seconds)
            found = max(found, 2 * near / median, abs(self.step - median) / self.step)
        return found


def read_evidence(run_dir: Path, own: str = "") -> Evidence:
    """Read a run's directory.

    Args:
        run_dir: the directory.
        own: the user's own file of the run's architecture; empty takes the run's copy.

    Raises: ValueError: a file is missing or wrong, or the profile is that of another model or layout; one line.
    """
    if not run_dir.is_dir():
        raise ValueError(f"a diagnosis needs the directory of a run: {run_dir} is none: give the directory of the run")
    profile = read_profile(run_dir / "profile.json")
    if not profile.ranks or not profile.steps:
        raise ValueError(
            f"a diagnosis needs what each rank did: {run_dir / 'profile.json'}: it has no ranks, as before there was a "
            "diagnosis: record it again with --train.profile-steps"
        )
    seconds = _read_metrics(run_dir / "metrics.jsonl")
    config = _kept(run_dir, load_toml(run_dir / "config.toml", Config()), own)
    parallel = config.parallel
    config = validate_run(config, math.prod(size or 1 for size in (parallel.tp, parallel.pp, parallel.dp)))
    phases, recorded = phases_of(config), {step.step for step in profile.steps}
    phase = phases.at(min(recorded))
    layout = phase_layouts(phases, profile.residency if config.parallel.zero_in_effect else None)[phase.number]
    config = replace(phase.config, phases="")
    plan = training_plan(config, layout)
    _check_same(run_dir, config, layout, plan, profile)
    usual = set(range(phase.first_step + 1, phase.end_step)) - recorded
    return Evidence(config, layout, plan, profile, tuple(s for n, s in seconds.items() if n in usual))


def _kept(run_dir: Path, config: Config, own: str) -> Config:
    """Return the configuration with the files that the run has kept, wherever its directory is now."""

    def kept(name: str) -> str:
        file = run_dir / Path(name).name
        return str(file) if name and file.is_file() else name

    parallel, model = config.parallel, config.model
    schedule = parallel.schedule if parallel.schedule in SCHEDULES else kept(parallel.schedule)
    architecture = architecture_of_run(run_dir, model.architecture, own)
    return replace(
        config,
        # The sizes of a model that the run began from stand in config.toml; its directory may be gone.
        model=replace(model, path="", architecture=architecture),
        parallel=replace(parallel, schedule=schedule),
        phases=kept(config.phases),
    )


def _check_same(run_dir: Path, config: Config, layout: Layout, plan: Plan, profile: CostProfile) -> None:
    """Compare what the profile says of its plan with the plan of config.toml."""
    compared: dict[str, tuple[Any, Any]] = {
        "schedule": (profile.schedule, plan.schedule),
        "micro-batches": (profile.num_microbatches, plan.num_microbatches),
        "ranks": (len(profile.ranks), layout.pp * layout.dp * layout.tp),
        "layers by chunk": (
            [list(chunk.layers) for chunk in profile.chunks],
            [list(chunk.layers) for chunk in plan.chunks],
        ),
        "boundary tensors": (str(profile.boundary), str(plan.chunks[0].output)),
        "buckets": (sorted(profile.buckets), sorted(bucket.index for bucket in plan.buckets)),
    }
    # Profiles of earlier versions do not say what was held.
    if profile.memory:
        held = [rank.state.weights for rank in memory_of(config, layout, plan)]
        compared["bytes of weights by stage"] = ([of.kinds.get("weights") for of in profile.memory], held)
    for what, (found, wanted) in compared.items():
        if found != wanted:
            raise ValueError(
                f"profile.json must be of the model and layout that config.toml describes: {run_dir}: its {what}: "
                f"{_short(found)}, and by config.toml {_short(wanted)}: record it again with --train.profile-steps"
            )


def _read_metrics(path: Path) -> dict[int, float]:
    """Return seconds by step, from 0; of a step that the run repeated, the newest."""
    try:
        if path.stat().st_size > _MAX_METRICS_BYTES:
            raise ValueError(f"a diagnosis needs the metrics.jsonl of a run: {path}: it has more than 1 GB: cut it")
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ValueError(
            f"a diagnosis needs the metrics.jsonl of a run: {path}: {error.strerror}: give the directory of the run"
        ) from None
    # A kill may cut the last line, and a step that was left out has no time.
    rows = [row for row in map(_row, lines) if row is not None]
    first = first_of_rows(rows)
    found = {row["step"] - first: float(row["step_seconds"]) for row in rows}
    if not found:
        raise ValueError(
            f"a diagnosis needs the metrics.jsonl of a run: {path}: it has no step with step_seconds: let the run take "
            "some steps"
        )
    return found


def _row(line: str) -> dict[str, Any] | None:
    """Return a row that has a step and its time; None of anything else."""
    try:
        row: Any = json.loads(line)
        step, seconds = row["step"], row["step_seconds"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # An integer of JSON may be larger than any float; NaN is not below.
    is_number = type(step) is int and type(seconds) in (int, float) and abs(seconds) <= sys.float_info.max
    return row if is_number and seconds > 0.0 else None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
