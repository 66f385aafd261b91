"""What is asked: a model, a machine, a batch; and which settings of a layout are fixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tpengine.config import Config, ParallelConfig
from tpengine.simulate.machine import Machine

# What of a layout may be fixed, by the name in ParallelConfig; micro_batch_size is of TrainConfig.
AXES = (
    "tp",
    "pp",
    "dp",
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

# Of a GPU's memory: the driver's context, communication buffers, blocks that the allocator cannot use.
ALLOCATOR_SHARE = 0.06


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
    """

    base: Config
    machine: Machine
    num_ranks: int
    global_batch: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kept: ParallelConfig = field(default_factory=ParallelConfig)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        unknown = sorted(self.fixed.keys() - set(AXES))
        assert not unknown, f"not settings of a layout: {unknown}"
        if self.num_ranks < 1 or self.global_batch < 1:
            raise ValueError(
                f"a step needs a rank and a sequence: got {self.num_ranks} ranks and a global batch of "
                f"{self.global_batch}: use at least 1 of each"
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
