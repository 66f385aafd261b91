"""A finding: one reason why the step takes as long as it does, with what its removal is worth."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tpengine.advice.diagnose.baseline import seconds_text


class Fault(StrEnum):
    """The reasons that are told apart; the value is what is printed."""

    SLOW_RANK = "slow rank"
    UNEVEN_STAGES = "uneven stages"
    SLOW_INPUT = "slow input"
    FEW_MICRO_BATCHES = "too few micro-batches"
    EXPOSED_TP = "exposed tp"
    EXPOSED_DP = "exposed dp"
    MEMORY = "memory pressure"
    HOST = "host-bound"
    NONE = "healthy"


@dataclass(frozen=True)
class Finding:
    """A reason.

    Args:
        fault: its kind.
        seconds: by how much the step is shorter without it, by the simulator.
        evidence: what was seen, in words with the names of actions.
        change: what to change, as a command's flags where there are some.
        brings: by how much the step is shorter after the change, by the simulator on the changed, verified plan.
    """

    fault: Fault
    seconds: float
    evidence: str
    change: str
    brings: float

    def text(self, step: float) -> str:
        """Return the reason in one line; `step`: the seconds of the whole step."""
        share = f"{self.fault}, {percent(self.seconds / step)} of the step"
        if not self.change:
            return f"{share}: {self.evidence}"
        return f"{share}: {self.evidence}: {self.change} brings {seconds_text(self.brings)}"


def percent(share: float) -> str:
    """Return a share in words: 22 %."""
    return f"{share:.0%}".replace("%", " %")
