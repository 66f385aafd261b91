"""Rung: gloo ranks, each started by itself, as srun or a person does: nobody but the ranks notices errors."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ROOT
from support.programs import OF_LAUNCHERS, Running, finish_all
from support.ranks.progress import LOOK_SECONDS, Progress, wait_until

from tpengine.distributed.launch import port_of_step

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48"),
    *("--train.seq-len", "16", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2"),
    *("--train.steps", "2", "--train.eval-micro-batches", "0", "--train.sample-tokens", "0", "--device", "cpu"),
)


def free_port() -> int:
    """A port of those that job numbers choose."""
    for port in range(15000 + os.getpid() % 9000, 25000):
        with socket.socket() as trial:
            try:
                trial.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def srun(rank: int, num_tasks: int, port: int) -> dict[str, str]:
    """What srun says to a task of a step on one node, of a job whose tasks meet at this port."""
    jobs = map(str, itertools.count(1))
    return {
        "SLURM_JOB_ID": next(job for job in jobs if port_of_step({"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}) == port),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[07]",
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(num_tasks),
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def start(environ: dict[str, str], *arguments: str, cwd: Path) -> Running:
    return Running("tpengine.train", *SMALL, *arguments, cwd=cwd, **environ)


def start_script(environ: dict[str, str], script: str, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
    kept = {key: value for key, value in os.environ.items() if key not in OF_LAUNCHERS}
    return subprocess.Popen(
        [sys.executable, script, *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environ},
    )


def ends_of(*running: Running) -> list[tuple[int, list[str], str]]:
    """Exit codes, lines of standard error, and standard output."""
    return [(end.returncode, end.stderr.splitlines(), end.stdout) for end in finish_all(*running)]


@pytest.mark.slow
def test_srun_needs_no_wrapper(tmp_path: Path) -> None:
    port = free_port()
    tasks = [start(srun(rank, 2, port), "--run-dir", "out", cwd=tmp_path) for rank in range(2)]
    (code, errors, said), (other_code, other_errors, silence) = ends_of(*tasks)
    assert code == other_code == 0, errors + other_errors
    assert "tp 2 x pp 1 x dp 1" in said and "step 2/2" in said and not silence


def test_a_mistake_that_only_rank_0_can_see_ends_all(tmp_path: Path) -> None:
    """Rank 1 would stand in the rendezvous for half an hour."""
    port = free_port()
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tasks = [start(srun(rank, 2, port), "--run-dir", "out", cwd=tmp_path) for rank in range(2)]
        (code, errors, _), other = ends_of(*tasks)
    assert code == 2 and len(errors) == 1, errors
    assert errors[0].startswith("tpengine: error: a run directory belongs to one run at a time: out cannot be locked")
    assert other == (2, [], "")


def test_a_mistake_that_only_another_rank_can_see_ends_all(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "bare").mkdir()
    (tmp_path / "run.toml").write_text("[train]\nsteps = 2\n")
    here = start(srun(0, 2, port), "--config", "run.toml", cwd=tmp_path)
    there = start(srun(1, 2, port), "--config", "run.toml", cwd=tmp_path / "bare")
    (code, errors, _), other = ends_of(here, there)
    assert code == 2 and len(errors) == 1, errors
    assert errors[0].startswith("tpengine: error: rank 1: ") and "run.toml" in errors[0]
    assert other == (2, [], "")


def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    """Starting has a limit; the time limit of an action is also that of the meeting."""
    ports = free_port(), free_port() + 1
    alone = [
        start(srun(rank, 3, port), "--train.timeout-seconds", "3", cwd=tmp_path)
        for rank, port in zip((0, 2), ports, strict=True)
    ]
    head = "--train.timeout-seconds 3 is over: in meeting the other ranks for "
    (code, errors, _), (other_code, other_errors, _) = ends_of(*alone)
    assert code == 70 and len(errors) == 1, errors
    assert errors[0].startswith(f"tpengine: rank 0 ends: {head}") and errors[0].endswith(", waiting for ranks 1, 2")
    assert other_code == 70 and len(other_errors) == 1, other_errors
    assert other_errors[0].startswith(f"tpengine: rank 2 ends: {head}")
    assert f"rank 0 at 127.0.0.1:{ports[1]}" in other_errors[0]


def ends_of_scripts(*processes: subprocess.Popen[str]) -> list[tuple[int, list[str], str]]:
    """Wait for as long as one of them works; return exit codes, lines of standard error, and standard output."""
    progress = Progress([process.pid for process in processes])
    while any(process.poll() is None for process in processes):
        progress.look()
        if progress.is_over():
            for process in processes:
                process.kill()
        time.sleep(LOOK_SECONDS)
    said = [process.communicate() for process in processes]
    ends = [
        (process.returncode, errors.splitlines(), output)
        for process, (output, errors) in zip(processes, said, strict=True)
    ]
    assert not progress.is_over(), f"{progress}: {ends}"
    return ends


@pytest.mark.slow  # observe/test_watch.py has the rule without processes
def test_a_busy_rank_is_waited_for_after_a_request_to_stop(tmp_path: Path) -> None:
    """Rank 1 waits in a collective of two for longer than its patience, while rank 0 computes. Only rank 1 is asked."""
    port = free_port()
    drill = ROOT / "tests/support/engine/drill_program.py"
    forever = "--train.steps", "400", "--train.checkpoint-every", "100000", "--run-dir", "out"
    ranks = [
        start_script(
            {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            | {"DRILL": "busy:0:2"},
            str(drill),
            *forever,
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, ranks[0], "the ranks make no steps"
    )
    ranks[1].send_signal(signal.SIGTERM)
    (code, errors, _), other = ends_of_scripts(*ranks)
    assert code == 143 and other == (143, [], ""), errors
    assert "tpengine: terminated after step 3 of 400: saved in out/checkpoints/step-00000003" in errors[-1]


IMPATIENT = """
import os, signal, sys

class Impatient:
    def find_spec(self, name, *_):
        if name == "tpengine.commands.arguments":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Impatient())
from tpengine.train import main
main()
"""


@pytest.mark.parametrize(("rank", "line"), [(0, ["tpengine: interrupted"]), (1, [])])
def test_an_interrupt_while_the_program_is_loaded_is_one_line(tmp_path: Path, rank: int, line: list[str]) -> None:
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    process = start_script(srun(rank, 2, free_port()), "impatient.py", cwd=tmp_path)
    assert ends_of_scripts(process) == [(130, line, "")]
