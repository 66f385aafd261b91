"""Rung: pure. The overlap benchmark's numbers: which variants are the bars, E and its ceiling."""

from __future__ import annotations

import pytest

from benchmarks.harness.timing import Comparison
from benchmarks.overlap.table import overlap_fields


def comparison_of(**milliseconds: float) -> Comparison:
    """Three rounds in which the variants took so long; a dot in a name is written as two underscores."""
    samples = {name.replace("__", "."): [t / 1e3] * 3 for name, t in milliseconds.items()}
    return Comparison("passed", samples)


def test_the_fastest_matmul_is_the_bar() -> None:
    times = {"torch__mm": 12, "host_gemm": 10, "prepared": 13, "own": 11, "serial": 14, "fused": 11}
    bars = {"matmul": ("torch.mm", "host_gemm", "prepared")} | {bar: (bar,) for bar in ("own", "serial", "fused")}
    fields = overlap_fields(comparison_of(**times), bars)
    assert fields["fastest_matmul"] == "host_gemm" and "fastest_fused" not in fields
    assert fields["matmul_median_seconds"] == 0.010 and fields["serial_median_seconds"] == 0.014
    assert fields["ect_serial_seconds"] == pytest.approx(0.004)
    assert fields["overlap_efficiency_ratio"] == pytest.approx(1 - 1 / 4)
    assert fields["overlap_ceiling_ratio"] == pytest.approx(1 - 1 / 4)
    assert fields["fused_over_matmul_median_ratio"] == pytest.approx(1.1)
    assert fields["fused_over_torch_mm_median_ratio"] == pytest.approx(11 / 12)
