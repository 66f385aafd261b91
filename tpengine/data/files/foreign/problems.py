"""What is said of a file of others that is not what it should be: one line, with path, values and remedy."""

from __future__ import annotations

from pathlib import Path

from tpengine.data.files.stored_tokens import OpenFile

_REMEDY = "copy it again, or write it with tpengine data"


def _opened(path: Path, what: str) -> OpenFile:
    """Open a file.

    Args:
        path: the file.
        what: it is, with its article.

    Raises:
        ValueError: it cannot be read, or is a directory or a device.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{what} must be a regular file: {path} is none: choose another")
        return OpenFile(path)
    except OSError as error:
        raise ValueError(f"{what} must be readable: {path}: {error.strerror}: correct that, or leave it out") from None


def _read(file: OpenFile, offset: int, num_bytes: int) -> bytes:
    """Read at a position; fewer bytes only at the end of the file.

    Raises:
        ValueError: the disk fails.
    """
    try:
        return file.read(offset, num_bytes)
    except OSError as error:
        raise ValueError(f"a token file must be readable: {file.path}: {error.strerror}: correct that") from None


def _size_of(file: OpenFile) -> int:
    """Return the file's size in bytes, as it is now.

    Raises:
        ValueError: the disk fails.
    """
    try:
        return file.identity().size
    except OSError as error:
        raise ValueError(f"a token file must be readable: {file.path}: {error.strerror}: correct that") from None
