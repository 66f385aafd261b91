"""A run's lists of what happened: one JSON object per line, appended, or replaced whole. No torch.

    metrics.jsonl             observe/metrics.py
    samples.jsonl             runs/between_steps.py
    skipped.jsonl             runs/skipped_steps.py
    rollbacks.jsonl           checkpoint/rollbacks.py
    after_checkpoint.jsonl    checkpoint/upload.py

A kill, or a full disk, may cut the last line. `read` gives every line, with what is none among them, because the lists
differ in what a bad line means: a row of metrics may be missing, a rollback may not. Who reads decides; a run that goes
back leaves the lines of later steps out and calls `write` with the others.

What is deliberately elsewhere: metrics are appended to a file that stays open, and their last row is completed in place
(observe/metrics.py).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpengine.files import write_beside


class Line(NamedTuple):
    """A line of a list.

    Attributes:
        number: from 1.
        text: without its end.
        row: the JSON object; empty where the line is none.
        is_cut: whether it is the beginning of a row: it has no end, and is no object.
    """

    number: int
    text: bytes
    row: dict[str, Any]
    is_cut: bool

    @property
    def step(self) -> int | None:
        """The step as the row has it, whatever it is counted from (config/lengths.py); None where it has none."""
        step = self.row.get("step")
        return step if type(step) is int else None


def read(path: Path) -> Iterator[Line]:
    """Return the lines of a list, each parsed when it is asked for; a byte that is no UTF-8 costs no row.

    Raises:
        OSError: it cannot be read; from this call, not from a line.
    """
    texts = path.read_bytes().splitlines(keepends=True)
    return (_line(number, text) for number, text in enumerate(texts, 1))


def _line(number: int, text: bytes) -> Line:
    row: Any = {}
    # Brackets in brackets are no JSON that Python reads.
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(text.decode(errors="replace"))
    row = row if isinstance(row, dict) else {}
    whole = text.rstrip(b"\r\n")
    return Line(number, whole, row, is_cut=not row and whole == text)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row, on a line of its own also where the last one is cut.

    Raises:
        OSError: it cannot be written; then a part of it may stand there, as a line that is cut.
    """
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
        begin = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(begin + _text(row) + b"\n")


def write(path: Path, lines: Iterable[Line | Mapping[str, Any]], *, durable: bool = False) -> None:
    """Replace a list in one step, or make it: a reader, and a run after a kill, finds the old or the new.

    Args:
        path: the list.
        lines: lines that were read stay as they are; rows.
        durable: have it on disk, under its name, when this returns.

    Raises:
        OSError: it cannot be written; then the old one is still there.
    """
    texts = [line.text if isinstance(line, Line) else _text(line) for line in lines]
    write_beside(path, b"".join(text + b"\n" for text in texts), durable=durable)


def _text(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode()
