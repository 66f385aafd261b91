"""Rung: pure. How long a run will take, by the steps that it has taken; what the progress line says, and how often."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from tpengine.observe.console import Pace, ProgressLine, show_held_out, show_next


def row(step: int, wall_seconds: float) -> dict[str, Any]:
    figures = {"loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "peak_memory_bytes": 0, "step_seconds": 1.0}
    return {"step": step, "tokens_per_second": 8.0, "wall_seconds": wall_seconds, **figures}


def test_the_steps_of_a_start_are_left_out_of_the_estimate() -> None:
    pace = Pace()
    for step, seconds in enumerate((60.0, 20.0), 1):
        pace.add(row(step, seconds))
        assert pace.left(100) == ""
    for step in (3, 4):
        pace.add(row(step, 2.0))
        pace.add({"step": 9, "skipped": True, "left_out": True})
        assert (pace.left(10), pace.left(100), pace.left(0)) == ("20 s left", "0:03:20 left", "0 s left")


def test_a_held_out_loss_is_said_once() -> None:
    console = Console(file=io.StringIO(), width=200)
    with ProgressLine(console, 4) as progress:
        for step in range(1, 5):
            progress.update(row(step, 1.0))
            if step % 2 == 0:
                progress.evaluated(step + 0.25)
    show_held_out(console, 4.25)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("2.25") == 1 == said.count("4.25") and said.endswith("\nheld-out loss 4.2500 nats\n")
    assert [line.split()[1] for line in said.splitlines()[:-1]] == ["1/4", "2/4", "2/4", "3/4", "4/4"]


def test_mfu_is_said_in_both_ways_of_counting() -> None:
    """Over the wall time, as tokens/s are: this row took twice as long as its step."""
    console = Console(file=io.StringIO(), width=200)
    with ProgressLine(console, 1) as progress:
        progress.update(row(1, 2.0) | {"mfu_attention_causal": 0.994, "mfu_attention_full": 1.132})
    assert "4 tokens/s  MFU 49.7% (attention whole 56.6%)" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_hottest_expert_of_all_layers_is_said() -> None:
    console = Console(file=io.StringIO(), width=200)
    with ProgressLine(console, 1) as progress:
        progress.update(row(1, 1.0) | {"expert_load/0": 1.5, "expert_load/3": 2.25, "expert_tokens/3": 96})
    assert "0.00 GB  hottest expert 2.25x  0 s left" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_end_says_what_is_next(tmp_path: Path) -> None:
    console, run_dir = Console(file=io.StringIO(), width=200), tmp_path / "my run"
    run_dir.mkdir()
    show_next(console, run_dir, None)
    (run_dir / "profile.json").touch()
    show_next(console, run_dir, run_dir / "checkpoints/step-00000004")
    first, *said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "saves no checkpoint" in first and said[0].startswith(f"tpengine watch '{run_dir}'")
    assert said[1] == f"saved in {run_dir}/checkpoints/step-00000004"
    assert [line.split()[1] for line in said[2:]] == ["generate", "watch", "diagnose"]
