"""Rung: processes of their own. Programs that tests start: what they say and end with, and that none is left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

from support.programs import Running, run_module
from support.ranks.progress import Progress


def test_a_program_has_its_output_and_exit_code() -> None:
    done = run_module("tpengine.cli", "--version")
    assert done.returncode == 0 and done.stdout.startswith("tpengine ") and not done.stderr
    done = run_module("tpengine.cli", "schedule", "--pp", "0")
    assert done.returncode == 2 and done.stderr.startswith("tpengine: error: ") and not done.stdout


def test_a_program_that_nobody_holds_is_ended(tmp_path: Path) -> None:
    running = Running("http.server", "0", "--bind", "127.0.0.1", cwd=tmp_path)
    pid = running.pid
    os.kill(pid, 0)
    del running
    progress = Progress([pid])
    while Path(f"/proc/{pid}").exists():
        progress.look()
        assert not progress.is_over(), "it serves on"
        time.sleep(0.01)
