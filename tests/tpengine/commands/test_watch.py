"""Rung: pure. What a run reports is read while it grows, and drawn."""

from __future__ import annotations

import fcntl
import json
import threading
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tpengine.checkpoint.run_directory import open_run_dir
from tpengine.cli import main
from tpengine.commands import watch
from tpengine.commands.watch import bars_of, read_history
from tpengine.config import Config


def a_run(path: Path, first: int = 1) -> Path:
    """Four steps: one without numbers, two skipped, a rollback; the last line is cut. Counted from `first`."""
    path.mkdir()
    (path / "config.toml").write_text("[train]\nsteps = 4\n")
    rows: list[dict[str, Any]] = [
        {"step": 0, "loss": 3.0, "lr": 1e-3, "peak_memory_bytes": 2_000_000_000},
        {"step": 1, "loss": 2.0, "held_out_loss": 2.5, "wall_tokens_per_second": 1234.5},
        {"step": 2, "loss": None, "skipped": True},
        {"step": 2, "event": "rollback <b>"},
        {"step": 3, "skipped": True, "left_out": True},
    ]
    text = "".join(json.dumps({**row, "step": row["step"] + first}) + "\n" for row in rows)
    (path / "metrics.jsonl").write_text(text + '[1]\n{"step": 4, "lo')
    return path


@pytest.mark.parametrize("first", [1, 0])
def test_a_run_is_read_with_its_events(tmp_path: Path, first: int) -> None:
    """Earlier versions counted steps from 0."""
    history = read_history(a_run(tmp_path / "run", first))
    assert history.series["loss"] == [(1, 3.0), (2, 2.0)] and history.series["held_out_loss"] == [(2, 2.5)]
    assert history.series["peak_memory_bytes"] == [(1, 2.0)]
    assert history.events == [(3, "skipped"), (3, "rollback <b>"), (4, "left out")]
    assert (history.num_steps, history.length, history.has_ended) == (4, 4, True)


def test_numbers_that_no_float_holds_are_passed_over(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'\n{{"step": 5, "loss": 1{"0" * 400}}}\n{{"step": 6, "loss": NaN}}\n{{"step": 1{"0" * 400}}}\n')
    history = read_history(run)
    assert history.series["loss"] == [(1, 3.0), (2, 2.0)] and history.num_steps == 6


def test_bars_span_smallest_to_largest() -> None:
    assert bars_of([0.0, 1.0, 7.0], 10) == "▁▂█" and len(bars_of(range(1000), 40)) == 40
    assert len(set(bars_of([2.0, 2.0], 10))) == 1


def test_runs_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(a_run(tmp_path / name)) for name in ("one", "two")]
    assert main(["watch", *runs, "--once"]) == 0
    said = capsys.readouterr().out
    assert "held-out" in said and "ended" in said and "running" not in said
    assert main(["watch", *runs, "--svg", str(tmp_path / "runs.svg")]) == 0
    root = ElementTree.parse(tmp_path / "runs.svg").getroot()
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "one, step 3: rollback <b>" in titles


def test_metrics_of_a_runs_own_are_drawn_behind_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run")
    own = {"metric/right": 0.5, "held_out_metric/right": 0.25, "held_out_metric/right/source": 1.0, "other": 1.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 5, "loss": 1.0, **own}) + "\n")
    assert [name for name, *_ in watch.panels_of([read_history(run)])][-2:] == ["held_out_metric/right", "metric/right"]
    assert main(["watch", str(run), "--once"]) == 0
    said = capsys.readouterr().out
    assert "held-out right" in said and "other" not in said and "source" not in said


def test_loads_of_experts_are_panels_with_a_line_for_each_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        for step in (5, 6):
            loads = {"balance_loss": 2.0, "expert_load/0": 1.5, "expert_load/3": 2.5 * step, "expert_tokens/0": 7}
            spread = {"expert_rank_load/0": 1.25, "expert_crossing/0": 0.0, "expert_crossing/3": 0.0}
            file.write("\n" + json.dumps({"step": step, "loss": 1.0, **loads, **spread}) + "\n")
    history = read_history(run)
    # Nothing crosses: how rows lie on ranks is not drawn.
    assert [name for name, *_ in watch.panels_of([history])][-3:] == ["balance_loss", "expert_load", "expert_tokens"]
    assert history.series["expert_load"] == [(5, 12.5), (6, 15.0)]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "expert_crossing/0": 0.25, "expert_crossing/3": 0.75}) + "\n")
    history = read_history(run)
    assert [name for name, *_ in watch.panels_of([history])][-2:] == ["expert_rank_load", "expert_crossing"]
    assert history.series["expert_crossing"] == [(5, 0.0), (6, 0.0), (7, 0.75)]
    assert main(["watch", str(run), "--svg", str(tmp_path / "run.svg")]) == 0
    root = ElementTree.parse(tmp_path / "run.svg").getroot()
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert {"layer 0", "layer 3"} <= set(titles)
    assert main(["watch", str(run), "--once"]) == 0
    assert "hottest expert" in capsys.readouterr().out


def test_a_run_that_died_is_told_from_one_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "run")
    (run / "config.toml").write_text("[train]\nsteps = 9\n")
    assert read_history(run).state == ""
    _, lock = open_run_dir(replace(Config(), run_dir=str(run)))
    assert read_history(run).state == "running"
    lock.close()  # as the kernel does for a process that is killed
    assert read_history(run).state == "not running"
    assert main(["watch", str(run), "--once"]) == 0
    assert "not running" in capsys.readouterr().out
    # Drawn live it is left alone after some looks, as it will not go on.
    monkeypatch.setattr(watch, "_SECONDS", 0.0)
    monkeypatch.setattr(watch, "SafeConsole", lambda: Console(force_terminal=True, width=100))
    assert main(["watch", str(run)]) == 0


def test_who_looks_at_a_run_keeps_none_from_starting(tmp_path: Path) -> None:
    config = replace(Config(), run_dir=str(tmp_path))
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        timer = threading.Timer(0.02, lambda: fcntl.flock(looking, fcntl.LOCK_UN))
        timer.start()
        open_run_dir(config)[1].close()
        timer.join()
        fcntl.flock(looking, fcntl.LOCK_SH)
        with pytest.raises(ValueError, match="belongs to one run at a time"):
            open_run_dir(config)


def test_a_directory_that_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a run to watch must have a metrics.jsonl" in line and "--run-dir" in line
