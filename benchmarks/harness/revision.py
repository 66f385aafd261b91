"""A git revision of this repository, checked out for as long as it is needed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commit_of(revision: str, root: Path = ROOT) -> str:
    """The commit that a revision names, in full.

    Raises:
        ValueError: there is none, or no repository.
    """
    done = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if done.returncode:
        raise ValueError(
            f"--against must be a revision of the git repository in {root.name}: got {revision!r}: "
            "use HEAD, a branch, a tag or a commit"
        )
    return done.stdout.strip()


@contextmanager
def checked_out(commit: str, root: Path = ROOT) -> Iterator[Path]:
    """A temporary worktree of a commit, removed whatever happens inside, Ctrl-C included.

    Raises: RuntimeError: git cannot make it.
    """
    directory = Path(tempfile.mkdtemp(prefix="tpkernels-revision-"))
    tree = directory / "tree"
    try:
        done = _git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit)
        if done.returncode:
            raise RuntimeError(f"git cannot check {commit} out: {done.stderr.strip()}")
        yield tree
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        _git(root, "worktree", "prune")  # forgets those whose directory is gone, one half made too


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
