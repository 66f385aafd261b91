"""A row's step, memory and MFU: its verified plan, simulated with the costs of its machine and engine.

Of many micro-batches two shorter steps are simulated. Once the pipeline is full the plan repeats itself, so each
further round of micro-batches takes as long as the difference between the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.planner.published.costs import engine_costs
from benchmarks.planner.published.frameworks import EngineOfRow, engine_of
from benchmarks.planner.published.lowering import Lowering, lowering_of
from benchmarks.planner.published.machines import machine_of
from benchmarks.planner.published.row import Row
from benchmarks.planner.published.sizes import Sizes, num_micro_batches_said
from tpengine.layout.parameters import num_matmul_parameters
from tpengine.plan import Plan
from tpengine.plan.actions import COMPUTE
from tpengine.plan.clock import Timeline
from tpengine.planner import Costs, simulate
from tpengine.planner.machine import MACHINES, Machine

# Data sheets count memory in binary units.
_BINARY_PER_DECIMAL = 2**30 / 1e9
# Rows of one table often differ by the batch alone: what has been simulated is kept, up to so many steps.
_MOST_KNOWN = 256
_known: dict[tuple[str, str, int, bool], tuple[float, float]] = {}
# NCCL's rings of a node with NVSwitch have so many channels, each a thread block on a processor of its own (log of an
# HGX A100 in NVIDIA/nccl-tests, issue 100).
_CHANNELS = 24
_MICRO_BATCHES = (1, 2, 4, 8, 16)
# By so much predicted peaks are too high where they are known (torchtitan's: 66.1 for 62 GiB).
_PEAK_ERROR = 0.06
# Chips of which there are sheets of less power, with the same kernels.
_CLOCKED = ("a100", "h100")
# A pipeline of p ranks is full after so many times p micro-batches: ZB-2p holds 2 p.
_FULL_AFTER = 2


@dataclass(frozen=True)
class Prediction:
    """What a row is predicted to take; without a prediction the numbers are None and the notes say why.

    Attributes:
        step_seconds: of one optimizer step.
        mfu: model flops over the peak's, 0 to 1: 6 per matmul parameter and token, attention counted in full.
        peak_bytes: of the rank that holds most.
        fits: whether that is within the device's memory.
        notes: the options of the engine, and what was assumed; or the reason.
    """

    step_seconds: float | None
    mfu: float | None
    peak_bytes: int | None
    fits: bool | None
    notes: str


def predicted(row: Row) -> Prediction:
    """Return a row's prediction; a row that cannot be predicted gets the reason, one line."""
    try:
        return _predicted(row)
    except ValueError as error:
        return Prediction(None, None, None, None, " ".join(str(error).split()))
    except Exception as error:
        # A fault of ours, which the notes name: the other rows of the table are worth their answers.
        return Prediction(
            None, None, None, None, f"the predictor failed: {type(error).__name__}: {error}".split("\n")[0]
        )


def _predicted(row: Row) -> Prediction:
    _refuse_experts(row)
    machine = machine_of(row)
    first: Prediction | None = None
    last_reason: ValueError | None = None
    for state in _states(row):
        found: list[Prediction] = []
        for filled in _micro_batches(state):
            try:
                found.append(_of_filled(filled, machine, said_of_recomputation=_says_of_recomputation(row)))
            except ValueError as error:
                last_reason = error
        fitting = [of for of in found if of.fits]
        if fitting:
            return min(fitting, key=lambda of: of.step_seconds or 0.0)
        # What does not fit either way is answered as it is most often run.
        first = first or (found[0] if found else None)
    if first is None:
        raise last_reason or ValueError("micro_batch must divide global_batch: got none that does: add it")
    return first


def _sizes_of(row: Row) -> Sizes:
    """Return a row's sizes without a word on what they assume."""
    return Sizes.of(replace(row, assumed=[]))


def _of_filled(row: Row, machine: Machine, *, said_of_recomputation: bool = True) -> Prediction:
    row = replace(row, assumed=list(row.assumed))
    sizes = Sizes.of(row)
    engine = engine_of(row, sizes)
    engine = at_its_clock(engine, machine)
    lowering = lowering_of(row, sizes, engine)
    if machine.num_processors and (engine.in_units or engine.num_buckets > 1):
        # Kernels beside a collective have fewer processors, and take as much longer.
        machine = replace(machine, reduce_share=_CHANNELS / (machine.num_processors - _CHANNELS))
    seconds, peak = step_and_peak(lowering, machine, sizes.num_micro_batches)
    # Of a run that says nothing of recomputation it is known that it ran: it may be predicted to take all, and what
    # predictions are too high.
    limit = usable_bytes(machine, 1 - engine.left_share if said_of_recomputation else 1 + _PEAK_ERROR)
    tokens = sizes.micro_batch * sizes.num_micro_batches * sizes.dp * sizes.seq
    rate = machine.peak(lowering.config.train.dtype) * sizes.gpus
    mfu = tokens * flops_per_token(lowering, sizes) / (seconds * rate)
    said = [
        *engine.words,
        _not_modelled(row),
        lowering.schedule if sizes.pp > 1 else "",
        *(f"assumed {text}" for text in row.assumed),
    ]
    notes = "; ".join(word for word in said if word)
    return Prediction(seconds, mfu, int(peak), peak <= limit, notes)


def at_its_clock(engine: EngineOfRow, machine: Machine) -> EngineOfRow:
    """Return an engine whose attention kernel runs at the clock that the machine's power allows.

    Shares of kernels were measured on the chip of full power. A limit of power holds for means over many kernels, so
    attention runs at the clock that products leave.
    """
    flash, full = engine.engine.flash, MACHINES.get(machine.name.split("-")[0])
    if flash is None or full is None or full.name not in _CLOCKED:
        return engine
    clock = machine.tile_share / full.tile_share
    slower = replace(flash, forward=clock * flash.forward, backward=clock * flash.backward)
    return replace(engine, engine=replace(engine.engine, flash=slower))


def _not_modelled(row: Row) -> str:
    """Return a remark on what makes a run slower that is not modelled; empty if there is nothing."""
    told = f"{row.text('zero_stage')} {row.columns.get('notes', '').lower()} {row.system()}"
    is_offloaded = re.search(r"offload(?!\w* *[=:] *(no|none|false|off|0)\b)", told) and "no offload" not in told
    return "offloading is not modelled" if is_offloaded else ""


def _refuse_experts(row: Row) -> None:
    said = f"{row.text('mlp')} {row.text('model')} {row.text('ffn')}"
    keys = ("experts", "moe", "num_experts", "ep", "top_k")
    if any(key in row.notes and row.notes[key] not in ("", "0", "1", "no") for key in keys) or any(
        word in said for word in ("moe", "mixtral", "deepseek-v", "expert")
    ):
        raise ValueError("the model must be dense: got experts, which are not modelled")


def _states(row: Row) -> Iterator[Row]:
    """Yield the row with what it does not say of ZeRO and recomputation; the first that fits is taken.

    Runs that are published ran. What takes least memory comes last.
    """
    sizes = _sizes_of(row)
    stages: list[dict[str, str]] = [{}]
    if not row.text("zero_stage") and sizes.dp > 1 and sizes.zero == 0:
        stages.append({"zero_stage": "1"})
    again: list[dict[str, str]] = [{}]
    if not _says_of_recomputation(row):
        again.append({"recompute": "full"})
    for recompute in again:
        for stage in stages:
            yield row.filled(**recompute, **stage)


def _says_of_recomputation(row: Row) -> bool:
    return any(row.text(name) for name in ("recompute", "ac", "activation_checkpointing"))


def _micro_batches(row: Row) -> Iterator[Row]:
    """Yield the row with each usual micro-batch, if it names none: published runs use the fastest that fits."""
    if row.text("micro_batch"):
        yield row
        return
    num_sequences, num_said = _sizes_of(row).num_micro_batches, num_micro_batches_said(row)
    if row.text("global_batch") and num_said and num_sequences % num_said == 0:
        yield row.filled(micro_batch=str(num_sequences // num_said))
        return
    for size in _MICRO_BATCHES:
        if num_sequences % size == 0:
            yield row.filled(micro_batch=str(size))


def usable_bytes(machine: Machine, share: float) -> float:
    """Return the bytes of a device's share, which a run's tensors can take."""
    return machine.memory_bytes * _BINARY_PER_DECIMAL * share


def flops_per_token(lowering: Lowering, sizes: Sizes) -> float:
    """Return a training step's model flops per token, forward and backward, attention over the whole square.

        6 N + 12 L H E S            N parameters that are multiplied with, S tokens of a sequence

    Source: Chowdhery et al., "PaLM", JMLR 2023, appendix B.
    """
    model = lowering.config.model
    return 6 * num_matmul_parameters(model) + 12 * sizes.layers * sizes.heads * model.head_size * sizes.seq


def step_and_peak(lowering: Lowering, machine: Machine, num_micro_batches: int) -> tuple[float, float]:
    """Return the seconds of a step and the bytes of the rank that holds most.

    Args:
        lowering: the row's.
        machine: its rates.
        num_micro_batches: of one replica.
    """
    period = lowering.layout.pp
    fewer = _FULL_AFTER * period + num_micro_batches % period
    more = fewer + period
    if num_micro_batches <= more:
        return _simulated(lowering, machine, num_micro_batches)
    first, _ = _simulated(lowering, machine, fewer, holds_bytes=False)
    second, peak = _simulated(lowering, machine, more)
    return first + (second - first) * (num_micro_batches - fewer) / period, peak


def _simulated(
    lowering: Lowering, machine: Machine, num_micro_batches: int, *, holds_bytes: bool = True
) -> tuple[float, float]:
    key = repr(lowering), repr(machine), num_micro_batches, holds_bytes
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = _simulate(lowering, machine, num_micro_batches, holds_bytes)
    return _known[key]


def _simulate(lowering: Lowering, machine: Machine, num_micro_batches: int, holds_bytes: bool) -> tuple[float, float]:
    plan = lowering.plan(num_micro_batches)
    costs = engine_costs(lowering.config, lowering.layout, lowering.with_blocks(plan), machine, lowering.engine.engine)
    if lowering.layout.pp > 1 and costs.reduce_share:
        costs = slowed_once(costs, plan)
    if not holds_bytes:
        costs = replace(costs, activations={}, resident=(), weights={}, contributions={})
    timeline = simulate(plan, costs)
    peak = max(rank.peak_bytes for rank in timeline.ranks)
    seconds = timeline.makespan
    if lowering.is_asynchronous:
        seconds = _longest_rank(timeline, costs)
    return seconds, peak


def slowed_once(costs: Costs, plan: Plan) -> Costs:
    """Return costs of a pipeline whose replicas' exchanges slow computation down, as a part of the step.

    Whatever a rank computes during an exchange is slower, and all ranks exchange at about the same time. If that were
    put on the action that starts an exchange, a micro-batch would meet it on each rank, one after another.
    """
    totals = [0.0] * len(plan.actions)
    for bucket in plan.buckets:
        seconds = costs.reductions.get(bucket.index, 0.0) + costs.gathers.get(bucket.index, 0.0)
        totals[plan.chunks[bucket.chunks[0]].rank] += seconds
    return replace(costs, reduce_share=0.0, step=costs.step + costs.reduce_share * max(totals))


def _longest_rank(timeline: Timeline, costs: Costs) -> float:
    """Return the step of ranks that do not wait for each other at its end: the next one begins on each as it ends."""
    longest = 0.0
    for rank in timeline.ranks:
        spans = [span for span in rank.compute if span.action.kind in COMPUTE]
        longest = max(longest, spans[-1].end - spans[0].start)
    return longest + costs.step
