"""Documents: a text file is one; of a .jsonl file, compressed or not, each line is one, of a .parquet file each row.

A document comes in pieces of bytes, so that a text of many gigabytes is never in memory; a line or a row is one piece.
Compressed lines are unpacked by the standard library (gzip) or by the library zstandard, rows are read by pyarrow; both
are extras, imported when such a file comes. What the bytes become, tokens of a tokenizer or tokens themselves, is
decided in encode.py.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

PIPE = Path("-")
_READ_BYTES = 1 << 20
_PARQUET = ".parquet"
_GZIP, _ZSTANDARD = ".gz", ".zst"
_LINES = ".jsonl"
_PACKED_BYTES = 1 << 16
# Of zstd --long=31, the largest that there is; the library's own limit is 1 << 27.
_MOST_WINDOW_BYTES = 1 << 31
_ROWS_AT_ONCE = 1024


class DocumentPlace(NamedTuple):
    """Where reading goes on behind a document.

    Attributes:
        file: number of the file.
        offset: in the file: bytes, unpacked if they are compressed; rows of a parquet file.
        line: lines of the file until here.
        num_documents, num_empty: documents until here; of those, empty ones are counted apart.
        check: CRC-32 of the file's bytes until here; 0 of a parquet file.
    """

    file: int = 0
    offset: int = 0
    line: int = 0
    num_documents: int = 0
    num_empty: int = 0
    check: int = 0


BEGINNING = DocumentPlace()


class DocumentPiece(NamedTuple):
    """A part of a document, never empty.

    Attributes:
        content: its bytes.
        begins, ends: whether it is the document's first, its last.
        path: the file that it was read from.
        offset: of its first byte: in a text file, or in the text of a line.
        after: where reading goes on, of a document's last piece.
    """

    content: bytes
    begins: bool
    ends: bool
    path: Path
    offset: int
    after: DocumentPlace = BEGINNING


class DocumentReader:
    """The documents of files, in order; iterate once.

    Args:
        paths: text files; files of JSON lines, whose names end in .jsonl, .jsonl.gz or .jsonl.zst, and of rows, in
            .parquet; or PIPE alone, JSON lines from the standard input.
        field: of a JSON line or a row, has the text; None for the JSON line itself.
        start: where to begin; what is counted counts from the beginning all the same.
        look: is called with each text file that is read, and its first bytes; a ValueError of it ends the reading.

    Attributes:
        num_bytes: of all files; 0 for a pipe.
        num_read_bytes: so far.
        num_documents: begun so far, without those that are empty.
        num_empty: empty ones so far, which are left out.

    Raises:
        ValueError: when it comes to a line or row that has no text in that field; a file or pipe that, until the
            start, is not what it was.
        OSError: when it comes to a file that cannot be read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        field: str | None = "text",
        start: DocumentPlace = BEGINNING,
        look: Callable[[Path, bytes], None] = lambda *_: None,
    ) -> None:
        self.paths, self.field, self.start, self._look = paths, field, start, look
        sizes = [0 if path == PIPE else path.stat().st_size for path in self.paths]
        self.num_bytes = sum(sizes)
        self.num_documents, self.num_empty = self.start.num_documents, self.start.num_empty
        self.num_read_bytes = sum(sizes[: self.start.file])

    def __iter__(self) -> Iterator[DocumentPiece]:
        for number in range(self.start.file, len(self.paths)):
            path = self.paths[number]
            start = self.start if number == self.start.file else BEGINNING
            if path == PIPE:
                yield from self._lines(sys.stdin.buffer, number, start)
            elif path.suffix == _PARQUET:
                yield from self._rows(number, start.offset)
            elif is_json_lines(path):
                with path.open("rb") as raw, open_lines(raw, path) as file:
                    yield from self._lines(file, number, start, raw if is_compressed(path) else None)
            else:
                yield from self._whole(number)

    def _whole(self, number: int) -> Iterator[DocumentPiece]:
        """A text file, which is one document."""
        path = self.paths[number]
        with path.open("rb") as file:
            offset, content = 0, file.read(_READ_BYTES)
            self._count(len(content) > 0)
            if content:
                self._look(path, content)
            while content:
                self.num_read_bytes += len(content)
                # Only the next piece says whether this is the last.
                following = file.read(_READ_BYTES)
                yield DocumentPiece(content, offset == 0, not following, path, offset, self._place(number + 1, 0))
                offset, content = offset + len(content), following

    def _lines(
        self, file: BinaryIO, number: int, start: DocumentPlace, compressed_file: BinaryIO | None = None
    ) -> Iterator[DocumentPiece]:
        """The documents of JSON lines; blank lines are none. Of a compressed file its own bytes count as read."""
        path, offset, line_number = self.paths[number], start.offset, start.line
        check = _skipped(file, path, start)
        before = self.num_read_bytes
        self.num_read_bytes += offset
        for line in file:
            line_number += 1
            self.num_read_bytes += len(line)
            if compressed_file is not None:
                self.num_read_bytes = before + compressed_file.tell()
            offset += len(line)
            check = zlib.crc32(line, check)
            if line.isspace():
                continue
            content = line.strip()
            if self.field is not None:
                content = self._text_of(content, f"{path}, line {line_number}")
            self._count(len(content) > 0)
            if content:
                yield DocumentPiece(content, True, True, path, 0, self._place(number, offset, line_number, check))

    def _rows(self, number: int, row: int) -> Iterator[DocumentPiece]:
        """The documents of a parquet file's rows."""
        path, before = self.paths[number], self.num_read_bytes
        size = path.stat().st_size
        assert self.field is not None, "a row is no line"
        for text, share in parquet_texts(path, self.field, row):
            row += 1
            content = text.encode()
            self.num_read_bytes = before + int(size * share)
            self._count(len(content) > 0)
            if content:
                yield DocumentPiece(content, True, True, path, 0, self._place(number, row))
        self.num_read_bytes = before + size

    def _place(self, file: int, offset: int, line: int = 0, check: int = 0) -> DocumentPlace:
        return DocumentPlace(file, offset, line, self.num_documents, self.num_empty, check)

    def _count(self, has_text: bool) -> None:
        self.num_documents += has_text
        self.num_empty += not has_text

    def _text_of(self, line: bytes, where: str) -> bytes:
        remedy = "correct the line, or name the field with --field"
        try:
            values = json.loads(line.decode())
            if not isinstance(values, dict):
                problem = f"is {type(values).__name__}"
            elif self.field not in values:
                problem = f"has {', '.join(map(repr, list(values)[:5])) or 'no fields'}"
            elif not isinstance(values[self.field], str):
                problem = f"has {type(values[self.field]).__name__} there"
            else:
                text: str = values[self.field]
                return text.encode()
        except UnicodeEncodeError:
            problem = "has half of a surrogate pair there"
        except (ValueError, RecursionError) as error:
            problem = f"is none: {str(error)[:80]}"
        raise ValueError(
            f"a line of JSONL must be an object with a text in {self.field!r}: {where} {problem}: {remedy}"
        ) from None


def _skipped(file: BinaryIO, path: Path, start: DocumentPlace) -> int:
    """Read what an earlier call has read of a file; return its CRC-32."""
    left, check = start.offset, 0
    while left:
        content = file.read(min(left, _READ_BYTES))
        if not content:
            break
        left, check = left - len(content), zlib.crc32(content, check)
    if left or check != start.check:
        raise ValueError(
            f"a text that was begun must be the same until there: the first {start.offset:,} bytes of {path} are "
            "others now: restore them, or remove what was begun and start again"
        )
    return check


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


def parquet_texts(path: Path, field: str, first: int = 0) -> Iterator[tuple[str, float]]:
    """Yield the texts of a column, and which share of the rows has been read with each.

    Args:
        path: the file.
        field: the column.
        first: row to begin with; the row groups before it are not read.

    Raises:
        ValueError: the library is not installed; no parquet file; no such column, or one of another type; a row without
            a text.
    """
    try:
        import pyarrow  # type: ignore[import-not-found, unused-ignore]
        from pyarrow import parquet  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(
            f"a parquet file needs the library pyarrow: it is not installed, for {path}: pip install "
            "'tpengine[parquet]'"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow
            kind = columns.field(field).type if field in columns.names else None
            if kind is None or not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                has = f"has {', '.join(map(repr, columns.names[:5]))}" if kind is None else f"has {kind} there"
                raise ValueError(
                    f"a parquet file must have a column of text {field!r}: {path} {has}: name the column with --field"
                )
            row = 0
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if row + size <= first:
                    row += size
                    continue
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[field]):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        if row <= first:
                            continue
                        if text is None:
                            raise ValueError(
                                f"a row of a parquet file must have a text in {field!r}: {path}, row {row} has none: "
                                "leave it out, or name the column with --field"
                            )
                        yield text, row / max(1, file.metadata.num_rows)
    except pyarrow.ArrowException as error:
        raise ValueError(f"a parquet file must be whole: {path}: {str(error)[:120]!r}: copy it again") from None
