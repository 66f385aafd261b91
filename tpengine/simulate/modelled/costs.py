"""A cost model of the step: durations and bytes for the simulator, from a configuration and a machine's rates.

An operator takes the longer of its time for flops and its time for bytes in memory (tpkernels.work); an action is the
sum of its operators. Use it to predict which layout or schedule is faster before anything has run; costs that a run has
measured predict its own machine better. bytes.py has the bytes of activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tpkernels.work import (
    RATES,
    Work,
    activation_backward_work,
    activation_work,
    adamw_work,
    all_gather_work,
    attention_backward_work,
    attention_work,
    cross_entropy_gradient_work,
    cross_entropy_work,
    embedding_backward_work,
    embedding_work,
    matmul_work,
    norm_backward_work,
    norm_work,
    reduce_scatter_work,
    rope_work,
)

from tpengine.config import Config
from tpengine.layout.slices import slice_numel
from tpengine.layout.state_bytes import num_weights, state_bytes
from tpengine.layout.step_plan import Layout, dtype_bytes, gradient_bytes, num_summed
from tpengine.plan import Chunk, Gathered, Kind, Plan, Recompute, Reduced, Weights
from tpengine.simulate import Costs
from tpengine.simulate.costs import half_ring_time, ring_time
from tpengine.simulate.modelled.activations import activation_bytes
from tpengine.simulate.modelled.bytes import BlockBytes


@dataclass(frozen=True)
class Machine:
    """The rates that one rank attains.

    Attributes:
        flops_per_s: of a large matmul in the run's dtype.
        memory_bytes_per_s: read and written in its own memory.
        link_bytes_per_s: to one other rank, each direction: pipeline and tensor-parallel links.
        link_latency_s: of one message, or one step of a ring.
        reduce_bytes_per_s: that a ring of data-parallel ranks moves.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    reduce_bytes_per_s: float


# One core per rank, float32, ranks of one host. flops_per_s is from 1,000 tokens/s of a model of 26 million parameters
# at 6 flops each; reduce_bytes_per_s from gloo's 146 ms for 64 MB on four processes. Both were measured on two cores of
# an AMD EPYC with torch 2.13. Memory and link rates are what such a core copies at; the latency is that of a wake-up.
CPU_CORE = Machine(
    flops_per_s=150e9,
    memory_bytes_per_s=10e9,
    link_bytes_per_s=5e9,
    link_latency_s=20e-6,
    reduce_bytes_per_s=0.65e9,
)

# A GPU of an H200 node, bfloat16: data-sheet rates times the shares that H100s attain (tpkernels.work), not measured.
H200_NODE = Machine(
    flops_per_s=RATES["H200"].flops_per_s,
    memory_bytes_per_s=RATES["H200"].memory_bytes_per_s,
    link_bytes_per_s=RATES["H200"].link_bytes_per_s,
    link_latency_s=RATES["H200"].launch_seconds + RATES["H200"].signal_seconds,
    reduce_bytes_per_s=RATES["H200"].link_bytes_per_s,
)


def model_costs(config: Config, layout: Layout, plan: Plan, machine: Machine = CPU_CORE) -> Costs:
    """Return the costs of a configuration's plan, in seconds and bytes.

    Args:
        config: validated.
        layout: of that configuration; dp enters the reductions and tp the exchanges inside each action, because the
            simulator plays one tp rank of one replica.
        plan: training_plan or forward_plan of both; includes what its chunks recompute and gather again.
        machine: its rates.
    """
    compute: dict[tuple[Kind, int], float] = {}
    for index, chunk in enumerate(plan.chunks):
        seconds = _ChunkSeconds(config, layout.tp, machine, chunk, index == 0, index == len(plan.chunks) - 1)
        compute |= {(kind, index): duration for kind, duration in seconds.by_kind().items()}
    per_rank = bytes_per_rank(config, layout)
    numel, wide = max(num for num, _ in per_rank), gradient_bytes(config.train.dtype)
    item, world = dtype_bytes(config.train.dtype), layout.pp * layout.dp * layout.tp
    sizes = {
        bucket.index: layout.dp * slice_numel(layout.buckets[bucket.index].layout, layout.dp) for bucket in plan.buckets
    }
    # What each replica's optimizer updates.
    updated = -(-numel // layout.dp) if layout.zero else numel
    table_bytes = config.model.padded_vocab_size(layout.tp) // layout.tp * config.model.hidden_size * wide
    return Costs(
        compute=compute,
        latency=machine.link_latency_s,
        bytes_per_time=machine.link_bytes_per_s,
        reductions={bucket.index: _reduction(config, layout, bucket.index, machine) for bucket in plan.buckets},
        gathers={
            bucket.index: half_ring_time(
                sizes[bucket.index] * item, layout.dp, machine.reduce_bytes_per_s, machine.link_latency_s
            )
            for bucket in plan.buckets
            if bucket.weights is not Weights.WHOLE
        },
        ties=ring_time(table_bytes, 2, machine.link_bytes_per_s, machine.link_latency_s),
        # Each gradient is read once; then one number is reduced over all ranks and broadcast.
        clip=updated * wide / machine.memory_bytes_per_s + 2 * math.ceil(math.log2(world)) * machine.link_latency_s,
        step=_seconds([adamw_work(updated, wide, item if item < wide else 0)], machine),
        activations=activation_bytes(config, layout.tp, plan),
        resident=tuple(float(held) for _, held in per_rank),
        weights={b.index: float(sizes[b.index] * item) for b in plan.buckets if b.weights is Weights.SLICED},
        contributions={b.index: float(sizes[b.index] * wide) for b in plan.buckets if b.reduced is Reduced.MICROBATCH},
    )


def bytes_per_rank(config: Config, layout: Layout) -> list[tuple[int, int]]:
    """Return (weights, bytes) by pipeline rank: elements that it computes with; what its state takes between steps."""
    return [(num_weights(config, layout, rank), state_bytes(config, layout, rank).total) for rank in range(layout.pp)]


def _reduction(config: Config, layout: Layout, index: int, machine: Machine) -> float:
    bucket = layout.buckets[index].layout
    num_bytes = bucket.numel * gradient_bytes(config.train.dtype)
    if layout.zero:
        return half_ring_time(num_bytes, layout.dp, machine.reduce_bytes_per_s, machine.link_latency_s)
    num_ranks = num_summed(layout, bucket, config.model)
    return ring_time(num_bytes, num_ranks, machine.reduce_bytes_per_s, machine.link_latency_s)


def _seconds(works: Iterable[Work], machine: Machine) -> float:
    """Return the time of operators that run one after another, each bound by its flops or its bytes."""
    return sum(max(work.flops / machine.flops_per_s, work.memory_bytes / machine.memory_bytes_per_s) for work in works)


class _ChunkSeconds:
    """Durations of one chunk's actions on one tp rank.

    Over fused links an action takes the longer of its operators and its exchanges; over plain ones their sum.
    """

    def __init__(self, config: Config, tp: int, machine: Machine, chunk: Chunk, is_first: bool, is_last: bool) -> None:
        self.tp, self.machine, self.chunk, self.is_first, self.is_last = tp, machine, chunk, is_first, is_last
        self.size, self.batch = BlockBytes.of(config, tp), config.train.micro_batch_size
        self.is_fused = config.parallel.tp_comm == "fused"
        self.num_blocks = chunk.layers[1] - chunk.layers[0]

    def by_kind(self) -> dict[Kind, float]:
        """F; I including recomputation; W; B, which is I and W without gathering dy a second time."""
        size, num_blocks = self.size, self.num_blocks
        # Gathers and reduce-scatters move the same bytes. A block has two of each, the first and last chunk one more.
        exchanges = 4 * num_blocks + self.is_first + self.is_last
        forward = [*self._attention(), *self._mlp()] * num_blocks + self._ends()
        num_again, again = {
            Recompute.NONE: (0, list[Work]()),
            Recompute.ATTENTION: (2 * num_blocks, self._attention() * num_blocks),
            Recompute.BLOCK: (4 * num_blocks, [*self._attention(), *self._mlp()] * num_blocks),
            Recompute.FULL: (exchanges, forward),
        }[self.chunk.recompute]
        inputs = self._input_half() * num_blocks + self._input_half_of_ends()
        weights = self._matmuls() * num_blocks + self._weight_half_of_ends()
        gathers_again = self.chunk.gathered is Gathered.AGAIN and size.own_tokens < size.tokens
        columns = (2 * num_blocks + self.is_last) * gathers_again
        rows = 2 * num_blocks * gathers_again
        return {
            Kind.F: self._duration(forward, exchanges),
            Kind.B: self._duration(again + inputs + weights, num_again + exchanges + columns),
            Kind.I: self._duration(again + inputs, num_again + exchanges),
            Kind.W: self._duration(weights, columns + rows),
        }

    def _duration(self, works: list[Work], num_exchanges: int) -> float:
        links = num_exchanges * self._exchange() if self.tp > 1 else 0.0
        compute = _seconds(works, self.machine)
        return max(compute, links) if self.is_fused else compute + links

    def _exchange(self) -> float:
        size = self.size
        sent = max(
            all_gather_work(size.x, self.tp).link_bytes, reduce_scatter_work(size.x * self.tp, self.tp).link_bytes
        )
        return sent / self.machine.link_bytes_per_s + (self.tp - 1) * self.machine.link_latency_s

    def _matmuls(self) -> list[Work]:
        """The four matmuls of a block: qkv, attention's output, gate and up, and down."""
        return [*self._attention_matmuls(), *self._mlp_matmuls()]

    def _attention_matmuls(self) -> list[Work]:
        size = self.size
        columns = (size.heads + 2 * size.kv_heads) * size.head_size
        return [
            matmul_work(size.tokens, columns, size.hidden, size.item),
            matmul_work(size.tokens, size.hidden, size.heads * size.head_size, size.item),
        ]

    def _mlp_matmuls(self) -> list[Work]:
        size = self.size
        return [
            matmul_work(size.tokens, size.num_gated * size.ffn, size.hidden, size.item),
            matmul_work(size.tokens, size.hidden, size.ffn, size.item),
        ]

    def _attention(self) -> list[Work]:
        size = self.size
        shape = self.batch, size.seq, size.heads, size.kv_heads, size.head_size, size.item
        return [
            norm_work(size.own_tokens, size.hidden, size.item),
            *self._attention_matmuls(),
            rope_work(size.tokens, size.heads + size.kv_heads, size.head_size, size.item),
            attention_work(*shape, causal_half=True),
        ]

    def _mlp(self) -> list[Work]:
        size = self.size
        return [
            norm_work(size.own_tokens, size.hidden, size.item, residual=True),
            *self._mlp_matmuls(),
            activation_work(size.tokens, size.ffn, size.item, gated=size.num_gated > 1),
        ]

    def _input_half(self) -> list[Work]:
        size = self.size
        shape = self.batch, size.seq, size.heads, size.kv_heads, size.head_size, size.item
        return [
            *self._matmuls(),
            norm_backward_work(size.own_tokens, size.hidden, size.item),
            norm_backward_work(size.own_tokens, size.hidden, size.item, residual=True),
            rope_work(size.tokens, size.heads + size.kv_heads, size.head_size, size.item),
            attention_backward_work(*shape, causal_half=True),
            activation_backward_work(size.tokens, size.ffn, size.item, gated=size.num_gated > 1),
        ]

    def _ends(self) -> list[Work]:
        """Lookup before the first block; norm, logits and loss behind the last."""
        size = self.size
        works = [embedding_work(size.tokens, size.hidden, size.item)] if self.is_first else []
        if self.is_last:
            works += [
                norm_work(size.own_tokens, size.hidden, size.item),
                matmul_work(size.tokens, size.vocab, size.hidden, size.item),
                cross_entropy_work(size.tokens, size.vocab, size.item),
            ]
        return works

    def _input_half_of_ends(self) -> list[Work]:
        size = self.size
        if not self.is_last:
            return []
        return [
            norm_backward_work(size.own_tokens, size.hidden, size.item),
            matmul_work(size.tokens, size.vocab, size.hidden, size.item),
            cross_entropy_gradient_work(size.tokens, size.vocab, size.item),
        ]

    def _weight_half_of_ends(self) -> list[Work]:
        size = self.size
        works = [embedding_backward_work(size.tokens, size.vocab, size.hidden, size.item)] if self.is_first else []
        return [*works, *([matmul_work(size.tokens, size.vocab, size.hidden, size.item)] if self.is_last else [])]
