"""`python -m benchmarks.run published --table RUNS.csv`: how far are predicted steps from those that others published?

Each row is predicted without a look at what was measured; here both are joined. By source and table: mean and worst
error of the step, and its sign; over all: of runs that ran out of memory, how many are said not to fit (recall), and of
those said not to fit how many did (precision); and the regret: among rows of one source, model, GPUs and batch, by how
much the layout that is predicted fastest was slower than the fastest. `--predictions FILE` writes a row for each row,
also of a table in which nothing was measured.

Beside it stand published figures of others, who predicted tables like these: Calculon without tuning, and models that
fit constants to the table that they are judged on.
"""

from __future__ import annotations

import csv
import io
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED
from benchmarks.planner.published.predict import Prediction, predicted
from benchmarks.planner.published.row import Row
from tpengine.files import write_beside

_RIVALS = (
    "Calculon, untuned: 10.3, 11.1 and 25 to 28 % by table, regret 4.1 % mean, 24.8 % worst; constants only: 5 to 6 %"
)
_COLUMNS = ("id", "step_seconds", "mfu", "peak_bytes", "fits", "notes")
# As the csv module has it.
_LONGEST_CELL = 131_072
# Without these there is nothing to predict in any row.
_NEEDED = ("id", "layers", "hidden", "seq_len", "gpu", "gpus", "global_batch")


@dataclass(frozen=True)
class Options:
    """Predict published runs, and score the predictions."""

    table: Path = Path("published_runs.csv")
    """Rows: model, machine, layout, batch; and what was measured, where that is known."""
    only: str = ""
    """Only rows whose id begins so."""
    predictions: Path | None = None
    """Write what is predicted to this CSV file, a row for each."""
    out: Path | None = None
    """Append JSON lines to this file; results to keep go to benchmarks/results."""


@dataclass(frozen=True)
class Scored:
    """A row's measured step and its prediction.

    Attributes:
        columns: the row.
        measured: seconds; None where the row has no step.
        predicted: seconds; None where there is no prediction.
        ran_out: the run ran out of memory.
        fits: predicted; None where there is no prediction.
    """

    columns: Mapping[str, str]
    measured: float | None
    predicted: float | None
    ran_out: bool
    fits: bool | None

    @property
    def error(self) -> float | None:
        """Return the relative error of the step; None if one of the two is not there."""
        return self.predicted / self.measured - 1 if self.predicted and self.measured else None


def main(options: Options) -> int:
    """Predict, join, print and store.

    Returns: 0.
    Raises: ValueError: the table cannot be read, or the predictions cannot be written; one line.
    """
    rows = [row for row in read_rows(options.table) if row.name.startswith(options.only)]
    if options.predictions is not None:
        _refuse_place(options.predictions, options.table)
    begin = time.process_time()
    predictions = [predicted(row) for row in rows]
    seconds = time.process_time() - begin
    joined = list(zip(rows, predictions, strict=True))
    scored = [score(row, of) for row, of in joined]
    figures = [make_row(case, threads_per_rank=1, fields=of | {"check": PASSED}) for case, of in summary(scored)]
    num_predicted = sum(of.step_seconds is not None for of in predictions)
    said = f"{len(rows)} rows, {num_predicted} of them predicted, in {seconds:.0f} s of CPU time"
    Console(width=120).print(_drawn(figures), said, _RIVALS, sep="\n")
    if options.predictions is not None:
        write_beside(options.predictions, table_text((row.name, of) for row, of in joined))
    return stored(figures, options.out)


def read_rows(table: Path) -> list[Row]:
    """Read the rows of a table.

    Raises:
        ValueError: no such file, no text, or columns are missing; one line.
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


def _refuse_place(out: Path, table: Path) -> None:
    """Raise where predictions cannot be written, before anything is predicted."""
    if out.is_dir() or not out.parent.is_dir():
        reason = "it is a directory" if out.is_dir() else f"{out.parent} is no directory"
        raise ValueError(f"--predictions must be a file that can be written: {out}: {reason}: name another")
    if out.exists() and out.samefile(table):
        raise ValueError(f"--predictions must be another file than --table: got {out} for both: name another")


def table_text(predictions: Iterable[tuple[str, Prediction]]) -> bytes:
    """Return predictions as CSV; what is not predicted is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for name, of in predictions:
        fits = "" if of.fits is None else "yes" if of.fits else "no"
        numbers = [f"{value:.6g}" if value is not None else "" for value in (of.step_seconds, of.mfu)]
        writer.writerow([name, *numbers, "" if of.peak_bytes is None else of.peak_bytes, fits, of.notes])
    return text.getvalue().encode()


def score(row: Row, of: Prediction) -> Scored:
    """Join a row's prediction with what was measured, which the prediction has not seen."""
    notes = dict(part.strip().partition("=")[::2] for part in row.columns.get("notes", "").split(";"))
    ran_out = "oom" in row.text("metric_name")
    measured = None if ran_out else _number(notes.get("step_s", ""))
    return Scored(row.columns, measured, of.step_seconds, ran_out, of.fits)


def summary(scored: Sequence[Scored]) -> list[tuple[str, dict[str, object]]]:
    """Return a case and its figures for each table, for memory and for the choice of a layout."""
    tables: defaultdict[str, list[float]] = defaultdict(list)
    for row in scored:
        if row.error is not None:
            tables[f"{row.columns.get('source', '')} / {row.columns.get('table', '')}"].append(row.error)
    found: list[tuple[str, dict[str, object]]] = [
        (f"published/step/{name}", _errors(errors)) for name, errors in tables.items()
    ]
    found.append(("published/step", _errors([error for errors in tables.values() for error in errors])))
    found.append(("published/memory", _memory(scored)))
    found.append(("published/regret", _regret(scored)))
    return found


def _errors(errors: Sequence[float]) -> dict[str, object]:
    if not errors:
        return {"num_rows": 0}
    sizes = [abs(error) for error in errors]
    return {
        "num_rows": len(errors),
        "mean_percent": 100 * fmean(sizes),
        "median_percent": 100 * median(sizes),
        "worst_percent": 100 * max(sizes),
        "signed_percent": 100 * fmean(errors),
    }


def _memory(scored: Sequence[Scored]) -> dict[str, object]:
    """Return recall and precision of runs that ran out of memory; shares of nothing are left out."""
    answered = [row for row in scored if row.fits is not None and (row.ran_out or row.measured)]
    both = sum(row.ran_out and not row.fits for row in answered)
    ran_out, refused = sum(row.ran_out for row in answered), sum(not row.fits for row in answered)
    figures: dict[str, object] = {"num_rows": len(answered), "num_out_of_memory": ran_out, "num_refused": refused}
    if ran_out:
        figures["recall_percent"] = 100 * both / ran_out
    if refused:
        figures["precision_percent"] = 100 * both / refused
    return figures


def _regret(scored: Sequence[Scored]) -> dict[str, object]:
    """Return by how much the layouts that are predicted fastest were slower than the fastest, by groups of layouts."""
    groups: defaultdict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in scored:
        if row.predicted and row.measured:
            names = ("source", "model", "gpu", "gpus", "seq_len", "global_batch")
            groups[tuple(row.columns.get(name, "") for name in names)].append((row.predicted, row.measured))
    choices = [group for group in groups.values() if len(group) > 1]
    if not choices:
        return {"num_groups": 0}
    regrets = [min(group)[1] / min(measured for _, measured in group) - 1 for group in choices]
    return {
        "num_groups": len(choices),
        "mean_percent": 100 * fmean(regrets),
        "worst_percent": 100 * max(regrets),
    }


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 else None


def _drawn(rows: Sequence[Mapping[str, object]]) -> Table:
    table = Table(box=box.SIMPLE)
    names = ("mean", "median", "worst", "signed", "recall", "precision")
    for name in ("case", "rows", *(f"{name} %" for name in names)):
        table.add_column(name, justify="left" if name == "case" else "right", overflow="fold")
    for row in rows:
        figures = (row.get(f"{name}_percent", "") for name in names)
        cells = [f"{figure:.1f}" if isinstance(figure, float) else "" for figure in figures]
        count = row.get("num_rows", row.get("num_groups", ""))
        table.add_row(str(row["case"]).removeprefix("published/"), str(count), *cells)
    return table
