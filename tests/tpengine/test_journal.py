"""Rung: pure. A list of rows is read whatever has become of it, and what was in it is there after any end."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpengine import journal
from tpengine.journal import index_of, numbered

ROWS = [{"step": step, "text": "1 + 1 =\n2", "loss": 1 / step} for step in (1, 2, 3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "list.jsonl"
    for row in ROWS:
        journal.append(path, row)
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [line.row for line in journal.read(path)]


def test_rows_come_back_with_all_bits(path: Path) -> None:
    lines = list(journal.read(path))
    assert [line.row for line in lines] == ROWS and all(line.text.endswith(b"\n") for line in lines)
    assert [(line.number, line.step) for line in lines] == [(1, 1), (2, 2), (3, 3)]


def test_a_line_that_is_cut_anywhere_is_told_and_the_next_row_has_its_own(path: Path) -> None:
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for length in range(1, last):
        path.write_bytes(whole[:-length])
        *before, line = journal.read(path)
        # A row that lacks its newline alone is whole.
        assert line.row == (ROWS[2] if length == 1 else {}) and not line.text.endswith(b"\n")
        assert [line.row for line in before] == ROWS[:2]
        journal.append(path, {"step": 4})
        assert rows(path) == [*ROWS[:2], line.row, {"step": 4}]


@pytest.mark.parametrize("bad", [b"", b"{", b"[1]", b"7", b"null", b"1" * 5000, b"[" * 100_000, b'{"step": \xff}'])
def test_a_bad_line_in_the_middle_is_one_line_that_has_no_row(path: Path, bad: bytes) -> None:
    first, *others = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, bad, *others, b""]))
    _, line, *_ = lines = list(journal.read(path))
    assert line == journal.Line(2, bad + b"\n", {}) and (line.step, line.index) == (None, None)
    assert [line.row for line in lines if line.row] == ROWS
    # Who keeps it, keeps it as it is.
    before = path.read_bytes()
    journal.write(path, lines)
    assert path.read_bytes() == before


@pytest.mark.parametrize("step", [None, True, 1.5, "1", [1]])
def test_a_step_that_is_none_is_not_taken_for_one(path: Path, step: object) -> None:
    journal.append(path, {"step": step})
    *_, line = journal.read(path)
    assert line.row == {"step": step} and (line.step, line.index) == (None, None)


def test_a_byte_that_is_no_text_costs_no_row(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"1 + 1", b"1 \xff 1"))
    assert [line.step for line in journal.read(path)] == [1, 2, 3] and rows(path)[0]["text"] == "1 � 1 =\n2"


def test_a_list_is_cut_behind_a_step_and_goes_on(path: Path) -> None:
    first = path.read_bytes().splitlines()[0]
    path.write_bytes(path.read_bytes() + b'{"step": 4, "te')
    journal.write(path, [line for line in journal.read(path) if line.step is not None and line.step <= 2])
    journal.append(path, {"step": 3})
    assert rows(path) == [*ROWS[:2], {"step": 3}] and path.read_bytes().splitlines()[0] == first
    journal.write(path, [])
    assert path.read_bytes() == b"" and not rows(path)


@pytest.mark.parametrize(("call", "durable"), [("half of it", False), ("replace", False), ("fsync", True)])
def test_a_list_is_the_old_or_the_new_wherever_writing_it_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, durable: bool
) -> None:
    def end(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        if call == "half of it":
            patch.setattr(Path, "open", half_of(Path.open))
        else:
            patch.setattr(os, call, end)
        journal.write(path, ROWS[:1], durable=durable)
    assert rows(path) == ROWS
    assert [file.name for file in path.parent.iterdir()] == ["list.jsonl"]


def test_a_full_disk_costs_the_row_that_it_does_not_take(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(Path, "open", half_of(Path.open))
        journal.append(path, {"step": 4})
    journal.append(path, {"step": 5})
    assert rows(path) == [*ROWS, {}, {"step": 5}]


def half_of(opened: Callable[..., Any]) -> Callable[..., Any]:
    """Open files on a disk that takes half of what is written."""

    def opening(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = opened(path, mode, *args, **kwargs)
        return HalfWritten(file) if set(mode) & set("wa") else file

    return opening


class HalfWritten:
    """A file whose disk is full."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.read, self.seek = file.read, file.seek

    def __enter__(self) -> HalfWritten:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        self._file.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")


def test_a_durable_list_is_on_disk_under_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        synced.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    journal.write(path, ROWS)
    assert not synced
    journal.write(path, ROWS, durable=True)
    assert synced == ["file", "directory"] and rows(path) == ROWS


def test_a_list_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        journal.read(tmp_path / "none.jsonl")


def test_a_step_is_named_by_the_number_that_is_finished_with_it(path: Path) -> None:
    assert numbered(0)["step"] == 1 and [index_of(numbered(index)) for index in (0, 1, 99)] == [0, 1, 99]
    assert index_of({"step": 7}) == 7, "earlier versions counted from 0"
    journal.write(path, [numbered(4), {"step": 4}])
    assert [(line.step, line.index) for line in journal.read(path)] == [(5, 4), (4, 4)]


@pytest.mark.parametrize("value", [{}, [], "1", {"step": -1}, {"step": True}, {"step": 0, "counted_from": 1}])
def test_what_names_no_step_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        index_of(value)


def test_metrics_of_an_earlier_version_have_a_step_0(path: Path) -> None:
    assert journal.read_steps(path) == ROWS
    path.write_bytes(b'{"step": 0}\n{"stop": 1}\n{"step": 1, "event": "skip"}\n{"st')
    assert journal.read_steps(path) == [{"step": 1}, {"step": 2, "event": "skip"}]
