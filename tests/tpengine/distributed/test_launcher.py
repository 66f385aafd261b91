"""Rung: processes of their own, without torch. Ranks that one command starts: their places, their ends, signals.

A run that is started so is trained in test_train.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpengine.distributed.launch import Launch
from tpengine.distributed.launcher import is_started, taken_nproc

# What a rank does: says its place, and ends as it is told.
RANK = """
import os, signal, sys, time
from tpengine.distributed.launcher import begin_rank

def main():
    begin_rank()
    rank = int(os.environ["RANK"])
    how = sys.argv[1].split(",")[rank]
    hears = lambda number, _: sys.exit(128 + number)
    for number in (signal.SIGINT, signal.SIGTERM) if how == "waits" else ():
        signal.signal(number, hears)
    place = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
    os.write(1, (" ".join(place) + "\\n").encode())
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while how == "waits":
        time.sleep(0.01)
    sys.exit(int(how))
"""
PARENT = """
import sys
from tpengine.distributed import launcher
launcher._REPORT_SECONDS = 0.2
sys.exit(launcher.run_ranks_here(int(sys.argv[1]), "ranks_program:main", sys.argv[2:]))
"""


def start(directory: Path, how: str) -> subprocess.Popen[str]:
    """Start a parent whose ranks do, one after the other, what `how` says."""
    (directory / "ranks_program.py").write_text(RANK)
    paths = os.pathsep.join([str(directory), *(path for path in sys.path if path)])
    command = [sys.executable, "-c", PARENT, str(how.count(",") + 1), how]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**environ, "PYTHONPATH": paths})


def test_ranks_find_their_places_and_end_with_0(tmp_path: Path) -> None:
    process = start(tmp_path, "0,0,0")
    said, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert sorted(said.splitlines()) == [f"{rank} {rank} 3 3 127.0.0.1" for rank in range(3)]


@pytest.mark.by_default("2,2-2-", "waits,1-1-")
@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("2,2", 2, ""),
        ("70,70", 70, ""),
        # Those that a failed rank has left behind are ended.
        ("waits,dies", 70, "tpengine: rank 1 was ended by SIGKILL: the other ranks end too\n"),
        ("2,waits", 2, ""),
        ("waits,1", 1, ""),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_code(tmp_path: Path, how: str, code: int, line: str) -> None:
    process = start(tmp_path, how)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (code, line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_its_number_is_the_code(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "waits,waits")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (128 + number, "")


def test_an_interrupt_while_ranks_start_shows_no_traceback(tmp_path: Path) -> None:
    process = start(tmp_path, "waits,waits")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 2:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130 and errors in ("", "tpengine: interrupted\n")


@pytest.mark.parametrize(
    ("given", "number", "others"),
    [
        (["--nproc", "4", "--seed", "1"], 4, ["--seed", "1"]),
        (["--seed=1", "--nproc=2"], 2, ["--seed=1"]),
        (["--seed", "1"], None, ["--seed", "1"]),
    ],
)
def test_the_number_of_processes_is_taken_from_the_arguments(
    given: list[str], number: int | None, others: list[str]
) -> None:
    assert taken_nproc(given) == (number, others)


@pytest.mark.parametrize(
    "text", ["0", "-1", "two", "1.5", "257", "00000000199999", "9" * 30, "9" * 5000, "\N{ARABIC-INDIC DIGIT TWO}", ""]
)
def test_what_is_no_number_of_processes_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="--nproc must be the number of processes to start on this host, 1 to 256"):
        taken_nproc(["--nproc", text])


def test_a_long_text_is_shown_by_its_beginning() -> None:
    with pytest.raises(ValueError, match=r"got 9{60}\.\.\.: use --nproc 2"):
        taken_nproc(["--nproc", "9" * 5000])


def test_who_has_been_started_as_a_rank() -> None:
    alone = Launch(0, 1, 0, 1)
    assert not is_started(alone, {})
    assert is_started(alone, {"TORCHELASTIC_RUN_ID": "x"}) and is_started(Launch(1, 2, 1, 2, "head", 29500), {})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--nprocs=3"], "--nprocs is torchrun's name for the processes of this host: use --nproc 3"),
        (["--nproc-per-node", "2"], "use --nproc 2"),
        (["--nproc-per-node", "--seed", "1"], "use --nproc N"),
        (["--nproc", "2", "--nproc=3"], "--nproc is given twice, 2 and 3: leave one out"),
    ],
)
def test_what_is_said_otherwise_or_twice_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        taken_nproc(given)
