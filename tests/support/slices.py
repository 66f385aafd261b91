"""Parts of what is too dear for every run: another one each commit, so that all are run in turn."""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from support import ROOT


class Slice(NamedTuple):
    """Part `number`, 0-based, of `num_parts`."""

    number: int
    num_parts: int

    @classmethod
    def of(cls, text: str) -> Slice:
        """Read k/N, 1 <= k <= N, or auto/N: another part each commit.

        Raises:
            pytest.UsageError: it is something else.
        """
        number, _, count = text.partition("/")
        if number == "auto" and count.isdecimal() and int(count):
            return cls(commit_number() % int(count), int(count))
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise pytest.UsageError(f"--slice must be k/N with k from 1 to N: got {text}: use auto/30")
        return cls(int(number) - 1, int(count))

    def holds(self, name: str) -> bool:
        """Whether a thing of this name is in the part; equal in every process and on every machine."""
        return zlib.crc32(name.encode()) % self.num_parts == self.number

    def cut(self, items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """The tests of this part, and the others."""
        every = list(items)
        mine = [item for item in every if self.holds(item.nodeid)]
        return mine, [item for item in every if not self.holds(item.nodeid)]


def commit_number() -> int:
    """How many commits lead to this one; its time where the others are not here; 0 where there is no repository."""
    try:
        if _git("rev-parse", "--is-shallow-repository") == "true":
            return int(_git("log", "-1", "--format=%ct"))
        return int(_git("rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        return 0


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
