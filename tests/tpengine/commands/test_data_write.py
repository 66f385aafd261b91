"""Rung: pure. `tpengine data` writes whole token files or none, and refuses in one line."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import chain, pairwise
from pathlib import Path

import pytest
from support.architectures.trained_tokenizers import END, hard_text, saved_tokenizer
from tokenizers import Tokenizer

from tpengine.cli import main
from tpengine.data import open_source, open_tokens, stdlib_text
from tpengine.tokenizer import TextTokenizer


def test_the_bytes_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.py").write_bytes(b"two")
    (tmp_path / "a.py").write_bytes(b"one\xff")
    (tmp_path / "c.txt").write_bytes(b"three")
    for pattern, want in (("*.py", b"one\xfftwo"), ("**/*", b"one\xfftwothree")):
        out = tmp_path / "text.tokens"
        assert main(["data", "--from", str(tmp_path), "--out", str(out), "--pattern", pattern]) == 0
        text = open_tokens(out)
        assert text.tokens[:].tobytes() == want and text.vocab_size == 256
        assert f"--data.path {out}" in capsys.readouterr().out
        out.unlink()


def test_files_json_lines_and_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.txt").write_bytes(b"b")
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": ""}\n{"body": "two"}\n')
    out = tmp_path / "out"
    argv = ["--from", str(tmp_path / "b.txt"), str(tmp_path / "a.jsonl"), "--field", "body", "--out", str(out)]
    assert main(["data", *argv, "--begin", "0", "--end", "10"]) == 0
    assert open_tokens(out).tokens[:].tobytes() == b"\0b\n\0one\n\0two\n"
    said = f"{out}: 13 tokens of 3 documents (1 empty left out), each begins with 0, each ends with 10, vocabulary 256;"
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text of several windows and lines of JSONL become what the library gives, round trip."""
    directory = saved_tokenizer(tmp_path / "model")
    rng, out = random.Random(1), tmp_path / "out"
    texts = [hard_text(rng, 400_000), hard_text(rng, 300), hard_text(rng, 3)]
    (tmp_path / "a.txt").write_bytes(texts[0].encode())
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1:]))
    sources = [str(tmp_path / name) for name in ("a.txt", "b.jsonl")]
    argv = ["data", "--from", *sources, "--tokenizer", str(directory), "--end", "--out", str(out)]
    assert main(argv) == 0
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    end, num_ids = library.token_to_id(END), library.get_vocab_size()
    ids = [[*library.encode(text, add_special_tokens=False).ids, end] for text in texts]
    file = open_tokens(out)
    assert file.tokens[:].tolist() == list(chain(*ids)) and file.vocab_size == num_ids
    assert library.decode(file.tokens[:].tolist(), skip_special_tokens=False) == "".join(text + END for text in texts)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == (
        f"{out}: {len(file.tokens):,} tokens of 3 documents, each ends with {end}, vocabulary {num_ids}; train on it "
        f"with --data.path {out} --model.vocab-size {num_ids}"
    )


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "llama3"])
def test_text_comes_back_from_tokens(tmp_path: Path, kind: str) -> None:
    """Document by document, from several files of tokens."""
    rng = random.Random(7)
    texts = [hard_text(rng, length) for length in (300, 2, 1000, 50, 700)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    directory = "bytes" if kind == "bytes" else str(saved_tokenizer(tmp_path / "model", kind))
    argv = ["--tokenizer", directory, "--out", str(tmp_path / "out"), "--shard-tokens", "100", "--workers", "1"]
    assert main(["data", "--from", str(tmp_path / "a.jsonl"), *argv]) == 0
    source = open_source(str(tmp_path / "out"))
    assert len(source.files) > 1
    starts = [*source.document_starts(0, source.num_tokens).tolist(), source.num_tokens]
    documents = [source.read(begin, end - begin) for begin, end in pairwise(starts)]
    if kind == "bytes":
        assert [ids.tobytes().decode() for ids in documents] == texts
    else:
        tokenizer = TextTokenizer(Path(directory))
        assert [tokenizer.decode(ids.tolist()) for ids in documents] == texts


def test_ids_are_below_the_vocabulary_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer may have an id too many, as long as no text has it."""
    directory, out = saved_tokenizer(tmp_path / "model"), tmp_path / "out"
    (tmp_path / "a.txt").write_text("one two")
    argv = ["data", "--from", str(tmp_path / "a.txt"), "--tokenizer", str(directory), "--out", str(out)]
    num_ids = TextTokenizer(directory).vocab_size
    for of_model, of_file in ((num_ids - 1, num_ids - 1), (num_ids + 7, num_ids)):
        (directory / "config.json").write_text(json.dumps({"vocab_size": of_model}))
        assert main(argv) == 0
        assert open_tokens(out).vocab_size == of_file
        assert f"train on it with --data.path {out} --model.path {directory}\n" in capsys.readouterr().out
        out.unlink()
    (directory / "config.json").write_text(json.dumps({"vocab_size": num_ids - 1}))
    assert main([*argv, "--end"]) == 2
    assert capsys.readouterr().err == (
        f"tpengine: error: a tokenizer's ids must be below the vocabulary of its model: {directory} gives {END!r} the "
        f"id {num_ids - 1}, and its config.json has vocab_size {num_ids - 1}: copy the tokenizer of this model, or "
        "leave out such texts and marks\n"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--out", "x"], ["--from", "--help"]),
        (["--from", "/nowhere/at/all", "--out", "x"], ["--from must be directories or files", "/nowhere/at/all"]),
        (["--from", ".", "--pattern", "*.none", "--out", "x"], ["not empty", "'*.none'"]),
        (["--from", ".", "--end", "256", "--out", "x"], ["--end must be a byte", "'256'", "--end 10"]),
        (["--from", ".", "--begin", "<s>", "--out", "x"], ["--begin must be a byte", "'<s>'", "--begin 10"]),
        (["--from", ".", "--end", "--out", "x"], ["--end must be a byte", "'nothing'"]),
        (["--from", ".", "--tokenizer", "no", "--out", "x"], ["--tokenizer must be bytes, or a local directory", "no"]),
        (["--from", ".", "--tokenizer", ".", "--out", "x"], ["must have a tokenizer.json: . has none", "AutoTok"]),
        (["--from", "a.txt", "--out", "no/x"], ["directory must exist", "no: create it first"]),
        (["--from", "a.txt", "--out", "old"], ["a token file must be new: old is there", "remove it first"]),
        (["--from", "bad.jsonl", "--out", "x"], ["a line of JSONL must be an object", "bad.jsonl, line 1 is int"]),
        (["--from", "a.txt", "--out", "folder"], ["must be a regular file", "is a directory", "folder/text.tokens"]),
        (["--from", "a.txt", "--out", "pipe"], ["must be a regular file", "pipe: is a device or pipe"]),
        # Legal, but the temporary file beside it is not; then not legal itself.
        (["--from", "a.txt", "--out", "x" * 254], ["must be writable", f"{'x' * 254}: File name too long"]),
        (["--from", "a.txt", "--out", "x" * 300], ["must be writable", f"{'x' * 300}: File name too long"]),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    argv: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("a.txt", "a"), ("old", "a user's"), ("bad.jsonl", "3\n")):
        Path(name).write_text(content)
    Path("folder").mkdir()
    os.mkfifo("pipe")
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["data", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith("tpengine: error: ")
    for part in parts:
        assert part in err
    assert {path.name for path in tmp_path.iterdir()} == before and Path("old").read_text() == "a user's"


# The command, and then the most memory that it has held. What os.wait4 says is at least the parent's own, at the spawn.
MEASURED = """
import sys
from pathlib import Path
from tpengine.cli import main

code = main(sys.argv[1:])
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
sys.exit(code)
"""


def peak_bytes(argv: list[str]) -> int:
    """Largest resident memory of the command, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", MEASURED, *argv], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.splitlines()[-1]) * 1024


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """One document of 6 MB, and one of 24 MB; as a whole, the library takes 150 bytes a character.

    In one process: with workers 50 MB more or less are under way.
    """
    directory, peaks = saved_tokenizer(tmp_path / "model"), []
    for num_bytes in (6_000_000, 24_000_000):
        path, out = tmp_path / f"{num_bytes}.txt", tmp_path / f"{num_bytes}.tokens"
        path.write_bytes((stdlib_text().tobytes() * 6)[:num_bytes])
        argv = ["--from", str(path), "--tokenizer", str(directory), "--out", str(out), "--workers", "1"]
        peaks.append(peak_bytes(["data", *argv]))
    assert peaks[1] - peaks[0] < 18_000_000


# The command, held up after the second piece.
HELD_UP = """
import sys, time
from tpengine.cli import main
from tpengine.data.documents import DocumentReader

read = DocumentReader.__iter__

def held_up(documents):
    for number, piece in enumerate(read(documents)):
        if number == 2:
            time.sleep(1e6)
        yield piece

DocumentReader.__iter__ = held_up
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.by_default("SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_command_that_is_ended_leaves_no_output(tmp_path: Path, number: signal.Signals) -> None:
    """After SIGKILL a beginning lies there under another name, which the next call does not take for text."""
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_bytes(b"text" * 1_000_000)
    argv = ["data", "--from", str(tmp_path), "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-c", HELD_UP, *argv], stderr=subprocess.PIPE, text=True)
    try:
        while not any(path.stat().st_size > 1_000_000 for path in tmp_path.glob(".out.part/ids")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate()
    finally:
        process.kill()
    left = {path.name for path in tmp_path.iterdir()}
    if number == signal.SIGKILL:
        assert process.returncode == -number and len(left) == 2 and "out" not in left
    else:
        assert process.returncode == 128 + number and left == {"a.txt"}
        assert errors == "tpengine: interrupted; no process and no unfinished file is left\n"
    assert main(argv) == 0
    assert open_tokens(out).tokens[:].tobytes() == text.read_bytes()
