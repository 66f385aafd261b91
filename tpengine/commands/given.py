"""What a command line gives counts as the user's word: files and commands that it names are permitted (trust.py).

So does what stands in a file given with --config: it is written to be carried out, as a script is. Only the config.toml
that a run has written, and its earlier ones, are data, as the rest of that run's directory is.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tpengine import trust
from tpengine.config import Config
from tpengine.config.toml import load_toml

_OF_A_RUN = re.compile(r"config(\.\d+)?\.toml")


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
    """Return `base` with a file that --config gives, and permit what it names unless it is a run's own.

    Raises:
        ValueError: as load_toml.
    """
    config = load_toml(path, base)
    if not _OF_A_RUN.fullmatch(Path(path).name):
        permit_settings(config, architecture=True, after_checkpoint=True)
    return config


def permit_settings(config: Config, *, architecture: bool, after_checkpoint: bool) -> None:
    """Permit what those of a configuration's settings name that the user has given."""
    if architecture and config.model.architecture.endswith(".py"):
        trust.permit_file(config.model.architecture)
    if after_checkpoint:
        trust.permit(config.train.after_checkpoint.encode(errors="surrogatepass"))
