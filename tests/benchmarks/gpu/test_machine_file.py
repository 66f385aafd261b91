"""Rung: pure. The planner's rows of a GPU become a machine's file, and what is missing is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import ROOT
from tpkernels.work import Work

from benchmarks.gpu.tables.machine_file import MACHINE_ROW, machine_like, machine_of_rows, write_machine
from benchmarks.gpu.tables.rows import PREFLIGHT, results
from benchmarks.harness.journal import append, read
from benchmarks.run import main
from tpengine.config import validate
from tpengine.config.presets import preset_config
from tpengine.planner.advice.sheets import Sheet
from tpengine.planner.machine import MACHINES, Machine, machine_named, machine_values

H200 = ROOT / "benchmarks" / "results" / "nvidia_h200" / "gpu.jsonl"


@pytest.mark.parametrize(
    ("gpu", "memory", "kind"),
    [
        ("NVIDIA H200", 150, "h200"),
        ("NVIDIA H100 80GB HBM3", 85, "h100"),
        ("NVIDIA GH200 480GB", 100, "gh200"),
        ("NVIDIA A100-SXM4-40GB", 42, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 85, "a100"),
        ("NVIDIA L4", 24, None),
        ("", 0, None),
    ],
)
def test_a_gpu_has_its_data_sheet(gpu: str, memory: int, kind: str | None) -> None:
    found = machine_like(gpu, memory * 10**9)
    assert (found and found.name) == kind


def test_measured_rates_take_the_place_of_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    append(rows, {PREFLIGHT: {"gpu": "NVIDIA H200", "gpu_memory_bytes": 141 * 10**9}})
    assert "planner/matmul or planner/copy are missing" in write_machine(rows, tmp_path)
    size = {"check": "passed", "m": 512, "n": 512, "torch_flops_per_second": 8e14}
    append(rows, {"case": "planner/matmul/512x512x512", **size, "k": 512, "ours_flops_per_second": 1e14})
    append(rows, {"case": "planner/matmul/512x512x8192", **size, "k": 8192, "ours_flops_per_second": 5e14})
    wrong = {**size, "check": "failed: wrong", "k": 8192, "ours_flops_per_second": 9e15}
    append(rows, {"case": "planner/matmul/wrong", **wrong})
    attention = {
        "case": "kernels/attention/x",
        "check": "passed",
        "contestants": [],
        "tpkernels_flops_per_second": 2e14,
    }
    append(rows, {**attention, "direction": "forward", "work_flops": 10**10})
    append(rows, {**attention, "case": "kernels/attention/y", "direction": "backward", "work_flops": 3 * 10**10})
    for num_bytes, rate in ((1 << 12, 1e10), (1 << 30, 2e12)):
        name = f"planner/copy/{num_bytes}"
        append(rows, {"case": name, "check": "passed", "num_bytes": num_bytes, "within_bytes_per_second": rate})
    append(rows, {"case": "planner/launch/triton_norm", "check": "passed", "host_us": 20.0})
    assert main(["gpu", "--report", str(tmp_path)]) == 0
    assert f"wrote {tmp_path / 'machine.toml'}" in capsys.readouterr().out.replace("\n", " ")
    machine, sheet = machine_named(f"{tmp_path / 'machine.toml'}:8x2"), MACHINES["h200"]
    flops = 2 * 512 * 512 * 8192
    for k, rate in ((512, 1e14), (8192, 5e14)):
        assert machine.peak("bfloat16") * machine.matmul.at(2 * 512 * 512 * k) == pytest.approx(rate)
    assert machine.num_processors == 0 and machine.flops_per_s == sheet.flops_per_s
    assert machine.memory_bytes_per_s * machine.memory.at(2 << 30) == pytest.approx(4e12)
    assert machine.host_s_per_operator == pytest.approx(20e-6)
    # A layer's outputs are torch's products; its weights' gradients ours, which are added: 8 bytes an element.
    assert machine.product_seconds(512, 512, 8192, 2, "bfloat16", kind="forward") == pytest.approx(flops / 8e14)
    added = 8 * 512**2 / (machine.memory_bytes_per_s * machine.memory.at(8 * 512**2))
    gradient = machine.product_seconds(8192, 512, 512, 2, "bfloat16", kind="weight_gradient")
    assert gradient == pytest.approx(flops / 5e14 + added)
    for name, rate in (("attention", 2e14), ("attention_backward", 2e14)):
        work = Work(5 * 10**10, 1)
        assert machine.attention_seconds(work, "bfloat16", name=name) == pytest.approx(work.flops / rate, rel=0.02)
    assert (machine.within, machine.memory_bytes, machine.num_nodes) == (sheet.within, sheet.memory_bytes, 2)


def test_operators_that_were_measured_one_by_one_are_the_file(tmp_path: Path) -> None:
    rows, sheet = tmp_path / "rows.jsonl", MACHINES["h200"]
    measured = replace(
        sheet,
        **{"name": "this GPU", "source": "3 passes", "flops_per_s": {"bfloat16": 8e14}, "host_s_per_operator": 1e-3},
        **{"memory_bytes": 150 * 10**9, "ranks_per_node": 1, "num_nodes": 1, "chip_spread": 0.0},
        within=sheet.between,
    )
    append(rows, {PREFLIGHT: {"gpu": "NVIDIA H200", "gpu_memory_bytes": 141 * 10**9}})
    append(rows, {"case": MACHINE_ROW, "check": "passed", "machine": machine_values(measured)})
    # Another GPU's row, which came later.
    append(rows, {"case": MACHINE_ROW, "check": "passed", "gpu": "NVIDIA H100", "machine": machine_values(sheet)})
    assert "wrote" in write_machine(rows, tmp_path)
    found = machine_named(str(tmp_path / "machine.toml"))
    assert found.source == "3 passes; links, memory and other dtypes of the data sheet"
    flops_per_s = {**sheet.flops_per_s, "bfloat16": 8e14}
    assert found == replace(sheet, source=found.source, flops_per_s=flops_per_s, host_s_per_operator=1e-3)


@pytest.mark.parametrize("kind", ["sheet", "rows"])
def test_a_step_that_was_measured_is_predicted(kind: str) -> None:
    """One H200 trained llama_1b: by the sheet, and by what the planner's rows of the same run say, within a tenth."""
    rows = results(read(H200))
    (measured,) = [row for row in rows if row["case"] == "train/llama_1b/against_torch" and row["check"] == "passed"]
    machine = MACHINES["h200"] if kind == "sheet" else machine_of_rows(rows, MACHINES["h200"])
    assert isinstance(machine, Machine)
    preset = preset_config("llama_1b")
    sheet = Sheet.of(validate(replace(preset, device="cuda"), 1), machine)
    assert sheet.seconds == pytest.approx(measured["step_median_seconds"], rel=0.1)
