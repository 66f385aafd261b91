"""What is asked: a model, a machine, a batch; and which settings of a layout are fixed.

`candidates` yields every layout that a question allows: what differs between two runs of the same model and batch.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpengine.config import Config, ParallelConfig
from tpengine.config.lengths import MOST_MICRO_BATCHES
from tpengine.config.ranges import MOST_SEQUENCES, divisors
from tpengine.config.rules import ZERO_OF_SLICED_WEIGHTS, legal_ep
from tpengine.layout.groups import frozen_of
from tpengine.plan import SCHEDULES, Gathered, Recompute, Residency
from tpengine.planner.machine import Machine
from tpengine.planner.modelled.memory import ALLOCATOR_SHARE

# What of a layout may be fixed, by the name in ParallelConfig; micro_batch_size is of TrainConfig.
AXES = (
    "tp",
    "pp",
    "dp",
    "ep",
    "zero",
    "residency",
    "schedule",
    "chunks_per_rank",
    "recompute",
    "gathered",
    "tp_comm",
    "micro_batch_size",
    "bucket_bytes",
)
# Where a schedule leaves the number of chunks open.
_CHUNKS = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Question:
    """What layouts are searched for.

    Attributes:
        base: model, sequence length, dtype, reduction, bucket size; its layout and micro-batches do not matter.
        machine: rates, links, memory.
        num_ranks: how many ranks there are.
        global_batch: sequences per step, over all replicas.
        fixed: settings that the user chose, by their names in AXES: one value, or several as a tuple.
        num_tokens: of a whole run, whose length in time is told; 0 for none.
        kept: what a run has where a command does not say it: the defaults, or what a run that goes on was started with.
        load: rows of the rank whose experts get most, over the mean; 1 is an equal share.
    """

    base: Config
    machine: Machine
    num_ranks: int
    global_batch: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kept: ParallelConfig = field(default_factory=ParallelConfig)
    num_tokens: int = 0
    load: float = 1.0

    def __post_init__(self) -> None:
        unknown = sorted(self.fixed.keys() - set(AXES))
        assert not unknown, f"not settings of a layout: {unknown}"
        if self.num_ranks < 1 or self.global_batch < 1:
            raise ValueError(
                f"a step needs a rank and a sequence: got {self.num_ranks} ranks and a global batch of "
                f"{self.global_batch}: use at least 1 of each"
            )
        if frozen := frozen_of(self.base):
            raise ValueError(
                "layouts are compared of runs that train all weights, since their bounds are of those: optim.groups "
                f"freeze {len(frozen)} parameters: use tpengine schedule for a layout of your own, or leave frozen "
                "groups out"
            )
        # Refused here by name: a rate that the machine does not have.
        self.machine.peak(self.base.train.dtype)

    def choices(self, name: str, values: Iterable[Any]) -> list[Any]:
        """Return what a setting may be: what was chosen, else `values`."""
        fixed = self.fixed.get(name)
        return list(values) if fixed is None else list(fixed) if isinstance(fixed, tuple) else [fixed]

    def allows(self, name: str, value: Any) -> bool:
        """Return whether a setting may have a value."""
        return value in self.choices(name, [value])

    @property
    def memory_limit(self) -> float:
        """Return the bytes that a plan may hold: what was asked for, if a rank has as many.

        Else what the rank has, less what its libraries and the allocator take.
        """
        asked, has = self.base.parallel.memory_limit, self.machine.memory_bytes
        limit = asked if asked and (not has or asked <= has) else has * (1 - ALLOCATOR_SHARE)
        return float(limit) if limit else float("inf")

    def config(self, micro_batch_size: int, **parallel: Any) -> Config:
        """Return the configuration of one layout; `parallel` has tp, pp and dp, and what differs from the defaults."""
        per_replica = self.global_batch // (parallel["dp"] * micro_batch_size)
        sizes = {"micro_batch_size": micro_batch_size, "num_micro_batches": per_replica, "global_batch": 0}
        train = replace(self.base.train, **sizes)
        return replace(self.base, parallel=replace(self.base.parallel, **parallel), train=train)


@dataclass(frozen=True, order=True)
class Candidate:
    """A layout, in the words of ParallelConfig.

    `num_micro_batches` are of one replica; buckets of 0 bytes are as large as the question says.
    """

    tp: int
    pp: int
    dp: int
    schedule: str
    chunks_per_rank: int
    micro_batch_size: int
    num_micro_batches: int
    zero: int
    residency: str
    recompute: str
    gathered: str
    tp_comm: str
    bucket_bytes: int = 0
    ep: int = 1

    def config(self, question: Question) -> Config:
        """Return the run's configuration, not validated yet."""
        form = SCHEDULES.get(self.schedule)
        # Where the schedule has a number of its own, the setting stays as it is.
        chunks = {"chunks_per_rank": self.chunks_per_rank} if form is not None and form.num_chunks is None else {}
        bucket = {"bucket_bytes": self.bucket_bytes} if self.bucket_bytes else {}
        return question.config(
            self.micro_batch_size,
            **chunks,
            **bucket,
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            ep=self.ep,
            schedule=self.schedule,
            zero=self.zero,
            residency=self.residency if self.zero == ZERO_OF_SLICED_WEIGHTS else "auto",
            recompute=self.recompute,
            gathered=self.gathered,
            tp_comm=self.tp_comm,
        )

    @property
    def family(self) -> tuple[int, int, int]:
        """Return what an answer shows one row of: the axes."""
        return self.tp, self.pp, self.dp

    @property
    def num_chunks(self) -> int:
        """Return the chunks of the model."""
        return self.pp * self.chunks_per_rank

    def words(self) -> str:
        """Return the layout in words, without what is at its default."""
        parts = [f"tp {self.tp} pp {self.pp} dp {self.dp}"]
        if self.ep > 1:
            parts.append(f"ep {self.ep}")
        if self.pp > 1 or self.schedule != ParallelConfig.schedule:
            parts.append(f"{self.schedule} {self.chunks_per_rank}" if self.schedule == "interleaved" else self.schedule)
        if self.zero:
            in_use = self.zero == ZERO_OF_SLICED_WEIGHTS and self.residency == "use"
            parts.append(f"zero {self.zero}{' use' if in_use else ''}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        if self.gathered != "keep":
            parts.append("gathered again")
        if self.tp > 1 and self.tp_comm != "fused":
            parts.append("plain")
        if self.bucket_bytes:
            parts.append(f"buckets {self.bucket_bytes / 1e6:,.4g} MB")
        return " ".join([*parts, f"b {self.micro_batch_size} m {self.num_micro_batches}"])

    def flags(self, question: Question) -> str:
        """Return the layout as options of a run: its sizes, and what differs from what such a run has without them."""
        parallel, kept = self.config(question).parallel, question.kept
        said = {name: getattr(parallel, name) for name in ("tp", "pp", "dp")}
        names = [
            "ep",
            "schedule",
            "zero",
            "residency",
            "recompute",
            "gathered",
            "tp_comm",
            "bucket_bytes",
            "memory_limit",
        ]
        if self.dp == 1 and not self.zero and "zero" not in question.fixed:
            # As it is kept: of one replica that is 0 in effect, and with more of them it is needed again.
            names = [name for name in names if name not in ("zero", "residency")]
        said |= {name: getattr(parallel, name) for name in names if getattr(parallel, name) != getattr(kept, name)}
        if self.pp > 1:
            said["schedule"] = self.schedule
        if self.schedule == "interleaved":
            said["chunks_per_rank"] = self.chunks_per_rank
        options = [f"--parallel.{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in said.items()]
        sizes = f"--train.micro-batch-size {self.micro_batch_size} --train.num-micro-batches {self.num_micro_batches}"
        return " ".join([*options, sizes])


def shapes(question: Question) -> Iterator[tuple[int, int, int, int]]:
    """Yield tp, pp, dp and the sequences of a micro-batch of all layouts whose sizes divide."""
    for tp, pp, dp in _axes(question):
        for size in _micro_batch_sizes(question, tp, dp):
            yield tp, pp, dp, size


def candidates(question: Question, shape: tuple[int, int, int, int]) -> Iterator[Candidate]:
    """Yield every layout of these sizes; the rules of a run's configuration are checked later."""
    tp, _, dp, size = shape
    for again in alike(question, tp, dp):
        for stages in groups(question, shape, (tp, size, *again)):
            yield from stages


def alike(question: Question, tp: int, dp: int) -> Iterator[tuple[str, str, str, int]]:
    """Yield what is computed again, what is gathered again, how tp ranks exchange, and how many share experts.

    These are what an action's time needs.
    """
    yield from itertools.product(*_again(question, tp), shares_of_experts(question, tp, dp))


def shares_of_experts(question: Question, tp: int, dp: int) -> list[int]:
    """Return over how many ranks whole experts may be shared out, 1 for each expert cut over tp."""
    model, parallel = question.base.model, question.base.parallel
    legal = legal_ep(replace(question.base, parallel=replace(parallel, tp=tp, dp=dp)))
    if model.ffn_widths.get("expert_ffn_size", tp) % tp:
        legal = [ep for ep in legal if ep > 1]
    return [ep for ep in question.choices("ep", legal) if ep in legal]


def groups(
    question: Question, shape: tuple[int, int, int, int], key: tuple[int, int, str, str, str, int]
) -> Iterator[tuple[Candidate, ...]]:
    """Yield layouts of these sizes that compute alike, by schedule and, of these, by what replicas exchange at least.

    Without ZeRO a layout exchanges other things than with it. Stage 2 has reductions that stage 1 has not, and stage 3
    gathers that stage 2 has not: more with each residency. In exact mode a CPU copies weights that stay for its
    products, which stage 3 need not: none of the two is faster at sight.
    """
    tp, pp, dp, size = shape
    number, bucket = question.global_batch // dp // size, question.fixed.get("bucket_bytes", 0)
    stages = list(_zero(question, dp))
    copies = question.base.train.reduction == "exact" and not question.machine.is_asynchronous
    apart = ZERO_OF_SLICED_WEIGHTS if copies else 1
    cuts = ((0, 1), (1, apart), (apart, ZERO_OF_SLICED_WEIGHTS + 1))
    chains = [[stage for stage in stages if first <= stage[0] < end] for first, end in cuts]
    for schedule, chunks in _schedules(question, pp):
        for chain in filter(None, chains):
            yield tuple(
                Candidate(tp, pp, dp, schedule, chunks, size, number, *zero, *key[2:5], bucket, key[5])
                for zero in chain
            )


def counted(
    question: Question,
    shape: tuple[int, int, int, int],
    state_bytes: Callable[[Candidate], float],
    activation_bytes: Callable[[Candidate], float],
) -> tuple[int, int]:
    """Return how many layouts `candidates` yields, and how many of them fit, without listing them.

    State depends on ZeRO, chunks and experts' shares, activations on schedule, what is kept and those shares; all other
    settings multiply.
    """
    tp, pp, dp, size = shape
    number, (recomputes, gathereds, comms) = question.global_batch // dp // size, _again(question, tp)
    states, num, fitting = list(_zero(question, dp)), 0, 0
    for (schedule, chunks), ep in itertools.product(_schedules(question, pp), shares_of_experts(question, tp, dp)):

        def of(
            zero: tuple[int, str],
            recompute: str,
            gathered: str,
            cut: tuple[str, int] = (schedule, chunks),
            ep: int = ep,
        ) -> Any:
            return Candidate(tp, pp, dp, *cut, size, number, *zero, recompute, gathered, comms[0], ep=ep)

        held = [state_bytes(of(zero, recomputes[0], gathereds[0])) for zero in states]
        kept = [activation_bytes(of(states[0], *again)) for again in itertools.product(recomputes, gathereds)]
        num += len(held) * len(kept) * len(comms)
        fitting += len(comms) * sum(one + other <= question.memory_limit for one in held for other in kept)
    return num, fitting


def _again(question: Question, tp: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return what may be computed again, gathered again, and how tp ranks exchange."""
    return (
        question.choices("recompute", [each.value for each in Recompute]),
        question.choices("gathered", [each.value for each in Gathered] if tp > 1 else ["keep"]),
        question.choices("tp_comm", ["fused", "plain"] if tp > 1 else ["fused"]),
    )


def _axes(question: Question) -> Iterator[tuple[int, int, int]]:
    model, num = question.base.model, question.num_ranks
    for tp in question.choices("tp", divisors(num)):
        # An expert is cut over tp only where ranks do not share out whole ones.
        widths = [width for name, width in model.ffn_widths.items() if name != "expert_ffn_size"]
        kv, ffn = model.num_kv_heads, math.gcd(0, *widths)
        if num % tp or model.num_heads % tp or ffn % tp or (kv % tp and tp % kv):
            continue
        for pp in question.choices("pp", divisors(num // tp)):
            if pp > model.num_layers or num // tp % pp:
                continue
            dp = num // tp // pp
            divides = dp in question.choices("dp", [dp]) and question.global_batch % dp == 0
            if divides and shares_of_experts(question, tp, dp):
                yield tp, pp, dp


def _micro_batch_sizes(question: Question, tp: int, dp: int) -> Iterator[int]:
    per_replica = question.global_batch // dp
    for size in question.choices("micro_batch_size", divisors(per_replica)):
        if size > MOST_SEQUENCES:
            continue
        fits = per_replica % size == 0 and per_replica // size <= MOST_MICRO_BATCHES
        if fits and size * question.base.train.seq_len % tp == 0:
            yield size


def _schedules(question: Question, pp: int) -> Iterator[tuple[str, int]]:
    """Without a pipeline all schedules that do not cut the model run the same actions: one is enough."""
    for schedule in question.choices("schedule", list(SCHEDULES) if pp > 1 else ["1f1b"]):
        form = SCHEDULES.get(schedule)
        fixed = form.num_chunks if form else 1
        if fixed and not question.allows("chunks_per_rank", fixed):
            continue
        open_choices = [fixed] if fixed else question.choices("chunks_per_rank", _CHUNKS)
        for chunks in open_choices:
            if pp * chunks <= question.base.model.num_layers:
                yield schedule, chunks


def _zero(question: Question, dp: int) -> Iterator[tuple[int, str]]:
    """Yield stages and residencies, those with fewer exchanges first; below stage 3 a residency says nothing.

    With one replica each stage is 0 in effect.
    """
    every = [each.value for each in Residency]
    for zero in sorted(question.choices("zero", range(4))) if dp > 1 else [0]:
        if zero == ZERO_OF_SLICED_WEIGHTS:
            yield from (
                (zero, residency) for residency in sorted(question.choices("residency", every), key=every.index)
            )
        else:
            yield zero, question.choices("residency", ["step"])[0]
