"""Contestants of the pipeline benchmark on the parent's side: sets of ranks that take turns; and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.pipeline.ranks import Measured, SideName
from tpengine.config import Config
from tpengine.distributed.local_ranks import Ranks

# Largest relative difference that the order of sums explains; measured in float32: 1e-7 of losses, 3e-6 of gradients.
_TOLERANCES: Mapping[str, float] = {"float32": 1e-4, "float64": 1e-10, "bfloat16": 5e-2}


class Contestant:
    """A set of processes that runs one side's steps when told; in between they block and use no core.

    Args:
        side: the name of the side.
        config: validated, on the CPU.
        after_step: called after each step, to show progress.

    Raises:
        RanksFailed: it could not be built, or a step failed.
    """

    def __init__(self, side: SideName, config: Config, after_step: Callable[[], object] = lambda: None) -> None:
        self.config, self._after_step = config, after_step
        assert config.parallel.pp, "resolve the layout first: config.validate"
        self.ranks = Ranks(config.parallel.pp, "benchmarks.pipeline.ranks:Member", side, config)

    def step(self) -> Measured:
        """Run a step; return seconds of the slowest rank, and the loss."""
        steps: list[Measured] = self.ranks.call("step")
        self._after_step()
        losses = [step.loss for step in steps]
        loss = math.nan if any(map(math.isnan, losses)) else max(losses)
        return Measured(max(step.seconds for step in steps), loss)

    def step_seconds(self) -> float:
        """Run a step; return only its seconds."""
        return self.step().seconds

    def step_memory(self) -> list[int]:
        """Return each rank's memory; see ranks.Member."""
        found: list[int] = self.ranks.call("step_memory")
        self._after_step()
        return found

    def begin_timing(self) -> None:
        """See ranks.Member."""
        self.ranks.call("begin_timing")

    def most_live(self) -> list[int]:
        """Return the figure of each rank; see sides.Side."""
        return self.ranks.call("most_live")

    def gradients(self) -> dict[str, Any]:
        """Return the gradients of the last step, of all ranks, by parameter."""
        return {name: array for held in self.ranks.call("gradients") for name, array in held.items()}

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.close()


def check_agreement(contestants: Mapping[str, Contestant]) -> str:
    """Run a step of each contestant, which also warms it up; compare losses and gradients with the last one's.

    Returns:
        The first difference; empty if there is none.
    """
    (*ours, theirs) = contestants
    steps = {name: contestant.step() for name, contestant in contestants.items()}
    tolerance = _TOLERANCES[contestants[theirs].config.train.dtype]
    want, gradients = steps[theirs].loss, contestants[theirs].gradients()
    for name in ours:
        got = steps[name].loss
        if not abs(got - want) <= tolerance * abs(want):
            return f"loss differs by more than {tolerance:g}: {name} {got:.9g}, {theirs} {want:.9g}"
        if difference := gradient_difference(contestants[name].gradients(), gradients, tolerance):
            return f"{name} and {theirs}: {difference}"
    return ""


def gradient_difference(got: Mapping[str, Any], want: Mapping[str, Any], tolerance: float) -> str:
    """Return which parameters are missing, or whose gradients differ by more than a share of their largest element."""
    if lacking := sorted(got.keys() ^ want.keys()):
        return f"only one has a gradient of {', '.join(lacking)}"
    for name, expected in want.items():
        largest = float(np.abs(expected).max())
        difference = float(np.abs(got[name].reshape(expected.shape) - expected).max())
        # A gradient that is zero everywhere is wrong too: nothing was added.
        if not (0 < largest < math.inf and difference <= tolerance * largest):
            return f"gradient of {name} differs by {difference:g}, its largest element is {largest:g}"
    return ""
