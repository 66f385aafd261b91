"""Rung: gloo ranks. Layouts are predicted and hashed before they run, in turns with a machine's file.

Sizes are tiny and no time is asserted. What only a GPU checks: that its layouts run.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.journal import append
from benchmarks.planner.blind import visits
from benchmarks.planner.blind.predictions import Prediction, chosen, drawn_model, fits
from benchmarks.planner.blind.verdict import machine_varied, row_of, verdict
from benchmarks.planner.blind.visits import Asked, Step, machine_speed, measured, reference_by_file
from benchmarks.run import main
from tpengine.config import validate
from tpengine.config.presets import preset_config
from tpengine.distributed.local_ranks import Ranks, RanksFailed
from tpengine.doctor.measure.sizes import sizes_of
from tpengine.planner.advice.question import Question
from tpengine.planner.machine import MACHINES


def test_every_axis_schedule_stage_and_number_of_micro_batches_is_compared() -> None:
    question = Question(preset_config("bench"), MACHINES["cpu"], 2, 16)
    layouts = chosen(question)
    assert len(layouts) >= 40 and len(set(layouts)) == len(layouts)
    assert {of.schedule for of in layouts if of.pp == 2} == {"gpipe", "1f1b", "interleaved", "zb-h1", "zbv"}
    assert {of.zero for of in layouts if of.dp == 2} == {0, 1, 2, 3}
    assert {of.recompute for of in layouts} == {"none", "attention", "block", "full"}
    assert {of.num_micro_batches for of in layouts} == {2, 4, 8, 16}
    assert len(chosen(question, 7)) == 7
    assert len(chosen(Question(preset_config("llama_1b"), MACHINES["cpu"], 1, 16))) == 12
    assert drawn_model(3) == drawn_model(3) != drawn_model(4)


@pytest.mark.slow
def test_predictions_are_hashed_before_a_layout_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, out = tmp_path / "blind", tmp_path / "rows.jsonl"
    command = f"blind --dir {where} --preset tiny --no-drawn --layouts 2 --seq-len 16 --global-batch 4 --repeats 1"
    # No time to measure: the predictions and their hash are there, and not one visit.
    assert main(f"{command} --minutes 0 --out {out}".split()) == 0
    digest = hashlib.sha256((where / "predictions.json").read_bytes()).hexdigest()
    assert f"SHA-256 {digest}" in capsys.readouterr().out
    # Nor is there one while the machine is never as fast as its file says.
    assert main(f"{command} --minutes 0.02 --still 0 --out {out}".split()) == 0
    assert "time is up" in capsys.readouterr().out
    assert not (where / "journal.jsonl").exists() and not out.exists()
    # The same command goes on; here every step counts.
    command += " --still 1000"
    assert main(f"{command} --out {out}".split()) == 0
    assert "error" in capsys.readouterr().out
    visits = [json.loads(line) for line in (where / "journal.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(visits) == 4 and {of["predictions"] for of in visits} == {digest}
    assert len(rows) == 2 and all(0.9 < row["least_peak_ratio"] <= row["largest_peak_ratio"] < 1.1 for row in rows)
    assert all(row["predictions_sha256"] == digest and row["num_samples"] == 2 for row in rows)
    # Other predictions are another proof.
    assert main(f"{command} --machine h200".split()) == 2
    assert "has other predictions" in capsys.readouterr().err


def test_the_verdict_knows_error_spread_and_regret() -> None:
    def row(layout: str, predicted: float, measured: float, spread: float) -> dict[str, object]:
        return {
            "model": "m",
            "layout": layout,
            "predicted_seconds": predicted,
            "measured_median_seconds": measured,
            "measured_p20_seconds": measured * (1 - spread / 2),
            "measured_p80_seconds": measured * (1 + spread / 2),
            "predicted_over_measured_ratio": predicted / measured,
            "spread_ratio": spread,
            "predicted_over_every_ratio": 1.0,
        }

    good = [row("a", 1.0, 1.0, 0.01), row("b", 1.1, 1.05, 0.01), row("c", 1.6, 1.3, 0.2)]
    three = {"m": 3}
    (line,) = verdict(good, three)
    assert "error 4.8% median, 23.1% worst, 0 outside" in line and line.endswith("met")
    assert verdict([*good[:2], row("c", 1.6, 1.3, 0.01)], three)[0].endswith("short")
    # A layout that was not visited, or not while the machine was as its file says, may be the one that is wrong.
    assert "3 of 4 layouts" in verdict(good, {"m": 4})[0] and verdict(good, {"m": 4})[0].endswith("short")
    # A peak may be 5 % lower than it was said, and 2 % higher.
    one = {"m": 1}
    held = {"least_peak_ratio": 0.99, "largest_peak_ratio": 1.04}
    assert "peaks of 1 layouts 0.990 to 1.040" in verdict([good[0] | held], one)[0]
    assert verdict([good[0] | held], one)[0].endswith("met")
    assert verdict([good[0] | held | {"least_peak_ratio": 0.97}], one)[0].endswith("short")
    assert verdict([good[0] | held | {"largest_peak_ratio": 1.06}], one)[0].endswith("short")
    assert (
        "regret of the first row 25.0%" in verdict([row("a", 1.0, 1.25, 0.01), row("b", 1.1, 1.0, 0.01)], {"m": 2})[0]
    )


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_products_of_reference_are_those_of_a_machines_file(device: str, dtype: str) -> None:
    """A file of a GPU knows the dtype of its runs alone."""
    sizes = sizes_of(device)
    assert len(set(sizes.references)) == 3
    for rows, columns, inner in sizes.references:
        assert rows in sizes.rows and (columns, inner) in sizes.matrices
    machine = replace(MACHINES["h200"], flops_per_s={dtype: 1e12})
    assert all(seconds > 0.0 for seconds in reference_by_file(machine, device, dtype))


def test_a_step_counts_while_the_machine_is_as_fast_as_its_file_says() -> None:
    """A machine that is half as fast now and then: its steps are kept, and are not what the bars are about."""
    file = [0.01, 0.02, 0.04]
    # Of three products, each the mean over two ranks, the middle one counts.
    assert machine_speed([[0.01, 0.02, 0.05], [0.01, 0.02, 0.07]], file) == 1.0
    assert machine_speed([[0.01, 0.03, 0.07], [0.03, 0.05, 0.09]], file) == 0.5
    steps = [
        Step("tp 1", 1.0, (1.0, 0.95)),
        Step("tp 1", 1.4, (0.95, 0.5)),
        Step("tp 1", 2.0, (0.5, 0.5)),
        Step("tp 1", 1.7, (0.5, 1.0)),
        Step("tp 1", 0.7, (1.0, 1.3)),
        Step("tp 1", 1.1, (1.0, 1.0)),
    ]
    assert [step.counts(0.1) for step in steps] == [True, False, False, False, False, True]
    of = Prediction("tiny", preset_config("tiny"), "tp 1", 1.0, (1.0,))
    row = row_of(of, steps, 0.1, None, {})
    assert row is not None and row["num_samples"] == 2 and row["num_steps"] == 6
    assert row["predicted_over_measured_ratio"] == pytest.approx(1 / 1.05)
    assert row["predicted_over_every_ratio"] == pytest.approx(1 / 1.25)
    assert row_of(of, steps[1:5], 0.1, None, {}) is None
    said = machine_varied(steps, 0.1)
    assert "2 of 6 steps count" in said and "0.50 to 1.30, at the median 0.97 times as fast" in said


@pytest.mark.slow
def test_what_does_not_fit_is_not_run_and_a_rank_that_fails_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Prediction("tiny", preset_config("tiny"), "tp 1", 1.0, (50.0, 95.0))
    for memory, expected in ((0, True), (100, False), (102, True)):
        assert fits(of, replace(MACHINES["cpu"], memory_bytes=memory)) == expected

    class Failing(Ranks):
        def call(self, method: str, *args: object) -> list[object]:
            if method == "step":
                raise RanksFailed("out of memory, as planted")
            return super().call(method, *args)

    monkeypatch.setattr(visits, "Ranks", Failing)
    asked = Asked(tmp_path, 1, "cpu", repeats=1, steps=1, still=1e9, is_counted=False, minutes=10.0)
    config = validate(replace(of.config, device="cpu", train=replace(of.config.train, seq_len=16, steps=100)), 1)
    append(tmp_path / "journal.jsonl", {"layout": "tp 2", "round": 0, "predictions": "d", "peak_bytes": [7]})
    assert measured(asked, MACHINES["cpu"], [replace(of, config=config)], "d") == ([], {"tp 2": [7]})
    assert "as planted" in capsys.readouterr().out


def test_a_machine_that_is_not_as_its_file_says_is_waited_for_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visits, "_SECONDS_BETWEEN_LOOKS", 0.0)
    ranks: Any = SimpleNamespace(call=lambda *_: [next(looks)])
    asked = Asked(tmp_path, 1, "cpu", repeats=1, steps=1, still=0.1, is_counted=False, minutes=10.0)
    looks = iter([[4.0], [3.0], [1.05]])
    assert visits._is_still(asked, ranks, preset_config("tiny"), [1.0], math.inf)
    said = capsys.readouterr().out
    assert said.startswith("products are 0.25 times as fast as by the machine's file") and said.count("\n") == 1
    assert not visits._is_still(asked, ranks, preset_config("tiny"), [1.0], -math.inf)


def test_visits_without_the_machines_speed_are_left_out(tmp_path: Path) -> None:
    """Of an older journal."""
    visit = {"layout": "tp 1", "round": 0, "predictions": "digest"}
    for row in ({"seconds": [1.0]}, {"seconds": [2.0], "speeds": [1.0, 0.9]}, {"peak_bytes": [7]}):
        append(tmp_path / "journal.jsonl", visit | row)
    asked = Asked(tmp_path, 1, "cpu", repeats=0, steps=1, still=0.2, is_counted=False, minutes=0.0)
    of = Prediction("tiny", preset_config("tiny"), "tp 1", 1.0, (1.0,))
    assert measured(asked, MACHINES["cpu"], [of], "digest") == ([Step("tp 1", 2.0, (1.0, 0.9))], {"tp 1": [7]})
