"""The verdict: of all reasons why a step takes as long as it does, the one whose removal is worth most.

Each reason is judged by simulating the recorded step without it. What is worth less than the floor is no reason: 5 % of
the step, or the share by which the run's own steps differ, if that is more.

How a run ended that could not go on: the chain of ranks that waited for each other, from their last words.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpengine.last_words import LastWords
from tpengine.planner.diagnose.evidence import Baseline, Evidence, Fault, Finding, percent, read_evidence, seconds_text
from tpengine.planner.diagnose.exchanges_and_memory import exposed_dp, exposed_tp, memory_pressure
from tpengine.planner.diagnose.slow_ranks import few_micro_batches, host_bound, slow_input, slow_rank, uneven_stages

# Every host does something else too.
_CROWDED = 0.05
_REASONS = (
    slow_rank,
    uneven_stages,
    slow_input,
    few_micro_batches,
    exposed_tp,
    exposed_dp,
    memory_pressure,
    host_bound,
)


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about a run.

    Attributes:
        baseline: the recorded step.
        findings: the reasons that are worth more than the floor, the one that is worth most first; it is the verdict.
    """

    baseline: Baseline
    findings: tuple[Finding, ...]

    @property
    def fault(self) -> Fault:
        """Return the verdict's kind."""
        return self.findings[0].fault if self.findings else Fault.NONE

    def lines(self) -> list[str]:
        """Return the verdict in one line, then what else was found, and what it is based on."""
        step = self.baseline.step
        found = [finding.text(step) for finding in self.findings] or [self._healthy()]
        return [found[0], *(f"then {text}" for text in found[1:]), self._basis()]

    def to_json(self) -> dict[str, Any]:
        """Return the same as numbers and words."""
        return {
            "verdict": self.fault,
            "step_seconds": self.baseline.step,
            "floor_seconds": self.baseline.floor * self.baseline.step,
            "computing_share": self._computing(),
            "bubble_share": self.baseline.bubble,
            "starved_share": self._starved(),
            "findings": [
                {
                    "fault": finding.fault,
                    "seconds": finding.seconds,
                    "share_of_step": finding.seconds / self.baseline.step,
                    "evidence": finding.evidence,
                    "change": finding.change,
                    "brings_seconds": finding.brings,
                }
                for finding in self.findings
            ],
        }

    def _healthy(self) -> str:
        baseline, step = self.baseline, self.baseline.step
        noisy = ", by which its own steps differ: record more steps, on hosts that do nothing else"
        noisy = noisy if baseline.is_noisy else ""
        return (
            f"{Fault.NONE}: {percent(self._computing())} compute, bubble {percent(baseline.bubble)} as "
            f"planned: no change that is known here brings {percent(baseline.floor)} of {seconds_text(step)}{noisy}"
        )

    def _computing(self) -> float:
        """Return the share of the step in which ranks compute, on average."""
        baseline = self.baseline
        # By the simulated step, of which the recorded one is a little longer or shorter.
        computing = statistics.fmean(rank.computing for rank in baseline.figures.ranks) / baseline.timeline.makespan
        return computing * statistics.median(of.plan for of in baseline.evidence.profile.steps) / baseline.step

    def _basis(self) -> str:
        evidence, baseline = self.baseline.evidence, self.baseline
        layout, profile = evidence.layout, evidence.profile
        recorded = statistics.median(step.plan for step in profile.steps)
        numbers = [step.step + 1 for step in profile.steps]
        which = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
        spread = (
            f"the run's steps differ by {evidence.spread:.1%}".replace("%", " %")
            if evidence.spread
            else "nothing says how much steps differ"
        )
        counted = f"{profile.num_microbatches} micro-batch{'es' if profile.num_microbatches > 1 else ''}"
        return (
            f"{evidence.plan.schedule}, tp {layout.tp}, pp {layout.pp}, dp {layout.dp}, {counted}: "
            f"{seconds_text(baseline.step)} in {which}, of which the plan took {seconds_text(recorded)} "
            f"({seconds_text(baseline.timeline.makespan)} by the simulator); {spread}{self._crowding()}"
        )

    def _crowding(self) -> str:
        """Return what is to be known of a host whose cores have other work too."""
        share = self._starved()
        if share < _CROWDED:
            return ""
        return (
            f"; ranks stood in line for a core in {percent(share)} of their actions' time: times are those of taking "
            "turns with other threads"
        )

    def _starved(self) -> float:
        """Return the share of actions' time in which ranks stood in line for a core."""
        actions = [action for rank in self.baseline.evidence.profile.ranks for action in rank.actions.values()]
        return sum(action.starved for action in actions) / sum(action.seconds for action in actions)


def diagnose(run_dir: Path, own: str = "") -> Diagnosis:
    """Say why the steps of a run take as long as they do.

    Args:
        run_dir: its directory, with steps recorded by --train.profile-steps.
        own: the user's own file of the run's architecture; empty takes the run's copy.

    Raises:
        ValueError: a file is missing or wrong, or not that of the run; one line.

    Cost: some twenty simulations of the step.
    """
    return diagnosed(read_evidence(run_dir, own))


def diagnosed(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis of a run from what it has left."""
    baseline = Baseline(evidence)
    found = [finding for reason in _REASONS if (finding := reason(baseline)) is not None]
    floor = baseline.floor * baseline.step
    worth = sorted((f for f in found if f.seconds > floor), key=lambda finding: finding.seconds, reverse=True)
    return Diagnosis(baseline, tuple(worth))


def chain(words: Mapping[int, LastWords]) -> str:
    """Return in one line who waited for whom, from the rank that waits longest to the one that explains it.

    A rank explains it that waits for nobody, has left no words, or has occurred before: then they wait in a circle.

    Args: words: by rank, at least one.
    """
    rank = _first(words)
    seen: list[int] = []
    text = (
        f"the run ended in step {words[rank].step}: rank {rank}" if words[rank].step else f"the run ended: rank {rank}"
    )
    while True:
        seen.append(rank)
        of_rank = words[rank]
        link = ", which" if len(seen) > 1 else ""
        text += f"{link} was in {of_rank.doing} for {of_rank.seconds:.1f} s"
        following = _next(of_rank, words, seen)
        if following is None:
            return f"{text}, waiting for nobody: {of_rank.reason}"
        axis, rank = following
        text += f", waiting for rank {rank} ({axis})"
        if rank in seen:
            return f"{text}: they wait in a circle"
        if rank not in words:
            fate = "whose process had ended" if rank in of_rank.gone else "which left no last words"
            return f"{text}, {fate}: look at its output"


def _first(words: Mapping[int, LastWords]) -> int:
    """Return the rank to begin with: one that nobody else waited for, if there is one; the one that waited longest."""
    awaited = {rank for of_rank in words.values() for ranks in of_rank.waits.values() for rank in ranks}
    free = [rank for rank in words if rank not in awaited and words[rank].waits] or list(words)
    return max(free, key=lambda rank: words[rank].seconds)


def _next(of_rank: LastWords, words: Mapping[int, LastWords], seen: list[int]) -> tuple[str, int] | None:
    """Return the rank that explains a wait: one that has gone, else one without words, else one that waits least."""
    waits = [(axis, rank) for axis, ranks in of_rank.waits.items() for rank in ranks]
    if not waits:
        return None

    def rule(wait: tuple[str, int]) -> tuple[bool, bool, bool, int]:
        _, rank = wait
        has_words = rank in words
        return (
            rank not in of_rank.gone or has_words,
            has_words,
            rank in seen,
            sum(map(len, words[rank].waits.values())) if has_words else 0,
        )

    return min(waits, key=rule)
