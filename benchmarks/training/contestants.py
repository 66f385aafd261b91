"""Contestants: an engine in a layout, as a set of processes of its own, told step by step when to run.

All contestants of a comparison are started once; then one works while the others block in reading a pipe. So steps
interleave, memory is measured separately, and layouts with different numbers of ranks can be compared in one run: tp 4
with tp 2, or any layout with one process. Another git revision takes part in the same way: its ranks import everything,
including this file, from a checkout of it. They only get the entry, the methods of `Member` and the numbers of steps.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.distributed.local_ranks import Ranks
from tpengine.distributed.rank_process import imported

CHECKED_STEPS = 2

# Largest relative difference of losses and gradient norms that rounding explains; measured: 1e-7, 1e-15 and 3e-3.
_TOLERANCES: Mapping[str, float] = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 2e-2}
# Named by text, since a rank loads its own engine alone.
_ENGINES: Mapping[str, str] = {
    "tpengine": "benchmarks.training.own_engine:OwnEngine",
    "torch": "benchmarks.training.torch_rival:TorchRival",
}


@dataclass(frozen=True)
class RivalOptions:
    """How torch's own tools are used. The defaults were the fastest; see torch_rival.py for the measurements."""

    tensor_parallel: Literal["sequence", "replicated"] = "replicated"
    """Activations between the matmuls: cut by sequence (gather, reduce-scatter), or whole (all-reduce)."""
    loss: Literal["parallel", "gathered"] = "parallel"
    """Cross-entropy over logits that stay cut by vocabulary, or that are gathered."""
    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    """DDP or fully_shard; with tensor parallelism it is always fully_shard."""
    optimizer: Literal["fused", "foreach"] = "fused"
    """Form of torch's AdamW."""
    zero_to_none: bool = True
    """Free the gradients after a step instead of zeroing them."""
    compile: bool = False
    """torch.compile every block; the first step then takes minutes."""


@dataclass(frozen=True)
class Entry:
    """A contestant's engine and configuration.

    Attributes:
        engine: tpengine, or torch's own tools.
        config: validated, layout resolved, on the CPU.
        rival: for engine torch.
        tree: the checkout from which the ranks import tpengine, tpkernels and benchmarks; None for the working tree.
    """

    engine: Literal["tpengine", "torch"]
    config: Config
    rival: RivalOptions = field(default_factory=RivalOptions)
    tree: Path | None = None

    @property
    def num_ranks(self) -> int:
        """Number of processes of the layout."""
        parallel = self.config.parallel
        assert parallel.tp and parallel.pp and parallel.dp
        return parallel.tp * parallel.pp * parallel.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        train = self.config.train
        return train.seq_len * train.micro_batch_size * train.num_micro_batches * (self.config.parallel.dp or 1)


@dataclass(frozen=True)
class Step:
    """One step: seconds on the slowest rank (on one rank: its own), nats per target, norm before clipping."""

    seconds: float
    loss: float
    grad_norm: float


class Engine(Protocol):
    """The interface of both engines."""

    def train_step(self, step: int) -> tuple[float, float]:
        """Run a step; return loss (-inf on ranks that do not know it) and gradient norm."""
        ...

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's parameters by tpengine's names."""
        ...


class Member:
    """One rank of a contestant; lives in a process of its own (see tpengine.distributed.local_ranks.Ranks)."""

    def __init__(self, entry: Entry) -> None:
        self._engine = _build(entry)
        # The peak counts from here on, because construction needs temporaries that no step needs.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def step(self, index: int) -> Step:
        """Run a step that begins on all ranks together."""
        dist.barrier()
        begin = time.perf_counter()
        loss, norm = self._engine.train_step(index)
        return Step(time.perf_counter() - begin, loss, norm)

    def peak_memory_bytes(self) -> int:
        """Return the peak resident set since construction; shared memory counts in each rank that has touched it."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0

    @torch.no_grad()
    def scale_parameter(self, name: str, factor: float) -> None:
        """Multiply a parameter where it is held, so that a test can see the check fail."""
        held = self._engine.parameters()
        if name in held:
            held[name].mul_(factor)


class Contestant:
    """A set of processes that runs an entry's steps when told.

    Args:
        entry: what to run.
        after_step: called after each step, to show progress.

    Raises:
        RanksFailed: it could not be built, or a step failed.

    Use it as a context manager.
    """

    def __init__(self, entry: Entry, after_step: Callable[[], object] = lambda: None) -> None:
        self.entry, self._after_step = entry, after_step
        with _imports_from(entry.tree):
            self.ranks = Ranks(entry.num_ranks, "benchmarks.training.contestants:Member", entry)
        self._next_step = 0

    def step(self) -> Step:
        """Run the next step on all ranks, while this process sleeps."""
        steps: list[Step] = self.ranks.call("step", self._next_step)
        self._next_step += 1
        self._after_step()
        return Step(
            max(step.seconds for step in steps),
            _known(step.loss for step in steps),
            _known(step.grad_norm for step in steps),
        )

    def step_seconds(self) -> float:
        """Run the next step; return only its seconds."""
        return self.step().seconds

    def peak_memory_bytes(self) -> list[int]:
        """Return the peak of each rank; see Member."""
        return self.ranks.call("peak_memory_bytes")

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.close()


@contextlib.contextmanager
def _imports_from(tree: Path | None) -> Iterator[None]:
    """Let the processes that are started inside import from a checkout: a spawned process inherits `sys.path`."""
    before = list(sys.path)
    if tree is not None:
        sys.path[:0] = [str(tree), str(tree / "kernels")]
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def started(entries: Mapping[str, Entry], title: str, steps: int) -> Iterator[dict[str, Contestant]]:
    """Start all entries, and show on stderr how many of their steps are done: `steps` each after the checked ones."""
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(*Progress.get_default_columns(), console=Console(stderr=True)))
        task = progress.add_task(title, total=len(entries) * (CHECKED_STEPS + steps))
        yield {
            name: stack.enter_context(Contestant(entry, lambda: progress.advance(task)))
            for name, entry in entries.items()
        }


def check_agreement(contestants: Mapping[str, Contestant]) -> str:
    """Run the first steps of all contestants, which also warms them up; compare losses and gradient norms.

    Returns:
        The first difference; empty if there is none. The second step also shows the effect of the first one's update.
    """
    names = list(contestants)
    for index in range(CHECKED_STEPS):
        steps = {name: contestants[name].step() for name in names}
        tolerance = _TOLERANCES[contestants[names[0]].entry.config.train.dtype]
        for what in ("loss", "grad_norm"):
            values = [getattr(step, what) for step in steps.values()]
            largest = max(abs(value) for value in values)
            if not (all(map(math.isfinite, values)) and max(values) - min(values) <= tolerance * largest):
                found = ", ".join(f"{name} {value:.9g}" for name, value in zip(names, values, strict=True))
                return f"{what} of checked step {index} differs by more than {tolerance:g}: {found}"
    return ""


def _known(values: object) -> float:
    """Return the largest value; NaN if any is NaN."""
    numbers = list(values)  # type: ignore[call-overload]
    return math.nan if any(map(math.isnan, numbers)) else float(max(numbers))


def _build(entry: Entry) -> Engine:
    """Return the engine; only its own modules are imported, because imported modules count as memory."""
    corpus = open_corpus(entry.config)
    make = imported(_ENGINES[entry.engine])
    rival = (entry.rival,) if entry.engine == "torch" else ()
    engine: Engine = make(entry.config, corpus, *rival)
    return engine
