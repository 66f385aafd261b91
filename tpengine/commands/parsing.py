"""What the parsers of all subcommands share: mistakes raise, counts are at least 1."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any, NoReturn

from tpengine.config.dtypes import DTYPES, dtype_named
from tpengine.spelling import use


class Parser(argparse.ArgumentParser):
    """Raises ValueError instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """Raise, in one line."""
        raise ValueError(f"{message}: see {self.prog} --help")


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
    return int(text)
