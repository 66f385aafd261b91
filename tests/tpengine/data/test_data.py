"""Rung: pure. Token files refuse damage, samples are a function of seed and index, every dp split sees the same."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.config import IGNORED_LABEL, Config, DataConfig, ModelConfig, TrainConfig
from tpengine.data import (
    Samples,
    batch_digest,
    first_sample_index,
    open_corpus,
    open_tokens,
    permute,
    stdlib_text,
    write_tokens,
)
from tpengine.data.order.permutation import permute_one
from tpengine.data.text.documents import Documents
from tpengine.data.text.encode import bytes_of

HEADER = struct.Struct("<8sIIQQ")
ORDER_OF_TEN = [4, 0, 6, 2, 3, 5, 1, 9, 8, 7]
DIGEST_OF_FOUR = 4831835340026645102
ORDER_OF_MANY = [569018263, 356346270, 537971295, 325450371]


def counting(num_tokens: int, seq_len: int, **options: Any) -> Samples:
    """Samples of the text 0, 1, 2, ...: a token is its own position."""
    return Samples(np.arange(num_tokens, dtype=np.uint32), seq_len, num_tokens, **options)


def config_of(path: str | Path, **options: Any) -> Config:
    return Config(
        model=ModelConfig(vocab_size=options.pop("vocab_size", 256)),
        train=TrainConfig(seq_len=options.pop("seq_len", 16), eval_micro_batches=options.pop("evaluate", 1)),
        data=DataConfig(path=str(path), **options),
    )


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 4), (2**32, 4)])
def test_tokens_come_back_in_the_smallest_dtype(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    tokens = np.array([0, vocab_size - 1, vocab_size // 2], dtype=np.int64)
    path = tmp_path / "some.tokens"
    assert write_tokens(path, tokens, vocab_size) == 3
    assert path.stat().st_size == 64 + 3 * itemsize
    read = open_tokens(path)
    assert read.vocab_size == vocab_size
    assert read.tokens.dtype.itemsize == itemsize
    assert not read.tokens[:].flags.writeable
    np.testing.assert_array_equal(read.tokens[:], tokens)


def test_pieces_are_joined(tmp_path: Path) -> None:
    pieces = (np.full(size, size, dtype=np.uint8) for size in (3, 0, 2))
    assert write_tokens(tmp_path / "t", pieces, 4) == 5
    assert open_tokens(tmp_path / "t").tokens[:].tolist() == [3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "parts"),
    [
        (np.array([3, 10]), 10, ["below vocab_size", "10", "use vocab_size 11"]),
        (np.array([3, -1]), 10, ["at least 0", "-1"]),
        (np.array([0.5]), 10, ["integers", "float64"]),
        (np.array([], dtype=np.uint8), 10, ["at least 1 token"]),
        (np.array([0]), 0, ["vocab_size must be at least 1", "0"]),
        (np.array([0]), 2**32 + 1, ["vocab_size", "2**32"]),
    ],
)
def test_what_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, tokens: np.ndarray[Any, Any], vocab_size: int, parts: list[str]
) -> None:
    path = tmp_path / "t"
    write_tokens(path, np.array([1, 2]), 3)
    with pytest.raises(ValueError) as error:
        write_tokens(path, tokens, vocab_size)
    for part in parts:
        assert part in str(error.value)
    assert open_tokens(path).tokens[:].tolist() == [1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_is_one_line_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "t"
    write_tokens(path, np.array([1, 2]), 3)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), ".t.temporary")

    with monkeypatch.context() as patch, pytest.raises(ValueError) as error:
        patch.setattr(os, call, fail)
        write_tokens(path, np.array([2, 2]), 3)
    assert str(error.value) == (
        f"a token file must be writable: {path}: No space left on device: correct that or choose another file"
    )
    assert open_tokens(path).tokens[:].tolist() == [1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_source_that_fails_is_not_taken_for_the_output(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"text")
    documents = Documents([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "b").unlink()
    with pytest.raises(ValueError) as error:
        write_tokens(tmp_path / "t", (chunk.ids for chunk in bytes_of(documents)), 256)
    assert str(error.value) == (
        f"the text must be readable: {tmp_path / 'b'}: No such file or directory: correct that or leave it out"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_file_that_may_not_be_replaced_is_left(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_tokens(path, np.array([1, 2]), 3, replaces=False)
    with pytest.raises(ValueError, match=r"must be new: .*/t is there: remove it first, or choose another file"):
        write_tokens(path, np.array([2, 2]), 3, replaces=False)
    assert open_tokens(path).tokens[:].tolist() == [1, 2]


GOOD = HEADER.pack(b"TPTOKENS", 1, 2, 300, 5).ljust(64, b"\0") + bytes(10)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["at least 64 bytes", "has 0"]),
        (GOOD[:63], ["at least 64 bytes", "has 63"]),
        (b"PK" + GOOD[2:], ["starts with b'TPTOKENS'", "PKTOKENS"]),
        (HEADER.pack(b"TPTOKENS", 3, 2, 300, 5).ljust(74, b"\0"), ["version must be 1 or 2", "has 3"]),
        (HEADER.pack(b"TPTOKENS", 1, 3, 300, 5).ljust(74, b"\0"), ["dtype code must be 1, 2 or 4", "has 3"]),
        (HEADER.pack(b"TPTOKENS", 1, 1, 300, 10).ljust(74, b"\0"), ["1 to 256 for 1-byte tokens", "has 300"]),
        (HEADER.pack(b"TPTOKENS", 1, 2, 0, 5).ljust(74, b"\0"), ["1 to 65536", "has 0"]),
        (HEADER.pack(b"TPTOKENS", 1, 2, 300, 0).ljust(64, b"\0"), ["at least 1 token", "has 0"]),
        (GOOD[:-1], ["5 2-byte tokens", "74 bytes", "has 73", "cut short"]),
        (GOOD + b"x", ["74 bytes", "has 75", "too long"]),
        (HEADER.pack(b"TPTOKENS", 1, 2, 300, 2**63).ljust(74, b"\0"), [str(64 + 2**64), "has 74", "cut short"]),
    ],
)
def test_damaged_token_files_are_refused(tmp_path: Path, content: bytes, parts: list[str]) -> None:
    path = tmp_path / "damaged.tokens"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        open_tokens(path)
    message = str(error.value)
    assert "\n" not in message
    for part in [str(path), "tpengine data --from", *parts]:
        assert part in message


def test_a_missing_token_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: No such file.*tpengine data --from DIR --out"):
        open_tokens(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="Is a directory"):
        open_tokens(tmp_path)


def test_stdlib_text_is_python_in_bytes() -> None:
    text = stdlib_text()
    assert text.dtype == np.uint8
    assert len(text) > 1_000_000
    assert b"import" in text[:100_000].tobytes()


@pytest.mark.parametrize("num", [*range(1, 70), 255, 256, 257, 1000, 4095, 4096, 4097, 34870])
def test_permutation_is_a_bijection(num: int) -> None:
    order = permute(np.arange(num), num, seed=3, epoch=1)
    np.testing.assert_array_equal(np.sort(order), np.arange(num))


@given(num=st.integers(1, 2**62), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_permutation_stays_inside_for_any_size(num: int, seed: int, epoch: int) -> None:
    places = np.unique(np.linspace(0, num - 1, 64).astype(np.int64).clip(0, num - 1))
    order = permute(places, num, seed, epoch)
    assert order.min() >= 0
    assert order.max() < num
    assert len(np.unique(order)) == len(places)
    assert [permute_one(place, num, seed, epoch) for place in places.tolist()] == order.tolist()


def test_permutation_depends_on_seed_and_epoch_and_has_no_drift() -> None:
    places = np.arange(5000)
    orders = [permute(places, 5000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for number, order in enumerate(orders):
        assert abs(np.corrcoef(places, order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
        for other in orders[number + 1 :]:
            assert (order == other).mean() < 0.01


def test_the_order_is_what_it_always_was() -> None:
    """A changed order would silently change every run that is continued."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == ORDER_OF_TEN
    assert permute(np.arange(4), 10**9, 7, 2).tolist() == ORDER_OF_MANY


def test_few_samples_are_the_windows_that_many_are() -> None:
    for options in ({}, {"seed": 3}, {"seed": 3, "phase": 2, "source": 1}):
        samples = Samples(np.arange(1000) % 251, 8, 256, **options)
        numbers = np.arange(0, 1000, 7)
        tokens, labels = samples.read(numbers)
        for number, *row in zip(numbers.tolist(), tokens, labels, strict=True):
            np.testing.assert_array_equal(np.concatenate(samples.batch(number, 1)), row)


def test_labels_are_the_next_tokens_and_an_epoch_reads_every_window_once() -> None:
    samples = counting(100, 8, seed=1)
    assert samples.num_windows == 12
    tokens, labels = samples.batch(0, 12)
    assert tokens.shape == labels.shape == (12, 8)
    assert tokens.dtype == labels.dtype == np.int64
    assert tokens.flags.c_contiguous and labels.flags.c_contiguous and tokens.flags.writeable
    np.testing.assert_array_equal(labels, tokens + 1)
    assert sorted(tokens[:, 0]) == list(range(0, 96, 8))
    assert sorted(samples.batch(12, 12)[0][:, 0]) == list(range(0, 96, 8))
    assert samples.batch(12, 12)[0].tolist() != tokens.tolist()


@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 8))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_a_batch_is_its_samples_one_by_one(first: int, count: int, seq_len: int) -> None:
    samples = counting(60, seq_len, seed=5, ignore_token=7)
    together = samples.batch(first, count)
    alone = [samples.batch(first + number, 1) for number in range(count)]
    for part in (0, 1):
        np.testing.assert_array_equal(together[part], np.concatenate([one[part] for one in alone]))


def test_windows_need_one_token_more_than_their_inputs() -> None:
    assert counting(8, 8).num_windows == 0
    assert counting(9, 8).num_windows == 1
    assert counting(0, 8).num_windows == 0
    with pytest.raises(ValueError, match=r"8 tokens, seq_len 8 and one more: use a smaller seq_len"):
        counting(8, 8).batch(0, 1)


def test_without_a_seed_windows_follow_each_other_and_repeat() -> None:
    assert counting(25, 8).batch(1, 4)[0][:, 0].tolist() == [8, 16, 0, 8]


def test_ignored_tokens_leave_the_labels_only() -> None:
    tokens, labels = counting(9, 8, ignore_token=3).batch(0, 1)
    assert tokens[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert labels[0].tolist() == [1, 2, IGNORED_LABEL, 4, 5, 6, 7, 8]


def test_a_token_beyond_the_vocabulary_is_found_when_read() -> None:
    samples = replace(counting(100, 8), vocab_size=50)
    samples.batch(0, 6)
    with pytest.raises(
        ValueError,
        match=r"vocab_size: got 56, model.vocab_size 50; the first beyond it, 50, is token 50 of the text: use .* 57",
    ):
        samples.batch(6, 1)


def test_a_digest_tells_batches_apart_by_any_token_and_by_their_order() -> None:
    samples = counting(100, 8, ignore_token=3)
    tokens, labels = samples.batch(0, 4)
    digest = batch_digest(tokens, labels)
    assert 0 <= digest < 2**63 and digest == batch_digest(*samples.batch(0, 4))
    others = {batch_digest(*samples.batch(1, 4)), batch_digest(tokens[::-1], labels[::-1])}
    others.add(batch_digest(tokens.reshape(2, 16), labels.reshape(2, 16)))
    for sample, place in np.ndindex(4, 9):
        text = np.array(samples.tokens)
        text[sample * 8 + place] += 1
        others.add(batch_digest(*replace(samples, tokens=text).batch(0, 4)))
    # A window's last token is the next one's first.
    assert digest not in others and len(others) == 3 + 4 * 8 + 1


def test_a_digest_is_what_it_always_was() -> None:
    """Ranks of one run may be machines of several kinds."""
    assert batch_digest(*counting(100, 8, ignore_token=3).batch(0, 4)) == DIGEST_OF_FOUR


@pytest.mark.parametrize(("dp", "num_micro_batches"), [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)])
def test_every_split_sees_the_same_global_batches(dp: int, num_micro_batches: int) -> None:
    samples, size = counting(500, 8, seed=2), 2
    for step in range(3):
        indices = [
            first_sample_index(step, rank, dp, mb, num_micro_batches=num_micro_batches, micro_batch_size=size)
            for rank in range(dp)
            for mb in range(num_micro_batches)
        ]
        split = np.concatenate([samples.batch(index, size)[0] for index in indices])
        np.testing.assert_array_equal(split, samples.batch(step * 12 * size, 12 * size)[0])


def test_corpus_holds_out_the_last_tokens(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_tokens(path, np.arange(200, dtype=np.uint8), 256)
    corpus = open_corpus(config_of(path, held_out_fraction=0.25))
    assert len(corpus.train.tokens) == 150
    assert corpus.held_out.tokens[:].tolist() == list(range(150, 200))
    assert corpus.held_out.batch(0, 1)[0][0].tolist() == list(range(150, 166))


def test_corpus_of_the_default_configuration() -> None:
    corpus = open_corpus(Config())
    again = open_corpus(Config())
    for part, same in ((corpus.train, again.train), (corpus.held_out, again.held_out)):
        np.testing.assert_array_equal(part.batch(5, 3)[0], same.batch(5, 3)[0])
    other_seed = open_corpus(replace(Config(), train=TrainConfig(seed=1)))
    assert not np.array_equal(corpus.train.batch(5, 3)[0], other_seed.train.batch(5, 3)[0])
    np.testing.assert_array_equal(corpus.held_out.batch(5, 3)[0], other_seed.held_out.batch(5, 3)[0])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"vocab_size": 100}, ["must cover", "model.vocab_size 100", "use model.vocab_size 256"]),
        ({"seq_len": 190}, ["training text", "190 tokens, seq_len 190", "use seq_len 189"]),
        ({"seq_len": 16}, ["held-out text", "10 tokens, seq_len 16", "use seq_len 9", "held_out_fraction"]),
        ({"held_out_fraction": 0.0}, ["held-out text", "0 tokens", "eval_micro_batches 0"]),
    ],
)
def test_unsuitable_text_is_refused(tmp_path: Path, options: dict[str, Any], parts: list[str]) -> None:
    path = tmp_path / "t"
    write_tokens(path, np.arange(200, dtype=np.uint8), 256)
    with pytest.raises(ValueError) as error:
        open_corpus(config_of(path, **options))
    for part in parts:
        assert part in str(error.value)


def test_no_held_out_text_is_fine_where_none_is_used(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_tokens(path, np.arange(200, dtype=np.uint8), 256)
    config = config_of(path, held_out_fraction=0.0, evaluate=0)
    corpus = open_corpus(replace(config, train=replace(config.train, sample_tokens=0)))
    assert len(corpus.train.tokens) == 200


def test_a_text_of_another_tokenizer_is_refused_beside_a_models_directory(tmp_path: Path) -> None:
    """Where the vocabulary is not the user's to choose, the text is."""
    path = tmp_path / "t"
    write_tokens(path, np.arange(200, dtype=np.uint8), 256)
    config = config_of(path, vocab_size=255)
    with pytest.raises(ValueError) as error:
        open_corpus(replace(config, model=replace(config.model, path="some/model")))
    assert str(error.value) == (
        f"the model's vocabulary must cover the text's: model.vocab_size 255, {path} 256: write the text with the "
        "model's tokenizer, tpengine data --tokenizer some/model"
    )


def test_stdlib_needs_a_vocabulary_of_its_bytes() -> None:
    with pytest.raises(ValueError, match=r"must cover the text's: model.vocab_size 100, stdlib 2\d\d"):
        open_corpus(config_of("stdlib", vocab_size=100))


def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("what the user wrote")
    with pytest.raises(ValueError, match=r"must not replace a file of another kind: .* such as .*text\.txt\.tokens"):
        write_tokens(text, np.arange(5), vocab_size=8)
    assert text.read_text() == "what the user wrote"
    with pytest.raises(ValueError, match=r"--out .*text\.txt\.tokens"):
        open_tokens(text)
