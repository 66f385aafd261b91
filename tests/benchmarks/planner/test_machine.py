"""Rung: gloo ranks. A machine is measured into a file that loads.

Sizes are tiny and no time is asserted. What only a GPU checks: that one is measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.planner.blind.predictions import drawn_model, predicted
from benchmarks.run import main
from tpengine.config.presets import preset_config
from tpengine.planner.machine import read_machine
from tpengine.planner.machine.measured import OPERATORS, PRODUCTS


@pytest.mark.slow
def test_a_measured_machine_is_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    assert main(f"machine --tiny --passes 2 --out {path}".split()) == 0
    machine = read_machine(path)
    rates = machine.measured["float32"]
    assert rates.products.keys() == set(PRODUCTS) and set(OPERATORS) <= rates.operators.keys()
    # What every micro-batch has is measured from caches too, at the same sizes.
    cached = machine.cached["float32"]
    assert cached.products.keys() == rates.products.keys() and {"norm", "attention"} <= cached.operators.keys()
    assert [size for size, _ in machine.cold_share.points] == [512.0, 1024.0, 2048.0]
    assert machine.cold_share.points[-1][1] == 1.0
    assert machine.within.fused.keys() == machine.within.measured.keys() == {2}
    assert "2 passes: half of the figures differ by less than" in machine.source
    assert machine.host_s_per_operator > 0 and machine.host_s_per_action > 0 and machine.reduce_share == 1.0
    # And steps are predicted with it: the drawn model's too.
    tiny = preset_config("tiny")
    models = {"tiny": tiny, "drawn": replace(tiny, model=drawn_model(1))}
    found = list(predicted(machine, models, 2, 16, most=3))
    assert len(found) == 6 and all(of.seconds > 0 and min(of.peak_bytes) > 0 for of in found)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--out", "DIR"], "--out must be a file: "),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda needs a GPU: ",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
        ),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    options: list[str], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine", "--tiny", *(str(tmp_path) if option == "DIR" else option for option in options)]) == 2
    said = capsys.readouterr().err
    assert rule in said and said.count("\n") == 1


@pytest.mark.slow
def test_three_ranks_share_rows_that_they_do_not_divide(tmp_path: Path) -> None:
    out = tmp_path / "m.toml"
    assert main(["machine", "--tiny", "--passes", "1", "--ranks", "3", "--out", str(out)]) == 0
    assert read_machine(out).ranks_per_node == 3
