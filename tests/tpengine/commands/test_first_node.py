"""Rung: gloo ranks. The commands of the first node's page are read as they stand; run with small sizes when slow."""

from __future__ import annotations

import json
import shlex
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.programs import run_module
from support.readmes import FIRST_NODE, commands_in

from tpengine import cli
from tpengine.commands.arguments import parse_config
from tpengine.distributed.launcher import taken_nproc
from tpengine.planner.machine import MACHINES, machine_text

COMMANDS = [shlex.split(line, comments=True) for line in commands_in(FIRST_NODE.read_text())]
# Of a machine with eight GPUs -> of two cores.
SIZES = {
    "--nproc 8": "--nproc 2",
    "llama_1b": "tiny",
    "--parallel.tp 2 --parallel.pp 1 --parallel.dp 4": "--parallel.tp 2 --parallel.pp 1 --parallel.dp 1",
    "--parallel.tp 2 --parallel.pp 2 --parallel.dp 2": "--parallel.tp 1 --parallel.pp 2 --parallel.dp 1",
    "--tp 2 --pp 1 --dp 4": "--tp 2 --pp 1 --dp 1",
    "--global-batch 128": "--global-batch 16 --ranks 2",
    "--train.steps 60 --train.profile-steps 40:48": "--train.steps 24 --train.profile-steps 16:20 --device cpu",
    "--train.steps 60": "--train.steps 4 --device cpu",
}


def test_every_command_is_read_as_it_stands() -> None:
    parser = cli._parser()
    names = []
    for command in COMMANDS:
        arguments = command[1:]
        if command[0] == "torchrun":
            arguments = command[command.index("tpengine.cli") + 1 :]
        names.append(arguments[0])
        if arguments[0] == "train":
            number, flags = taken_nproc(arguments[1:])
            assert number is not None
            parse_config(flags, number)
        else:
            parser.parse_args(arguments)
    assert names[0] == "doctor" and names[-1] == "doctor" and "--pack" in COMMANDS[-1]
    assert set(names) == {"doctor", "advise", "schedule", "train", "diagnose"}


def test_what_is_asked_of_the_planner_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a machine's file, here of a data sheet; the layouts fit into 8 GPUs of 141 GB."""
    monkeypatch.chdir(tmp_path)
    Path("machine.toml").write_text(machine_text(replace(MACHINES["h200"], num_nodes=1)))
    asked = [command[1:] for command in COMMANDS if command[1] in ("advise", "schedule")]
    assert len(asked) == 3
    for arguments in asked:
        assert cli.main(arguments) == 0
        said = capsys.readouterr().out
        assert "tokens/s" in said if arguments[0] == "advise" else "makespan" in said and "peak bytes" in said


@pytest.mark.slow
def test_the_page_on_two_cores(tmp_path: Path) -> None:
    """From the doctor to the archive."""
    page = FIRST_NODE.read_text()
    for line in commands_in(page):
        if line.startswith("torchrun") or "8b" in line.lower():
            continue
        for large, small in SIZES.items():
            line = line.replace(large, small)
        if line.startswith("tpengine doctor") and "--pack" not in line:
            line += " --quick --device cpu"
        done = run_module("tpengine.cli", *shlex.split(line, comments=True)[1:], cwd=tmp_path)
        assert done.returncode == 0 or (" doctor " in line and done.returncode == 1), line + done.stdout + done.stderr
    rows = [json.loads(row) for row in (tmp_path / "RUN1" / "metrics.jsonl").read_text().splitlines()]
    assert {"step_seconds", "peak_memory_bytes"} <= rows[-1].keys()
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"run/config.toml", "run/metrics.jsonl", "run/profile.json", "run/trace.json", "machine.json"} <= names
