"""Rung: pure. Parts of a text, printed as its tokens come, are the text of all its tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.architectures.trained_tokenizers import saved_tokenizer

from tpengine.config import ModelConfig
from tpengine.generation.text import Bytes, Numbers, Stream, TokenizerText, Vocabulary, marks_of, vocabulary_of

TEXT = "for i in range(10):\n    print('naïve ♥ 日本 👩‍👩‍👧 🙂')  # ends  here\n\n"


def streamed(vocabulary: Vocabulary, tokens: list[int], begin: int) -> str:
    stream = Stream(vocabulary, tokens[:begin])
    parts = [stream.add(token) for token in tokens[begin:]]
    return vocabulary.decode(tokens[:begin]) + "".join(parts) + stream.end()


@pytest.mark.parametrize("kind", ["bytes", "llama3", "unigram"])
def test_parts_make_the_text(tmp_path: Path, kind: str) -> None:
    if kind != "bytes":
        saved_tokenizer(tmp_path, kind)
    vocabulary = vocabulary_of(tmp_path, ModelConfig(vocab_size=256))
    assert isinstance(vocabulary, Bytes if kind == "bytes" else TokenizerText)
    tokens = vocabulary.encode(TEXT * 3)
    # A prompt that ends within a character is shown with what is not whole.
    for begin in (0, 1, 5, len(TEXT[:20].encode()) if kind == "bytes" else 5):
        assert streamed(vocabulary, tokens, begin) == vocabulary.decode(tokens)


def test_bytes_that_are_no_text_are_shown_and_what_follows_is_whole() -> None:
    draw = random.Random(1)
    for _ in range(200):
        tokens = [draw.choice([0xFF, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, ord("a"), draw.randrange(256)]) for _ in range(50)]
        assert streamed(Bytes(), tokens, 0) == Bytes().decode(tokens)


def test_a_character_is_held_back_until_it_is_whole() -> None:
    stream = Stream(Bytes())
    assert [stream.add(byte) for byte in "a♥b".encode()] == ["a", "", "", "♥", "b"]


def test_without_a_tokenizer_tokens_are_numbers(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(tmp_path, ModelConfig(vocab_size=300))
    assert isinstance(vocabulary, Numbers) and isinstance(
        vocabulary_of(tmp_path, ModelConfig(vocab_size=300), "bytes"), Bytes
    )
    assert vocabulary.encode("1, 2 30") == [1, 2, 30] and streamed(vocabulary, [1, 2, 30], 1) == " 1 2 30"
    with pytest.raises(ValueError) as refused:
        vocabulary.encode("hello")
    assert str(refused.value) == (
        "without a tokenizer a prompt is token numbers: got 'hello': use --prompt '1 2 3', or --tokenizer DIR, or "
        "--tokenizer bytes"
    )


def test_marks_are_those_of_generation_before_those_of_sizes(tmp_path: Path) -> None:
    assert marks_of(tmp_path, "eos_token_id") == []
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    assert (marks_of(tmp_path, "eos_token_id"), marks_of(tmp_path, "bos_token_id")) == ([2], [1])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "bos_token_id": None}))
    assert (marks_of(tmp_path, "eos_token_id"), marks_of(tmp_path, "bos_token_id")) == ([7, 9], [1])
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError) as refused:
        marks_of(tmp_path, "eos_token_id")
    assert str(refused.value).startswith("generation_config.json must be valid JSON: ")
