"""Rung: pure. Commands that are run for checkpoints: one at a time, never for one that is removed, none after the end.

The commands are real ones of a shell. What a run does about them at a signal is in training/test_upload_drills.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tpengine import trust
from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.upload import JOURNAL, Uploads, check_program, done_steps

# Says that it has begun, and ends when it is told to.
PATIENT = """sh -c 'echo "$1" >> begun; until [ -e go ]; do sleep 0.01; done; ls "$1" >> uploaded' - {path}"""
# Says which process it has started, and waits for that.
PARENT = """sh -c 'sleep 10000 & echo $! > child.new; mv child.new child; wait' - {path}"""


class Run:
    """The directory of a run whose checkpoints are made by hand."""

    def __init__(self, path: Path) -> None:
        self.path, self.said = path, list[str]()
        self.directory = CheckpointDirectory(path / "checkpoints")

    def uploads(self, command: str) -> Uploads:
        trust.permit(command.encode())
        return Uploads(command, self.directory, self.path, self.said.append)

    def complete(self, step: int) -> None:
        (self.directory.begin(step) / f"tensors of {step}").touch()
        self.directory.complete(step)

    def lines(self, name: str) -> list[str]:
        return (self.path / name).read_text().splitlines() if (self.path / name).exists() else []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path)


def until(is_so: Callable[[], bool]) -> None:
    """Wait for a shell."""
    begin = time.monotonic()
    while not is_so():
        assert time.monotonic() - begin < 120, "a command does nothing"
        time.sleep(0.01)


def test_a_command_runs_for_each_checkpoint_and_is_noted(run: Run) -> None:
    uploads = run.uploads('sh -c \'ls "$1" >> uploaded; echo "{not a place}"\' - {path}')
    for step in (1, 2):
        run.complete(step)
        assert not uploads.offer(step) - {1}
        until(lambda step=step: step in done_steps(run.path / JOURNAL))
    uploads.finish()
    assert run.lines("uploaded") == ["tensors of 1", "tensors of 2"]
    assert run.said == ["--train.after-checkpoint of step-00000002 is done"]
    rows = [json.loads(line) for line in run.lines(JOURNAL)]
    assert [(row["step"], row["exit_code"], row["text"]) for row in rows] == [
        (1, 0, "{not a place}"),
        (2, 0, "{not a place}"),
    ]


def test_one_runs_at_a_time_and_what_it_reads_stays(run: Run) -> None:
    """The first is slow: retention spares it, the second is left out for the third, which is waited for at the end."""
    uploads = run.uploads(PATIENT)
    run.complete(1)
    uploads.offer(1)
    until(lambda: bool(run.lines("begun")))
    for step in (2, 3):
        run.complete(step)
        spared = uploads.offer(step)
        assert spared == {1}
        run.directory.prune(1, besides=spared)
        assert run.directory.steps() == [1, step]
    (run.path / "go").touch()
    uploads.finish()
    assert run.lines("uploaded") == ["tensors of 1", "tensors of 3"]
    left_out, waits, is_done = run.said
    assert left_out.startswith("--train.after-checkpoint is left out for step-00000002: it is slower")
    assert waits == "waiting for --train.after-checkpoint of step-00000003"
    assert is_done == "--train.after-checkpoint of step-00000003 is done"
    run.directory.prune(1)
    assert run.directory.steps() == [3]
    # Nothing begins once it is finished.
    assert not uploads.offer(3)
    assert len(run.lines("begun")) == 2


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sh -c 'echo working; echo no room >&2; exit 3' - {path}", "exit code 3: no room"),
        ("sh -c 'kill -9 $$' - {path}", "exit code 137"),
        ("./not-there {path}", "exit code 127: ./not-there: No such file or directory"),
        ("sh -c 'printf \"\\033[2Jgone\\n\\n\"; exit 1' - {path}", "exit code 1:  [2Jgone"),
    ],
)
def test_a_failure_is_said_and_harmless(run: Run, command: str, why: str) -> None:
    uploads = run.uploads(command)
    run.complete(7)
    uploads.offer(7)
    until(lambda: bool(run.lines(JOURNAL)))
    uploads.finish()
    assert run.said[0] == f"--train.after-checkpoint failed for step-00000007: {why}: the run goes on"
    assert not done_steps(run.path / JOURNAL)
    # The run is resumed: the same checkpoint is offered again.
    again = run.uploads("sh -c 'echo again > uploaded' - {path}")
    again.offer_again()
    again.finish()
    assert run.lines("uploaded") == ["again"] and done_steps(run.path / JOURNAL) == {7}
    last = run.uploads("sh -c 'echo once more > uploaded' - {path}")
    last.offer_again()
    last.finish()
    assert run.lines("uploaded") == ["again"], "done is done"


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_end_of_the_patience_ends_all_that_the_command_has_started(run: Run) -> None:
    uploads = run.uploads(PARENT)
    run.complete(1)
    uploads.offer(1)
    until(lambda: bool(run.lines("child")))
    uploads.finish(0.01)
    until(lambda: not lives(int(run.lines("child")[0])))
    assert run.said == [
        "waiting for --train.after-checkpoint of step-00000001",
        "--train.after-checkpoint of step-00000001 is not done: it is run again when the run is resumed",
    ]
    assert json.loads(run.lines(JOURNAL)[0])["exit_code"] == -signal.SIGKILL


PROGRAM = """
import sys, time
from pathlib import Path
from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.upload import Uploads
from tpengine.trust import permit
permit(sys.argv[1].encode())
uploads = Uploads(sys.argv[1], CheckpointDirectory(Path("checkpoints")), Path("."), print)
uploads.offer(1)
time.sleep(10000)
"""


def test_a_killed_rank_takes_its_command_along(run: Run) -> None:
    """kill -9 during an upload: no second one ever meets it, and the checkpoint is offered again."""
    run.complete(1)
    rank = subprocess.Popen([sys.executable, "-c", PROGRAM, PARENT], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    until(lambda: bool(run.lines("child")))
    child = int(run.lines("child")[0])
    assert lives(child)
    rank.kill()
    rank.wait()
    until(lambda: not lives(child))
    assert run.directory.steps() == [1] and not run.lines(JOURNAL)
    again = run.uploads("sh -c 'ls \"$1\" > uploaded' - {path}")
    again.offer_again()
    again.finish()
    assert run.lines("uploaded") == ["tensors of 1"]


def test_a_journal_of_anything_is_read_and_cut_behind_a_step(run: Run) -> None:
    of_1, of_2 = '{"step": 1, "exit_code": 0}', '{"step": 2, "exit_code": 1}'
    rows = [of_1, "7", '{"step": "x", "exit_code": 0}', of_2, '{"step": 3, "exit_code": 0}', '{"st']
    (run.path / JOURNAL).write_text("\n".join(rows))
    assert done_steps(run.path / JOURNAL) == {1, 3}
    run.uploads("sh -c true {path}").go_back(2)
    assert run.lines(JOURNAL) == [of_1, of_2]


def test_a_program_that_is_not_there_is_refused() -> None:
    check_program("")
    with pytest.raises(ValueError, match="executed only if you say so: train"):
        check_program("sh -c true {path}")
    trust.permit_all()
    check_program("sh -c true {path}")
    with pytest.raises(ValueError) as error:
        check_program("uploda --fast {path}")
    assert str(error.value) == (
        "train.after_checkpoint must name a program of rank 0's host: uploda is not found: install it, or give its path"
    )
