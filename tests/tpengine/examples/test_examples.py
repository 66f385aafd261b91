"""Rung: gloo ranks. Every script of tpengine/examples runs as its docstring says, and learns."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.programs import run_ranks
from support.ranks.progress import run_program

EXAMPLES = ROOT / "tpengine" / "examples"
# A module without a main function: tests/kernels/test_worked_example.py runs it.
MODULES = {"swap"}
# test_own_losses.py runs these, on data that it writes.
OWN_LOSSES = {"classify", "dpo", "distill"}


def command_of(name: str) -> str:
    """The command in a script's docstring."""
    (command,) = re.findall(
        rf"^Run: ((?:torchrun --nproc-per-node \d+|python) -m tpengine\.examples\.{name})$",
        (EXAMPLES / f"{name}.py").read_text(),
        re.MULTILINE,
    )
    return str(command)


def run_example(directory: Path, name: str, num_ranks: int | None = None) -> str:
    """Run a script on as many ranks as its command says, or on others; return what rank 0 prints."""
    program, *arguments = command_of(name).split()
    if num_ranks is None:
        num_ranks = int(arguments[1]) if program == "torchrun" else 1
    ends = run_ranks(num_ranks, f"tpengine.examples.{name}", cwd=directory)
    assert not any(end.returncode for end in ends), [end.stderr for end in ends]
    assert not any(end.stdout for end in ends[1:]), "more than one rank printed"
    return ends[0].stdout


LARGEST_LOSSES = {
    "block": 1.0,
    "images": 0.5,
    "operators": 0.5,
    "stages": 0.2,
    "gpt": 1.0,
    "transformers_gpt2": 1.0,
    "fully_shard": 0.2,
}


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("block", None),
        # The others, which are dearer, and other numbers of ranks.
        *(
            pytest.param(name, num, marks=pytest.mark.slow)
            for name, num in (
                *((name, None) for name in LARGEST_LOSSES if name != "block"),
                *(("block", 1), ("block", 4), ("gpt", 8)),
            )
        ),
    ],
)
def test_an_example_runs_and_learns(tmp_path: Path, name: str, num_ranks: int | None) -> None:
    assert float(run_example(tmp_path, name, num_ranks).split("loss")[1]) < LARGEST_LOSSES[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGEST_LOSSES)
def test_its_command_runs_it(tmp_path: Path, name: str) -> None:
    program, *arguments = command_of(name).split()
    launcher = ["-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else []
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_program(
        [sys.executable, *launcher, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("loss")[1]) < LARGEST_LOSSES[name]


def test_the_fused_operators_alone(tmp_path: Path) -> None:
    assert run_example(tmp_path, "feed_forward") == "y [32, 32], through shared memory\n"


def test_a_run_of_ones_own(tmp_path: Path) -> None:
    """Flags override what it asks for; its callback speaks on the first rank."""
    assert len((EXAMPLES / "own_run.py").read_text().splitlines()) <= 40
    flags = "--train.steps", "2", "--train.eval-every", "1", "--device", "cpu", "--run-dir", "out"
    first, second = run_ranks(2, "tpengine.examples.own_run", *flags, cwd=tmp_path)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    told = [line for line in first.stderr.splitlines() if line.endswith(" nats")]
    assert [line.split(":")[0] for line in told] == ["step 1", "step 2"]
    assert "step 2/2" in first.stdout and not second.stdout and "nats" not in second.stderr
    assert (tmp_path / "out" / "checkpoints" / "step-00000002" / "index.json").is_file()


@pytest.mark.slow
def test_its_command_runs_it_to_the_end(tmp_path: Path) -> None:
    program, *arguments = command_of("own_run").split()
    assert program == "torchrun"
    done = run_program(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    entropies = [float(line.split()[3]) for line in done.stderr.splitlines() if line.endswith(" nats")]
    assert len(entropies) == 3 and entropies[0] > entropies[2] and entropies[2] < 2.5


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__"}
    assert set(LARGEST_LOSSES) | {"feed_forward", "own_run"} | OWN_LOSSES | MODULES == names
    listed, linked = (EXAMPLES / "__init__.py").read_text(), (ROOT / "README.md").read_text()
    assert not [name for name in names if f"- {name}: " not in listed or f"(tpengine/examples/{name}.py)" not in linked]
