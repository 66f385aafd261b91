"""Rung: pure. Ids are those of transformers and of the library; what is no tokenizer is refused in one line."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.architectures.trained_tokenizers import END, KINDS, hard_text, saved_tokenizer, trained
from tokenizers import Tokenizer

from tpengine.data import documents as documents_module
from tpengine.data import encode as encode_module
from tpengine.data.documents import DocumentReader
from tpengine.data.encode import tokens_of
from tpengine.data.windows import cut
from tpengine.tokenizer import TextTokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Also of special tokens that only tokenizer_config.json declares, of which one is a token of the model anyway."""
    from transformers import AutoTokenizer

    number = Tokenizer.from_str(trained(kind)).get_vocab_size()
    flags = {"lstrip": True, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    directory = saved_tokenizer(
        tmp_path,
        kind,
        added_tokens_decoder={str(number): {"content": "<|mine|>", **flags}},
        pad_token={"__type": "AddedToken", "content": "<pad>", **flags},
        bos_token="import",
        additional_special_tokens=["<|one|>", END],
    )
    theirs: Any = AutoTokenizer.from_pretrained(directory)
    ours, rng = TextTokenizer(directory), random.Random(3)
    assert ours.vocab_size == len(theirs) == max(theirs.get_vocab().values()) + 1
    for _ in range(40):
        text = hard_text(rng, 300) + rng.choice(["<|mine|>", " <pad>", "import ", "<|one|>", ""]) + hard_text(rng, 30)
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode([text])[0].ids == ids
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.mark("end", "") == theirs.eos_token_id and ours.mark("begin", "") == theirs.bos_token_id


def test_byte_pairs_come_back_as_the_text(tmp_path: Path) -> None:
    for kind in ("gpt2", "llama3"):
        tokenizer, text = TextTokenizer(saved_tokenizer(tmp_path / kind, kind)), hard_text(random.Random(5), 5000)
        ids = tokenizer.encode([text])[0].ids
        # The file asks for 16 tokens, padded, after a mark.
        assert len(ids) > 1000 and ids[0] != tokenizer.mark("end", "")
        assert tokenizer.decode(ids) == text


def test_ids_beyond_the_tokenizer_are_seen(tmp_path: Path) -> None:
    """A model's padded vocabulary has such ids, and an untrained model gives them."""
    tokenizer = TextTokenizer(saved_tokenizer(tmp_path))
    ids = tokenizer.encode(["one two"])[0].ids
    assert tokenizer.decode([70_000, *ids, tokenizer.vocab_size, tokenizer.vocab_size]) == "\ufffdone two\ufffd\ufffd"


def test_documents_of_files_become_the_ids_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces that end inside characters, windows, and batches."""
    monkeypatch.setattr(documents_module, "_READ_BYTES", 37)
    monkeypatch.setattr(encode_module, "_CHARACTERS_PER_BATCH", 1000)
    monkeypatch.setattr(encode_module, "cut", lambda parts: cut(parts, 600, 300, 80))
    rng = random.Random(11)
    texts = [hard_text(rng, size) for size in (1, 250, 2000, 40, 5000)]
    lines = [hard_text(rng, size) for size in (20, 400, 1)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tokenizer = TextTokenizer(saved_tokenizer(tmp_path / "tokenizer"))
    begin, end = 3, tokenizer.mark("end", "")
    paths = [*(tmp_path / f"{number}.txt" for number in range(len(texts))), tmp_path / "lines.jsonl"]
    for marks in ((None, None), (begin, None), (None, end), (begin, end)):
        want: list[int] = []
        for text in texts + lines:
            ids = tokenizer.encode([text])[0].ids
            want += [mark for mark in marks[:1] if mark is not None] + ids + [m for m in marks[1:] if m is not None]
        assert (
            np.concatenate([chunk.ids for chunk in tokens_of(DocumentReader(paths), tokenizer, *marks)]).tolist()
            == want
        )


@pytest.mark.parametrize("place", [0, 36, 37, 60])
def test_bytes_that_are_no_text_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr(documents_module, "_READ_BYTES", 37)
    path = tmp_path / "some.txt"
    # The bad character begins before the end of a piece, and is seen to be bad in the next.
    path.write_bytes(b"a" * place + b"\xf0\x9f" + b"a" * 50)
    tokenizer = TextTokenizer(saved_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(ValueError) as error:
        list(tokens_of(DocumentReader([path]), tokenizer))
    assert str(error.value) == (
        f"the text must be UTF-8 for a tokenizer: {path}, byte {place}: invalid continuation byte: convert it, leave "
        "it out, or use --tokenizer bytes"
    )


def test_marks_are_tokens_or_ids(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(saved_tokenizer(tmp_path))
    number = tokenizer.vocab_size - 1
    assert [tokenizer.mark("end", asked) for asked in ("", END, str(number), "2")] == [number, number, number, 2]
    for name, asked, what in (
        (
            "begin",
            "",
            f"--begin needs a token that the tokenizer declares: {tmp_path}/tokenizer_config.json has no bos",
        ),
        ("end", "<s>", f"--end must be a token of the tokenizer: {tmp_path}/tokenizer.json has no '<s>': use one of"),
        ("end", str(number + 1), f"tokenizer.json has no '{number + 1}': use one of {END}"),
    ):
        with pytest.raises(ValueError) as error:
            tokenizer.mark(name, asked)
        assert what in str(error.value) and "\n" not in str(error.value)


def test_the_vocabulary_of_the_model_beside_it(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(saved_tokenizer(tmp_path))
    assert tokenizer.model_vocab_size() is None
    for values, want in (({"vocab_size": 99}, 99), ({"text_config": {"vocab_size": 98}}, 98), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert tokenizer.model_vocab_size() == want


def with_dropout(content: str) -> str:
    values = json.loads(content)
    values["model"]["dropout"] = 0.1
    return json.dumps(values)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        (
            "tokenizer.json",
            None,
            "a tokenizer's directory must have a tokenizer.json: {0} has none but vocab.json",
        ),
        ("tokenizer.json", "{", "tokenizer.json must be a tokenizer's: {0}/tokenizer.json: 'EOF while parsing"),
        ("tokenizer.json", with_dropout(trained("gpt2")), "the same ids each time: {0}/tokenizer.json has dropout 0.1"),
        ("tokenizer_config.json", "[", "tokenizer_config.json must be valid JSON: {0}/tokenizer_config.json"),
        ("tokenizer_config.json", "3", "tokenizer_config.json must be an object: {0}/tokenizer_config.json: got int"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"9": {}}}',
            "tokenizer_config.json must declare tokens as transformers writes them: {0}: KeyError 'content'",
        ),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"9": {"content": "<|new|>", "special": true}}}',
            "tokenizer_config.json and tokenizer.json must agree: {0}: '<|new|>' is declared as 9 and would be",
        ),
    ],
    ids=lambda value: "" if len(str(value)) > 60 else None,
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, name: str, content: str | None, what: str) -> None:
    saved_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        TextTokenizer(tmp_path)
    assert what.format(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError) as error:
        TextTokenizer(saved_tokenizer(tmp_path))
    assert str(error.value) == (
        f"a tokenizer needs the library tokenizers: it is not installed, for {tmp_path}/tokenizer.json: pip install "
        "'tpengine[hf]'"
    )
