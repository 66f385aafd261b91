"""`tpengine schedule` for a configuration, before anything has run: its plan with modelled costs. No torch.

The configuration is the one that `tpengine plan` works out for the same options. The plan is the one
that training would execute: layers balanced by flops, gradient buckets, ties. modelled/costs.py gives durations and
bytes. One of the dp replicas and one of the tp ranks is shown: exchanges of tp ranks are included in the compute
actions, reductions over replicas are the buckets' times.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

from tpengine.commands.parsing import Removed
from tpengine.commands.plan import add_phase_arguments, layout_asked
from tpengine.commands.plan_arguments import (
    OF_A_MODEL,
    add_model_arguments,
    base_asked,
    batch_said,
    fixed_settings,
    flag_of,
)
from tpengine.config import Config, validate
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.plan import Plan
from tpengine.planner import Costs
from tpengine.planner.advice.question import AXES, Question
from tpengine.planner.advice.sheets import exchange_lines, gigabytes
from tpengine.planner.machine import machine_named
from tpengine.planner.modelled.costs import model_costs
from tpengine.planner.modelled.exchanged import exchanged
from tpengine.planner.modelled.memory import decided_residency, memory_of

_OF_PHASES = ("phases", "steps", "phase")
# What a plan without a model has, too: how many stages and chunks.
_NOMINAL = ("pp", "schedule", "chunks_per_rank")
_NEED_A_MODEL = (*OF_A_MODEL, *(axis for axis in AXES if axis not in _NOMINAL), "data_path", *_OF_PHASES)
# Stages of a picture, where nothing says how many there are.
DEFAULT_STAGES = 4


def add_options_of_a_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that make a configuration."""
    add_model_arguments(parser)
    model = parser.add_argument_group(
        "the plan of a training run, in seconds and bytes",
        "With --model, instead of those costs. Durations and bytes are modelled, from flops, bytes and a machine's "
        "rates, not measured. The options of a model are those of plan and advise; they win over what it says.",
    )
    model.add_argument(
        "--data.path",
        dest="data_path",
        metavar="PATH",
        help="the text whose documents are packed, as --data.packing documents does, or fit if a FILE.toml says so: "
        "attention costs what their lengths say",
    )
    add_phase_arguments(model)
    for old, new in (
        ("--preset", "--model NAME"),
        ("--config", "--model FILE.toml"),
        ("--model.path", "--model DIR"),
        ("--data-path", "--data.path PATH"),
    ):
        model.add_argument(old, action=Removed, new=new)


def config_asked_for(args: argparse.Namespace) -> Config | None:
    """Return the configuration that the options describe, not validated yet; None if they name no model.

    Raises: ValueError: a model that is not there, an option that needs a model without one.
    """
    if args.model is None:
        for name in _NEED_A_MODEL:
            if getattr(args, name) is not None:
                option = "--data.path" if name == "data_path" else flag_of(name)
                if args.profile is not None:
                    raise ValueError(f"{option} is for a model: got --profile, which has its own: leave {option} out")
                raise ValueError(
                    f"{option} is for a model: got no --model: add --model {'tiny_moe' if name == 'ep' else 'tiny'}"
                )
        if args.architecture:
            raise ValueError("--model.architecture is for a model: got no --model: add --model tiny")
        return None
    base, _, machine = base_asked(args)
    kept = base.parallel
    if args.memory_limit:
        base = replace(base, parallel=replace(kept, memory_limit=args.memory_limit))
    axes = {"tp": kept.tp or 1, "pp": kept.pp or DEFAULT_STAGES, "dp": kept.dp or 1}
    if args.ep and not args.tp and not args.dp:
        # Ranks that share experts are tp ones, if nothing else is said.
        axes["tp"] = args.ep
    fixed = axes | fixed_settings(args)
    num_ranks, dp = fixed["tp"] * fixed["pp"] * fixed["dp"], fixed["dp"]
    question = Question(base, machine, num_ranks, _batch(args, base, fixed.get("micro_batch_size"), dp), fixed, kept)
    config = layout_asked(question).config(question)
    if "residency" not in fixed:
        # Decided as a run does it.
        config = replace(config, parallel=replace(config.parallel, residency=kept.residency))
    if args.data_path is None:
        return config
    packing = "documents" if config.data.packing == "cut" else config.data.packing
    return replace(config, data=replace(config.data, path=args.data_path, packing=packing))


def _batch(args: argparse.Namespace, base: Config, size: int | None, dp: int) -> int:
    """Return the sequences of a step: as asked for, as micro-batches of a replica, or the model's."""
    if args.micro_batches is None:
        batch: int = args.global_batch or batch_said(base)
        return batch
    if args.global_batch is not None:
        raise ValueError(
            f"one setting says it: got --micro-batches {args.micro_batches} and --global-batch {args.global_batch}: "
            "leave one out"
        )
    num: int = args.micro_batches
    return num * dp * (size or base.train.micro_batch_size)


def validated(config: Config) -> Config:
    """Check a configuration whose sizes are all given, for as many processes as they need."""
    sizes = config.parallel.tp or 0, config.parallel.pp or 0, config.parallel.dp or 0
    # The call reports a size below 1 by its name, not as a number of processes.
    return validate(config, max(1, sizes[0] * sizes[1] * sizes[2]))


class Modelled(NamedTuple):
    """A configuration's step.

    Attributes:
        plan, costs: verified; in seconds and bytes.
        said: lines about the documents that are packed, and about rows that travel to experts, where there are such.
    """

    plan: Plan
    costs: Costs
    said: list[str]


def modelled(
    config: Config, machine: str | None, packs: bool = False, balanced_for: int = 0, load: float = 1.0
) -> Modelled:
    """Return the plan and the costs of a validated configuration's step.

    Args:
        packs: whether its text is looked at, for the lengths of documents.
        balanced_for: as layout_of.
        load: of the rank whose experts get most, as Sizes has it.
    """
    rates = machine_named(machine or "cpu")
    residency = decided_residency(config, config.parallel.memory_limit, rates)
    layout = layout_of(config, residency, balanced_for, rates.is_asynchronous)
    plan = training_plan(config, layout)
    said = list(exchange_lines(config, plan, load))
    if not packs:
        return Modelled(plan, model_costs(config, layout, plan, rates, load=load), said)
    # numpy takes longer to import than --help to print.
    from tpengine.commands.schedule_packing import packed_documents, packing_in_words

    packed = packed_documents(config)
    costs = model_costs(config, layout, plan, rates, packed=packed, load=load)
    return Modelled(plan, costs, [*packing_in_words(packed, config, layout, plan, rates), *said])


def memory_in_words(
    config: Config, plan: Plan, machine: str | None, balanced_for: int = 0, load: float = 1.0
) -> list[str]:
    """Return a line per pipeline rank: the bytes that it holds, by kind. Args: balanced_for, load: as modelled."""
    layout, rates = layout_of(config, balanced_for=balanced_for), machine_named(machine or "cpu")
    return [
        f"bytes of rank {rank}: {', '.join(f'{kind} {num:,}' for kind, num in memory.kinds().items())}"
        for rank, memory in enumerate(memory_of(config, layout, plan, rates, load))
    ]


def title(config: Config, schedule: str, machine: str | None) -> str:
    """Return the title of a configuration's picture."""
    parallel = config.parallel
    zero = f"zero {parallel.zero}, " if parallel.zero_in_effect else ""
    shared = f"ep {parallel.ep}, " if parallel.ep > 1 else ""
    return (
        f"{schedule}, tp {parallel.tp}, pp {parallel.pp}, dp {parallel.dp}, {shared}{zero}"
        f"{counted(config.train.num_micro_batches, 'micro-batch')}, modelled for {machine or 'cpu'}"
    )


def exchange_in_title(config: Config, plan: Plan, load: float) -> str:
    """Return what a picture's title adds where ranks share experts: bytes that each sends, the slowest rank's share."""
    if config.parallel.ep == 1:
        return ""
    sent, share = exchanged(config, plan, load), min(load, config.parallel.ep)
    return (
        f"; the slowest rank sends experts' rows of {gigabytes(sent.forward)} in F, and has {share:.2f} times the mean"
    )


def counted(count: int, what: str) -> str:
    """Return a count in words: 1 rank, 2 micro-batches."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def provenance(config: Config, machine: str | None) -> str:
    """Return in words what the figures are based on."""
    parallel, dtype = config.parallel, config.train.dtype
    shared = f"ep {parallel.ep}, " if parallel.ep > 1 else ""
    rates = machine_named(machine or "cpu")
    return (
        f"seconds and bytes are modelled, not measured: tp {parallel.tp}, pp {parallel.pp}, dp {parallel.dp}, "
        f"{shared}a {dtype} model at the rates of {rates.name} ({rates.source})"
    )
