"""Where text comes from: files, those of directories, and the standard library, which every machine has.

A file that does not look like text is only warned of, since any bytes can be tokens.
"""

from __future__ import annotations

import codecs
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpengine.data.documents import is_compressed_non_jsonl

HEAD_BYTES = 1 << 13
# As Perl's -T has it: of bytes that are no UTF-8, this share may be other than printable ASCII.
_MOST_ODD = 0.3
_PRINTABLE = frozenset((*range(32, 127), *b"\n\r\t\f\b\x1b"))
_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)


def stdlib_text() -> NDArray[np.uint8]:
    """Read the top-level *.py files of Python's standard library, sorted by name, as bytes (about 4.7 MB).

    Raises: ValueError: this Python's library is not stored as files.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(directory.glob("*.py"), key=lambda path: path.name))
    if not text:
        raise ValueError(f"the standard library must be *.py files: none in {directory}: use --data.path FILE")
    return np.frombuffer(text, dtype=np.uint8)


def find_files(
    sources: Sequence[Path],
    pattern: str = "**/*",
    out: Path | None = None,
    is_written: Callable[[Path], bool] = lambda _: False,
) -> list[Path]:
    """Return the files to read, in the order of the sources; those of a directory sorted by relative path.

    Args:
        sources: files, and directories to look in; links to directories inside them are not followed.
        pattern: glob relative to each directory; ** stands for any depth.
        out: the file to be written. It is left out, and so is what a killed call has left beside it.
        is_written: whether a file is one that an earlier call wrote, and no text.

    Raises:
        ValueError: no such source, an output that is a source or has one in it, a file that is named twice, or
            compressed and not of JSON lines, a malformed pattern, nothing but empty files.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += _files_of(source, pattern)
        elif source.is_file():
            found.append(source)
        else:
            raise ValueError(f"--from must be directories or files: got {source}: check the path")
    if out is not None:
        _check_apart(sources, [path for path in found if not is_written(path)], out)
    paths = [path for path in found if out is None or not _belongs_to(path, out)]
    _check_once(paths)
    for path in filter(is_compressed_non_jsonl, paths):
        raise ValueError(
            f"a compressed file must be of JSON lines: {path} is not by its name: unpack it, or name it "
            f"{path.with_suffix('').stem}.jsonl{path.suffix.lower()} if it is, or leave it out with --pattern"
        )
    if not any(path.stat().st_size for path in paths):
        where = ", ".join(map(str, sources[:3]))
        raise ValueError(
            f"--from must have a file that is not empty: {len(paths)} files match {pattern!r} in {where}, "
            "0 bytes: use '**/*' or another directory"
        )
    return paths


def _files_of(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted((path for path in directory.glob(pattern) if path.is_file()), key=Path.as_posix)
    except (ValueError, NotImplementedError):
        raise ValueError(f"--pattern must be a relative glob: got {pattern!r}: use '**/*'") from None


def _check_apart(sources: Sequence[Path], found: Iterable[Path], out: Path) -> None:
    """Raise ValueError if the output is a text to be read, or a directory with one, however both are spelled."""
    place = out.resolve()
    for source in sources:
        if source.resolve() == place:
            example = out / "text.tokens" if source.is_dir() else out.with_name(out.name + ".tokens")
            raise ValueError(
                f"--out must not be what is read: --from {source} is --out {out}: choose another, as {example}"
            )
        if source.resolve().is_relative_to(place):
            raise ValueError(f"--out must not be what is read: --from {source} is in --out {out}: choose another")
    for path in found:
        # A hard link is the same text by another name. A name that no file can have is refused where it is written.
        if path.resolve().is_relative_to(place) or (os.path.isfile(out) and out.samefile(path)):
            raise ValueError(f"--out must not be what is read: {path} is a text of --from: choose another than {out}")


def _belongs_to(path: Path, out: Path) -> bool:
    """Whether a file is the output or in it, or its beginning under a name that is given to what is not yet whole."""
    room = out.parent.resolve()
    names = path.resolve().relative_to(room).parts if path.resolve().is_relative_to(room) else ("",)
    begun = rf"\.{re.escape(out.name)}\.(part|[0-9a-f]{{8}})"
    return names[0] == out.name or re.fullmatch(begun, names[0]) is not None


def _check_once(paths: Iterable[Path]) -> None:
    seen: dict[Path, Path] = {}
    for path in paths:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            raise ValueError(f"--from must name a file once: {path} is {first} again: leave one out")


def why_no_text(head: bytes) -> str:
    """Return why bytes do not look like text; empty if they do.

    Args: head: the first bytes of a file; of more than HEAD_BYTES the rest is not looked at.
    """
    head = head[:HEAD_BYTES]
    if head.startswith(_BOMS):
        return "it begins as UTF-16 or UTF-32 does: convert it to UTF-8"
    if (place := head.find(0)) >= 0:
        return f"byte {place} is zero"
    try:
        # The last character may be cut.
        codecs.getincrementaldecoder("utf-8")().decode(head)
        odd = sum(byte < 32 and byte not in _PRINTABLE for byte in head)
    except UnicodeDecodeError:
        odd = sum(byte not in _PRINTABLE for byte in head)
    return f"{odd} of its first {len(head)} bytes are no text" if odd > _MOST_ODD * len(head) else ""
