"""Rung: gloo ranks. The pipeline benchmark's contestants agree, its ratios are printed, its predictions are made.

Models are miniatures, and no time is asserted. What only a GPU checks: nothing, the benchmark runs on CPUs.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.harness import resident_memory
from benchmarks.harness.timing import Comparison
from benchmarks.pipeline.command import case_row, sides_of, table
from benchmarks.pipeline.contestants import Contestant, check_agreement, gradient_difference
from benchmarks.pipeline.options import Options, config_of, names_of, shrunk
from benchmarks.pipeline.prediction import Case, Samples, waits_of
from benchmarks.pipeline.prediction import case_row as prediction_row
from benchmarks.pipeline.ranks import Measured
from benchmarks.pipeline.steps import Pause
from benchmarks.run import main
from tpengine.plan import Kind, TensorSpec
from tpengine.planner.profiles.file import ChunkProfile, CostProfile

SMOKE = shrunk(Options(smoke=True))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_schedules_are_compared_with_torchs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert main(f"pipeline --against torch --smoke --schedules 1f1b,zbv --out {out}".split()) == 0
    first, second = rows_of(out)
    assert first["case"] == "pipeline/1f1b" and first["contestants"] == ["engine", "sequential", "torch"]
    assert second["case"] == "pipeline/zbv" and second["contestants"] == ["engine", "torch"], "no halves of theirs"
    for row in (first, second):
        assert row["check"] == "passed" and row["batch"]["num_micro_batches"] == 4
        for name in row["contestants"][:-1]:
            assert row[f"{name}_speedup_over_torch_median_ratio"] > 0
            assert row[f"torch_memory_over_{name}_sum_ratio"] > 0
        assert all(row[f"{name}_memory_largest_rank_bytes"] > 1e5 for name in row["contestants"])
    # The first stage holds a micro-batch for each stage, the last one its own; zbv as many on all.
    assert set(map(tuple, first["live_activations"].values())) == {(2, 1)}
    assert first["live_activations"].keys() == {"engine", "sequential", "torch"}
    assert set(map(tuple, second["live_activations"].values())) == {(4, 4)}
    printed = capsys.readouterr().out
    assert "time ratio" in printed and "memory ratio" in printed and printed.count("sequential") == 1


class Told:
    """A contestant that answers what it was told to."""

    def __init__(self, loss: float, gradient: float) -> None:
        self.config, self._loss, self._gradient = config_of(SMOKE, "1f1b", 4), loss, gradient

    def step(self) -> Measured:
        return Measured(1.0, self._loss)

    def gradients(self) -> dict[str, Any]:
        return {"norm.weight": np.full(3, self._gradient)}


def test_a_contestant_that_computes_something_else_is_not_timed() -> None:
    def agreement(loss: float, gradient: float) -> str:
        told = {"engine": Told(5.0, 1.0), "sequential": Told(loss, gradient), "torch": Told(5.0, 1.0)}
        return check_agreement(cast(dict[str, Contestant], told))

    assert agreement(5.0 + 1e-5, 1.0 - 1e-5) == ""
    found = agreement(5.1, 1.0)
    assert found == "loss differs by more than 0.0001: sequential 5.1, torch 5"
    assert agreement(math.nan, 1.0).startswith("loss differs")
    assert agreement(5.0, 1.001).startswith("sequential and torch: gradient of norm.weight differs by 0.001")
    row = case_row(config_of(SMOKE, "1f1b", 4), ["sequential", "torch"], Comparison(f"failed: {found}"), {})
    assert not [name for name in row if name.endswith(("_ratio", "_seconds", "_bytes"))]
    assert [*table([row]).columns[1].cells] == [row["check"]]


def test_gradients_are_compared_one_by_one() -> None:
    want = {"a": np.ones((2, 3)), "b": np.full(4, 2.0)}
    assert gradient_difference({"a": np.ones(6), "b": np.full(4, 2.0 + 1e-5)}, want, 1e-4) == ""
    assert gradient_difference({"a": np.ones(6)}, want, 1e-4) == "only one has a gradient of b"
    for wrong in (2.1, math.nan):
        found = gradient_difference({"a": np.ones(6), "b": np.array([2.0, 2.0, wrong, 2.0])}, want, 1e-4)
        assert found.startswith("gradient of b differs by ")
    zeros = {"a": np.zeros(3)}
    assert "largest element is 0" in gradient_difference(zeros, zeros, 1e-4), "nothing was added up"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_steps_are_predicted_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    command = (
        f"pipeline --predict --smoke --schedules 1f1b zbv --predicted-micro-batches 6 --waiting-ranks 2 --out {out}"
    )
    assert main(command.split()) == 0
    rows = rows_of(out)
    assert [row["case"].removeprefix("pipeline_prediction/") for row in rows] == [
        f"{kind}/{name}/m6" for kind in ("layers", "waits") for name in ("1f1b", "zbv")
    ]
    for row in rows:
        assert (row["profiled_schedule"], row["profiled_micro_batches"], row["pp"]) == ("zbv", 4, 2)
        assert row["measured_median_seconds"] > 0 and row["predicted_median_seconds"] > 0
        assert row["num_samples"] == 1 and row["error_percent"] > -100
    # A wait is never shorter than asked for, so neither is the step that consists of them.
    assert all(row["predicted_over_measured_median_ratio"] < 1.001 for row in rows[2:])
    printed = capsys.readouterr().out
    assert printed.count("tests the executor") == 2 and "error" in printed


def test_waits_keep_their_proportions_and_are_long_enough() -> None:
    seconds = {Kind.F: 1e-3, Kind.I: 2e-3, Kind.W: 4e-3}
    tensor = TensorSpec((16, 32), "float32")
    chunks = tuple(ChunkProfile(rank, (2 * i, 2 * i + 2), seconds) for i, rank in enumerate((0, 1, 1, 0)))
    profile = CostProfile("zbv", 4, chunks, tensor, 0.0, 0.0, 0.0, {}, 0.0, 0.0, 0.0, 1.0, 0.0)
    plan = Case(config_of(SMOKE, "zbv", 4)).plan
    waits = waits_of(profile, plan)
    assert min(waits.values()) == pytest.approx(10e-3)
    of_a_layer = {
        (kind, chunk): wait / (plan.chunks[chunk].layers[1] - plan.chunks[chunk].layers[0])
        for (kind, chunk), wait in waits.items()
    }
    forward = of_a_layer[Kind.F, 0]
    assert of_a_layer[Kind.W, 3] == pytest.approx(4 * forward) == pytest.approx(2 * of_a_layer[Kind.I, 1])
    assert of_a_layer[Kind.B, 2] == pytest.approx(6 * forward), "both halves"


def test_the_error_is_the_median_of_the_rounds_errors() -> None:
    case = Case(config_of(SMOKE, "gpipe", 6))
    samples = Samples(predicted=[1.0, 2.2, 3.0], measured=[1.0, 2.0, 2.0])
    row = prediction_row(case, case, samples, "layers")
    assert row["error_percent"] == pytest.approx(10.0)


def test_a_pause_is_not_shorter_than_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is a number that only sleeping moves; each sleep ends 1 too late, and one much too early."""
    now, slept = [0.0], []
    early = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds + 1.0 - early.pop() if early else seconds + 1.0

    monkeypatch.setattr("benchmarks.pipeline.steps.time.sleep", sleep)
    monkeypatch.setattr("benchmarks.pipeline.steps.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("benchmarks.pipeline.steps.overshoot_seconds", lambda: 1.0)
    Pause(10.0)()
    assert (slept, now[0]) == ([9.0], 10.0)
    early[:], slept[:], now[:] = [5.0], [], [0.0]
    Pause(10.0)()
    assert slept[0] == 9.0 and now[0] >= 10.0 and len(slept) > 1


def test_the_peak_of_memory_is_seen_and_forgotten() -> None:
    resident_memory.follow_what_lives()
    try:
        resident_memory.forget_peak()
        before = resident_memory.resident_bytes()
        block = np.ones(50_000_000, dtype=np.uint8)
        del block
        assert resident_memory.peak_bytes() - before > 40e6
        assert resident_memory.resident_bytes() - before < 10e6, "what is freed is given back"
        resident_memory.forget_peak()
        assert resident_memory.peak_bytes() - before < 40e6
    finally:
        resident_memory.keep_what_is_freed()


def test_names_of_schedules_are_read() -> None:
    assert names_of(["gpipe,1f1b", "zbv", "1f1b"]) == ["gpipe", "1f1b", "zbv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pipeline --schedules zb-h1", "torch has the schedules gpipe, 1f1b, interleaved, zbv: got 'zb-h1'"),
        ("pipeline --schedules nosuch", "schedule must be one of"),
        ("pipeline --micro-batches 7 --schedules interleaved", "7 micro-batches, pp 2: use --micro-batches 8"),
        (
            "pipeline --predict --predicted-micro-batches 8",
            "a prediction needs another number of micro-batches than the profile",
        ),
        ("pipeline --pp 16 --schedules 1f1b", "every pipeline stage needs a layer"),
        ("pipeline --rounds 0", "--rounds must be at least 1"),
        ("pipeline --preset nosuch", "--preset must be one of"),
    ],
)
def test_what_cannot_be_compared_is_refused(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_torchs_modules_lack_is_refused() -> None:
    config = config_of(SMOKE, "1f1b", 4)
    for model in (replace(config.model, tie_embeddings=True), replace(config.model, vocab_size=257)):
        with pytest.raises(ValueError, match="neither pad nor tie"):
            sides_of(replace(config, model=model))
