"""The trainer: builds every part from a configuration and runs steps. It is the only file that knows all parts.

Data flow of a step: the batch is a function of the step and this rank's place; the executor runs the verified plan;
handlers connect its actions to stages, transfers, buckets and optimizer; loss and norm are returned as numbers.

The host waits for the device once per step, at its end. So the device decides whether the update is applied: before the
optimizer's step all ranks have the same loss and norm, and if one of them is not finite, or the batch is not usable,
the optimizer changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from tpkernels.exchange.pending import Work
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.clip import Judged, judged

from tpengine.checkpoint.run.rollbacks import Rollback, left_out
from tpengine.config import Config, phases_of, spike_rule_of
from tpengine.data import Corpus, Position
from tpengine.data_parallel import GradientBuckets
from tpengine.distributed.groups import Communicators, exchange_seconds
from tpengine.distributed.mesh import Shape, build_mesh
from tpengine.distributed.messages import all_gather_json
from tpengine.distributed.process import link_device, read_with_largest, to_device
from tpengine.layers.gradient_sink import WeightHalves
from tpengine.layout.parameters import EMBEDDING, decays, kv_replicas
from tpengine.layout.step_plan import Layout, evaluation_micro_batches, forward_plan
from tpengine.observe.activity import Activity
from tpengine.pipeline.executor import Executor, Handler, Trace
from tpengine.pipeline.handlers import RankPipeline
from tpengine.pipeline.preload import connect, must_preload, preload
from tpengine.pipeline.stage import Batch, Stage
from tpengine.pipeline.transfers import open_mailbox
from tpengine.plan import Action, Kind, Plan, Recompute, Residency
from tpengine.training.assembly import assemble
from tpengine.training.phase_parts import PhasePart, difference_of_ranks, largest, planned
from tpengine.training.step_batch import READING, BatchReader, TrainingBatch
from tpengine.training.update.gradient_norm import GradientNorm
from tpengine.training.update.learning_rate import rate_of_step
from tpengine.training.update.loss_scale import LossScale
from tpengine.training.update.optimizer import AdamW, clip_
from tpengine.training.update.spikes import Limits, SpikeWindow
from tpengine.training.update.step_result import StepResult
from tpengine.training.weight_moves import WeightMoves


class RunError(RuntimeError):
    """An error that the user can fix and only training can find; raised on all ranks alike, with rule and remedy."""


class Probe(Protocol):
    """Looks at the gradients of a step that is computed again; see Trainer.compute_again."""

    def before_sum(self, bucket: int) -> None:
        """Look at a bucket that the current micro-batch has completed, before it is summed over ranks."""

    def after_backward(self) -> None:
        """Look at the buckets that are not summed yet, after a micro-batch has been added."""


class Trainer:
    """One rank of a training run.

    Args:
        config: validated configuration (config.validate), equal on all ranks.
        corpus: the text, equal on all ranks.
        device: where this rank computes.
        trace: records what the executor runs; None records nothing.
        activity: told what this rank does; None if nothing watches it.
        residency: what was decided where the configuration leaves it open, the same on all ranks; as layout_of.
        draws: draw the initial weights. Without, they hold anything but in padding, until somebody loads them.
        corpora: the text of each phase (data.open_corpora); default `corpus` in all of them.
        packs_gradients: as layout_of; default on CUDA.

    Attributes:
        run_config: the configuration without what phases change.
        phases, parts: of the run, with their plans.
        config, layout, plan, corpus: of the current phase.
        phase: the current one; `training.phase_parts.enter_phase_of` changes it.
        model: this rank's shards of this rank's chunks.
        stages: the chunks at run time, by their number.
        pipeline: runs the stages and their transfers.
        mesh, comms, gradients, optimizer: see their types.
        sliced, moves: the weights where replicas own slices of them (ZeRO), else None; what gathers and frees them.
        reader: reads a step's micro-batches.
        rollbacks: of the run so far; their samples are left out. `go_around` sets them.
        batch: the micro-batches of the current step, and their losses.
        norm: computes the gradient's norm.
        squares: sums of squares of the same gradient, by the place of each piece.
        loss_scale: of the next step.
        spikes: loss and norm of the last steps.
        limits: what loss and norm of the current step may be at most.
        waited_seconds: how long the host waited for the stages beside it in the current step.
        num_updates: number of updates applied, including those before the checkpoint that the run continues.
        mailbox: carries the pipeline's messages between CPU ranks of one host; None if the process group does.
        preloads: whether the next step first computes once without transfers, to load its kernels (pipeline/preload).

    Raises:
        ValueError: the plan fails verification (a bug of a schedule, named).
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
        residency: Residency | None = None,
        draws: bool = True,
        corpora: Sequence[Corpus] | None = None,
        packs_gradients: bool | None = None,
    ) -> None:
        self.run_config, self.device = config, device
        self.activity = activity or Activity()
        # Plan: who holds what, and the order of actions, in every phase.
        self.phases = phases_of(config)
        packs = device.type == "cuda" if packs_gradients is None else packs_gradients
        self.parts = planned(self.phases, corpus, corpora, residency, packs)
        self.config, self.layout, self.plan, self.corpus = self._take(self.parts[0])
        # Compare first: ranks that differ in layout could not make the groups below.
        if differing := difference_of_ranks(self.parts, device):
            raise RunError(differing)
        # Connect: the mesh, its groups and their communicators.
        shape = Shape.of(config.parallel)
        ends = (self.layout.ranks[0], self.layout.ranks[-1]) if config.model.tie_embeddings else None
        self.mesh = build_mesh(shape, link_device(device).type, kv_replicas(config.model, shape.tp), ends)
        self.comms = Communicators.of(self.mesh, largest(self.phases), device)
        self.comms.connect(link_device(device))

        self.num_updates = 0
        self.loss_scale = LossScale(config.train.dtype)
        self.spikes, self.limits = SpikeWindow(spike_rule_of(config.train.spike)), Limits()
        self.go_around(())
        self._probe: Probe | None = None
        self._trace = trace
        self.build()
        if draws:
            self.draw_weights()
        else:
            self._clear_padding()
        # State of the current step.
        self._judged = torch.zeros(len(Judged), dtype=torch.float64, device=device)
        self._lr = self.waited_seconds = 0.0
        # Evaluation and sampling use the mailbox too.
        passes = (
            forward_plan(part.config, part.layout, num_micro_batches, part.config.train.micro_batch_size)
            for part in self.parts
            for num_micro_batches in {1, max(1, evaluation_micro_batches(part.config))}
        )
        plans = (*(part.plan for part in self.parts), *passes)
        self.mailbox = open_mailbox(plans, self.mesh.pp, device, exchange_seconds(config))
        self.run_phase()
        if self.preloads:
            connect(self.plan, self.mesh.at.pp, self.mesh.pp, link_device(device))

    def _take(self, part: PhasePart) -> tuple[Config, Layout, Plan, Corpus]:
        """Make a phase the current one."""
        self.phase = part.phase
        return part.config, part.layout, part.plan, part.corpus

    def build(self) -> None:
        """Build the current phase's model, which holds anything, its gradient buckets, optimizer and norm."""
        config, device = self.config, self.device
        self._halves = WeightHalves()
        assembled = assemble(config, self.layout, self.mesh, self.comms, device, self._halves)
        self.model, self.gradients, self.sliced = assembled
        self.buckets = self.gradients.buckets
        self.optimizer = AdamW(
            self.weights,
            self.gradients.of,
            [name for name, piece in self.model.pieces.items() if decays(config.model, piece.spec)],
            config.optim,
        )
        # Preparing weights costs memory for two more copies of all matrices. It saves most over tp, where shards are
        # multiplied as they arrive. Without tp it saves some 2 % of a step: in a pipeline not worth the memory.
        # Exact mode must always multiply by prepared weights: other layouts give other bits. Weights that come and go
        # (ZeRO) are prepared, if at all, by the layers themselves.
        shape = self.mesh.shape
        prepares = config.train.reduction == "exact" or shape.tp > 1 or shape.pp == 1
        self._prepares_weights = prepares and self.sliced is None
        self.norm = GradientNorm(
            self.model,
            self.gradients.of,
            None if self.sliced is None else self.sliced.parts,
            exact=config.train.reduction == "exact",
            device=device,
        )
        self.squares = torch.zeros(self.norm.num_places, dtype=torch.float64, device=device)

    def enter(self, number: int) -> None:
        """Make another phase the current one: its plan, its batch, its data; weights and moments stay.

        Args:
            number: of a phase with the same cut of the model (layout/phase_layouts.cut_of), or `build` has followed
                and somebody loads what the model held.
        """
        self.model.release()
        self.close()
        self.config, self.layout, self.plan, self.corpus = self._take(self.parts[number])
        self.optimizer.use(self.config.optim)

    def run_phase(self) -> None:
        """Make what runs the steps of the current phase: batch, stages, transfers and executor."""
        config, device, at = self.config, self.device, self.mesh.at.pp
        ends = self.layout.ranks[0], self.layout.ranks[-1]
        self.reader = BatchReader(
            config, self.corpus.train, self.mesh, ends, device, self.position, self.phase.end_step
        )
        self.batch = TrainingBatch(config, self.mesh, self.comms.tp, self.model.position, device)
        self.stages = self.make_stages(self.batch)
        self.pipeline = RankPipeline(
            self.plan, at, self.stages, self.mesh.pp, device, self.mailbox, halves=self._halves
        )
        self.moves = WeightMoves(self.sliced, self._mark, self.model.release)
        self.executor = Executor(dist.get_rank(), self._handlers(), self._trace, self.activity)
        self.executor.check(self.plan.actions[at])
        # A phase has shapes of its own, and so kernels of its own.
        self.preloads = must_preload(self.mesh.pp)

    def close(self) -> None:
        """End the thread that reads ahead; a step that follows on this reads again."""
        self.reader.close()

    def position(self, step: int) -> Position:
        """Return where the run is in its samples before a step."""
        phase = self.phases.at(step)
        return Position(phase.order, phase.samples_before(step), self._left_out.get(phase.order, ()))

    def go_around(self, rollbacks: Sequence[Rollback]) -> None:
        """Leave out the samples of all rollbacks of the run, from the next step on."""
        self.rollbacks, self._left_out = tuple(rollbacks), left_out(rollbacks)

    def position_after(self, step: int) -> Position:
        """Return where the run is, in the order of samples of a step's phase, after that step."""
        return self.position(step).after(self.phases.at(step).samples_per_step)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return rate_of_step(self.phases, step)

    @property
    def grad_norm(self) -> Tensor:
        """Return the gradient norm of the current step, before clipping."""
        return self._judged[Judged.NORM]

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What this rank's optimizer updates, by piece: whole weights, or with ZeRO its own elements, one dim."""
        return self.model.held if self.sliced is None else self.sliced.of

    def draw_weights(self) -> None:
        """Draw the initial weights, as train.seed says. On a CPU 1 GB takes a core some 10 s."""
        train = self.config.train
        self.model.initialise(train.seed, self.store, accumulation_dtype(getattr(torch, train.dtype)))

    def restart(self) -> None:
        """Be at step 0, but for the weights."""
        self.num_updates, self.loss_scale = 0, LossScale(self.config.train.dtype)
        self.spikes.restore(None)
        self.optimizer.clear()

    def _clear_padding(self) -> None:
        """Make the rows zero that no file and no checkpoint has."""
        for name in self.weights:
            if self.model.pieces[name].spec.valid_rows is not None:
                self.optimizer.set(name, torch.zeros((), device=self.device))

    def store(self, name: str, values: Tensor) -> None:
        """Take a piece's initial values: whole, or what this replica owns of them."""
        if self.sliced is None:
            self.optimizer.set(name, values)
        elif name in self.sliced.parts:
            self.optimizer.set(name, values.view(-1)[self.sliced.parts[name].in_tensor])

    def make_stages(self, batch: Batch) -> dict[int, Stage]:
        """Return this rank's chunks at run time, by number.

        Args:
            batch: the micro-batches that they run.
        """
        last = len(self.plan.chunks) - 1
        return {
            chunk: Stage(
                partial(self.model, seq=self.config.train.seq_len, chunk=number),
                batch,
                is_first=chunk == 0,
                is_last=chunk == last,
                recompute=self.plan.chunks[chunk].recompute is Recompute.FULL,
            )
            for number, chunk in enumerate(self.plan.chunks_of(self.mesh.at.pp))
        }

    def train_step(self, step: int, tell: Callable[[], Sequence[float]] | None = None) -> StepResult:
        """Run one step of the plan.

        Args:
            step: 0-based; decides the data and the learning rate.
            tell: returns figures of this rank, none of them NaN; called when the step's work has been issued.

        Returns:
            Loss, gradient norm and learning rate; whether the update was skipped; the largest value over ranks of each
            figure.

        Raises:
            RunError: on all ranks alike. No target of the global step is valid, a text cannot be read, a token lies
                outside the vocabulary, or ranks of a replica have read different tokens: then nothing was updated. Or
                ranks do not agree whether the step is finite: those that found it finite have updated their weights,
                so that the run can only go on from a checkpoint.

        Order: one wait for the device, at the end.
        """
        assert self.phases.at(step) is self.phase or step >= self.phase.end_step, "enter the step's phase first"
        # Read the batch, and tell all ranks about it.
        self.activity.step = step
        self.activity.begin(READING)
        self._await_samples(step)
        self.activity.begin("counting its targets")
        self.batch.step, self.batch.scale = self.reader.read(step), self.loss_scale.value
        self.limits = self.spikes.limits(step, self.phase.number)
        # Run the plan: forward, backward, reductions, clipping and update.
        self._lr, self.waited_seconds = self.rate(step), 0.0
        self._run_plan(step)
        # Wait for the device, and compare the outcome over all ranks.
        self.activity.begin("ending the step with all ranks")
        return self._result(step, tell)

    def _await_samples(self, step: int) -> None:
        """Wait for the samples of a step; in a trace this is a wait of the rank's first F."""
        trace = self.executor.trace
        begin = None if trace is None else trace.now()
        was_there = self.reader.wait(step)
        if trace is not None and self.reader.needs_samples:
            actions = self.plan.actions[self.mesh.at.pp]
            trace.waited(next(action for action in actions if action.kind is Kind.F), begin, was_there)

    def compute_again(self, step: int, probe: Probe) -> None:
        """Compute the step that `train_step` has just skipped once more, without its update; collective.

        Args:
            step: number of that step.
            probe: looks at what the micro-batches add.
        """
        self._probe, trace = probe, self.executor.trace
        self.executor.trace = None
        try:
            self._run_plan(step)
        finally:
            self._probe, self.executor.trace = None, trace

    def _run_plan(self, step: int) -> None:
        self._begin()
        if self._prepares_weights:
            # Every micro-batch multiplies by the same weights.
            self.model.prepare(self.config.train.micro_batch_size * self.config.train.seq_len)
        self.model.position.step, self.model.position.training = step, True
        try:
            if self.preloads:
                self._preload()
            self.executor.run(self.plan.actions[self.mesh.at.pp])
        finally:
            self.model.position.training = False

    def _begin(self) -> None:
        self.batch.losses.zero_()
        self.gradients.begin()

    def _preload(self) -> None:
        self.preloads, trace = False, self.executor.trace
        self.activity.begin("loading the kernels of a step")
        self.executor.trace = None
        preload(self.plan, self.mesh.at.pp, self.stages, self.executor.handlers, self.device)
        self.executor.trace = trace
        self._begin()

    def _handlers(self) -> dict[Kind, Handler]:
        pipeline = self.pipeline
        computing = {
            **pipeline.handlers(),
            Kind.B: self._reducing(pipeline.backward),
            Kind.W: self._reducing(pipeline.weight_half),
        }
        return {
            **self.moves.around(computing),
            Kind.WAIT: self._wait,
            Kind.TIE_REDUCE: lambda _: self._sum_tied_embeddings(),
            Kind.CLIP: lambda _: self._clip(),
            Kind.STEP: lambda _: self._step(),
        }

    def _mark(self, started: Action) -> None:
        if self.executor.trace is not None:
            self.executor.trace.mark(started)

    def _reducing(self, handler: Handler) -> Handler:
        """Return a handler that also starts the action's reductions, in the plan's order, as buckets are completed."""

        def handle(action: Action) -> None:
            starts = {sub.index: sub for sub in action.reduces if sub.index is not None}

            def on_start(index: int) -> None:
                if self._probe is not None:
                    self._probe.before_sum(index)
                self._mark(starts[index])

            self.buckets.arm(list(starts), on_start)
            handler(action)
            self.buckets.disarm()
            if self._probe is not None:
                self._probe.after_backward()
            self.gradients.after_backward(*action.piece, reduced=starts.keys())

        return handle

    def _wait(self, action: Action) -> None:
        trace = self.executor.trace
        for started in action.subs:
            if trace is None:
                self._wait_for(started)
                continue
            begin, was_complete = trace.now(), self._is_complete(started)
            work = self._wait_for(started)
            trace.waited(started, begin, was_complete, None if work is None else work.ended_ns())

    def _wait_for(self, started: Action) -> Work | None:
        """Wait for a transfer, a reduction or a gather; return the work of the latter two, or None."""
        if started.index is None:
            begin = time.perf_counter()
            self.pipeline.wait_for(started)
            self.waited_seconds += time.perf_counter() - begin
            return None
        return self._of_buckets(started).wait(started.index)

    def _is_complete(self, started: Action) -> bool:
        if started.index is None:
            return self.pipeline.is_complete(started)
        return self._of_buckets(started).is_complete(started.index)

    def _of_buckets(self, started: Action) -> GradientBuckets | WeightMoves:
        return self.buckets if started.kind is Kind.REDUCE else self.moves

    def _sum_tied_embeddings(self) -> None:
        for name, piece in self.model.pieces.items():
            if piece.spec.name == EMBEDDING and name in self.gradients.of:
                self.comms.ends.all_reduce_(self.gradients.of[name])

    def _step(self) -> None:
        self.model.release()
        factor = self._judged[Judged.FACTOR] if self.optimizer.reads_factor else None
        self.optimizer.step(self._lr, self.num_updates + 1, self._judged[Judged.SKIP], factor)

    def _clip(self) -> None:
        self.gradients.finish()
        # Sum the squares. The loss takes the last place: one sum brings both, and every stage sees a loss that is NaN.
        figures = self.norm.own()
        if self.model.is_last:
            loss = self.comms.dp.all_reduce_(self.batch.losses).sum() * self.batch.step.loss_scale
            if self.mesh.at.tp == 0 and (self.sliced is None or self.mesh.at.dp == 0):
                figures[-1] = loss
        self.comms.tp.all_reduce_(figures)
        self.comms.pp.all_reduce_(figures)
        if self.sliced is not None:
            self.comms.dp.all_reduce_(figures)
        # Norm, the decision to skip, and the scaling of the gradients.
        self.squares, clip_norm = self.norm.squares(figures[:-1]), self.config.optim.clip_norm
        # A finite norm means finite second moments: the norm contains the square of the largest element.
        self._judged = judged(
            self.squares,
            figures[-1],
            self.batch.step.usable,
            most_loss=self.limits.loss,
            most_norm=self.limits.grad_norm,
            clip_norm=clip_norm,
            loss_scale=self.batch.scale,
        )
        if self._probe is not None:
            self._judged[Judged.SKIP] = 1
        if not self.optimizer.reads_factor:
            clip_(self.gradients.summed, self.grad_norm, clip_norm, self.batch.scale)

    def _result(self, step: int, tell: Callable[[], Sequence[float]] | None) -> StepResult:
        # One wait for the device, together with the maximum over all ranks.
        skip = self._judged[Judged.SKIP :][:1]
        told = torch.tensor(list(tell()) if tell is not None else [], dtype=torch.float64)
        shared = torch.cat([skip, -skip, to_device(told, self.device)])
        found, (some_skip, all_skip, *largest) = read_with_largest(self._judged, shared)
        loss, norm, skipped, spiked, usable, _ = found
        # The device is done: raise if one of its kernels gave up waiting for a peer.
        self.comms.tp.check()
        if not usable:
            raise RunError(self.batch.step.refusal(step, all_gather_json(self.batch.step.error)))
        if some_skip != -all_skip:
            raise RunError(
                f"all ranks must agree whether a step is applied: in step {step + 1} rank {dist.get_rank()} has loss "
                f"{loss}, gradient norm {norm}, other ranks do not: replicas have drifted apart: --resume from the "
                "newest checkpoint, and check this machine's memory and network"
            )
        self.num_updates += not skipped
        # A loss that is not finite itself was computed without the scale.
        overflowed = bool(skipped) and not spiked and math.isfinite(loss) and self.loss_scale.can_fall
        if overflowed:
            self.loss_scale.after_overflow()
        elif not skipped:
            self.loss_scale.after_update()
        # A step that will be computed again, or never, leaves no trace.
        if not spiked or (self.spikes.rule is not None and self.spikes.rule.action == "skip"):
            self.spikes.add(step, loss, norm)
        scale = self.batch.scale if self.config.train.dtype == "float16" else None
        return StepResult(loss, norm, self._lr, bool(skipped), bool(spiked), overflowed, scale, tuple(largest))
