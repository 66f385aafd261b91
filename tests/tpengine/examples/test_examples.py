"""Rung: gloo ranks. Every script of tpengine/examples runs as its docstring says, and learns."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.ranks.progress import run_program

EXAMPLES = ROOT / "tpengine" / "examples"
# A module without a main function: tests/kernels/test_worked_example.py runs it.
MODULES = {"swap"}


def command_of(name: str) -> str:
    """The command in a script's docstring."""
    (command,) = re.findall(
        rf"^Run: ((?:torchrun --nproc-per-node \d+|python) -m tpengine\.examples\.{name})$",
        (EXAMPLES / f"{name}.py").read_text(),
        re.MULTILINE,
    )
    return str(command)


def run_example(directory: Path, name: str, num_ranks: int | None = None) -> str:
    """Run a script by its command, or on another number of ranks; return what it prints."""
    program, *arguments = command_of(name).split()
    if program == "torchrun":
        arguments = ["-m", "torch.distributed.run", "--standalone", *arguments]
    if num_ranks is not None:
        arguments[arguments.index("--nproc-per-node") + 1] = str(num_ranks)
    done = run_program(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "num_ranks", "largest_loss"),
    [
        ("block", None, 1.0),
        pytest.param("block", 1, 1.0, marks=pytest.mark.slow),
        pytest.param("block", 4, 1.0, marks=pytest.mark.slow),
        ("images", None, 0.5),
        ("operators", None, 0.5),
        ("stages", None, 0.2),
        ("gpt", None, 1.0),
        pytest.param("gpt", 8, 1.0, marks=pytest.mark.slow),
    ],
)
def test_an_example_runs_and_learns(tmp_path: Path, name: str, num_ranks: int | None, largest_loss: float) -> None:
    assert float(run_example(tmp_path, name, num_ranks).split("loss")[1]) < largest_loss


def test_the_fused_operators_alone(tmp_path: Path) -> None:
    assert run_example(tmp_path, "feed_forward") == "y [32, 32], through shared memory\n"


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__"}
    (run,) = [mark for mark in test_an_example_runs_and_learns.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert {getattr(case, "values", case)[0] for case in run.args[1]} | {"feed_forward"} | MODULES == names
    listed, linked = (EXAMPLES / "__init__.py").read_text(), (ROOT / "README.md").read_text()
    assert not [name for name in names if f"- {name}: " not in listed or f"(tpengine/examples/{name}.py)" not in linked]
