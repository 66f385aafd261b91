"""Rung: pure. The tables of a run: which rows count, which stay apart, what they show, and what comes last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.tables.report import print_report
from benchmarks.gpu.tables.rows import HOW, RUN_CASE, results
from benchmarks.harness.journal import append


def test_rows_of_other_ranks_and_of_smoke_stay_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [{"case": "host/gather", "ranks": n, "host_us": 10.0 + n, "num_samples": 20} for n in (2, 4, 8)]
    smoke = {"case": "host/gather", "ranks": 2, "num_samples": 1, "host_us": 200.0}
    again = alone[1] | {"host_us": 1.0}
    rows = [*alone, smoke, again]
    assert results(rows) == [alone[0], again, alone[2], smoke]
    for row in rows:
        append(tmp_path / "rows.jsonl", row)
    print_report(tmp_path / "rows.jsonl", None)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line.partition(", host_us")[0] for line in said if line.startswith("host/")] == [
        f"host/gather, {n} ranks num_samples 20" for n in (2, 4, 8)
    ]
    assert not any("host_us 200" in line for line in said)


def test_a_report_ends_with_the_failures_and_the_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own: list[dict[str, Any]] = [{RUN_CASE: name, HOW: how} for name, how in (("x", "crashed"), ("y", "no time"))]
    found: list[dict[str, Any]] = [
        {"case": "train/llama_1b/kernel_0", "kernel": "matmul_kernel", "kernel_us": 12.5, "share_percent": 30.0},
        {"case": "what_copies/0", "what": "Memcpy DtoD", "num_calls": 3, "total_us": 7.0},
        {"case": "train/llama_1b/profile", "num_kernels": 12345, "idle_percent": 2.0},
        {"case": "train/llama_1b", "peak_bytes": 21_000_000_000, "mfu_attention_half_percent": 46.0},
        {"case": "kernels/norm/x", "check": "failed: wrong by 3"},
    ]
    for row in own + found:
        append(tmp_path / "rows.jsonl", row)
    print_report(tmp_path / "rows.jsonl", None)
    said = " ".join(capsys.readouterr().out.split())
    titles = ["Figures", "Wrong results", "Cases", "no time y", "crashed x", "Bars"]
    places = [said.find(f" {title} ") for title in titles]
    assert -1 not in places and places == sorted(places), (titles, places)
    assert "kernel matmul_kernel, kernel_us 12.5" in said and "what Memcpy DtoD, num_calls 3" in said
    assert "num_kernels 12345" in said and "peak_bytes 2.1e+10" in said
