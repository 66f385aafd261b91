"""Rungs: pure, interpreter, GPU. The overlap benchmark of co-located ranks: its rows, its table, what it refuses.

Sizes are tiny and no time is asserted. Only a GPU shows that it runs: that no rank holds what another needs, and that
the fused kernels are right between co-located ranks.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from support import ROOT
from support.ranks.progress import run_program
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.copies import HostCopies
from tpkernels.symmetric.signals_kernel import PUBLISHED, TIMED_OUT, VERDICT_WORDS

from benchmarks.harness.shapes import Model
from benchmarks.harness.timing import Comparison
from benchmarks.overlap import command as overlap
from benchmarks.overlap import gpu as overlap_gpu
from benchmarks.overlap.cases import Case, Operands, cases_of
from benchmarks.overlap.gpu import measured_rows, ways_of
from benchmarks.overlap.ranks import VirtualRanks
from benchmarks.overlap.table import overlap_fields, overlap_table
from benchmarks.overlap.ways import Serial, Way
from benchmarks.run import main

TINY = Model("tiny", 24, 4, 2, 16, 20, 96)
CASES = (
    "all_gather_matmul/forward",
    "matmul_reduce_scatter/forward",
    "all_gather_matmul/dgrad",
    "matmul_reduce_scatter/dgrad",
    "all_gather_matmul/backward_regathering",
    "pair/forward",
    "pair/backward",
)
# With what can be pushed, and without.
FEW = CASES[:2]
PLAIN = ("torch.mm", "kernel")
SERIAL = ("serial_torch", "serial_kernel")
T = TypeVar("T")


class HostTime:
    """A clock for calls that wait for their own work."""

    def timed(self, call: Callable[[], T], name: object = None) -> tuple[float, T]:
        begin = time.perf_counter()
        result = call()
        return time.perf_counter() - begin, result


def ranks_on(device: str, world: int) -> VirtualRanks:
    return VirtualRanks(world, torch.device(device), [HostCopies() for _ in range(world)])


few_by_default = pytest.mark.parametrize(
    "cases", [FEW, pytest.param(CASES, marks=pytest.mark.slow)], ids=["few", "all"]
)


def rows_with_stand_ins(cases: tuple[str, ...], failing: str) -> list[dict[str, Any]]:
    """Rows of some cases of two small runs; what waits for others is replaced by what does not, and may fail."""

    def chosen(o: Operands) -> list[Case]:
        return [case for case in cases_of(o) if case.name in cases]

    def stand_ins(case: Case, o: Operands, arenas: Any, still: Any) -> dict[str, Way]:
        ways = ways_of(case, o, arenas, still)
        replaced = {name: Serial(o.ranks, torch.mm, still) for name in ("fused", "push") if name in ways}
        if failing in replaced:
            verdict = torch.tensor([TIMED_OUT, 1, 0, PUBLISHED, 6, 5, 0])

            def give_up(*_: Any) -> Any:
                arenas[0]._record[:VERDICT_WORDS].copy_(verdict)
                return o.x.full, o.x.full

            replaced[failing].gather = give_up  # type: ignore[method-assign]
        return ways | replaced

    changes = {"ways_of": stand_ins, "cases_of": chosen, "WARMUP_ROUNDS": 0}
    with patch.multiple(overlap_gpu, **changes):
        ranks = ranks_on("cpu", 2)
        return list(measured_rows(TINY, 6, ranks, HostTime(), 2, "virtual, one Some GPU", torch.float32))


@few_by_default
def test_rows_say_that_ranks_are_virtual_and_have_every_number(interpreters: RankPool, cases: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    ((*rows,),) = interpreters.run(rows_with_stand_ins, 1, cases, "")
    assert [row["case"] for row in rows] == [f"overlap/{case}/tiny/tokens_6" for case in cases]
    for row in rows:
        assert row["check"] == "passed" and row["num_samples"] == 2, row
        assert (row["ranks"], row["virtual_ranks"], row["dtype"]) == ("virtual, one Some GPU", 2, "float32")
        assert (row["model"], row["tokens"], row["hidden"], row["ffn_per_rank"]) == ("tiny", 6, 24, 20)
        assert row["fastest_matmul"] in PLAIN and row["fastest_serial"] in SERIAL
        bars = ["matmul", "own", "serial", "fused"]
        if row["case"].split("/")[1:3] not in (["matmul_reduce_scatter", "forward"], ["all_gather_matmul", "dgrad"]):
            bars += [] if "regathering" in row["case"] else ["push"]
        assert [name.removesuffix("_median_seconds") for name in row if name.endswith("_median_seconds")] == bars
        assert row["matmul_flops_per_second"] == row["work_flops"] / row["matmul_median_seconds"]
        json.dumps(row, allow_nan=False)
    assert "tiny" not in text_of(rows) and "E push" in text_of(rows) and cases[-1] in text_of(rows)


@few_by_default
def test_a_call_that_was_given_up_is_a_red_check_of_its_case_alone(
    interpreters: RankPool, cases: tuple[str, ...]
) -> None:
    pytest.importorskip("triton")
    ((*rows,),) = interpreters.run(rows_with_stand_ins, 1, cases, "fused")
    assert len(rows) == len(cases)
    red = [row for row in rows if row["check"] != "passed"]
    gathering = [CASES[i] for i in (0, 3, 5, 6) if CASES[i] in cases]
    assert [row["case"].split("/", 1)[1].removesuffix("/tiny/tokens_6") for row in red] == gathering
    for row in red:
        assert row["check"].startswith("failed: rank 0: group of co-located ranks is poisoned: rank 1 waited in ")
        assert not [name for name in row if name.endswith(("_seconds", "_ratio", "_per_second"))]
    assert text_of(rows).count("check failed") == len(gathering)


def text_of(rows: list[dict[str, Any]]) -> str:
    console = Console(width=overlap_gpu.TABLE_COLUMNS)
    with console.capture() as captured:
        console.print(overlap_table("two co-located ranks", rows))
    return captured.get()


def comparison_of(**milliseconds: float) -> Comparison:
    """Three rounds in which the variants took so long; a dot in a name is written as two underscores."""
    samples = {name.replace("__", "."): [t / 1e3] * 3 for name, t in milliseconds.items()}
    return Comparison("passed", samples)


def test_the_fastest_matmul_and_the_faster_serial_are_the_bars() -> None:
    times = {"torch__mm": 12, "kernel": 10, "own": 11, "serial_torch": 14, "serial_kernel": 16, "fused": 11, "push": 13}
    fields = overlap_fields(comparison_of(**times), overlap_gpu.BARS)
    assert (fields["fastest_matmul"], fields["fastest_serial"]) == ("kernel", "serial_torch")
    assert fields["matmul_median_seconds"] == 0.010 and fields["serial_median_seconds"] == 0.014
    assert fields["ect_serial_seconds"] == pytest.approx(0.004)
    assert fields["overlap_efficiency_ratio"] == pytest.approx(1 - 1 / 4)
    assert fields["overlap_ceiling_ratio"] == pytest.approx(1 - 1 / 4)
    assert fields["overlap_push_efficiency_ratio"] == pytest.approx(1 - 3 / 4)
    assert fields["fused_over_matmul_median_ratio"] == pytest.approx(1.1)
    assert fields["fused_over_torch_mm_median_ratio"] == pytest.approx(11 / 12)
    assert "fastest_fused" not in fields


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device cuda --virtual-ranks 0", "--virtual-ranks must be at least 1: got 0: use 4"),
        ("--device cuda --virtual-ranks 9", "--virtual-ranks must be 2 to 8, which share a GPU: got 9: use 8"),
        ("--device cuda --virtual-ranks 1", "--virtual-ranks must be 2 to 8, which share a GPU: got 1: use 2"),
        ("--device cuda --models llama3_80b", "got 'llama3_80b': use one of these"),
        ("--device cuda --hidden 8", "--hidden means nothing on a GPU: got 8: leave it out, or use --device cpu"),
        ("--device cuda --tp 4", "--tp means nothing on a GPU: got 4"),
        ("--device cpu --virtual-ranks 2", "--virtual-ranks means nothing on a CPU: got 2"),
        ("--device cpu --models llama3_8b", "leave it out, or use --device cuda"),
        ("--device cuda --tokens", "--tokens needs at least one"),
        ("--device cuda", "--device cuda needs a GPU: torch .* sees none: use --device cpu"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["overlap", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("options", "there_is_a_gpu", "device"),
    [({}, True, "cuda"), ({}, False, "cpu"), ({"hidden": 8}, True, "cpu"), ({"device": "cpu"}, True, "cpu")],
)
def test_a_gpu_is_taken_unless_sizes_are_the_cpus(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], there_is_a_gpu: bool, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there_is_a_gpu)
    assert overlap.device_of(overlap.Options(**options)) == device


def test_a_gpu_gets_what_the_command_line_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(overlap, "measure_on_gpu", lambda *arguments: given.append(arguments) or 0)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    out = tmp_path / "rows.jsonl"
    arguments = f"--virtual-ranks 8 --models llama3_8b llama3_70b --tokens 512 --rounds 7 --out {out}"
    assert main(["overlap", *arguments.split()]) == 0
    assert given == [(("llama3_8b", "llama3_70b"), (512,), 8, 7, out)]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    assert main(["overlap"]) == 0 and given[1] == (None, None, 4, 60, None)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_smallest_model_is_measured_from_end_to_end(tmp_path: Path, num_ranks: int) -> None:
    """In a process of its own: CUDA reads how many hardware queues are asked for when it starts."""
    out = tmp_path / "rows.jsonl"
    options = f"--device cuda --virtual-ranks {num_ranks} --models llama3_8b --tokens 512 --rounds 2 --out {out}"
    command = [sys.executable, "-m", "benchmarks.run", "overlap", *options.split()]
    done = run_program(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in rows] == [f"overlap/{case}/llama3_8b/tokens_512" for case in CASES]
    for row in rows:
        assert row["check"] == "passed" and row["virtual_ranks"] == num_ranks and row["gpu"] in row["ranks"]
        assert row["fused_median_seconds"] > 0 and row["serial_median_seconds"] > 0
