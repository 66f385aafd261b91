"""The costs of another engine's step: ours (modelled/costs.py), with what it computes, keeps and sends otherwise."""

from __future__ import annotations

import math
from dataclasses import replace

from tpkernels.work import Work

from benchmarks.planner.published.chunk import engine_seconds
from benchmarks.planner.published.engine import Engine
from benchmarks.planner.published.kept import engine_activations
from tpengine.config import Config
from tpengine.layout.parameters import ParameterSpec, chunk_specs
from tpengine.layout.step_plan import Layout
from tpengine.plan import Bucket, Kind, Plan
from tpengine.simulate import ChunkBytes, Costs
from tpengine.simulate.costs import spec_bytes
from tpengine.simulate.machine import Machine
from tpengine.simulate.modelled.costs import StepCosts, crosses_nodes


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
