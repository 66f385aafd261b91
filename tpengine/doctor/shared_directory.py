"""Whether all hosts see the same run directory: each writes a file there that every other must find. No torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

_BEGINNING = ".doctor"


def leave_mark(directory: Path, token: str, rank: int) -> dict[str, Any]:
    """Write this rank's file; return how much room there is.

    Args:
        directory: which all hosts should share; made if it is not there.
        token: the same on all ranks, and no other run's.
        rank: of this process.

    Raises:
        OSError: it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = _mark(directory, token, rank)
    with path.open("w") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
    room = os.statvfs(directory)
    return {"free_bytes": room.f_bavail * room.f_frsize}


def seen_marks(directory: Path, token: str, ranks: list[int]) -> list[int]:
    """Return those of the ranks whose file is here, with what they wrote; call it when all have written."""
    # A network's file system shows new entries of a directory at once only after it was read anew.
    with contextlib.suppress(OSError):
        os.listdir(directory)
    found = []
    for rank in ranks:
        with contextlib.suppress(OSError):
            if _mark(directory, token, rank).read_text() == token:
                found.append(rank)
    return found


def remove_mark(directory: Path, token: str, rank: int) -> None:
    """Remove this rank's file."""
    with contextlib.suppress(OSError):
        _mark(directory, token, rank).unlink()


def _mark(directory: Path, token: str, rank: int) -> Path:
    return directory / f"{_BEGINNING}.{token}.{rank}"
