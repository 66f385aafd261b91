"""Documents: a text file is one; of a .jsonl file, compressed or not, each line is one, of a .parquet file each row.

A document comes in pieces of bytes, so that a text of many gigabytes is never in memory; a line or a row is one piece.
What the bytes become, tokens of a tokenizer or tokens themselves, is decided in encode.py.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tpengine.data.text import compressed, parquet

PIPE = Path("-")
_READ_BYTES = 1 << 20
_PARQUET = ".parquet"


class Place(NamedTuple):
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


BEGINNING = Place()


class Piece(NamedTuple):
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
    after: Place = BEGINNING


class Documents:
    """The documents of files, in order; iterate once.

    Args:
        paths: text files; files of JSON lines, whose names end in .jsonl, .jsonl.gz or .jsonl.zst, and of rows, in
            .parquet; or PIPE alone, JSON lines from the standard input.
        field: of a JSON line or a row, has the text.
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
        field: str = "text",
        start: Place = BEGINNING,
        look: Callable[[Path, bytes], None] = lambda *_: None,
    ) -> None:
        self.paths, self.field, self.start, self._look = paths, field, start, look
        sizes = [0 if path == PIPE else path.stat().st_size for path in self.paths]
        self.num_bytes = sum(sizes)
        self.num_documents, self.num_empty = self.start.num_documents, self.start.num_empty
        self.num_read_bytes = sum(sizes[: self.start.file])

    def __iter__(self) -> Iterator[Piece]:
        for number in range(self.start.file, len(self.paths)):
            path = self.paths[number]
            start = self.start if number == self.start.file else BEGINNING
            if path == PIPE:
                yield from self._lines(sys.stdin.buffer, number, start)
            elif path.suffix == _PARQUET:
                yield from self._rows(number, start.offset)
            elif compressed.is_json_lines(path):
                with path.open("rb") as raw, compressed.open_lines(raw, path) as file:
                    yield from self._lines(file, number, start, raw if compressed.is_compressed(path) else None)
            else:
                yield from self._whole(number)

    def _whole(self, number: int) -> Iterator[Piece]:
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
                yield Piece(content, offset == 0, not following, path, offset, self._place(number + 1, 0))
                offset, content = offset + len(content), following

    def _lines(
        self, file: BinaryIO, number: int, start: Place, compressed_file: BinaryIO | None = None
    ) -> Iterator[Piece]:
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
            content = self._text_of(line.strip(), f"{path}, line {line_number}")
            self._count(len(content) > 0)
            if content:
                yield Piece(content, True, True, path, 0, self._place(number, offset, line_number, check))

    def _rows(self, number: int, row: int) -> Iterator[Piece]:
        """The documents of a parquet file's rows."""
        path, before = self.paths[number], self.num_read_bytes
        size = path.stat().st_size
        for text, share in parquet.parquet_texts(path, self.field, row):
            row += 1
            content = text.encode()
            self.num_read_bytes = before + int(size * share)
            self._count(len(content) > 0)
            if content:
                yield Piece(content, True, True, path, 0, self._place(number, row))
        self.num_read_bytes = before + size

    def _place(self, file: int, offset: int, line: int = 0, check: int = 0) -> Place:
        return Place(file, offset, line, self.num_documents, self.num_empty, check)

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


def _skipped(file: BinaryIO, path: Path, start: Place) -> int:
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
