"""`tpengine doctor` as a rank runs it, with an accident planned: `ACCIDENT=<what>:<rank>` in the environment.

dies     the rank is killed (SIGKILL) as it multiplies
raises   it raises there
hangs    it sleeps there for ever
apart    every rank is a host of its own, with a directory of its own; the clock of that rank is 100 s ahead
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tpengine import cli
from tpengine.doctor import examination, hosts, products, shared_directory
from tpengine.doctor.facts import HostFacts, host_facts

# The longest that a look takes in which somebody hangs.
_SECONDS = 20.0


def main() -> None:
    """Be a rank."""
    what, rank = os.environ.get("ACCIDENT", "none:0").split(":")
    is_mine = os.environ["RANK"] == rank
    if what == "apart":
        _be_a_host(is_mine)
    elif is_mine and what != "none":
        products.wrong_products = {"dies": _die, "raises": _raise, "hangs": _hang}[what]  # type: ignore[assignment]
    if what == "hangs":
        examination._SECONDS = _SECONDS
    sys.exit(cli.main(["doctor", *sys.argv[1:]]))


def _die(*_: Any) -> list[str]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def _raise(*_: Any) -> list[str]:
    raise RuntimeError("planned")


def _hang(*_: Any) -> list[str]:
    while True:
        time.sleep(1.0)


def _be_a_host(is_ahead: bool) -> None:
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo")

    def facts(*given: Any, **more: Any) -> HostFacts:
        return dataclasses.replace(host_facts(*given, **more), host=1000 + rank, name=f"host{rank}")

    examination.host_facts = facts  # type: ignore[attr-defined]
    leave, seen = shared_directory.leave_mark, shared_directory.seen_marks

    def own(directory: Path) -> Path:
        return directory / str(rank)

    shared_directory.leave_mark = lambda directory, *given: leave(own(directory), *given)
    shared_directory.seen_marks = lambda directory, *given: seen(own(directory), *given)
    if is_ahead:
        right = time.time
        answering = hosts._answering

        def ahead() -> None:
            time.time = lambda: right() + 100.0
            try:
                answering()
            finally:
                time.time = right

        hosts._answering = ahead


if __name__ == "__main__":
    assert not dist.is_initialized()
    main()
