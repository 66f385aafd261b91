"""The `tpengine` command: training, and what can be asked and prepared without a GPU.

Torch-free, but for `train`, which is tpengine/train.py, and for `import` and `export`, which load it late. Each other
subcommand is a parser and a function of its arguments; mistakes end in one line, exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tpengine import train
from tpengine.commands import advise, diagnose, plan
from tpengine.commands.schedule import add_arguments, print_schedule
from tpengine.distributed.local_ranks import RanksFailed
from tpengine.last_words import RANK_FAILED, USER_ERROR
from tpengine.plan import SCHEDULES


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args: argv: arguments without the program's name; default those of the process.
    Returns: the exit code: 0; 1 where `certify` found a difference; 2 after a mistake of the user, said in one line on
        standard error; 70 where a rank failed; 130 after Ctrl-C, 141 where who read the output has left, 143 after
        SIGTERM.
    Raises: SystemExit: `--help` was given.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["train"]:  # which has a parser, and ends, of its own
        train.main(arguments[1:])
        return 0
    try:
        code = _run(arguments)
    except BrokenPipeError:
        # `| head`: who reads has enough. What is still to be flushed goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"tpengine: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return USER_ERROR
    except RanksFailed as error:
        print(f"tpengine: a rank failed, all have ended\n{error}", file=sys.stderr)
        return RANK_FAILED
    except KeyboardInterrupt as stop:
        print("tpengine: interrupted; no process and no unfinished file is left", file=sys.stderr)
        return 128 + (stop.number if isinstance(stop, _Stopped) else signal.SIGINT)
    return code


def _run(arguments: Sequence[str]) -> int:
    try:
        parser = _parser()
        args, settings = parser.parse_known_args(arguments)
        if args.run is run_import:
            args.settings = settings
        elif settings:
            raise ValueError(f"unrecognized arguments: {' '.join(settings)}: see {parser.prog} {arguments[0]} --help")
        code: int = args.run(args) or 0
    except SystemExit:  # help, the version
        sys.stdout.flush()
        raise
    # Here and not as the interpreter ends, where nobody could catch what is raised.
    sys.stdout.flush()
    return code


def run_data(args: argparse.Namespace) -> None:
    """Turn text files into a token file."""
    # numpy takes longer to import than the other subcommands to run.
    from tpengine.commands.data import Options, write_data

    with _stoppable():
        asked = Options(
            args.sources, args.pattern, args.field, args.tokenizer, begin=args.begin, end=args.end, out=args.out
        )
        write_data(asked)


class _Stopped(KeyboardInterrupt):
    """A signal asks the command to end; raised so that what it started ends first."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the command as Ctrl-C does."""

    def stop(number: int, _: object) -> NoReturn:
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_import(args: argparse.Namespace) -> None:
    """Write a run's directory that begins with the weights of a directory, or of another run."""
    from tpengine.commands.arguments import parse_imported

    config = parse_imported(args.source, str(args.out), args.settings)
    # torch takes longer to import than the other subcommands to run.
    from tpengine.commands.import_weights import import_weights

    with _stoppable():
        names = import_weights(config, args.out)
    print(f"{args.out}: {len(names)} tensors, step 0; train with --config {args.out / 'config.toml'}")


def run_export(args: argparse.Namespace) -> None:
    """Write a checkpoint as a directory that transformers loads."""
    # torch takes longer to import than the other subcommands to run.
    from tpengine.commands.export import export

    with _stoppable():
        names = export(args.run_dir, args.step, args.out, args.dtype)
    print(f"{args.out}: {len(names)} tensors; load it with AutoModelForCausalLM.from_pretrained({str(args.out)!r})")


def run_certify(args: argparse.Namespace) -> int:
    """Compare training in two layouts bit by bit, or fast mode with exact."""
    # numpy takes longer to import than the other subcommands to run.
    from tpengine.commands.certify.command import Layout, Options, certify, parse_layout

    options = Options(
        layout=Layout(args.tp, args.pp, args.dp, args.zero),
        against=None if args.against is None else parse_layout(args.against),
        preset=args.preset,
        model_path=args.model_path,
        dtype=args.dtype,
        schedule=args.schedule,
        tp_comm=args.tp_comm,
        seed=args.seed,
        steps=args.steps,
        fast=args.fast,
    )
    with _stoppable():
        return certify(options)


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: see {self.prog} --help")


class _Version(argparse.Action):
    """Print the version and leave; looked up only here, since that takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        try:
            version = importlib.metadata.version("tpengine")
        except importlib.metadata.PackageNotFoundError:
            version = "of a checkout that is not installed"
        print(f"tpengine {version}")
        parser.exit()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        near = 1 if text.removeprefix("-").isdecimal() else 4
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1: got {text!r}: use {near}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tpengine", description="Train transformers, and look at what a training would do.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    commands.add_parser("train", help="train: as python -m tpengine.train; see tpengine train --help")

    schedule = commands.add_parser("schedule", help="print or draw a pipeline schedule, its bubble and its memory")
    add_arguments(schedule, _count)
    schedule.set_defaults(run=print_schedule)

    advice = commands.add_parser("advise", help="rank the layouts of a model on a machine, and say why the others lose")
    advise.add_arguments(advice, _count)
    advice.set_defaults(run=advise.advise)

    why = commands.add_parser("diagnose", help="say why the steps of a run take as long as they do, and what helps")
    diagnose.add_arguments(why)
    why.set_defaults(run=diagnose.print_diagnosis)

    one = commands.add_parser("plan", help="work one layout out, or predict a table of published runs")
    plan.add_arguments(one, _count)
    one.set_defaults(run=plan.print_plan)

    data = commands.add_parser(
        "data",
        help="write a token file from text files",
        description="Write a token file from text files, each one document, and .jsonl files, each line one document.",
    )
    data.add_argument(
        "--from", dest="sources", type=Path, nargs="+", required=True, metavar="PATH", help="directories and files"
    )
    data.add_argument("--out", type=Path, required=True, metavar="FILE", help="token file to write, a new one")
    data.add_argument(
        "--pattern", default="**/*", metavar="GLOB", help="which files of a directory (default '**/*', all)"
    )
    data.add_argument("--field", default="text", metavar="NAME", help="of a line of JSONL, has the text (default text)")
    data.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="DIR",
        help="directory with a tokenizer.json, of a model or a run; or bytes (the default), as tokens",
    )
    for name in ("begin", "end"):
        data.add_argument(
            f"--{name}",
            nargs="?",
            const="",
            metavar="TOKEN",
            help=f"{name} each document with this token or id; without one, with the tokenizer's own",
        )
    data.set_defaults(run=run_data)

    imported = commands.add_parser(
        "import",
        help="write a run's directory that begins with the weights of a directory, or of another run",
        description="Write a run's directory: config.toml, a checkpoint of step 0 that any layout begins from, and "
        "what goes with the weights. All other flags, after DIR, are settings of the run, as --train.steps 200.",
    )
    imported.add_argument("source", metavar="DIR", help="a directory that transformers loads, or RUN or RUN@STEP")
    imported.add_argument("--out", type=Path, required=True, metavar="RUN", help="directory to write, new or empty")
    imported.set_defaults(run=run_import)

    export = commands.add_parser("export", help="write a checkpoint of a run as a directory that transformers loads")
    export.add_argument("run_dir", type=Path, metavar="RUN", help="directory of the run")
    export.add_argument("--step", type=int, metavar="N", help="which checkpoint (default the newest)")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write, new or empty")
    export.add_argument("--dtype", help="float32, bfloat16, float16 or float64 (default the source's, or the run's)")
    export.set_defaults(run=run_export)

    certify = commands.add_parser(
        "certify",
        help="is training in two layouts the same to the last bit? (or fast mode close to exact)",
        description="Train a small model with dropout, clipping and ignored labels in two layouts, on the CPU, in "
        "processes started here (about 0.4 GB each; a minute for 5 steps on 2 cores), and compare every bit. "
        "Exit code 0: identical; 1: not, and the first difference is named; 2: the layouts cannot be.",
    )
    for axis in ("tp", "pp", "dp"):
        certify.add_argument(f"--{axis}", type=_count, default=1, help=f"size of the axis {axis} (default 1)")
    certify.add_argument(
        "--zero", type=int, choices=range(4), default=0, help="what replicas shard, as in training (default 0)"
    )
    certify.add_argument(
        "--against", metavar="LAYOUT", help="the other one, as tp=4,pp=1,dp=1 or tp=4 (default one process)"
    )
    certify.add_argument("--preset", default="certify", help="tiny, bench, llama_1b or certify (the default)")
    certify.add_argument(
        "--model.path", dest="model_path", metavar="DIR", help="the preset with the sizes of a model's directory"
    )
    certify.add_argument("--dtype", default="float32", help="float32, bfloat16 or float64 (default float32)")
    certify.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)} (default 1f1b)")
    certify.add_argument("--tp-comm", default="fused", help="fused or plain, as in training (default fused)")
    certify.add_argument("--seed", type=int, default=0, help="of weights, data order and dropout (default 0)")
    certify.add_argument("--steps", type=_count, default=5, help="optimizer steps (default 5)")
    certify.add_argument(
        "--fast", action="store_true", help="measure fast mode's distance to exact mode instead, against a bound"
    )
    certify.set_defaults(run=run_certify)
    return parser


if __name__ == "__main__":
    sys.exit(main())
