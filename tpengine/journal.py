"""A run's lists of what happened: one JSON object per line, appended, or replaced whole. No torch.

A kill, or a full disk, may cut the last line. `read` gives every line, what is no row among them, because the lists
differ in what that means: a row of metrics may be missing, a rollback may not. A run that goes back leaves out the
lines of later steps, and calls `write` with the others. Metrics alone are appended elsewhere, to a file that stays
open, and their last row is completed in place (observe/metrics.py).

In files and lines a step has the number of steps that are finished when it is, as its checkpoint has. So the first step
is 1, and the last one of `--train.steps 250` is 250: in metrics.jsonl, samples.jsonl, skipped.jsonl, rollbacks.jsonl
and profile.json, in what a run prints, and in the names of checkpoints. In the code a step is an index from 0, which
decides its samples and its learning rate.

Files of earlier versions counted from 0, and are still read. A line of JSON says what it counts from. Rows of
metrics.jsonl do not, because other programs read them: a file that has a row of step 0 counts from 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpengine.files import write_beside

_FIRST = 1


@dataclass(frozen=True)
class Line:
    """A line of a list.

    Attributes:
        number: from 1.
        text: with its end, which the last line may lack.
        row: the JSON object; empty where the line is none.
    """

    number: int
    text: bytes
    row: dict[str, Any]

    @property
    def step(self) -> int | None:
        """The number that the row names a step by; None where it names none."""
        step = self.row.get("step")
        return step if type(step) is int else None

    @property
    def index(self) -> int | None:
        """The step from 0, as the row says what it counts from; None where it names none."""
        try:
            return index_of(self.row)
        except (ValueError, TypeError, KeyError):
            return None


def read(path: Path) -> Iterator[Line]:
    """Return the lines of a list; a byte that is no UTF-8 costs no row.

    Raises:
        OSError: it cannot be read; this call raises it, not the first line.
    """
    texts = path.read_bytes().splitlines(keepends=True)
    return (Line(number, text, _row(text)) for number, text in enumerate(texts, 1))


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl that name a step, their steps counted from 1; the other lines are passed over.

    Raises:
        OSError: it cannot be read.
    """
    rows = [line.row for line in read(path) if line.step is not None]
    if any(row["step"] == 0 for row in rows):
        return [{**row, "step": row["step"] + _FIRST} for row in rows]
    return rows


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row, on a line of its own also where the last one is cut.

    Raises:
        OSError: it cannot be written; then a part of it may stand there, as a line that is cut.
    """
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        begin = b"" if file.read() in (b"", b"\n") else b"\n"
        file.write(begin + _text(row))


def write(path: Path, lines: Iterable[Line | Mapping[str, Any]], *, durable: bool = False) -> None:
    """Replace a list in one step, or make it: a reader, and a run after a kill, finds the old or the new.

    Args: lines: lines that were read, which stay as they are, and rows. durable: as files.write_beside has it.
    Raises: OSError: it cannot be written; then the old one is still there.
    """
    texts = (line.text if isinstance(line, Line) else _text(line) for line in lines)
    write_beside(path, b"".join(text if text.endswith(b"\n") else text + b"\n" for text in texts), durable=durable)


def numbered(index: int) -> dict[str, int]:
    """Return how JSON names a step that is given from 0."""
    return {"step": index + _FIRST, "counted_from": _FIRST}


def index_of(value: Mapping[str, Any]) -> int:
    """Return the step that JSON names, from 0.

    Raises:
        ValueError: it names none.
        KeyError, TypeError: as ValueError.
    """
    step, first = value["step"], value.get("counted_from", 0)
    if type(step) is not int or first not in (0, _FIRST) or step < first:
        raise ValueError(f"{step!r} is no step, counted from {first!r}")
    return step - int(first)


def _row(text: bytes) -> dict[str, Any]:
    try:
        row = json.loads(text.decode(errors="replace"))
    except (ValueError, RecursionError):  # many brackets, one in another
        return {}
    return row if isinstance(row, dict) else {}


def _text(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
