"""Text on its way to a terminal: what controls one is shown, not obeyed. No torch.

Names and values out of files of others stand in errors, tables and lines of progress. A terminal obeys the escape
sequences in them: it hides text, retitles its window, types into itself. So whatever leaves a process of ours on
standard output or standard error is made harmless there, at the exit, where no caller can forget it: `terminal_safe`
takes the place of both streams, and SafeConsole (observe/safe_console.py) is the only console, whose own sequences
pass and those in texts do not. What is written anywhere else, as to torchrun's error file, goes through `escaped`.

The decision a reader will question: another console is not refused. Its colours come out as text, which is seen at
once.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, TextIO, cast

# C0 but tab and newline, DEL, C1, marks that turn the direction of text, separators of lines, halves of surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    r"""Return a text with every character that controls a terminal as Python writes it: `\x1b`, `\u202e`."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _SafeStream:
    """A text stream whose texts are shown as `escaped` has them; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text, with what the stream's encoding lacks escaped too."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.stream.write(escaped(text).encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def terminal_safe() -> Iterator[None]:
    """Have standard output and standard error show what controls a terminal, until the block ends."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_safe(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _safe(stream: TextIO) -> TextIO:
    return stream if stream is None or isinstance(stream, _SafeStream) else cast(TextIO, _SafeStream(stream))


def raw(stream: IO[str]) -> IO[str]:
    """Return the stream below, for what is to control a terminal, or for a text that is data; escape the rest."""
    return cast(IO[str], stream.stream) if isinstance(stream, _SafeStream) else stream


def write_text(text: str) -> None:
    """Write a text that is data to standard output at once: shown to a terminal, and as it is to a file or a pipe."""
    (sys.stdout if sys.stdout.isatty() else raw(sys.stdout)).write(text)
    sys.stdout.flush()
