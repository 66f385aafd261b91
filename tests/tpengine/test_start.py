"""Rung: gloo ranks, each started by itself, as srun or a person does: nobody but the ranks notices errors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

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
    """What srun says to a task of a step on one node."""
    return {
        "SLURM_JOB_ID": str(port - 15000),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[07]",
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(num_tasks),
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def start(
    environ: dict[str, str], *arguments: str, cwd: Path, program: tuple[str, ...] = ("-m", "tpengine.train")
) -> subprocess.Popen[str]:
    places = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    kept = {key: value for key, value in os.environ.items() if key not in places and not key.startswith("SLURM_")}
    return subprocess.Popen(
        [sys.executable, *program, *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environ},
    )


def test_srun_needs_no_wrapper(tmp_path: Path) -> None:
    port = free_port()
    tasks = [start(srun(rank, 2, port), "--run-dir", "out", cwd=tmp_path) for rank in range(2)]
    (said, errors), (silence, more_errors) = (task.communicate(timeout=170) for task in tasks)
    assert [task.returncode for task in tasks] == [0, 0], errors + more_errors
    assert "tp 2 x pp 1 x dp 1" in said and "step 2/2" in said and not silence
