"""Rung: pure. What `tpengine doctor` says where its files cannot be written. Its answer: test_doctor.py."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpengine.commands.doctor_report import report
from tpengine.doctor.finding import is_ready, ok


@contextmanager
def no_room_left() -> Iterator[None]:
    """Let this process write no more than a few bytes into a file, as on a disk that has filled."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_has_filled_is_one_finding_and_the_rest_is_said(tmp_path: Path) -> None:
    out, findings = tmp_path / "machine.toml", [ok("cores", "2 for 2 ranks")]
    beside = tmp_path / "machine.json"
    beside.write_text("{}")
    with no_room_left():
        lines = report(findings, [], {}, out, is_quick=True)
    assert lines[0] == "ok      cores                              2 for 2 ranks"
    assert not is_ready(findings) and f"1. file {beside}: not written: File too large" in lines
    assert lines[-1].strip().startswith("tpengine doctor --out /tmp/machine.toml")
    assert not any("wrote" in line or "the table is in" in line for line in lines)
    # The older one is kept, and nothing unfinished is left.
    assert [path.name for path in tmp_path.iterdir()] == ["machine.1.json"]


def test_the_files_are_named_where_they_are_written(tmp_path: Path) -> None:
    lines = report([ok("cores", "2")], [], {}, tmp_path / "machine.toml", is_quick=True)
    beside = tmp_path / "machine.json"
    assert json.loads(beside.read_text())["ready"] and lines[-1] == "ready"
    assert f"no machine's file: its rates were not measured; the table is in {beside}" in lines
