"""What `tpengine doctor` understands, on the command line and in the ranks that it starts. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tpengine.commands.parsing import Parser, dtype
from tpengine.files import try_to_write

DESCRIPTION = (
    "Look at this machine, alone or by torchrun on several hosts: limits, shared memory, GPUs and what links them, "
    "whether fused products are right and worth it, clocks, versions, the run directory. Prints a table that ends with "
    '"ready" or with what to change, each with its command, and writes a machine\'s file for `tpengine advise '
    "--machine FILE`. Takes two minutes. Exit code 0: ready; 1: something is to change (0 under torchrun); 70: a rank "
    "was lost."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine doctor` understands."""
    parser.add_argument(
        "--nproc", metavar="N", help="processes to start on this host (default: one for each GPU; 2 without a GPU)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="what to examine (default: GPUs if there are)",
    )
    parser.add_argument(
        "--dtype", type=dtype, metavar="DTYPE", help="of rates and products (default bfloat16 on GPUs, float32 else)"
    )
    parser.add_argument(
        "--run-dir", type=Path, default=Path(), metavar="DIR", help="where runs will be (default: this directory)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="written: a machine's file (default machine.toml), or an archive",
    )
    parser.add_argument("--quick", action="store_true", help="few sizes, once: rates are rough, the rest is as ever")
    parser.add_argument(
        "--pack",
        type=Path,
        metavar="RUN",
        help="examine nothing: write an archive of a run to send back, without data, weights, paths and names",
    )
    parser.add_argument("--machine", type=Path, metavar="FILE", help="with --pack: a machine's file that goes too")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a rank that was started here is asked."""
    parser = Parser(prog="tpengine doctor")
    add_arguments(parser)
    return parser.parse_args(arguments)


def out_of(args: argparse.Namespace) -> Path:
    """Return the file of the machine that is written."""
    out: Path = args.out or Path("machine.toml")
    return out


def check_out(out: Path) -> None:
    """Refuse a machine's file that cannot be written, before anything is measured.

    Raises:
        ValueError: it is a directory, has another suffix, or its directory is not there.
    """
    if out.is_dir() or out.suffix != ".toml":
        what = "a directory" if out.is_dir() else "another"
        raise ValueError(f"--out must be a file that ends in .toml: {out} is {what}: use machine.toml")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out must lie in a directory: {out.parent} is none: make it first")


def check_written(out: Path) -> None:
    """Refuse a place that takes no files, before minutes of measurement are lost there. Of the process that writes.

    Raises:
        ValueError: a file system that is read-only or full, or a directory of another user's.
    """
    try:
        try_to_write(out)
    except OSError as error:
        raise ValueError(
            f"--out must be a file that can be written: {out}: {error.strerror}: name one elsewhere, as --out "
            "/tmp/machine.toml"
        ) from error
