"""What all subcommands share: how options are parsed, what they permit, and which signals end a command.

Mistakes raise ValueError in one line, counts are at least 1.

What a command line gives counts as the user's word: files and commands that it names are permitted (trust.py). So does
what stands in a file given with --config: it is written to be carried out, as a script is. Only what lies in a run's
directory is data, whatever it is called: the directory may be somebody else's, and so may any file of it be.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tpengine import trust
from tpengine.config import Config
from tpengine.config.lengths import tokens_of
from tpengine.config.toml import load_toml
from tpengine.dtypes import DTYPES, dtype_named
from tpengine.spelling import use

# No count that anybody means has more.
_MOST_DIGITS = 18
_MOST_FACTOR = 1e6
# As much of what was typed is told.
_MOST_SHOWN = 40
# What a run has in its directory once it has begun or was imported (checkpoint, observe).
_OF_A_RUN = ("checkpoints", "metrics.jsonl", ".lock")


class Parser(argparse.ArgumentParser):
    """Raises ValueError instead of printing the usage and leaving; options have one spelling, not their beginnings."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raise, in one line."""
        raise ValueError(f"{message}: see {self.prog} --help")


class Removed(argparse.Action):
    """An option that is spelled otherwise now: refused, with the new spelling.

    Args: new: the option that took its place, as a user types it.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, new: str) -> None:
        super().__init__(option_strings, dest, nargs="?", help=argparse.SUPPRESS, default=argparse.SUPPRESS)
        self._new = new

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, option: Any = None) -> None:
        raise ValueError(f"{option} is spelled otherwise: got {option}: use {self._new}")


class Version(argparse.Action):
    """Print the version and leave; looked up only here, since that takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        try:
            version = importlib.metadata.version("tpengine")
        except importlib.metadata.PackageNotFoundError:
            version = "of a checkout that is not installed"
        print(f"tpengine {version}")
        parser.exit()


def dtype(text: str) -> str:
    """Parse a dtype, by any of its names.

    Raises: argparse.ArgumentTypeError: anything else.
    """
    name = dtype_named(text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(DTYPES)}: got {text!r}: {use(text, DTYPES)}")
    return name


def tokens(text: str) -> int:
    """Parse a number of tokens of at least 1: 2000000, 2e9, 2B, 500M.

    Raises: argparse.ArgumentTypeError: anything else.
    """
    try:
        number = tokens_of(text, "it")
    except ValueError:
        number = 0
    if not number:
        raise argparse.ArgumentTypeError(
            f"must be a number of tokens, at least 1: got {text[:_MOST_SHOWN]!r}: use 2000000, 2e9 or 2B"
        )
    return number


def count(text: str) -> int:
    """Parse a number of at least 1.

    Raises: argparse.ArgumentTypeError: anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        is_number = text.removeprefix("-").isdecimal()
        raise argparse.ArgumentTypeError(
            f"must be an integer of at least 1{'' if is_number else ', without a unit'}: got {text!r}: use "
            f"{1 if is_number else 'digits alone'}"
        )
    if len(text) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"must be at most {10**_MOST_DIGITS - 1}: got {len(text)} digits: use fewer")
    return int(text)


def factor(text: str) -> float:
    """Parse a number of at least 1, and below a million.

    Raises: argparse.ArgumentTypeError: anything else.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1.0 <= number < _MOST_FACTOR:
        raise argparse.ArgumentTypeError(
            f"must be a number of at least 1, and below a million: got {text[:_MOST_SHOWN]!r}: use 1.5"
        )
    return number


def add_trust_arguments(parser: argparse._ActionsContainer, *, has_architecture: bool = True) -> None:
    """Add --trust, and --model.architecture unless the command has it as a setting of a run."""
    parser.add_argument("--trust", action="store_true", help="execute the Python file that a run's directory names")
    if has_architecture:
        parser.add_argument(
            "--model.architecture",
            dest="architecture",
            default="",
            metavar="FILE.py",
            help="your own file of the run's architecture, or that of a directory whose architecture is not built in",
        )


def permit_what_is_given(args: argparse.Namespace) -> None:
    """Permit what the arguments of a command name.

    Raises:
        ValueError: --model.architecture is no Python file.
    """
    if getattr(args, "trust", False):
        trust.permit_all()
    if own := getattr(args, "architecture", ""):
        if not own.endswith(".py"):
            raise ValueError(
                f"--model.architecture must be a Python file here: got {own!r}: a run says its own, leave it out"
            )
        trust.permit_file(own)


def config_given(path: str, base: Config) -> Config:
    """Return `base` with a file that --config gives, and permit what it names unless it lies in a run's directory.

    A relative path in the file is one from where the command is called, here and where it is executed.

    Raises:
        ValueError: as load_toml.
    """
    config = load_toml(path, base)
    if not lies_in_a_run(path):
        permit_settings(config, architecture=True, after_checkpoint=True)
    return config


def lies_in_a_run(path: str) -> bool:
    """Return whether a file is one of a run's directory: by its path, or by where a link leads."""
    places = {Path(path).parent, Path(path).resolve().parent}
    return any((place / name).exists() for place in places for name in _OF_A_RUN)


def permit_settings(config: Config, *, architecture: bool, after_checkpoint: bool) -> None:
    """Permit what those of a configuration's settings name that the user has given."""
    if architecture and config.model.architecture.endswith(".py"):
        trust.permit_file(config.model.architecture)
    if after_checkpoint:
        trust.permit(config.train.after_checkpoint.encode(errors="surrogatepass"))


class Stopped(KeyboardInterrupt):
    """A signal asks the command to end; raised so that what it started ends first."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the command as Ctrl-C does."""

    def stop(number: int, _: object) -> NoReturn:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
