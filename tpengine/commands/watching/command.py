"""`tpengine watch RUN [RUN...]`: draw what runs report, live until none goes on, or once."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from rich.live import Live

from tpengine.commands.watching.history import read_history
from tpengine.commands.watching.picture import draw_histories
from tpengine.commands.watching.terminal import table_of
from tpengine.files import write_beside
from tpengine.observe.safe_console import SafeConsole

_SECONDS = 1.0
# A run that is restarted is gone for a while; one that has been gone so many looks in a row has died or was stopped.
_LOOKS_GONE = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine watch` understands."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--once", action="store_true", help="draw one picture and leave")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write one picture of all numbers, and leave")


def watch(args: argparse.Namespace) -> None:
    """Draw the runs.

    Raises:
        ValueError: a directory is not a run.
    """
    console = SafeConsole()
    histories = [read_history(run) for run in args.runs]
    if args.svg is not None:
        write_beside(args.svg, draw_histories(histories).encode())
        console.print(f"wrote {args.svg}", soft_wrap=True)
        return
    if args.once or not console.is_terminal:
        console.print(table_of(histories, console.width))
        return
    with Live(table_of(histories, console.width), console=console, auto_refresh=False) as live:
        gone = Counter[int]()
        while not all(history.has_ended or gone[at] >= _LOOKS_GONE for at, history in enumerate(histories)):
            time.sleep(_SECONDS)
            histories = [read_history(run) for run in args.runs]
            for at, history in enumerate(histories):
                gone[at] = gone[at] + 1 if history.is_running is False else 0
            live.update(table_of(histories, console.width), refresh=True)
