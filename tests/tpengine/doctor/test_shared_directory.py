"""Rung: pure. Whether hosts share a directory: of two directories, as two hosts that do not share one have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpengine.doctor.shared_directory import leave_mark, remove_mark, seen_marks


def test_hosts_that_share_a_directory_find_each_other(tmp_path: Path) -> None:
    for rank in (0, 2):
        assert leave_mark(tmp_path / "runs", "abc", rank)["free_bytes"] > 0
    assert seen_marks(tmp_path / "runs", "abc", [0, 2]) == [0, 2]
    # Of another examination at the same time.
    assert seen_marks(tmp_path / "runs", "other", [0, 2]) == []
    for rank in (0, 2):
        remove_mark(tmp_path / "runs", "abc", rank)
    assert list((tmp_path / "runs").iterdir()) == []


def test_hosts_that_do_not_share_one_find_only_themselves(tmp_path: Path) -> None:
    for rank, name in ((0, "a"), (2, "b")):
        leave_mark(tmp_path / name, "abc", rank)
    assert seen_marks(tmp_path / "a", "abc", [0, 2]) == [0] and seen_marks(tmp_path / "b", "abc", [0, 2]) == [2]


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        leave_mark(tmp_path / "file" / "runs", "abc", 0)
