"""Rung: pure; what is slow: compiles, interpreter. What cases make of measurements, and write when something is wrong.

Only a GPU shows what they measure.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import ROOT
from support.kernels.compiled import CACHE_VARIABLE
from support.ranks.progress import run_program
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")

import triton
from tpkernels.launch import Target
from tpkernels.ops.norm.kernel import BackwardConfig

from benchmarks.gpu.cases.clock import Gap, covered, gaps
from benchmarks.gpu.cases.kernels import between, engines, fused, operators, tiles
from benchmarks.gpu.cases.training import host_parts, loss_fields
from benchmarks.gpu.declared import Case
from benchmarks.gpu.process import runner
from benchmarks.harness.journal import append, read
from benchmarks.harness.shapes import REHEARSED
from benchmarks.harness.still_gpu import still_gpu, why_not_still
from benchmarks.kernels.cases.cases import OURS, Contestant
from benchmarks.run import main

EXACT_PRICE = """
import json, sys
from pathlib import Path
import torch
from benchmarks.gpu.cases import steps, training
seen, kept = [], steps.OwnStep.seconds
def noted(self):
    seen.append([self._trainer.state.part.config.train.reduction, torch.are_deterministic_algorithms_enabled()])
    return kept(self)
steps.OwnStep.seconds = noted
assert training.exact_price(Path(sys.argv[1]), "tiny", steps=2, layers=1) == 0
print(json.dumps(seen))
"""
needs_still_gpu = pytest.mark.skipif(why_not_still() is not None, reason=str(why_not_still()))


def test_a_loss_that_is_not_finite_leaves_its_row(tmp_path: Path) -> None:
    fields = loss_fields({"ours": math.nan, "torch": math.inf, "other": 2.5})
    append(tmp_path / "rows.jsonl", fields)
    assert read(tmp_path / "rows.jsonl") == [
        {"ours_num_nats_in_1000": None, "torch_num_nats_in_1000": None, "other_num_nats_in_1000": 2500}
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU every small candidate fits")
def test_a_tile_that_does_not_fit_is_not_wrong(tmp_path: Path) -> None:
    """Without a GPU no candidate runs: each costs itself alone, and no result is called wrong."""
    rows = tmp_path / "rows.jsonl"
    assert tiles.tune(rows, REHEARSED.name, [16], into=str(tmp_path), most=1) == 0
    left_out = read(rows)
    assert len(left_out) == len(tiles.SMALL_CANDIDATES)
    assert all(row["check"] == "passed" and row["left_out"] and "tile_us" not in row for row in left_out)


def test_a_norms_wrong_backward_is_named_with_and_without_a_residual(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each failure has the name that its time would have, so that none replaces another."""
    config = BackwardConfig(num_stages=2)
    sums = torch.zeros(1, 1, REHEARSED.hidden)
    monkeypatch.setattr(between, "target_of", lambda x: Target("cuda", 90))
    monkeypatch.setattr(between, "backward_config", lambda target: config)
    monkeypatch.setattr(between, "launch_norm", lambda x, *_: (None, None, None, torch.ones(len(x))))
    monkeypatch.setattr(between, "launch_norm_backward", lambda dy, *_, **__: (torch.zeros_like(dy), sums))
    rows = tmp_path / "rows.jsonl"
    assert between.norm_backward(rows, REHEARSED.name, tokens=4, rounds=1, programs=()) == 1
    failed = [row["case"] for row in read(rows) if row["check"] != "passed"]
    name = "x".join(map(str, config))
    assert failed == [f"norm_backward/{REHEARSED.name}/residual_{residual}/{name}" for residual in (0, 1)]


def grids_of_own_bars(rows: Path) -> list[int]:
    """Return the numbers of programs of every scattering matmul that `own_bars` launches on a still GPU."""
    triton.knobs.cache.dir = str(Path(os.environ[CACHE_VARIABLE]) / "triton")
    launched: list[int] = []
    numbers = {"depths": [16], "tokens": 64, "hidden": 64, "ranks": 2, "rounds": 3}
    # More than there are generations, because a launch is known by its generation, too.
    tiles_of = [[32, columns, 16, 2, 4, 1] for columns in (64, 32, 16)]
    plain = patch.object(fused, "matmul_on", lambda _, a, b: torch.mm(a, b))
    with plain, still_gpu(lambda *arguments: launched.append(arguments[0])):
        fused.own_bars(rows, tiles=tiles_of, **numbers)  # type: ignore[arg-type]
    return launched


# Compiles three kernels.
@needs_still_gpu
@pytest.mark.slow
def test_every_tile_is_launched_under_its_own_name(compilers: RankPool, tmp_path: Path) -> None:
    (launched,) = compilers.run(grids_of_own_bars, 1, tmp_path / "rows.jsonl")
    # A warm-up and three rounds by two ranks, each with a program for each of its tiles, but at most 4.
    assert Counter(launched) == {2: 8, 4: 16}


def occupied() -> list[tuple[int, ...]]:
    """Return the grid of every launch that occupies a still GPU."""
    triton.knobs.cache.dir = str(Path(os.environ[CACHE_VARIABLE]) / "triton")
    launched: list[tuple[int, ...]] = []
    with still_gpu(lambda *arguments: launched.append(arguments[:3])):
        engines.occupy(132 * 2048, 0.02)
    return launched


# Compiles a kernel.
@needs_still_gpu
@pytest.mark.slow
def test_what_occupies_a_gpu_compiles_and_is_launched_for_every_thread(compilers: RankPool) -> None:
    assert compilers.run(occupied, 1) == [[(132 * 8, 1, 1)]]


def test_with_an_old_triton_a_still_gpu_is_left_out_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("triton.backends.nvidia.driver.PyKernelArg", raising=False)
    assert fused.host_alone(tmp_path / "rows.jsonl") == 0
    (row,) = read(tmp_path / "rows.jsonl")
    assert row["case"] == "host/alone" and row["left_out"].endswith("calls the driver: use triton 3.7")
    assert main(["host", "--calls", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"benchmarks: error: kernels must be bound without a GPU: {row['left_out']}"


@pytest.mark.slow
def test_exact_and_fast_steps_take_turns_and_the_fast_one_is_not_deterministic(tmp_path: Path) -> None:
    """In a process of its own, because exact mode makes torch deterministic for the whole process."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-c", EXACT_PRICE, str(tmp_path / "rows.jsonl")]
    done = run_program(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fast, exact = ["fast", False], ["exact", True]
    # The trainer itself sets the flag for a GPU only.
    warm = [fast] * 3 + [["exact", torch.cuda.is_available()]] * 3
    assert json.loads(done.stdout.splitlines()[-1]) == [*warm, fast, exact, exact, fast]
    (row,) = read(tmp_path / "rows.jsonl")
    assert row["check"] == "passed" and row["exact_over_fast_median_ratio"] > 0


def test_the_hosts_time_is_divided_by_four_steps() -> None:
    def host_us(micro_batches: int, layers: int) -> float:
        return layers * (700.0 + micro_batches * 30.0) + 200.0 + micro_batches * 50.0

    medians = {(n, layers): host_us(n, layers) for n in (1, 2) for layers in (1, 3)}
    assert host_parts(medians, (1, 3), (1, 2)) == pytest.approx(
        {
            "host_of_layer_per_micro_batch_us": 30.0,
            "host_of_layer_per_step_us": 700.0,
            "host_of_rest_per_micro_batch_us": 50.0,
            "host_of_rest_per_step_us": 200.0,
        }
    )


def test_a_family_that_is_wrong_is_a_row_and_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, families = tmp_path / "rows.jsonl", {"rms_norm": "norm", "swiglu": "activation"}
    assert operators.smoke(rows, families, REHEARSED.name, 8) == 0
    (right,) = read(rows)
    assert (right["check"], right["num_right"], right["num_cases"]) == ("passed", 2, 2)
    honest = operators.cases_of

    def planted(op: str, shape: Any) -> list[Any]:
        def off(**inputs: Any) -> Any:
            return 1.01 * honest_one.contestants[OURS].function(**inputs)

        found = list(honest(op, shape))
        if op == "norm":
            honest_one = found[0]
            found[0] = replace(honest_one, contestants={OURS: Contestant(off)})
        return found

    monkeypatch.setattr(operators, "cases_of", planted)
    assert operators.smoke(rows, families, REHEARSED.name, 8) == 1
    _, wrong, summary = read(rows)
    assert wrong["case"] == "smoke/rms_norm" and "is wrong by" in wrong["check"]
    assert summary["num_right"] == 1 and summary["check"] == "failed: 1 families are wrong"


def test_training_needs_nothing_that_only_the_command_line_does(tmp_path: Path) -> None:
    """In a fork, which has torch already: what is of this project is imported again, as on a machine without these."""
    pid = os.fork()
    if not pid:
        try:
            for name in list(sys.modules):
                if name.partition(".")[0] in ("tpengine", "benchmarks", "tomli_w", "tyro"):
                    del sys.modules[name]
            sys.modules.update(dict.fromkeys(("tomli_w", "tyro")))  # type: ignore[arg-type]
            importlib.import_module("benchmarks.gpu.cases.training")
            os._exit(0)
        except BaseException as error:
            (tmp_path / "error").write_text(repr(error))
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0, (tmp_path / "error").read_text()


def test_a_device_is_busy_while_any_kernel_runs() -> None:
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)]) == 6


def test_gaps_are_told_by_their_sides() -> None:
    assert gaps([]) == []
    spans = [(0, 4, "a"), (1, 2, "short"), (6, 7, "b"), (8, 9, "a"), (10, 11, "b"), (14, 15, "c"), (15, 16, "a")]
    assert gaps(spans) == [Gap("a", "b", 3, 2), Gap("b", "c", 3, 1), Gap("b", "a", 1, 1)]


@pytest.mark.slow
def test_tests_are_a_case(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('rung', ['cpu', 'gpu'])\n"
        "def test_one(rung): assert rung == 'cpu', 'planted'\ndef test_two(): assert 0, 'not chosen'\n"
    )
    rows, arguments = tmp_path / "rows.jsonl", {"paths": [str(tmp_path / "test_some.py")], "chosen": "[gpu"}
    one = Case("tests/some", "b", 1.0, 1.0, "benchmarks.gpu.cases.tests:run", arguments)
    assert runner.run(one, rows, tmp_path / "log.txt", 3600.0).how == "wrong"
    failed, summary = read(rows)
    assert failed["case"].endswith("test_some.py::test_one[gpu]") and "planted" in failed["check"]
    assert summary["num_failed"] == 1 and "num_passed" not in summary
    assert summary["check"] == "failed: 1 of the 1 tests that ran"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_tests_that_see_no_gpu_are_no_success(tmp_path: Path) -> None:
    """Others of the same names run on a CPU, and pass."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('rung', ['cpu', 'gpu'])\n"
        "def test_one(rung):\n    if rung == 'gpu': pytest.skip('needs a GPU')\n"
    )
    rows, arguments = tmp_path / "rows.jsonl", {"paths": [str(tmp_path / "test_some.py")], "chosen": "test_one"}
    one = Case("tests/some", "b", 1.0, 1.0, "benchmarks.gpu.cases.tests:run", arguments)
    assert runner.run(one, rows, tmp_path / "log.txt", 3600.0).how == "wrong"
    (summary,) = read(rows)
    assert summary["check"] == "failed: 1 tests see no GPU" and summary["num_passed"] == 1
