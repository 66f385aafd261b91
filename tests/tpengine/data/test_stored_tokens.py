"""Rung: pure. Tokens are read from their file, and a file that is cut short or copied over is named, not fatal.

Token files that know their documents: what is written comes back, and what is damaged is refused.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpengine.config import IGNORED_LABEL, Config, DataConfig, ModelConfig, TrainConfig
from tpengine.data import Samples, StoredTokens, open_corpus, open_tokens, stored_tokens, write_tokens
from tpengine.data import stored_tokens as module
from tpengine.data.source_files import About
from tpengine.data.stored_tokens import DocumentTokens

TOKENS = np.arange(3000) * 7 % 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "some.tokens", TOKENS, 1000)
    return tmp_path / "some.tokens"


def stored(path: Path) -> StoredTokens:
    tokens = open_tokens(path).tokens
    assert isinstance(tokens, StoredTokens)
    return tokens


@pytest.mark.parametrize("place", [slice(None), slice(5, 9), slice(9, 5), slice(-4, None), slice(2995, 9999)])
def test_slices_and_parts_are_those_of_the_array(path: Path, place: slice) -> None:
    tokens = stored(path)
    np.testing.assert_array_equal(tokens[place], TOKENS[place])
    part = tokens.part(100, 2990)
    assert len(part) == 2890 and part.dtype == np.uint16
    np.testing.assert_array_equal(part[place], TOKENS[100:2990][place])
    np.testing.assert_array_equal(part.part(10, 9999)[place], TOKENS[110:2990][place])


def test_pieces_are_the_bytes_of_all(path: Path) -> None:
    pieces = list(stored(path).part(1, 3000).pieces(700))
    assert [len(piece) for piece in pieces] == [1400] * 4 + [398]
    assert b"".join(pieces) == TOKENS[1:].astype("<u2").tobytes()


def test_a_read_that_stops_early_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call may return less than was asked for."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 100), offset))
    np.testing.assert_array_equal(stored(path)[:], TOKENS)


def test_a_file_cut_short_while_it_is_read_is_named(path: Path) -> None:
    samples = Samples(stored(path), 100, 1000)
    samples.batch(0, 29)
    os.truncate(path, 1064)
    samples.batch(0, 4)
    with pytest.raises(ValueError) as error:
        samples.batch(0, 29)
    assert str(error.value) == (
        f"a token file must not be cut short while it is read: {path} has 1064 bytes now and needs 1066: restore it "
        "and continue with --resume; rename a new file over it instead of copying"
    )


def test_a_file_cut_short_and_gone_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask for its size may fail, where the read has not."""

    def gone(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    tokens = stored(path)
    os.truncate(path, tokens.offset + 20)
    monkeypatch.setattr(module.OpenFile, "identity", gone)
    for begin, most in ((0, 20), (100, 200)):
        with pytest.raises(ValueError, match=rf"some\.tokens has at most {tokens.offset + most} bytes now and needs"):
            tokens[begin:300]


def test_a_file_renamed_over_it_changes_nothing(path: Path) -> None:
    tokens = stored(path)
    write_tokens(path, TOKENS[::-1], 1000)
    np.testing.assert_array_equal(tokens[:], TOKENS)
    np.testing.assert_array_equal(stored(path)[:], TOKENS[::-1])


def test_a_disk_that_fails_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    tokens = stored(path)
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ValueError, match=r"must be readable: .*some\.tokens: Input/output error: correct that"):
        tokens[:1]


def test_a_file_may_be_dropped_while_another_makes_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector of garbage may run between the list of what is open and the look at it."""

    class Dropping(OrderedDict[int, Any]):
        def __iter__(self) -> Iterator[int]:
            yield from list(super().__iter__())
            dropped.clear()

    for name, value in (("_OPEN", Dropping()), ("_SOME_OPEN", 2), ("_most_open", lambda: 2)):
        monkeypatch.setattr(module, name, value)
    before = len(os.listdir("/proc/self/fd"))
    dropped = [module.OpenFile(path)]
    files = [module.OpenFile(path) for _ in range(3)]
    assert not dropped and len(os.listdir("/proc/self/fd")) == before + 2
    assert len({file.read(0, 100) for file in files}) == 1
    del files[:]
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_closed_and_not_sent_to_other_processes(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tokens = stored(path)
    part = tokens.part(0, 10)
    del tokens
    assert part[:2].tolist() == [0, 7]
    with pytest.raises(TypeError, match=r"open .*some\.tokens there"):
        pickle.dumps(part)
    del part
    assert len(os.listdir("/proc/self/fd")) == before


def written(path: Path, lengths: list[int], vocab_size: int = 300, **about: object) -> DocumentTokens:
    tokens = np.arange(sum(lengths)) % vocab_size
    write_tokens(path, tokens, vocab_size, lengths=lambda: lengths, about=About(**about))  # type: ignore[arg-type]
    found = open_tokens(path).tokens
    assert isinstance(found, DocumentTokens)
    return found


@pytest.mark.parametrize("most_kept", [0, 1 << 14], ids=["searched on disk", "kept"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=400),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    vocab_size=st.sampled_from([200, 300, 70_000]),
)
def test_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    cut: tuple[float, float],
    vocab_size: int,
    most_kept: int,
) -> None:
    monkeypatch.setattr(stored_tokens, "_MOST_KEPT", most_kept)
    tokens = written(tmp_path_factory.mktemp("documents") / "t", lengths, vocab_size)
    starts = np.array([0, *accumulate(lengths)][:-1])
    assert len(tokens) == sum(lengths) and len(tokens.starts) == len(lengths)
    assert tokens[:].tolist() == (np.arange(sum(lengths)) % vocab_size).tolist()
    begin, end = sorted(int(share * len(tokens)) for share in cut)
    assert tokens.document_starts(begin, end).tolist() == starts[(starts >= begin) & (starts < end)].tolist()
    # A part of a part counts from its own first token.
    part = tokens.part(begin, len(tokens)).part(0, end - begin)
    assert part.document_starts(0, end).tolist() == (tokens.document_starts(begin, end) - begin).tolist()


def test_a_file_says_what_made_it(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(b"tokenizer").hexdigest()
    written(tmp_path / "t", [3, 4], begin=None, end=7, tokenizer="a" * 200, tokenizer_sha256=sha256)
    file = open_tokens(tmp_path / "t")
    starts = np.array([0, 3], dtype="<u8").tobytes()
    assert file.about == About(None, 7, "a" * 128, sha256, 6, hashlib.sha256(starts).hexdigest())
    content = (tmp_path / "t").read_bytes()
    assert file.sha256 == hashlib.sha256(content[512 : 512 + 14]).hexdigest()
    assert content[-16:] == starts and len(content) % 8 == 0


def test_places_beyond_32_bits_are_read(tmp_path: Path) -> None:
    """A sparse file: three documents, the second longer than 2^32 tokens."""
    path, middle = tmp_path / "t", 2**32 + 5
    small = written(path, [1, 2], vocab_size=200)
    assert len(small) == 3
    content = bytearray(path.read_bytes()[:512])
    count = middle + 3
    offset = 512 + count + -(512 + count) % 8
    content[24:32] = count.to_bytes(8, "little")
    content[64:80] = (3).to_bytes(8, "little") + offset.to_bytes(8, "little")
    with path.open("wb") as file:
        file.write(content)
        file.seek(512 + middle)
        file.write(bytes([9, 8, 7]))
        file.seek(offset)
        file.write(np.array([0, 1, middle], dtype="<u8").tobytes())
    tokens = open_tokens(path).tokens
    assert isinstance(tokens, DocumentTokens) and len(tokens) == count
    assert tokens.document_starts(2**32, count).tolist() == [middle]
    assert tokens[middle:count].tolist() == [9, 8, 7]
    assert tokens.part(middle, count).document_starts(0, 3).tolist() == [0]


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (64, 3, "has 552 bytes, its documents' starts last"),
        (72, 512, "damaged"),
        (16, 3, "must be below its vocabulary"),
        (88, 400, "ends them with 400"),
        (528, 1, "begin at token 0"),
        (536, 90, "begin at token 0"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, place: int, value: int, part: str) -> None:
    path = tmp_path / "t"
    written(path, [3, 4])
    content = bytearray(path.read_bytes())
    assert len(content) == 512 + 16 + 16
    content[place : place + 8] = value.to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        open_tokens(path)
    assert part in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)
    path.write_bytes(content[:300])
    with pytest.raises(ValueError, match="at least 512 bytes"):
        open_tokens(path)


@pytest.mark.parametrize(("lengths", "part"), [([3, 0, 4], "at least 1 token"), ([3, 5], "they have 8 of 7")])
def test_lengths_that_do_not_fit_leave_no_file(tmp_path: Path, lengths: list[int], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        write_tokens(tmp_path / "t", np.arange(7), 300, lengths=lambda: lengths)
    assert not list(tmp_path.iterdir())


def config_of(path: Path, **data: object) -> Config:
    return Config(
        model=ModelConfig(vocab_size=300),
        train=TrainConfig(seq_len=8),
        data=DataConfig(path=str(path), **data),  # type: ignore[arg-type]
    )


def test_the_held_out_text_begins_with_a_document(tmp_path: Path) -> None:
    written(tmp_path / "t", [40, 30, 20, 10])
    assert len(open_corpus(config_of(tmp_path / "t", held_out_fraction=0.2)).train.tokens) == 70
    assert len(open_corpus(config_of(tmp_path / "t", held_out_fraction=0.1)).train.tokens) == 90
    # The document that 0.7 of the text would cut is the first: the next one begins the held-out text.
    assert len(open_corpus(config_of(tmp_path / "t", held_out_fraction=0.7)).train.tokens) == 40


def test_labels_across_a_border_are_ignored(tmp_path: Path) -> None:
    lengths = [3, 1, 5, 7, 64, 20]
    written(tmp_path / "t", lengths)
    config = config_of(tmp_path / "t", held_out_fraction=0.15, packing="documents")
    samples = open_corpus(config).train
    plain = open_corpus(config_of(tmp_path / "t", held_out_fraction=0.15)).train
    numbers = np.arange(samples.num_windows)
    (tokens, labels), (same, whole) = samples.read(numbers), plain.read(numbers)
    np.testing.assert_array_equal(tokens, same)
    starts = [0, *accumulate(lengths)]
    for row, of_row in zip(tokens, samples.document_starts(numbers), strict=True):
        window = int(row[0])
        assert of_row.tolist() == [start - window for start in starts if window < start < window + 8]
    across = np.isin(whole, starts)
    assert across.any() and (labels[across] == IGNORED_LABEL).all()
    np.testing.assert_array_equal(labels[~across], whole[~across])


def test_packing_needs_documents(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", np.arange(200), 300)
    with pytest.raises(ValueError, match=r"needs to know where documents begin: .*/t does not say"):
        open_corpus(config_of(tmp_path / "t", packing="documents"))
