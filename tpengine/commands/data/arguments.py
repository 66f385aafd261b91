"""What `tpengine data` understands. No numpy: it takes longer to import than the other subcommands to run."""

from __future__ import annotations

import argparse
from pathlib import Path

from tpengine.commands.parsing import count
from tpengine.commands.stopping import stoppable
from tpengine.config.settings import DEFAULT_SHARE_HELD_OUT

DESCRIPTION = (
    "Write token files from text files, each one document, .jsonl files (.gz, .zst too), each line one document, and "
    ".parquet files, each row one document; or check token files, or fit their documents into samples. A command that "
    "was killed goes on where it stopped when it is given again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--from",
        dest="sources",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="directories and files; or - for JSON lines from the standard input",
    )
    what.add_argument(
        "--check",
        metavar="PATH",
        help="check token files, named as --data.path names them: hashes, ids, documents and their marks",
    )
    what.add_argument(
        "--fit",
        nargs=2,
        metavar=("S", "PATH"),
        help="put the documents of token files, named as --data.path names them, into samples of S tokens, whole where "
        "they fit, for --data.packing fit; the index is written beside the first file",
    )
    parser.add_argument(
        "--held-out-fraction",
        type=float,
        metavar="X",
        help=f"with --fit: data.held_out_fraction of the run (default {DEFAULT_SHARE_HELD_OUT}); 0 of one "
        "with data.held_out",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="token file to write, a new one; or a directory")
    parser.add_argument(
        "--pattern", default="**/*", metavar="GLOB", help="which files of a directory (default '**/*', all)"
    )
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="of a line of JSONL or a row, has the text (default text)"
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
    parser.add_argument(
        "--shard-tokens",
        type=count,
        metavar="N",
        help="write a directory of token files, each of so many tokens and the rest of a document",
    )
    parser.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="processes that encode (default: as many as cores; 1: this one); the bytes are the same for any number",
    )


def run_data(args: argparse.Namespace) -> None:
    """Turn text files into token files, or check token files."""
    _check_together(args)
    if args.check is not None:
        from tpengine.commands.data.check import check_data

        with stoppable():
            check_data(args.check, args.tokenizer)
        return
    if args.fit is not None:
        from tpengine.commands.data.fit import fit_data

        with stoppable():
            fit_data(args.fit[1], args.fit[0], args.held_out_fraction)
        return
    from tpengine.commands.data.write import Options, write_data

    if args.out is None:
        raise ValueError("--from needs --out: the token file to write, such as --out text.tokens")
    with stoppable():
        asked = Options(
            args.sources,
            args.pattern,
            args.field,
            args.tokenizer,
            begin=args.begin,
            end=args.end,
            out=args.out,
            shard_tokens=args.shard_tokens,
            workers=args.workers,
        )
        write_data(asked)


def _check_together(args: argparse.Namespace) -> None:
    """Raise ValueError if an option is given that the command would not use."""
    if args.held_out_fraction is not None and args.fit is None:
        raise ValueError("--held-out-fraction goes with --fit: use tpengine data --fit S PATH, or leave it out")
    if args.sources is not None:
        return
    for name in ("out", "begin", "end", "shard_tokens", "workers"):
        if getattr(args, name) is not None:
            used = "--fit" if args.check is None else "--check"
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} goes with --from, not with {used}: leave it out")
