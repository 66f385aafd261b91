"""Rung: pure. A corpus cuts a text into what is trained on and what is held out, and refuses one that does not suit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpengine.config import Config, DataConfig, ModelConfig, TrainConfig
from tpengine.data import open_corpus, stdlib_text, write_tokens


def config_of(path: str | Path, **options: Any) -> Config:
    return Config(
        model=ModelConfig(vocab_size=options.pop("vocab_size", 256)),
        train=TrainConfig(seq_len=options.pop("seq_len", 16), eval_micro_batches=options.pop("evaluate", 1)),
        data=DataConfig(path=str(path), **options),
    )


def test_stdlib_text_is_python_in_bytes() -> None:
    text = stdlib_text()
    assert text.dtype == np.uint8
    assert len(text) > 1_000_000
    assert b"import" in text[:100_000].tobytes()


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
