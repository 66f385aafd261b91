"""What the planning commands are asked: model, machine, batch, fixed settings; how such a run starts. No torch.

`tpengine schedule`, `plan` and `advise` have these arguments from here, so that they are spelled and mean the same. A
question fixes a setting of a layout by one value, several, or a range, as `--zero 1..3 --schedule 1f1b,zbv`.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpengine.architectures.describe import ConfigJson
from tpengine.architectures.model_path import model_at, run_of
from tpengine.checkpoint.resume import saved_config
from tpengine.commands.diagnose import recorded_by
from tpengine.commands.parsing import add_trust_arguments, config_given, count, dtype, factor, lies_in_a_run, tokens
from tpengine.config import Config, ParallelConfig
from tpengine.config.presets import PRESETS, preset_config
from tpengine.config.ranges import MOST_BATCH, MOST_CHUNKS, MOST_SEQUENCES, check_ranges
from tpengine.config.rules import MOST_RANKS, check_sizes
from tpengine.config.toml import load_toml
from tpengine.plan import SCHEDULES, Gathered, Recompute, Residency
from tpengine.planner.advice.question import AXES, Question
from tpengine.planner.advice.recorded import load_recorded, machine_as_recorded
from tpengine.planner.machine import MACHINES, Machine, machine_named
from tpengine.spelling import use

DEFAULT_MACHINE = "cpu"
# What says model, machine and batch, besides the settings that may be fixed.
OF_A_MODEL = ("machine", "global_batch", "seq_len", "dtype", "reduction", "memory_limit", "moe_load")
# A range names at most so many values.
_MOST = 100_000
# A line tells at most so many, and as much of what was typed.
_TOLD = 8
_MOST_SHOWN = 40


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says model, machine, batch and fixed settings."""
    parser.add_argument(
        "--model",
        metavar="WHICH",
        help=f"{', '.join(PRESETS)}, a directory of Hugging Face's form, its config.json alone, a run, or a FILE.toml "
        "as --config of training",
    )
    parser.add_argument(
        "--machine",
        metavar="WHICH",
        help=f"{', '.join(MACHINES)}, as h200:8x4 (ranks per node, nodes), or a machine's file.toml (default cpu)",
    )
    parser.add_argument("--global-batch", type=count, metavar="N", help="sequences per step (default the preset's)")
    parser.add_argument("--seq-len", type=count, metavar="N", help="tokens of a sequence (default the preset's)")
    parser.add_argument("--dtype", type=dtype, help="of the weights (default config.json's, or the preset's)")
    parser.add_argument("--reduction", choices=("fast", "exact"), help="exact: layouts that keep one process's bits")
    parser.add_argument("--memory-limit", type=count, metavar="BYTES", help="of a rank (default the machine's)")
    parser.add_argument(
        "--moe-load",
        type=factor,
        metavar="X",
        help="rows of the rank whose experts get most, over the mean, if ranks share experts (default what the run of "
        "--profile or --resume has recorded, else 1)",
    )
    add_trust_arguments(parser)
    add_fixed_arguments(parser)


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says model, machine, ranks, batch and fixed settings; or a run that goes on."""
    add_model_arguments(parser)
    parser.add_argument("--resume", metavar="RUN", help="instead: go on with a run; its batch and numbers stay")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="RUN",
        help="a run of the model with --train.profile-steps: what it recorded takes the place of the machine's rates",
    )
    parser.add_argument(
        "--ranks", type=count, help="number of ranks (default all of the machine, where it says how many: h200:8x4)"
    )
    parser.add_argument(
        "--tokens", type=tokens, default=0, metavar="N", help="say how long so many tokens take: 2e9, 2B, 500M"
    )


def question_asked(args: argparse.Namespace) -> tuple[Question, str]:
    """Return what the arguments ask, and the model's name.

    Raises:
        ValueError: no model or two, a model that is not there, a machine without size.
    """
    base, name, machine = base_asked(args)
    num_ranks = _num_ranks(args, machine)
    train, said = base.train, batch_said(base)
    batch = args.global_batch or said
    if args.resume and batch != said:
        raise ValueError(
            f"a run that goes on keeps its batch, and with it the order of its data: --global-batch {batch}, the "
            f"run's {said}: leave --global-batch out"
        )
    kept = base.parallel if args.resume else ParallelConfig()
    base = replace(base, parallel=replace(base.parallel, memory_limit=args.memory_limit or kept.memory_limit))
    if args.profile:
        machine = machine_as_recorded(machine, recorded_by(args.profile, base, args.architecture))
    fixed = fixed_settings(args)
    if args.resume and _keeps_micro_batches(base):
        fixed = {"micro_batch_size": train.micro_batch_size} | fixed
        if fixed["micro_batch_size"] != train.micro_batch_size:
            raise ValueError(
                "a run that goes on in exact mode, or with dropout, keeps the size of its micro-batches: the run's "
                f"{train.micro_batch_size}, asked {fixed['micro_batch_size']}: leave --micro-batch out"
            )
    return Question(base, machine, num_ranks, batch, fixed, kept, args.tokens, load_asked(args, base)), name


def load_asked(args: argparse.Namespace, base: Config) -> float:
    """Return how many rows the rank gets whose experts get most, over the mean: as asked, as recorded, else 1.

    Raises:
        ValueError: it is asked of a model without experts.
    """
    asked: float | None = args.moe_load
    if not base.model.details.num_experts:
        if asked is not None:
            raise ValueError(
                f"--moe-load is of a model with experts: got {asked:g}, and this one has none: leave it out"
            )
        return 1.0
    if asked is not None:
        return asked
    for path in filter(None, (getattr(args, "profile", None), getattr(args, "resume", None))):
        found = load_recorded(Path(path).parent if Path(path).name == "profile.json" else Path(path))
        if found is not None:
            return found
    return 1.0


def base_asked(args: argparse.Namespace) -> tuple[Config, str, Machine]:
    """Return the configuration that the arguments begin with, with the numbers that they say; its name; the machine.

    Raises:
        ValueError: no model or two, a model that is not there, an unknown machine.
    """
    base, name = _base(args)
    machine = machine_named(args.machine or DEFAULT_MACHINE)
    said = {"seq_len": args.seq_len, "dtype": args.dtype, "reduction": args.reduction}
    train = replace(base.train, **{key: value for key, value in said.items() if value is not None})
    if args.memory_limit and machine.memory_bytes and args.memory_limit > machine.memory_bytes:
        raise ValueError(
            f"--memory-limit must be at most what a rank has: got {args.memory_limit:,} bytes, {machine.name} has "
            f"{machine.memory_bytes:,.0f}: leave it out"
        )
    base = replace(base, train=train)
    # Asked for by name here: what is worked out from them has no bound.
    if args.global_batch and args.global_batch > MOST_BATCH:
        raise ValueError(
            f"a step has at most {MOST_BATCH} sequences: got --global-batch {args.global_batch}: use --global-batch "
            f"{MOST_BATCH}"
        )
    check_ranges(base)
    check_sizes(base.parallel)
    return base, name, machine


def batch_said(base: Config) -> int:
    """Return the sequences of a step of a configuration, of all replicas."""
    train = base.train
    return train.global_batch or train.micro_batch_size * train.num_micro_batches * (base.parallel.dp or 1)


def _num_ranks(args: argparse.Namespace, machine: Machine) -> int:
    """Return how many ranks there are: as many on each node, on no more nodes than the machine has."""
    which = args.machine or DEFAULT_MACHINE
    per_node, kind = machine.ranks_per_node, which.partition(":")[0]
    num_ranks: int = args.ranks or per_node * machine.num_nodes
    if num_ranks > MOST_RANKS:
        raise ValueError(f"ranks must be at most {MOST_RANKS}: got {num_ranks}: use --ranks {MOST_RANKS}")
    if not num_ranks:
        raise ValueError(
            f"advice needs a number of ranks: --machine {which} does not say it: use --ranks 8, or "
            f"--machine {which}:8x1"
        )
    if machine.num_nodes and num_ranks > per_node * machine.num_nodes:
        nodes = -(-num_ranks // per_node)
        raise ValueError(
            f"ranks must be at most what the machine has: got {num_ranks}, {which} has {per_node} on each of "
            f"{machine.num_nodes} node{'s' if machine.num_nodes > 1 else ''}: use --machine {kind}:{per_node}x{nodes}"
            + (f", or {kind}:{num_ranks}x1" if machine.num_nodes == 1 else "")
        )
    if num_ranks > per_node and num_ranks % per_node:
        least = num_ranks // per_node * per_node
        raise ValueError(
            f"ranks must be as many on each node: got {num_ranks}, {per_node} per node: use --ranks {least} or "
            f"{least + per_node}, or --machine {kind}:{num_ranks}x1 for one node"
        )
    return num_ranks


def _base(args: argparse.Namespace) -> tuple[Config, str]:
    """Return the configuration that a question begins with, and the model's name."""
    resume = getattr(args, "resume", None)
    if bool(args.model) == bool(resume):
        raise ValueError(
            f"advice is for one model: got --model {args.model} and --resume {resume}: use one of the two, "
            "as --model llama_1b"
        )
    if resume:
        run = run_of(resume)
        if run is None:
            raise ValueError(f"--resume needs the directory of a run: {resume} has no config.toml: check the path")
        config = saved_config(str(run[0]), args.architecture)
        _keeps_numbers(args, config)
        return config, run[0].name
    if args.model.replace("-", "_") in PRESETS:
        return _of_own_architecture(preset_config(args.model), args), args.model
    path = Path(args.model)
    if path.suffix == ".toml":
        base = _of_own_architecture(config_given(str(path), Config()), args)
        # As training does: what the file says besides model.path is no number of the model.
        return replace(base, model=model_at(base.model)) if base.model.path else base, path.stem
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if not path.is_dir():
        raise ValueError(
            f"--model must be one of {', '.join(PRESETS)}, a directory with a config.json, or a FILE.toml: got "
            f"{args.model!r}: {use(args.model, PRESETS, 'one of these, or check the path')}"
        )
    if (run := run_of(str(path))) is not None:
        return saved_config(str(run[0]), args.architecture), path.name
    base = _of_own_architecture(Config(), args)
    base = replace(base, model=model_at(replace(base.model, path=str(path))))
    dtype = ConfigJson.read(path).dtype
    if dtype is not None:
        named: dict[str, Any] = {"dtype": dtype}
        base = replace(base, train=replace(base.train, **named))
    return base, path.resolve().name


def _of_own_architecture(config: Config, args: argparse.Namespace) -> Config:
    """Return the configuration with the Python file of --model.architecture, if that is given."""
    if not args.architecture:
        return config
    return replace(config, model=replace(config.model, architecture=args.architecture))


def _keeps_micro_batches(config: Config) -> bool:
    """Return whether the numbers of a run that goes on depend on the size of its micro-batches (resume.py)."""
    model = config.model
    dropout = model.residual_dropout, model.attention_dropout, model.mlp_dropout
    return config.train.reduction == "exact" or any(dropout)


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
    start = f"torchrun --nproc-per-node {per_node}" + (
        f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500" if nodes > 1 else " --standalone"
    )
    if args.resume:
        run = run_of(args.resume)
        assert run is not None, "its configuration was read"
        permitted = _permitted(args, question.base)
        return f"{start} -m tpengine.train --resume --run-dir {shlex.quote(str(run[0]))}{permitted}"
    path = Path(args.model)
    known = args.model.replace("-", "_") in PRESETS or path.suffix == ".toml"
    where = path.parent if path.name == "config.json" else path
    model = f"--model.path {shlex.quote(str(where))}"
    if known:
        model = f"--config {shlex.quote(args.model)}" if path.suffix == ".toml" else f"--preset {args.model}"
    train = question.base.train
    exact = " --train.reduction exact" if train.reduction == "exact" else ""
    of_run = _settings_of_run(question.base) if not known and run_of(str(where)) is not None else ""
    return (
        f"{start} -m tpengine.train {model} --train.seq-len {train.seq_len} --train.dtype {train.dtype}{exact}{of_run}"
        f"{_permitted(args, question.base)}"
    )


def _permitted(args: argparse.Namespace, config: Config) -> str:
    """Return the options without which the command would be refused what the model's directory names (trust.py)."""
    given = f" --model.architecture {shlex.quote(args.architecture)}" if args.architecture else ""
    is_file = bool(args.model) and Path(args.model).suffix == ".toml"
    asks = config.model.architecture.endswith(".py") and not given
    # The weights of a run are begun from without its command.
    carries_command = bool(config.train.after_checkpoint) and bool(args.resume or is_file)
    if is_file and not lies_in_a_run(args.model):
        # The user's own file: what stands in it is permitted, what the run of its model.path names is not.
        asks = asks and not load_toml(args.model, Config()).model.architecture.endswith(".py")
        carries_command = False
    return given + " --trust" * (asks or carries_command)


def _settings_of_run(config: Config) -> str:
    """Return the options for what of a run its weights do not say: dropout, and how samples are packed."""
    default, found = Config(), []
    for section, name in (
        *(("model", f"{what}_dropout") for what in ("residual", "attention", "mlp")),
        *(("data", name) for name in ("packing", "ignore_token")),
    ):
        value = getattr(getattr(config, section), name)
        if value != getattr(getattr(default, section), name):
            found.append(f" --{section}.{name.replace('_', '-')} {shlex.quote(str(value))}")
    return "".join(found)


def phases_of_model(args: argparse.Namespace, question: Question, steps: int) -> str:
    """Return the options for the phases of the run that --model names; one that goes on has its own."""
    phases = question.base.phases
    if args.model and Path(args.model).suffix == ".toml":
        # The file of the command says them.
        return ""
    return f" --phases {shlex.quote(phases)} --train.steps {steps}" if phases and not args.resume else ""


def lacks_weights(args: argparse.Namespace) -> str:
    """Return a line for a model that is a config.json alone: the command begins with weights; empty for others."""
    path = Path(args.model or "")
    directory = path.parent if path.name == "config.json" else path
    is_named = not args.model or args.model.replace("-", "_") in PRESETS or path.suffix == ".toml"
    if is_named or run_of(str(directory)) is not None:
        return ""
    if any(directory.glob("*.safetensors")):
        return ""
    return f"the command needs weights: {directory} has a config.json alone: put the model's *.safetensors beside it"


def add_fixed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings that may be fixed."""
    fixed = parser.add_argument_group(
        "settings that are fixed",
        "advise searches all others, and takes several values, too: 1..3, or 1,4. plan has them as such a run would.",
    )
    for axis in ("tp", "pp", "dp"):
        fixed.add_argument(f"--{axis}", type=_numbers(1, MOST_RANKS), metavar="N", help=f"size of the axis {axis}")
    fixed.add_argument(
        "--ep",
        type=_numbers(1, MOST_RANKS),
        metavar="N",
        help="ranks of a stage that share experts; 1 cuts each over tp",
    )
    fixed.add_argument("--zero", type=_numbers(0, 3), metavar="0..3", help="what replicas shard")
    fixed.add_argument(
        "--residency", type=_words([each.value for each in Residency]), metavar="WHICH", help="of weights at zero 3"
    )
    fixed.add_argument("--schedule", type=_words(()), help=f"one of {', '.join(SCHEDULES)}, or a file")
    fixed.add_argument(
        "--chunks", dest="chunks_per_rank", type=_numbers(1, MOST_CHUNKS), metavar="V", help="chunks per rank"
    )
    recomputes = [each.value for each in Recompute]
    fixed.add_argument(
        "--recompute",
        type=_words(recomputes),
        metavar="WHAT",
        help=f"what backward recomputes: {', '.join(recomputes)}",
    )
    fixed.add_argument(
        "--gathered",
        type=_words([each.value for each in Gathered]),
        metavar="HOW",
        help="what becomes of gathered tokens: keep, again",
    )
    fixed.add_argument(
        "--tp-comm", type=_words(("fused", "plain")), metavar="HOW", help="exchanges of tp ranks: fused, plain"
    )
    fixed.add_argument(
        "--micro-batch",
        dest="micro_batch_size",
        type=_numbers(1, MOST_SEQUENCES),
        metavar="N",
        help="sequences of one",
    )
    fixed.add_argument("--bucket-bytes", type=count, metavar="BYTES", help="of gradients that are reduced at once")


def fixed_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the arguments fix, by the names in AXES: a value, or a tuple of several."""
    found = {axis: getattr(args, axis) for axis in AXES if getattr(args, axis) is not None}
    return {axis: value[0] if isinstance(value, tuple) and len(value) == 1 else value for axis, value in found.items()}


def flag_of(name: str) -> str:
    """Return the option of a setting, or of another argument, by its name."""
    return "--" + {"chunks_per_rank": "chunks", "micro_batch_size": "micro-batch"}.get(name, name).replace("_", "-")


def refuse_several(fixed: dict[str, Any], command: str) -> None:
    """Raise for a setting with several values.

    Raises:
        ValueError: in one line, which, and what takes it.
    """
    for name, value in fixed.items():
        if isinstance(value, tuple):
            given = f"{flag_of(name)} {listed(value)}"
            raise ValueError(f"{command} works one layout out: got {given}: use one of them, or tpengine advise")


def listed(values: Sequence[Any]) -> str:
    """Return values for a line: many of them as the first, and how many there are."""
    first = ",".join(map(str, values[:_TOLD]))
    return first if len(values) <= _TOLD else f"{first},... ({len(values)} values)"


def _numbers(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of 4, 1..3 and 1,2,4."""

    def parse(text: str) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for part in text.split(","):
            match = re.fullmatch(r"([0-9]{1,30})(?:\.\.([0-9]{1,30}))?", part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not least <= first <= last <= most or last - first >= _MOST:
                raise argparse.ArgumentTypeError(
                    f"must be an integer of {least} to {most}, several as 1,2, or a range as 1..{min(most, 4)}: got "
                    f"{text[:_MOST_SHOWN]!r}: use {most if least <= first <= last and first > most else least}"
                )
            found |= dict.fromkeys(range(first, last + 1))
        return tuple(found)

    return parse


def _words(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of one of the choices, or several between commas; without choices anything is one."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(",")))
        wrong = next((word for word in found if choices and word not in choices), None)
        if wrong is not None:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(choices)}: got {wrong!r}")
        return found

    return parse
