"""`tpengine plan --table`: published runs, predicted row by row. No torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from tpengine.advice.published import predict_table
from tpengine.advice.question import AXES
from tpengine.commands.planning.fixed import flag_of

# What is asked of one layout alone.
_OF_ONE_LAYOUT = (
    *("model", "resume", "profile", "ranks", "global_batch", "seq_len", "dtype", "reduction", "memory_limit"),
    *("machine", "explain_memory", "json", "phases", "steps", "tokens", *AXES),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the prediction of a table needs."""
    table = parser.add_argument_group("published runs", "predict each row of a table of runs, of any engine")
    table.add_argument("--table", type=Path, metavar="FILE.csv", help="rows: model, machine, layout, batch")
    table.add_argument("--out", type=Path, metavar="PREDICTIONS.csv", help="where predictions go, a row for each")


def print_table(args: argparse.Namespace) -> None:
    """Predict a table's rows, write the predictions and say how many there are.

    Raises:
        ValueError: one of the two files is missing; what `predict_table` refuses.
    """
    if args.table is None or args.out is None:
        given = "--table alone" if args.out is None else "--out alone"
        raise ValueError(f"--table and --out belong together: got {given}: use --table RUNS.csv --out PREDICTIONS.csv")
    # Rows say all else themselves.
    others = [name for name in _OF_ONE_LAYOUT if getattr(args, name, None) not in (None, False, 0)]
    if others:
        raise ValueError(f"--table predicts what its rows say: got {flag_of(others[0])}: leave it out")
    num_rows, num_predicted = predict_table(args.table, args.out)
    left = "" if num_predicted == num_rows else "; the others say why in their notes"
    print(f"{args.out}: {num_predicted} of {num_rows} rows predicted{left}")
