"""Rung: pure. Tokenizer files go with the weights as they came, under a class that transformers 4 and 5 know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpengine.hugging_face.tokenizer_files import COMPANIONS, copy_companions


def source_of(tmp_path: Path, tokenizer_config: bytes) -> tuple[Path, Path]:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "additional_chat_templates").mkdir(parents=True)
    out.mkdir()
    for name in (*COMPANIONS, "additional_chat_templates/tools.jinja", "config.json", "pytorch_model.bin"):
        (source / name).write_bytes(b"\xff\x00" + name.encode())
    (source / "tokenizer_config.json").write_bytes(tokenizer_config)
    return source, out


def test_files_are_copied_byte_by_byte(tmp_path: Path) -> None:
    config = b'{"tokenizer_class":  "Qwen2Tokenizer", "extra": "\xc3\xa9"}'
    source, out = source_of(tmp_path, config)
    copied = copy_companions(source, out)
    assert copied == (*COMPANIONS, "additional_chat_templates/tools.jinja")
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == set(copied)
    for name in copied:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    assert (out / "tokenizer_config.json").read_bytes() == config


def test_a_class_that_only_version_5_knows_is_named_as_both_do(tmp_path: Path) -> None:
    values = {"model_max_length": 10**30, "tokenizer_class": "TokenizersBackend", "eos_token": "é"}
    source, out = source_of(tmp_path, json.dumps(values).encode())
    copy_companions(source, out)
    written = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written == {**values, "tokenizer_class": "PreTrainedTokenizerFast"}


def test_a_directory_without_any_is_copied_as_it_is(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    assert copy_companions(source, out) == () and list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"[", "must be valid JSON: {0}: 'Expecting value"), (b"3", "must be an object: {0}: got int")],
)
def test_a_config_that_is_none_is_refused(content: bytes, what: str, tmp_path: Path) -> None:
    source, out = source_of(tmp_path, content)
    with pytest.raises(ValueError) as refused:
        copy_companions(source, out)
    message = str(refused.value)
    assert message.startswith(f"tokenizer_config.json {what.format(source / 'tokenizer_config.json')}")
    assert message.endswith(": copy it again")


@pytest.mark.slow
def test_transformers_loads_the_tokenizer_that_was_copied(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "to", "be", "or", "not"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    tokenizer.save_pretrained(tmp_path / "source")
    # What the change is for.
    assert json.loads((tmp_path / "source" / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "TokenizersBackend"
    )
    (tmp_path / "out").mkdir()
    copy_companions(tmp_path / "source", tmp_path / "out")
    text = "to be or not to be"
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded(text)["input_ids"] == [2, 3, 4, 5, 2, 3] and loaded.decode(loaded(text)["input_ids"]) == text
