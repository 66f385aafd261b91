"""Rung: gloo ranks, most of them started by themselves. A run goes back because a step leaped.

What comes out is, bit by bit, the run that was told at its start which samples to leave out: also if it is killed
meanwhile, in other layouts, and over a border of phases.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from support.engine.spike_program import scramble
from support.programs import finish_all, start_ranks

from tpengine import train
from tpengine.checkpoint.resume import checkpoints_of
from tpengine.checkpoint.rollbacks import FILE_NAME
from tpengine.cli import main

PROGRAM = "support.engine.spike_program"
# For one rank; the last value of a flag counts.
SMALL = (
    *("--train.num-micro-batches", "4"),
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.num-kv-heads", "2", "--model.ffn-size", "48"),
    *("--model.num-layers", "2", "--train.seq-len", "32", "--train.micro-batch-size", "2", "--device", "cpu"),
    *("--train.eval-micro-batches", "2", "--train.eval-every", "4", "--train.sample-tokens", "0", "--optim.lr", "3e-2"),
    *("--train.reduction", "exact", "--train.checkpoint-every", "4", "--train.keep-checkpoints", "1"),
    *("--optim.decay-steps", "20", "--optim.warmup-steps", "2", "--preset", "tiny", "--resume"),
)
STEPS, LEAP = 20, 14
# 8 samples a step; the second micro-batch of the step that leaps.
BAD = f"{LEAP * 8 + 2}:{LEAP * 8 + 4}"
ROLLBACK = ("--train.spike", "rollback 5 6")
ONE, DP, TP, PP = ({"dp": 1}, {"dp": 2}, {"tp": 2}, {"pp": 2})


def go(
    run_dir: Path, layout: Mapping[str, int], *more: str, steps: int = STEPS, **environ: str
) -> CompletedProcess[str]:
    """Start a run, or go on with it; what rank 0 said."""
    shape = {"tp": 1, "pp": 1, "dp": 1, **layout}
    num_ranks = shape["tp"] * shape["pp"] * shape["dp"]
    flags = [text for axis, size in shape.items() for text in (f"--parallel.{axis}", str(size))]
    batch = ("--train.num-micro-batches", str(4 // shape["dp"]), "--train.steps", str(steps))
    command = (PROGRAM, *SMALL, *flags, *batch, "--run-dir", str(run_dir), *more)
    started = start_ranks(num_ranks, *command, cwd=None, **environ)
    return finish_all(*started)[0]


def go_here(run_dir: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    """The same in this process, one rank; the exit code."""
    monkeypatch.setattr(sys, "argv", ["train", *SMALL, "--train.steps", str(STEPS), "--run-dir", str(run_dir), *more])
    undo = scramble(BAD)
    try:
        train.main()
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        undo()
    return 0


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def numbers_of(run_dir: Path) -> list[tuple[Any, ...]]:
    """Step, loss, norm, rate and held-out loss of every step, in the order of the file."""
    rows = [row for row in rows_of(run_dir) if "loss" in row]
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"], row.get("held_out_loss")) for row in rows]


def told_beforehand(run_dir: Path, list_from: Path, *more: str, steps: int = STEPS) -> Path:
    """Run from the start with the list of another run, judging nothing."""
    run_dir.mkdir()
    (run_dir / FILE_NAME).write_bytes((list_from / FILE_NAME).read_bytes())
    end = go(run_dir, ONE, *more, steps=steps, BAD=BAD)
    assert end.returncode == 0, end
    return run_dir


def is_identical(one: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether weights and moments of the newest checkpoints are, bit for bit."""
    code = main(["checkpoint", "diff", str(one), str(other)])
    said = capsys.readouterr().out
    return code == 0 and "every bit" in said


@pytest.mark.slow
def test_a_rollback_has_the_bits_of_a_run_that_was_told_what_to_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    assert go_here(run, monkeypatch, *ROLLBACK) == 0
    said = capsys.readouterr().out
    assert f"step {LEAP + 1} leaps: loss " in said and "goes back to step 9, without the 8 samples" in said
    # The window's first step is 8: a checkpoint of 8 steps is the newest that is older.
    (listed,) = [json.loads(line) for line in (run / FILE_NAME).read_text().splitlines()]
    assert (listed["step"], listed["to"], listed["samples"]) == (LEAP + 1, 8, [[LEAP * 8, LEAP * 8 + 8]])
    events = [row for row in rows_of(run) if "event" in row]
    assert [(row["step"], row["event"], row["to"], "loss" in row) for row in events] == [
        (LEAP + 1, "rollback", 8, False)
    ]
    assert events[0]["spike_loss"] == listed["loss"]
    told.mkdir()
    (told / FILE_NAME).write_bytes((run / FILE_NAME).read_bytes())
    assert go_here(told, monkeypatch) == 0
    assert numbers_of(run) == numbers_of(told) and len(numbers_of(run)) == STEPS
    assert is_identical(run, told, capsys)
    # Checkpoints that a rollback may need stay besides the newest one.
    assert checkpoints_of(run).steps() == [12, 16, 20] and checkpoints_of(told).steps() == [20]


@pytest.mark.slow
def test_a_skip_has_the_bits_of_a_run_that_was_told_to_leave_the_step_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    assert go_here(run, monkeypatch, "--train.spike", "skip 5 6") == 0
    (event,) = [row for row in rows_of(run) if "event" in row]
    assert (event["step"], event["event"], event["skipped"], event["skipped_steps"]) == (LEAP + 1, "skip", True, 0)
    assert event["spike_loss"] > 4 and event["lr"] > 0 and "loss" not in event
    told.mkdir()
    (told / "skipped.jsonl").write_text(json.dumps({"step": LEAP + 1, "counted_from": 1}) + "\n")
    assert go_here(told, monkeypatch) == 0
    left_out = [row for row in rows_of(told) if row.get("left_out")]
    assert [row["step"] for row in left_out] == [LEAP + 1]
    assert numbers_of(run) == numbers_of(told) and len(numbers_of(run)) == STEPS - 1
    assert is_identical(run, told, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "where", "number"),
    [
        (DP, "loaded", signal.SIGKILL),
        (TP, "removed", signal.SIGKILL),
        (PP, "listed", signal.SIGKILL),
        (PP, "loaded", signal.SIGTERM),
        ({"dp": 2, "pp": 2}, "removed", signal.SIGTERM),
        (DP, "listed", signal.SIGTERM),
    ],
)
def test_a_run_that_is_killed_while_it_goes_back_goes_on_in_another_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: dict[str, int], where: str, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    last_rank = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1) - 1
    rank = 0 if where == "removed" else last_rank
    end = go(run, layout, *ROLLBACK, BAD=BAD, ACCIDENT=f"{where}:{number.value}:{rank}")
    assert end.returncode != 0, end
    assert (run / FILE_NAME).exists() == (where == "listed" or number == signal.SIGTERM)
    end = go(run, ONE if layout != ONE else DP, *ROLLBACK, BAD=BAD)
    assert end.returncode == 0, end
    assert len((run / FILE_NAME).read_text().splitlines()) == 1
    want = told_beforehand(tmp_path / "told", run)
    assert numbers_of(run) == numbers_of(want) and is_identical(run, want, capsys)


PHASES = """
[[phase]]
until = 10

[[phase]]
micro_batches = 4
train.seq_len = 16
"""


@pytest.mark.slow
def test_a_rollback_goes_over_a_border_of_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step that leaps is in the second phase, which has an order of its own; the checkpoint is of the first."""
    file, run = tmp_path / "phases.toml", tmp_path / "run"
    file.write_text(PHASES)
    phases = ("--phases", str(file))
    bad = "1/34:36"
    # Before half a window of the phase nothing is judged: 4 steps of 8 samples.
    end = go(run, PP, *phases, *ROLLBACK, BAD=bad)
    assert end.returncode == 0, end
    (listed,) = [json.loads(line) for line in (run / FILE_NAME).read_text().splitlines()]
    assert (listed["step"], listed["to"], listed["order"], listed["samples"]) == (15, 8, 1, [[32, 40]])
    told = tmp_path / "told"
    told.mkdir()
    (told / FILE_NAME).write_bytes((run / FILE_NAME).read_bytes())
    assert go(told, DP, *phases, BAD=bad).returncode == 0
    assert numbers_of(run) == numbers_of(told) and is_identical(run, told, capsys)


@pytest.mark.slow
def test_three_rollbacks_to_one_checkpoint_are_the_most(tmp_path: Path) -> None:
    """Everything from the step on is bad: the fourth leap ends the run, whose state before it is saved."""
    run = tmp_path / "run"
    end = go(run, DP, *ROLLBACK, BAD=f"{LEAP * 8}:1000")
    assert end.returncode == 2
    assert "3 rollbacks have led to step 8 before" in end.stderr and "--train.spike skip" in end.stderr
    listed = [json.loads(line)["samples"] for line in (run / FILE_NAME).read_text().splitlines()]
    assert listed == [[[first, first + 8]] for first in (LEAP * 8, LEAP * 8 + 8, LEAP * 8 + 16)]
    assert checkpoints_of(run).steps()[-1] == LEAP
    again = go(run, DP, *ROLLBACK, BAD=f"{LEAP * 8}:1000")
    assert again.returncode == 2 and "3 rollbacks have led to step 8" in again.stderr
    assert go(run, DP, "--train.spike", "", BAD="").returncode == 0


@pytest.mark.slow
def test_without_an_older_checkpoint_the_run_begins_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    late = ("--train.checkpoint-every", "12")
    end = go(run, TP, *ROLLBACK, *late, BAD=BAD)
    assert end.returncode == 0, end
    (listed,) = [json.loads(line) for line in (run / FILE_NAME).read_text().splitlines()]
    assert (listed["step"], listed["to"]) == (LEAP + 1, 0) and "goes back to step 1," in end.stdout
    want = told_beforehand(tmp_path / "told", run, *late)
    assert numbers_of(run) == numbers_of(want) and is_identical(run, want, capsys)


@pytest.mark.slow
def test_stop_ends_before_the_update_and_the_run_can_go_on_either_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    end = go(run, DP, "--train.spike", "stop 5 6", BAD=BAD)
    assert end.returncode == 2 and f"step {LEAP + 1} leaps" in end.stderr and f"step-000000{LEAP}" in end.stderr
    assert rows_of(run)[-1]["event"] == "stop" and "loss" not in rows_of(run)[-1]
    end = go(run, DP, "--train.spike", "skip 5 6", BAD=BAD)
    assert end.returncode == 0, end
    straight = tmp_path / "straight"
    assert go(straight, ONE, "--train.spike", "skip 5 6", BAD=BAD).returncode == 0
    assert is_identical(run, straight, capsys)
    events: Sequence[dict[str, Any]] = [row for row in rows_of(run) if "event" in row]
    assert [(row["step"], row["event"], "loss" in row, row["skipped"]) for row in events] == [
        (LEAP + 1, "skip", False, True)
    ]
    assert numbers_of(run) == numbers_of(straight)
