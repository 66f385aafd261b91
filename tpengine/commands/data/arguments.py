"""What `tpengine data` understands. No numpy: it takes longer to import than the other subcommands to run."""

from __future__ import annotations

import argparse
from pathlib import Path

from tpengine.commands.stopping import stoppable

DESCRIPTION = "Write a token file from text files, each one document, and .jsonl files, each line one document."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    parser.add_argument(
        "--from", dest="sources", type=Path, nargs="+", required=True, metavar="PATH", help="directories and files"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="token file to write, a new one")
    parser.add_argument(
        "--pattern", default="**/*", metavar="GLOB", help="which files of a directory (default '**/*', all)"
    )
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="of a line of JSONL, has the text (default text)"
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="DIR",
        help="directory with a tokenizer.json, of a model or a run; or bytes (the default), as tokens",
    )
    for name in ("begin", "end"):
        parser.add_argument(
            f"--{name}",
            nargs="?",
            const="",
            metavar="TOKEN",
            help=f"{name} each document with this token or id; without one, with the tokenizer's own",
        )


def run_data(args: argparse.Namespace) -> None:
    """Turn text files into a token file."""
    from tpengine.commands.data.write import Options, write_data

    with stoppable():
        asked = Options(
            args.sources, args.pattern, args.field, args.tokenizer, begin=args.begin, end=args.end, out=args.out
        )
        write_data(asked)
