"""Rung: pure. The `tpengine` command prints schedules, and refuses in one line."""

from __future__ import annotations

import builtins
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.ranks.progress import run_program

from tpengine.cli import main
from tpengine.config import validate
from tpengine.config.presets import certify
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.plan import Schedule, make_schedule, parse_plan, verify
from tpengine.planner import simulate
from tpengine.planner.costs import spec_bytes
from tpengine.planner.modelled.costs import model_costs


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
    # A chunk of two on a rank takes half as long, and so lasts a column.
    if schedule in ("interleaved", "zbv"):
        assert lines.pop(pp) == "a column is 0.5"
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
    assert lines[4:6] == ["a column is 0.25", "makespan 26.25 (a forward takes 1, a backward 2)"]


def test_peaks_of_thirds_have_two_decimals(capsys: pytest.CaptureFixture[str]) -> None:
    lines = schedule(capsys, "--schedule", "interleaved", "--chunks", "3")
    assert lines[-1] == "peak live activations by rank: 5 4.33 3.67 3"


@pytest.mark.parametrize("costs", [["--link", "0.5"], ["--link", "0.1"], ["--times", "F=1,B=2.5"]])
def test_the_grid_has_every_action(costs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for line, actions in zip(schedule(capsys, *costs), make_schedule("1f1b", 4, 8).compute, strict=False):
        assert re.findall("[FB][0-9]+", line) == [str(action)[1:] for action in actions]


def test_times_are_those_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    lines = schedule(capsys, "--pp", "2", "--micro-batches", "2", "--times", "F=1,B=3")
    assert lines[0] == "rank 0  F0 F1 .  .  .  B0------ .  B1------"
    assert lines[2] == "makespan 12.0 (a forward takes 1, a backward 3)"
    lines = schedule(capsys, "--schedule", "zb-h1", "--pp", "1", "--micro-batches", "1", "--times", "W=0.5")
    assert lines[1] == "a column is 0.5"
    assert lines[2] == "makespan 2.5 (a forward takes 1, its input half 1, its weight half 0.5)"


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


def test_one_communicator_takes_longer_than_one_for_each_direction(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--schedule", "zb-h1", "--pp", "4", "--micro-batches", "16", "--link", "0.1"]
    pair, default, direction, one = (
        float(schedule(capsys, *argv, *channels)[4].split()[1])
        for channels in (["--channels", "pair"], [], ["--channels", "direction"], ["--channels", "one"])
    )
    assert pair == default == direction < one


def test_a_picture_is_drawn_and_the_plan_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, text = tmp_path / "out.svg", tmp_path / "plan.txt"
    held = "saved=2e9,resident=1e9,boundary=1e6"
    argv = ["--schedule", "zbv", "--bytes", held, "--link", "0.1", "--draw", str(picture), "--plan-text", str(text)]
    lines = schedule(capsys, *argv)
    assert lines[-3].startswith("peak bytes by rank: ") and lines[-3].count(" GB") == 4
    assert lines[-2:] == [f"wrote {picture}", f"wrote {text}"]
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
    settings = tmp_path / "settings.toml"
    settings.write_text("[parallel]\npp = 2\ntp = 1\ndp = 1\n")
    assert main(["schedule", "--model", str(settings), "--plan-text", str(settings)]) == 2
    assert "--plan-text must not replace the model read" in capsys.readouterr().err
    assert settings.read_text().startswith("[parallel]")
    assert mine.read_text().startswith("rank 0: ")


def test_one_rank_and_one_micro_batch_are_named_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    schedule(capsys, "--pp", "1", "--micro-batches", "1", "--draw", str(page))
    assert "<title>1f1b, 1 rank, 1 micro-batch</title>" in page.read_text()


@pytest.mark.parametrize(("columns", "num_parts"), [(106, 1), (105, 2), (80, 2), (41, 3), (40, 4)])
def test_a_terminal_shows_a_grid_in_parts(
    columns: int, num_parts: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [line.ljust(106) for line in schedule(capsys)[:4]]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = schedule(capsys)
    assert len(lines) == 4 * num_parts + (num_parts - 1) + 3 and max(map(len, lines[:-3])) <= columns
    # Joined again they are the grid.
    width = 3 * ((columns - 8) // 3)
    for rank in range(4):
        parts = [line[8:].ljust(width) for line in lines[:-3] if line.startswith(f"rank {rank}")]
        assert "".join(parts).rstrip() == whole[rank][8:].rstrip()


def test_a_terminal_is_told_what_it_cannot_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    lines = schedule(capsys)
    assert lines[0] == "the grid needs 106 columns, the terminal has 30: add --draw plan.svg, or | less -S"
    assert [line.split()[0] for line in lines[1:]] == ["makespan", "bubble", "peak"]


@pytest.mark.by_default("1000")
@pytest.mark.parametrize("micro_batches", ["2", "1000"])
def test_a_reader_that_leaves_is_no_mistake(micro_batches: str, tmp_path: Path) -> None:
    """Whether what is printed fits in a buffer, which is flushed at the end, or not."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "tpengine.cli", "schedule", "--pp", "2", "--micro-batches", micro_batches]
    try:
        done = run_program([*command, "--plan-text", "plan.txt"], cwd=tmp_path, stdout=writes, stderr=subprocess.PIPE)
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
    assert (tmp_path / "plan.txt").read_text().startswith("plan")


@pytest.mark.by_default("--help")
@pytest.mark.parametrize("command", ["--help", "schedule --help", pytest.param("train --help", marks=pytest.mark.slow)])
def test_a_reader_of_help_may_leave(command: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = run_program(
            [sys.executable, "-m", "tpengine.cli", *command.split()], stdout=writes, stderr=subprocess.PIPE
        )
    finally:
        os.close(writes)
    assert done.stderr == b""


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"tpengine {importlib.metadata.version('tpengine')}\n"


def test_train_is_the_training_program(capsys: pytest.CaptureFixture[str]) -> None:
    """Its options, its refusals, its exit codes; test_train.py tells what it does."""
    with pytest.raises(SystemExit) as left:
        main(["train", "--train.dtype", "float17"])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(
        "tpengine: error: --train.dtype must be one of float64, float32, bfloat16"
    )
    with pytest.raises(SystemExit) as left:
        main(["train", "--help"])
    assert left.value.code == 0 and "--optim.lr FLOAT" in capsys.readouterr().out


BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def predicted(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[float, float, list[float]]:
    """Return the step's seconds, the bubble, and each rank's peak bytes of what is predicted for a preset."""
    text = "\n".join(schedule(capsys, "--model", *argv))
    step = re.search(r"^makespan (\S+) s, the whole step$", text, re.MULTILINE)
    bubble = re.search(r"^bubble (\S+)$", text, re.MULTILINE)
    peaks = re.search(r"^peak bytes by rank: (.*)$", text, re.MULTILINE)
    assert step and bubble and peaks
    held = [float(number) * BYTES[unit] for number, unit in map(str.split, peaks[1].split(","))]
    return float(step[1]), float(bubble[1]), held


def test_the_plan_of_a_run_is_predicted_as_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    lines = schedule(capsys, "--model", "tiny", "--tp", "2", "--dp", "2")
    assert [line.split()[:2] for line in lines[:4]] == [["rank", str(rank)] for rank in range(4)]
    assert re.fullmatch(r"a column is \S+ s", lines.pop(4))
    assert lines[4].endswith(" s, the whole step") and lines[5].startswith("bubble 0.")
    assert lines[7].startswith("exposed communication 0.") and "of the step on stage" in lines[7]
    assert lines[8].count(" MB") == 4
    assert [line.split(":")[0] for line in lines[9:13]] == [f"bytes of rank {rank}" for rank in range(4)]
    assert lines[13] == (
        "seconds and bytes are modelled, not measured: tp 2, pp 4, dp 2, a float32 model at the rates of cpu (one CPU "
        "core per rank)"
    )
    assert len(lines) == 14


def test_what_is_predicted_is_the_plan_and_the_costs_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "plan.txt"
    argv = ["certify", "--pp", "2", "--dp", "2", "--micro-batches", "4", "--recompute", "attention"]
    step, bubble, peaks = predicted(capsys, *argv, "--plan-text", str(text))
    base = certify()
    parallel = replace(base.parallel, tp=1, pp=2, dp=2, recompute="attention")
    config = validate(replace(base, parallel=parallel, train=replace(base.train, num_micro_batches=4)), 4)
    layout = layout_of(config)
    plan = training_plan(config, layout)
    assert text.read_text() == plan.text()
    assert plan.buckets and plan.ties
    timeline = simulate(plan, model_costs(config, layout, plan))
    assert step == pytest.approx(timeline.makespan, rel=1e-3)
    assert bubble == pytest.approx(timeline.bubble, abs=1e-3)
    assert peaks == pytest.approx([rank.peak_bytes for rank in timeline.ranks], rel=1e-2)


def test_computing_again_takes_time_and_saves_memory(capsys: pytest.CaptureFixture[str]) -> None:
    step, _, peaks = predicted(capsys, "bench")
    again, _, lower = predicted(capsys, "bench", "--recompute", "block")
    assert again > 1.2 * step
    assert all(less < more for less, more in zip(lower, peaks, strict=True))


def test_gathering_again_saves_memory(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, peaks = predicted(capsys, "bench", "--tp", "2")
    _, _, lower = predicted(capsys, "bench", "--tp", "2", "--gathered", "again")
    assert all(less < more for less, more in zip(lower, peaks, strict=True))
    # One rank gathers nothing.
    assert predicted(capsys, "bench") == predicted(capsys, "bench", "--gathered", "again")


def test_a_v_schedule_has_the_smaller_bubble_and_evens_out_memory(capsys: pytest.CaptureFixture[str]) -> None:
    step, bubble, peaks = predicted(capsys, "bench", "--schedule", "1f1b")
    shorter, smaller, even = predicted(capsys, "bench", "--schedule", "zbv")
    assert shorter < step and smaller < bubble / 2
    assert max(even) / min(even) < 1.1 < max(peaks) / min(peaks)


def test_a_faster_machine_takes_less_time_and_the_same_memory(capsys: pytest.CaptureFixture[str]) -> None:
    core, _, peaks = predicted(capsys, "llama_1b", "--machine", "cpu")
    slower, _, more = predicted(capsys, "llama_1b", "--machine", "a100")
    gpu, _, same = predicted(capsys, "llama_1b", "--machine", "h200")
    assert gpu < slower < core / 100 and same == more
    # NCCL's buffers are there on GPUs alone.
    assert all(0 <= with_them - without < 0.5e9 for with_them, without in zip(more, peaks, strict=True))
    last = schedule(capsys, "--model", "llama-1b", "--machine", "h200")[-1]
    assert last.endswith("a bfloat16 model at the rates of h200 (data sheet, and shares from microbenchmarks)")


def test_a_configuration_is_read_and_options_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[parallel]\npp = 2\ndp = 2\nschedule = "interleaved"\n[train]\nnum_micro_batches = 6\n')
    picture = tmp_path / "out.svg"
    lines = schedule(capsys, "--model", str(file), "--draw", str(picture))
    assert len(lines) == 2 + 2 + 8 and "5F1" not in lines[0] and "3F5" in lines[1]
    drawn = picture.read_text()
    assert "interleaved, tp 1, pp 2, dp 2, 6 micro-batches, modelled for cpu" in drawn
    assert " MB" in drawn and "forwards" not in drawn
    lines = schedule(capsys, "--model", str(file), "--pp", "4", "--schedule", "gpipe", "--dp", "1")
    assert len(lines) == 4 + 4 + 7
    assert lines[0].startswith("rank 0  F0  F1  F2  F3  F4  F5  F6 ") and "F12" not in lines[0]
    assert "pp 4, dp 1, a float32 model" in lines[-1]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[parallel]\npp = -1\n", ["pp must be at least 1", "got -1", "use 1"]),
        ("[train]\nnum_micro_batches = 0\n", ["train.num_micro_batches must be at least 1", "got 0"]),
        (
            "[train]\nnum_micro_batches = 300000\n",
            ["train.num_micro_batches must be at most", "got 300000", "use 16384"],
        ),
        ("[train]\nmicro_batches = 2\n", ["unknown key train.micro_batches"]),
        ('[parallel]\ngathered = "again"\n[train]\nreduction = "exact"\n', ["parallel.gathered again", "use parallel"]),
    ],
)
def test_mistakes_in_a_file_are_one_line_too(
    text: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert main(["schedule", "--model", str(tmp_path / "config.toml")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["COMMAND", "--help"]),
        (["schedul"], ["'schedul'", "schedule", "--help"]),
        (["schedule", "--schedule", "1f1"], ["schedule must be one of", "'1f1'", "use 1f1b"]),
        (["schedule", "--schedule", "nosuch"], ["'nosuch': use one of these, or ./nosuch for a file"]),
        (["schedule", "--schedule", "no/mine.txt"], ["no/mine.txt"]),
        (
            ["schedule", "--chunks", "2"],
            ["--chunks is for a schedule that leaves it open", "1f1b", "leave --chunks out"],
        ),
        (["schedule", "--times", "F=0"], ["--times", "above 0", "F=0", "use F=1"]),
        (["schedule", "--times", "G=1"], ["--times", "name=number", "'G=1'", "F=1,B=2,I=1,W=1"]),
        (["schedule", "--times", "B=fast"], ["--times", "a number of 0 or more", "'fast'", "use B=2"]),
        (["schedule", "--link", "-1"], ["--link", "a number of 0 or more", "'-1'", "use 0.1"]),
        (["schedule", "--latency", "nan"], ["--latency", "a number of 0 or more", "'nan'"]),
        (["schedule", "--bytes", "kept=1"], ["--bytes", "'kept=1'", "saved=1,deferred=1"]),
        (["schedule", "--draw", "out.pdf"], ["must end in one of .svg, .html, .png", "out.pdf", "use out.svg"]),
        (["schedule", "--draw", "no/where/out.svg"], ["directory that exists", "no/where/out.svg"]),
        (["schedule", "--draw", "/proc/out.svg"], ["must be writable", "/proc/out.svg", "choose another file"]),
        (["schedule", "--plan-text", "no/where/plan.txt"], ["directory that exists", "no/where/plan.txt"]),
        (["schedule", "--plan-text", "/proc/plan.txt"], ["must be writable", "/proc/plan.txt"]),
        (["schedule", "--draw", "/tmp/a.svg", "--plan-text", "/tmp/./a.svg"], ["need two files: got /tmp/a.svg twice"]),
        (["schedule", "--plan-text", "-"], ["--plan-text needs the name of a file", "use --plan-text plan.txt"]),
        (["schedule", "--pp", "500", "--micro-batches", "300", "--draw", "out.svg"], ["at most 200000 boxes"]),
        (
            ["schedule", "--schedule", "interleaved", "--chunks", "9", "--micro-batches", "100000"],
            ["--pp times --micro-batches times chunks", "4 times 100000 times 9, 3600000", "--micro-batches 27777"],
        ),
        (["schedule", "--pp", "0"], ["--pp", "an integer of 1 to 16777216", "'0'", "use 1"]),
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
        (["schedule", "--tp", "2"], ["--tp is for a model", "got no --model", "add --model tiny"]),
        (["schedule", "--machine", "h200"], ["--machine is for a model", "add --model tiny"]),
        (["schedule", "--model", "tinny"], ["--model must be one of tiny, bench", "'tinny'", "use tiny"]),
        (["schedule", "--model", "llama_7b"], ["'llama_7b'", "use one of these, or check the path"]),
        (["schedule", "--model", "tiny", "--dtype", "fp8"], ["--dtype", "'fp8'", "use one of these"]),
        (["schedule", "--preset", "tiny"], ["--preset is spelled otherwise", "use --model NAME"]),
        (["schedule", "--model.path", "x"], ["--model.path is spelled otherwise", "use --model DIR"]),
        (["schedule", "--config=x.toml"], ["--config is spelled otherwise", "use --model FILE.toml"]),
        (["schedule", "--model", "tiny", "--pp", "1,2"], ["works one layout out: got --pp 1,2"]),
        (
            ["schedule", "--model", "tiny", "--micro-batches", "4", "--global-batch", "32"],
            ["--micro-batches 4 and --global-batch 32: leave one out"],
        ),
        (["schedule", "--model", "no/x.toml"], ["--config needs a readable file", "no/x.toml", "check the path"]),
        (["schedule", "--model", "tiny", "--tp", "3"], ["heads must be divisible by tp", "tp 3", "use --tp 2 or 4"]),
        (["schedule", "--model", "tiny", "--pp", "8"], ["every pipeline stage needs a layer", "pp 8", "use pp 4"]),
        (
            ["schedule", "--model", "tiny", "--schedule", "zbv"],
            ["every chunk of a schedule needs a layer", "8 chunks"],
        ),
        (["schedule", "--model", "tiny", "--chunks", "3"], ["chunks per rank are of the interleaved schedule: got 3"]),
        (["schedule", "--model", "tiny", "--recompute", "all"], ["--recompute", "none, attention", "'all'"]),
        (["schedule", "--model", "tiny", "--gathered", "no"], ["--gathered", "keep, again", "'no'"]),
        (["schedule", "--model", "tiny", "--machine", "tpu"], ["--machine", "cpu, v100-32", "'tpu'", "use h200:8x4"]),
        *(
            (["schedule", *model, f"--{name}", value], [f"{model[0]} says what actions cost", f"leave --{name} out"])
            for model in (["--model", "tiny"], ["--model", "x.toml"])
            for name, value in (
                ("times", "B=3"),
                ("link", "1"),
                ("latency", "1"),
                ("reduce", "1"),
                ("bytes", "saved=1"),
                ("profile", "profile.json"),
            )
        ),
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


def test_the_largest_schedule_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make_small(name: str, pp: int, micro_batches: int, num_chunks: int) -> Schedule:
        made.append((pp, micro_batches, num_chunks))
        return make_schedule(name, 1, 1)

    monkeypatch.setattr("tpengine.commands.schedule.make_schedule", make_small)
    largest = [(1000, 1000, 1), (7, 142857, 1), (1, 1000000, 1)]
    for pp, micro_batches, _ in largest:
        assert main(["schedule", "--pp", str(pp), "--micro-batches", str(micro_batches)]) == 0
    assert made == largest


@pytest.mark.parametrize("argv", [["--help"], ["schedule", "--help"], ["data", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    assert "usage: tpengine" in capsys.readouterr().out


def test_an_interrupt_while_commands_are_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def interrupted(name: str, *rest: Any, **more: Any) -> Any:
        if name == "tpengine.commands":
            raise KeyboardInterrupt
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "tpengine: interrupted; no process and no unfinished file is left\n"
