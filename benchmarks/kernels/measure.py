"""Check, then time the contestants of one case after another, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from benchmarks.harness.timing import keep_freed_memory
from benchmarks.kernels.cases.cases import COMPILED, FLEX, Contestant, Direction, Draw, Shape, cases_of
from benchmarks.kernels.check import Findings, check, slopes_of
from benchmarks.kernels.timing import Operands, Timed

_TIMED_SEED = 0


class Asked(Protocol):
    """A `Measured` in this process or another."""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call one of its methods by name."""


class Measured:
    """The open case, and its contestants in one direction.

    Everything is passed by name, so that the caller may be in another process.
    """

    def __init__(self) -> None:
        self._contestants: Mapping[str, Contestant] = {}
        self._operands: Operands | None = None
        self._timed: dict[str, Timed] = {}
        self._device = ""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method by name, as side.Side.ask does."""
        return getattr(self, method)(*arguments)

    def names(self, op: str, shape: Shape) -> list[str]:
        """Return the names of an operator's cases.

        Raises: MissingOperator: this tpkernels does not have it.
        """
        return [case.name for case in cases_of(op, shape)]

    def open(self, op: str, shape: Shape, name: str, chosen: Sequence[str]) -> Findings:
        """Open a case and check the chosen contestants."""
        self.close()
        (case,) = [case for case in cases_of(op, shape) if case.name == name]
        contestants = {n: contestant for n, contestant in case.contestants.items() if n in chosen}
        if {COMPILED, FLEX} & contestants.keys():
            torch.compiler.reset()
        found = check(case, shape, contestants)
        inputs = case.inputs(Draw(shape, _TIMED_SEED))
        self._operands = Operands(inputs, slopes_of(case, shape, _TIMED_SEED), contestants.values())
        self._contestants, self._device = contestants, shape.device
        return found

    def contestants(self, direction: Direction) -> list[str]:
        """Return the names of the open case's contestants that run in this direction."""
        return [name for name, contestant in self._contestants.items() if direction in contestant.directions]

    def start(self, name: str, direction: Direction) -> int | None:
        """Warm a contestant up; return its peak memory if it can be known."""
        assert self._operands is not None, "a case must be open"
        keep_freed_memory()
        self._timed[name] = Timed(self._contestants[name], self._operands, direction, self._device)
        self._timed[name].warm_up()
        return self._timed[name].peak_bytes()

    def seconds(self, name: str) -> float:
        """Return one sample of a contestant that was started."""
        return self._timed[name].seconds()

    def close(self) -> None:
        """Free the open case's memory."""
        self._contestants, self._operands, self._timed = {}, None, {}
