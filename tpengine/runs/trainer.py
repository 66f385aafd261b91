"""The trainer: plans a run, connects its ranks, builds its state, and has a step for each phase in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tpengine.checkpoint.rollbacks import left_out
from tpengine.config import Config
from tpengine.distributed.connect import GroupError
from tpengine.distributed.mesh import Communicators, Shape, build_mesh, exchange_seconds
from tpengine.distributed.process import link_device, max_over_ranks
from tpengine.layout.decided import Decided, rows_memory_bytes
from tpengine.layout.parameters import kv_replicas
from tpengine.layout.step_plan import evaluation_micro_batches, forward_plan
from tpengine.observe.activity import Activity
from tpengine.pipeline.executor import Trace
from tpengine.pipeline.preload import connect
from tpengine.pipeline.transfers import open_mailbox
from tpengine.training.elementwise import UpdateRule
from tpengine.training.next_phase import enter_phase
from tpengine.training.objective import Objective, resolved
from tpengine.training.planned_run import PlannedRun, RunError, planned_run
from tpengine.training.samples import Corpus, SamplePosition
from tpengine.training.train_state import RankContext, TrainState
from tpengine.training.train_step import TrainStep
from tpengine.training.update_rules import with_rule


class Trainer:
    """One rank of a training run.

    Args:
        config: validated configuration (config.validate), equal on all ranks.
        corpus: the text, equal on all ranks.
        device: where this rank computes.
        trace: records what the executor runs; None records nothing.
        activity: told what this rank does; None if nothing watches it.
        decided: what was decided where the configuration leaves it open; of buffers for rows the least of all ranks'
            counts, the rest is the same on all.
        draws: draw the initial weights. Without, they hold anything but in padding, until somebody loads them.
        corpora: the text of each phase (as data.open_corpora opens them); default `corpus` in all of them.
        packs_gradients: as layout_of; default on CUDA.
        objective: a loss and metrics of your own, the same on all ranks; default next-token loss.
        optimizer: one of the user's own instead of config.optim's, the same on all ranks.

    Attributes:
        planned: the run's phases, each with its plan.
        state: what a checkpoint holds, in the current phase.
        step: runs the steps of the current phase; `enter_phase_of` makes another.
        objective: resolved.

    Raises:
        ValueError: the plan fails verification (a bug of a schedule, named); the optimizer is none; an objective does
            not fit the settings.
        RunError: ranks differ in plan, configuration or text.

    The constructor is collective; the default process group must exist. With train.reduction exact it makes torch
    deterministic for the whole process (distributed.make_deterministic).
    """

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        device: torch.device,
        trace: Trace | None = None,
        activity: Activity | None = None,
        decided: Decided | None = None,
        draws: bool = True,
        corpora: Sequence[Corpus] | None = None,
        packs_gradients: bool | None = None,
        optimizer: UpdateRule | None = None,
        objective: Objective | None = None,
    ) -> None:
        config = config if optimizer is None else with_rule(config, optimizer)
        self.objective = resolved(objective, config.train)
        # Plan: who holds what, and the order of actions, in every phase.
        packs = device.type == "cuda" if packs_gradients is None else packs_gradients
        decided = _of_all_ranks(decided or Decided(), device)
        self.planned = planned_run(config, corpus, corpora, decided, packs)
        # Compare first: ranks that differ in layout could not make the groups below.
        self.planned.check_ranks(device)
        # Connect: the mesh, its groups and their communicators.
        rank = _connect(self.planned, device, activity or Activity())
        # Build: model, gradient buckets, optimizer; then what runs the steps.
        self.state = TrainState(rank, self.planned.parts[0], optimizer)
        if draws:
            self.state.draw_weights()
        else:
            self.state.clear_padding()
        self._part = self.state.part
        self.step = TrainStep(self.state, self.planned.rate, self.position, trace, self.objective)
        if self.step.preloads:
            mesh = rank.mesh
            connect(self.state.part.plan, mesh.at.pp, mesh.pp, link_device(device), mesh.pp_backward)

    def enter_phase_of(self, step: int) -> bool:
        """Enter the phase of a step, if it is another; collective.

        Returns:
            Whether it is another.
        """
        part = self.planned.at(step)
        if part is self._part and part is self.state.part:
            return False
        self.state.rank.activity.begin("entering the next phase")
        self.close()
        if part is not self.state.part:
            enter_phase(self.state, part)
        self._part = part
        trace = self.step.executor.trace
        self.step = TrainStep(self.state, self.planned.rate, self.position, trace, self.objective)
        return True

    def close(self) -> None:
        """End the thread that reads ahead; a step that follows on this reads again."""
        self.step.close()

    def position(self, step: int) -> SamplePosition:
        """Return where the run is in its samples before a step; those of rollbacks are left out."""
        phase = self.planned.phases.at(step)
        return SamplePosition(
            phase.order, phase.samples_before(step), left_out(self.state.rollbacks).get(phase.order, ())
        )

    def position_after(self, step: int) -> SamplePosition:
        """Return where the run is, in the order of samples of a step's phase, after that step."""
        return self.position(step).after(self.planned.phases.at(step).samples_per_step)


def _of_all_ranks(decided: Decided, device: torch.device) -> Decided:
    """Return the decisions with the smallest buffers of all ranks: hosts may have other memory, or numbers of ranks."""
    (least,) = max_over_ranks([-decided.row_load], device)
    return replace(decided, row_load=abs(least))


def _connect(planned: PlannedRun, device: torch.device, activity: Activity) -> RankContext:
    """Make the groups, arenas and mailbox of all phases; collective."""
    config, layout = planned.config, planned.parts[0].layout
    shape = Shape.of(config.parallel)
    ends = (layout.ranks[0], layout.ranks[-1]) if config.model.tie_embeddings else None
    link, seconds = link_device(device), config.train.timeout_seconds
    mesh = build_mesh(shape, link.type, kv_replicas(config.model, shape.tp), ends, seconds)
    comms = Communicators.of(mesh, planned.largest, device, layout.row_load, rows_memory_bytes(planned.largest, layout))
    try:
        comms.connect(link, activity.begin)
    except GroupError as error:
        raise RunError(str(error)) from error
    activity.begin("building the model and its groups")
    # Evaluation and sampling use the mailbox too.
    passes = (
        forward_plan(part.config, part.layout, num_micro_batches, part.config.train.micro_batch_size)
        for part in planned.parts
        for num_micro_batches in {1, max(1, evaluation_micro_batches(part.config))}
    )
    plans = (*(part.plan for part in planned.parts), *passes)
    return RankContext(device, mesh, comms, open_mailbox(plans, mesh.pp, device, exchange_seconds(config)), activity)
