"""A case of `benchmarks.run gpu` as plain data, and which cases are chosen for the minutes that are left. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What decides the next work: its cases are taken in the order in which they are declared, before all others.
FIRST_PHASE = "a"
PHASES: Mapping[str, str] = {
    FIRST_PHASE: "what decides the next work: steps, the host, products, attention, graphs, tests of what may be taken",
    "b": "other steps of llama_1b, and what the planner says of them",
    "c": "other tests that need a GPU, and architectures against transformers",
    "d": "matmul tiles tuned, against cuBLAS",
    "e": "attention against SDPA's backends",
    "f": "what ranks that share the GPU exchange",
    "g": "operators of a block against torch, torch.compile, Liger",
    "h": "the price of exact mode and of ZeRO",
    "i": "rows for the planner",
}

# Whether several ranks may share a GPU, as torch reads it.
OVERLAPS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: unique; what a second start recognises.
        phase: a key of PHASES; cases run in this order.
        worth: how much its answer is worth, in any unit; behind the first phase the worthiest per second are chosen.
        seconds: how long it is expected to take.
        function: "module:name" of a function of the rows' file and the arguments, which returns an exit code or None.
        arguments: JSON values by name.
        needs: modules without which it cannot run.
        environment: variables that only this case has.
        limit_seconds: after which it hangs; by default three times `seconds`, and at least a minute.
    """

    name: str
    phase: str
    worth: float
    seconds: float
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_seconds: float | None = None

    @property
    def limit(self) -> float:
        """Return the seconds after which the case hangs."""
        return max(60.0, 3 * self.seconds) if self.limit_seconds is None else self.limit_seconds

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the modules that it needs and that are not installed."""
        return tuple(name for name in self.needs if importlib.util.find_spec(name) is None)


def chosen(cases: Sequence[Case], seconds_left: float) -> list[Case]:
    """Return the cases for the time that is left, in the order of their phases.

    Those of the first phase are taken in their order, each if it still fits: behind one that is too long, a shorter one
    may. Then come the worthiest per second; a lesser one may fill what remains.
    """
    first = [case for case in cases if case.phase == FIRST_PHASE]
    others = [case for case in cases if case.phase != FIRST_PHASE]
    found = []
    for case in (*first, *sorted(others, key=lambda case: -case.worth / case.seconds)):
        if case.seconds <= seconds_left:
            found.append(case)
            seconds_left -= case.seconds
    # Within a phase the declared order holds.
    places = {case.name: place for place, case in enumerate(cases)}
    return sorted(found, key=lambda case: (case.phase, places[case.name]))
