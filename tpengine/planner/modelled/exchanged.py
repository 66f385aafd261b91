"""What ranks exchange inside forward and backward beside what products gather and scatter: rows for experts. No torch.

Counted are the exchanges that parts describe (architectures/part.py: Exchange), of a micro-batch in all layers of a
stage. The bytes are those that the rank with most of them sends: the busiest one, where experts' rows are shared
unevenly, for which all others wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpengine.architectures.part import Exchange, Operator, Sizes
from tpengine.architectures.registry import layer_halves
from tpengine.config import Config
from tpengine.plan import Plan, Recompute


@dataclass(frozen=True)
class Exchanged:
    """Bytes that one rank sends for a micro-batch, of all layers of its stage.

    Attributes:
        forward, backward: in F; in B, or I. A W sends none of them.
        num_ranks: among how many ranks, the largest number.
    """

    forward: int
    backward: int
    num_ranks: int


def exchanged(config: Config, plan: Plan, load: float = 1.0) -> Exchanged:
    """Return what the rank sends that sends most, on the stage where it is most.

    Args:
        config: validated.
        plan: of that configuration.
        load: of the rank, as Sizes has it.
    """
    parallel = config.parallel
    s = Sizes.of(config, parallel.tp or 1, load=load)
    sizes = {"tp": parallel.tp or 1, "dp": parallel.dp or 1, "ep": parallel.ep}

    def num_ranks(exchange: Exchange) -> int:
        num = 1
        for axis in exchange.over:
            num *= sizes.get(axis, 1)
        return num

    def sent(operators: tuple[Operator, ...]) -> tuple[int, int]:
        found = [(of.work(num_ranks(of)).link_bytes, num_ranks(of)) for of in operators if isinstance(of, Exchange)]
        return sum(num for num, _ in found), max((num for _, num in found), default=1)

    stages = []
    for rank in range(plan.num_ranks):
        forward = backward = 0
        among = 1
        for chunk in plan.chunks_of(rank):
            for layer in range(*plan.chunks[chunk].layers):
                for half in layer_halves(config.model, layer):
                    there, num = sent(half.part.forward(s))
                    back, _ = sent(half.part.backward_operators(s))
                    # What is computed again sends its rows again.
                    back += there * (plan.chunks[chunk].recompute in (Recompute.BLOCK, Recompute.FULL))
                    forward, backward, among = forward + there, backward + back, max(among, num)
        stages.append(Exchanged(forward, backward, among))
    return max(stages, key=lambda stage: stage.forward + stage.backward)
