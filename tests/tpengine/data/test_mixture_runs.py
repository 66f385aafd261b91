"""Rung: gloo ranks, as `python -m tpengine.train` starts them. A run that reads a mixture, resumed as it may be."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mixtures import write_mixture
from support.programs import run_module, run_ranks

SMALL = (
    *("--model.hidden-size", "32", "--model.num-heads", "4", "--model.ffn-size", "48", "--model.num-layers", "2"),
    *("--model.vocab-size", "200", "--train.seq-len", "16", "--device", "cpu", "--data.packing", "documents"),
    *("--train.micro-batch-size", "2", "--train.num-micro-batches", "4", "--train.steps", "4"),
    *("--train.eval-micro-batches", "2", "--train.eval-every", "2", "--train.sample-tokens", "5"),
)


def run_one(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_module("tpengine.train", *arguments, "--run-dir", "out", cwd=cwd)


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]


def begun(tmp_path: Path) -> Path:
    """Run four steps; return the file of the mixture."""
    mixture = write_mixture(tmp_path, [[20] * 60, [7] * 100], [0.7, 0.3], vocab_size=200)
    done = run_one(*SMALL, "--data.mixture", str(mixture), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return mixture


def test_rows_have_shares_epochs_and_the_held_out_loss_of_each_source(tmp_path: Path) -> None:
    begun(tmp_path)
    third, fourth = rows(tmp_path)[2:]
    # Of 24 samples; of 71 and 41 windows that are not held out.
    counts = {name: round(third[f"share/{name}"] * 24) for name in ("s0", "s1")}
    assert sum(counts.values()) == 24
    assert third["epochs/s0"] == counts["s0"] / 71 and third["epochs/s1"] == counts["s1"] / 41
    assert "held_out_loss" not in third
    assert np.isclose(fourth["held_out_loss"], 0.7 * fourth["held_out_loss/s0"] + 0.3 * fourth["held_out_loss/s1"])


@pytest.mark.slow
def test_a_run_goes_on_with_its_mixture_and_with_another_in_a_new_phase_alone(tmp_path: Path) -> None:
    mixture = begun(tmp_path)
    # Another layout goes on, with the run's own copy of the table.
    mixture.write_text(mixture.read_text().replace("weight = 0.3", "weight = 0.4"))
    layout = "--parallel.dp", "2", "--parallel.tp", "1", "--parallel.pp", "1"
    for end in run_ranks(
        2, "tpengine.train", "--run-dir", "out", "--resume", *layout, "--train.steps", "6", cwd=tmp_path
    ):
        assert end.returncode == 0, end.stderr
    assert "weight = 0.3" in (tmp_path / "out/mixture.toml").read_text()
    assert len(rows(tmp_path)) == 6
    # A changed weight is refused by name, and may be a phase of its own.
    changed = "--resume", "--train.steps", "8", "--train.num-micro-batches", "4", "--parallel.dp", "1"
    done = run_one(*changed, "--data.mixture", str(mixture), cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"must keep the weight of s1 ({tmp_path / 's1.tokens'})" in line
    assert "was saved with 0.3, this run has 0.4" in line and "--phases" in line
    (tmp_path / "p.toml").write_text(f'[[phase]]\nuntil = 6\n[[phase]]\nuntil = 8\ndata.mixture = "{mixture}"\n')
    done = run_one(*changed, "--phases", "p.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert round(rows(tmp_path)[6]["share/s0"] * 8) + round(rows(tmp_path)[6]["share/s1"] * 8) == 8
