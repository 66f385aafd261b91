"""Rung: gloo ranks (one, in this process). The loop of a run: what follows a step belongs to the step's phase."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tpengine import train
from tpengine.checkpoint.index import read_index
from tpengine.checkpoint.run.resume import checkpoints_of

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48", "--model.num-layers", "1"),
    *("--train.seq-len", "16", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2", "--device", "cpu"),
    *("--train.eval-micro-batches", "2", "--train.sample-tokens", "0"),
)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


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
