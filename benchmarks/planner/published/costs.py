"""The costs of another engine's step: ours (modelled/costs.py), with what it computes, keeps and sends otherwise.

Of our own layers their parts and modelled/activations.py count what a micro-batch holds tensor by tensor. Of other
engines only the operators are known (engine.py), so these bytes are estimates: sums over the tensors that autograd
keeps.

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023, section 4,
whose s b h (10 + 24/t + 5 a s / (h t)) and s b h / t (34 + 5 a s / h) these sums are for GPT in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpkernels.work import Work

from benchmarks.planner.published.chunk import engine_seconds
from benchmarks.planner.published.engine import BlockSizes, Engine, num_logits, sizes_for
from tpengine.config import Config
from tpengine.layout.parameters import ParameterSpec, chunk_specs
from tpengine.layout.step_plan import Layout
from tpengine.plan import Bucket, Kind, Plan, Recompute
from tpengine.planner import ChunkBytes, Costs
from tpengine.planner.costs import Channels, spec_bytes
from tpengine.planner.machine import Machine
from tpengine.planner.modelled.costs import StepCosts, crosses_nodes

# Statistics of attention are float32.
_WIDE = 4


def engine_costs(config: Config, layout: Layout, plan: Plan, machine: Machine, engine: Engine) -> Costs:
    """Return what `model_costs` does, of another engine.

    Args:
        config, layout, plan, machine: as for `model_costs`.
        engine: what it does differently from ours.
    """
    return EngineCosts(config, layout, plan, machine, engine).costs()


class EngineCosts(StepCosts):
    """The parts of `engine_costs`.

    Args:
        config, layout, plan, machine, engine: as for `engine_costs`.
    """

    def __init__(self, config: Config, layout: Layout, plan: Plan, machine: Machine, engine: Engine) -> None:
        super().__init__(config, layout, plan, machine)
        self.engine, self.reduced_item = engine, engine.reduced_item

    def costs(self) -> Costs:
        """Return them all."""
        costs = super().costs()
        if self.engine.once_item:
            numel = max(num for num, _ in self.bytes_per_rank())
            once = self.machine.other_seconds(Work(memory_bytes=numel * self.engine.once_item), self.dtype)
            costs = replace(costs, step=costs.step + once)
        if self.engine.frees_reduced and costs.contributions:
            held = 2 * max(costs.contributions.values())
            costs = replace(costs, contributions={}, resident=tuple(size + held for size in costs.resident))
        return self._in_series(costs) if self.engine.waits_for_transfers else costs

    def compute_seconds(self) -> dict[tuple[Kind, int], float]:
        """Return what F, B, I and W of each chunk take."""
        seconds = engine_seconds(self.config, self.layout, self.plan, self.machine, self.engine)
        return {key: of.total for key, of in seconds.items()}

    def group_processors(self) -> Mapping[str, int]:
        """Return none: other engines leave NCCL its choice."""
        return {}

    def communicator_bytes(self) -> int:
        """Return nothing: published figures of memory are torch's allocator's."""
        return 0

    @property
    def channels(self) -> Channels:
        """Return that of pairs: these engines post a send and a receive of one moment together, in one batch."""
        return Channels.PAIR

    def activation_bytes(self) -> dict[int, ChunkBytes]:
        """Return what a micro-batch holds, by chunk."""
        return engine_activations(self.config, self.layout.tp, self.plan, self.engine)

    def bytes_per_rank(self) -> list[tuple[int, int]]:
        """Return (weights, bytes) by pipeline rank, by the bytes per parameter that the engine keeps."""
        layout, engine, found = self.layout, self.engine, []
        for rank in range(layout.pp):
            # Tied embeddings of a rank that holds both ends are one parameter.
            specs: dict[str, ParameterSpec] = {}
            for chunk in layout.chunks_of(rank):
                of_chunk = chunk_specs(self.config.model, layout.tp, layout.layers, chunk)
                specs |= {spec.name: spec for spec in of_chunk}
            numel = sum(spec.local_numel(layout.tp) for spec in specs.values())
            sliced = -(-numel // layout.dp)
            kept = zip(
                (engine.weight_item, engine.gradient_item, engine.optimizer_item),
                (layout.zero >= 3, layout.zero >= 2, layout.zero >= 1),
                strict=True,
            )
            found.append((numel, sum(item * (sliced if is_cut else numel) for item, is_cut in kept)))
        return found

    def reduction_seconds(self, bucket: Bucket) -> float:
        """Return how long replicas sum a bucket's gradients, which may be whole with ZeRO too."""
        return self.whole_reduction_seconds(bucket) if self.engine.reduces_whole else super().reduction_seconds(bucket)

    def _in_series(self, costs: Costs) -> Costs:
        """Return costs of stages that compute nothing while they send: a transfer is part of the action before it."""
        layout, chunks, machine = self.layout, self.plan.chunks, self.machine
        gathers = machine.link(layout.tp, 1)
        compute = dict(costs.compute)
        for (kind, index), seconds in costs.compute.items():
            chunk = chunks[index]
            spec = chunk.output if kind is Kind.F else chunk.input
            peer = index + 1 if kind is Kind.F else index - 1
            if kind is Kind.W or spec is None or chunks[peer].rank == chunk.rank:
                continue
            crosses = crosses_nodes(layout, machine, chunk.rank, chunks[peer].rank)
            link = machine.between if crosses else machine.within
            num_bytes = spec_bytes(spec)
            more = link.message_seconds(num_bytes)
            if self.engine.scatters_transfers:
                more += gathers.gather_seconds(num_bytes * layout.tp, layout.tp)
            compute[kind, index] = seconds + more
        return replace(costs, compute=compute, latency=0.0, bytes_per_time=math.inf, links={})


@dataclass(frozen=True)
class _Kept:
    """Bytes of one block: what is kept for the input half of backward, and for its weight half.

    Attributes:
        x: between blocks.
        whole: all that is kept, the block's input included.
        core: what attention keeps of its scores.
        deferred: operands of the weight half.
    """

    x: int
    whole: int
    core: int
    deferred: int


def engine_activations(config: Config, tp: int, plan: Plan, engine: Engine) -> dict[int, ChunkBytes]:
    """Return what a micro-batch of `config` holds on one of `tp` ranks, by chunk.

    Args:
        config: sizes and dtype.
        tp: number of tensor-parallel ranks.
        plan: chunks, with what each recomputes.
        engine: whose layers they are.
    """
    size = sizes_for(config, tp, engine)
    block, last = _kept(size, config, engine), len(plan.chunks) - 1
    found = {}
    for index, chunk in enumerate(plan.chunks):
        num = chunk.layers[1] - chunk.layers[0]
        is_again = chunk.recompute is not Recompute.NONE
        each = block.x if is_again else _half(size, block) if engine.computes_half_again else block.whole
        head = _head(size, block, engine) if index == last else 0
        saved = num * each + head
        # A block computed again is there whole, once; the gradients of its widest tensor and of its input besides.
        gradients = 2 * size.middle * size.num_gated * size.item + block.x
        working = gradients + block.core + block.whole - each
        _, in_forward, in_backward = engine.loss_bytes if index == last else (0, 0, 0)
        logits = num_logits(size, engine)
        forward = max(block.whole - each, 2 * size.middle * size.item) + in_forward * logits
        found[index] = ChunkBytes(
            saved=saved,
            deferred=num * block.deferred + (size.gathered + size.logits if index == last else 0),
            working={
                Kind.F: forward,
                Kind.B: working + in_backward * logits,
                Kind.I: working + in_backward * logits,
                Kind.W: 0.0,
            },
        )
    return found


def _kept(size: BlockSizes, config: Config, engine: Engine) -> _Kept:
    rows = size.own_tokens if engine.cuts_rows else size.tokens
    x, item = rows * size.hidden * size.item, size.item
    length = config.train.seq_len
    scores = size.heads * (size.tokens // length) * length * length if length <= size.tokens else 0
    if length > size.tokens:
        scores = size.heads * size.tokens * length
    masks = 2 * rows * size.hidden if engine.drops else 0
    core = 0
    if engine.keeps_scores and not engine.computes_scores_again:
        core = scores * (2 * item + 1 if engine.drops else item)
    mixed = size.queries * item
    qkv = (size.queries + 2 * size.keys) * item
    # Both norms' inputs and outputs; the products' inputs; what the activation needs and gives.
    normed = size.tokens * size.hidden * item if engine.keeps_gathered else x
    inputs = 2 * normed + mixed + size.middle * item
    whole = 2 * x + inputs + qkv + core + size.num_gated * size.middle * item + masks
    if engine.joins_residuals and not engine.keeps_scores:
        whole += size.tokens * size.heads * _WIDE
    if engine.keeps_rotated:
        whole += (size.queries + size.keys) * item
    if engine.steps is not None:
        # What both norms keep besides; the activation of the gate.
        whole += 2 * engine.steps.kept_norm * rows * size.hidden + (size.num_gated > 1) * size.middle * item
    gradients = qkv + 2 * x + size.num_gated * size.middle * item
    return _Kept(x, whole, scores * 2 * item if engine.keeps_scores else 0, inputs + gradients)


def _half(size: BlockSizes, block: _Kept) -> int:
    """Bytes of a block's input, the products that are not computed again, and attention's output with its statistics.

    q, v, gate and the second product of the feed-forward network, which is kept although nothing reads it.
    """
    products = (2 * size.queries + size.keys + size.middle) * size.item
    return block.x + products + size.tokens * size.hidden * size.item + size.tokens * size.heads * _WIDE


def _head(size: BlockSizes, block: _Kept, engine: Engine) -> int:
    """Bytes of the last norm's input and output, and what the loss keeps."""
    return 2 * block.x + engine.loss_bytes[0] * num_logits(size, engine)
