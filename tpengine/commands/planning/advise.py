"""`tpengine advise`: the fastest layouts of a model on a machine, why others lose, how to run the first. No torch.

Nothing is measured and no process group is made: layouts are worked out as plans and simulated (tpengine/advice).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpengine.advice.candidates import shapes
from tpengine.advice.changes import changes, what_fits
from tpengine.advice.question import Question
from tpengine.advice.recorded import machine_as_recorded
from tpengine.advice.search import Found, Row, search
from tpengine.advice.words import answer_json, answer_lines, change_text, differences, sheet_lines, too_large_text
from tpengine.architectures.describe import ConfigJson
from tpengine.architectures.model_path import model_at, run_of
from tpengine.checkpoint.run.resume import saved_config
from tpengine.commands.parsing import count
from tpengine.commands.planning.fixed import add_fixed_arguments, fixed_settings, listed
from tpengine.commands.planning.recorded_run import recorded_by
from tpengine.config import Config
from tpengine.config.presets import PRESETS, preset_config
from tpengine.config.rules import MOST_MICRO_BATCHES
from tpengine.plan import make_schedule
from tpengine.simulate.draw import MAX_BOXES, Picture, picture_bytes, write_beside
from tpengine.simulate.machine import MACHINES, machine_named

_NUM_PICTURES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine advise` understands."""
    add_question_arguments(parser)
    parser.add_argument("--top", type=count, default=5, metavar="N", help="rows of the answer (default 5)")
    parser.add_argument("--explain", type=count, metavar="N", help="print the whole sheet of row N, too")
    parser.add_argument(
        "--seconds",
        type=count,
        default=10,
        metavar="S",
        help="how long to look for rows (default 10); three times that where none fits; what would change the answer, "
        "or fit, takes a while more",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answer to FILE")
    parser.add_argument("--draw", type=Path, metavar="DIR", help="draw the first three rows to DIR/advice.svg")


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says model, machine, batch and fixed settings."""
    parser.add_argument(
        "--model",
        metavar="WHICH",
        help=f"{', '.join(PRESETS)}, a directory of Hugging Face's form, its config.json alone, or a run",
    )
    parser.add_argument("--resume", metavar="RUN", help="instead: go on with a run; its batch and numbers stay")
    parser.add_argument(
        "--machine",
        default="cpu",
        metavar="WHICH",
        help=f"{', '.join(MACHINES)}, as h200:8x4 (ranks per node, nodes), or a machine's file.toml (default cpu)",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="RUN",
        help="a run of the model with --train.profile-steps: what it recorded takes the place of the machine's rates",
    )
    parser.add_argument("--ranks", type=count, help="number of ranks (default all of the machine)")
    parser.add_argument("--global-batch", type=count, metavar="N", help="sequences per step (default the preset's)")
    parser.add_argument("--seq-len", type=count, metavar="N", help="tokens of a sequence (default the preset's)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="of the weights (default config.json's)"
    )
    parser.add_argument("--reduction", choices=("fast", "exact"), help="exact: layouts that keep one process's bits")
    parser.add_argument("--memory-limit", type=count, metavar="BYTES", help="of a rank (default the machine's)")
    add_fixed_arguments(parser)


def advise(args: argparse.Namespace) -> None:
    """Print the fastest layouts that fit; write and draw what was asked for.

    Raises:
        ValueError: no layout is legal, or none fits: the nearest, and what closes the gap; one line.
    """
    if args.explain and args.explain > args.top:
        raise ValueError(
            f"--explain must name a row of the answer: got {args.explain} of {args.top}: use 1, or --top {args.explain}"
        )
    question, name = question_asked(args)
    for schedule in question.choices("schedule", ()):
        # Refused by name; a schedule of one micro-batch exists wherever any does.
        make_schedule(schedule, question.choices("pp", [1])[0], 1)
    if next(shapes(question), None) is None:
        raise ValueError(_nothing_divides(question))
    if args.draw and args.draw.exists() and not args.draw.is_dir():
        raise ValueError(f"--draw must be a directory: {args.draw} is a file: name another")
    found = search(question, args.top, args.seconds)
    if not found.rows:
        raise ValueError(_nothing_fits(question, found, max(1.0, args.seconds / 5)))
    if args.explain and args.explain > len(found.rows):
        raise ValueError(f"--explain must name a row of the answer: got {args.explain} of {len(found.rows)}: use 1")
    changed = list(changes(question, found.rows[0].layout, max(1.0, args.seconds / 5), found.bounds))
    run = run_command(args, question) + phases_of_model(args, question, question.base.train.steps)
    print("\n".join(answer_lines(question, name, found, changed, run)))
    if question.base.phases:
        print(
            f"{question.base.phases} has phases: this is advice for the settings of config.toml, which every phase may "
            "change, the first too; tpengine plan with the first row's layout works out each"
        )
    if args.explain:
        _explain(args.explain, found, question)
    # The answer stands, even if a file cannot be written.
    if args.json:
        write_beside(
            args.json, (json.dumps(answer_json(question, name, found, changed, run), indent=2) + "\n").encode()
        )
        print(f"wrote {args.json}")
    if args.draw:
        args.draw.mkdir(parents=True, exist_ok=True)
        path = args.draw / "advice.svg"
        pictures = _pictures(found.rows, question)
        write_beside(path, picture_bytes(path, pictures))
        print(f"wrote {path}: the first {len(pictures)} of the rows")


def question_asked(args: argparse.Namespace) -> tuple[Question, str]:
    """Return what the arguments ask, and the model's name.

    Raises:
        ValueError: no model or two, a model that is not there, a machine without size.
    """
    base, name = _base(args)
    machine = machine_named(args.machine)
    num_ranks = args.ranks or machine.ranks_per_node * machine.num_nodes
    if not num_ranks:
        raise ValueError(
            f"advice needs a number of ranks: --machine {args.machine} does not say it: use --ranks 8, or "
            f"--machine {args.machine}:8x1"
        )
    train = base.train
    said = train.micro_batch_size * train.num_micro_batches * (base.parallel.dp or 1)
    batch = args.global_batch or said
    if args.resume and batch != said:
        raise ValueError(
            f"a run that goes on keeps its batch, and with it the order of its data: --global-batch {batch}, the "
            f"run's {said}: leave --global-batch out"
        )
    changes = {"seq_len": args.seq_len, "dtype": args.dtype, "reduction": args.reduction}
    train = replace(train, **{key: value for key, value in changes.items() if value is not None})
    parallel = replace(base.parallel, memory_limit=args.memory_limit or 0)
    base = replace(base, train=train, parallel=parallel)
    if args.profile:
        machine = machine_as_recorded(machine, recorded_by(args.profile, base))
    return Question(base, machine, num_ranks, batch, fixed_settings(args)), name


def _base(args: argparse.Namespace) -> tuple[Config, str]:
    """Return the configuration that a question begins with, and the model's name."""
    if bool(args.model) == bool(args.resume):
        raise ValueError(
            f"advice is for one model: got --model {args.model} and --resume {args.resume}: use one of the two, "
            "as --model llama_1b"
        )
    if args.resume:
        run = run_of(args.resume)
        if run is None:
            raise ValueError(f"--resume needs the directory of a run: {args.resume} has no config.toml: check the path")
        config = saved_config(str(run[0]))
        _keeps_numbers(args, config)
        return config, run[0].name
    if args.model.replace("-", "_") in PRESETS:
        return preset_config(args.model), args.model
    path = Path(args.model)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if not path.is_dir():
        raise ValueError(
            f"--model must be one of {', '.join(PRESETS)}, or a directory with a config.json: got {args.model!r}: "
            "check the path"
        )
    if (run := run_of(str(path))) is not None:
        return saved_config(str(run[0])), path.name
    base = Config()
    base = replace(base, model=model_at(replace(base.model, path=str(path))))
    dtype = ConfigJson.read(path).dtype
    if dtype is not None:
        named: dict[str, Any] = {"dtype": dtype}
        base = replace(base, train=replace(base.train, **named))
    return base, path.resolve().name


def _keeps_numbers(args: argparse.Namespace, config: Config) -> None:
    for name in ("seq_len", "dtype", "reduction"):
        asked, said = getattr(args, name), getattr(config.train, name)
        if asked not in (None, said):
            raise ValueError(
                f"a run that goes on keeps its numbers: train.{name} {said}, asked {asked}: leave "
                f"--{name.replace('_', '-')} out"
            )


def run_command(args: argparse.Namespace, question: Question) -> str:
    """Return the command that starts such a run, before the layout's options."""
    per_node = min(question.machine.ranks_per_node, question.num_ranks)
    nodes = -(-question.num_ranks // per_node)
    start = f"torchrun --nproc-per-node {per_node}" + (f" --nnodes {nodes}" if nodes > 1 else " --standalone")
    if args.resume:
        return f"{start} -m tpengine.train --resume --run-dir {args.resume}"
    known = args.model.replace("-", "_") in PRESETS
    path = Path(args.model)
    where = path.parent if path.name == "config.json" else path
    model = f"--preset {args.model}" if known else f"--model.path {where}"
    train = question.base.train
    exact = " --train.reduction exact" if train.reduction == "exact" else ""
    return f"{start} -m tpengine.train {model} --train.seq-len {train.seq_len} --train.dtype {train.dtype}{exact}"


def phases_of_model(args: argparse.Namespace, question: Question, steps: int) -> str:
    """Return the options for the phases of the run that --model names; one that goes on has its own."""
    phases = question.base.phases
    return f" --phases {phases} --train.steps {steps}" if phases and not args.resume else ""


def _pictures(rows: Sequence[Row], question: Question) -> list[Picture]:
    """Return the first three rows on one axis; fewer, at least one, where together they have too many boxes."""
    limit = question.memory_limit if question.memory_limit < float("inf") else 0.0
    pictures: list[Picture] = []
    longest = max(row.sheet.seconds for row in rows[:_NUM_PICTURES])
    for number, row in enumerate(rows[:_NUM_PICTURES], start=1):
        title = f"{number}: {row.layout.words()}"
        picture = Picture(title, row.sheet.timeline, "s", row.sheet.plan, longest, limit)
        if pictures and sum(other.num_boxes for other in (*pictures, picture)) > MAX_BOXES:
            break
        pictures.append(picture)
    return pictures


def _explain(number: int, found: Found, question: Question) -> None:
    row = found.rows[number - 1]
    print(f"\nrow {number}: {row.layout.words()}")
    print("\n".join(sheet_lines(row.sheet, question)))
    if number > 1:
        print(f"against row 1: {differences(row.sheet.parts, found.rows[0].sheet.parts)}")


def _nothing_divides(question: Question) -> str:
    """Return why there is no layout at all."""
    model, fixed = question.base.model, question.fixed
    dp = fixed.get("dp")
    if isinstance(dp, int) and question.global_batch % dp:
        near = max(dp, round(question.global_batch / dp) * dp)
        return (
            f"the global batch must be divisible by dp: {question.global_batch} sequences, dp {dp}: use "
            f"--global-batch {near}"
        )
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in fixed.items()}
    given = " ".join(f"{name} {listed(of)}" for name, of in values.items()) or "no setting fixed"
    return (
        f"no layout divides: {question.num_ranks} ranks, {question.global_batch} sequences, at most "
        f"{MOST_MICRO_BATCHES:,} micro-batches, {model.num_heads} heads, {model.num_kv_heads} KV heads, "
        f"{model.num_layers} layers, {given}: fix less, or use another number of ranks"
    )


def _nothing_fits(question: Question, found: Found, limit_seconds: float) -> str:
    limit = question.memory_limit / 1e9
    if found.too_large is None:
        if found.gap is not None:
            more = 10 * max(1, math.ceil(found.seconds))
            return (
                f"no layout was found in {found.seconds:.0f} s, {found.num_simulated} simulated: use --seconds {more}"
            )
        if found.refused:
            return f"no layout can run: {found.refused[0]}"
        return (
            f"no layout fits: a rank may hold {limit:.1f} GB, and all {found.num_layouts:,} layouts hold more: use "
            "more ranks, a shorter sequence, or GPUs with more memory"
        )
    seen = "no layout fits" if found.gap is None else f"no layout fits of {found.num_simulated} simulated in time"
    fits = [change_text(change) for change in what_fits(question, limit_seconds)]
    needed = found.too_large.num_bytes if question.base.parallel.memory_limit else 0
    if needed:
        fits.append(f"--memory-limit {needed:.0f}")
    return (
        f"{seen}: a rank may hold {limit:.1f} GB; nearest: {too_large_text(question, found.too_large)}: "
        f"{'it fits with ' + ', or '.join(fits) if fits else 'use a shorter sequence, or GPUs with more memory'}"
    )
