"""Rung: pure. The `tpengine` command prints schedules, writes token files, and refuses in one line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tpengine.cli import main
from tpengine.data import open_tokens
from tpengine.plan import Schedule, make_schedule, parse_plan, verify
from tpengine.plan.costs import spec_bytes


@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches", "makespan", "bubble", "peaks"),
    [
        ("1f1b", 4, 8, "33.0", "0.273", "4 3 2 1"),
        ("gpipe", 4, 8, "33.0", "0.273", "8 8 8 8"),
        ("1f1b", 8, 32, "117.0", "0.179", "8 7 6 5 4 3 2 1"),
        ("1f1b", 4, 2, "15.0", "0.600", "2 2 2 1"),
        ("1f1b", 1, 3, "9.0", "0.000", "1"),
        ("interleaved", 4, 8, "28.5", "0.158", "5.5 4.5 3.5 2.5"),
        ("zb-h1", 4, 8, "27.0", "0.111", None),
        ("zbv", 4, 8, "25.5", "0.059", "4 4 4 4"),
    ],
)
def test_schedule_prints_grid_makespan_bubble_and_peaks(
    schedule: str,
    pp: int,
    micro_batches: int,
    makespan: str,
    bubble: str,
    peaks: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["schedule", "--schedule", schedule, "--pp", str(pp), "--micro-batches", str(micro_batches)]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:pp]] == [["rank", str(rank)] for rank in range(pp)]
    assert lines[pp].startswith(f"makespan {makespan} ")
    assert lines[pp + 1] == f"bubble {bubble}"
    found = lines[pp + 2].removeprefix("peak live activations by rank: ")
    assert found == peaks if peaks else max(map(float, found.split())) <= pp
    assert len(lines) == pp + 3


def schedule(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["schedule", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_four_chunks_have_columns_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    lines = schedule(capsys, "--schedule", "interleaved", "--chunks", "4")
    assert lines[0].startswith("rank 0  0F0  0F1  0F2  0F3  4F0  4F1 ")
    assert lines[4] == "makespan 26.25 (a forward takes 1, a backward 2)"


def test_times_are_those_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    lines = schedule(capsys, "--pp", "2", "--micro-batches", "2", "--times", "F=1,B=3")
    assert lines[0] == "rank 0  F0 F1 .  .  .  B0------ .  B1------"
    assert lines[2] == "makespan 12.0 (a forward takes 1, a backward 3)"
    lines = schedule(capsys, "--schedule", "zb-h1", "--pp", "1", "--micro-batches", "1", "--times", "W=0.5")
    assert lines[1] == "makespan 2.5 (a forward takes 1, its input half 1, its weight half 0.5)"


def test_very_unequal_times_do_not_fill_the_disk(capsys: pytest.CaptureFixture[str]) -> None:
    lines = schedule(capsys, "--pp", "1", "--micro-batches", "2", "--times", "F=1e-9")
    assert len(lines[0]) < 1000


def test_links_and_reductions_take_the_time_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ["--pp", "2", "--micro-batches", "1"]
    assert schedule(capsys, *alone)[2].startswith("makespan 6.0 ")
    # There and back, and the first stage's bucket after its backward, the last action of the step.
    lines = schedule(capsys, *alone, "--link", "0.25", "--latency", "0.5", "--reduce", "0.125")
    assert lines[2].startswith("makespan 7.625 ")
    assert lines[5].startswith("exposed communication 0.")
    assert "stage 0 waits" in lines[5] or "stage 1 waits" in lines[5]


def test_a_picture_is_drawn_and_the_plan_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, text = tmp_path / "out.svg", tmp_path / "plan.txt"
    held = "saved=2e9,resident=1e9,boundary=1e6"
    argv = ["--schedule", "zbv", "--bytes", held, "--link", "0.1", "--draw", str(picture), "--plan-text", str(text)]
    lines = schedule(capsys, *argv)
    assert lines[-1].startswith("peak bytes by rank: ") and lines[-1].count(" GB") == 4
    root = ElementTree.parse(picture).getroot()
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text") if node.get("class") == "title"]
    assert titles == ["zbv, 4 ranks, 8 micro-batches"]
    boxes = [node for node in root.iter() if re.fullmatch(r"\d+[FIW]\d+", node.get("data-action", ""))]
    assert len(boxes) == 4 * 2 * 8 * 3
    plan = parse_plan(text.read_text())
    verify(plan)
    assert plan.num_microbatches == 8 and len(plan.chunks) == 8
    assert plan.chunks[1].input is not None and spec_bytes(plan.chunks[1].input) == 1_000_000
    assert not plan.buckets
    assert {path.name for path in tmp_path.iterdir()} == {"out.svg", "plan.txt"}


def test_a_schedule_of_the_users_is_drawn_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n")
    argv = ["--schedule", str(mine), "--pp", "2", "--micro-batches", "2"]
    lines = schedule(capsys, *argv, "--draw", str(tmp_path / "out.html"))
    assert lines[2].startswith("makespan 9.0 ")
    assert "mine, 2 ranks, 2 micro-batches" in (tmp_path / "out.html").read_text()
    assert main(["schedule", *argv, "--plan-text", str(mine)]) == 2
    assert "--plan-text must not replace the schedule read" in capsys.readouterr().err
    assert mine.read_text().startswith("rank 0: ")


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
        (["schedule", "--schedule", "1f1"], ["schedule must be one of", "'1f1'", "use 1f1b"]),
        (["schedule", "--schedule", "no/mine.txt"], ["no/mine.txt"]),
        (
            ["schedule", "--chunks", "2"],
            ["--chunks is for a schedule that leaves it open", "1f1b", "leave --chunks out"],
        ),
        (["schedule", "--times", "F=0"], ["--times", "above 0", "F=0", "use F=1"]),
        (["schedule", "--times", "G=1"], ["--times", "name=number", "'G=1'", "F=1,B=1,I=1,W=1"]),
        (["schedule", "--times", "F=fast"], ["--times", "a number of 0 or more", "'fast'"]),
        (["schedule", "--link", "-1"], ["--link", "a number of 0 or more", "'-1'", "use 0.1"]),
        (["schedule", "--latency", "nan"], ["--latency", "a number of 0 or more", "'nan'"]),
        (["schedule", "--bytes", "kept=1"], ["--bytes", "'kept=1'", "saved=1,deferred=1"]),
        (["schedule", "--draw", "out.pdf"], ["must end in one of .svg, .html, .png", "out.pdf", "use out.svg"]),
        (["schedule", "--draw", "no/where/out.svg"], ["directory that exists", "no/where/out.svg"]),
        (["schedule", "--pp", "500", "--micro-batches", "300", "--draw", "out.svg"], ["at most 200000 boxes"]),
        (
            ["schedule", "--schedule", "interleaved", "--chunks", "9", "--micro-batches", "100000"],
            ["--pp times --micro-batches times chunks", "4 times 100000 times 9, 3600000", "--micro-batches 27777"],
        ),
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
    made = []

    def make_small(name: str, pp: int, micro_batches: int, num_chunks: int) -> Schedule:
        made.append((pp, micro_batches, num_chunks))
        return make_schedule(name, 1, 1)

    monkeypatch.setattr("tpengine.schedule_command.make_schedule", make_small)
    largest = [(1000, 1000, 1), (7, 142857, 1), (1, 1000000, 1)]
    for pp, micro_batches, _ in largest:
        assert main(["schedule", "--pp", str(pp), "--micro-batches", str(micro_batches)]) == 0
    assert made == largest


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
