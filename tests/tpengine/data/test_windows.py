"""Rung: pure. A document in windows has the ids of the whole, for each kind of tokenizer, wherever it is cut."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from support.architectures.trained_tokenizers import KINDS, hard_text, long_words, saved_tokenizer

from tpengine.data import windows as module
from tpengine.data.windows import Joining, TextPart, cut, encoded
from tpengine.tokenizer import TextTokenizer

WHOLE, SIZE, OVERLAP = 700, 400, 96


def parts_of(text: str, *places: int) -> list[TextPart]:
    """A document's parts, cut at these places."""
    borders = [0, *places, len(text)]
    return [TextPart(text[a:b], a == 0, b == len(text), Path("some.txt")) for a, b in pairwise(borders)]


def joined(tokenizer: TextTokenizer, text: str) -> tuple[list[int], int]:
    """The ids of a document in windows, and the number of windows."""
    joining, ids = Joining(tokenizer), []
    windows = list(cut(parts_of(text, len(text) // 4, len(text) // 4), WHOLE, SIZE, OVERLAP))
    for window, encoding in zip(windows, encoded(tokenizer, windows), strict=True):
        ids += joining.add(window, encoding)
    return ids, len(windows)


@pytest.mark.parametrize("length", [1, 400, 401, 699, 700, 701, 704, 705, 2000])
def test_windows_are_the_document(length: int) -> None:
    text = hard_text(random.Random(length), length)[:length]
    windows = list(cut(parts_of(text, length // 3, length // 2), WHOLE, SIZE, OVERLAP))
    assert text == "".join(window.text[window.overlap :] for window in windows)
    for number, window in enumerate(windows):
        first, last = number == 0, number == len(windows) - 1
        assert (window.begins, window.ends, window.overlap) == (first, last, 0 if first else OVERLAP)
        if last:
            assert window.overlap < len(window.text) <= (WHOLE if first else SIZE)
        else:
            assert len(window.text) == SIZE
        assert first or window.text[:OVERLAP] == windows[number - 1].text[-OVERLAP:]


@pytest.mark.by_default("gpt2", "llama2")
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
    for number in range(80):
        text = (hard_text, long_words)[number % 2](rng, 3000)
        ids, num = joined(tokenizer, text)
        assert ids == tokenizer.encode([text])[0].ids
        num_windows += num
    # Both ways were gone.
    assert 0 < together < num_windows / 2


def test_the_ids_of_windows_alone_are_others(tmp_path: Path) -> None:
    """What the joining is for; without it the comparison above is red."""
    tokenizer = TextTokenizer(saved_tokenizer(tmp_path, "llama2"))
    text = hard_text(random.Random(7), 3000)
    windows = [window.text for window in cut(parts_of(text), SIZE, SIZE, 0)]
    assert "".join(windows) == text
    apart = chain(*(encoding.ids for encoding in tokenizer.encode(windows)))
    assert list(apart) != tokenizer.encode([text])[0].ids


def at_the_middle(left: Any, right: Any, **_: bool) -> tuple[int, int]:
    """Where the overlap's middle is, whatever the tokens there are."""
    shift, middle = len(left.window.text) - OVERLAP, OVERLAP // 2
    places = [begin for begin, _ in left.places], [begin for begin, _ in right.places]
    return bisect_left(places[0], middle + shift), bisect_left(places[1], middle)


def at_the_end(left: Any, right: Any, **_: bool) -> tuple[int, int]:
    """After all tokens of the left window."""
    return len(left.ids), bisect_left([begin for begin, _ in right.places], OVERLAP)


def one_token_too_late(left: Any, right: Any, **options: bool) -> tuple[int, int] | None:
    found = MEETING(left, right, **options)
    return None if found is None else (found[0], found[1] + 1)


def at_an_equal_id(left: Any, right: Any, **_: bool) -> tuple[int, int] | None:
    """Ids alone are compared, and not their places."""
    for i in range(len(left.ids) - 1, 0, -1):
        if left.ids[i] in right.ids:
            return i, right.ids.index(left.ids[i])
    return None


MEETING = module._meeting
MUTANTS = (at_the_middle, at_the_end, one_token_too_late, at_an_equal_id)


def test_joining_elsewhere_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count_mutations: Callable[[str, int, int], None]
) -> None:
    unnoticed = []
    kinds = [kind for kind in KINDS if kind != "unigram"]  # whose tokens of these words are single letters, wherever
    for kind in kinds:
        tokenizer, rng = TextTokenizer(saved_tokenizer(tmp_path, kind)), random.Random(7)
        texts = [draw(rng, 3000) for draw in (hard_text, long_words) for _ in range(15)]
        for mutant in MUTANTS:
            monkeypatch.setattr(module, "_meeting", mutant)
            if all(joined(tokenizer, text)[0] == tokenizer.encode([text])[0].ids for text in texts):
                unnoticed.append((kind, mutant.__name__))
    count_mutations("windows of long documents", len(kinds) * len(MUTANTS) - len(unnoticed), len(kinds) * len(MUTANTS))
    assert not unnoticed


def test_a_run_that_has_two_readings_is_not_cut(tmp_path: Path) -> None:
    """Equal tokens of one letter agree at many places, and a unigram model weighs all of the word."""
    for kind in KINDS:
        tokenizer = TextTokenizer(saved_tokenizer(tmp_path, kind))
        for length in (701, 1000, 1001):
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
