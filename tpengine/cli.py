"""The `tpengine` command: training, and what can be asked and prepared without a GPU.

Torch-free, but for `train`, which is tpengine/train.py, and for commands that load it late. Each other subcommand is a
parser and a function of its arguments (tpengine/commands); mistakes end in one line, exit code 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tpengine import train, trust
from tpengine.commands.parsing import Parser, Stopped, Version
from tpengine.distributed.local_ranks import RanksFailed
from tpengine.last_words import RANK_FAILED, USER_ERROR
from tpengine.terminal import terminal_safe


class _Command(NamedTuple):
    """A subcommand.

    Attributes:
        add_arguments: add what it understands to its parser.
        run: do it; returns the exit code, or None for 0.
        help: one line of the list of commands.
        description: of its own help.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    help: str
    description: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args: argv: arguments without the program's name; default those of the process.
    Returns: the exit code: 0; 1 where `certify` or `checkpoint diff` found a difference, `checkpoint verify`
        damage, or `doctor` what is to change; 2 after a mistake of the user, said in one line on
        standard error; 70 where a rank failed; 130 after Ctrl-C, 141 where who read the output has left, 143 after
        SIGTERM.
    Raises: SystemExit: `--help` was given.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    with trust.scope(), terminal_safe():
        return _main(arguments)


def _main(arguments: Sequence[str]) -> int:
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
        left = "; ".join(getattr(stop, "__notes__", ["no process and no unfinished file is left"]))
        print(f"tpengine: interrupted; {left}", file=sys.stderr)
        return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    return code


def _run(arguments: Sequence[str]) -> int:
    from tpengine.commands.parsing import permit_what_is_given

    try:
        parser = _parser()
        args, left = parser.parse_known_args(arguments)
        if left and not hasattr(args, "settings"):
            raise ValueError(f"unrecognized arguments: {' '.join(left)}: see {parser.prog} {arguments[0]} --help")
        args.settings = left
        permit_what_is_given(args)
        code: int = args.run(args) or 0
    except SystemExit:  # help, the version
        sys.stdout.flush()
        raise
    # Here and not as the interpreter ends, where nobody could catch what is raised.
    sys.stdout.flush()
    return code


def _commands() -> dict[str, _Command]:
    """Return the subcommands by name, loaded when one is run: an interrupt meanwhile is one line, too."""
    from tpengine.commands import advise, checkpoint, diagnose, doctor, doctor_arguments, options, plan, schedule, watch

    return {
        "doctor": _Command(
            doctor_arguments.add_arguments,
            doctor.run_doctor,
            "look at this machine before a run: limits, GPUs, links; or pack what to send back of a run",
            doctor_arguments.DESCRIPTION,
        ),
        "schedule": _Command(
            schedule.add_arguments,
            schedule.print_schedule,
            "print or draw a pipeline schedule, with its bubble and memory",
        ),
        "advise": _Command(
            advise.add_arguments, advise.advise, "rank the layouts of a model on a machine, and say why the others lose"
        ),
        "diagnose": _Command(
            diagnose.add_arguments,
            diagnose.print_diagnosis,
            "say why the steps of a run take as long as they do, and what helps",
        ),
        "watch": _Command(watch.add_arguments, watch.watch, "draw what runs report, while they go on"),
        "plan": _Command(plan.add_arguments, plan.print_plan, "work one layout out: its step by cause, and its memory"),
        "data": _Command(
            options.add_data_arguments, options.run_data, "write a token file from text files", options.DATA_DESCRIPTION
        ),
        "import": _Command(
            options.add_import_arguments,
            options.run_import,
            "write a run's directory that begins with the weights of a directory, or of another run",
            options.IMPORT_DESCRIPTION,
        ),
        "export": _Command(
            options.add_export_arguments,
            options.run_export,
            "write a checkpoint of a run as a directory that transformers loads",
        ),
        "generate": _Command(
            options.add_generate_arguments,
            options.run_generate,
            "continue prompts by a model's tokens",
            options.GENERATE_DESCRIPTION,
        ),
        "logprobs": _Command(
            options.add_logprobs_arguments,
            options.run_logprobs,
            "write how likely a model finds each token of token files, as a column beside them",
            options.LOGPROBS_DESCRIPTION,
        ),
        "checkpoint": _Command(
            checkpoint.add_arguments,
            checkpoint.run_checkpoint,
            "list the checkpoints of a run, verify their hashes, or compare two of them bit by bit",
        ),
        "certify": _Command(
            options.add_certify_arguments,
            options.run_certify,
            "is training in two layouts the same to the last bit? (or fast mode close to exact)",
            options.CERTIFY_DESCRIPTION,
        ),
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tpengine", description="Train transformers, and look at what a training would do.")
    parser.add_argument("--version", action=Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("train", help="train: as python -m tpengine.train; see tpengine train --help")
    for name, command in _commands().items():
        its_parser = commands.add_parser(name, help=command.help, description=command.description)
        command.add_arguments(its_parser)
        its_parser.set_defaults(run=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
