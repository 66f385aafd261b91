"""Rung: pure; slow: programs. The benchmark of a whole run takes off evaluation's own time and compares losses first.

By default it reads files that stand for runs; when slow, those of real ones. No time is asserted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.timing import PASSED
from benchmarks.run import main
from benchmarks.training.whole import command
from benchmarks.training.whole.bare import WARMUP_STEPS

STEPS = WARMUP_STEPS + 4
TOKENS_PER_STEP = 8 * 128 * 4


def runs(loss_of_on: float) -> Any:
    """Write what runs would: steps of 2 s where all is on, and an evaluation of 3 s after every other; else of 1 s."""

    def start(options: command.Options, module: str, *arguments: str) -> None:
        run_dir = Path(arguments[arguments.index("--run-dir") + 1])
        if module != "tpengine.train":
            losses = [1.5] * options.steps
            (run_dir / "bare.json").write_text(json.dumps({"losses": losses, "seconds": 1.0 * 4}))
            return
        rows: list[dict[str, float]] = []
        for step in range(options.steps):
            evaluated = rows[-1].get("evaluation_seconds", 0.0) if rows else 0.0
            rows.append({"step": step + 1, "loss": loss_of_on, "wall_seconds": 2.0 + evaluated})
            if step % 2:
                rows[-1]["evaluation_seconds"] = 3.0
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return start


@pytest.mark.parametrize("loss", [1.5, 1.25])
def test_evaluation_is_taken_off_and_losses_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    monkeypatch.setattr(command, "_start", runs(loss))
    out = tmp_path / "rows.jsonl"
    assert main(["run", "--steps", str(STEPS), "--rounds", "2", "--out", str(out)]) == (loss != 1.5)
    (row,) = map(json.loads, out.read_text().splitlines())
    if loss != 1.5:
        assert row["check"].startswith("failed: other losses") and "on_over_off_median_ratio" not in row
        return
    assert (row["check"], row["case"], row["steps"]) == (PASSED, "run/tiny/1", 4)
    assert row["off_median_tokens_per_second"] == TOKENS_PER_STEP
    assert row["on_median_tokens_per_second"] == TOKENS_PER_STEP / 2
    assert row["on_over_off_median_ratio"] == 0.5


@pytest.mark.slow
def test_real_runs_have_the_same_losses(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert main(["run", "--ranks", "2", "--steps", "7", "--every", "2", "--rounds", "1", "--out", str(out)]) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["check"] == PASSED and row["on_over_off_median_ratio"] > 0 and row["evaluation_median_seconds"] > 0
