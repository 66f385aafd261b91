"""Lower bounds of a layout's time and memory, without a plan: what most layouts are left out by.

Time: what the busiest rank computes if layers are cut as evenly as they can be, what filling and draining a pipeline
takes, and the optimizer; or the stream of gathers and reductions, if that is longer. Stages that do not hold equally
much can shorten filling and draining: it is counted for two layers less than a chunk has. Memory: an equal share of the
state, and the activations that a stage keeps at least when the pipeline is full. Tests check that both are below what
the simulator finds for the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpkernels.work import adamw_work

from tpengine.advice.candidates import Candidate
from tpengine.advice.question import Question
from tpengine.config import Config
from tpengine.config.rules import ZERO_OF_SLICED_GRADIENTS, ZERO_OF_SLICED_WEIGHTS
from tpengine.layout.parameters import num_parameters
from tpengine.layout.state_bytes import even_state_bytes
from tpengine.layout.step_plan import dtype_bytes, gradient_bytes
from tpengine.plan import Chunk, Gathered, Kind, Recompute
from tpengine.simulate.modelled.bytes import BlockBytes
from tpengine.simulate.modelled.operators import ActionSeconds, chunk_seconds

# Of what the ends take together, the last chunk's, at least.
_HEAD = 0.5


class Bounds:
    """Bounds of a question's layouts; what many of them share is computed once."""

    def __init__(self, question: Question) -> None:
        self.question = question
        model, dtype = question.base.model, question.base.train.dtype
        self.num_layers, self.num_weights = model.num_layers, num_parameters(model)
        self.narrow, self.wide = dtype_bytes(dtype), gradient_bytes(dtype)
        self._model: dict[tuple[Any, ...], Mapping[Kind, ActionSeconds]] = {}
        self._most: dict[tuple[Any, ...], float] = {}
        self._saved: dict[tuple[int, int, str, str], int] = {}

    def seconds(self, layout: Candidate) -> float:
        """Return a bound of the step."""
        key = layout.tp, layout.micro_batch_size, layout.recompute, layout.gathered, layout.tp_comm
        computing = layout.num_micro_batches * self._busiest(layout.pp, *key)
        busy = computing + self._bubble(layout, key) + self._optimizer(layout)
        return max(busy, self._stream(layout))

    def least_seconds(self, tp: int, pp: int, dp: int, micro_batch_size: int) -> float:
        """Return a bound for all layouts of these sizes: nothing is computed again, and there is no bubble."""
        per_replica = self.question.global_batch // dp // micro_batch_size
        busiest = (self._busiest(pp, tp, micro_batch_size, "none", "keep", comm) for comm in ("fused", "plain"))
        return per_replica * min(busiest)

    def num_bytes(self, layout: Candidate) -> float:
        """Return a bound of the bytes of the rank that holds most."""
        return self.state_bytes(layout) + self.activation_bytes(layout)

    def state_bytes(self, layout: Candidate) -> float:
        """Return weights, gradients, masters and moments of an equal share, with what is gathered."""
        numel, more = self.num_weights // (layout.tp * layout.pp), 0.0
        held = even_state_bytes(numel, layout.zero, layout.dp, self.question.base.train.dtype)
        # What is gathered, and what is not summed yet: of a chunk at least.
        if layout.zero >= ZERO_OF_SLICED_GRADIENTS:
            more += self.wide / layout.chunks_per_rank
        if layout.zero >= ZERO_OF_SLICED_WEIGHTS:
            more += self.narrow / (layout.chunks_per_rank if layout.residency == "use" else 1)
        return held + more * numel

    def activation_bytes(self, layout: Candidate) -> float:
        """Return what the micro-batches of a stage keep at least."""
        key = layout.tp, layout.micro_batch_size, layout.recompute, layout.gathered
        if key not in self._saved:
            block = BlockBytes.of(self._config(*key, "fused"), layout.tp, Gathered(layout.gathered), is_windowed=True)
            self._saved[key] = block.saved(Recompute(layout.recompute))
        return _num_live(layout) * (self.num_layers // layout.num_chunks) * self._saved[key]

    def of_model(self, *key: Any) -> Mapping[Kind, ActionSeconds]:
        """Return what the actions of the whole model take for one micro-batch, as one chunk.

        Args:
            key: tp, micro_batch_size, recompute, gathered, tp_comm.
        """
        return self._of_layers(self.num_layers, key)

    def _of_layers(self, num_layers: int, key: tuple[Any, ...]) -> Mapping[Kind, ActionSeconds]:
        if (num_layers, *key) not in self._model:
            tp, _, recompute, gathered, _ = key
            chunk = Chunk(0, (0, num_layers), None, None, Recompute(recompute), Gathered(gathered))
            config, machine = self._config(*key), self.question.machine
            self._model[num_layers, *key] = chunk_seconds(config, tp, machine, chunk, is_first=True, is_last=True)
        return self._model[num_layers, *key]

    def _busiest(self, pp: int, *key: Any) -> float:
        """Return what the busiest of `pp` ranks computes for one micro-batch, however layers are cut."""
        if (pp, *key) not in self._most:
            ends = _forward_and_backward(self._of_layers(0, key))
            layer = max(0.0, _forward_and_backward(self.of_model(*key)) - ends) / self.num_layers
            # The last rank has the head and some layers, the others the rest; the embedding is nearly nothing.
            cuts = range(self.num_layers + 1) if pp > 1 else [self.num_layers]
            others = max(1, pp - 1)
            self._most[pp, *key] = min(
                max(last * layer + _HEAD * ends, -(-(self.num_layers - last) // others) * layer) for last in cuts
            )
        return self._most[pp, *key]

    def _config(self, tp: int, micro_batch_size: int, recompute: str, gathered: str, tp_comm: str) -> Config:
        base = self.question.base
        again: dict[str, Any] = {"recompute": recompute, "gathered": gathered, "tp_comm": tp_comm}
        parallel = replace(base.parallel, tp=tp, pp=1, dp=1, **again)
        return replace(base, parallel=parallel, train=replace(base.train, micro_batch_size=micro_batch_size))

    def _bubble(self, layout: Candidate, key: tuple[Any, ...]) -> float:
        """Return what a rank waits at least while the pipeline fills and drains (plan/README.md)."""
        ends, model = self._of_layers(0, key), self.of_model(*key)
        kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
        forward, both, inputs, weights = (
            max(0.0, model[kind].total - ends[kind].total) / self.num_layers for kind in kinds
        )
        per_layer = {
            "zb-h1": max(0.0, forward + inputs - weights),
            # Weight halves fill nearly all of it.
            "zbv": max(0.0, forward + inputs - 2 * weights) / 2,
        }.get(layout.schedule, forward + both)
        layers = max(0.0, self.num_layers / layout.num_chunks - 2)
        return (layout.pp - 1) * per_layer * layers

    def _optimizer(self, layout: Candidate) -> float:
        updated = int(self.num_weights / (layout.tp * layout.pp * (layout.dp if layout.zero else 1)))
        copy = self.narrow if self.narrow < self.wide else 0
        machine, dtype = self.question.machine, self.question.base.train.dtype
        return machine.recorded.get(Kind.STEP, 1.0) * machine.other_seconds(adamw_work(updated, self.wide, copy), dtype)

    def _stream(self, layout: Candidate) -> float:
        """Return how long a rank's stream of gathers and reductions is busy at least."""
        if layout.dp == 1:
            return 0.0
        link, num = self.question.machine.link(layout.dp, layout.tp), self.num_weights / (layout.tp * layout.pp)
        reduce, gather = (link.gather_seconds(num * item, layout.dp) for item in (self.wide, self.narrow))
        if layout.zero == 0:
            return 2 * reduce
        gathers = 2 * layout.num_micro_batches if layout.zero == 3 and layout.residency == "use" else 1
        return reduce * (layout.num_micro_batches if layout.zero > 1 else 1) + gather * gathers


def _forward_and_backward(model: Mapping[Kind, ActionSeconds]) -> float:
    halves = model[Kind.I].total + model[Kind.W].total
    return model[Kind.F].total + min(model[Kind.B].total, halves)


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
