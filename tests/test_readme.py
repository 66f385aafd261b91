"""Rung: gloo ranks. What the README shows runs as shown, and its file tree is the tree."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.ranks.progress import run_program

from tpengine.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CATALOGUE = (ROOT / "kernels" / "README.md").read_text()


def run_example(directory: Path, name: str, num_ranks: int) -> str:
    """Save an example of the README under its name and run it under torchrun; return what it prints."""
    (example,) = re.findall(rf"<!-- tested: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    (directory / f"{name}.py").write_text(example)
    done = run_program(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(num_ranks),
            f"{name}.py",
        ],
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
        ("block", 2, 1.0),
        pytest.param("block", 1, 1.0, marks=pytest.mark.slow),
        pytest.param("block", 4, 1.0, marks=pytest.mark.slow),
        ("images", 4, 0.5),
        ("stages", 2, 0.2),
        ("gpt", 4, 1.0),
        pytest.param("gpt", 8, 1.0, marks=pytest.mark.slow),
    ],
)
def test_an_example_runs_and_learns(tmp_path: Path, name: str, num_ranks: int, largest_loss: float) -> None:
    shown = {"block": 2, "gpt": 4}.get(name, num_ranks)
    assert f"torchrun --nproc-per-node {shown} {name}.py" in README
    assert float(run_example(tmp_path, name, num_ranks).split("loss")[1]) < largest_loss


def test_the_operators_of_a_block_learn(tmp_path: Path) -> None:
    assert float(run_example(tmp_path, "operators", 1).split("loss")[1]) < 0.5


def test_the_operators_alone(tmp_path: Path) -> None:
    assert "torchrun --nproc-per-node 2 feed_forward.py" in README
    assert run_example(tmp_path, "feed_forward", 2) == "y [32, 32], through shared memory\n"


def test_the_schedule_shown_is_the_schedule_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"\$ tpengine (schedule .*)", README)
    assert main(command.split()) == 0
    assert textwrap.indent(capsys.readouterr().out, "    ") in README


def test_the_picture_shown_is_the_picture_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^    tpengine (schedule .*--draw) zbv\.svg$", README, re.MULTILINE)
    (shown,) = re.findall(r"!\[[^]]*\]\((tpengine/.*\.svg)\)", README)
    drawn = tmp_path / "zbv.svg"
    assert main([*command.split(), str(drawn)]) == 0
    capsys.readouterr()
    assert drawn.read_text() == (ROOT / shown).read_text(), f"draw {shown} again, as the README says"


def test_the_plan_of_a_run_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^    tpengine (schedule --preset .*--draw) plan\.svg$", README, re.MULTILINE)
    assert main([*command.split(), str(tmp_path / "plan.svg")]) == 0
    assert "modelled, not measured: tp 2, pp 4, dp 1" in capsys.readouterr().out
    assert "modelled for h200" in (tmp_path / "plan.svg").read_text()


def test_the_schedule_of_a_users_own_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lines,) = re.findall(r"^    # mine\.txt.*\n((?:    rank .*\n)+)", README, re.MULTILINE)
    (tmp_path / "mine.txt").write_text(textwrap.dedent(lines))
    (command,) = re.findall(r"^    tpengine (schedule --schedule \./mine\.txt .*)$", README, re.MULTILINE)
    assert main(command.replace("./mine.txt", str(tmp_path / "mine.txt")).split()) == 0
    assert "its weight half" in capsys.readouterr().out


def test_the_file_tree_names_every_module() -> None:
    tree = README.split("## What is where")[1].split("\n## ")[0]
    named = set(re.findall(r"[\w/]+\.py|[\w]+/(?=\s)", tree))
    for package in (ROOT / "tpengine", ROOT / "kernels" / "tpkernels"):
        for path in package.iterdir():
            if path.name.startswith("__") or path.suffix == ".typed":
                continue
            name = path.name + "/" if path.is_dir() else path.name
            assert name in named, f"{name} is missing from the README's file tree"


def test_the_two_commands_stand_in_the_readme() -> None:
    for command in (
        "pip install -e . && torchrun --nproc-per-node 4 -m tpengine.train",
        "pip install -e '.[test]' && pytest",
    ):
        assert command in README


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    lines = (ROOT / "benchmarks" / "results" / name).read_text().splitlines()
    return {row["case"]: row for row in map(json.loads, lines)}


def test_the_figures_of_the_catalogue_are_those_of_their_rows() -> None:
    operators, exchanges = rows_of("kernels_cpu.jsonl"), rows_of("overlap.jsonl")
    shown = re.findall(r"(\d\.\d\d): `(\w+)/(\w+)`", CATALOGUE)
    for figure, op, direction in shown:
        row = operators[f"kernels/{op}/llama3_8b/seq_512/{direction}"]
        assert figure == f"{row['speedup_over_best_rival_median_ratio']:.2f}", (op, direction)
    fused = re.findall(r"(\d\.\d\d) times the matmul's time, apart (\d\.\d\d): `(overlap/\w+/\w+)`", CATALOGUE)
    for hidden, apart, case in fused:
        row = exchanges[case]
        assert hidden == f"{row['fused_over_matmul_median_ratio']:.2f}", case
        assert apart == f"{row['serial_over_matmul_median_ratio']:.2f}", case
    assert len(shown) > 10 and len(fused) == 2
    operator_rows = re.findall(r"^\| `.*", CATALOGUE.split("## Tools")[0], re.MULTILINE)
    assert len(operator_rows) > 15
    for line in operator_rows:
        assert re.search(r"(?:: `[\w/]+`|not measured yet) \|$", line), f"neither a row nor none: {line}"


def test_the_picture_and_the_files_of_the_catalogue_exist() -> None:
    for name in re.findall(r"!\[[^]]*\]\((\S+)\)", CATALOGUE):
        assert ElementTree.parse(ROOT / "kernels" / name).getroot().tag.endswith("svg")
    package = ROOT / "kernels" / "tpkernels"
    named = set(re.findall(r"[\w/]+\.py", CATALOGUE))
    assert {path.name for path in (package / "fused").glob("[a-z]*.py")} <= {Path(name).name for name in named}
    for name in named:
        assert any((root / name).exists() for root in (package, package / "fused", ROOT)), name


def test_the_catalogue_names_every_public_operator() -> None:
    import tpkernels

    # Twice: a submodule of the same name would take the operator's place once it is imported.
    for _ in range(2):
        for name in dir(tpkernels):
            assert callable(getattr(tpkernels, name)), name
    missing = [name for name in dir(tpkernels) if name[0].islower() and f"`{name}`" not in CATALOGUE]
    assert not missing, missing
