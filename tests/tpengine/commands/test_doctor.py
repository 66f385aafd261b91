"""Rung: gloo ranks. `tpengine doctor` on this machine, as it is; ranks that die, raise and hang in the middle of it.

What only GPUs check: their links, NCCL, clocks, and that fused kernels between them are right.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from support.programs import finish_all, run_module, start_ranks

from tpengine.cli import main
from tpengine.planner.machine import read_machine

QUICK = ("--quick", "--device", "cpu")


def test_two_ranks_on_this_machine_and_the_file_is_what_advise_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = finish_all(*start_ranks(2, "tpengine.cli", "doctor", *QUICK, cwd=tmp_path))
    first, second = processes
    # 1: the machine that runs this test may lack room, files or memory; then the table says so.
    assert first.returncode in (0, 1) and second.returncode == 0, first.stderr + second.stderr
    assert second.stdout == "" and "Traceback" not in first.stderr
    # What is looked at is told as it begins, in a log too.
    told = re.findall(r"^tpengine: +[0-9.]+ s  (.*)$", first.stderr, re.MULTILINE)
    assert told[0] == "facts" and {"exchanges", "fused products, timed", "rates 1", "copies"} <= set(told)
    assert not re.search(r"^tpengine: +[0-9.]+ s ", second.stderr, re.MULTILINE)
    lines = first.stdout.splitlines()
    said = {line[8:42].strip(): line.split()[0] for line in lines if line.startswith(("ok ", "unseen ", "change "))}
    assert said["fused products"] == said["shared memory"] == said["sum over 2 ranks"] == said["memory"] == "ok"
    assert said["NCCL"] == said["between hosts"] == "unseen"
    assert "exact on 2 ranks, through shared memory" in first.stdout
    is_ready = lines[-1] == "ready"
    assert is_ready == (first.returncode == 0)
    content = json.loads((tmp_path / "machine.json").read_text())
    assert content["ready"] == is_ready and {finding["what"] for finding in content["findings"]} >= said.keys()
    assert [facts["rank"] for facts in content["facts"]] == [0, 1]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["machine.json", "machine.toml"]
    machine = read_machine(tmp_path / "machine.toml")
    assert machine.ranks_per_node == 2 and machine.within.fused.keys() == machine.within.measured.keys() == {2}
    assert machine.source.startswith("quick sizes, rough: ")
    asked = f"advise --model tiny --machine {tmp_path / 'machine.toml'} --ranks 2 --global-batch 16".split()
    assert main(asked) == 0
    assert "tiny, 2 x this CPU" in capsys.readouterr().out
    # What the answer says to do next, as it stands.
    (following,) = [line.partition(": tpengine ")[2] for line in lines if line.startswith("wrote machine.toml")]
    monkeypatch.chdir(tmp_path)
    assert main(following.split()) == 0
    assert "run it: " in capsys.readouterr().out


@pytest.mark.slow
def test_one_command_starts_the_ranks_and_a_rank_alone_says_what_it_cannot_see(tmp_path: Path) -> None:
    done = run_module("tpengine.cli", "doctor", "--nproc", "2", *QUICK, "--out", "m.toml", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "exact on 2 ranks" in done.stdout and (tmp_path / "m.toml").is_file()
    alone = run_module("tpengine.cli", "doctor", "--nproc", "1", *QUICK, "--out", "m.toml", cwd=tmp_path)
    assert alone.returncode in (0, 1), alone.stderr
    assert "one rank alone" in alone.stdout
    # The file of before is kept.
    assert read_machine(tmp_path / "m.1.toml").ranks_per_node == 2
    assert read_machine(tmp_path / "m.toml").ranks_per_node == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_named_and_the_rest_is_looked_at(tmp_path: Path, rank: int) -> None:
    processes = start_ranks(2, "support.engine.doctor_program", *QUICK, cwd=tmp_path, ACCIDENT=f"raises:{rank}")
    first, second = finish_all(*processes)
    assert (first.returncode, second.returncode) == (1, 0), first.stderr + second.stderr
    assert f"1. fused products (rank {rank}): RuntimeError: planned" in first.stdout
    assert "not ready" in first.stdout and f"not tried: fused products failed on rank {rank}" in first.stdout


@pytest.mark.slow
@pytest.mark.parametrize("accident", ["dies:1", "hangs:1", "hangs:0"])
def test_a_rank_that_is_lost_is_named_and_holds_up_nobody(tmp_path: Path, accident: str) -> None:
    """What was found before that is printed."""
    what, rank = accident.split(":")
    processes = start_ranks(2, "support.engine.doctor_program", *QUICK, cwd=tmp_path, ACCIDENT=accident)
    first, second = finish_all(*processes)
    assert first.returncode == 70 and second.returncode == (-9 if what == "dies" else 70), first.stderr + second.stderr
    assert "sum over 2 ranks" in first.stdout and "not all was looked at" in first.stderr
    assert f"rank {rank}" in first.stderr and "fused products" in first.stderr
    assert not (tmp_path / "machine.toml").exists() and (tmp_path / "machine.json").exists()


@pytest.mark.slow
def test_two_hosts_that_share_nothing_are_told_apart(tmp_path: Path) -> None:
    """Processes that say they are hosts: with directories of their own, and a clock that is ahead."""
    processes = start_ranks(2, "support.engine.doctor_program", *QUICK, cwd=tmp_path, ACCIDENT="apart:1")
    first, second = finish_all(*processes)
    assert (first.returncode, second.returncode) == (1, 0), first.stderr + second.stderr
    said = {line.split("  ")[0].split(" ", 1)[-1].strip() for line in first.stdout.splitlines()}
    assert "run directory (hosts 0, 1): . is not shared" in said
    assert any(line.startswith("clock beside host 0's (host 1): +100.0") for line in said)
    assert "host to host, gloo" in first.stdout
    assert read_machine(tmp_path / "machine.toml").num_nodes == 2


MISTAKES = {
    "--out must be a file that ends in .toml": ["--out", "m.json"],
    "--out must lie in a directory": ["--out", "none/m.toml"],
    "--run-dir must be a directory": ["--run-dir", "file"],
    "--nproc must be the number of processes": ["--nproc", "0"],
    "--machine goes with --pack": ["--machine", "m.toml"],
    # A directory in which nobody makes files, root neither.
    "--out must be a file that can be written": ["--out", "/proc/m.toml"],
}


@pytest.mark.parametrize("rule", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_measured(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["doctor", *MISTAKES[rule]]) == 2
    said = capsys.readouterr().err
    assert rule in said and said.count("\n") == 1


@pytest.mark.slow
def test_a_place_that_takes_no_file_is_refused_by_the_rank_that_writes(tmp_path: Path) -> None:
    first, second = finish_all(*start_ranks(2, "tpengine.cli", "doctor", *QUICK, "--out", "/proc/m.toml", cwd=tmp_path))
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.startswith("tpengine: error: --out must be a file that can be written: /proc/m.toml: ")
    assert first.stderr.count("\n") == 1 and first.stdout == second.stderr == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_all_ranks_say_so_in_one_line(tmp_path: Path) -> None:
    first, second = finish_all(*start_ranks(2, "tpengine.cli", "doctor", "--quick", "--device", "cuda", cwd=tmp_path))
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.startswith("tpengine: error: --device cuda needs a CUDA device") and second.stderr == ""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_of_this_machine(tmp_path: Path) -> None:
    done = run_module("tpengine.cli", "doctor", "--nproc", "2", cwd=tmp_path, CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode in (0, 1), done.stderr
    assert "exact on 2 ranks" in done.stdout and "NCCL's sum over 2 GPUs" in done.stdout
    assert read_machine(tmp_path / "machine.toml").is_asynchronous
