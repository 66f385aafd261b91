"""Rung: pure. What a step reports is written by a thread: in order, whole, and without training's waiting for it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tpengine.observe.metrics import BackgroundWriter, MetricsWriter


class SlowWriter(MetricsWriter):
    """A writer whose directory takes nothing before it is told to."""

    def __init__(self, run_dir: Path, gate: threading.Event) -> None:
        super().__init__(run_dir)
        self._gate = gate

    def write(self, record: dict[str, Any]) -> None:
        assert self._gate.wait(60), "who writes a row waits for its directory"
        super().write(record)


def test_rows_are_in_order_and_nobody_waits_for_them(tmp_path: Path) -> None:
    gate, path = threading.Event(), tmp_path / "metrics.jsonl"
    writer = BackgroundWriter(SlowWriter(tmp_path, gate))
    for step in range(3):
        writer.write({"step": step, "loss": 1.5})
    writer.complete(2, {"held_out_loss": 2.5})
    assert not path.read_text()
    gate.set()
    writer.flush()
    want = [{"step": 0, "loss": 1.5}, {"step": 1, "loss": 1.5}, {"step": 2, "loss": 1.5, "held_out_loss": 2.5}]
    assert [json.loads(line) for line in path.read_text().splitlines()] == want
    writer.write({"step": 3, "loss": 1.5})
    writer.close()
    assert len(path.read_text().splitlines()) == 4


class Taker:
    """Takes rows as Weights & Biases does."""

    def __init__(self) -> None:
        self.rows, self.ends = list[tuple[int, dict[str, Any]]](), list[int]()

    def add(self, step: int, values: dict[str, Any]) -> None:
        assert not self.ends, "a run that is closed takes no row"
        self.rows.append((step, values))

    def close(self, exit_code: int) -> None:
        self.ends.append(exit_code)


@pytest.mark.parametrize("exit_code", [0, 2])
def test_others_hear_how_a_run_ends_and_of_what_follows_a_rollback(tmp_path: Path, exit_code: int) -> None:
    taker = Taker()
    writer = BackgroundWriter(MetricsWriter(tmp_path, wandb=taker))  # type: ignore[arg-type]
    writer.write({"step": 0, "loss": 1.5})
    writer.go_back(0)
    writer.write({"step": 0, "loss": 2.5})
    writer.exit_code = exit_code
    writer.close()
    assert [row["loss"] for _, row in taker.rows] == [1.5, 2.5] and taker.ends == [exit_code]


def test_a_row_that_is_no_row_is_an_error_at_the_next(tmp_path: Path) -> None:
    writer = BackgroundWriter(MetricsWriter(tmp_path))
    writer.write({"step": 0, "loss": object()})
    writer._tasks.put(None)
    writer._thread.join()
    with pytest.raises(TypeError):
        writer.write({"step": 1, "loss": 1.5})
