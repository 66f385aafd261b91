"""Signals that end a subcommand: SIGTERM and SIGHUP as Ctrl-C does, so that what it has begun ends first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn


class Stopped(KeyboardInterrupt):
    """A signal asks the command to end; raised so that what it started ends first."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the command as Ctrl-C does."""

    def stop(number: int, _: object) -> NoReturn:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
