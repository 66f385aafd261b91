"""The directory of a run: created or found, locked by one run at a time, and its config.toml. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

from tpengine.architectures.model_path import run_of
from tpengine.checkpoint.resume import MIXTURE_FILE, PHASES_FILE, checkpoints_of
from tpengine.config import Config
from tpengine.config.toml import dump_toml
from tpengine.files import keep_copy_aside, written_beside
from tpengine.plan import SCHEDULES
from tpengine.trust import RECORD, record_of

# How often, and after how long, a lock is tried again that somebody may only have looked at.
_TRIES, _LOOK_SECONDS = 3, 0.05


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
        _lock(lock)
    except OSError as error:
        raise ValueError(
            f"a run directory belongs to one run at a time: {path} cannot be locked, {error.strerror}: wait for the "
            "run that uses it, or use another --run-dir"
        ) from None
    _check_checkpoints(path, config)
    return path, lock


def is_running(path: Path) -> bool | None:
    """Return whether a run holds the lock of a directory; None if this host cannot tell."""
    try:
        with (path / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _lock(lock: IO[str]) -> None:
    """Lock a file; who only looks whether it is locked lets go at once.

    Raises:
        OSError: another process keeps it.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_SECONDS)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
    if newest == checkpoints_of(path).of_step(0) and _begins_with(path, config):
        return
    if newest is not None and not config.resume:
        raise ValueError(
            f"a new run must not hide the checkpoints of another: {path} has {newest.name}: continue it with --resume, "
            "or use another --run-dir"
        )


def _begins_with(path: Path, config: Config) -> bool:
    """Return whether model.path is the run of this directory: what was imported into it is then not hidden."""
    source = run_of(config.model.path) if config.model.path else None
    return source is not None and source[0].resolve() == path.resolve()


def write_config(config: Config, directory: Path, *, keeps_equal: bool) -> None:
    """Write config.toml, and beside it copies of the files that it names: phases, mixture, schedule, architecture.

    The SHA-256 of an architecture's file is kept too (trust.py). Earlier files are kept aside.

    Args:
        config: config.run_dir is what the directory is called, or will be once it is complete.
        directory: to write to.
        keeps_equal: leave an earlier config.toml that is equal.

    Raises:
        OSError: a file cannot be read or written.
    """
    schedule, architecture = config.parallel.schedule, config.model.architecture
    place = Path(config.run_dir)
    if schedule not in SCHEDULES:
        kept = f"{Path(schedule).stem}.txt"
        _write_once(directory / kept, Path(schedule).read_bytes(), keeps_equal=True)
        schedule = str(place / kept)
    if architecture.endswith(".py"):
        kept, content = Path(architecture).name, Path(architecture).read_bytes()
        _write_once(directory / kept, content, keeps_equal=True)
        _write_once(directory / f"{kept}{RECORD}", record_of(kept, content), keeps_equal=True)
        architecture = str(place / kept)
    if config.phases:
        _write_once(directory / PHASES_FILE, Path(config.phases).read_bytes(), keeps_equal=True)
        config = replace(config, phases=str(place / PHASES_FILE))
    if config.data.mixture:
        _write_once(directory / MIXTURE_FILE, Path(config.data.mixture).read_bytes(), keeps_equal=True)
        config = replace(config, data=replace(config.data, mixture=str(place / MIXTURE_FILE)))
    config = replace(
        config,
        model=replace(config.model, architecture=architecture),
        parallel=replace(config.parallel, schedule=schedule),
    )
    _write_once(directory / "config.toml", dump_toml(config).encode(), keeps_equal=keeps_equal)


def _write_once(path: Path, content: bytes, *, keeps_equal: bool) -> None:
    """Write a file of the run; keep an earlier one aside, or with `keeps_equal` leave it if it is equal."""
    # A link is replaced by a copy: the file that it leads to may change.
    if keeps_equal and path.is_file() and not path.is_symlink() and path.read_bytes() == content:
        return
    with written_beside(path) as beside:
        beside.write_bytes(content)
        keep_copy_aside(path)
