"""Rung: pure. A document in windows has the ids of the whole, for each kind of tokenizer, wherever it is cut."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from support.architectures.trained_tokenizers import KINDS, hard_text, saved_tokenizer

from tpengine.data.text import windows as module
from tpengine.data.text.tokenizer import TextTokenizer
from tpengine.data.text.windows import Joining, Part, cut, encoded

SIZE, OVERLAP = 400, 96


def parts_of(text: str, *places: int) -> list[Part]:
    """A document's parts, cut at these places."""
    borders = [0, *places, len(text)]
    return [Part(text[a:b], a == 0, b == len(text), Path("some.txt")) for a, b in pairwise(borders)]


def joined(tokenizer: TextTokenizer, text: str, size: int = SIZE, overlap: int = OVERLAP) -> tuple[list[int], int]:
    """The ids of a document in windows, and the number of windows."""
    joining, ids = Joining(tokenizer), []
    windows = list(cut(parts_of(text, len(text) // 4, len(text) // 4), size, overlap))
    for window, encoding in zip(windows, encoded(tokenizer, windows), strict=True):
        ids += joining.add(window, encoding)
    return ids, len(windows)


@pytest.mark.parametrize("length", [1, 399, 400, 401, 704, 705, 2000])
def test_windows_are_the_document(length: int) -> None:
    text = hard_text(random.Random(length), length)[:length]
    windows = list(cut(parts_of(text, length // 3, length // 2), SIZE, OVERLAP))
    assert text == "".join(window.text[window.overlap :] for window in windows)
    for number, window in enumerate(windows):
        first, last = number == 0, number == len(windows) - 1
        assert (window.begins, window.ends, window.overlap) == (first, last, 0 if first else OVERLAP)
        assert len(window.text) == SIZE or (last and len(window.text) > window.overlap)
        assert first or window.text[:OVERLAP] == windows[number - 1].text[-OVERLAP:]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_whole(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, rng = TextTokenizer(saved_tokenizer(tmp_path, kind)), random.Random(7)
    together = 0
    merge = Joining._together

    def counted(*arguments: object) -> object:
        nonlocal together
        together += 1
        return merge(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Joining, "_together", counted)
    num_windows = 0
    for _ in range(60):
        text = hard_text(rng, 3000)
        ids, num = joined(tokenizer, text)
        assert ids == tokenizer.encode([text])[0].ids
        num_windows += num
    # Both ways were gone.
    assert 0 < together < num_windows / 2


def test_the_ids_of_windows_alone_are_others(tmp_path: Path) -> None:
    """What the joining is for; without it the comparison above is red."""
    tokenizer = TextTokenizer(saved_tokenizer(tmp_path, "llama2"))
    text = hard_text(random.Random(7), 3000)
    apart = [number for window in cut(parts_of(text), SIZE, 0) for number in tokenizer.encode([window.text])[0].ids]
    assert apart != tokenizer.encode([text])[0].ids


def test_a_run_that_has_two_readings_is_not_cut(tmp_path: Path) -> None:
    """Equal tokens of one letter agree at many places, and a unigram model weighs all of the word."""
    for kind in KINDS:
        tokenizer = TextTokenizer(saved_tokenizer(tmp_path, kind))
        for length in (401, 1000, 1001):
            for letter in "a =":
                text = f"x = {letter * length}b"
                assert joined(tokenizer, text)[0] == tokenizer.encode([text])[0].ids, (kind, letter, length)


def test_a_document_that_can_be_cut_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TextTokenizer(saved_tokenizer(tmp_path, "unigram"))
    monkeypatch.setattr(module, "MOST_CHARACTERS", 2000)
    assert joined(tokenizer, "a" * 2000)[0] == tokenizer.encode(["a" * 2000])[0].ids
    with pytest.raises(ValueError) as error:
        joined(tokenizer, "a" * 3000)
    message = str(error.value)
    assert message.startswith(
        "a document must have places where its tokens do not depend on what is far away: some.txt"
    )
    assert "2,224 characters without one" in message and message.endswith("or use --tokenizer bytes")
