"""What each compute action of a plan takes: its chunk's operators (times/chunk.py), exact mode's price, recorded runs.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tpengine.config import Config, num_shards_of
from tpengine.layout.step_plan import Layout
from tpengine.plan import Chunk, Kind, Plan
from tpengine.simulate.machine import Machine
from tpengine.simulate.modelled.held.touched import touched_bytes
from tpengine.simulate.modelled.times.attention import AttentionOperators
from tpengine.simulate.modelled.times.chunk import ChunkActions
from tpengine.simulate.modelled.times.operators import Operators
from tpengine.simulate.modelled.times.packed import Packed
from tpengine.simulate.modelled.times.sums import ActionSeconds, KnownSums


def action_seconds(
    config: Config, layout: Layout, plan: Plan, machine: Machine, packed: Packed | None = None
) -> dict[tuple[Kind, int], ActionSeconds]:
    """Return what F, B, I and W of each chunk take on one tp rank.

    Args:
        config: validated; sizes, dtype, whether exchanges are fused.
        layout: of that configuration: its tensor-parallel ranks, and how many ranks wait for each other.
        plan: its chunks, with what each recomputes and gathers again.
        machine: its rates; they are taken as the layout's ranks find them (`machine_of_ranks`).
        packed: the documents of micro-batches, where attention does not cross them; the mean counts.
    """
    rates = machine_of_ranks(config, layout, plan, machine)
    sums: KnownSums = {}

    def of_chunk(chunk: Chunk, is_first: bool, is_last: bool) -> Mapping[Kind, ActionSeconds]:
        return _of_chunk(config, layout.tp, rates, chunk, is_first, is_last, sums, packed)

    return seconds_of_chunks(config, plan, of_chunk)


def seconds_of_chunks(
    config: Config, plan: Plan, of_chunk: Callable[[Chunk, bool, bool], Mapping[Kind, ActionSeconds]]
) -> dict[tuple[Kind, int], ActionSeconds]:
    """Return what the actions of each chunk take; chunks that are alike are asked for once.

    Args:
        config, plan: as for `action_seconds`.
        of_chunk: what F, B, I and W of a chunk take, which is the first one, or the last.
    """
    last = len(plan.chunks) - 1
    known: dict[object, Mapping[Kind, ActionSeconds]] = {}
    found: dict[tuple[Kind, int], ActionSeconds] = {}
    for index, chunk in enumerate(plan.chunks):
        # Chunks of equally many layers in the middle are alike, unless layers differ.
        is_alike = 0 < index < last and not config.model.details.windows
        alike = (chunk.layers[1] - chunk.layers[0], chunk.recompute, chunk.gathered) if is_alike else index
        if alike not in known:
            known[alike] = of_chunk(chunk, index == 0, index == last)
        found |= {(kind, index): seconds for kind, seconds in known[alike].items()}
    return found


def machine_of_ranks(config: Config, layout: Layout, plan: Plan, machine: Machine) -> Machine:
    """Return the machine as a layout's ranks find it: they wait for the slowest chip, and touch so many bytes.

    Args:
        config, layout, plan, machine: as for `action_seconds`. A layout's replicas include context-parallel ranks.
    """
    machine = machine.slowest_of(layout.tp * layout.pp * layout.dp)
    return machine.touching(touched_bytes(config, layout, plan, machine)) if machine.cached else machine


def chunk_seconds(
    config: Config,
    tp: int,
    machine: Machine,
    chunk: Chunk,
    *,
    is_first: bool,
    is_last: bool,
    known: KnownSums | None = None,
) -> Mapping[Kind, ActionSeconds]:
    """Return what F, B, I and W of one chunk take.

    Args:
        config, tp: as for `action_seconds`.
        machine: its rates, as `machine_of_ranks` has them.
        chunk: its layers.
        is_first, is_last: which ends of the model it holds.
        known: what chunks of this configuration, tp and machine have in common, to be kept from call to call.
    """
    return _of_chunk(config, tp, machine, chunk, is_first, is_last, {} if known is None else known)


def _of_chunk(
    config: Config,
    tp: int,
    machine: Machine,
    chunk: Chunk,
    is_first: bool,
    is_last: bool,
    known: KnownSums,
    packed: Packed | None = None,
) -> Mapping[Kind, ActionSeconds]:
    def with_shards(shards: int) -> Mapping[Kind, ActionSeconds]:
        operators = Operators(config, tp, machine, shards)
        attention = AttentionOperators(operators, config.train.micro_batch_size, packed)
        return ChunkActions(operators, attention, config.model, chunk, is_first, is_last, known).by_kind()

    fast = with_shards(0)
    taken = fast
    # A tp that does not divide the shards is refused with the configuration; until then it has no price.
    if config.train.reduction == "exact" and num_shards_of(config) % tp == 0:
        exact = with_shards(num_shards_of(config) // tp)
        taken = {kind: replace(of, exact=exact[kind].total - of.total) for kind, of in fast.items()}
    # A recorded run knows better what each kind of action takes.
    return {kind: of * machine.recorded.get(kind, 1.0) for kind, of in taken.items()} if machine.recorded else taken
