"""Rung: pure. The `tpengine` command prints schedules, writes token files, and refuses in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpengine.cli import main
from tpengine.data import open_tokens
from tpengine.plan import Timeline


@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches", "makespan", "bubble", "peaks"),
    [
        ("1f1b", 4, 8, "33.0", "0.273", "4 3 2 1"),
        ("gpipe", 4, 8, "33.0", "0.273", "8 8 8 8"),
        ("1f1b", 8, 32, "117.0", "0.179", "8 7 6 5 4 3 2 1"),
        ("1f1b", 4, 2, "15.0", "0.600", "2 2 2 1"),
        ("1f1b", 1, 3, "9.0", "0.000", "1"),
    ],
)
def test_schedule_prints_grid_makespan_bubble_and_peaks(
    schedule: str,
    pp: int,
    micro_batches: int,
    makespan: str,
    bubble: str,
    peaks: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["schedule", "--schedule", schedule, "--pp", str(pp), "--micro-batches", str(micro_batches)]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:pp]] == [["rank", str(rank)] for rank in range(pp)]
    assert lines[pp].startswith(f"makespan {makespan} ")
    assert lines[pp + 1] == f"bubble {bubble}"
    assert lines[pp + 2] == f"peak live activations by rank: {peaks}"


def test_data_writes_the_bytes_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.py").write_bytes(b"two")
    (tmp_path / "a.py").write_bytes(b"one\xff")
    (tmp_path / "c.txt").write_bytes(b"three")
    out = tmp_path / "text.tokens"
    for _ in range(2):
        assert main(["data", "--from", str(tmp_path), "--out", str(out), "--pattern", "*.py"]) == 0
        assert open_tokens(out).tokens.tobytes() == b"one\xfftwo"
    assert main(["data", "--from", str(tmp_path), "--out", str(out)]) == 0
    assert open_tokens(out).tokens.tobytes() == b"one\xfftwothree"
    assert open_tokens(out).vocab_size == 256
    assert f"--data.path {out}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["COMMAND", "--help"]),
        (["schedul"], ["'schedul'", "schedule", "--help"]),
        (["schedule", "--schedule", "1f1"], ["--schedule must be one of", "'1f1'", "use 1f1b"]),
        (["schedule", "--pp", "0"], ["--pp", "at least 1", "'0'", "use 1"]),
        (["schedule", "--micro-batches", "many"], ["--micro-batches", "an integer", "'many'"]),
        (
            ["schedule", "--pp", "1001", "--micro-batches", "1"],
            ["--pp must be at most 1000", "got 1001", "use --pp 1000"],
        ),
        (
            ["schedule", "--pp", "7", "--micro-batches", "142858"],
            ["--pp times --micro-batches must be at most 1000000", "7 times 142858, 1000006", "--micro-batches 142857"],
        ),
        (["schedule", "--stages", "4"], ["--stages", "--help"]),
        (["data", "--out", "x"], ["--from", "--help"]),
        (["data", "--from", "/nowhere/at/all", "--out", "x"], ["--from must be a directory", "/nowhere/at/all"]),
        (["data", "--from", ".", "--pattern", "*.none", "--out", "x"], ["not empty", "'*.none'"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tpengine: error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_output_directory_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(b"a")
    assert main(["data", "--from", str(tmp_path), "--out", str(tmp_path / "no" / "out")]) == 2
    assert "directory must exist" in capsys.readouterr().err


def test_the_largest_schedule_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def simulate_nothing(lists: object) -> Timeline:
        drawn.append(lists)
        return Timeline(((),))

    monkeypatch.setattr("tpengine.cli.simulate", simulate_nothing)
    monkeypatch.setattr("tpengine.cli.SCHEDULES", {"1f1b": lambda pp, micro_batches: (pp, micro_batches)})
    for pp, micro_batches in ((1000, 1000), (7, 142857), (1, 1000000)):
        assert main(["schedule", "--pp", str(pp), "--micro-batches", str(micro_batches)]) == 0
    assert drawn == [(1000, 1000), (7, 142857), (1, 1000000)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "folder",
            ["must be a regular file", "folder: is a directory", "choose a file, such as", "folder/text.tokens"],
        ),
        ("pipe", ["must be a regular file", "pipe: is a device or pipe", "choose another file"]),
        # Legal, but the temporary file beside it is not; then not legal itself.
        ("x" * 254, ["must be writable", f"/{'x' * 254}: File name too long", "choose another file"]),
        ("x" * 300, ["must be writable", f"/{'x' * 300}: File name too long", "choose another file"]),
    ],
)
def test_what_cannot_be_the_output_is_refused_in_one_line(
    name: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert main(["data", "--from", str(tmp_path), "--out", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for part in ["a token file", str(tmp_path), *parts]:
        assert part in err
    assert {path.name for path in tmp_path.iterdir()} == {"a", "folder", "pipe"}


@pytest.mark.parametrize("argv", [["--help"], ["schedule", "--help"], ["data", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    assert "usage: tpengine" in capsys.readouterr().out
