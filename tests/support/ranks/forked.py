"""Ranks of `tpengine.distributed.local_ranks` that are forked from a process that has loaded torch.

Where it is not the start that is tested: a spawned rank needs two CPU seconds before it does anything. The process has
the variables that the first such ranks of the session are started with.
"""

from __future__ import annotations

import multiprocessing

import pytest


def fork_local_ranks(patch: pytest.MonkeyPatch) -> None:
    """Fork them as long as the patch is in force."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "tpengine.distributed.rank_process"])
    patch.setattr(multiprocessing, "get_context", lambda method: context)
