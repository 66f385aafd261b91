"""Rung: pure. How far a command has come: seldom, and gone at the end."""

from __future__ import annotations

import io

import pytest

from tpengine.commands.weights import ByteProgress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), _Terminal()], ids=["file", "terminal"])
def test_long_work_is_said(stream: io.StringIO) -> None:
    seconds = 0.0
    progress = ByteProgress("importing out", 10_000_000_000, stream, clock=lambda: seconds)
    for _ in range(100):
        seconds += 1.0
        progress.add(100_000_000)
    progress.end()
    text = stream.getvalue()
    if stream.isatty():
        lines = text.strip("\r ").split("\r")
        assert len(lines) == 100 and lines[-1].strip() == "importing out: 10.0 of 10.0 GB, 0 s left"
        assert text.endswith(f"\r{' ' * len(lines[-1])}\r")
    else:
        lines = text.splitlines()
        assert lines == [f"importing out: {n}.0 of 10.0 GB, {100 - 10 * n} s left" for n in (3, 6, 9)]


def test_short_work_says_nothing() -> None:
    stream = _Terminal()
    progress = ByteProgress("importing out", 1_000, stream, clock=lambda: 0.0)
    progress.add(1_000)
    progress.end()
    assert stream.getvalue() == ""
