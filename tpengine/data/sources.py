"""Where bytes come from: the files of a directory, and the standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_READ_BYTES = 1 << 24


def stdlib_text() -> NDArray[np.uint8]:
    """Read the top-level *.py files of Python's standard library, sorted by name, as bytes (about 4.7 MB).

    Raises: ValueError: this Python's library is not stored as files.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(directory.glob("*.py"), key=lambda path: path.name))
    if not text:
        raise ValueError(f"the standard library must be *.py files: none in {directory}: use --data.path FILE")
    return np.frombuffer(text, dtype=np.uint8)


def bytes_of_directory(
    directory: str | Path, pattern: str = "**/*", skip: Path | None = None
) -> Iterator[NDArray[np.uint8]]:
    """Read the regular files under a directory, sorted by relative path, as arrays of bytes.

    Args:
        directory: where to look; links to directories are not followed.
        pattern: glob relative to it; ** stands for any depth.
        skip: a file to leave out, such as the output of an earlier call.
    Returns: pieces of at most 16 MiB, read one at a time; the list of files is fixed before.
    Raises: ValueError: no such directory, a malformed pattern, nothing but empty files.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"--from must be a directory: got {directory}: check the path")
    try:
        found = [path for path in directory.glob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError):
        raise ValueError(f"--pattern must be a relative glob: got {pattern!r}: use '**/*'") from None
    paths = sorted((p for p in found if skip is None or p.resolve() != skip.resolve()), key=Path.as_posix)
    if not any(path.stat().st_size for path in paths):
        raise ValueError(
            f"--from must have a file that is not empty: {len(paths)} files match {pattern!r} in {directory}, "
            "0 bytes: use '**/*' or another directory"
        )
    return _read_pieces(paths)


def _read_pieces(paths: Iterable[Path]) -> Iterator[NDArray[np.uint8]]:
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                yield np.frombuffer(piece, dtype=np.uint8)
