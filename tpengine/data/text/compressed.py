"""Files of JSON lines that are compressed: gzip by the standard library; zstandard by the library of that name."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_GZIP, _ZSTANDARD = ".gz", ".zst"
_LINES = ".jsonl"
_PACKED_BYTES = 1 << 16
# Of zstd --long=31, the largest that there is; the library's own limit is 1 << 27.
_MOST_WINDOW_BYTES = 1 << 31


def is_json_lines(path: Path) -> bool:
    """Whether a file is of JSON lines, by its name: x.jsonl, x.jsonl.gz, x.jsonl.zst."""
    suffixes = path.suffixes
    return suffixes[-1:] == [_LINES] or (suffixes[-2:-1] == [_LINES] and suffixes[-1] in (_GZIP, _ZSTANDARD))


def is_compressed_non_jsonl(path: Path) -> bool:
    """Whether a file is compressed, by its name, but not said to be of JSON lines: its bytes are nobody's text."""
    return path.suffix.lower() in (_GZIP, _ZSTANDARD) and not is_json_lines(path)


def is_compressed(path: Path) -> bool:
    """Whether a file of JSON lines has to be unpacked."""
    return path.suffix != _LINES


@contextlib.contextmanager
def open_lines(raw: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    """Return what reads the lines of an open file, unpacked as its name says.

    Raises:
        ValueError: the library that unpacks it is not installed; the file is damaged, or cut short.
    """
    if not is_compressed(path):
        yield raw
        return
    unpacking: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        if path.suffix == _GZIP:
            file: BinaryIO = gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[assignment]
        else:
            import zstandard

            unpacking = (EOFError, zstandard.ZstdError)
            decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES)
            file = io.BufferedReader(_Frames(raw, decompressor.decompressobj), 1 << 20)
        with file:
            yield file
    except ImportError:
        raise ValueError(
            f"a file of zstandard needs the library of that name: it is not installed, for {path}: pip install "
            "'tpengine[zstd]', or unpack the file"
        ) from None
    except unpacking as error:
        raise ValueError(f"a compressed file must be whole: {path}: {str(error)[:120]!r}: copy it again") from None


class _Frames(io.RawIOBase):
    """Unpacks frames, one behind the other.

    The library's own reader of streams takes a file that is cut short for one that ends.

    Args:
        raw: what is read.
        unpacker: returns what unpacks the next frame.
    """

    def __init__(self, raw: BinaryIO, unpacker: Callable[[], Any]) -> None:
        self._raw, self._unpacker = raw, unpacker
        self._frame, self._packed, self._content = unpacker(), b"", memoryview(b"")
        self._is_inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._content:
            packed = self._packed or self._raw.read(_PACKED_BYTES)
            if not packed:
                if self._is_inside:
                    raise EOFError("it ends inside a frame")
                return 0
            self._content, self._is_inside = memoryview(self._frame.decompress(packed)), True
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame, self._is_inside = self._unpacker(), False
        size = min(len(into), len(self._content))
        into[:size], self._content = self._content[:size], self._content[size:]
        return size
