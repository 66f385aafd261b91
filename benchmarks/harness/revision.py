"""A git revision of this repository, checked out while it is needed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commit_of(revision: str, root: Path = ROOT) -> str:
    """Return the full hash of the commit that a revision names.

    Raises:
        ValueError: there is no such revision, or no repository.
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
    """Yield a temporary worktree of a commit; it is removed whatever happens inside, also after Ctrl-C.

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
        _git(root, "worktree", "prune")  # forget worktrees without a directory, also one that was made partly


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
