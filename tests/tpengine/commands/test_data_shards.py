"""Rung: pure, with processes that are killed. Shards, workers and what was begun: equal bytes, however they came."""

from __future__ import annotations

import io
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.architectures.trained_tokenizers import END, hard_text, saved_tokenizer
from tokenizers import Tokenizer

from tpengine.cli import main
from tpengine.commands import data_shards, data_write
from tpengine.commands.data_shards import ShardWriter
from tpengine.data import encode, open_source, open_tokens
from tpengine.data.documents import BEGINNING
from tpengine.data.encode import TokenChunk
from tpengine.data.source_files import About


def content_of(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of a directory's files."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {"" if file == path else file.name: file.read_bytes() for file in files}


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_shard_ends_with_the_document_that_fills_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["a" * 10, "b", "c" * 10, "", "d" * 25, "e" * 3]
    write_lines(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.txt").write_text("f" * 4)
    out = tmp_path / "out"
    assert main(["data", "--from", str(tmp_path), "--out", str(out), "--shard-tokens", "20"]) == 0
    assert [path.name for path in sorted(out.iterdir())] == ["00000.tokens", "00001.tokens", "00002.tokens"]
    assert [open_tokens(path).tokens[:].tobytes() for path in sorted(out.iterdir())] == [
        b"a" * 10 + b"c" * 10,
        b"d" * 25,
        b"eeeffff",
    ]
    said = f"{out}: 52 tokens of 5 documents in 3 files (1 empty, 1 of fewer than 2 tokens left out), vocabulary 256"
    assert said in capsys.readouterr().out
    assert open_source(str(out)).document_starts(0, 52).tolist() == [0, 10, 20, 45, 48]
    assert not list(tmp_path.glob(".out*"))


def killed_at(event: int, argv: list[str]) -> bool:
    """Run the command in a process that ends at once at its n-th write, flush or rename; false if it has fewer."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77
    count = 0

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def call_or_die(*args: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count == event:
                os._exit(77)
            return call(*args, **options)

        return call_or_die

    os.rename, os.replace, os.fsync = counted(os.rename), counted(os.replace), counted(os.fsync)  # type: ignore[assignment]
    ShardWriter._write = counted(ShardWriter._write)  # type: ignore[method-assign]
    sys.stdout = io.StringIO()
    try:
        main(argv)
    finally:
        os._exit(0)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=30),
    shard_tokens=st.sampled_from([None, 1, 40, 100]),
    kills=st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_a_killed_command_goes_on_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    shard_tokens: int | None,
    kills: list[int],
) -> None:
    monkeypatch.setattr(encode, "_BYTES_PER_ARRAY", 30)
    monkeypatch.setattr(data_shards, "_SECONDS_BETWEEN_NOTES", -1.0)
    directory = tmp_path_factory.mktemp("killed")
    (directory / "in").mkdir()
    half = len(lengths) // 2
    write_lines(
        directory / "in" / "a.jsonl", [chr(97 + number % 26) * length for number, length in enumerate(lengths[:half])]
    )
    write_lines(directory / "in" / "b.jsonl", ["\u00e9" * length for length in lengths[half:]])
    (directory / "in" / "c.txt").write_text("the end, of more than one piece of thirty bytes")
    argv = ["data", "--from", str(directory / "in"), "--end", "10"]
    argv += [] if shard_tokens is None else ["--shard-tokens", str(shard_tokens)]
    whole, out = directory / "whole", directory / "out"
    assert main([*argv, "--out", str(whole)]) == 0
    for event in kills:
        if not killed_at(event, [*argv, "--out", str(out)]):
            break
    if not out.exists():
        assert main([*argv, "--out", str(out)]) == 0
    assert content_of(out) == content_of(whole)
    assert sorted(path.name for path in directory.iterdir()) == ["in", "out", "whole"]


def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have a command killed after its first notes; return its arguments."""
    monkeypatch.setattr(encode, "_BYTES_PER_ARRAY", 30)
    monkeypatch.setattr(data_shards, "_SECONDS_BETWEEN_NOTES", -1.0)
    write_lines(tmp_path / "a.jsonl", ["one" * 9] * 9)
    write_lines(tmp_path / "b.jsonl", ["two" * 9] * 9)
    argv = ["data", "--from", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--out", str(tmp_path / "out")]
    assert killed_at(40, argv)
    return argv


@pytest.mark.parametrize("change", ["mark", "file", "prefix", "journal", "ids", "running"])
def test_what_was_begun_is_not_continued_with_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    argv, room, part = begun(tmp_path, monkeypatch), tmp_path / ".out.part", ""
    if change == "mark":
        argv, part = [*argv, "--end", "10"], "continued by the same command"
    elif change == "file":
        write_lines(tmp_path / "a.jsonl", ["other" * 9] * 9)
        part = "with the same text: "
    elif change == "prefix":
        write_lines(tmp_path / "b.jsonl", ["TWO" * 9] * 9)
        part = "b.jsonl are others now"
    elif change == "journal":
        (room / "journal.json").write_text('{"asked": 3')
        part = "is damaged"
    elif change == "ids":
        os.truncate(room / "ids", 520)
        part = "shorter than its journal says"
    else:
        holder = ShardWriter.__new__(ShardWriter)
        holder._room, holder._out = room, tmp_path / "out"
        lock = holder._locked()
        assert main(argv) == 2 and "another one writes" in capsys.readouterr().err
        lock.close()
        assert main(argv) == 0
        return
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert part in said and said.count("\n") == 1 and str(tmp_path) in said


def test_a_line_that_was_corrected_does_not_lose_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(encode, "_BYTES_PER_ARRAY", 30)
    monkeypatch.setattr(data_shards, "_SECONDS_BETWEEN_NOTES", -1.0)
    path, out = write_lines(tmp_path / "a.jsonl", ["one" * 9] * 9), tmp_path / "out"
    good = path.read_text()
    path.write_text(good + "3\n")
    argv = ["data", "--from", str(path), "--out", str(out)]
    assert main(argv) == 2 and "line 10 is int" in capsys.readouterr().err
    path.write_text(good + '{"text": "two"}\n')
    assert main(argv) == 0
    assert "going on behind" in capsys.readouterr().out
    assert open_tokens(out).tokens[:].tobytes() == b"one" * 81 + b"two"


def test_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(encode, "_BYTES_PER_ARRAY", 30)
    monkeypatch.setattr(data_shards, "_SECONDS_BETWEEN_NOTES", -1.0)
    content = write_lines(tmp_path / "a", ["one" * 9, "", "two" * 9, "three" * 9] * 5).read_bytes()
    argv, out = ["data", "--from", "-", "--out", str(tmp_path / "out")], tmp_path / "out"

    def piped(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))

    piped(content)
    assert killed_at(60, argv)
    piped(content.replace(b"one", b"ONE"))
    assert main(argv) == 2 and "bytes of - are others now" in capsys.readouterr().err
    piped(content)
    assert main(argv) == 0
    assert open_tokens(out).tokens[:].tobytes() == (b"one" * 9 + b"two" * 9 + b"three" * 9) * 5
    assert "15 documents (5 empty left out)" in capsys.readouterr().out
    assert main(["data", "--from", "-", str(tmp_path), "--out", str(tmp_path / "x")]) == 2


def test_ids_above_16_bits(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "t", 70_000, About(), "", [""]) as writer:
        writer.add(TokenChunk(np.array([65_535, 65_536, 69_999, 0], dtype=np.uint32), [4], [BEGINNING]))
        writer.finish()
    file = open_tokens(tmp_path / "t")
    assert file.tokens[:].tolist() == [65_535, 65_536, 69_999, 0] and file.about is not None
    assert file.about.largest == 69_999
    with (
        pytest.raises(ValueError, match="below vocab_size: got 70000"),
        ShardWriter(tmp_path / "u", 70_000, About(), "", []) as w,
    ):
        w.add(TokenChunk(np.array([70_000, 1], dtype=np.uint32), [2], [BEGINNING]))
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def check_workers(tmp_path: Path, kind: str, numbers: tuple[int, ...]) -> None:
    directory, rng = saved_tokenizer(tmp_path / "model", kind), random.Random(3)
    texts = [hard_text(rng, length) for length in (3, 300, 200_000, 5, 0, 4_000, 1, 300_000)]
    # The library itself loses a space behind a special token of this kind.
    texts = [text.replace(END, "") if kind == "llama2" else text for text in texts]
    write_lines(tmp_path / "b.jsonl", texts[:-1])
    (tmp_path / "a.txt").write_bytes(texts[-1].encode())
    argv = ["data", "--from", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), "--tokenizer", str(directory)]
    argv += ["--end", "0", "--begin", "1", "--shard-tokens", "50000"]
    made = []
    for number in numbers:
        out = tmp_path / f"out{number}"
        assert main([*argv, "--out", str(out), "--workers", str(number)]) == 0
        made.append(content_of(out))
    assert len(made[0]) > 1 and all(one == made[0] for one in made)
    # Text to tokens to text.
    source, library = (
        open_source(str(tmp_path / f"out{numbers[0]}")),
        Tokenizer.from_file(str(directory / "tokenizer.json")),
    )
    library.no_truncation()
    library.no_padding()
    starts = [*source.document_starts(0, source.num_tokens).tolist(), source.num_tokens]
    all_texts = [texts[-1], *filter(None, texts[:-1])]
    for text, begin, end in zip(all_texts, starts[:-1], starts[1:], strict=True):
        ids = source.read(begin, end - begin).tolist()
        assert (ids[0], ids[-1]) == (1, 0)
        assert library.decode(ids[1:-1], skip_special_tokens=False) == text


@pytest.mark.slow
def test_workers_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_CHARACTERS_PER_BATCH", 20_000)
    check_workers(tmp_path, "gpt2", (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2"])
def test_any_number_of_workers_gives_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(encode, "_CHARACTERS_PER_BATCH", 20_000)
    check_workers(tmp_path, kind, (1, 2, 4))


def test_a_worker_that_dies_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = saved_tokenizer(tmp_path / "model")
    write_lines(tmp_path / "a.jsonl", ["hello"])
    made = data_write.Pool.encode

    def kill_first(pool: data_write.Pool, batches: object) -> object:
        for process in pool._processes:
            process.kill()
        return made(pool, batches)  # type: ignore[arg-type]

    monkeypatch.setattr(data_write.Pool, "encode", kill_first)
    argv = ["data", "--from", str(tmp_path / "a.jsonl"), "--tokenizer", str(directory), "--workers", "2"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 2
    assert "a process that encodes has ended with code -9" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
