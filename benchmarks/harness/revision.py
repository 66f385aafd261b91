"""Git revisions of this repository: which one this is, and another one, checked out while it is needed. No torch."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Names the revision where git cannot: a checkout may be copied without its repository.
REVISION_VARIABLE = "TPENGINE_REVISION"


class Source(NamedTuple):
    """From which source something was measured.

    Attributes:
        commit: None if neither git nor the environment names it.
        dirty: whether the tree differs from the commit, results apart; None if git cannot tell.
    """

    commit: str | None
    dirty: bool | None


@functools.cache
def source_here() -> Source:
    """Return the source of this process. Asked once: what it has imported does not change, and git takes its time."""
    commit, status = (
        _output("rev-parse", "--short=12", "HEAD"),
        _output("status", "--porcelain", "--", ".", ":!benchmarks/results"),
    )
    return Source(commit or os.environ.get(REVISION_VARIABLE) or None, None if status is None else status != "")


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


def _output(*arguments: str) -> str | None:
    """Return git's output in the source tree; None without git or a repository."""
    try:
        done = _git(ROOT, *arguments)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
