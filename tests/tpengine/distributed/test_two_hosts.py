"""Rung: gloo ranks, on two hosts that are namespaces of this machine (support/ranks/hosts.py).

tp inside a host through its memory; dp, pp or ep between them over the network. In exact mode the losses are those of
one process bit by bit, which proves every exchange at once. Then one host dies or its cable is pulled, and the other
says which, leaves, and goes on in another layout to the same bits.

By default ranks as srun starts them, dp between the hosts, one killed. Slow: torchrun on both, the other layouts, the
host of rank 0, a pulled cable. Where namespaces are not allowed two groups of ranks on the loopback train, and a skip
says what that leaves unproven.

What only a cluster shows: another network than the kernel's own, NCCL between hosts, clocks that are apart.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
from support.programs import OF_LAUNCHERS, Running, finish_all, run_module
from support.ranks.hosts import Host, TwoHosts, two_hosts
from support.ranks.progress import finish, wait_until
from support.readmes import the_command

from tpengine.checkpoint.resume import checkpoints_of
from tpengine.distributed.launch import GLOO_INTERFACE
from tpengine.distributed.meeting import named
from tpengine.last_words import RANK_FAILED, USER_ERROR

TINY = (
    *("--preset", "tiny", "--model.hidden-size", "16", "--model.num-heads", "2", "--model.num-kv-heads", "2"),
    *("--model.ffn-size", "32", "--model.num-layers", "2", "--train.seq-len", "8", "--train.micro-batch-size", "1"),
    *("--train.eval-micro-batches", "0", "--train.sample-tokens", "0", "--train.profile-steps", "", "--device", "cpu"),
    *("--train.reduction", "exact", "--optim.schedule", "constant", "--train.checkpoint-every", "3"),
)
EXPERTS = (*TINY, "--preset", "tiny_moe")
FOREVER = "100000"


@pytest.fixture
def pair() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


def tasks(pair: TwoHosts, per_host: int, *arguments: str, cwd: Path, **variables: str) -> list[list[Running]]:
    """The ranks of a run as srun starts them, by host; their place to meet follows from the job's number."""
    address = pair.hosts[0].address
    everywhere = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"{address},{pair.hosts[1].address}",
        "SLURM_STEP_NUM_TASKS": str(2 * per_host),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_host}(x2)",
        **variables,
    }

    def start(host: Host, node: int, local: int) -> Running:
        place = {"SLURM_PROCID": str(node * per_host + local), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        return Running("tpengine.train", *arguments, cwd=cwd, host=host, output=None, **everywhere, **place)

    return [[start(host, node, local) for local in range(per_host)] for node, host in enumerate(pair.hosts)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def rows_of(run_dir: Path) -> list[tuple[int, float, float]]:
    """Step, loss and norm of each row that has been written whole."""
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [(row["step"], row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]


def exchange_of(said: str) -> str:
    """What a run says of how its ranks exchange, and of its hosts."""
    (line,) = re.findall(r"^exchange +(.*)$", said, re.MULTILINE)
    return str(line)


def goes_on_alone(host: Host, num_ranks: int, cwd: Path, *arguments: str) -> None:
    """Resume the run on one host, as a pipeline; its losses are those of one process that nobody disturbed."""
    newest = checkpoints_of(cwd / "out").newest()
    assert newest is not None
    steps = str(int(newest.name.removeprefix("step-")) + 2)
    layout = ("--parallel.tp", "1", "--parallel.pp", str(num_ranks), "--parallel.ep", "1", "--train.steps", steps)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    command = ("tpengine.train", "--run-dir", "out", "--resume", *layout)
    ends = finish_all(
        *(
            Running(*command, cwd=cwd, host=host, output=None, **place, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(num_ranks)
        )
    )
    assert not any(end.returncode for end in ends), ends
    assert "changed since the checkpoint: parallel." in ends[0].stdout
    whole = ("--parallel.tp", "1", "--parallel.pp", "1", "--train.steps", steps, "--run-dir", "alone")
    alone = run_module("tpengine.train", *arguments, *whole, cwd=cwd)
    assert alone.returncode == 0, alone.stderr
    got, want = rows_of(cwd / "out"), rows_of(cwd / "alone")
    assert len(want) == int(steps)
    assert got == want


@pytest.mark.by_default("1")
@pytest.mark.parametrize("per_host", [1, 2])
def test_a_host_dies_and_the_other_goes_on_in_another_layout(pair: TwoHosts, tmp_path: Path, per_host: int) -> None:
    """tp inside, where a host has two ranks."""
    arguments = (*TINY, "--train.num-micro-batches")
    layout = ("--parallel.tp", str(per_host), "--parallel.dp", "2", "--train.steps", FOREVER, "--run-dir", "out")
    here, there = tasks(pair, per_host, *arguments, "2", *layout, cwd=tmp_path)
    here[0].wait_until(lambda _: len(rows_of(tmp_path / "out")) >= 5, "the hosts make no steps")
    if pair.refused:
        there[-1].send_signal(signal.SIGKILL)
    else:
        pair.hosts[1].kill()
    ends = finish_all(*here, *there)
    errors = [end.stderr for end in ends[:per_host]]
    assert [end.returncode for end in ends[:per_host]] == [RANK_FAILED] * per_host, ends
    if not pair.refused:
        first, second = (named(list(range(begin, begin + per_host))) for begin in (0, per_host))
        exchange = exchange_of(ends[0].stdout)
        assert exchange.endswith(f"; 2 hosts over eth0: host-a ({first}), host-b ({second})"), exchange
        inside = r"tp through \S+ MB of shared memory per rank; " if per_host > 1 else ""
        assert re.match(f"{inside}dp by gloo;", exchange), exchange
        assert "the name of this host, host-a, leads to no address that other hosts reach" in errors[0]
        assert [end.returncode for end in ends[per_host:]] == [-signal.SIGKILL] * per_host, ends
        assert any(f" ends: a connection to host-b ({second}) closed: step " in error for error in errors), errors
    goes_on_alone(pair.hosts[0], per_host, tmp_path, *arguments, "4")
    if pair.unproven:
        pytest.skip(pair.unproven)


def mistaken(pair: TwoHosts, cwd: Path, *arguments: str, **variables: str) -> str:
    """Start a rank on each host of which none can go on; return the one line that rank 0 says."""
    if pair.unproven:
        pytest.skip(pair.unproven)
    (first,), (second,) = tasks(
        pair, 1, *TINY, "--parallel.dp", "2", "--train.steps", "2", *arguments, cwd=cwd, **variables
    )
    here, there = finish_all(first, second)
    assert (here.returncode, there.returncode) == (USER_ERROR, USER_ERROR), (here, there)
    # torch warns of each address that has no name.
    said = [line for line in (here.stderr + there.stderr).splitlines() if not line.startswith("[W")]
    (line,) = [line for line in said if "leads to no address" not in line]
    assert line.startswith("tpengine: error: ") and "step 1" not in here.stdout
    return line.removeprefix("tpengine: error: ")


def test_hosts_whose_sources_differ_are_refused(pair: TwoHosts, tmp_path: Path) -> None:
    """A checkout that one of them has not pulled."""
    if not pair.refused:
        changed = tmp_path / "spelling.py"
        changed.write_text((ROOT / "tpengine/spelling.py").read_text() + "# as it was yesterday\n")
        pair.hosts[1].run("mount", "--bind", str(changed), str(ROOT / "tpengine/spelling.py"))
    line = mistaken(pair, tmp_path, "--run-dir", "out")
    assert re.fullmatch(
        r"all hosts must run the same software: the sources of tpengine is \w{12} on host-b \(rank 1\) and \w{12} on "
        r"host-a \(rank 0\): install the same on all",
        line,
    ), line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ("eth9", "ranks 0, 1: GLOO_SOCKET_IFNAME must name an interface of each host that is up: host-a has no eth9"),
        ("lo", "every host must reach every other at any port: host-a does not reach host-b (rank 1) at 127.0.0.1, "),
    ],
)
def test_an_interface_that_does_not_lead_to_the_others_is_refused(
    pair: TwoHosts, tmp_path: Path, interface: str, words: str
) -> None:
    line = mistaken(pair, tmp_path, "--run-dir", "out", **{GLOO_INTERFACE: interface})
    assert words.removeprefix("ranks 0, 1: ") in line, line


@pytest.mark.slow
def test_a_run_directory_that_is_not_shared_is_refused(pair: TwoHosts, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    if not pair.refused:
        pair.hosts[1].run("mount", "-t", "tmpfs", "none", str(shared))
    line = mistaken(pair, tmp_path, "--run-dir", "shared/out")
    assert line.startswith("all ranks must reach the run directory to write checkpoints: ranks [1] do not see "), line


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False], ids=["by name", "over IPv6"])
def test_hosts_meet_by_name_and_over_ipv6(pair: TwoHosts, tmp_path: Path, named: bool) -> None:
    """Debian's list gives a host's own name 127.0.1.1: what the others are told of it must be another address."""
    if pair.unproven:
        pytest.skip(pair.unproven)
    for own, host in enumerate(pair.hosts) if named else ():
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {host.name}"]
        lines += [f"{other.address} {other.name}" for other in pair.hosts if other is not pair.hosts[own]]
        (tmp_path / host.name).write_text("\n".join(lines) + "\n")
        host.know(tmp_path / host.name)
    run = (*TINY, "--train.num-micro-batches", "2", "--parallel.dp", "2", "--train.steps", "2")
    nodes = {"SLURM_STEP_NODELIST": "host-[a-b]"} if named else {"MASTER_ADDR": "fd00:77::1"}
    (first,), (second,) = tasks(pair, 1, *run, cwd=tmp_path, **nodes)
    here, there = finish_all(first, second)
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    assert "dp by gloo; 2 hosts over eth0: host-a (rank 0), host-b (rank 1)" in exchange_of(here.stdout)


@pytest.mark.slow
def test_containers_that_see_each_others_processes_share_memory(tmp_path: Path) -> None:
    """They have networks of their own all the same."""
    with two_hosts(see_processes=True) as pair:
        if pair.unproven:
            pytest.skip(pair.unproven)
        run = (*TINY, "--train.num-micro-batches", "2", "--parallel.dp", "2", "--train.steps", "2")
        (first,), (second,) = tasks(pair, 1, *run, cwd=tmp_path)
        here, there = finish_all(first, second)
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    exchange = exchange_of(here.stdout)
    assert re.fullmatch(r"dp through \S+ MB of shared memory per rank; 2 hosts over eth0: .*", exchange), exchange


# What is between the hosts: flags of the layout, and how a run says it.
ACROSS = {
    "dp": (TINY, ("--parallel.dp", "2", "--train.num-micro-batches", "2"), r"dp by gloo"),
    "pp": (TINY, ("--parallel.pp", "2", "--train.num-micro-batches", "4"), r"pp by gloo"),
    "ep": (
        EXPERTS,
        ("--parallel.dp", "2", "--parallel.ep", "4", "--train.num-micro-batches", "2"),
        r"dp, ep by gloo; rows of experts all to all by gloo",
    ),
}


def launcher_of(beginning: str, words: dict[str, str]) -> str:
    """A command of the page without the program's flags, and with words replaced."""
    command = the_command(ROOT / "tpengine/distributed/README.md", beginning).removeprefix("torchrun ")
    launcher = command[: command.index("-m tpengine.train") + len("-m tpengine.train")]
    for word, value in words.items():
        assert word in launcher, word
        launcher = launcher.replace(word, value)
    return launcher


def by_torchrun(pair: TwoHosts, *arguments: str, cwd: Path) -> list[subprocess.Popen[str]]:
    """A torchrun of two ranks on each host, with a place to meet that does not move."""
    words = {"--nproc-per-node 8": "--nproc-per-node 2", "HOST": pair.hosts[0].address, "29500": str(free_port())}
    launcher = launcher_of("torchrun --nnodes 2 --node-rank 0", words)
    inherited = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    return [
        subprocess.Popen(
            host.command(
                *(sys.executable, "-m", "torch.distributed.run"),
                *launcher.replace("--node-rank 0", f"--node-rank {node}").split(),
                *arguments,
                directory=cwd,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        for node, host in enumerate(pair.hosts)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["b", "a", "cable"])
@pytest.mark.parametrize("across", ACROSS)
def test_torchrun_on_two_hosts_of_which_one_is_lost(pair: TwoHosts, tmp_path: Path, across: str, lost: str) -> None:
    if pair.unproven:
        pytest.skip(pair.unproven)
    model, layout, said = ACROSS[across]
    # Of the start too, which takes long on a busy machine.
    limit = ("--train.timeout-seconds", "60") if lost == "cable" else ()
    processes = by_torchrun(
        pair,
        *(*model, *layout, *limit, "--parallel.tp", "2", "--train.steps", FOREVER, "--run-dir", "out"),
        cwd=tmp_path,
    )
    wait_until(lambda: len(rows_of(tmp_path / "out")) >= 5, processes[0], "the hosts make no steps")
    dead = 0 if lost == "a" else 1
    if lost == "cable":
        pair.hosts[1].cut()
    else:
        pair.hosts[dead].kill()
    outputs = [finish(process) for process in processes]
    left = 1 - dead
    ranks = [2 * left, 2 * left + 1]
    errors = outputs[left][1]
    last = re.findall(r"^tpengine: rank (\d) ends: (.*)$", errors, re.MULTILINE)
    assert sorted(int(rank) for rank, _ in last) == ranks and errors.count("exitcode  : 70") == 2, errors
    host, others = f"host-{'ab'[dead]}", "ranks 0, 1" if dead == 0 else "ranks 2, 3"
    if lost == "cable":
        assert all(line.startswith("--train.timeout-seconds 60 is over: step ") for _, line in last), last
        assert any(re.search(rf"waiting for .*ranks? [\d, ]+ \([a-z_, ]+\) on {host}", line) for _, line in last), last
    else:
        assert any(line.startswith(f"a connection to {host} ({others}) closed: step ") for _, line in last), last
        output = outputs[0][0]
        if left == 0:
            assert exchange_of(output).endswith("; 2 hosts over eth0: host-a (ranks 0, 1), host-b (ranks 2, 3)"), output
            assert re.match(rf"tp through \S+ MB of shared memory per rank; {said}", exchange_of(output)), output
    goes_on_alone(pair.hosts[left], 2, tmp_path, *model, "--train.num-micro-batches", "4")
