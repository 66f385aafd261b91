"""What a command line gives counts as the user's word: files and commands that it names are permitted (trust.py).

So does what stands in a file given with --config: it is written to be carried out, as a script is. Only what lies in a
run's directory is data, whatever it is called: the directory may be somebody else's, and so may any file of it be.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tpengine import trust
from tpengine.config import Config
from tpengine.config.toml import load_toml

# What a run has in its directory once it has begun or was imported (checkpoint/run, observe).
_OF_A_RUN = ("checkpoints", "metrics.jsonl", ".lock")


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
