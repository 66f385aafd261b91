"""Rung: gloo ranks that are started by themselves. Signals and deaths while a checkpoint is being uploaded.

By default one signal to one rank; two ranks, and a rank 0 that is killed, are slow.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from support.programs import Running, finish_all, start_ranks

from tpengine.checkpoint.resume import checkpoints_of
from tpengine.checkpoint.upload import JOURNAL, done_steps

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.num-kv-heads", "2", "--model.ffn-size", "48"),
    *("--train.seq-len", "16", "--train.micro-batch-size", "2", "--train.num-micro-batches", "4", "--device", "cpu"),
    *("--train.eval-micro-batches", "0", "--train.sample-tokens", "0", "--train.keep-checkpoints", "1"),
    *("--train.checkpoint-every", "2", "--optim.decay-steps", "100"),
)
# Says which process it is, and ends when it is told to.
PATIENT = """sh -c 'echo $$ >> "$0/begun"; until [ -e "$0/go" ]; do sleep 0.01; done; ls "$1" >> "$0/uploaded"'"""


def start(num_ranks: int, out: Path, steps: int) -> list[Running]:
    command = f"{PATIENT} {out.parent} {{path}}"
    layout = ("--parallel.pp", str(num_ranks), "--train.steps", str(steps), "--train.after-checkpoint", command)
    flags = (*SMALL, *layout, "--preset", "tiny", "--resume", "--run-dir", str(out))
    return start_ranks(num_ranks, "tpengine.train", *flags)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("num_ranks", "number"),
    [
        (1, signal.SIGTERM),
        pytest.param(2, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_an_upload_saves_and_uploads_what_is_saved(
    tmp_path: Path, num_ranks: int, number: signal.Signals
) -> None:
    """The last rank hears it. What is being uploaded stays, however many checkpoints come; the last is uploaded too."""
    out = tmp_path / "out"
    ranks = start(num_ranks, out, 100_000)
    ranks[0].wait_until(lambda _: bool(lines(tmp_path / "begun")), "no upload begins")
    (first,) = checkpoints_of(out).steps()[:1]
    ranks[0].wait_until(lambda _: checkpoints_of(out).steps()[-1] > first + 4, "no more checkpoints come")
    assert first in checkpoints_of(out).steps(), "what is being uploaded was removed"
    ranks[-1].send_signal(number)
    ranks[0].wait_until(lambda run: "waiting for --train.after-checkpoint of" in run.errors(), "nobody waits")
    (tmp_path / "go").touch()
    ends = finish_all(*ranks)
    assert [end.returncode for end in ends] == [128 + number] * num_ranks, ends
    (last,) = re.findall(r"after step (\d+) of 100000: saved in", ends[0].stderr)
    assert f"--train.after-checkpoint of step-{int(last):08} is done" in ends[0].stderr
    # What was kept for the command alone is gone: --train.keep-checkpoints is 1.
    assert done_steps(out / JOURNAL) == {first, int(last)} and checkpoints_of(out).steps() == [int(last)]
    assert len(lines(tmp_path / "begun")) == 2 and len(lines(tmp_path / "uploaded")) == 2 * num_ranks + 2
    rows = [json.loads(line)["step"] for line in lines(out / "metrics.jsonl")]
    assert rows == list(range(1, int(last) + 1))


@pytest.mark.slow
def test_who_interrupts_the_last_upload_has_lost_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (rank,) = start(1, out, 100_000)
    rank.wait_until(lambda _: bool(lines(tmp_path / "begun")), "no upload begins")
    rank.send_signal(signal.SIGINT)
    rank.wait_until(lambda run: "waiting for --train.after-checkpoint of" in run.errors(), "nobody waits")
    time.sleep(2.5)  # sooner it is the same Ctrl-C
    rank.send_signal(signal.SIGINT)
    (end,) = finish_all(rank)
    assert end.returncode == 128 + signal.SIGINT
    newest = checkpoints_of(out).newest()
    assert f"tpengine: interrupted again: saved in {newest}; continue with --run-dir {out} --resume" in end.stderr


def lives(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_rank_0_that_is_killed_during_an_upload_takes_it_along_and_it_is_repeated(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ranks = start(2, out, 100_000)
    ranks[0].wait_until(lambda _: bool(lines(tmp_path / "begun")), "no upload begins")
    ranks[0].send_signal(signal.SIGKILL)
    ends = finish_all(*ranks)
    assert [end.returncode for end in ends] == [-signal.SIGKILL, 70], ends
    (pid,) = lines(tmp_path / "begun")
    while lives(int(pid)):
        time.sleep(0.05)
    assert not done_steps(out / JOURNAL)
    newest = checkpoints_of(out).steps()[-1]
    (tmp_path / "go").touch()
    again = finish_all(*start(2, out, newest + 3))
    assert [end.returncode for end in again] == [0, 0], again
    assert {newest, newest + 3} <= done_steps(out / JOURNAL)
    assert checkpoints_of(out).steps()[-1] == newest + 3
    assert f"--train.after-checkpoint of step-{newest + 3:08} is done" in again[0].stderr
