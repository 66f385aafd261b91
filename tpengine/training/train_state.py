"""What training changes on one rank, and a checkpoint holds: weights, optimizer, gradient buckets, counters.

`assemble` builds model and gradient buffers, for fast mode, or for exact mode with one sink per shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.launch import accumulation_dtype

from tpengine.checkpoint.rollbacks import Rollback
from tpengine.config import Config, num_blocks, num_shards_of, spike_rule_of
from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.data_parallel.gradients import StepGradients, buckets_of_pieces, exact_step_gradients, fast_step_gradients
from tpengine.data_parallel.weight_buckets import WeightBuckets
from tpengine.distributed.mesh import Communicators, Mesh
from tpengine.distributed.process import make_deterministic
from tpengine.layers.column import declare_places
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves
from tpengine.layers.row_buffers import RowBuffers
from tpengine.layout.groups import frozen_of, updates_of
from tpengine.layout.parameters import BucketLayout, in_order_of_packing
from tpengine.layout.slices import BlockCut, BucketCut
from tpengine.layout.step_plan import Layout, reduced_of, weights_of
from tpengine.model.exact import Shards
from tpengine.model.meta_modules import Uninitialized
from tpengine.model.parts import ExactParts, FastParts, Parts
from tpengine.model.transformer import Transformer
from tpengine.observe.activity import Activity
from tpengine.pipeline.stage import Batch, Stage
from tpengine.plan import Gathered, Recompute, Reduced, Weights
from tpengine.training.elementwise import ElementwiseOptimizer, Place, UpdateRule
from tpengine.training.loss_scale import LossScale
from tpengine.training.optimizer import AdamW, Optimizer, Updates
from tpengine.training.planned_run import PlannedPhase
from tpengine.training.spikes import SpikeWindow
from tpengine.training.update_rules import listed_rule


class Assembled(NamedTuple):
    """A rank's model and what training it needs.

    Attributes:
        model: this rank's chunks, uninitialised; frozen parameters ask autograd for no gradient.
        gradients: what the model's layers add to, of what is trained.
        sliced: its weights, where replicas own slices of them (ZeRO); else None. At stages 1 and 2 no frozen ones.
    """

    model: Transformer
    gradients: StepGradients
    sliced: WeightBuckets | None = None


def assemble(
    config: Config, layout: Layout, mesh: Mesh, comms: Communicators, device: torch.device, halves: WeightHalves
) -> Assembled:
    """Build what train.reduction and parallel.zero ask for.

    Args:
        config: validated.
        layout, mesh, comms: of that configuration.
        device: where this rank computes.
        halves: keeps contributions to weight gradients between the halves of a backward pass.

    With exact, torch is made deterministic for the whole process (distributed.make_deterministic).
    """
    build = _exact if config.train.reduction == "exact" else _fast
    # Somebody draws weights that are the same in every layout, or loads them.
    with Uninitialized():
        return build(config, layout, mesh, comms, device, halves)


def _fast(
    config: Config, layout: Layout, mesh: Mesh, comms: Communicators, device: torch.device, halves: WeightHalves
) -> Assembled:
    dtype, sink = getattr(torch, config.train.dtype), GradientSink()
    parts = FastParts(
        config.model,
        comms.tp,
        replicas=comms.replica,
        experts_comm=comms.ep,
        row_buffers=_row_buffers(comms, device, dtype),
        attention=config.train.attention,
        sink=DeferringSink(sink, halves),
        gathers_again=Gathered(config.parallel.gathered) is Gathered.AGAIN,
        dtype=dtype,
        device=device,
    )
    model, buckets = _model(config, layout, mesh, parts), layout.buckets_of(mesh.at.pp)
    members = buckets | layout.frozen_buckets_of(mesh.at.pp)
    replicas = {index: layout.num_replicas(bucket) for index, bucket in members.items()}
    cuts = {index: BucketCut(members[index], number) for index, number in replicas.items() if number > 1}
    sliced = _sliced(config, layout, model, cuts, comms)
    trained = _trained(model)
    gradients = fast_step_gradients(
        buckets,
        model.pieces,
        trained,
        # Tied ends in one chunk contribute twice per backward pass; in two chunks of a rank, once per chunk's pass.
        tied_ends=config.model.tie_embeddings and len(layout.ranks) == 1,
        comms=comms,
        dtype=accumulation_dtype(dtype),
        device=device,
        sink=sink,
        is_cut=layout.zero > 0,
        each=layout.zero > 0 and reduced_of(config) is Reduced.MICROBATCH,
    )
    return Assembled(model, gradients, sliced)


def _row_buffers(comms: Communicators, device: torch.device, dtype: torch.dtype) -> RowBuffers | None:
    if comms.ep is None or not comms.row_load:
        return None
    return RowBuffers(comms.ep, comms.row_load, device, dtype)


def _exact(
    config: Config, layout: Layout, mesh: Mesh, comms: Communicators, device: torch.device, halves: WeightHalves
) -> Assembled:
    make_deterministic(device)
    dtype = getattr(torch, config.train.dtype)
    shards = Shards(comms.tp, num_shards_of(config))
    sinks, head_sinks = ([GradientSink() for _ in shards.held] for _ in range(2))
    # Experts that ranks share have sinks for each replica whose tokens they get.
    lanes = range(0 if comms.ep is None else comms.ep.size // comms.tp.size)
    expert_sinks = [[GradientSink() for _ in range(shards.size)] for _ in lanes]
    parts = ExactParts(
        config.model,
        shards,
        experts_comm=comms.ep,
        expert_sinks=[[DeferringSink(sink, halves) for sink in of_lane] for of_lane in expert_sinks],
        sinks=[DeferringSink(sink, halves) for sink in sinks],
        head_sinks=[DeferringSink(sink, halves) for sink in head_sinks],
        dtype=dtype,
        device=device,
    )
    model, buckets = _model(config, layout, mesh, parts), layout.buckets_of(mesh.at.pp)
    # A weight lies in the bucket of its number in which its gradient does, behind those that it is packed with.
    members: dict[int, list[str]] = {}
    bucket_of = buckets_of_pieces(buckets | layout.frozen_buckets_of(mesh.at.pp), model.pieces, shards)
    for name in in_order_of_packing(model.pieces):
        if name in bucket_of:
            members.setdefault(bucket_of[name], []).append(name)
    cuts = {}
    for index, names in members.items():
        axes = layout.buckets[index].layout.reduce_over[:1]
        if (replicas := comms.over(axes).size) > 1:
            numels = tuple(model.held[name].numel() for name in names)
            blocks = {name: BlockCut.of(name, numel, replicas) for name, numel in zip(names, numels, strict=True)}
            cuts[index] = BucketCut(BucketLayout(axes, tuple(names), numels), replicas, blocks)
    sliced = _sliced(config, layout, model, cuts, comms)
    trained = _trained(model)
    gradients = exact_step_gradients(
        buckets,
        {name: model.pieces[name] for name in trained},
        trained,
        shards,
        {index: layout.buckets[index].chunks[0] for index in buckets},
        tied_ends=config.model.tie_embeddings and layout.ends_share_a_rank and mesh.at.pp == layout.ranks[0],
        comms=comms,
        num_micro_batches=config.train.num_micro_batches,
        num_blocks=num_blocks(config) // mesh.shape.dp,
        dtype=accumulation_dtype(dtype),
        device=device,
        sinks=sinks,
        head_sinks=head_sinks,
        expert_sinks=expert_sinks,
        is_cut=layout.zero > 0,
    )
    return Assembled(model, gradients, sliced)


def _sliced(
    config: Config, layout: Layout, model: Transformer, cuts: Mapping[int, BucketCut], comms: Communicators
) -> WeightBuckets | None:
    """Lay the weights into buckets, if replicas own slices of them."""
    if not layout.zero:
        return None
    kept = {index for index in cuts if weights_of(config, layout, index) is Weights.UPDATED}
    owners = {index: comms.over(cut.layout.reduce_over[:1]) for index, cut in cuts.items()}
    sliced = WeightBuckets(cuts, model.held, owners, kept)
    places: dict[Tensor, Tensor] = {model.held[name]: place for name, place in sliced.places.items()}
    for name, parameter in model.held.items():
        if name not in sliced.places:
            # Whole, as it is frozen or nobody else has it: it lay behind weights that have gone into buckets, and kept
            # their memory.
            parameter.data = parameter.data.clone()
            places[parameter] = parameter.data
    declare_places(model, places)
    return sliced


def _model(config: Config, layout: Layout, mesh: Mesh, parts: Parts) -> Transformer:
    recompute = Recompute(config.parallel.recompute)
    model = Transformer(parts, chunks=layout.layers_of(mesh.at.pp), seed=config.train.seed, recompute=recompute)
    frozen = frozen_of(config)
    for name, parameter in model.held.items():
        parameter.requires_grad_(model.pieces[name].spec.name not in frozen)
    return model


def _trained(model: Transformer) -> dict[str, Parameter]:
    """Return the parameters that are trained, by piece."""
    return {name: parameter for name, parameter in model.held.items() if parameter.requires_grad}


@dataclass(frozen=True)
class RankContext:
    """Where a rank computes, and how it reaches the others: made once, for all phases.

    Attributes:
        device: where this rank computes.
        mesh, comms: the ranks by axis, and the communicators between them.
        mailbox: carries the pipeline's messages between CPU ranks of one host; None if the process group does.
        activity: told what this rank does.
    """

    device: torch.device
    mesh: Mesh
    comms: Communicators
    mailbox: Mailbox | None
    activity: Activity


class TrainState:
    """The state of a run on one rank; its weights hold anything until somebody draws or loads them.

    Args:
        rank: this rank.
        part: the phase that the state is in.
        rule: an optimizer of the user's own, which the configuration names (with_rule); None for a listed one.

    Attributes:
        rank: as given.
        part: the current phase; state.next_phase.enter_phase changes it.
        model: this rank's shards of this rank's chunks.
        halves: contributions to weight gradients, between the halves of a backward pass.
        gradients: what the model's layers add to.
        sliced: the weights where replicas own slices of them (ZeRO), else None.
        held: what this rank holds between steps, by piece: whole weights, or of those that are cut over replicas (ZeRO)
            its own elements, one dim; where it owns none they are left out.
        weights, frozen: those of `held` that the optimizer updates, and the others, which stay as they are, but for
            routers' biases that counts move (expert_loads.py).
        frozen_hashes: of the bits of `frozen`, by piece, before the first step (state_check.py).
        optimizer: updates `weights`.
        num_updates: number of updates applied, including those before the checkpoint that the run continues.
        loss_scale: of the next step.
        spikes: loss and norm of the last steps.
        rollbacks: those of the run so far; their samples are left out.
    """

    def __init__(self, rank: RankContext, part: PlannedPhase, rule: UpdateRule | None = None) -> None:
        self.rank, self.part, self._rule = rank, part, rule
        self.num_updates = 0
        self.loss_scale = LossScale(part.config.train.dtype)
        self.spikes = SpikeWindow(spike_rule_of(part.config.train.spike))
        self.rollbacks: tuple[Rollback, ...] = ()
        self.build()

    def build(self) -> None:
        """Build the current phase's model, which holds anything, its gradient buckets and its optimizer."""
        config = self.part.config
        self.halves = WeightHalves()
        self.model, self.gradients, self.sliced = assemble(
            config, self.part.layout, self.rank.mesh, self.rank.comms, self.rank.device, self.halves
        )
        self.held = self._held()
        trained = _trained(self.model)
        self.weights = {name: weight for name, weight in self.held.items() if name in trained}
        self.frozen = {name: weight for name, weight in self.held.items() if name not in trained}
        self.frozen_hashes: dict[str, Tensor] = {}
        self.optimizer = self._optimizer()

    @property
    def updates(self) -> Updates:
        """How the optimizer updates each piece that is trained: (factor of the learning rate, weight decay)."""
        found, pieces = updates_of(self.part.config), self.model.pieces
        return {name: found[piece.spec.name] for name, piece in pieces.items() if piece.spec.name in found}

    def _optimizer(self) -> Optimizer:
        config = self.part.config
        rule = self._rule or listed_rule(config.optim)
        given = self.weights, self.gradients.of, self.updates, config.optim
        if rule is None:
            return AdamW(*given)
        parts = {} if self.sliced is None else self.sliced.parts
        firsts = {name: part.in_tensor.start for name, part in parts.items()}
        places = {name: Place(self.model.pieces[name], firsts.get(name, 0)) for name in self.weights}
        return ElementwiseOptimizer(rule, *given, places, config.train.seed)

    def _held(self) -> dict[str, Tensor]:
        if self.sliced is None:
            return dict(self.model.held)
        whole = {name: weight for name, weight in self.model.held.items() if name not in self.sliced.places}
        return whole | self.sliced.of

    def is_cut(self, name: str) -> bool:
        """Return whether replicas own slices of a piece; else each holds all of it."""
        return self.sliced is not None and name in self.sliced.places

    def elements_of(self, name: str) -> slice | None:
        """Return which elements of a piece in `held` are this replica's own; None for all."""
        return self.sliced.parts[name].in_tensor if self.sliced is not None and self.is_cut(name) else None

    def replicas_of(self, name: str) -> Communicator:
        """Return the ranks that hold a piece alike, or own slices of it: of those with other tp ranks none."""
        return self.rank.comms.over(self.model.pieces[name].spec.reduce_over[:1])

    def copy_of(self, name: str) -> tuple[int, int]:
        """Return which copy of this rank's elements of a piece it holds, and how many replicas have one."""
        replicas = self.replicas_of(name)
        return (0, 1) if self.is_cut(name) else (replicas.rank, replicas.size)

    @property
    def buckets(self) -> GradientBuckets:
        """The buckets that gradients are summed in over replicas."""
        return self.gradients.buckets

    def stages(self, batch: Batch) -> dict[int, Stage]:
        """Return this rank's chunks at run time, by number.

        Args:
            batch: the micro-batches that they run.
        """
        plan, seq_len = self.part.plan, self.part.config.train.seq_len
        last = len(plan.chunks) - 1
        return {
            chunk: Stage(
                partial(self.model, seq=seq_len, chunk=number),
                batch,
                is_first=chunk == 0,
                is_last=chunk == last,
                recompute=plan.chunks[chunk].recompute is Recompute.FULL,
                gives_gradient=plan.gives_gradient(chunk),
            )
            for number, chunk in enumerate(plan.chunks_of(self.rank.mesh.at.pp))
        }

    def draw_weights(self) -> None:
        """Draw the initial weights, as train.seed says. On a CPU 1 GB takes a core some 10 s."""
        train = self.part.config.train
        self.model.initialise(train.seed, self._store, accumulation_dtype(getattr(torch, train.dtype)))

    def clear_padding(self) -> None:
        """Make the rows zero that no file and no checkpoint has."""
        for name in self.held:
            if self.model.pieces[name].spec.valid_rows is not None:
                self._set(name, torch.zeros((), device=self.rank.device))

    def restart(self) -> None:
        """Be at step 0, but for the weights."""
        self.num_updates, self.loss_scale = 0, LossScale(self.part.config.train.dtype)
        self.spikes.restore(None)
        self.optimizer.clear()

    def begin_anew(self, name: str) -> None:
        """Begin to train a piece that was frozen: its moments are zero, its master is the weight."""
        self.optimizer.set(name, self.weights[name].detach())
        self.optimizer.clear([name])

    def _store(self, name: str, values: Tensor) -> None:
        """Take a piece's initial values: whole, or what this replica owns of them."""
        if name in self.held:
            elements = self.elements_of(name)
            self._set(name, values if elements is None else values.view(-1)[elements])

    @torch.no_grad()
    def _set(self, name: str, values: Tensor) -> None:
        if name in self.weights:
            self.optimizer.set(name, values)
        else:
            self.frozen[name].copy_(values)
