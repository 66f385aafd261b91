"""Rung: pure. The commands of the page on several hosts are those of torchrun, srun and this program.

test_two_hosts.py and training/test_cluster.py run them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support import ROOT
from support.readmes import commands_in
from torch.distributed.run import config_from_args, get_args_parser

from tpengine.commands.arguments import parse_config
from tpengine.distributed.launch import GLOO_INTERFACE, port_of_step

PAGE = (ROOT / "tpengine/distributed/README.md").read_text()
SCRIPT = (ROOT / "tpengine/examples/slurm.sh").read_text()
COMMANDS = [command for command in commands_in(PAGE) if re.match("torchrun|srun|sbatch|export", command)]
# Ranks of two hosts of eight.
WORLD = 16


def flags_of(command: str) -> list[str]:
    """The program's flags in a command."""
    return re.split(r"tpengine\.train |slurm\.sh ", command)[1].split()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:3]))
def test_a_command_is_read_by_what_it_calls(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program, *rest = command.split()
    if program == "export":
        assert rest[0].partition("=")[0] in (GLOO_INTERFACE, "NCCL_SOCKET_IFNAME")
        return
    config = parse_config(flags_of(command), WORLD)
    assert config.run_dir == "DIR"
    if "--parallel.tp" in rest:
        assert config.parallel.tp == 8, "tp stays inside a host"
    if program != "torchrun":
        assert re.match(
            r"srun --nodes \d+ --ntasks-per-node \d+ python -m |sbatch tpengine/examples/slurm\.sh ", command
        )
        return
    given = get_args_parser().parse_args(rest)
    assert (given.module, given.training_script, given.nproc_per_node) == (True, "tpengine.train", "8")
    assert given.training_script_args == flags_of(command)
    launch, _, _ = config_from_args(given)
    assert launch.min_nodes == launch.max_nodes == 2
    if launch.rdzv_backend == "static":
        assert (launch.rdzv_endpoint, given.node_rank, launch.max_restarts) == ("HOST:29500", 0, 0)
    else:
        assert (launch.rdzv_backend, launch.rdzv_endpoint, launch.max_restarts) == ("c10d", "HOST:29500", 3)


def test_the_page_has_each_way_once() -> None:
    assert [command.split()[0] for command in COMMANDS] == ["torchrun"] * 2 + ["srun", "sbatch", "export", "export"]


def test_the_ports_that_the_page_names_are_those_that_are_chosen() -> None:
    (first, last) = map(int, re.findall(r"at a port from (\d+) to (\d+)", PAGE)[0])
    ports = {port_of_step({"SLURM_JOB_ID": str(job)}) for job in range(40_000)}
    assert first <= min(ports) < first + 10 and last - 10 < max(ports) <= last


def test_the_scripts_torchrun_is_an_elastic_one() -> None:
    (words,) = re.findall(r"launcher=\(torchrun (.*?)\)\n", SCRIPT.replace("\n        ", " "), re.DOTALL)
    environ = {"SLURM_NNODES": "2", "first": "n6", "SLURM_JOB_ID": "7"}
    text = re.sub(r"\$\{RANKS_PER_NODE:-(\d+)\}", r"\1", words)
    for name, value in environ.items():
        text = text.replace(f"${name}", value)
    given = get_args_parser().parse_args([*text.replace('"', "").split(), "-m", "tpengine.train"])
    assert (given.nnodes, given.rdzv_endpoint, given.rdzv_id, given.rdzv_backend) == ("2", "n6:29500", "7", "c10d")
    assert "SIGUSR1" in given.signals_to_handle and os.access(ROOT / "tpengine/examples/slurm.sh", os.R_OK)
