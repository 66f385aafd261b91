"""Whether the rows that routers send to a rank's experts still fit into --parallel.memory-limit, step by step.

A run starts if its plan fits with experts used evenly. Up to which load it fits the plan says too; a step whose load is
above that has passed the limit, and the run ends: by name, on all ranks alike. Without that setting the limit is what
there is, and memory itself ends the run; its error then has layer, micro-batch and experts (layers/whereabouts.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tpengine.config import Config
from tpengine.distributed.agreement import broadcast_json
from tpengine.layout.parameters import layers_of_experts
from tpengine.layout.step_plan import Layout
from tpengine.plan import Recompute
from tpengine.runs.job import Wings
from tpengine.training.planned_run import PlannedPhase
from tpengine.training.train_step import TrainStep


class LoadLimit:
    """Judges the loads of steps.

    Args:
        wings: say up to which load a phase's plan fits.
        device: cpu or cuda.
    """

    def __init__(self, wings: Wings, device: str) -> None:
        self._wings, self._device = wings, device
        # By the number of the phase.
        self._most: dict[int, float] = {}

    def failure(self, step: int, train_step: TrainStep) -> str:
        """Return why the run ends behind a step, in one line; empty if it goes on. Equal on all ranks; collective.

        Args:
            step: 0-based number.
            train_step: has run it.

        Cost: without the setting, or where ranks share no experts, nothing; else the host waits for the step's counts,
            which it has had.
        """
        part, loads = train_step.state.part, train_step.loads
        if loads is None or part.layout.ep == 1 or not part.config.parallel.memory_limit:
            return ""
        most = self._most_of(part)
        (load, rank), layers = max(
            (hottest(loads.counts[places], part.layout.ep), of)
            for places, of in held_together(part.config, part.layout)
        )
        if load <= most:
            return ""
        each = part.config.model.details.num_experts // part.layout.ep
        where = f"layer {layers[0]}" if len(layers) == 1 else f"the experts of layers {layers[0]} to {layers[-1]}"
        return (
            f"memory must be enough for the rows of experts: in step {step + 1}, in {where}, experts {rank * each} to "
            f"{rank * each + each - 1}, which one of {part.layout.ep} ranks has, got {load:.2f} times the mean of a "
            f"rank's rows, and by the plan --parallel.memory-limit {part.config.parallel.memory_limit} is enough up to "
            f"{most:.2f}: use --train.balance loss or bias, another layout, or a larger limit"
        )

    def _most_of(self, part: PlannedPhase) -> float:
        number = part.phase.number
        if number not in self._most:
            # Rank 0's, as it is said when the run begins: the planner may know other things of other hosts.
            found = self._wings.most_load(part.config, part.layout, part.plan, self._device)
            self._most[number] = broadcast_json(found)
        return self._most[number]


def hottest(counts: Tensor, num_ranks: int) -> tuple[float, int]:
    """Return the rows of the hottest rank's experts over the mean rank's, and which of the ranks it is.

    Args:
        counts: [layers, E], of layers whose rows are held together.
        num_ranks: that share the experts.
    """
    by_rank = counts.view(len(counts), num_ranks, -1).sum((0, 2)).tolist()
    most = max(by_rank)
    return most * num_ranks / max(sum(by_rank), 1), by_rank.index(most)


def held_together(config: Config, layout: Layout) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the layers with experts whose rows a rank holds at once, as places among them all, and as numbers.

    Those of a stage; of a chunk, or of one layer, where backward computes that much again.
    """
    every = layers_of_experts(config.model)
    match config.parallel.recompute:
        case Recompute.BLOCK:
            groups = [[layer] for layer in every]
        case Recompute.FULL:
            groups = [[layer for layer in every if layer in range(*chunk)] for chunk in layout.layers]
        case _:
            stages = [layout.layers_of(rank) for rank in range(layout.pp)]
            groups = [
                [layer for layer in every if any(layer in range(*chunk) for chunk in chunks)] for chunks in stages
            ]
    for layers in groups:
        if layers:
            yield [every.index(layer) for layer in layers], layers
