"""Replace files whole, make directories whole, and keep those aside that would be overwritten. No torch.

What is new is written beside its place and renamed, so that a reader finds the old or the new, never a part.

What is deliberately elsewhere: checkpoints, which are directories of many files (checkpoint/directory.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def write_beside(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace a file, or make it, in one step.

    Args:
        path: the file.
        content: what it is to hold.
        durable: have it on disk, under its name, when this returns.

    Raises:
        OSError: it cannot be written; then the old one is still there.
    """
    with written_beside(path) as beside, beside.open("wb") as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    if durable:
        sync_directory(path.parent)


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Give the name to write to; it takes the place of `path` when the block ends, and is removed if it fails.

    Args:
        path: the file to be replaced, or made.

    Raises:
        OSError: it cannot be renamed; then the old one is still there.
    """
    with _beside(path) as beside:
        yield beside
        os.replace(beside, path)


def keep_aside(path: Path) -> Path | None:
    """Rename an existing file to the first free `name.<n>.suffix`, so that nothing is overwritten.

    Returns:
        Its new name; None if there was no file.
    """
    if not path.exists():
        return None
    return path.rename(_free_name(path))


def keep_copy_aside(path: Path) -> None:
    """Copy an existing file to the first free `name.<n>.suffix`, for a caller that replaces it in one rename."""
    if path.exists():
        shutil.copyfile(path, _free_name(path))


def try_to_write(path: Path) -> None:
    """Make a file beside `path` and remove it: a file system may refuse what the permissions allow.

    Raises:
        OSError: none can be made.
    """
    with _beside(path) as beside:
        beside.touch()


def sync_directory(directory: Path) -> None:
    """Flush a directory to disk, with the names of the files that were renamed in it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_directory(path: str | Path, what: str) -> Iterator[Path]:
    """Give a new directory to write to; it takes the place of `path` when the block ends, and is removed if it fails.

    Args:
        path: of a directory that is not there yet, or is empty.
        what: it is, with its article, for errors: "an export directory".

    Raises:
        ValueError: it is a file, or not empty.
        OSError: it cannot be made.
    """
    place = Path(path).resolve()
    if place.exists() and not place.is_dir():
        raise ValueError(f"{what} must be a directory: {path} is a file: choose another")
    if place.is_dir() and (held := sorted(entry.name for entry in place.iterdir())):
        raise ValueError(
            f"{what} must be empty: {path} has {held[0]}"
            f"{f' and {len(held) - 1} more' if len(held) > 1 else ''}: empty it, or choose another"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f".{place.name}.{os.urandom(4).hex()}")
    beside.mkdir()
    try:
        yield beside
        sync_directory(beside)
        # An empty directory is replaced; one that was filled meanwhile is an error of the system's.
        os.rename(beside, place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    sync_directory(place.parent)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name beside `path`, where nothing is left at the end, unless the process is killed meanwhile."""
    # Ranks of several hosts may write the same file at once.
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        yield beside
    finally:
        # Gone after the rename; where it could not be made, it cannot be removed either.
        with contextlib.suppress(OSError):
            beside.unlink()


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return aside
