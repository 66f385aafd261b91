"""Rung: gloo ranks (one, in this process). A run's loop: what follows a step is of the step's phase; its end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tpengine import cli, train
from tpengine.checkpoint.index import read_index
from tpengine.checkpoint.resume import checkpoints_of

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48", "--model.num-layers", "1"),
    *("--train.seq-len", "16", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2", "--device", "cpu"),
    *("--train.eval-micro-batches", "2", "--train.sample-tokens", "0"),
)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_phase_whose_first_step_is_left_out_evaluates_on_its_own_text(tmp_path: Path) -> None:
    """Its held-out loss was that of the phase before, and decided which checkpoint is the best."""
    run_dir, phases = tmp_path / "out", tmp_path / "phases.toml"
    phases.write_text("[[phase]]\nuntil = 2\n\n[[phase]]\nuntil = 4\ntrain.seq_len = 48\n")
    flags = [*SMALL, "--run-dir", str(run_dir), "--phases", str(phases), "--train.eval-every", "1"]
    # Weights stay what they are, so that a loss differs by its text alone.
    flags += ["--optim.lr", "1e-30", "--train.checkpoint-every", "1", "--train.keep-checkpoints", "9"]
    train.main(flags)
    want = [row["held_out_loss"] for row in rows_of(run_dir)]
    assert want[0] == want[1] != want[2] == want[3]
    # The second phase's first step was skipped before a restart, from within the first phase.
    for step in (2, 3, 4):
        shutil.rmtree(checkpoints_of(run_dir).of_step(step))
    (run_dir / "skipped.jsonl").write_text('{"step": 2}\n')
    train.main([*flags, "--resume"])
    rows = rows_of(run_dir)
    assert [row.get("left_out", False) for row in rows] == [False, False, True, False]
    assert [row["held_out_loss"] for row in rows] == want
    saved = [read_index(checkpoints_of(run_dir).of_step(step)).state["held_out_loss"] for step in (2, 3, 4)]
    assert saved == want[1:]


def test_a_run_ends_with_what_is_next_and_diagnose_has_something_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 steps after warm-up are recorded; a step has one number everywhere."""
    run_dir = tmp_path / "out"
    train.main([*SMALL, "--run-dir", str(run_dir), "--train.steps", "12", "--train.sample-tokens", "2"])
    said = capsys.readouterr().out
    assert said.splitlines()[-4:] == [
        f"saved in {run_dir}/checkpoints/step-00000012",
        f"tpengine generate {run_dir} --prompt TEXT    what its model says",
        f"tpengine watch {run_dir}    what it has reported, drawn",
        f"tpengine diagnose {run_dir}    why its steps take as long as they do",
    ]
    assert said.count("held-out loss") == 1 and "step 12/12" in said and "recorded step" not in said
    assert [row["step"] for row in rows_of(run_dir)] == list(range(1, 13))
    assert [step["step"] for step in json.loads((run_dir / "profile.json").read_text())["steps"]] == list(range(5, 13))
    assert cli.main(["diagnose", str(run_dir)]) == 0 and "steps 5 to 12" in capsys.readouterr().out
    # Each start records some steps, and keeps no copies.
    train.main(["--run-dir", str(run_dir), "--resume", "--train.steps", "15"])
    assert [step["step"] for step in json.loads((run_dir / "profile.json").read_text())["steps"]] == [14, 15]
    assert not (run_dir / "profile.1.json").exists() and "recorded" not in capsys.readouterr().out


@pytest.mark.slow
def test_recording_leaves_the_bits_of_exact_mode(tmp_path: Path) -> None:
    numbers = []
    for given in ("auto", ""):
        flags = ["--train.steps", "6", "--train.reduction", "exact", "--train.eval-micro-batches", "0"]
        train.main([*SMALL, *flags, "--train.profile-steps", given, "--run-dir", str(tmp_path / f"out{given}")])
        rows = rows_of(tmp_path / f"out{given}")
        numbers.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert numbers[0] == numbers[1] and (tmp_path / "outauto" / "profile.json").exists()
    assert not (tmp_path / "out" / "profile.json").exists()
