"""The files of `tpengine plan --table`: rows in, predictions out, in CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from tpengine.advice.published.predict import Prediction, predicted
from tpengine.advice.published.row import Row
from tpengine.files import write_beside

COLUMNS = ("id", "step_seconds", "mfu", "peak_bytes", "fits", "notes")
# As the csv module has it.
_LONGEST_CELL = 131_072
# Without these there is nothing to predict in any row.
_NEEDED = ("id", "layers", "hidden", "seq_len", "gpu", "gpus", "global_batch")


def predict_table(table: Path, out: Path) -> tuple[int, int]:
    """Predict every row of a table and write the predictions, beside the file and renamed.

    Args:
        table: CSV with the columns of published runs.
        out: CSV to write, a row for each.

    Returns:
        The numbers of rows, and of those that have a prediction.

    Raises:
        ValueError: no such file, no text, or columns are missing; one line.
        OSError: it cannot be written.
    """
    if out.is_dir() or not out.parent.is_dir():
        reason = "it is a directory" if out.is_dir() else f"{out.parent} is no directory"
        raise ValueError(f"--out must be a file that can be written: {out}: {reason}: name another")
    if out.exists() and table.exists() and out.samefile(table):
        raise ValueError(f"--out must be another file than --table: got {out} for both: name another")
    rows = read_rows(table)
    predictions = [predicted(row) for row in rows]
    write_beside(out, table_text((row.name, of) for row, of in zip(rows, predictions, strict=True)))
    return len(rows), sum(of.step_seconds is not None for of in predictions)


def read_rows(table: Path) -> list[Row]:
    """Read the rows of a table.

    Raises:
        ValueError: as `predict_table`.
    """
    try:
        content = table.read_bytes()
    except OSError as error:
        raise ValueError(f"--table needs a readable file: {table}: {error.strerror}: check the path") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        # What else spreadsheets write: each of its bytes is a letter.
        text = content.decode("latin-1")
    if "\0" in text:
        raise ValueError(f"--table needs a CSV file: {table} has bytes that no text has: check the path")
    csv.field_size_limit(max(_LONGEST_CELL, len(text)))
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        columns = [name.strip().lower() for name in reader.fieldnames or ()]
        rows = [Row.of(row) for row in reader]
    except csv.Error as error:
        raise ValueError(f"--table needs a CSV file: {table}: {error}: correct the file") from None
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise ValueError(
            f"--table needs the columns {', '.join(_NEEDED)}: {table} lacks {', '.join(missing)}: add them"
        )
    return rows


def table_text(predictions: Iterable[tuple[str, Prediction]]) -> bytes:
    """Return predictions as CSV; what is not predicted is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, of in predictions:
        fits = "" if of.fits is None else "yes" if of.fits else "no"
        numbers = [f"{value:.6g}" if value is not None else "" for value in (of.step_seconds, of.mfu)]
        writer.writerow([name, *numbers, "" if of.peak_bytes is None else of.peak_bytes, fits, of.notes])
    return text.getvalue().encode()
