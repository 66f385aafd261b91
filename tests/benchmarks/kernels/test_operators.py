"""Rung: gloo ranks. The benchmarks of operators run, store rows, and show no ratio of results that differ.

Sizes are tiny and no time is asserted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import ROOT

from benchmarks.harness.registry import BENCHMARKS
from benchmarks.harness.timing import Comparison
from benchmarks.overlap import command as overlap
from benchmarks.run import main

README = (ROOT / "benchmarks/README.md").read_text()
BARS = ("torch.mm", "host_gemm", "prepared", "own", "split", "serial", "fused")


def comparison_of(*milliseconds: float) -> Comparison:
    """Three rounds in which the bars, in order, took so long."""
    return Comparison("passed", {bar: [t / 1e3] * 3 for bar, t in zip(BARS, milliseconds, strict=True)})


def test_overlap_efficiency_is_the_hidden_part_of_the_communication() -> None:
    fields = overlap.fields_of(comparison_of(12, 11, 10, 10.5, 11, 14, 11))
    assert fields["fastest_matmul"] == "prepared" and fields["matmul_median_seconds"] == pytest.approx(0.010)
    assert fields["overlap_efficiency_ratio"] == pytest.approx(1 - 1 / 4)
    assert fields["overlap_ceiling_ratio"] == pytest.approx(1 - 0.5 / 4)
    assert fields["fused_over_matmul_median_ratio"] == pytest.approx(1.1)
    assert fields["fused_over_torch_mm_median_ratio"] == pytest.approx(11 / 12)


def test_no_efficiency_where_communication_costs_nothing() -> None:
    fields = overlap.fields_of(comparison_of(12, 11, 10, 10.5, 11, 9.9, 11))
    assert fields["ect_serial_seconds"] < 0
    assert not [name for name in fields if name.startswith("overlap_")]


def test_a_red_check_has_no_numbers() -> None:
    assert overlap.fields_of(Comparison("failed: rank 1: fused and serial differ")) == {
        "check": "failed: rank 1: fused and serial differ"
    }


def test_a_wrong_result_is_noticed() -> None:
    right, wrong = [torch.ones(2, 2)], [torch.zeros(2, 2)]
    good = {bar: lambda: right for bar in BARS}
    overlap.check_variants(good)
    for bar in ("fused", "own", "split", "prepared", "host_gemm"):
        with pytest.raises(AssertionError, match=f"{bar} and .* differ by up to 1"):
            overlap.check_variants(good | {bar: lambda: wrong})


@pytest.mark.by_default("exchange --ranks 3 --activations 12288 --buckets 4000 --rounds 2-4")
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        ("overlap --tp 2 --tokens 10 --hidden 8 --ffn 12 --rounds 2", 6),
        pytest.param("overlap --tp 3 --tokens 10 --hidden 8 --ffn 12 --rounds 2", 6, marks=pytest.mark.slow),
        ("exchange --ranks 3 --activations 12288 --buckets 4000 --rounds 2", 4),
        ("attention --seqs 8 16 --tokens 16 --heads 2 --head-size 4 --rounds 2", 4),
    ],
)
def test_a_small_run_stores_its_rows(tmp_path: Path, arguments: str, cases: int) -> None:
    assert main([*arguments.split(), "--out", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len({row["case"] for row in rows}) == len(rows) == cases
    for row in rows:
        assert row["check"] == "passed" and row["threads_per_rank"] == 1 and row["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("overlap --ffn 1407", "ffn must be divisible by tp"),
        ("overlap --tp 0", "--tp must be at least 1: got 0: use 2"),
        ("overlap --rounds -3", "--rounds must be at least 1: got -3: use 60"),
        ("attention --head-size 0", "--head-size must be at least 1"),
        ("attention --seqs -1", "--seqs must be at least 1"),
        ("exchange --buckets", "--buckets needs at least one"),
        ("overlap --out /nowhere/at/all.jsonl", "make /nowhere/at first"),
        (
            "train --against nosuch",
            "--against must be torch, exact, zero0, one-process, a layout or a git revision: got 'nosuch'",
        ),
        ("exchange --ranks 1", "2 or more ranks"),
        ("exchange --buckets 5", "buckets must be divisible by 4"),
        ("attention --seqs 100", "tokens must be whole sequences"),
        ("overlapp", "use overlap"),
        ("nosuch", "use --list"),
    ],
)
def test_impossible_sizes_are_refused(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_the_readme_shows_every_benchmark() -> None:
    for name in BENCHMARKS:
        assert f"python -m benchmarks.run {name}" in README
