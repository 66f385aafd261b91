"""What the parsers of all subcommands share: mistakes raise, counts are at least 1."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Sequence
from typing import Any, NoReturn

from tpengine.config.lengths import tokens_of
from tpengine.dtypes import DTYPES, dtype_named
from tpengine.spelling import use

# No count that anybody means has more.
_MOST_DIGITS = 18
# As much of what was typed is told.
_MOST_SHOWN = 40


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
