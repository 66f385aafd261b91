"""Rung: pure. A long search says how far it is, on a terminal alone, and leaves nothing behind."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from tpengine.commands.advise import search_progress
from tpengine.terminal import terminal_safe


class Screen(io.StringIO):
    """Standard error, a terminal or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal, self.has_words = is_terminal, threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        done = super().write(text)
        if "37 layouts simulated" in self.getvalue():
            self.has_words.set()
        return done


def test_a_terminal_is_told_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    # As every command runs: what controls the terminal passes from the line alone.
    with terminal_safe(), search_progress("looking for layouts", moment_seconds=0.0) as say:
        say("37 layouts simulated")
        screen.has_words.wait()
    # The line is erased.
    assert screen.getvalue().rstrip().endswith("\x1b[2K") or "\x1b[2K" in screen.getvalue().rpartition("37")[2]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_no_terminal_and_what_is_done_soon_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(ValueError, match="nothing fits"), search_progress("looking", moment_seconds=1e6) as say:
        say("37 layouts simulated")
        raise ValueError("nothing fits")
    assert "37" not in screen.getvalue() and "looking" not in screen.getvalue()
