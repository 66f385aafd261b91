"""Rung: pure. Where a process stands, from the variables of torchrun, of srun, or of a person."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpengine.distributed.launch import Launch, num_cores, passive_waiting, threads_of_rank

BY_HAND = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
# The second task of the second node of `srun -N 3 --ntasks 8`, three tasks on each of the first two.
SRUN = {
    "SLURM_JOB_ID": "40123",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "rack3-n[07-08],gpu12",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_processes_started_by_hand_are_on_one_host() -> None:
    assert Launch.of(BY_HAND) == Launch(3, 8, 3, 8, "head", 29500)
    assert Launch.of({}) == Launch(0, 1, 0, 1)


def test_srun_without_a_wrapper_says_every_place() -> None:
    """Read as local rank 0, all tasks of a node would take its first GPU."""
    place = Launch.of(SRUN)
    assert place == Launch(4, 8, 1, 3, "rack3-n07", place.port, "SLURM's step 40123.2")
    last = {**SRUN, "SLURM_PROCID": "7", "SLURM_NODEID": "2"}
    assert Launch.of(last).port == place.port
    assert (Launch.of(last).local_rank, Launch.of(last).local_world_size) == (1, 2)


def test_a_wrapper_that_sets_only_rank_and_size_is_completed() -> None:
    wrapped = {**SRUN, "RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert Launch.of(wrapped) == Launch(4, 8, 1, 3, "head", 29500)
    assert Launch.of({**wrapped, "LOCAL_RANK": "2"}).local_rank == 2


def test_torchrun_under_srun_has_the_last_word() -> None:
    workers = {**BY_HAND, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}
    assert Launch.of({**SRUN, **workers}) == Launch(3, 8, 3, 4, "head", 29500, "torchrun's run x")


def test_processes_by_hand_within_one_task_are_no_tasks() -> None:
    one_task = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
    one_task |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert Launch.of({**one_task, **BY_HAND}) == Launch(3, 8, 3, 8, "head", 29500)
    assert Launch.of(one_task) == Launch(0, 1, 0, 1)


def test_a_batch_script_is_one_process() -> None:
    """It has the numbers of the whole job, and no others would come."""
    batch = without(SRUN, *(name for name in SRUN if name.startswith("SLURM_STEP_")))
    assert Launch.of({**batch, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) == Launch(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node5", "node5"),
        ("node[3,7-9]", "node3"),
        ("a[01-04]b[2-3],z", "a01b2"),
        ("", "10.0.0.1"),
    ],
)
def test_the_first_node_is_where_the_tasks_meet(nodes: str, first: str) -> None:
    assert Launch.of({**SRUN, "SLURM_STEP_NODELIST": nodes}).address == first


def test_tasks_of_one_node_meet_on_the_loopback() -> None:
    one_node = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0", "SLURM_LOCALID": "4"}
    assert Launch.of(one_node).address == "127.0.0.1"
    assert Launch.of(one_node).variables()["LOCAL_WORLD_SIZE"] == "8"


def test_job_steps_side_by_side_meet_at_ports_of_their_own() -> None:
    steps = [(job, step) for job in range(1, 107) for step in range(2)]
    ports = {
        (job, step): Launch.of({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job, step in steps
    }
    assert ports[106, 0] != ports[5, 1]
    # So many numbers drawn from 10,000 meet two or three times.
    assert len(set(ports.values())) > len(steps) - 8
    assert all(15000 <= port < 25000 for port in ports.values())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "8"}, "RANK 0 of WORLD_SIZE 8, but SLURM_PROCID 4 of 8 tasks"),
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID '8', SLURM_STEP_NUM_TASKS '8'"),
        ({"SLURM_LOCALID": "3"}, "SLURM_LOCALID '3', tasks of this node '3'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "three"}, "tasks 'three'"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_LAUNCH_NODE_IPADDR": ""}, "MASTER_ADDR None"),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE 9, WORLD_SIZE 8"),
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match="torchrun") as refusal:
        Launch.of({**SRUN, **changed})
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


RANK_OF_4 = Launch(1, 8, 1, 4, "head", 29500)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("launch", "environ", "parents", "threads"),
    [
        (RANK_OF_4, TORCHRUN, {}, 16),
        (RANK_OF_4, TORCHRUN, {"OMP_NUM_THREADS": "1"}, None),  # the user's own 1
        (RANK_OF_4, TORCHRUN, None, None),  # nobody knows whose 1 it is
        (RANK_OF_4, {**TORCHRUN, "OMP_NUM_THREADS": "3"}, {}, None),
        (RANK_OF_4, {"OMP_NUM_THREADS": "1"}, {}, None),  # without torchrun only a user sets it
        (RANK_OF_4, {}, {}, 16),
        (Launch(0, 200, 0, 100), {}, {}, 1),  # more ranks than cores
        (Launch(0, 1, 0, 1), {}, {}, None),  # one process: the library's choice
        (RANK_OF_4, {**SRUN, "SLURM_CPUS_PER_TASK": "6"}, {}, 6),
        (RANK_OF_4, {**SRUN, "SLURM_CPUS_PER_TASK": "600"}, {}, 64),
        (RANK_OF_4, {**SRUN, **TORCHRUN, "SLURM_CPUS_PER_TASK": "6"}, {}, 16),  # of torchrun, not of a rank
    ],
)
def test_a_rank_takes_its_share_of_the_cores_unless_the_user_says_otherwise(
    launch: Launch, environ: dict[str, str], parents: dict[str, str] | None, threads: int | None
) -> None:
    assert threads_of_rank(launch, environ, parents, 64) == threads


def test_threads_sleep_while_they_wait_unless_the_user_has_said_how_they_wait() -> None:
    passive = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "1000"}
    assert passive_waiting({"OMP_NUM_THREADS": "4"}) == passive
    for given in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"):
        assert passive_waiting({given: "any"}) == {}


BEFORE_TORCH = """
import os, sys, tpengine.train
take = tpengine.train._take_threads
def taken(*arguments):
    take(*arguments)
    sys.exit(f"{'torch' in sys.modules} {os.environ['OMP_WAIT_POLICY']}")
tpengine.train._take_threads = taken
tpengine.train.main(["--device", "cpu"])
"""


@pytest.mark.by_default("given0-PASSIVE")
@pytest.mark.parametrize(("given", "wanted"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_a_run_says_how_threads_wait_before_torch_starts_them(
    tmp_path: Path, given: dict[str, str], wanted: str
) -> None:
    """One process beside two busy ones took 25 to 47 times as long: its threads spun."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")
    }
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_TORCH], capture_output=True, text=True, env={**environ, **given}, cwd=tmp_path
    )
    assert done.stderr == f"False {wanted}\n"


def test_the_environment_of_a_parent_is_the_one_it_was_started_with() -> None:
    """torchrun changes its own after that."""
    child = (
        "from tpengine.distributed.launch import environment_of_parent as e; "
        "print('OMP_NUM_THREADS' in e(), e()['KEPT'])"
    )
    parent = (
        "import os, subprocess, sys; os.environ['OMP_NUM_THREADS'] = '1'; "
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, env={**environ, "KEPT": "a=b"}, check=True
    )
    assert done.stdout == "False a=b\n"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/job/rank\n", {"job/cpu.max": "150000 100000\n", "job/rank/cpu.max": "max 100000\n"}, 2),
        ("0::/job\n", {"cpu.max": "50000 100000\n"}, 1),
        (
            "5:cpu,cpuacct:/job\n0::/\n",
            {"cpu/job/cpu.cfs_quota_us": "100000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            1,
        ),
        ("5:cpu:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 64),
        ("0::/job\n", {"job/cpu.max": "9900000 100000\n"}, 64),
        ("", {}, 64),
    ],
)
def test_a_containers_time_limits_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], cores: int
) -> None:
    """A container of 2 cores on a machine of 64 has all 64 to run on: 64 threads would stand still most of the time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert num_cores(tmp_path / "groups", tmp_path / "own") == cores
    assert num_cores(tmp_path / "groups", tmp_path / "absent") == 64
