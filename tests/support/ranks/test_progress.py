"""Rung: pure, in processes of their own. What the tests' waits call work, and what they do when there is none."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from support.ranks.progress import LOOK_SECONDS, Progress, family, finish, run_program, wait_until

SPIN, SLEEP = "print(flush=True)\nwhile True: pass", "import time\nprint(flush=True)\ntime.sleep(3600)"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN!r}])"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """What a test appends is killed in the end, with its descendants."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for pid in family([process.pid for process in processes]):
        subprocess.run(["kill", "-9", str(pid)], stderr=subprocess.DEVNULL)
    for process in processes:
        process.communicate()


def start(source: str, started: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Run a program until it has printed a line."""
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None and process.stdout.readline() == "\n"
    return process


def look(progress: Progress, count: int) -> None:
    for _ in range(count):
        time.sleep(LOOK_SECONDS / 2)
        progress.look()


@pytest.mark.parametrize("source", [SPIN, PARENT], ids=["itself", "its child"])
def test_a_process_that_runs_works(started: list[subprocess.Popen[str]], source: str) -> None:
    progress = Progress([start(source, started).pid])
    look(progress, 5)
    assert progress.quiet_seconds == 0 and not progress.is_over(0.0)
    while progress.cpu_seconds < 0.05:
        look(progress, 1)


def test_a_process_that_sleeps_or_is_stopped_does_not(started: list[subprocess.Popen[str]]) -> None:
    stopped = start(SPIN, started)
    stopped.send_signal(signal.SIGSTOP)
    while True:
        progress = Progress([stopped.pid, start(SLEEP, started).pid])
        look(progress, 4)
        if progress.quiet_seconds:  # the first program may still have been on its way to sleep
            break
    look(progress, 4)
    assert progress.is_over(3 * LOOK_SECONDS)


def test_work_takes_back_what_was_quiet(started: list[subprocess.Popen[str]]) -> None:
    process = start(SPIN, started)
    progress = Progress([process.pid])
    progress.quiet_seconds = 10 * LOOK_SECONDS
    look(progress, 3)
    assert progress.quiet_seconds < 10 * LOOK_SECONDS


def test_an_ended_process_does_not_work(started: list[subprocess.Popen[str]]) -> None:
    process = start("print(flush=True)", started)
    process.wait()
    progress = Progress([process.pid])
    look(progress, 2)
    assert progress.quiet_seconds > 0


def test_a_program_that_hangs_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.ranks.progress.QUIET_SECONDS", 1.0)
    source = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SLEEP!r}])"
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    with pytest.raises(AssertionError, match=r"hangs: nobody has worked for 1 s.*'\\n'"):
        finish(process)
    assert process.returncode == -signal.SIGKILL


def test_a_program_that_ends_is_told_as_subprocess_does() -> None:
    done = run_program([sys.executable, "-c", "print('out'); exit(3)"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "")


def test_waiting_for_a_program_that_has_ended_is_a_failure(started: list[subprocess.Popen[str]]) -> None:
    process = start("print(flush=True)", started)
    with pytest.raises(AssertionError, match="the file is not written: exit code 0"):
        wait_until(lambda: False, process, "the file is not written")
    wait_until(lambda: True, process, "nothing is waited for")
