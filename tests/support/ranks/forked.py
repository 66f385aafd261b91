"""Ranks of `tpengine.distributed.local_ranks` that are forked from a process that has loaded torch (preloaded.py).

Where it is not the start that is tested: a spawned rank needs two CPU seconds before it does anything.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from support.ranks.preloaded import Call, preloaded
from support.ranks.rank_pool import environment_of_ranks


class _Process:
    """As `multiprocessing.Process`, of arguments whose second is a rank."""

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...], daemon: bool) -> None:
        self._call = Call(os.getcwd(), dict(os.environ), tuple(sys.path), target, args)
        self._rank = int(args[1])

    def start(self) -> None:
        _, self._guardian = preloaded(environment_of_ranks(), self._rank).fork(self._call)
        self._pid: int = self._guardian.recv()

    def kill(self) -> None:
        if not self._guardian.poll():
            os.kill(self._pid, signal.SIGKILL)

    def join(self) -> None:
        self._guardian.recv()


class _Context:
    Pipe = staticmethod(multiprocessing.Pipe)
    Process = _Process


def fork_local_ranks(patch: pytest.MonkeyPatch) -> None:
    """Fork them as long as the patch is in force."""
    patch.setattr(multiprocessing, "get_context", lambda method: _Context)
