"""A long document encoded in windows, with the ids of the whole.

A tokenizer gives a text other ids if the text is cut anywhere: it joins bytes over the cut, or marks the beginning of
each part. So windows overlap. In the overlap both windows have ids for the same characters; where a run of tokens is
the same in both, at the same places, the left window's ids are taken up to the middle of the run and the right one's
from there.

Why this gives the ids of the whole: words, into which a text is split first, have ids of their own, so that a run
around the border of two words decides it. Inside a word, which both windows must be in, byte pairs are merged by their
neighbours alone: a sequence of tokens is what the merges give if each two neighbours are what the merges give for their
own text (van Antwerpen, "So many tokens, so little time", GitHub 2024), and here each two neighbours stand together in
one window. Normalising, and splitting into words, look at a few characters around, for which the ends of an overlap
leave room.

Windows that agree nowhere, as inside one very long word, are encoded together, as one that grows.

What the library does itself with a long text: it encodes all of it at once, in memory, at 150 to 200 bytes a character.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tpengine.data.documents import BEGINNING, DocumentPlace
from tpengine.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

# Places of tokens cost the library more the longer a text is: of 4.6 MB of Python, with an AMD EPYC, windows of 2**17
# characters take 4.2 s, of 2**14 2.3 s; whole documents, which need no places, 1.6 s.
WHOLE_CHARACTERS = 1 << 17
WINDOW_CHARACTERS = 1 << 14
OVERLAP_CHARACTERS = 1 << 11
# Beyond this a document is refused: windows that agree nowhere are encoded as one again with each that is added, 6 s
# until here.
MOST_CHARACTERS = 1 << 19

_RUN_TOKENS = 8


class TextPart(NamedTuple):
    """A part of a document, as text; may be empty.

    Attributes:
        text: of the part.
        begins, ends: whether it is the document's first, its last.
        path: the file that it was read from.
        after: where reading goes on, of a document's last part.
    """

    text: str
    begins: bool
    ends: bool
    path: Path
    after: DocumentPlace = BEGINNING


class Window(NamedTuple):
    """A part of a document that is encoded at once; overlaps the one before it, unless it begins the document.

    Attributes:
        text: never empty.
        begins, ends: whether it begins the document, ends it.
        path: the file that it was read from.
        overlap: how many of its first characters are the last ones of the window before it.
        after: where reading goes on, of a document's last window.
    """

    text: str
    begins: bool
    ends: bool
    path: Path
    overlap: int
    after: DocumentPlace = BEGINNING


class Encoded(NamedTuple):
    """What an encoding of the library has, from another process."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    word_ids: list[int | None]


def cut(
    parts: Iterable[TextPart],
    whole: int = WHOLE_CHARACTERS,
    size: int = WINDOW_CHARACTERS,
    overlap: int = OVERLAP_CHARACTERS,
) -> Iterator[Window]:
    """Yield the windows of documents.

    Args:
        parts: of documents, in order.
        whole: a document of at most so many characters is one window.
        size: characters of a window of a longer one, but for its last window, which may be shorter.
        overlap: characters that two neighbours share.
    """
    text, begins = "", True
    for part in parts:
        text += part.text
        place = 0
        while len(text) - place > (whole if begins else size):
            yield Window(text[place : place + size], begins, False, part.path, 0 if begins else overlap)
            begins, place = False, place + size - overlap
        text = text[place:]
        if part.ends:
            yield Window(text, begins, True, part.path, 0 if begins else overlap, part.after)
            text, begins = "", True


def encoded(tokenizer: TextTokenizer, windows: Sequence[Window]) -> list[Encoding]:
    """Return the encodings of windows, with the places of tokens where some document has several windows."""
    with_places = not all(window.begins and window.ends for window in windows)
    return tokenizer.encode([window.text for window in windows], with_places)


@dataclass
class _Open:
    """The last window of a document that has not ended.

    Attributes:
        places: of each token, its first character and the one after its last.
        words: of each token, the number of its word; None for a token that is none.
        num_given: how many of its first tokens have been given, or were the window's before it.
    """

    window: Window
    ids: list[int]
    places: list[tuple[int, int]]
    words: list[int | None]
    num_given: int

    @classmethod
    def of(cls, window: Window, encoding: Encoding | Encoded, num_given: int = 0) -> _Open:
        """Return a window with its encoding, each list of which the library makes anew when it is asked for."""
        return cls(window, encoding.ids, encoding.offsets, encoding.word_ids, num_given)

    def is_border(self, index: int) -> bool:
        """Whether a token begins a word."""
        return self.words[index - 1] != self.words[index]


class Joining:
    """Takes the windows of documents in order, and gives the ids of the documents.

    Args:
        tokenizer: encodes windows together that agree nowhere.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._open: _Open | None = None

    def add(self, window: Window, encoding: Encoding | Encoded) -> list[int]:
        """Return the ids that are certain now; with a document's last window all that are left.

        Args:
            window: follows the one of the call before.
            encoding: of its text; with places if the document has several windows.

        Raises:
            ValueError: windows that agree nowhere have grown beyond MOST_CHARACTERS.
        """
        if window.begins and window.ends:
            return encoding.ids
        right = _Open.of(window, encoding)
        given: list[int] = []
        if self._open is not None:
            left = self._open
            found = _meeting(left, right, only_borders=not self._tokenizer.merges_pairs)
            if found is None:
                right = self._together(left, window)
            else:
                last, right.num_given = found
                given = left.ids[left.num_given : last]
        self._open = None if window.ends else right
        return given + right.ids[right.num_given :] if window.ends else given

    def _together(self, left: _Open, window: Window) -> _Open:
        """Return both windows as one, of which as much has been given as of the left one."""
        text = left.window.text + window.text[window.overlap :]
        if len(text) > MOST_CHARACTERS:
            raise self._refusal(window, len(text))
        (encoding,) = self._tokenizer.encode([text], with_places=True)
        both = Window(text, left.window.begins, window.ends, window.path, left.window.overlap)
        # More text on the right must not change what was given.
        if encoding.ids[: left.num_given] != left.ids[: left.num_given]:
            raise self._refusal(window, len(text))
        return _Open.of(both, encoding, left.num_given)

    @staticmethod
    def _refusal(window: Window, num_characters: int) -> ValueError:
        return ValueError(
            f"a document must have places where its tokens do not depend on what is far away: {window.path} has "
            f"{num_characters:,} characters without one: split or leave out such words, or use --tokenizer bytes"
        )


def _meeting(left: _Open, right: _Open, only_borders: bool) -> tuple[int, int] | None:
    """Return before which token of the left window its ids end, and from which of the right one they go on.

    Args:
        left, right: neighbours.
        only_borders: whether both must begin a word there; else that is preferred.

    Returns:
        Both tokens; None if no run of tokens agrees within the overlap, its two outer quarters left out.
    """
    overlap = right.window.overlap
    low, high = overlap // 4, overlap - overlap // 4
    shift = len(left.window.text) - overlap
    at_right = dict(_starts(right, low, high))
    inside: tuple[int, int] | None = None
    for begin, i in _starts(left, low + shift, high + shift):
        j = at_right.get(begin - shift)
        if j is None or not _agree(left, i, right, j, shift, high):
            continue
        middle = i + _RUN_TOKENS // 2, j + _RUN_TOKENS // 2
        if left.is_border(middle[0]) and right.is_border(middle[1]):
            return middle
        inside = inside or middle
    return None if only_borders else inside


def _starts(window: _Open, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield (place, token) for the first token at each place in [low, high); a character may be several tokens."""
    places = window.places
    for index in range(bisect_left(places, (low, 0)), len(places)):
        begin = places[index][0]
        if begin >= high:
            return
        if index == 0 or places[index - 1][0] != begin:
            yield begin, index


def _agree(left: _Open, i: int, right: _Open, j: int, shift: int, high: int) -> bool:
    """Whether a run of tokens is the same, at the same places, before `high` of the right window, in the same words."""
    at_left, at_right = range(i, i + _RUN_TOKENS), range(j, j + _RUN_TOKENS)
    if left.ids[i : at_left.stop] != right.ids[j : at_right.stop] or at_right.stop > len(right.ids):
        return False
    if right.places[at_right.stop - 1][1] > high:
        return False
    if left.places[i : at_left.stop] != [(a + shift, b + shift) for a, b in right.places[j : at_right.stop]]:
        return False
    return all(left.is_border(a) == right.is_border(b) for a, b in zip(at_left[1:], at_right[1:], strict=True))
