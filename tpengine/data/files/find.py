"""Which files a source is made of: one, those of a directory, those of a glob, or a list of such, in a fixed order."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable
from pathlib import Path

from tpengine.data.files.foreign.datatrove import is_datatrove
from tpengine.data.files.foreign.megatron import is_megatron
from tpengine.data.files.foreign.plain import is_list_of_documents, said_beside
from tpengine.data.files.token_file import FIT_MAGIC, MAGIC

# Of a file's head and end: its header, and of ours where most documents begin.
_ANNOUNCED_BYTES = 1 << 14
_REMEDY = "write one with tpengine data, or name its files: DIR, 'DIR/*.bin', or a,b,c"


def files_of(path: str) -> list[Path]:
    """Return the files of tokens that a path names.

    Args:
        path: a file; a directory, of which all token files are taken in the order of their names; a glob, of which all
            matches are, in the order of their paths (the companions of foreign files are left out); or several of
            these with commas between, in their order. A file whose own name has such characters is that file.

    Raises:
        ValueError: nothing there, no token file in a directory, none that matches, a file that is named twice.
    """
    if Path(path).exists() or "," not in path:
        found = _files_of_one(path)
    else:
        parts = [part.strip() for part in path.split(",")]
        if not all(parts):
            raise ValueError(f"a list of token files must have a name between its commas: got {path!r}: correct it")
        found = [file for part in parts for file in _files_of_one(part)]
    seen: dict[Path, Path] = {}
    for file in found:
        first = seen.setdefault(file.resolve(), file)
        if first is not file:
            raise ValueError(f"a source must have a file once: {file} is {first} again: leave one out of {path}")
    return found


def is_token_file(path: Path) -> bool:
    """Whether a file is one of tokens, by its companions or its first bytes."""
    if not path.is_file():
        return False
    if is_datatrove(path) or is_megatron(path):
        return True
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return True
    return path.suffix != ".json" and not _is_companion(path) and said_beside(path) is not None


def _files_of_one(path: str) -> list[Path]:
    place = Path(path)
    if place.is_dir():
        children = [child for child in sorted(place.iterdir()) if not child.name.startswith(".")]
        _announce(children)
        files = [child for child in children if _is_token_file(child)]
        if not files:
            raise ValueError(f"a directory of tokens must have a token file: none in {place}: {_REMEDY}")
        return files
    if place.exists() and not place.is_file():
        raise ValueError(f"a token file must be a regular file: {place} is a device or pipe: choose another")
    if place.exists() or not glob.has_magic(path):
        return [place]
    # A glob that takes all takes companions too.
    found = [Path(match) for match in sorted(glob.glob(path, recursive=True))]
    files = [match for match in found if match.is_file() and not _is_companion(match)]
    if not files:
        raise ValueError(f"a glob of token files must match one: none is {path!r}: {_REMEDY}")
    _announce(files)
    return files


def _announce(files: Iterable[Path]) -> None:
    """Have the system begin to read what opening files will ask for, of all at once: disks answer so much sooner.

    1,000 files that are not in memory are open after 0.3 s instead of 0.8 s. Whatever is wrong with a file is said by
    whoever opens it.
    """
    for path in files:
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                end = max(0, os.fstat(number).st_size - _ANNOUNCED_BYTES)
                os.posix_fadvise(number, 0, _ANNOUNCED_BYTES, os.POSIX_FADV_WILLNEED)
                os.posix_fadvise(number, end, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(number)


def _is_token_file(path: Path) -> bool:
    try:
        return is_token_file(path)
    except OSError as error:
        raise ValueError(f"a token file must be readable: {path}: {error.strerror}: correct that") from None


def _is_companion(path: Path) -> bool:
    """Whether a file only says something of another one beside it."""
    name = path.name
    if path.suffix == ".idx":
        return path.with_suffix(".bin").is_file()
    if path.suffix in (".index", ".metadata", ".loss"):
        return name.endswith((".ds.index", ".ds.metadata", ".ds.loss"))
    if path.suffix == ".fit":
        # NAME.S.fit, see fit/index.py; also one whose text is no longer there.
        return path.with_suffix("").with_suffix("").is_file() or _begins_with(path, FIT_MAGIC)
    if path.suffix == ".json":
        return path.with_suffix("").is_file() or any(
            other.suffix != ".json" and other.is_file() for other in path.parent.glob(f"{glob.escape(path.stem)}.*")
        )
    return is_list_of_documents(path)


def _begins_with(path: Path, magic: bytes) -> bool:
    """Whether a file can be read and begins so."""
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False
