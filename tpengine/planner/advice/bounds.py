"""Lower bounds of a layout's time and memory, without a plan: what most layouts are left out by.

Time. Each bound is a chain of actions that wait for each other in every plan of the layout, so none is above the
simulator's step:

    a rank      what passes on the way to its first chunk, all that it computes, the way back from its first chunk. The
                weight halves of split backwards may be the last to run, so their way back is one of input halves
    a stream    gathers before the first forward; the reductions of a rank's only chunk begin in its last backward; all
                gathers and reductions of a rank run one after another
    everything  the optimizer comes after both

Layers are cut as the plan cuts them, and chunks take what they take in the plan. `least_seconds` and `group_seconds`
know less: all that a micro-batch computes, shared evenly by the pipeline's ranks. `played_seconds` knows more: when
each action of the schedule's lists can run.

Memory: `num_bytes` is an equal share of the state, since some rank holds as much, and the activations of micro-batches
that a stage holds at once; `held_bytes` what each rank's list holds, action by action, which is nearly the peak. Tests
check that all are below what the simulator finds for the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpkernels.work import Work

from tpengine.architectures.part import Sizes
from tpengine.architectures.registry import layers_are_alike
from tpengine.config import Config, ModelConfig
from tpengine.config.rules import ZERO_OF_SLICED_GRADIENTS, ZERO_OF_SLICED_WEIGHTS
from tpengine.dtypes import dtype_bytes
from tpengine.layout.parameters import EMBEDDING, layer_specs, num_parameters, stage_specs
from tpengine.layout.state_bytes import even_state_bytes
from tpengine.layout.step_plan import gradient_bytes, layer_ranges
from tpengine.layout.update_work import update_work
from tpengine.plan import SCHEDULES, Chunk, Gathered, Kind, Recompute
from tpengine.plan.schedule import looping, vee
from tpengine.planner import ChunkBytes
from tpengine.planner.advice.lists import KINDS, Held, Played, RankHeld, held_of, order_of, place_of
from tpengine.planner.advice.question import Candidate, Question, shares_of_experts
from tpengine.planner.modelled.activations import BlockBytes, bytes_of_chunks
from tpengine.planner.modelled.costs import chunk_seconds
from tpengine.planner.modelled.operators import ActionSeconds, KnownSums

# tp, micro-batch size, recompute, gathered, tp_comm, ep: what an action's time depends on, beside its layers.
Key = tuple[int, int, str, str, str, int]


@dataclass(frozen=True)
class _Pipeline:
    """What does not depend on the replicas: for each rank of a pipeline three times that add up to a bound.

    Attributes:
        before: until its first chunk's first input has come; not counted is what comes before the first forward.
        busy: what it computes, and the way back from its first chunk.
        last_backward: its last backward, if it has one chunk; else all that it computes.
        layers: how many layers its chunks hold.
        first_layers: those of the model's first chunk.
        once: what one micro-batch takes through all chunks and back.
    """

    before: tuple[float, ...]
    busy: tuple[float, ...]
    last_backward: tuple[float, ...]
    layers: tuple[int, ...]
    first_layers: int
    once: float


@dataclass(frozen=True)
class _LayerWeights:
    """How many weights a layer has, and how many of them are of experts."""

    all: int
    of_experts: int

    @classmethod
    def of(cls, model: ModelConfig, layer: int) -> _LayerWeights:
        """Return those of a layer. Two ranks would share out its experts."""
        numels = [(math.prod(spec.shape), spec.ep > 0) for spec in layer_specs(model, 1, layer, 2)]
        return cls(sum(num for num, _ in numels), sum(num for num, is_shared in numels if is_shared))


class Bounds:
    """Bounds of a question's layouts; what many of them share is computed once.

    Args:
        question: whose layouts.
        known: bounds of a question of the same model, from which is taken over what does not differ.
    """

    def __init__(self, question: Question, known: Bounds | None = None) -> None:
        self.question = question
        model, dtype = question.base.model, question.base.train.dtype
        # As its chips compute: all from caches, of which no plan's rank touches less.
        self._machine = question.machine.slowest_of(question.num_ranks).touching(0.0).at_best()
        self.num_layers, self.num_weights = model.num_layers, num_parameters(model)
        layers = [_LayerWeights.of(model, layer) for layer in range(self.num_layers)]
        self.num_expert_weights = sum(layer.of_experts for layer in layers)
        # Of the smallest layer: all, and those that are not of experts.
        self._least = min(layer.all for layer in layers)
        self._least_shared = min(layer.all - layer.of_experts for layer in layers)
        self.narrow, self.wide = dtype_bytes(dtype), gradient_bytes(dtype)
        # By what each depends on: nothing of a question but its model; machine and dtype; the batch too.
        self._saved: dict[tuple[int, int, str, str, int], int] = {}
        self._state: dict[tuple[Any, ...], float] = {}
        self._bytes: dict[tuple[Any, ...], tuple[ChunkBytes, ...]] = {}
        self._walked: dict[Key, dict[object, ChunkBytes]] = {}
        self._numel: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._chunks: dict[tuple[Any, ...], Mapping[Kind, ActionSeconds]] = {}
        self._sums: dict[Key, KnownSums] = {}
        self._played: dict[tuple[Any, ...], Played] = {}
        self._pipelines: dict[tuple[Any, ...], _Pipeline] = {}
        if known is not None and (known.question.base, known.question.load) == (question.base, question.load):
            self._take_over(known)

    def _take_over(self, known: Bounds) -> None:
        """Share what does not differ between two questions of one model."""
        shared = ["_saved", "_state", "_bytes", "_walked", "_numel"]
        mine, other = self.question, known.question
        is_alike = other.machine == replace(mine.machine, memory_bytes=other.machine.memory_bytes)
        # How many chips wait for each other is in their times.
        if is_alike and other.num_ranks == mine.num_ranks:
            shared += ["_chunks", "_sums", "_played"]
            if other.global_batch == mine.global_batch:
                shared.append("_pipelines")
        for name in shared:
            setattr(self, name, getattr(known, name))

    def least_seconds(self, tp: int, pp: int, dp: int, micro_batch_size: int) -> float:
        """Return a bound for all layouts of these sizes: nothing is computed again, and no rank waits."""
        shares = shares_of_experts(self.question, tp, dp)
        keys = ((tp, micro_batch_size, "none", "keep", comm, ep) for comm in ("fused", "plain") for ep in shares)
        return min(self.group_seconds(pp, dp, key) for key in keys)

    def group_seconds(self, pp: int, dp: int, key: Key) -> float:
        """Return a bound for all schedules and stages of ZeRO: what is computed, shared evenly."""
        number = self.question.global_batch // dp // key[1]
        whole = self._of_chunk((0, self.num_layers), key)
        return number * _forward_and_backward(whole) / pp

    def seconds(self, layout: Candidate) -> float:
        """Return a bound of the step."""
        pipeline = self._pipeline(layout)
        first_gather, stream = self._first_gather(layout, pipeline), self._stream(layout)
        longest = max(pipeline.once + first_gather, stream)
        for before, busy, last, layers in zip(
            pipeline.before, pipeline.busy, pipeline.last_backward, pipeline.layers, strict=True
        ):
            start = first_gather + before
            longest = max(longest, start + busy, start + busy - last + self._last_reductions(layout, layers))
        return longest + self._optimizer(layout)

    def played_seconds(self, layout: Candidate) -> float:
        """Return a sharper bound of the step, for a schedule by name: its lists are played."""
        pipeline, (ranks, layers) = self._pipeline(layout), self._cut(layout)
        played, gather = self._play(layout, ranks, layers), self._first_gather(layout, pipeline)
        longest = self._stream(layout)
        for rank, end in enumerate(played.ends):
            stream = 0.0
            own = [chunk for chunk, holder in enumerate(ranks) if holder == rank]
            # Reductions of a chunk begin in its last backward, one after another.
            for chunk in sorted(own, key=played.last_weights.__getitem__):
                num_layers = layers[chunk][1] - layers[chunk][0]
                stream = max(stream, played.last_weights[chunk]) + self._last_reductions(layout, num_layers)
            longest = max(longest, gather + max(end, stream))
        return longest + self._optimizer(layout)

    def held_bytes(self, layout: Candidate) -> float:
        """Return a sharper bound of the bytes of the rank that holds most, for a schedule by name.

        Looked at are the ranks that hold most, but for layers that do not divide: the first two, and the last.
        """
        ranks, layers = self._cut(layout)
        # Twice as many as ranks fill every schedule but gpipe: more of them hold the same.
        number = layout.num_micro_batches
        number = number if layout.schedule == "gpipe" else min(number, 2 * layout.pp)
        lists = held_of(layout.schedule, layout.pp, number, layout.chunks_per_rank)
        sizes = self._chunk_bytes(layout, ranks, layers)
        return max(self._held(layout, of_rank, layers, sizes) for of_rank in lists)

    def num_bytes(self, layout: Candidate) -> float:
        """Return a bound of the bytes of the rank that holds most."""
        return self.state_bytes(layout) + self.activation_bytes(layout)

    def state_bytes(self, layout: Candidate) -> float:
        """Return weights, gradients, masters and moments of an equal share, with what is gathered."""
        is_full, is_named = _fills_all_chunks(layout), layout.schedule in SCHEDULES
        axes = layout.tp, layout.pp, layout.dp, layout.ep
        of = *axes, layout.zero, layout.residency, layout.chunks_per_rank, is_full, is_named
        if of not in self._state:
            numel, more, base = 0, 0.0, self.question.base
            held = 0
            for num, replicas in self._shares(layout):
                held += even_state_bytes(num, layout.zero, replicas, base.train.dtype, base.optim)
                numel += num * (replicas > 1)
            # What is gathered, and what is not summed yet: of a chunk at least. A chunk's buffer is given back right
            # before its next backward. How many chunks a file's schedule has is not known here.
            if layout.zero >= ZERO_OF_SLICED_GRADIENTS and is_named:
                more += self.wide / (
                    1 if is_full and self.question.base.train.reduction == "fast" else layout.chunks_per_rank
                )
            if layout.zero >= ZERO_OF_SLICED_WEIGHTS and is_named:
                more += self.narrow / (layout.chunks_per_rank if layout.residency == "use" else 1)
            self._state[of] = held + more * numel
        return self._state[of]

    def activation_bytes(self, layout: Candidate) -> float:
        """Return what the micro-batches of a stage keep at least."""
        key = layout.tp, layout.micro_batch_size, layout.recompute, layout.gathered, layout.ep
        if key not in self._saved:
            config, load = self._config((*key[:4], "fused", layout.ep)), self.question.load
            sizes = Sizes.of(config, layout.tp, Gathered(layout.gathered), load=load)
            kinds = 1 if layers_are_alike(self.question.base.model) else self.num_layers
            blocks = {BlockBytes.of(sizes, layer).least for layer in range(kinds)}
            self._saved[key] = min(block.saved(Recompute(layout.recompute)) for block in blocks)
        return _num_live(layout) * (self.num_layers // layout.num_chunks) * self._saved[key]

    def _held(
        self, layout: Candidate, held: RankHeld, layers: Sequence[tuple[int, int]], sizes: Sequence[ChunkBytes]
    ) -> float:
        """Return the most that one rank's list holds."""
        train, zero, chunks = self.question.base.train, layout.zero, held.chunks
        own = [sizes[chunk] for chunk in chunks]
        # Of what has replicas alone: the rest is never gathered, nor summed.
        numels = [
            sum(num for num, replicas in self._num_weights(layout, (layers[chunk],), is_bucket=True) if replicas > 1)
            for chunk in chunks
        ]
        sums_each = zero >= ZERO_OF_SLICED_GRADIENTS and train.reduction == "fast"
        unsummed = [numel * self.wide if sums_each else 0 for numel in numels]
        gathered = [numel * self.narrow if zero >= ZERO_OF_SLICED_WEIGHTS else 0 for numel in numels]
        brief = layout.residency == "use"

        def total(state: Held) -> float:
            held_by = zip(
                own, state.saved, state.deferred, state.is_filled, state.is_needed if brief else state.is_in_use,
                unsummed, gathered, strict=True,
            )  # fmt: skip
            return own[state.place].working[state.kind] + sum(
                size.saved * saved + size.deferred * deferred + filled * sums + whole * weights
                for size, saved, deferred, filled, whole, sums, weights in held_by
            )

        boundary = layout.micro_batch_size * train.seq_len // layout.tp * self.question.base.model.hidden_size
        slots = (held.num_forward + held.num_backward) * boundary * self.narrow
        state = sum(
            even_state_bytes(numel, zero, replicas, train.dtype, self.question.base.optim)
            for numel, replicas in self._num_weights(layout, tuple(layers[chunk] for chunk in chunks))
        )
        return state + slots + max(map(total, held.states))

    def _num_weights(
        self, layout: Candidate, layers: tuple[tuple[int, int], ...], *, is_bucket: bool = False
    ) -> tuple[tuple[int, int], ...]:
        """Return the elements that a rank holds of layers and ends, and how many replicas hold them: as `_shares`.

        Args: is_bucket: leave out what ends may share.
        """
        tp, ep = layout.tp, layout.ep
        key = tp, ep, layers, is_bucket
        if key not in self._numel:
            model = self.question.base.model
            specs = {spec.name: spec for part in layers for spec in stage_specs(model, tp, *part, ep)}
            shared = {EMBEDDING} if is_bucket and model.tie_embeddings else set()
            numel, of_experts = 0, 0
            for name, spec in specs.items():
                num = spec.local_numel(tp) * (name not in shared)
                of_experts += num * (spec.ep > 0)
                numel += num * (spec.ep == 0)
            self._numel[key] = numel, of_experts
        dense, shared_out = self._numel[key]
        return (dense, layout.dp), (shared_out, _replicas_of_experts(layout))

    def _shares(self, layout: Candidate) -> tuple[tuple[int, int], ...]:
        """Return a rank's even share of the weights, and how many replicas hold it: of experts on more ranks than tp.

        These are whole on some of a stage's ranks, and the others have fewer replicas.
        """
        ranks = layout.tp * layout.pp
        if layout.ep <= layout.tp:
            return ((self.num_weights // ranks, layout.dp),)
        experts = self.num_expert_weights // (layout.ep * layout.pp)
        return ((self.num_weights - self.num_expert_weights) // ranks, layout.dp), (
            experts,
            _replicas_of_experts(layout),
        )

    def _of_layer(self, layout: Candidate) -> int:
        """Return the weights of a layer at least that the replicas of dp exchange."""
        return self._least_shared if layout.ep > layout.tp else self._least

    def _chunk_bytes(
        self, layout: Candidate, ranks: Sequence[int], layers: Sequence[tuple[int, int]]
    ) -> tuple[ChunkBytes, ...]:
        """Return what a micro-batch holds on each chunk."""
        key: Key = layout.tp, layout.micro_batch_size, layout.recompute, layout.gathered, "fused", layout.ep
        of = layout.schedule, layout.pp, layout.chunks_per_rank, key
        if of not in self._bytes:
            chunks = [
                Chunk(rank, part, None, None, Recompute(layout.recompute), Gathered(layout.gathered))
                for rank, part in zip(ranks, layers, strict=True)
            ]
            walked = self._walked.setdefault(key, {})
            self._bytes[of] = bytes_of_chunks(self._config(key), layout.tp, chunks, walked, self.question.load)
        return self._bytes[of]

    def _cut(self, layout: Candidate) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Return the rank and the layers of each chunk."""
        ranks = _ranks_of(layout)
        assert ranks is not None, "a file's schedule has no lists here"
        base = self.question.base
        return ranks, layer_ranges(base.model, base.train.seq_len, ranks, Recompute(layout.recompute))

    def _play(self, layout: Candidate, ranks: Sequence[int], layers: Sequence[tuple[int, int]]) -> Played:
        """Return when the actions of the layout's lists run, without gathers but those that nothing can hide."""
        key = layout.tp, layout.micro_batch_size, layout.recompute, layout.gathered, layout.tp_comm, layout.ep
        hop, exposed = self._hop_seconds(layout), [0.0] * len(layers)
        if layout.zero == ZERO_OF_SLICED_WEIGHTS and layout.residency == "use" and layout.schedule in _GATHERS_EACH:
            # Weights that the action before has freed are gathered between the two.
            exposed = [
                self._gather(layout, (last - first) * self._of_layer(layout) / layout.tp) for first, last in layers
            ]
        of = layout.schedule, layout.pp, layout.chunks_per_rank, layout.num_micro_batches, key, hop, tuple(exposed)
        if of not in self._played:
            durations, gaps = [0.0] * (8 * len(layers)), [0.0] * (8 * len(layers))
            for chunk, part in enumerate(layers):
                seconds = self._of_chunk(part, key)
                for kind in KINDS:
                    for again in (False, True):
                        durations[place_of(kind, chunk, again=again)] = seconds[kind].total
                    gaps[place_of(kind, chunk, again=True)] = exposed[chunk]
            order = order_of(layout.schedule, layout.pp, layout.num_micro_batches, layout.chunks_per_rank)
            self._played[of] = order.play(durations, gaps, hop)
        return self._played[of]

    def _of_chunk(self, layers: tuple[int, int], key: Key) -> Mapping[Kind, ActionSeconds]:
        """Return what the actions of a chunk take for one micro-batch. Chunks in the middle are alike by their size."""
        first, last = layers
        is_first, is_last = first == 0, last == self.num_layers
        of = (last - first, is_first, is_last) if layers_are_alike(self.question.base.model) else layers
        if (of, key) not in self._chunks:
            chunk = Chunk(0, layers, None, None, Recompute(key[2]), Gathered(key[3]))
            config, known = self._config(key), self._sums.setdefault(key, {})
            self._chunks[of, key] = chunk_seconds(
                config,
                key[0],
                self._machine,
                chunk,
                is_first=is_first,
                is_last=is_last,
                known=known,
                load=self.question.load,
            )
        return self._chunks[of, key]

    def _config(self, key: Key) -> Config:
        base, (tp, micro_batch_size, recompute, gathered, tp_comm, ep) = self.question.base, key
        again: dict[str, Any] = {"recompute": recompute, "gathered": gathered, "tp_comm": tp_comm}
        # No stage of ZeRO: what a run that goes on was started with says nothing of the layouts.
        parallel = replace(base.parallel, tp=tp, pp=1, dp=max(1, ep // tp), ep=ep, zero=0, residency="auto", **again)
        return replace(base, parallel=parallel, train=replace(base.train, micro_batch_size=micro_batch_size))

    def _pipeline(self, layout: Candidate) -> _Pipeline:
        key = layout.tp, layout.micro_batch_size, layout.recompute, layout.gathered, layout.tp_comm, layout.ep
        of = layout.schedule, layout.pp, layout.dp, layout.chunks_per_rank, key
        if of not in self._pipelines:
            self._pipelines[of] = self._worked_out(layout, key)
        return self._pipelines[of]

    def _worked_out(self, layout: Candidate, key: Key) -> _Pipeline:
        ranks = _ranks_of(layout)
        if ranks is None:
            # A file's schedule: nothing is known of its order, nor of where its chunks are.
            computed = layout.num_micro_batches * _forward_and_backward(self._of_chunk((0, self.num_layers), key))
            return _Pipeline((0.0,), (computed / layout.pp,), (computed / layout.pp,), (0,), 0, 0.0)
        train = self.question.base.train
        layers = layer_ranges(self.question.base.model, train.seq_len, ranks, Recompute(layout.recompute))
        chunks = [self._of_chunk(of, key) for of in layers]
        is_split = layout.schedule in ("zb-h1", "zbv")
        hop = self._hop_seconds(layout)
        # By chunk: what lies between the model's first chunk and it.
        down, up = [0.0], [0.0]
        for index, chunk in enumerate(chunks):
            hops = hop if index + 1 < len(ranks) and ranks[index] != ranks[index + 1] else 0.0
            down.append(down[-1] + chunk[Kind.F].total + hops)
            up.append(up[-1] + chunk[Kind.I if is_split else Kind.B].total + hops)
        number, last_weights = layout.num_micro_batches, chunks[0][Kind.W].total
        before, busy, last_backward, held = [], [], [], []
        for rank in range(layout.pp):
            own = [index for index, holder in enumerate(ranks) if holder == rank]
            forward = sum(chunks[index][Kind.F].total for index in own)
            if is_split:
                inputs, weights = (sum(chunks[index][kind].total for index in own) for kind in (Kind.I, Kind.W))
                back = max(number * weights, up[own[0]] + last_weights)
                busy.append(number * (forward + inputs) + back)
                last = chunks[own[0]][Kind.W].total
            else:
                backward = sum(chunks[index][Kind.B].total for index in own)
                busy.append(number * (forward + backward) + up[own[0]])
                last = chunks[own[0]][Kind.B].total
            # Reductions begin while the last backward runs; what comes behind it need not wait for them.
            after = busy[-1] - number * forward - number * (inputs + weights if is_split else backward)
            before.append(down[own[0]])
            last_backward.append(last + after if len(own) == 1 else busy[-1])
            held.append(sum(layers[index][1] - layers[index][0] for index in own))
        once = down[-1] + up[-1] + (last_weights if is_split else 0.0)
        first = layers[0][1] - layers[0][0]
        return _Pipeline(tuple(before), tuple(busy), tuple(last_backward), tuple(held), first, once)

    def _hop_seconds(self, layout: Candidate) -> float:
        """Return how long a micro-batch takes from a rank to the next one at least: on one node, or between two."""
        train, machine, stride = self.question.base.train, self.question.machine, layout.dp * layout.tp
        elements = layout.micro_batch_size * train.seq_len // layout.tp * self.question.base.model.hidden_size
        links = (machine.within, machine.between) if machine.fits_a_node(2, stride) else (machine.between,)
        return min(link.message_seconds(elements * self.narrow) for link in links)

    def _optimizer(self, layout: Candidate) -> float:
        machine, dtype = self.question.machine, self.question.base.train.dtype
        updated = sum(num // (replicas if layout.zero else 1) for num, replicas in self._shares(layout))
        world = layout.tp * layout.pp * layout.dp
        clip = machine.other_seconds(Work(memory_bytes=updated * self.wide), dtype)
        clip += 2 * math.ceil(math.log2(world)) * machine.link(world, 1).latency_s
        work, operator = update_work(self.question.base.optim, dtype, updated)
        update = clip + machine.other_seconds(work, dtype, operator)
        return machine.recorded.get(Kind.STEP, 1.0) * update

    def _stream(self, layout: Candidate) -> float:
        """Return how long a rank's stream of gathers and reductions is busy at least."""
        # Of experts on more ranks than tp, their fewer replicas exchange less: not counted.
        num = self._shares(layout)[0][0]
        reduce, gather = self._reduction(layout, num), self._gather(layout, num)
        if layout.zero == 0:
            return reduce
        each = layout.zero >= ZERO_OF_SLICED_GRADIENTS and self.question.base.train.reduction == "fast"
        gathers = 1
        if layout.zero == ZERO_OF_SLICED_WEIGHTS and layout.residency == "use" and layout.schedule in _GATHERS_EACH:
            gathers = 2 * layout.num_micro_batches
        return reduce * (layout.num_micro_batches if each else 1) + gather * gathers

    def _first_gather(self, layout: Candidate, pipeline: _Pipeline) -> float:
        """Return how long the first forward waits for its weights."""
        num_weights = pipeline.first_layers * self._of_layer(layout) / layout.tp
        return self._gather(layout, num_weights) if layout.zero else 0.0

    def _last_reductions(self, layout: Candidate, num_layers: int) -> float:
        return self._reduction(layout, num_layers * self._of_layer(layout) / layout.tp)

    def _gather(self, layout: Candidate, num_weights: float) -> float:
        return self._among_replicas(layout, num_weights * self.narrow)

    def _reduction(self, layout: Candidate, num_weights: float) -> float:
        return (1 if layout.zero else 2) * self._among_replicas(layout, num_weights * self.wide)

    def _among_replicas(self, layout: Candidate, num_bytes: float) -> float:
        """Return how long replicas gather bytes at least: those of a stage lie on one node, or on several."""
        machine = self.question.machine
        link = machine.link(layout.dp, layout.tp)
        links = (link, machine.between) if machine.fits_a_node(layout.dp, layout.tp) else (link,)
        return min(link.gather_seconds(num_bytes, layout.dp) for link in links)


# Each forward and each backward of some rank gathers for itself; with postponed weight halves uses may be one.
_GATHERS_EACH = ("gpipe", "1f1b", "interleaved")


def _ranks_of(layout: Candidate) -> tuple[int, ...] | None:
    """Return the ranks of a schedule's chunks, as its generator places them; None for a file's."""
    if layout.schedule not in SCHEDULES:
        return None
    return vee(layout.pp) if layout.schedule == "zbv" else looping(layout.pp, layout.chunks_per_rank)


def _replicas_of_experts(layout: Candidate) -> int:
    """Return how many ranks of a stage hold the same experts, where more than tp share them out."""
    return max(1, layout.dp * layout.tp // layout.ep)


def _forward_and_backward(model: Mapping[Kind, ActionSeconds]) -> float:
    halves = model[Kind.I].total + model[Kind.W].total
    return model[Kind.F].total + min(model[Kind.B].total, halves)


def _fills_all_chunks(layout: Candidate) -> bool:
    """Return whether a stage holds as many activations as ever while all of its chunks have had a backward."""
    is_long = layout.num_micro_batches >= 2 * layout.pp and layout.num_micro_batches % layout.pp == 0
    return layout.chunks_per_rank == 1 or (layout.schedule == "interleaved" and is_long)


def _num_live(layout: Candidate) -> float:
    """Return of how many chunks and micro-batches some stage keeps activations at once, at least."""
    pp, chunks, number = layout.pp, layout.chunks_per_rank, layout.num_micro_batches
    match layout.schedule:
        case "gpipe":
            return chunks * number
        case "1f1b" | "zb-h1":
            return min(pp, number)
        case "interleaved":
            if number % pp == 0:
                return min(chunks * number, pp * (chunks - 1) + 2 * (pp - 1) + 1)
            # The first group passes all chunks but the last before the first backward arrives.
            return min(chunks * number, (chunks - 1) * min(pp, number) + 1)
        case "zbv":
            return min(2 * pp, 2 * number)
    return 1
