"""Rung: pure. `tpengine data --check` finds what is wrong in token files, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.architectures.trained_tokenizers import END, saved_tokenizer
from support.engine.foreign_tokens import write_datatrove, write_made, write_megatron
from tokenizers import Tokenizer

from tpengine.cli import main
from tpengine.commands import data_check


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that files of a few tokens are read in several pieces."""
    monkeypatch.setattr(data_check, "_TOKENS_AT_ONCE", 7)
    monkeypatch.setattr(data_check, "_STARTS_AT_ONCE", 3)


def write(tmp_path: Path, *options: str) -> Path:
    texts = ["one", "two and two", "three", "four", "five", "six is more", "seven"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "out"
    argv = ["data", "--from", str(tmp_path / "a.jsonl"), "--out", str(out), "--shard-tokens", "20", *options]
    assert main(argv) == 0
    return out


def put(path: Path, place: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[place : place + len(content)] = content
    path.write_bytes(whole)


def test_whole_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write(tmp_path, "--end", "10")
    write_made(tmp_path, "small.bin")
    assert main(["data", "--check", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    first = f"{out}/00000.tokens: TPTOKENS 2, 22 uint8 tokens of 3 documents, largest id 119, SHA-256 right"
    assert first in said
    assert said[-1] == f"{out}: 3 files, 50 tokens of 7 documents: all as they say"
    assert main(["data", "--check", f"{tmp_path}/*.bin"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        f"{tmp_path}/small.bin: Megatron, 11 uint16 tokens of 4 documents, 1 of fewer than 2 tokens, largest id 65499, "
        "no hash to check"
    )


@pytest.mark.parametrize(
    ("place", "content", "part"),
    [
        (512 + 9, b"\0", "its tokens have SHA-256 "),
        (-8, (17).to_bytes(8, "little"), "list of documents does not have the SHA-256"),
        (96, (118).to_bytes(8, "little"), "its largest id is 119, its header says 118"),
        (16, (101).to_bytes(8, "little"), "id 111 at token 0 is not below the vocabulary, 101"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: int, content: bytes, part: str
) -> None:
    out = write(tmp_path)
    file = out / "00000.tokens"
    put(file, place if place >= 0 else file.stat().st_size + place, content)
    if place == 16:
        put(file, 96, (100).to_bytes(8, "little"))
    assert main(["data", "--check", str(out)]) == 2
    said, error = capsys.readouterr()
    assert f"{file}: " in said and part in said
    assert error.startswith("tpengine: error: token files must hold what they say: ") and error.count("\n") == 1


def test_files_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids against the tokenizer's vocabulary; documents that do not ascend where the start did not look."""
    directory = saved_tokenizer(tmp_path / "model")
    num_ids = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    write_megatron(tmp_path / "a.bin", [[[1, 2, 3]] * 5, [[4, num_ids + 1, 5]]])
    argv = ["--tokenizer", str(directory)]
    assert main(["data", "--check", str(tmp_path / "a.bin"), *argv]) == 2
    assert f"id {num_ids + 1} at token 16 is not below the vocabulary, {num_ids}" in capsys.readouterr().out
    path = write_datatrove(tmp_path / "b.ds", [[1, 2]] * 40_000, 2)
    index = np.fromfile(tmp_path / "b.ds.index", dtype="<u8")
    index[1000] = 5
    index.tofile(tmp_path / "b.ds.index")
    assert main(["data", "--check", str(path)]) == 2
    assert "document 1000 begins at token 2000 and the next one at 5" in capsys.readouterr().err


def test_marks_that_no_document_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = saved_tokenizer(tmp_path / "model")
    tokenizer = ["--tokenizer", str(directory)]
    end = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(END)
    out = write(tmp_path, *tokenizer)
    assert main(["data", "--check", str(out), *tokenizer]) == 0
    assert f"no document ends with {end}, which the tokenizer declares for that" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "other" / "a.jsonl")
    marked = write(tmp_path / "other", "--end", *tokenizer)
    assert main(["data", "--check", str(marked), *tokenizer]) == 0
    assert "warning" not in capsys.readouterr().out
    another = saved_tokenizer(tmp_path / "another", "llama3")
    assert main(["data", "--check", str(marked), "--tokenizer", str(another)]) == 2
    assert "was written with another tokenizer than" in capsys.readouterr().out
