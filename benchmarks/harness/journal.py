"""A file of rows, one JSON object per line, which survives whatever ends its writer. No torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row as one line, and have it on disk when this returns.

    Processes may append to one file: a line is written at once. A half line, which a cut can leave, is ended first.
    """
    line = json.dumps(row, allow_nan=False).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
        # Not every file can be synced: a pipe cannot.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without half lines; none if there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows
