"""Rung: host. A revision is timed against the working tree, from a worktree that goes again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.ranks.progress import finish

from benchmarks.harness.journal import read


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this repository whose working tree is this one's, so that worktrees come and go elsewhere."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and its repository")
    clone = tmp_path_factory.mktemp("repository") / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
    for directory in ("benchmarks", "kernels", "tpengine"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / directory, clone / directory, dirs_exist_ok=True, ignore=ignored)
    return clone


def started(clone: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.run", "kernels", "--models", "llama3_8b", "--seqs", "8", *arguments]
    environment = os.environ | {"PYTHONPATH": str(clone / "kernels")}
    return subprocess.Popen(
        command, cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def num_worktrees(clone: Path) -> int:
    command = ["git", "-C", str(clone), "worktree", "list", "--porcelain"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.count("worktree ")


@pytest.mark.slow
def test_a_revision_is_compared_with_the_working_tree(clone: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = ["--op", "norm", "--rounds", "2", "--direction", "both", "--against", "HEAD", "--out", str(out)]
    process = started(clone, *options)
    printed, errors = finish(process)
    assert process.returncode == 0, errors
    head = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    for row in read(out):
        assert row["contestants"] == ["revision", "working_tree"] and row["ours"] == "working_tree"
        assert row["against"] == head[:12] and row["working_tree_speedup_over_revision_median_ratio"] > 0
    assert "working_tree" in printed and num_worktrees(clone) == 1


@pytest.mark.slow
def test_a_revision_without_the_operator_is_refused(clone: Path) -> None:
    """A commit that holds a tpkernels with an empty __init__.py alone."""

    def git(*arguments: str, given: str = "") -> str:
        command = ["git", "-C", str(clone), "-c", "user.name=nobody", "-c", "user.email=nobody", *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout.strip()

    entry = f"100644 blob {git('hash-object', '-w', '--stdin')}\t__init__.py"
    for name in ("tpkernels", "kernels"):
        entry = f"040000 tree {git('mktree', given=entry)}\t{name}"
    commit = git("commit-tree", git("mktree", given=entry), "-m", "no operators")
    process = started(clone, "--op", "norm", "--against", commit)
    _, errors = finish(process)
    assert process.returncode == 2, errors
    assert f"error: --against {commit}: tpkernels has no operator norm" in errors and errors.count("\n") == 1
    assert num_worktrees(clone) == 1


@pytest.mark.slow
def test_ctrl_c_removes_the_worktree(clone: Path) -> None:
    process = started(clone, "--op", "norm", "--rounds", "1000000", "--against", "HEAD")
    assert process.stdout is not None and "no GPU" in process.stdout.readline()  # both processes have answered
    assert num_worktrees(clone) == 2
    process.send_signal(signal.SIGINT)
    _, errors = finish(process)
    assert process.returncode == 130, errors
    assert num_worktrees(clone) == 1 and "Traceback" not in errors
