"""The directory of a run: created or found, and locked by one run at a time. No torch."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import IO

from tpengine.checkpoint.resume import checkpoints_of
from tpengine.config import Config


def open_run_dir(config: Config) -> tuple[Path, IO[str]]:
    """Create the run directory on rank 0, config.run_dir or a new runs/<date>-<time>, and lock it.

    Returns:
        The directory, and the lock: it is held while this file is open, and released when the process ends.

    Raises:
        ValueError: the directory cannot be created or written, another run holds it, or a new run would hide the
            checkpoints of an earlier one.
    """
    path = Path(config.run_dir) if config.run_dir else _new_name()
    try:
        path.mkdir(parents=True, exist_ok=bool(config.run_dir))
        with tempfile.TemporaryFile(dir=path):
            pass
        lock = (path / ".lock").open("a")
    except OSError as error:
        raise ValueError(
            f"--run-dir must be a directory that can be written to: {path}: {error.strerror}: use another directory"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(
            f"a run directory belongs to one run at a time: {path} cannot be locked, {error.strerror}: wait for the "
            "run that uses it, or use another --run-dir"
        ) from None
    _check_checkpoints(path, config)
    return path, lock


def _new_name() -> Path:
    """runs/<date>-<time>, with a number if another run has begun in the same second."""
    name = time.strftime("runs/%Y%m%d-%H%M%S")
    number = 1
    while os.path.lexists(path := Path(name if number == 1 else f"{name}-{number}")):
        number += 1
    return path


def _check_checkpoints(path: Path, config: Config) -> None:
    place = checkpoints_of(path).path
    if os.path.lexists(place) and not place.is_dir():
        raise ValueError(
            f"checkpoints must go to a directory: {place} is not a directory: remove it or use another --run-dir"
        )
    newest = checkpoints_of(path).newest()
    if newest is not None and not config.resume:
        raise ValueError(
            f"a new run must not hide the checkpoints of another: {path} has {newest.name}: continue it with --resume, "
            "or use another --run-dir"
        )
