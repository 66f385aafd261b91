"""Rung: host; the interpreter for Liger's kernels. What is timed is right, nothing wrong gets a number.

Sizes are tiny and no time is asserted. Only a GPU shows that peak memory, Liger's norms and torch's attention backends
work as called.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch
from support.ranks.rank_pool import RankPool
from torch import Tensor

from benchmarks.harness.shapes import Model
from benchmarks.kernels import command as kernels
from benchmarks.kernels import measure as kernel_measure
from benchmarks.kernels.cases import attention as kernel_attention
from benchmarks.kernels.cases.cases import (
    CASES,
    COMPILED,
    DIRECTIONS,
    LIGER,
    OURS,
    RIVALS,
    TORCH,
    Case,
    Ceiling,
    Contestant,
    Shape,
)
from benchmarks.kernels.cases.cases import cases_of as real_cases_of
from benchmarks.kernels.check import Findings, check
from benchmarks.kernels.measure import Measured
from benchmarks.kernels.plot import write_plot
from benchmarks.kernels.timing import measure_ceilings
from benchmarks.run import main

TINY = Model("tiny", 64, 4, 2, 16, 48, 96)
SHAPE = Shape(TINY, 64, torch.float32, "cpu")
RIGHT = Findings({}, {})
QUICK = ("--seqs", "24", "--rounds", "2", "--rivals", "torch")


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MODELS_BY_NAME", {TINY.name: TINY})
    monkeypatch.setattr(kernels, "HOST_MODELS", (TINY.name,))
    monkeypatch.setattr(kernels, "measure_ceilings", measured_once)


@functools.cache
def measured_once(device: str, dtype: torch.dtype) -> dict[Ceiling, float]:
    """The ceilings of this machine, which several tests ask for."""
    return measure_ceilings(device, dtype, samples=1)


def with_contestants(monkeypatch: pytest.MonkeyPatch, case_name: str, change: Mapping[str, Contestant]) -> None:
    """Replace or add contestants of one case."""

    def cases_of(op: str, shape: Shape) -> list[Case]:
        cases = real_cases_of(op, shape)
        return [
            dataclasses.replace(case, contestants={**case.contestants, **change}) if case.name == case_name else case
            for case in cases
        ]

    monkeypatch.setattr(kernel_measure, "cases_of", cases_of)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("op", CASES)
def test_every_case_is_right(op: str, dtype: torch.dtype) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    cases = real_cases_of(op, shape)
    assert len({case.name for case in cases}) == len(cases) > 0
    for case in cases:
        assert set(case.contestants) <= {OURS, *RIVALS} and {OURS, TORCH, COMPILED} <= set(case.contestants)
        assert check(case, shape, {name: case.contestants[name] for name in (OURS, TORCH)}) == RIGHT
        assert set(case.directions) <= set(DIRECTIONS)
        works = [case.total_work(direction) for direction in case.directions]
        assert all(work.memory_bytes > 0 for work in works)
        if len(works) == len(DIRECTIONS):
            assert works[2] == works[0] + works[1]


def test_small_cases_are_drawn_more_often() -> None:
    for shape, num_draws in ((SHAPE, 32), (dataclasses.replace(SHAPE, seq=1 << 13), 3)):
        (case,) = [case for case in real_cases_of("linear_cross_entropy", shape) if case.name == "linear_cross_entropy"]
        seen: list[Tensor] = []

        def spy(case: Case = case, seen: list[Tensor] = seen, **inputs: Tensor) -> Tensor:
            seen.append(inputs["x"])
            return case.contestants[OURS].function(**inputs)

        assert check(case, shape, {OURS: dataclasses.replace(case.contestants[OURS], function=spy)}) == RIGHT
        assert len(seen) == num_draws


def check_liger(cases: Mapping[str, str]) -> None:
    """Interpreted, its norms and GEGLU do not run."""
    for op, name in cases.items():
        (case,) = [case for case in real_cases_of(op, SHAPE) if case.name == name]
        assert check(case, SHAPE, {LIGER: case.contestants[LIGER]}).wrong == {}


def test_liger_is_called_as_it_wants(interpreters: RankPool) -> None:
    pytest.importorskip("liger_kernel")
    named = ("rope", "cross_entropy", "linear_cross_entropy")
    interpreters.run(check_liger, 1, {"activation": "swiglu", **{op: op for op in named}})


def test_determinism_is_timed_without_filling_memory() -> None:
    settings: Any = torch.utils.deterministic
    with kernel_attention.deterministic():
        assert torch.are_deterministic_algorithms_enabled() and not settings.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled() and settings.fill_uninitialized_memory


@pytest.mark.slow
def test_a_compiled_rival_is_right_at_each_shape_in_turn() -> None:
    measured = Measured()
    for seq in (64, 40):
        shape = dataclasses.replace(SHAPE, seq=seq)
        assert measured.open("activation", shape, "gelu", (OURS, COMPILED)).wrong == {}
        assert measured.contestants("both") == [OURS, COMPILED]
        assert measured.start(COMPILED, "backward") is None and measured.seconds(COMPILED) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_models")
def test_a_run_prints_stores_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    arguments = ["--op", "norm", "linear_cross_entropy", "--out", str(out), "--plot", str(plot)]
    assert main(["kernels", *QUICK, *arguments]) == 0
    rows = rows_of(out)
    assert len({row["case"] for row in rows}) == len(rows) == 3 * 3 + 1
    for row in rows:
        assert row["check"] == "passed" and row["contestants"] == [OURS, TORCH] and row["best_rival"] == TORCH
        assert row["threads_per_rank"] == 1 and row["model"] == "tiny" and row["dtype"] == "float32"
        unit = "bytes_per_second" if row["ceiling"] == "copy" else "flops_per_second"
        work = row["work_memory_bytes"] if row["ceiling"] == "copy" else row["work_flops"]
        assert row[f"tpkernels_{unit}"] == pytest.approx(work / row["tpkernels_median_seconds"])
        percent = 100 * row[f"tpkernels_{unit}"] / row[f"ceiling_{unit}"]
        assert row["tpkernels_of_ceiling_percent"] == pytest.approx(percent)
    assert {row["ceiling"] for row in rows} == {"copy", "matmul"}
    printed = capsys.readouterr().out
    assert "no GPU: host paths on 1 thread, tiny at 24 tokens" in printed
    assert "add_rms_norm/tiny/seq_24/backward" in printed and "ours over it" in printed
    ratios = [row["tpkernels_speedup_over_torch_median_ratio"] for row in rows[:9]]
    assert f"ours over it, geometric mean: torch {geometric_mean(ratios):.3f} (9 rows)" in " ".join(printed.split())
    assert printed.count("geometric mean") == 1  # of one row there is none
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("num_panels", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_plot_has_bars_in_every_panel(tmp_path: Path, num_panels: int) -> None:
    """Every panel has bars in both contestants' colours, three panels across, above the legend. A red row has none."""
    pytest.importorskip("matplotlib")
    from matplotlib import colors, image

    def row(case: str, seq: int, check: str = "passed") -> dict[str, Any]:
        found: dict[str, Any] = {"case": f"kernels/{case}/tiny/seq_{seq}/both", "model": "tiny", "seq": seq}
        found |= {"direction": "both", "check": check, "ceiling": "copy", "contestants": []}
        if check == "passed":
            found["contestants"] = ["a", "b"]
            for name, percent in (("a", 90.0), ("b", 40.0)):
                found |= {f"{name}_{which}_seconds": s for which, s in (("median", 2.0), ("p20", 1.9), ("p80", 2.2))}
                found[f"{name}_of_ceiling_percent"] = percent
        return found

    rows = [row(f"op_{i}", seq) for i in range(num_panels) for seq in (8, 16)] + [row("op_0", 32, "failed: wrong")]
    write_plot(tmp_path / "plot.png", rows)
    pixels = image.imread(tmp_path / "plot.png")[:, :, :3]
    across, down = min(3, num_panels), -(-num_panels // 3)
    height, width = int(pixels.shape[0] * 0.93) // down, pixels.shape[1] // across
    for i in range(num_panels):
        panel = pixels[i // 3 * height :][:height, i % 3 * width :][:, :width]
        tall = {color: (abs(panel - colors.to_rgb(color)).max(-1) < 0.02).any(1).sum() for color in ("C0", "C1")}
        assert tall["C0"] > 1.5 * tall["C1"] > 100, tall
    write_plot(tmp_path / "plot.svg", rows)
    assert "op_0, both" in (tmp_path / "plot.svg").read_text()


@pytest.mark.usefixtures("tiny_models")
@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (lambda x, weight: 1.001 * torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5), "output 0 is wrong by"),
        (
            lambda x, weight: torch.nn.functional.rms_norm(x.detach(), x.shape[-1:], weight, 1e-5) + 0 * x,
            "gradient of x is wrong by",
        ),
        (lambda x, weight: x.new_full(x.shape, torch.nan) * weight * x, "output 0 is wrong by inf"),
        (lambda x, weight: x.double() * weight, "torch.float64 instead of"),
        (lambda x, weight: (x * weight)[1:], "Mismatch in shape"),
        (lambda x: x, "TypeError"),
    ],
)
def test_a_wrong_operator_has_no_numbers(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ours: Callable[..., Tensor],
    message: str,
) -> None:
    with_contestants(monkeypatch, "rms_norm", {OURS: Contestant(ours)})
    out = tmp_path / "rows.jsonl"
    assert main(["kernels", "--op", "norm", *QUICK, "--direction", "both", "--out", str(out)]) == 1
    wrong, *others = rows_of(out)
    assert wrong["check"].startswith("failed: tpkernels: ") and message in wrong["check"]
    assert not [name for name in wrong if name.endswith(("_ratio", "_percent", "_seconds")) and "ceiling_" not in name]
    assert wrong["contestants"] == [] and all(row["check"] == "passed" for row in others)
    printed = capsys.readouterr().out
    assert "wrong, see below" in printed and message in printed


@pytest.mark.usefixtures("tiny_models")
def test_a_wrong_rival_is_left_out_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("No available kernel.\nAborting execution.")

    with_contestants(
        monkeypatch, "rms_norm", {"liger": Contestant(lambda x, weight: x * weight), "sdpa": Contestant(broken)}
    )
    out = tmp_path / "rows.jsonl"
    options = ["--op", "norm", *QUICK, "liger", "sdpa", "--direction", "both", "--out", str(out)]
    assert main(["kernels", *options]) == 0
    row, *_ = rows_of(out)
    assert row["contestants"] == [OURS, TORCH] and set(row["left_out"]) == {"liger", "sdpa"}
    assert row["left_out"]["sdpa"] == "RuntimeError: No available kernel."
    assert not [name for name in row if name.startswith("liger")]
    assert "rms_norm/tiny/seq_24: liger is left out: output 0 is wrong by" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny_models")
def test_a_rival_that_is_less_exact_is_timed_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half the digits are right. For ours the same is wrong."""

    def rough(x: Tensor, weight: Tensor) -> Tensor:
        return (1 + 1e-5) * torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)

    with_contestants(monkeypatch, "rms_norm", {"liger": Contestant(rough)})
    out = tmp_path / "rows.jsonl"
    options = ["--op", "norm", *QUICK, "liger", "--direction", "both", "--out", str(out)]
    assert main(["kernels", *options]) == 0
    row, *_ = rows_of(out)
    assert (
        row["contestants"] == [OURS, TORCH, "liger"] and row["left_out"] == {} and set(row["less_exact"]) == {"liger"}
    )
    assert "rms_norm/tiny/seq_24: liger is less exact: output 0 is wrong by" in capsys.readouterr().out
    with_contestants(monkeypatch, "rms_norm", {OURS: Contestant(rough)})
    assert main(["kernels", *options[:-2]]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--op norn", "--op must be of norm, rope, .*: got 'norn': use norm"),
        ("--models llama3_7b", "--models must be of .*: got 'llama3_7b': use one of these"),
        ("--rivals ligr", "--rivals must be of .*: got 'ligr': use liger"),
        (
            "--op attention --models llama3_8b --seqs 8 --cases atention",
            "--cases must be of attention, .*: got 'atention'",
        ),
        ("--seqs 0", "--seqs must be at least 1"),
        ("--rounds 0", "--rounds must be at least 1: got 0: use 20"),
        ("--against nosuch", "--against must be a revision of .*: got 'nosuch': use HEAD, a branch"),
        ("--against=--upload-pack=x", "--against must be a revision of"),
        ("--op adamw --direction backward", "adamw is measured in forward only: use --direction forward"),
        ("--op linear_cross_entropy --direction forward", "measured in both only: use --direction both"),
        ("--plot picture.gif", "--plot must end in .png or .svg: got picture.gif: use picture.png"),
        ("--plot /nowhere/at/all.png", "make /nowhere/at first"),
        ("--out /nowhere/at/all.jsonl", "make /nowhere/at first"),
    ],
)
def test_mistakes_are_refused_in_a_line(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert main(["kernels", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["kernels", "--plot", "plot.png"]) == 2
    assert "pip install 'tpengine[plot]'" in capsys.readouterr().err
