"""Documents: a text file is one; of a .jsonl file each line is one.

A document comes in pieces of bytes, so that a text of many gigabytes is never in memory; a line of JSONL is one piece.
What the bytes become, tokens of a tokenizer or tokens themselves, is decided in encode.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_READ_BYTES = 1 << 20
_JSONL = ".jsonl"


class Piece(NamedTuple):
    """A part of a document, never empty.

    Attributes:
        content: its bytes.
        begins, ends: whether it is the document's first, its last.
        path: the file that it was read from.
        offset: of its first byte: in a text file, or in the text of a line.
    """

    content: bytes
    begins: bool
    ends: bool
    path: Path
    offset: int


class Documents:
    """The documents of files, in order; iterate once.

    Args:
        paths: text files, and files of JSON lines, whose names end in .jsonl.
        field: of a JSON line, has the text.

    Attributes:
        num_bytes: of all files.
        num_read_bytes: so far.
        num_documents: begun so far, without those that are empty.
        num_empty: empty ones so far, which are left out.

    Raises:
        ValueError: when it comes to a line that is no object with a text in that field.
        OSError: when it comes to a file that cannot be read.
    """

    def __init__(self, paths: Sequence[Path], field: str = "text") -> None:
        self._paths, self._field = paths, field
        self.num_bytes = sum(path.stat().st_size for path in paths)
        self.num_read_bytes = self.num_documents = self.num_empty = 0

    def __iter__(self) -> Iterator[Piece]:
        for path in self._paths:
            yield from self._lines(path) if path.suffix == _JSONL else self._whole(path)

    def _whole(self, path: Path) -> Iterator[Piece]:
        """A text file, which is one document."""
        with path.open("rb") as file:
            offset, content = 0, file.read(_READ_BYTES)
            self._count(len(content) > 0)
            while content:
                self.num_read_bytes += len(content)
                # Only the next piece says whether this is the last.
                following = file.read(_READ_BYTES)
                yield Piece(content, offset == 0, not following, path, offset)
                offset, content = offset + len(content), following

    def _lines(self, path: Path) -> Iterator[Piece]:
        """The documents of a file of JSON lines; blank lines are none."""
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                self.num_read_bytes += len(line)
                if line.isspace():
                    continue
                content = self._text_of(line.strip(), f"{path}, line {number}")
                self._count(len(content) > 0)
                if content:
                    yield Piece(content, True, True, path, 0)

    def _count(self, has_text: bool) -> None:
        self.num_documents += has_text
        self.num_empty += not has_text

    def _text_of(self, line: bytes, where: str) -> bytes:
        remedy = "correct the line, or name the field with --field"
        try:
            values = json.loads(line.decode())
            if not isinstance(values, dict):
                problem = f"is {type(values).__name__}"
            elif self._field not in values:
                problem = f"has {', '.join(map(repr, list(values)[:5])) or 'no fields'}"
            elif not isinstance(values[self._field], str):
                problem = f"has {type(values[self._field]).__name__} there"
            else:
                text: str = values[self._field]
                return text.encode()
        except UnicodeEncodeError:
            problem = "has half of a surrogate pair there"
        except (ValueError, RecursionError) as error:
            problem = f"is none: {str(error)[:80]}"
        raise ValueError(
            f"a line of JSONL must be an object with a text in {self._field!r}: {where} {problem}: {remedy}"
        ) from None
