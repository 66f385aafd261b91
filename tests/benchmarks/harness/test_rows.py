"""Rung: pure. What a row says of itself: units, machine, source; and that it names no host."""

from __future__ import annotations

import ctypes
import getpass
import json
import math
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.harness.journal import append
from benchmarks.harness.revision import REVISION_VARIABLE, source_here
from benchmarks.harness.rows import cpu_model, environment, make_row, stored
from tpengine.doctor import nvml
from tpengine.doctor.nvml import Clocks, clocks

WHERE = {"date", "commit", "dirty", "python", "torch", "triton", "tpengine", "cpu", "cores"}
WHERE |= {"gpu", "gpu_clock_mhz", "gpu_memory_clock_mhz"}


@pytest.fixture
def asks_git_again() -> Iterator[None]:
    source_here.cache_clear()
    yield
    source_here.cache_clear()


def test_a_row_has_its_case_its_fields_and_where_it_was_measured() -> None:
    row = make_row(
        "matmul", threads_per_rank=1, fields={"a_median_seconds": 0.5, "a_num_samples": 3, "check": "passed"}
    )
    assert row.keys() == WHERE | {"case", "threads_per_rank", "a_median_seconds", "a_num_samples", "check"}
    assert next(iter(row)) == "case" and row["case"] == "matmul" and row["threads_per_rank"] == 1


def test_a_float_without_a_unit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must end in a unit: speed, time:"):
        make_row("x", threads_per_rank=1, fields={"speed": 1.0, "time": 2.0, "count": 3, "read_bytes": 4.0})


@pytest.mark.parametrize("name", ["case", "commit", "threads_per_rank"])
def test_a_field_that_hides_the_environment_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"must not hide the environment's: {name}"):
        make_row("x", threads_per_rank=1, fields={name: "other"})


def test_the_environment_names_no_host_and_no_user() -> None:
    text = json.dumps(environment())
    assert platform.node() not in text and f"/{getpass.getuser()}" not in text


@pytest.mark.usefixtures("asks_git_again")
def test_results_do_not_make_the_tree_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    assert environment()["dirty"] is False
    assert any(":!benchmarks/results" in command for command in asked)
    number = len(asked)
    assert environment()["dirty"] is False and len(asked) == number, "git is asked once, not for every row"


@pytest.mark.usefixtures("asks_git_again")
def test_without_git_the_source_is_unknown_or_what_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    found = environment()
    assert found["commit"] is None and found["dirty"] is None
    source_here.cache_clear()
    monkeypatch.setenv(REVISION_VARIABLE, "8ecd560")
    found = environment()
    assert found["commit"] == "8ecd560" and found["dirty"] is None


def test_clocks_are_those_that_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the driver's library, which knows its GPU by its number alone."""
    told = {1: 1755, 2: 3201}

    def clock(_: Any, kind: int, value: Any) -> int:
        value._obj.value = told.get(kind, 0)
        return 0 if kind in told else 1

    def count(value: Any) -> int:
        value._obj.value = 1
        return 0

    library = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByUUID=lambda *_: 6,
        nvmlDeviceGetCount_v2=count,
        nvmlDeviceGetHandleByIndex_v2=lambda *_: 0,
        nvmlDeviceGetClockInfo=clock,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="one"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    nvml._device.cache_clear()
    nvml._library.cache_clear()
    try:
        assert clocks() == Clocks(1755, 3201)
        del told[2]
        assert clocks() == Clocks(1755, None)
    finally:
        nvml._device.cache_clear()
        nvml._library.cache_clear()


def test_the_processor_is_named_with_family_and_model(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: Some CPU\n\n"
        "processor\t: 1\nmodel name\t: Other\n"
    )
    assert cpu_model(cpuinfo) == "Some CPU (family 25, model 17)"
    assert cpu_model(tmp_path / "none") == platform.machine()


def test_rows_are_appended_one_a_line_and_numbers_are_finite(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for number in (1, 2):
        append(path, {"case": "x", "n": number})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2]
    with pytest.raises(ValueError):
        append(path, {"case": "x", "a_ratio": math.nan})


def test_stored_rows_are_all_in_the_file_and_one_red_check_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    green, red = {"case": "x", "check": "passed"}, {"case": "y", "check": "failed: no"}
    assert stored([green, red, green], path) == 1
    assert [json.loads(line)["case"] for line in path.read_text().splitlines()] == ["x", "y", "x"]
    assert (stored([red], None), stored([green], None)) == (1, 0)
