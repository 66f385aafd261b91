"""`tpengine schedule`: a schedule as a grid of characters, its figures, and a picture of its plan. No torch.

The costs come from one of three sources. By default the model is nominal: one layer per chunk, with boundary tensors
and buckets whose sizes give the times asked for. With --profile they are the measured costs of a run. With --model
the plan is that of a configuration, and its costs are modelled (schedule_model.py). A picture shows a plan
that was lowered, verified and simulated as in training. Without a picture and with free links, the clock alone gives
the same times much faster.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tpengine.commands.parsing import count
from tpengine.commands.plan import AskedPhase, phase_asked, refuse_other_sizes
from tpengine.commands.plan_arguments import fixed_settings, load_asked, refuse_several
from tpengine.commands.schedule_model import (
    DEFAULT_STAGES,
    Modelled,
    add_options_of_a_model,
    config_asked_for,
    counted,
    exchange_in_title,
    memory_in_words,
    modelled,
    provenance,
    title,
    validated,
)
from tpengine.config import Config
from tpengine.config.rules import zero_in_words
from tpengine.plan import (
    SCHEDULES,
    Bucket,
    Chunk,
    Kind,
    Plan,
    Schedule,
    TensorSpec,
    Timeline,
    clock,
    lower,
    make_schedule,
    verify,
)
from tpengine.plan.actions import COMPUTE
from tpengine.planner import ChunkBytes, Costs, StepFigures, simulate
from tpengine.planner.advice.question import AXES
from tpengine.planner.costs import Channels
from tpengine.planner.draw import (
    Picture,
    bytes_text,
    check_num_boxes,
    check_picture_file,
    grid,
    picture_bytes,
    write_beside,
)
from tpengine.planner.draw.file import check_file
from tpengine.planner.draw.picture import live_text
from tpengine.planner.profiles.costs import costs_for, plan_for
from tpengine.planner.profiles.file import CostProfile, read_profile

# Printing this many takes 5 to 150 s on one core, and gives up to 60 MB of text.
_MAX_STAGES = 1_000
_MAX_CELLS = 1_000_000
# Columns per action of the grid: unit times need 3, unequal times more, and a very short one thousands.
_COLUMNS = 30

_TIMES: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
_TAKES = {"F": "a forward takes", "B": "a backward", "I": "its input half", "W": "its weight half"}
# A grid on a terminal is broken into at most this many parts, below each other.
_MOST_PARTS = 4

# A boundary element has two bytes; without --bytes the tensors have no other weight.
_BYTES: Mapping[str, float] = {"saved": 0.0, "deferred": 0.0, "working": 0.0, "resident": 0.0, "boundary": 2.0}

# Defaults for options that neither the command line nor a configuration gives; on the command line they are None.
_DEFAULTS: Mapping[str, str | int] = {"schedule": "1f1b", "pp": DEFAULT_STAGES, "micro_batches": 8}

# Options that cannot be combined with a profile or a model, besides --times.
_NOMINAL = ("link", "latency", "channels", "reduce", "bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine schedule` understands."""
    parser.add_argument(
        "--micro-batches",
        type=count,
        metavar="M",
        help="micro-batches of a step and replica (default 8, or the model's)",
    )
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the plan to FILE: .svg, .html or .png")
    parser.add_argument("--plan-text", type=Path, metavar="FILE", help="write the verified plan to FILE")
    costs = parser.add_argument_group("costs of the actions", "in any unit of time, for all chunks of a rank together")
    costs.add_argument(
        "--times", type=_times, default=_TIMES, metavar="F=1,B=2,I=1,W=1", help="per micro-batch (this is the default)"
    )
    costs.add_argument(
        "--link", type=_time, default=0.0, metavar="T", help="how long a transfer occupies its link (default 0)"
    )
    costs.add_argument(
        "--latency", type=_time, default=0.0, metavar="T", help="time until the first byte has arrived (default 0)"
    )
    costs.add_argument(
        "--channels",
        choices=tuple(Channels),
        metavar="pair|direction|one",
        help="which transfers of a rank wait for each other: pair (the default) as over gloo, direction as over NCCL",
    )
    costs.add_argument("--reduce", type=_time, default=0.0, metavar="T", help="reduction of a chunk's bucket (0)")
    costs.add_argument(
        "--bytes",
        type=_bytes,
        metavar="saved=2e9,...",
        help="draw memory in bytes: saved by a micro-batch, deferred from I to W, working, resident, of a boundary",
    )
    costs.add_argument(
        "--profile",
        type=Path,
        metavar="RUN",
        help="instead of all these: a run with --train.profile-steps, or its profile.json, in seconds",
    )
    add_options_of_a_model(parser)


def print_schedule(args: argparse.Namespace) -> None:
    """Print a schedule as a grid, then what it costs in time and memory; draw and write what was asked for."""
    _check_one_source(args)
    args = _of_one_layout(args)
    asked = config_asked_for(args)
    phase = phase_asked(asked, args) if asked else None
    config = phase.config if phase else None
    if phase:
        refuse_other_sizes(phase, args)
    args, num_chunks = _completed(args, config)
    _check_size(args.pp, args.micro_batches, num_chunks)
    _check_files(args)
    profile = read_profile(args.profile) if args.profile else None
    if config and phase:
        config = validated(config)
        phase = phase._replace(config=config)
    schedule = make_schedule(args.schedule, args.pp, args.micro_batches, num_chunks)
    in_seconds = bool(profile or config)
    communicates = in_seconds or args.link > 0.0 or args.latency > 0.0 or args.reduce > 0.0
    if not (args.draw or args.plan_text or communicates or args.bytes):
        timeline = clock(schedule.compute, _durations(schedule, args.times))
        _print_timeline(schedule, timeline, _makespan(timeline, args.times))
        return
    if args.draw:
        # Checked first, since plans that are too large to draw take minutes to lower.
        check_num_boxes(sum(map(len, schedule.compute)))
    if profile:
        _check_layers(args.schedule, schedule, profile)
    plan, costs, said = _plan_and_costs(schedule, args, profile, phase)
    timeline = simulate(plan, costs)
    # Files are written before anything is printed: errors come in one line, and `| head` cannot stop the drawing.
    sizes = counted(args.pp, "rank"), counted(args.micro_batches, "micro-batch")
    nominal = ", ".join((schedule.name, *sizes))
    load = load_asked(args, config) if config else 1.0
    head = title(config, schedule.name, args.machine) + exchange_in_title(config, plan, load) if config else nominal
    picture = Picture(head, timeline, "s" if in_seconds else "forwards", plan)
    drawn = picture_bytes(args.draw, [picture]) if args.draw else b""
    files = {args.draw: drawn, args.plan_text: plan.text().encode() if args.plan_text else b""}
    written = [path for path in files if path]
    for path in written:
        write_beside(path, files[path])
    makespan = _makespan_in_words(timeline, args.times, profile, config)
    _print_timeline(schedule, timeline, makespan, " s" if in_seconds else "")
    if communicates:
        figures = StepFigures.of(plan, timeline)
        print(f"exposed communication {figures.exposed:.3f}; {figures.sentence()}")
    if args.bytes or config:
        print(f"peak bytes by rank: {', '.join(bytes_text(rank.peak_bytes) for rank in timeline.ranks)}")
    if config and phase:
        for line in (
            *filter(None, [phase.words, zero_in_words(config.parallel)]),
            *said,
            *memory_in_words(config, plan, args.machine, phase.balanced_for, load),
        ):
            print(line)
        print(provenance(config, args.machine))
    for path in written:
        print(f"wrote {path}")


def _print_timeline(schedule: Schedule, timeline: Timeline, makespan: str, unit_of_time: str = "") -> None:
    shortest = min(s.duration for rank in timeline.ranks for s in rank.compute if s.action.kind in COMPUTE)
    num_cells = (len(timeline.ranks) + schedule.num_microbatches) * len(schedule.ranks) / len(timeline.ranks)
    unit = max(shortest, timeline.makespan / (_COLUMNS * num_cells))
    _print_grid(timeline, unit, unit_of_time)
    print(f"makespan {makespan}")
    print(f"bubble {timeline.bubble:.3f}")
    peaks = " ".join(live_text(peak) for peak in timeline.peak_live_activations)
    print(f"peak live activations by rank: {peaks}")


def _print_grid(timeline: Timeline, unit: float, unit_of_time: str) -> None:
    """Print a grid; on a terminal in parts that fit it, or, if there are too many, the width that it needs."""
    has = shutil.get_terminal_size().columns
    rows = grid(timeline, unit, has if sys.stdout.isatty() else None)
    if rows.count("\n\n") >= _MOST_PARTS:
        needed = max(map(len, grid(timeline, unit).splitlines()))
        print(f"the grid needs {needed} columns, the terminal has {has}: add --draw plan.svg, or | less -S")
        return
    print(rows)
    if not math.isclose(unit, 1.0, rel_tol=1e-6):
        print(f"a column is {unit:.4g}{unit_of_time}")


def _makespan(timeline: Timeline, times: Mapping[str, float]) -> str:
    used = {span.action.kind for rank in timeline.ranks for span in rank.compute}
    takes = ", ".join(f"{words} {times[kind]:g}" for kind, words in _TAKES.items() if kind in used)
    return f"{_decimal(timeline.makespan)} ({takes})"


def _makespan_in_words(
    timeline: Timeline, times: Mapping[str, float], profile: CostProfile | None, config: Config | None
) -> str:
    if config:
        return f"{timeline.makespan:.4g} s, the whole step"
    return _predicted(timeline, profile) if profile else _makespan(timeline, times)


def _predicted(timeline: Timeline, profile: CostProfile) -> str:
    step, was = timeline.makespan + profile.outside_seconds, profile.plan_seconds + profile.outside_seconds
    return (
        f"{timeline.makespan:.4g} s, of a step {step:.4g} s; profiled: {profile.schedule}, "
        f"{counted(profile.num_microbatches, 'micro-batch')}, {was:.4g} s per step"
    )


def _check_one_source(args: argparse.Namespace) -> None:
    """Refuse options that give costs when a profile or a model gives them."""
    source = next((name for name in ("model", "profile") if getattr(args, name) is not None), None)
    if source is None:
        return
    given = {"times": args.times is not _TIMES, **{name: getattr(args, name) for name in _NOMINAL}}
    if source != "profile":
        given["profile"] = args.profile is not None
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"--{source} says what actions cost: got --{name} too: leave --{name} out")


def _of_one_layout(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with one value for each setting that may be fixed; a run's directory as its profile.

    Raises:
        ValueError: several values.
    """
    fixed = fixed_settings(args)
    refuse_several(fixed, "tpengine schedule")
    profile = args.profile / "profile.json" if args.profile and args.profile.is_dir() else args.profile
    return argparse.Namespace(**(vars(args) | {axis: fixed.get(axis) for axis in AXES} | {"profile": profile}))


def _completed(args: argparse.Namespace, config: Config | None) -> tuple[argparse.Namespace, int]:
    """Return the options with missing ones filled in, from the configuration if there is one, and v."""
    values = vars(args)
    filled = {name: default if values[name] is None else values[name] for name, default in _DEFAULTS.items()}
    if config:
        parallel = config.parallel
        filled = dict(schedule=parallel.schedule, pp=parallel.pp, micro_batches=config.train.num_micro_batches)
    num_chunks = _num_chunks(
        str(filled["schedule"]), args.chunks_per_rank, config.parallel.chunks_per_rank if config else 2
    )
    return argparse.Namespace(**(values | filled)), num_chunks


def _num_chunks(name: str, asked: int | None, default: int) -> int:
    """Return v; only a schedule that leaves it open takes it from the user."""
    form = SCHEDULES.get(name)
    fixed = 1 if form is None else form.num_chunks
    if asked is not None and fixed not in (None, asked):
        raise ValueError(f"--chunks is for a schedule that leaves it open: {name} has its own: leave --chunks out")
    return fixed or asked or default


def _check_size(pp: int, micro_batches: int, num_chunks: int) -> None:
    # The grid's width grows with stages plus micro-batches, so a limit on the product alone is not enough.
    if pp > _MAX_STAGES:
        raise ValueError(f"--pp must be at most {_MAX_STAGES} to be drawn: got {pp}: use --pp {_MAX_STAGES}")
    num_cells = pp * micro_batches * num_chunks
    if num_cells > _MAX_CELLS:
        # Also when there are too many chunks: fewer micro-batches always help.
        by_chunks, times_chunks = (" times chunks", f" times {num_chunks}") if num_chunks > 1 else ("", "")
        most = max(_MAX_CELLS // (pp * num_chunks), 1)
        raise ValueError(
            f"--pp times --micro-batches{by_chunks} must be at most {_MAX_CELLS} to be drawn: got {pp} times "
            f"{micro_batches}{times_chunks}, {num_cells}: use --micro-batches {most}"
        )


def _check_files(args: argparse.Namespace) -> None:
    """Refuse, before any work, a file that cannot be written or that would replace a file that was read."""
    if args.draw:
        check_picture_file(args.draw)
    if args.plan_text:
        if args.plan_text == Path("-"):
            raise ValueError("--plan-text needs the name of a file: got -: use --plan-text plan.txt")
        if args.draw and args.draw.resolve() == args.plan_text.resolve():
            raise ValueError(f"--draw and --plan-text need two files: got {args.draw} twice: use --plan-text plan.txt")
        check_file(args.plan_text)
    schedule = None if args.schedule in SCHEDULES else args.schedule
    sources = {"schedule": schedule, "profile": args.profile, "model": args.model}
    for what, source in sources.items():
        for option, written in (("draw", args.draw), ("plan-text", args.plan_text)):
            if source and written and written.exists() and Path(source).exists() and written.samefile(source):
                raise ValueError(f"--{option} must not replace the {what} read: got {source}: choose another file")


def _check_layers(name: str, schedule: Schedule, profile: CostProfile) -> None:
    num_chunks, num_layers = len(schedule.ranks), profile.num_layers
    if num_chunks > num_layers:
        # Fewer ranks do not help with a file, or with more chunks per rank than the model has layers.
        most = num_layers * schedule.num_ranks // num_chunks if name in SCHEDULES else 0
        remedy = f"use --pp {most}" if most else f"use a schedule of at most {counted(num_layers, 'chunk')}"
        raise ValueError(
            f"every chunk of a schedule needs a layer: got {counted(num_chunks, 'chunk')} on "
            f"{counted(schedule.num_ranks, 'rank')}, and a profile of {counted(num_layers, 'layer')}: {remedy}"
        )


def _durations(schedule: Schedule, times: Mapping[str, float]) -> dict[tuple[Kind, int], float]:
    """Return durations by (kind, chunk); `times` are those of all chunks of a rank together."""
    ranks = schedule.ranks
    shares = [1.0 / ranks.count(rank) for rank in ranks]
    return {(Kind(kind), chunk): time * share for kind, time in times.items() for chunk, share in enumerate(shares)}


def _plan_and_costs(
    schedule: Schedule, args: argparse.Namespace, profile: CostProfile | None, phase: AskedPhase | None
) -> Modelled:
    """Return a verified plan and its costs: modelled, measured, or nominal."""
    if phase:
        packs = args.data_path is not None
        load = load_asked(args, phase.config)
        return modelled(phase.config, args.machine, packs=packs, balanced_for=phase.balanced_for, load=load)
    plan = plan_for(profile, schedule) if profile else _nominal_plan(schedule, args)
    verify(plan)
    return Modelled(plan, costs_for(profile, plan) if profile else _costs(schedule, args), [])


def _nominal_plan(schedule: Schedule, args: argparse.Namespace) -> Plan:
    last = len(schedule.ranks) - 1
    boundary = _boundary(args)
    chunks = [
        Chunk(rank, (chunk, chunk + 1), boundary if chunk else None, boundary if chunk < last else None)
        for chunk, rank in enumerate(schedule.ranks)
    ]
    buckets = [Bucket(chunk, (chunk,)) for chunk in range(last + 1) if args.reduce > 0.0]
    return lower(schedule, chunks, buckets, [], schedule.num_microbatches, last + 1, training=True)


def _costs(schedule: Schedule, args: argparse.Namespace) -> Costs:
    ranks = schedule.ranks
    held = args.bytes or {}
    num_bytes = 2 * _boundary(args).shape[0]
    return Costs(
        compute=_durations(schedule, args.times),
        latency=args.latency,
        bytes_per_time=num_bytes / args.link if args.link else math.inf,
        channels=Channels(args.channels or Channels.PAIR),
        reductions=dict.fromkeys(range(len(ranks)), args.reduce),
        activations={
            chunk: ChunkBytes(
                held["saved"] / ranks.count(rank),
                held["deferred"] / ranks.count(rank),
                dict.fromkeys(COMPUTE, held["working"] / ranks.count(rank)),
            )
            for chunk, rank in enumerate(ranks)
            if held
        },
        resident=(held["resident"],) * schedule.num_ranks if held else (),
    )


def _boundary(args: argparse.Namespace) -> TensorSpec:
    num_bytes = (args.bytes or _BYTES)["boundary"]
    return TensorSpec((max(1, math.ceil(num_bytes / 2)),), "bfloat16")


def _decimal(value: float) -> str:
    """Return a number with one to three decimals, as few as needed."""
    text = f"{value:.3f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text


def _times(text: str) -> dict[str, float]:
    times = _numbers(text, _TIMES)
    for name, time in times.items():
        if time == 0.0:
            raise argparse.ArgumentTypeError(f"must be above 0: got {name}={time:g}: use {name}={_TIMES[name]:g}")
    return times


def _bytes(text: str) -> dict[str, float]:
    return _numbers(text, _BYTES)


def _numbers(text: str, defaults: Mapping[str, float]) -> dict[str, float]:
    """Parse name=number,...; names that are missing have their default."""
    numbers = dict(defaults)
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name not in defaults:
            example = ",".join(f"{known}={default or 1.0:g}" for known, default in defaults.items())
            raise argparse.ArgumentTypeError(f"must be name=number,...: got {word!r}: use some of {example}")
        numbers[name] = _number(value, f"{name}={defaults[name] or 1.0:g}")
    return numbers


def _time(text: str) -> float:
    return _number(text, "0.1")


def _number(text: str, remedy: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (math.isfinite(number) and number >= 0.0):
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more: got {text!r}: use {remedy}")
    return number
