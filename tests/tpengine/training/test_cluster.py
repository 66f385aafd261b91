"""Rung: programs, gloo ranks. A batch script for SLURM is run by bash, with srun and scontrol that play SLURM's part.

By default what the script does about a notice and about ends, with steps that are shells. Slow: it trains, by srun's
tasks and by a torchrun on each of two nodes, is told to stop, and goes on when it is requeued. Nodes are namespaces
where the kernel allows them (support/ranks/hosts.py); elsewhere both are this host, and a skip says so.

What only a cluster checks: that srun passes a signal on, and that a requeued job is started again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ROOT
from support.ranks.hosts import TwoHosts, two_hosts
from support.ranks.progress import finish, wait_until

SCRIPT = ROOT / "tpengine/examples/slurm.sh"
SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.num-kv-heads", "2", "--model.ffn-size", "48"),
    *("--train.seq-len", "16", "--train.micro-batch-size", "2", "--train.num-micro-batches", "2", "--device", "cpu"),
    *("--train.eval-micro-batches", "0", "--train.sample-tokens", "0", "--train.checkpoint-every", "50"),
    *("--parallel.pp", "2", "--train.steps", "150", "--preset", "tiny"),
)
# A step that is a shell: it ends with $AT_ONCE, or with $AT_NOTICE once it is told to.
SHELL_STEP = """#!/bin/bash
[ -z "$AT_ONCE" ] || exit "$AT_ONCE"
trap 'sleep 0.2; exit "$AT_NOTICE"' USR1
touch running
while :; do sleep 0.02; done
"""
# As srun: starts the tasks of all nodes, passes signals on, and ends with the highest of their exit codes. ON_NODES has
# for each node the words that run a command there.
SRUN = f"""#!{sys.executable}
import json, os, signal, subprocess, sys
on_nodes = json.loads(os.environ.pop("ON_NODES"))
nodes, per_node = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
step = {{
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
    "SLURM_STEP_TASKS_PER_NODE": f"{{per_node}}(x{{nodes}})", "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
}}
tasks = []
for rank in range(nodes * per_node):
    own = {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % per_node), "SLURM_NODEID": str(rank // per_node)}}
    tasks.append(subprocess.Popen([*on_nodes[rank // per_node], *sys.argv[1:]], env={{**os.environ, **step, **own}}))
def hear(number, _):
    for task in tasks:
        # What enters a host waits for its child, and passes nothing on.
        inside = open(f"/proc/{{task.pid}}/task/{{task.pid}}/children").read().split() if on_nodes[0] else [task.pid]
        for pid in inside:
            os.kill(int(pid), number)
signal.signal(signal.SIGUSR1, hear)
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo "$FIRST_NODE"; else echo "$2" >> requeued; fi
"""


def start(place: Path, srun: str, arguments: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    """Run the script as SLURM would, once."""
    programs = {"srun": srun, "scontrol": SCONTROL, "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n'}
    local = "" if "ON_NODES" in variables else "--local-addr 127.0.0.1 "
    programs["torchrun"] = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run {local}"$@"\n'
    (place / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    job = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "127.0.0.1"}
    job |= {"ON_NODES": "[[], []]", "FIRST_NODE": "127.0.0.1"}
    job |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": f"{place}/bin:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        cwd=place,
        env={**inherited, **job, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("variables", "code", "is_requeued"),
    [
        ({"AT_ONCE": "0"}, 0, False),
        ({"AT_ONCE": "1"}, 1, False),
        ({"AT_NOTICE": "138"}, 138, True),  # srun's: what a rank leaves with after USR1
        ({"AT_NOTICE": "1"}, 1, True),  # torchrun's
        ({"AT_NOTICE": "0"}, 0, False),  # it was the last step anyway
    ],
)
def test_a_job_goes_on_after_a_notice_and_not_after_an_error(
    tmp_path: Path, variables: dict[str, str], code: int, is_requeued: bool
) -> None:
    process = start(tmp_path, SHELL_STEP, **variables)
    if "AT_NOTICE" in variables:
        wait_until((tmp_path / "running").exists, process, "no step")
        process.send_signal(signal.SIGUSR1)
    _, errors = finish(process)
    assert (process.returncode, errors) == (code, "")
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == ("4711\n" if is_requeued else "")


def test_a_second_notice_does_not_end_the_wait(tmp_path: Path) -> None:
    process = start(tmp_path, SHELL_STEP, AT_NOTICE="138")
    wait_until((tmp_path / "running").exists, process, "no step")
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    finish(process)
    assert process.returncode == 138 and (tmp_path / "requeued").read_text() == "4711\n"


def losses_of(run_dir: Path) -> list[tuple[int, float]]:
    metrics = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [(row["step"], row["loss"]) for row in rows]


def nodes_of(pair: TwoHosts, place: Path) -> dict[str, str]:
    """The variables of a job on two hosts, which look each other up by name."""
    names = place / "names"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in pair.hosts))
    for host in pair.hosts:
        host.know(names)
    on_nodes = [host.command(directory=place) for host in pair.hosts]
    return {
        **{"SLURM_JOB_NODELIST": "host-[a-b]", "FIRST_NODE": "host-a"},
        "ON_NODES": json.dumps(on_nodes),
    }


@pytest.mark.slow
@pytest.mark.parametrize("on_two", [False, True], ids=["one node", "two nodes"])
@pytest.mark.parametrize("by_torchrun", [False, True], ids=["tasks", "torchrun"])
def test_a_run_is_told_to_stop_and_goes_on_when_it_is_requeued(tmp_path: Path, by_torchrun: bool, on_two: bool) -> None:
    """The losses are those of a run that nobody disturbed."""
    with two_hosts() as pair:
        num_ranks, layout = (4, ("--parallel.tp", "2")) if on_two and not by_torchrun else (2, ())
        variables = {"SLURM_NNODES": "2" if on_two else "1"}
        variables["SLURM_NTASKS_PER_NODE"] = "1" if by_torchrun else "2"
        variables["RANKS_PER_NODE"] = "1" if on_two else "2"
        if on_two and not pair.unproven:
            variables |= nodes_of(pair, tmp_path)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            # The place to meet follows from the job's number.
            variables["SLURM_JOB_ID"] = str(free.getsockname()[1])
        check_a_requeued_run(tmp_path, variables, by_torchrun, layout)
        check_an_undisturbed_run(tmp_path, num_ranks, layout)
        if on_two and pair.unproven:
            pytest.skip(pair.unproven)


def check_a_requeued_run(tmp_path: Path, variables: dict[str, str], by_torchrun: bool, layout: tuple[str, ...]) -> None:
    arguments = (*SMALL, *layout, "--resume", "--run-dir", "out")
    process = start(tmp_path, SRUN, arguments, **variables)
    wait_until(lambda: len(losses_of(tmp_path / "out")) >= 3, process, "no steps")
    process.send_signal(signal.SIGUSR1)
    _, errors = finish(process)
    assert "asked to stop by SIGUSR1 after step" in errors, errors
    assert process.returncode == (1 if by_torchrun else 138), errors
    assert (tmp_path / "requeued").read_text().split() == [variables["SLURM_JOB_ID"]]
    assert 3 <= len(losses_of(tmp_path / "out")) < 150
    again = start(tmp_path, SRUN, arguments, **variables)
    output, errors = finish(again)
    assert again.returncode == 0, errors
    assert ("2 hosts" in output) == ("host-a" in variables.get("FIRST_NODE", "")), output
    assert len((tmp_path / "requeued").read_text().split()) == 1


def check_an_undisturbed_run(tmp_path: Path, num_ranks: int, layout: tuple[str, ...]) -> None:
    """On one node, in the same layout, it has the same losses."""
    alone = start(tmp_path, SRUN, (*SMALL, *layout, "--run-dir", "alone"), SLURM_NTASKS_PER_NODE=str(num_ranks))
    _, errors = finish(alone)
    assert alone.returncode == 0, errors
    got, want = losses_of(tmp_path / "out"), losses_of(tmp_path / "alone")
    assert len(want) == 150 and got == want
