"""Rung: pure. `tpengine data --chat` writes conversations and their weights, or refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.architectures.chats import chat_tokenizer, talk
from transformers import AutoTokenizer

from tpengine.cli import main
from tpengine.data.columns import open_column
from tpengine.data.source import open_file
from tpengine.data.token_file import open_tokens

TALKS = [talk("import os", "os it is", system="Be brief."), talk("a", "b", "c", "d")]


def written(path: Path, talks: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talks))
    return path


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_file_and_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], train_on: str) -> None:
    marked = chat_tokenizer(tmp_path / "model", "chatml", marked=True)
    source, out = written(tmp_path / "chat.jsonl", TALKS), tmp_path / "chat.tokens"
    argv = ["data", "--chat", str(source), "--tokenizer", str(marked), "--out", str(out), "--train-on", train_on]
    assert main(argv) == 0
    theirs = AutoTokenizer.from_pretrained(marked)
    how = dict(return_dict=True, return_assistant_tokens_mask=True)
    found = [theirs.apply_chat_template(messages, **how) for messages in TALKS]
    ids = [of["input_ids"] for of in found]
    masks = [of["assistant_masks"] for of in found]
    if train_on == "all":
        masks = [[1] * len(mask) for mask in masks]
    elif train_on == "last":
        first = theirs.apply_chat_template(TALKS[1][:2], return_dict=True)["input_ids"]
        masks[1] = [mask * (place >= len(first)) for place, mask in enumerate(masks[1])]
    file = open_file(out)
    column, weights, _ = open_column(file, "weights")
    assert open_tokens(out).tokens[:].tolist() == [*ids[0], *ids[1]] and file.starts is not None
    assert file.starts[:].tolist() == [0, len(ids[0])]
    assert weights[:].tolist() == [*masks[0], *masks[1]] and column.dtype == "uint8"
    said = capsys.readouterr().out.splitlines()[-1]
    longest, trained = max(map(len, ids)), int(weights[:].sum())
    assert said == (
        f"{out}: {len(file.tokens)} tokens of 2 conversations, the longest of {longest}; {trained} are trained "
        f"on ({train_on}), vocabulary {file.vocab_size}; train on it with --data.path {out} --model.vocab-size "
        f"{file.vocab_size} --data.packing fit, behind tpengine data --fit SEQ_LEN {out}"
    )
    # Whole conversations in samples, as packing `fit` takes them.
    assert main(["data", "--fit", str(longest), str(out), "--held-out-fraction", "0"]) == 0
    assert f"2 samples of {longest} tokens, of 2 documents, 0 of them longer and cut" in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(chat_tokenizer(tmp_path / "model", "mistral"))
    without = str(chat_tokenizer(tmp_path / "without", "mistral", chat_template=None))
    out, source = tmp_path / "out.tokens", written(tmp_path / "a.jsonl", [talk("a", "b"), talk("a")])
    (empty := tmp_path / "empty.jsonl").touch()
    (blank := tmp_path / "blank.jsonl").write_text("\n")
    (text := tmp_path / "text.txt").write_text("a")
    (odd := tmp_path / "odd.jsonl").write_text('{"messages"')
    system = written(tmp_path / "system.jsonl", [talk("a", "b", system="c")])
    cases: list[tuple[list[Any], str]] = [
        ([source], "--chat needs a tokenizer with a chat template: got none: use --tokenizer DIR"),
        ([source, "--tokenizer", without], f"a tokenizer for chats must have a chat template: {without} has none: "),
        ([source, "--tokenizer", model], f"a conversation must have an answer to train on: {source}, line 2 has none"),
        ([source, "--tokenizer", model, "--seq-len", "3"], "a conversation must have at most --seq-len tokens: "),
        ([empty, "--tokenizer", model], f"a chat file must have a conversation on each line: {empty} is empty"),
        ([blank, "--tokenizer", model], "a token file must hold at least 1 token: got none for "),
        (
            [text, "--tokenizer", model],
            f"--chat must be files of JSON lines, *.jsonl, *.jsonl.gz or *.jsonl.zst: {text}",
        ),
        ([tmp_path / "no.jsonl", "--tokenizer", model], "--chat must be files of JSON lines, *.jsonl, *.jsonl.gz or "),
        ([odd, "--tokenizer", model], f"a line of a chat file must be a conversation: {odd}, line 1 is no JSON: "),
        ([system, "--tokenizer", model], f"a conversation must be one that the template takes: {system}, line 1: the "),
        ([source, "--tokenizer", model, "--end"], "--end goes with --from, not with --chat: leave it out"),
    ]
    for argv, said in cases:
        code = main(["data", "--out", str(out), "--chat", *map(str, argv)])
        line = capsys.readouterr().err
        assert code == 2 and line.startswith(f"tpengine: error: {said}") and line.count("\n") == 1, line
        assert not list(tmp_path.glob("*out.tokens*"))
    assert main(["data", "--chat", str(source), "--tokenizer", model]) == 2
    assert capsys.readouterr().err.startswith("tpengine: error: --chat needs --out: ")
    assert main(["data", "--from", str(source), "--out", str(out), "--train-on", "last"]) == 2
    assert capsys.readouterr().err.startswith("tpengine: error: --train-on goes with --chat: ")
    out.write_bytes(b"mine")
    written(source, [talk("a", "b")])
    assert main(["data", "--chat", str(source), "--tokenizer", model, "--out", str(out)]) == 2
    assert out.read_bytes() == b"mine"


def test_answers_that_nothing_ends_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
    model = chat_tokenizer(tmp_path / "model", "chatml", chat_template=template)
    source = written(tmp_path / "a.jsonl", TALKS)
    assert main(["data", "--chat", str(source), "--tokenizer", str(model), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("warning: no special token ends an answer of this template: ")
