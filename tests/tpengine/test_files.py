"""Rung: pure. Files are replaced whole, and nothing is overwritten that should be kept."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tpengine.files import keep_aside, try_to_write, write_beside, written_beside


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_made_and_replaced(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "f"
    for content in (b"old", b"new", b""):
        write_beside(path, content, durable=durable)
        assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), written_beside(path) as beside:
        beside.write_bytes(b"half of the n")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(os, call, fail)
        write_beside(path, b"new", durable=True)
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_trial_leaves_nothing(tmp_path: Path) -> None:
    try_to_write(tmp_path / "f")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError):
        try_to_write(tmp_path / "none" / "f")


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_beside(tmp_path / "f", b"")
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_keep_aside_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert keep_aside(path) is None
    for number in (1, 2, 3):
        path.write_text(str(number))
        assert keep_aside(path) == tmp_path / f"config.{number}.toml"
    assert sorted(p.read_text() for p in tmp_path.iterdir()) == ["1", "2", "3"]
