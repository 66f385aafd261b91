"""One layout, worked out: its verified plan, the simulated step, parts, memory and share of the peak.

The parts say where the step's time goes, by cause, on the rank that computes longest, and add up to the step. What a
rank holds is also a sheet of formulas with their numbers put in: `tpengine plan --explain-memory`.

At the end: durations and bytes in few digits, as answers and sheets say them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from tpengine.architectures.part import MASK, Kept, Sizes
from tpengine.config import Config, optimizer_kind, validate
from tpengine.distributed.nccl_limits import CONNECTION_BYTES
from tpengine.dtypes import dtype_bytes
from tpengine.layout.flops import step_flops
from tpengine.layout.state_bytes import num_trained, num_weights, state_bytes
from tpengine.layout.step_plan import Layout, gradient_bytes, layout_of, training_plan
from tpengine.layout.update_work import state_item_bytes
from tpengine.plan import Kind, Plan, Recompute, Residency, Timeline
from tpengine.plan.actions import BUCKET, COMPUTE
from tpengine.planner import StepFigures, simulate
from tpengine.planner.machine import Machine
from tpengine.planner.modelled.activations import BlockBytes, activation_bytes
from tpengine.planner.modelled.caches import FORMS
from tpengine.planner.modelled.costs import action_seconds, model_costs
from tpengine.planner.modelled.exchanged import exchanged
from tpengine.planner.modelled.memory import RankMemory, memory_of
from tpengine.planner.modelled.operators import ActionSeconds

# Below this load the busiest rank is as any other.
_UNEVEN = 1.005
_ORDINALS = ("first", "second", "third")
_LEGEND = (
    "letters: T tokens of a micro-batch, t of this rank, D width, H and G query and KV heads of this rank, E head\n"
    "size, F columns of this rank, e and a bytes of the dtype and of float32 or wider"
)


@dataclass(frozen=True)
class Sheet:
    """A configuration's step as it would run on a machine.

    Attributes:
        config: validated.
        machine: its rates.
        layout, plan, timeline: who holds what, the verified plan, and its simulation.
        load: of the rank that gets most, as architectures' Sizes has it.
    """

    config: Config
    machine: Machine
    layout: Layout
    plan: Plan
    timeline: Timeline
    load: float = 1.0

    @classmethod
    def of(
        cls,
        config: Config,
        machine: Machine,
        builds: Callable[[Config, Layout], Plan] = training_plan,
        balanced_for: int = 0,
        load: float = 1.0,
    ) -> Sheet:
        """Build and simulate the plan that a run of this configuration executes.

        Args:
            config: with tp, pp and dp.
            machine: its rates.
            builds: what builds the plan, by default verified.
            balanced_for: as layout_of.
            load: of the rank that gets most.

        Raises:
            ValueError: the configuration is not legal; the rule, the values and the nearest choice.
        """
        parallel = config.parallel
        config = validate(config, (parallel.tp or 1) * (parallel.pp or 1) * (parallel.dp or 1))
        residency = None if config.parallel.residency == "auto" else Residency(config.parallel.residency)
        layout = layout_of(config, residency, balanced_for, machine.is_asynchronous)
        plan = builds(config, layout)
        costs = model_costs(config, layout, plan, machine, load=load)
        return cls(config, machine, layout, plan, simulate(plan, costs), load)

    @cached_property
    def seconds(self) -> float:
        """Return the step's length."""
        return self.timeline.makespan

    @cached_property
    def peak_bytes(self) -> float:
        """Return the most that a rank holds."""
        return max(rank.peak_bytes for rank in self.timeline.ranks)

    @cached_property
    def parts(self) -> StepParts:
        """Where the time goes."""
        seconds = action_seconds(self.config, self.layout, self.plan, self.machine, load=self.load)
        return StepParts.of(self.plan, self.timeline, seconds)

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """What each pipeline rank holds, by kind."""
        return memory_of(self.config, self.layout, self.plan, self.machine, self.load)

    def share_of_peak(self, *, causal_half: bool = True, counts_again: bool = False) -> float:
        """Return model flops (or, with what is computed again, hardware flops) over what the peak allows."""
        flops = step_flops(self.config, causal_half=causal_half, counts_again=counts_again)
        num_ranks = self.layout.tp * self.layout.pp * self.layout.dp
        return flops / self.seconds / (self.machine.peak(self.config.train.dtype) * num_ranks)


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step by cause.

    Attributes:
        compute: operators of forward and backward.
        again: operators that backward runs a second time (recomputation).
        tp: exchanges of tensor-parallel ranks that no operator hides.
        pp: waiting for a transfer between stages that is under way.
        dp: waiting for gathers and reductions over replicas.
        bubble: waiting for other stages that are not that far yet.
        optimizer: clipping, tied embeddings' sum, the update.
        host: starting operators, where it takes longer than they do.
        exact: what exact mode takes longer.
    """

    compute: float
    again: float
    tp: float
    pp: float
    dp: float
    bubble: float
    optimizer: float
    host: float
    exact: float

    @classmethod
    def of(cls, plan: Plan, timeline: Timeline, seconds: Mapping[tuple[Kind, int], ActionSeconds]) -> StepParts:
        """Return the parts of a simulated step.

        Args:
            plan, timeline: the plan and its simulation.
            seconds: what its compute actions take, by cause; the simulation's costs were their totals.
        """
        figures = StepFigures.of(plan, timeline)
        rank = figures.slowest
        of_rank, lanes = figures.ranks[rank], timeline.ranks[rank]
        number = Counter((span.action.kind, span.action.chunk) for span in lanes.compute if span.action.kind in COMPUTE)
        spent = {
            name: sum(getattr(seconds[kind, chunk or 0], name) * count for (kind, chunk), count in number.items())
            for name in ("compute", "again", "exchange", "host", "exact")
        }
        # Where the same core moves buckets, the actions that start them take longer (Costs.reduce_share).
        slowed = sum(span.duration for span in lanes.compute if span.action.kind in COMPUTE) - sum(spent.values())
        buckets = sum(time for kind, time in of_rank.waited_in.items() if kind in BUCKET)
        return cls(
            compute=spent["compute"],
            again=spent["again"],
            tp=spent["exchange"],
            pp=of_rank.exposed - buckets,
            dp=buckets + slowed,
            bubble=of_rank.bubble + of_rank.idle,
            optimizer=sum(span.duration for span in lanes.compute if span.action.kind not in COMPUTE),
            host=spent["host"],
            exact=spent["exact"],
        )

    @property
    def step(self) -> float:
        """Return the sum of the parts."""
        return sum(getattr(self, field.name) for field in fields(self))

    def less(self, other: StepParts) -> dict[str, float]:
        """Return by how many seconds each part is longer than another step's."""
        return {field.name: getattr(self, field.name) - getattr(other, field.name) for field in fields(self)}


def exchange_lines(config: Config, plan: Plan, load: float) -> Iterator[str]:
    """Yield what ranks that share experts send each other, and what the busiest of them computes.

    Args:
        config: validated.
        plan: of that configuration.
        load: rows of the rank whose experts get most, over the mean.
    """
    ep = config.parallel.ep
    if ep == 1:
        return
    most, mean = exchanged(config, plan, load), exchanged(config, plan)
    share = min(load, ep)
    line = (
        f"{ep} ranks share the {config.model.details.num_experts} experts: each sends "
        f"{gigabytes(mean.forward)} in F and {gigabytes(mean.backward)} in B of a micro-batch"
    )
    if share < _UNEVEN:
        yield f"{line}, if all get as many rows; --moe-load says how it is if not"
    else:
        yield (
            f"{line} in the mean, the slowest {gigabytes(most.forward)} and {gigabytes(most.backward)}: its experts "
            f"get {share:.2f} times the mean, {share / ep:.0%} of all rows"
        )


def memory_lines(sheet: Sheet) -> Iterator[str]:
    """Yield the state of each stage, what a block keeps of a micro-batch, and the peak with its action."""
    config, layout = sheet.config, sheet.layout
    narrow, wide = dtype_bytes(config.train.dtype), gradient_bytes(config.train.dtype)
    share = f" / dp {layout.dp}"
    if layout.ep > layout.tp:
        # Experts on more ranks than tp have fewer replicas, and none cuts what it alone holds.
        share += f", experts' / {layout.dp * layout.tp // layout.ep}"
    shares = [share if layout.zero >= stage else "" for stage in (3, 2, 1)]
    for rank, memory in enumerate(sheet.memory):
        num, state = num_weights(config, layout, rank), state_bytes(config, layout, rank)
        trained = num_trained(config, layout, rank)
        yield f"rank {rank}: {num:,} weights{f', {num - trained:,} of them frozen' if trained < num else ''}"
        moments = len(optimizer_kind(config.optim).states), state_item_bytes(config.optim, config.train.dtype)
        kinds = (("weights", 1, narrow), ("gradients", 1, wide), ("masters", 1, wide), ("moments", *moments))
        for (name, times, item), share in zip(kinds, (*shares, shares[-1]), strict=True):
            numel = num if name == "weights" else trained
            formula = f"{numel:,} x {times} x {item}" if times > 1 else f"{numel:,} x {item}"
            # Exact mode cuts by blocks of its own, and has gradients in the trees that add them up (exact_sizes.py).
            if config.train.reduction == "exact" and (layout.zero or name == "gradients"):
                formula, share = "by blocks, and the trees that add them up", ""
            if num_bytes := getattr(state, name):
                yield _line(name, formula + share, num_bytes)
        if state.padding:
            yield _line("of these padding", "slices of buckets", state.padding)
        if memory.prepared:
            yield _line("for matmuls", f"{FORMS} forms of the large matrices", memory.prepared)
        for name, num_bytes in (
            ("gathered weights", memory.gathered),
            ("not summed yet", memory.unsummed),
            ("receive slots", memory.slots),
            ("activations", memory.activations),
        ):
            if num_bytes:
                yield _line(name, "the most at once", num_bytes)
        if memory.communicators:
            # NCCL's own buffers: of each group processors, for each neighbour in its ring and trees (nccl_limits.py).
            formula = f"estimate: processors x neighbours of groups x {CONNECTION_BYTES:,}"
            yield _line("NCCL's buffers", formula, memory.communicators)
        held = f"at {memory.compute_action}: what is held then; a kind may peak elsewhere"
        yield _line("peak", held, memory.peak)
    yield from _block_lines(sheet)


def _block_lines(sheet: Sheet) -> Iterator[str]:
    config, chunk = sheet.config, sheet.plan.chunks[0]
    # Without groups: of a block that is trained.
    block = BlockBytes.of(Sizes.of(config, sheet.layout.tp, chunk.gathered, load=sheet.load), 0)
    recompute, s = Recompute(config.parallel.recompute), block.s
    x = f"t D e = {s.own_tokens} x {s.hidden} x {s.item}"
    yield f"a block keeps of a micro-batch from F to B, with recompute {recompute.value}:"
    if _shows_input(block, 0, recompute):
        yield _line("its input", x, s.x)
    keeps_parts = recompute in (Recompute.NONE, Recompute.ATTENTION)
    if block.decided and not keeps_parts:
        yield _line("choices", "experts, weights and places of each token, counts", block.decided)
    for place in range(len(block.halves) - 1, -1, -1) if keeps_parts else ():
        half = block.halves[place]
        if place > 0 and _shows_input(block, place, recompute):
            yield _line(f"sum after {block.halves[place - 1].part.title}", x, s.x)
        if recompute is Recompute.NONE or not half.part.is_computed_again:
            yield from _half_lines(block, place)
    yield _line("together", "", block.saved(recompute))
    if config.model.details.num_experts:
        yield from _working_lines(sheet, block, keeps_parts)
    yield _LEGEND


def _working_lines(sheet: Sheet, block: BlockBytes, keeps_parts: bool) -> Iterator[str]:
    """Yield what a block of experts makes again in backward, and what the actions of a chunk work with besides.

    Rows of experts are the most of both, and grow with the load.
    """
    if not keeps_parts:
        yield "made again in B, of one block at a time:"
        for place in range(len(block.halves)):
            yield from _half_lines(block, place)
    load = f", at a load of {sheet.load:g}" if sheet.load > 1 else ""
    yield f"held only while an action of chunk 0 runs{load}:"
    working = activation_bytes(sheet.config, sheet.layout.tp, sheet.plan, sheet.load)[0].working
    run = {action.kind for actions in sheet.plan.actions for action in actions}
    for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        if kind in run and working.get(kind):
            yield _line(f"in {kind}", "beside what is kept", working[kind])


def _shows_input(block: BlockBytes, place: int, recompute: Recompute) -> bool:
    """Return whether a half's input has a line of its own: not where it is among its gathered rows, or is let go.

    Where whole chunks are computed again, the chunk keeps its input, and no block of it.
    """
    if recompute is Recompute.FULL:
        return False
    return recompute is Recompute.BLOCK or block.halves[place].norm.keeps_input or block.is_again(place, recompute)


def _half_lines(block: BlockBytes, place: int) -> Iterator[str]:
    """Yield what a half keeps: its norm, its part, norms of its output, masks."""
    half, s = block.halves[place], block.s
    ordinal = _ORDINALS[place] if place < len(_ORDINALS) else f"{place + 1}th"
    yield from (_line(f"{ordinal} {of.name}", of.formula, of.num_bytes) for of in half.norm.kept(s))
    masks = [Kept(MASK, f"t D = {s.own_tokens} x {s.hidden}", s.residual_mask)]
    for kept in half.part.kept(s):
        if kept.name == MASK:
            masks.append(kept)
        elif kept.num_bytes:
            yield _line(kept.name, kept.formula, kept.num_bytes)
    if behind := block.behind(place):
        yield _line("norm of its output", "its input and statistics", behind)
    yield from (_line(mask.name, mask.formula, mask.num_bytes) for mask in masks if mask.num_bytes)


def _line(name: str, formula: str, num_bytes: float) -> str:
    return f"  {name:<32} {formula:<72} {num_bytes:>17,.0f}"


def seconds_text(seconds: float) -> str:
    """Return a duration in s or ms, three digits."""
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.0f} s" if abs(seconds) >= 100 else f"{seconds:.3g} s"


def days_text(seconds: float) -> str:
    """Return how long a run takes: in days, hours or minutes, three digits."""
    for unit, length in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= length:
            number = seconds / length
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return seconds_text(seconds)


def gigabytes(num_bytes: float) -> str:
    """Return bytes in GB, or in MB, kB or bytes where they are few."""
    if num_bytes >= 10e9:
        return f"{num_bytes / 1e9:.0f} GB"
    if num_bytes >= 1e6:
        return f"{num_bytes / 1e6:,.0f} MB"
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes >= 1e3 else f"{num_bytes:.0f} B"
