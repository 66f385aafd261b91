"""`tpengine schedule` for a configuration, before anything has run: its plan with modelled costs. No torch.

The configuration is built and validated as for training (preset, then TOML file, then options). The plan is the one
that training would execute: layers balanced by flops, gradient buckets, ties. modelled/costs.py gives durations and
bytes. One of the dp replicas and one of the tp ranks is shown: exchanges of tp ranks are included in the compute
actions, reductions over replicas are the buckets' times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from tpengine.architectures.model_path import model_at
from tpengine.commands.parsing import count
from tpengine.commands.planning.phase_asked import add_phase_arguments
from tpengine.config import Config, validate
from tpengine.config.presets import PRESETS, preset_config
from tpengine.config.toml import load_toml
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.plan import Gathered, Plan, Recompute, Residency
from tpengine.simulate import Costs
from tpengine.simulate.machine import MACHINES, machine_named
from tpengine.simulate.modelled.costs import model_costs
from tpengine.simulate.modelled.memory import decided_residency, memory_of

_T = TypeVar("_T")

_OF_PHASES = ("phases", "steps", "phase")
_OF_A_MODEL = ("tp", "dp", "zero", "residency", "recompute", "gathered", "machine", "data_path", *_OF_PHASES)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that make a configuration."""
    model = parser.add_argument_group(
        "the plan of a training run, in seconds and bytes",
        "Instead of the costs above. Durations and bytes are modelled, from flops, bytes and a machine's rates, not "
        "measured. --schedule, --pp, --micro-batches, --chunks and the options below win over preset and file.",
    )
    model.add_argument("--preset", metavar="NAME", help=f"a named run: {', '.join(PRESETS)} (default tiny)")
    model.add_argument("--config", metavar="FILE.toml", help="then a file, such as the config.toml of a run")
    model.add_argument(
        "--model.path", dest="model_path", metavar="DIR", help="then the sizes of a model's directory, or of a run"
    )
    model.add_argument(
        "--data.path",
        "--data-path",
        dest="data_path",
        metavar="PATH",
        help="the text whose documents are packed, as --data.packing documents does, or fit if --config says so: "
        "attention costs what their lengths say",
    )
    add_phase_arguments(model)
    model.add_argument("--tp", type=count, help="tensor-parallel ranks (default 1)")
    model.add_argument("--dp", type=count, help="data-parallel replicas (default 1)")
    model.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        help="what replicas shard: 1 moments, 2 gradients, 3 weights (default 0)",
    )
    for name, choices, words in (
        ("residency", Residency, "with --zero 3, how long gathered weights stay: in a step, or for one use"),
        ("recompute", Recompute, "what backward recomputes"),
        ("gathered", Gathered, "tokens gathered for a matmul are kept for its weight gradient, or gathered again"),
    ):
        values = tuple(choice.value for choice in choices)
        text = f"{words}: {', '.join(values)} (default {values[0]})"
        model.add_argument(f"--{name}", type=_one_of(values), metavar="WHICH", help=text)
    model.add_argument(
        "--machine",
        metavar="WHICH",
        help=f"whose rates: {', '.join(MACHINES)}, as h200:8x4 (ranks per node, nodes), or a machine's file.toml "
        "(default cpu: a core per rank)",
    )


def config_asked_for(args: argparse.Namespace) -> Config | None:
    """Return the configuration that the options describe, not validated yet; None if they name no model.

    Raises: ValueError: an unknown preset, an unreadable file, an option that needs a model without one.
    """
    if args.preset is None and args.config is None and args.model_path is None:
        for name in _OF_A_MODEL:
            if getattr(args, name) is not None:
                name = name.replace("_", ".")
                if args.profile is not None:
                    raise ValueError(f"--{name} is for a model: got --profile, which has its own: leave --{name} out")
                raise ValueError(
                    f"--{name} is for a model: got neither --preset nor --config nor --model.path: add --preset tiny"
                )
        return None
    base = preset_config(args.preset or "tiny")
    if args.config is not None:
        base = load_toml(args.config, base)
    if args.model_path is not None:
        base = replace(base, model=model_at(replace(base.model, path=args.model_path)))
    parallel = replace(
        base.parallel,
        tp=_first(args.tp, base.parallel.tp, 1),
        pp=_first(args.pp, base.parallel.pp, 4),
        dp=_first(args.dp, base.parallel.dp, 1),
        schedule=_first(args.schedule, base.parallel.schedule),
        chunks_per_rank=_first(args.chunks, base.parallel.chunks_per_rank),
        zero=_first(args.zero, base.parallel.zero),
        residency=_first(args.residency, base.parallel.residency),
        recompute=_first(args.recompute, base.parallel.recompute),
        gathered=_first(args.gathered, base.parallel.gathered),
    )
    if args.data_path is not None:
        base = replace(base, data=replace(base.data, path=args.data_path))
        if base.data.packing == "cut":
            base = replace(base, data=replace(base.data, packing="documents"))
    num_micro_batches = _first(args.micro_batches, base.train.num_micro_batches)
    return replace(base, parallel=parallel, train=replace(base.train, num_micro_batches=num_micro_batches))


def validated(config: Config) -> Config:
    """Check a configuration whose sizes are all given, for as many processes as they need."""
    sizes = config.parallel.tp or 0, config.parallel.pp or 0, config.parallel.dp or 0
    # The call reports a size below 1 by its name, not as a number of processes.
    return validate(config, max(1, sizes[0] * sizes[1] * sizes[2]))


class Modelled(NamedTuple):
    """A configuration's step.

    Attributes:
        plan, costs: verified; in seconds and bytes.
        said: lines about the documents that are packed; none where sequences are whole.
    """

    plan: Plan
    costs: Costs
    said: list[str]


def modelled(config: Config, machine: str | None, packs: bool = False, balanced_for: int = 0) -> Modelled:
    """Return the plan and the costs of a validated configuration's step.

    Args:
        packs: whether its text is looked at, for the lengths of documents.
        balanced_for: as layout_of.
    """
    rates = machine_named(machine or "cpu")
    layout = layout_of(config, decided_residency(config, config.parallel.memory_limit, rates), balanced_for)
    plan = training_plan(config, layout)
    if not packs:
        return Modelled(plan, model_costs(config, layout, plan, rates), [])
    # numpy takes longer to import than --help to print.
    from tpengine.commands.planning.packing import packed_documents, packing_in_words

    packed = packed_documents(config)
    costs = model_costs(config, layout, plan, rates, packed=packed)
    return Modelled(plan, costs, packing_in_words(packed, config, layout, plan, rates))


def memory_in_words(config: Config, plan: Plan, machine: str | None, balanced_for: int = 0) -> list[str]:
    """Return a line per pipeline rank: the bytes that it holds, by kind. Args: balanced_for: as layout_of."""
    layout = layout_of(config, balanced_for=balanced_for)
    return [
        f"bytes of rank {rank}: {', '.join(f'{kind} {num:,}' for kind, num in memory.kinds().items())}"
        for rank, memory in enumerate(memory_of(config, layout, plan, machine_named(machine or "cpu")))
    ]


def title(config: Config, schedule: str, machine: str | None) -> str:
    """Return the title of a configuration's picture."""
    parallel = config.parallel
    zero = f"zero {parallel.zero}, " if parallel.zero_in_effect else ""
    return (
        f"{schedule}, tp {parallel.tp}, pp {parallel.pp}, dp {parallel.dp}, {zero}"
        f"{counted(config.train.num_micro_batches, 'micro-batch')}, modelled for {machine or 'cpu'}"
    )


def counted(count: int, what: str) -> str:
    """Return a count in words: 1 rank, 2 micro-batches."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def provenance(config: Config, machine: str | None) -> str:
    """Return in words what the figures are based on."""
    parallel, dtype = config.parallel, config.train.dtype
    rates = machine_named(machine or "cpu")
    return (
        f"seconds and bytes are modelled, not measured: tp {parallel.tp}, pp {parallel.pp}, dp {parallel.dp}, a "
        f"{dtype} model at the rates of {rates.name} ({rates.source})"
    )


def _first(*values: _T | None) -> _T:
    """Return the first value that is given."""
    return next(value for value in values if value is not None)


def _one_of(names: Iterable[str]) -> Callable[[str], str]:
    known = tuple(names)

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}: got {text!r}: use {known[0]}")
        return text

    return parse
