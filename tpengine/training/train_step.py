"""A step: read the batch, run the verified plan, reduce, clip, update; loss and norm are returned as numbers.

The batch is a function of the step and this rank's place. Handlers connect the plan's actions to stages, transfers,
buckets and optimizer.

The host waits for the device once per step, at its end. So the device decides whether the update is applied: before the
optimizer's step all ranks have the same loss and norm, and if one of them is not finite, or the batch is not usable,
the optimizer changes nothing.

Weights that replicas own slices of (ZeRO) come and go while a plan runs. A compute action starts its gathers before it
computes, and frees behind it (plan/residency.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from tpkernels.exchange.pending import Work
from tpkernels.ops.clip import Judged, judged

from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.data_parallel.weight_buckets import WeightBuckets
from tpengine.distributed.agreement import all_gather_json
from tpengine.distributed.process import read_with_largest, to_device
from tpengine.layout.parameters import EMBEDDING
from tpengine.pipeline.executor import Executor, Handler, Trace
from tpengine.pipeline.preload import must_preload, preload
from tpengine.pipeline.stage import RankPipeline
from tpengine.plan import Action, Kind
from tpengine.plan.actions import COMPUTE
from tpengine.training.clipping import clip_
from tpengine.training.expert_loads import ExpertLoads
from tpengine.training.gradient_norm import GradientNorm
from tpengine.training.objective import Objective, resolved
from tpengine.training.planned_run import RunError
from tpengine.training.samples import SamplePosition
from tpengine.training.spikes import Limits, StepResult
from tpengine.training.state_check import note_frozen
from tpengine.training.step_batch import READING, BatchReader
from tpengine.training.step_loss import TrainingBatch
from tpengine.training.train_state import TrainState

# Of a rank whose samples are not there yet, beside the number that says so.
_NO_REPORT = torch.zeros(3, dtype=torch.int64)


class WeightMoves:
    """Gathers and frees of one rank.

    Args:
        sliced: the weights; None where every replica holds all of them, and plans neither gather nor free.
        on_start: called with each gather inside a compute action at the moment it starts (for the trace).
        on_change: called when weights have been gathered or freed: what was made of them before is of no use.
    """

    def __init__(
        self,
        sliced: WeightBuckets | None,
        on_start: Callable[[Action], None],
        on_change: Callable[[], None],
    ) -> None:
        self._sliced, self._on_start, self._on_change = sliced, on_start, on_change

    def around(self, handlers: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        """Return a plan's handlers, with gathers and frees as the plan has them."""
        if self._sliced is None:
            return dict(handlers)
        computing = {kind: self._moving(handler) for kind, handler in handlers.items() if kind in COMPUTE}
        return {**handlers, **computing, Kind.GATHER: self._gather, Kind.FREE: self._free}

    def waiting(self, wait_for_transfer: Callable[[Action], None]) -> Handler:
        """Return the handler of a WAIT that lists transfers and gathers."""

        def wait(action: Action) -> None:
            for started in action.subs:
                if started.kind is Kind.GATHER:
                    self.wait(self._bucket(started))
                else:
                    wait_for_transfer(started)

        return wait

    def wait(self, bucket: int) -> Work:
        """Wait until a bucket's weights are whole; return the gather."""
        work = self.weights.wait(bucket)
        self._on_change()
        return work

    def is_complete(self, bucket: int) -> bool:
        """Return whether `wait` would return at once."""
        return self.weights.is_complete(bucket)

    @property
    def weights(self) -> WeightBuckets:
        """The weights of a plan that gathers."""
        assert self._sliced is not None, "a plan whose weights are whole gathers none"
        return self._sliced

    def _moving(self, handler: Handler) -> Handler:
        def handle(action: Action) -> None:
            for sub in action.subs:
                if sub.kind is Kind.GATHER:
                    self._on_start(sub)
                    self._gather(sub)
            handler(action)
            for sub in action.subs:
                if sub.kind is Kind.FREE:
                    self._free(sub)

        return handle

    def _gather(self, action: Action) -> None:
        bucket = self._bucket(action)
        self.weights.check_owned(bucket)
        self.weights.gather(bucket)

    def _free(self, action: Action) -> None:
        self.weights.free(self._bucket(action))
        self._on_change()

    def _bucket(self, action: Action) -> int:
        assert action.index is not None
        return action.index


class Probe(Protocol):
    """Looks at the gradients of a step that is computed again; see TrainStep.compute_again."""

    def before_sum(self, bucket: int) -> None:
        """Look at a bucket that the current micro-batch has completed, before it is summed over ranks."""

    def after_backward(self) -> None:
        """Look at the buckets that are not summed yet, after a micro-batch has been added."""


class TrainStep:
    """Runs the steps of a phase.

    Args:
        state: what the steps change; it is in that phase.
        rate: returns the learning rate of a step.
        position: returns where the run is in its samples before a step.
        trace: records what the executor runs; None records nothing.
        objective: resolved; default that of a run without its own.

    Attributes:
        state: as given.
        reader: reads a step's micro-batches.
        batch: the micro-batches of the current step, and their losses.
        stages: this rank's chunks at run time, by number.
        pipeline: runs the stages and their transfers.
        moves: gathers and frees the weights where replicas own slices of them (ZeRO).
        executor: runs the plan's actions.
        norm: computes the gradient's norm.
        squares: sums of squares of the same gradient, by the place of each piece.
        loads: what the routers of the current step have chosen; None of a model without experts.
        limits: what loss and norm of the current step may be at most.
        waited_seconds: how long the host waited for the stages beside it in the current step.
        preloads: whether the next step first computes once without transfers, to load its kernels (pipeline/preload).
    """

    def __init__(
        self,
        state: TrainState,
        rate: Callable[[int], float],
        position: Callable[[int], SamplePosition],
        trace: Trace | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.state, self._rate, self._lr = state, rate, 0.0
        part, rank, model = state.part, state.rank, state.model
        config, device, at = part.config, rank.device, rank.mesh.at.pp
        # The batch: read on the stages that use it.
        ends = part.layout.ranks[0], part.layout.ranks[-1]
        objective = resolved(objective, config.train)
        self.reader = BatchReader(
            config, part.corpus.train, rank.mesh, ends, device, position, part.phase.end_step, objective
        )
        self.batch = TrainingBatch(config, rank.mesh, rank.comms.tp, model, device, objective)
        # The plan: stages, transfers, gathered weights, and who runs them.
        self.stages = state.stages(self.batch)
        self.pipeline = RankPipeline(
            *(part.plan, at, self.stages, rank.mesh.pp, device, rank.mailbox),
            halves=state.halves,
            backward=rank.mesh.pp_backward,
        )
        self.waited_seconds = 0.0
        self.moves = WeightMoves(state.sliced, self._mark, model.release)
        self.loads = ExpertLoads.of(state)
        self.executor = Executor(dist.get_rank(), self._handlers(), trace, rank.activity)
        self.executor.check(part.plan.actions[at])
        # A phase has shapes of its own, and so kernels of its own.
        self.preloads = must_preload(rank.mesh.pp)
        # So have rows at their exact number, which buffers keep away until some have no room.
        self._preloads_exact_rows = self.preloads and self.loads is not None and self.loads.buffers is not None
        # Preparing weights costs memory for two more copies of all matrices. It saves most over tp, where shards are
        # multiplied as they arrive. Without tp it saves some 2 % of a step: in a pipeline not worth the memory.
        # Exact mode must always multiply by prepared weights: other layouts give other bits. Weights that come and go
        # (ZeRO) are prepared, if at all, by the layers themselves.
        shape, is_exact = rank.mesh.shape, config.train.reduction == "exact"
        self._prepares_weights = (is_exact or shape.tp > 1 or shape.pp == 1) and state.sliced is None
        # The end: norm, and what follows from it.
        parts = None if state.sliced is None else state.sliced.parts
        # Where replicas differ, by slices or by experts, all of them add up their squares; what they share counts once.
        self._replicas_differ = state.sliced is not None or shape.ep > shape.tp
        counted = {
            name: gradient
            for name, gradient in state.gradients.of.items()
            if not self._replicas_differ or state.copy_of(name)[0] == 0
        }
        self.norm = GradientNorm(model, counted, parts, exact=is_exact, device=device)
        self.squares = torch.zeros(self.norm.num_places, dtype=torch.float64, device=device)
        self.limits = Limits()
        self._probe: Probe | None = None
        self._metric_names, self._metrics = tuple(objective.metrics), torch.zeros(0, dtype=torch.float64, device=device)
        self._judged = torch.zeros(len(Judged), dtype=torch.float64, device=device)

    def close(self) -> None:
        """End the thread that reads ahead; a step that follows on this reads again."""
        self.reader.close()

    def run(self, step: int, tell: Callable[[], Sequence[float]] | None = None) -> StepResult:
        """Run one step of the plan.

        Args:
            step: 0-based number, of this phase; decides the data and the learning rate.
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
        state, activity = self.state, self.state.rank.activity
        assert state.part.phase.first_step <= step, "enter the step's phase first"
        if state.frozen and not state.frozen_hashes:
            note_frozen(state)
        # Read the batch, and tell all ranks about it, if they have not heard of it at the end of the step before.
        activity.step = step
        activity.begin(READING)
        self._await_samples(step)
        activity.begin("counting its targets")
        self.batch.step, self.batch.scale = self.reader.read(step), state.loss_scale.value
        self.limits = state.spikes.limits(step, state.part.phase.number)
        self._lr, self.waited_seconds = self._rate(step), 0.0
        # Run the plan, by the handlers of `_handlers`: F, B and W compute micro-batches, and start to reduce a bucket
        # once it is complete; WAIT ends that; CLIP judges the loss and the norm of all ranks, and scales the gradients;
        # STEP updates the weights, unless the step was judged to be skipped.
        self._run_plan(step)
        # Wait for the device, and compare the outcome over all ranks.
        activity.begin("ending the step with all ranks")
        result = self._result(step, tell)
        if self.loads is not None and self.loads.must_compute_again(result.loads):
            # The device has skipped the update: rows of experts were lost. Now with all of them.
            self.preloads, self._preloads_exact_rows = self._preloads_exact_rows, False
            self._compute_again(step)
            activity.begin("ending the step with all ranks")
            result = replace(self._result(step, tell), is_second=True)
        # Count: updates, the loss scale, the window by which the next steps are judged.
        self._count(step, result)
        return result

    @property
    def grad_norm(self) -> Tensor:
        """Return the gradient norm of the current step, before clipping."""
        return self._judged[Judged.NORM]

    def compute_again(self, step: int, probe: Probe) -> None:
        """Compute the step that `run` has just skipped once more, without its update; collective.

        Args:
            step: number of that step.
            probe: looks at what the micro-batches add.
        """
        self._probe = probe
        try:
            self._compute_again(step)
        finally:
            self._probe = None

    def _compute_again(self, step: int) -> None:
        """Run the plan once more; a trace has the first time."""
        trace, self.executor.trace = self.executor.trace, None
        try:
            self._run_plan(step)
        finally:
            self.executor.trace = trace

    def _await_samples(self, step: int) -> None:
        """Wait for the samples of a step; in a trace this is a wait of the rank's first F."""
        trace = self.executor.trace
        begin = None if trace is None else trace.now()
        was_there = self.reader.wait(step)
        if trace is not None and self.reader.needs_samples:
            first = next(action for action in self._actions if action.kind is Kind.F)
            trace.waited(first, begin, was_there)

    @property
    def _actions(self) -> Sequence[Action]:
        return self.state.part.plan.actions[self.state.rank.mesh.at.pp]

    def _run_plan(self, step: int) -> None:
        model, train = self.state.model, self.state.part.config.train
        self._begin()
        if self._prepares_weights:
            # Every micro-batch multiplies by the same weights.
            model.prepare(train.micro_batch_size * train.seq_len)
        model.position.step, model.position.training = step, True
        try:
            if self.preloads:
                self._preload()
            self.executor.run(self._actions)
        finally:
            model.position.training = False
            if self.loads is not None:
                self.loads.end()

    def _begin(self) -> None:
        self.batch.clear()
        self.state.gradients.begin()
        if self.loads is not None:
            self.loads.begin(self.batch.scale)

    def _preload(self) -> None:
        rank = self.state.rank
        self.preloads, trace = False, self.executor.trace
        rank.activity.begin("loading the kernels of a step")
        self.executor.trace = None
        preload(self.state.part.plan, rank.mesh.at.pp, self.stages, self.executor.handlers, rank.device)
        self.executor.trace = trace
        self._begin()

    def _handlers(self) -> dict[Kind, Handler]:
        """Return what each kind of action does, in the order of a step."""
        pipeline = self.pipeline
        computing = {
            **pipeline.handlers(),
            Kind.B: self._reducing(pipeline.backward),
            Kind.W: self._reducing(pipeline.weight_half),
        }
        loads = self.loads
        counting: dict[Kind, Handler] = {} if loads is None else {Kind.REDUCE: lambda _: loads.start_sum()}
        return {
            **self.moves.around(computing),
            # Gradients are reduced inside the backwards that complete them; what routers counted, here.
            **counting,
            Kind.WAIT: self._wait,
            Kind.TIE_REDUCE: lambda _: self._sum_tied_embeddings(),
            Kind.CLIP: lambda _: self._clip(),
            Kind.STEP: lambda _: self._update(),
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

            self.state.buckets.arm(list(starts), on_start)
            handler(action)
            self.state.buckets.disarm()
            if self._probe is not None:
                self._probe.after_backward()
            self.state.gradients.after_backward(*action.piece, reduced=starts.keys())

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

    def _of_buckets(self, started: Action) -> GradientBuckets | WeightMoves | ExpertLoads:
        if started.kind is not Kind.REDUCE:
            return self.moves
        return self.loads if self.loads is not None and self.loads.index == started.index else self.state.buckets

    def _sum_tied_embeddings(self) -> None:
        for name, piece in self.state.model.pieces.items():
            if piece.spec.name == EMBEDDING and name in self.state.gradients.of:
                self.state.rank.comms.ends.all_reduce_(self.state.gradients.of[name])

    def _clip(self) -> None:
        self.state.gradients.finish()
        # Sum the squares. The loss takes the last place: one sum brings both, and every stage sees a loss that is NaN.
        figures = self.norm.own()
        num = len(self._metric_names)
        if num:
            figures = torch.cat([figures.new_zeros(num), figures])
        if self.state.model.is_last:
            loss, metrics = self.batch.sum_over_replicas(self.state.rank.comms.dp)
            if self.state.rank.mesh.at.tp == 0 and (not self._replicas_differ or self.state.rank.mesh.at.dp == 0):
                figures[-1] = loss
                if num:
                    figures[:num] = metrics
        self.state.rank.comms.tp.all_reduce_(figures)
        self.state.rank.comms.pp.all_reduce_(figures)
        if self._replicas_differ:
            self.state.rank.comms.dp.all_reduce_(figures)
        self._metrics, figures = figures[:num], figures[num:]
        loss = figures[-1] if self.loads is None else figures[-1] + self.loads.sum_over_stages()
        # Norm, the decision to skip, and the scaling of the gradients.
        self.squares, clip_norm = self.norm.squares(figures[:-1]), self.state.part.config.optim.clip_norm
        # A finite norm means finite second moments: the norm contains the square of the largest element.
        self._judged = judged(
            self.squares,
            loss,
            self.batch.step.usable,
            most_loss=self.limits.loss,
            most_norm=self.limits.grad_norm,
            clip_norm=clip_norm,
            loss_scale=self.batch.scale,
        )
        if self._probe is not None:
            self._judged[Judged.SKIP] = 1
        if self.loads is not None and self.loads.buffers is not None:
            self._judged[Judged.SKIP] = torch.maximum(self._judged[Judged.SKIP], self.loads.is_incomplete)
        if not self.state.optimizer.reads_factor:
            clip_(self.state.gradients.summed, self.grad_norm, clip_norm, self.batch.scale)

    def _update(self) -> None:
        self.state.model.release()
        factor = self._judged[Judged.FACTOR] if self.state.optimizer.reads_factor else None
        self.state.optimizer.step(self._lr, self.state.num_updates + 1, self._judged[Judged.SKIP], factor)
        if self.loads is not None:
            self.loads.move_biases(self._judged[Judged.SKIP])

    def _result(self, step: int, tell: Callable[[], Sequence[float]] | None) -> StepResult:
        # One wait for the device, together with the maximum over all ranks.
        skip = self._judged[Judged.SKIP :][:1]
        # And with this rank's report on the next step, so that nobody waits for another when it begins.
        ahead = self.reader.report_ahead(step + 1)
        figures = list(tell()) if tell is not None else []
        told = torch.tensor([float(ahead is None), *figures], dtype=torch.float64)
        report = to_device(_NO_REPORT if ahead is None else ahead, self.state.rank.device)
        shared = torch.cat([skip, -skip, self.batch.compared(), to_device(told, self.state.rank.device)])
        parts = [self._judged, *([self._metrics] if self._metric_names else [])]
        if self.loads is not None:
            parts.append(self.loads.figures())
        own = torch.cat(parts) if len(parts) > 1 else self._judged
        found, (some_skip, all_skip, *largest), reports = read_with_largest(own, shared, report)
        (loss, norm, skipped, spiked, usable, _), found = found[: len(Judged)], found[len(Judged) :]
        metrics, of_experts = found[: len(self._metric_names)], found[len(self._metric_names) :]
        compared, (is_missing, *largest) = largest[: self.batch.num_compared], largest[self.batch.num_compared :]
        if not is_missing:
            self.reader.hear(reports)
        # The device is done: raise if one of its kernels gave up waiting for a peer.
        self.state.rank.comms.check()
        if not usable:
            raise RunError(self.batch.step.refusal(step, all_gather_json(self.batch.step.error)))
        if compared and (problem := self.batch.problem(compared)):
            errors = [error for error in all_gather_json(self.batch.error) if error]
            raise RunError(f"{errors[0] if errors else problem} (in step {step + 1})")
        if some_skip != -all_skip:
            raise RunError(
                f"all ranks must agree whether a step is applied: in step {step + 1} rank {dist.get_rank()} has loss "
                f"{loss}, gradient norm {norm}, other ranks do not: replicas have drifted apart: --resume from the "
                "newest checkpoint, and check this machine's memory and network"
            )
        # A loss that is not finite itself was computed without the scale.
        overflowed = bool(skipped) and not spiked and math.isfinite(loss) and self.state.loss_scale.can_fall
        scale = self.batch.scale if self.state.part.config.train.dtype == "float16" else None
        named = dict(zip(self._metric_names, metrics, strict=True))
        loads = {} if self.loads is None else self.loads.named(of_experts)
        return StepResult(
            loss, norm, self._lr, bool(skipped), bool(spiked), overflowed, scale, tuple(largest), named, loads
        )

    def _count(self, step: int, result: StepResult) -> None:
        state = self.state
        state.num_updates += not result.skipped
        if result.overflowed:
            state.loss_scale.after_overflow()
        elif not result.skipped:
            state.loss_scale.after_update()
        # A step that will be computed again, or never, leaves no trace.
        if not result.spiked or (state.spikes.rule is not None and state.spikes.rule.action == "skip"):
            state.spikes.add(step, result.loss, result.grad_norm)
