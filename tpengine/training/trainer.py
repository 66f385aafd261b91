"""The trainer: builds every part from a configuration and runs steps. The only file that knows all parts.

Data flow of a step: the batch is a function of the step and this rank's place; the executor runs the verified plan;
handlers connect its actions to stage, transfers, buckets and optimizer; the loss and the norm come back as numbers.

The host waits for the device once a step, at its end. Whether the update is applied is therefore decided on the device:
loss and norm are the same numbers on all ranks before the optimizer's step, and where one of them is not finite, or the
batch is not usable, the optimizer leaves everything as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from tpengine.config import Config, decay_steps_of
from tpengine.config.toml import dump_toml
from tpengine.data import Corpus
from tpengine.distributed.groups import Communicators, exchange_seconds
from tpengine.distributed.mesh import Shape, build_mesh
from tpengine.distributed.messages import all_gather_json
from tpengine.distributed.process import differing_ranks, link_device, read_with_largest, to_device
from tpengine.layers.collectives import Work
from tpengine.layers.gradient_sink import WeightHalves
from tpengine.layout.parameters import EMBEDDING, kv_replicas, stage_specs
from tpengine.layout.step_plan import Layout, evaluation_micro_batches, forward_plan, layout_of, training_plan
from tpengine.observe.activity import Activity
from tpengine.pipeline.executor import Executor, Handler, Trace
from tpengine.pipeline.handlers import RankPipeline
from tpengine.pipeline.stage import Batch, Stage
from tpengine.pipeline.transfers import open_mailbox
from tpengine.plan import Action, Kind, Recompute
from tpengine.training.assembly import assemble
from tpengine.training.optimizer import AdamW, clip_, learning_rate, squared_norms
from tpengine.training.step_batch import BatchReader, StepBatch, TrainingBatch


class RunError(RuntimeError):
    """What a user can mend and only training can find; raised on all ranks alike: the rule, the values, the remedy."""


@dataclass(frozen=True)
class StepResult:
    """What a step measured, equal on all ranks.

    Attributes:
        loss: nats per valid target of the global step.
        grad_norm: of the global gradient, before clipping.
        lr: learning rate used.
        skipped: whether loss or norm are not finite: then nothing was updated, and the step counts as no update.
        largest: of the figures that ranks were asked for, over all of them.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False
    largest: tuple[float, ...] = ()


class Probe(Protocol):
    """Looks at the gradients of a step that is computed again; see Trainer.compute_again."""

    def before_sum(self, bucket: int) -> None:
        """A bucket holds what the micro-batch under way has added last, and is summed over ranks next."""

    def after_backward(self) -> None:
        """A micro-batch has been added to the buckets that are not summed yet."""


class Trainer:
    """One rank of a training run.

    Args:
        config: validated configuration (config.validate), equal on all ranks.
        corpus: the text, equal on all ranks.
        device: where this rank computes.
        trace: records what the executor runs; None records nothing.
        activity: told what this rank does; None where nobody watches.

    Attributes:
        model: this rank's chunks, in this rank's shards.
        stages, pipeline: the same at run time, by number of the chunk, and what drives them.
        plan, layout, mesh, comms, gradients, optimizer: see their types.
        batch: the micro-batches of the step under way, and their losses.
        grad_norm: of the step under way, before clipping.
        squares: of the same gradient, by the places of its pieces.
        num_updates: steps whose update has been applied, those of the run before a checkpoint too.
        mailbox: carries the pipeline's messages between CPU ranks of one host; None where the process group does.

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
    ) -> None:
        self.config, self.corpus, self.device = config, corpus, device
        self.activity = activity or Activity()
        self.layout: Layout = layout_of(config)
        self.plan = training_plan(config, self.layout)
        # Before any other group is made: ranks that differ in layout could not make one.
        self._check_same_run()
        shape = Shape.of(config.parallel)
        ends = (self.layout.ranks[0], self.layout.ranks[-1]) if config.model.tie_embeddings else None
        self.mesh = build_mesh(shape, link_device(device).type, kv_replicas(config.model, shape.tp), ends)
        self.comms = Communicators.of(self.mesh, config, device)
        self.comms.connect(link_device(device))

        halves = WeightHalves()
        self.model, self.gradients = assemble(config, self.layout, self.mesh, self.comms, device, halves)
        self.buckets = self.gradients.buckets
        self.optimizer = AdamW(
            self.model.held,
            self.gradients.of,
            [name for name, piece in self.model.pieces.items() if piece.spec.decays],
            config.optim,
        )
        self.model.initialise(config.train.seed, self.optimizer.masters)
        # Prepared copies are two more of all matrices. They pay most where shards are multiplied as they arrive; alone
        # they save some 2 % of a step, which a pipeline does without. The bits of exact mode are those of the copies.
        self._prepares_weights = config.train.reduction == "exact" or shape.tp > 1 or shape.pp == 1
        self._num_places, self._places = self._places_of_gradients()
        self._reader = BatchReader(
            config, corpus.train, self.mesh, (self.layout.ranks[0], self.layout.ranks[-1]), device
        )
        self.num_updates = 0
        self._probe: Probe | None = None
        self.batch = TrainingBatch(config, self.mesh, self.comms.tp, self.model.position, device)
        self.squares = torch.zeros(self._num_places, dtype=torch.float64, device=device)
        self._loss = self.grad_norm = torch.zeros((), dtype=torch.float64, device=device)
        self._skip = torch.zeros((), dtype=torch.bool, device=device)
        self._lr = 0.0
        at = self.mesh.at.pp
        self.stages = self.make_stages(self.batch)
        # Evaluation and sampling run on it too.
        passes = (
            forward_plan(config, self.layout, num_micro_batches, config.train.micro_batch_size)
            for num_micro_batches in {1, max(1, evaluation_micro_batches(config))}
        )
        self.mailbox = open_mailbox((self.plan, *passes), self.mesh.pp, device, exchange_seconds(config))
        self.pipeline = RankPipeline(self.plan, at, self.stages, self.mesh.pp, device, self.mailbox, halves=halves)
        self.executor = Executor(dist.get_rank(), self._handlers(), trace, self.activity)
        self.executor.check(self.plan.actions[at])

    def make_stages(self, batch: Batch) -> dict[int, Stage]:
        """This rank's chunks at run time, by number.

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
            tell: figures of this rank, none of them NaN, asked for when the step's work has been issued.

        Returns:
            Loss, gradient norm and learning rate; whether they were finite and the update was applied; the largest over
            ranks of what they tell.

        Raises:
            RunError: on all ranks alike. No target of the global step is valid, a text cannot be read, a token lies
                outside the vocabulary, or ranks of a replica have read different tokens: nothing was updated. Or ranks
                do not agree whether the step is finite: those that found it finite have updated their weights, so
                that a checkpoint is the only way on.

        Order: one wait for the device, at the end.
        """
        self.activity.step = step
        self.activity.begin("counting its targets")
        self.batch.step = self._load(step)
        self._lr = learning_rate(self.config.optim, step, decay_steps_of(self.config))
        self._run_plan(step)
        self.activity.begin("ending the step with all ranks")
        return self._result(step, tell)

    def compute_again(self, step: int, probe: Probe) -> None:
        """Run the step that `train_step` has just skipped once more, up to its update; collective.

        Args:
            step: the same.
            probe: looks at what the micro-batches add.
        """
        self._probe, trace = probe, self.executor.trace
        self.executor.trace = None
        try:
            self._run_plan(step)
        finally:
            self._probe, self.executor.trace = None, trace

    def _run_plan(self, step: int) -> None:
        self.batch.losses.zero_()
        self.gradients.begin()
        if self._prepares_weights:
            # Every micro-batch multiplies by the same weights.
            self.model.prepare(self.config.train.micro_batch_size * self.config.train.seq_len)
        self.model.position.step, self.model.position.training = step, True
        try:
            self.executor.run(self.plan.actions[self.mesh.at.pp])
        finally:
            self.model.position.training = False

    def _load(self, step: int) -> StepBatch:
        return self._reader.read(step)

    def _handlers(self) -> dict[Kind, Handler]:
        pipeline = self.pipeline
        return {
            **pipeline.handlers(),
            Kind.B: self._reducing(pipeline.backward),
            Kind.W: self._reducing(pipeline.weight_half),
            Kind.WAIT: self._wait,
            Kind.TIE_REDUCE: lambda _: self._sum_tied_embeddings(),
            Kind.CLIP: lambda _: self._clip(),
            Kind.STEP: lambda _: self._step(),
        }

    def _reducing(self, handler: Handler) -> Handler:
        """Start the reductions that are due, in the plan's order, while the handler adds to weight gradients."""

        def handle(action: Action) -> None:
            starts = {sub.index: sub for sub in action.reduces if sub.index is not None}

            def on_start(index: int) -> None:
                if self._probe is not None:
                    self._probe.before_sum(index)
                if self.executor.trace is not None:
                    self.executor.trace.mark(starts[index])

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
        """Wait for a transfer or a reduction; return the reduction."""
        if started.kind is not Kind.REDUCE:
            self.pipeline.wait_for(started)
            return None
        assert started.index is not None
        return self.buckets.wait(started.index)

    def _is_complete(self, started: Action) -> bool:
        if started.kind is not Kind.REDUCE:
            return self.pipeline.is_complete(started)
        assert started.index is not None
        return self.buckets.is_complete(started.index)

    def _sum_tied_embeddings(self) -> None:
        for name, piece in self.model.pieces.items():
            if piece.spec.name == EMBEDDING:
                self.comms.ends.all_reduce_(self.gradients.of[name])

    def _step(self) -> None:
        self.model.release()
        self.optimizer.step(self._lr, self._skip)

    def _clip(self) -> None:
        self.gradients.finish()
        # Each shard of the model has its place; other ranks add zeros there, which is exact in whatever order.
        owned = {place: self.gradients.of[name] for name, place in self._places.items()}
        figures = squared_norms(owned, self._num_places + 1, self.device)
        if self.model.is_last:
            loss = self.comms.dp.all_reduce_(self.batch.losses).sum() * self.batch.step.loss_scale
            # The last place is the loss's: so it travels with the norm, and a NaN is one on every stage.
            if self.mesh.at.tp == 0:
                figures[-1] = loss
        self.comms.tp.all_reduce_(figures)
        self.comms.pp.all_reduce_(figures)
        self.squares, self._loss = figures[:-1], figures[-1]
        self.grad_norm = self.squares.sum().sqrt()
        # The norm overflows before a moment would: the largest element's square is part of it.
        finite = self._loss.isfinite() & self.grad_norm.isfinite()
        self._skip = ~(finite & self.batch.step.usable)
        if self._probe is not None:
            self._skip = torch.ones_like(self._skip)
        clip_(self.gradients.summed, self.grad_norm, self.config.optim.clip_norm)

    def _places_of_gradients(self) -> tuple[int, dict[str, int]]:
        """How many places the global norm has, and those of the pieces that this rank answers for: each shard once."""
        table_size, held = self.model.parts.table_size, self.model.parts.held
        specs = stage_specs(self.config.model, table_size, 0, self.config.model.num_layers)
        first_place = {spec.name: i * table_size for i, spec in enumerate(specs)}
        places = {
            name: first_place[piece.spec.name] + piece.holder
            for name, piece in self.model.pieces.items()
            if piece.holder in held and not (piece.spec.name == EMBEDDING and not self.model.is_first)
        }
        return len(specs) * table_size, places

    def _result(self, step: int, tell: Callable[[], Sequence[float]] | None) -> StepResult:
        skip = self._skip.double()
        own = torch.stack([self._loss, self.grad_norm, skip, self.batch.step.usable.double()])
        told = torch.tensor(list(tell()) if tell is not None else [], dtype=torch.float64)
        shared = torch.cat([torch.stack([skip, -skip]), to_device(told, self.device)])
        (loss, norm, skipped, usable), (some_skip, all_skip, *largest) = read_with_largest(own, shared)
        # The device has been waited for: what its kernels gave up on is known.
        self.comms.tp.check()
        if not usable:
            raise RunError(self.batch.step.refusal(step, all_gather_json(self.batch.step.error)))
        if some_skip != -all_skip:
            raise RunError(
                f"all ranks must agree whether a step is finite: in step {step + 1} rank {dist.get_rank()} has loss "
                f"{loss}, gradient norm {norm}, other ranks do not: replicas have drifted apart: --resume from the "
                "newest checkpoint, and check this machine's memory and network"
            )
        self.num_updates += not skipped
        return StepResult(loss, norm, self._lr, bool(skipped), tuple(largest))

    def _check_same_run(self) -> None:
        """Compare plan, configuration and text over all ranks: nodes may differ in version, flags or files."""
        mine = (self.plan.digest(), dump_toml(replace(self.config, run_dir="")), self.corpus.fingerprint())
        names = ("plan", "configuration", "text")
        for name, value in zip(names, mine, strict=True):
            differing = differing_ranks(value, self.device)
            if differing:
                raise RunError(
                    f"all ranks must have the same {name}: ranks {differing} differ from rank 0: start every rank with "
                    "the same version, command line and data"
                )
