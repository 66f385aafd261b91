"""A run as it is planned: every phase with its verified plan and its text, before the first step.

A phase has its own plan, batch, transfers and executor. The groups, arenas and mailbox are made once, for the largest
phase, and so are model, gradient buffers and optimizer (train_state.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from tpengine.config import Config, Phase, Phases, phases_of
from tpengine.distributed.process import differing_ranks
from tpengine.layout.decided import Decided
from tpengine.layout.step_plan import Layout, phase_layouts, training_plan
from tpengine.plan import Plan
from tpengine.training.learning_rate import rate_of_step
from tpengine.training.samples import Corpus


class RunError(RuntimeError):
    """An error that the user can fix and only training can find; raised on all ranks alike, with rule and remedy."""


@dataclass(frozen=True)
class PlannedPhase:
    """A phase, ready to be run.

    Attributes:
        phase, layout, plan: the phase, and its verified plan.
        corpus: its text.
    """

    phase: Phase
    layout: Layout
    plan: Plan
    corpus: Corpus

    @property
    def config(self) -> Config:
        """Of the phase."""
        return self.phase.config


@dataclass(frozen=True)
class PlannedRun:
    """A run, phase by phase.

    Attributes:
        config: the configuration without what phases change.
        phases: the phases of the run.
        parts: each phase with its plan, in the same order.
    """

    config: Config
    phases: Phases
    parts: tuple[PlannedPhase, ...]

    def at(self, step: int) -> PlannedPhase:
        """Return the phase of a step, with its plan."""
        return self.parts[self.phases.at(step).number]

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return rate_of_step(self.phases, step)

    @property
    def largest(self) -> Config:
        """The configuration of the phase whose micro-batches have the most tokens: arenas are made for it."""
        configs = [phase.config for phase in self.phases]
        return max(configs, key=lambda config: config.train.micro_batch_size * config.train.seq_len)

    def check_ranks(self, device: torch.device) -> None:
        """Compare plan, configuration and text over all ranks: nodes may differ in version, flags or files; collective.

        Raises:
            RunError: on all ranks alike: says what differs.
        """
        plans = " ".join(part.plan.digest() for part in self.parts)
        settings = json.dumps([asdict(_anywhere(part.config)) for part in self.parts])
        mine = (plans, settings, " ".join(part.corpus.fingerprint() for part in self.parts))
        for name, value in zip(("plan", "configuration", "text"), mine, strict=True):
            if differing := differing_ranks(value, device):
                raise RunError(
                    f"all ranks must have the same {name}: ranks {differing} differ from rank 0: start every rank with "
                    "the same version, command line and data"
                )


def planned_run(
    config: Config,
    corpus: Corpus,
    corpora: Sequence[Corpus] | None,
    decided: Decided,
    packs_gradients: bool,
) -> PlannedRun:
    """Plan and verify every phase.

    Args:
        config: validated configuration of the run.
        corpus: its text.
        corpora: the text of each phase; None takes `corpus`.
        decided: where the configuration leaves it open.
        packs_gradients: as layout_of.

    Raises:
        ValueError: the plan fails verification (a bug of a schedule, named).
    """
    phases = phases_of(config)
    if corpora is None:
        corpora = [corpus.viewed(phase.config, phase.order) if len(phases) > 1 else corpus for phase in phases]
    layouts = phase_layouts(phases, decided.residency, packs_gradients, decided.row_load)
    parts = tuple(
        PlannedPhase(phase, layout, training_plan(phase.config, layout), text)
        for phase, layout, text in zip(phases, layouts, corpora, strict=True)
    )
    return PlannedRun(config, phases, parts)


def _anywhere(config: Config) -> Config:
    """Return a configuration without the places of files whose content is compared otherwise."""
    return replace(config, run_dir="", phases="", data=replace(config.data, mixture=""))
