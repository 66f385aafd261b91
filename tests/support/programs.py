"""Programs as a user starts them, forked from a process that has loaded torch (ranks/preloaded.py)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from support.ranks.preloaded import Program, preloaded
from support.ranks.progress import LOOK_SECONDS, Progress, kill_family
from support.ranks.rank_pool import environment_of_ranks


def run_module(
    module: str, *arguments: str, cwd: Path | None = None, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """As `python -m module arguments`, for as long as it works; a tenth of what a start costs.

    What is left out is a start's own: what is imported in which order, and how an interrupt meanwhile ends.

    Raises:
        AssertionError: it hangs.
    """
    parent = preloaded(environment_of_ranks())
    with tempfile.TemporaryDirectory(prefix="program-") as directory:
        output, errors = Path(directory, "output"), Path(directory, "errors")
        program = Program(module, arguments, str(cwd or os.getcwd()), dict(env), str(output), str(errors))
        ended = parent.start(program)
        progress = Progress([parent.pid])
        while not ended.poll(LOOK_SECONDS):
            progress.look()
            if progress.is_over():
                kill_family(parent.pid)
                preloaded.cache_clear()
                raise AssertionError(f"{module} {arguments} hangs: {progress}: {errors.read_text()!r}")
        return subprocess.CompletedProcess(
            [module, *arguments], ended.recv(), output.read_text(errors="replace"), errors.read_text(errors="replace")
        )
