"""Rung: pure. The planner's rows of a GPU become a machine's file, and what is missing is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.tables.machine_file import machine_like, write_machine
from benchmarks.gpu.tables.rows import PREFLIGHT
from benchmarks.harness.journal import append
from benchmarks.run import main
from tpengine.simulate.machine import MACHINES, machine_named


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
    assert "planner/matmul or planner/copy are missing" in write_machine(rows)
    size = {"check": "passed", "m": 512, "n": 512}
    append(rows, {"case": "planner/matmul/512x512x512", **size, "k": 512, "ours_flops_per_second": 1e14})
    append(rows, {"case": "planner/matmul/512x512x8192", **size, "k": 8192, "ours_flops_per_second": 5e14})
    wrong = {**size, "check": "failed: wrong", "k": 8192, "ours_flops_per_second": 9e15}
    append(rows, {"case": "planner/matmul/wrong", **wrong})
    for num_bytes, rate in ((1 << 12, 1e10), (1 << 30, 2e12)):
        name = f"planner/copy/{num_bytes}"
        append(rows, {"case": name, "check": "passed", "num_bytes": num_bytes, "within_bytes_per_second": rate})
    append(rows, {"case": "planner/launch/triton_norm", "check": "passed", "host_us": 20.0})
    assert main(["gpu", "--report", str(tmp_path)]) == 0
    assert f"wrote {tmp_path / 'machine.toml'}" in capsys.readouterr().out.replace("\n", " ")
    machine, sheet = machine_named(f"{tmp_path / 'machine.toml'}:8x2"), MACHINES["h200"]
    for k, rate in ((512, 1e14), (8192, 5e14)):
        assert machine.peak("bfloat16") * machine.matmul.at(2 * 512 * 512 * k) == pytest.approx(rate)
    assert machine.num_processors == 0 and machine.flops_per_s == sheet.flops_per_s
    assert machine.memory_bytes_per_s * machine.memory.at(2 << 30) == pytest.approx(4e12)
    assert machine.host_s_per_operator == pytest.approx(20e-6)
    assert (machine.within, machine.memory_bytes, machine.num_nodes) == (sheet.within, sheet.memory_bytes, 2)
