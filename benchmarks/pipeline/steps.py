"""One rank of the prediction benchmark: several schedules side by side, and one step of one of them when told.

All are in the same processes, so that the machine, the heap and the neighbours are the same for the profiled step and
the predicted ones. Every step is traced, because tracing has the cost of profiling.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from benchmarks.harness import resident_memory
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.layers.gradient_sink import WeightHalves
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.observe.records import encode_record
from tpengine.pipeline.executor import Executor, Trace
from tpengine.pipeline.stage import RankPipeline, Stage
from tpengine.pipeline.transfers import open_mailbox
from tpengine.plan import Action, Kind, Plan
from tpengine.runs.trainer import Trainer

Seconds = Mapping[tuple[Kind, int], float]

_MESSAGE_SECONDS = 300.0
_NUM_CALIBRATIONS = 50


class _Steps(Protocol):
    """Runs steps of one schedule on one rank."""

    def run(self) -> tuple[Trace, bool]:
        """Run a step whose plan begins on all ranks together; return what ran, and whether transfers copy."""
        ...


class TrainingSteps:
    """Training steps of the engine: forward, backward, clipping, update.

    Args:
        config: validated, layout resolved, on the CPU.
    """

    def __init__(self, config: Config) -> None:
        self._trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
        self._executor = _TogetherExecutor(dist.get_rank(), self._trainer.step.executor.handlers)
        self._trainer.step.executor = self._executor
        self._step = 0

    def run(self) -> tuple[Trace, bool]:
        """As _Steps."""
        trace = self._executor.trace = Trace()
        self._trainer.step.run(self._step)
        self._step += 1
        return trace, self._trainer.step.pipeline.copies


class WaitingSteps:
    """Steps of the same plan with the same executor, stages and transfers, which wait instead of computing.

    Each stage sleeps as long as its action is said to take, and passes on the boundary tensors. So any number of ranks
    can share few cores and still do what ranks with one core each would do: a test of the executor, not of a machine.

    Args:
        config: of a layout with this number of pipeline ranks.
        seconds: by kind and chunk.
    """

    def __init__(self, config: Config, seconds: Seconds) -> None:
        self._plan: Plan = training_plan(config, layout_of(config))
        self._rank, halves, group = dist.get_rank(), WeightHalves(), dist.group.WORLD
        assert group is not None, "ranks have a group"
        self._pauses = {key: Pause(length) for key, length in seconds.items()}
        self._halves = halves
        stages = {chunk: self._stage(chunk) for chunk in self._plan.chunks_of(self._rank)}
        mailbox = open_mailbox((self._plan,), group, torch.device("cpu"), _MESSAGE_SECONDS)
        self._pipeline = RankPipeline(
            self._plan, self._rank, stages, group, torch.device("cpu"), mailbox, halves=halves
        )
        nothing = dict.fromkeys((Kind.CLIP, Kind.STEP), lambda _: None)
        handlers = {**self._pipeline.handlers(), **nothing, Kind.WAIT: self._wait}
        self._executor = _TogetherExecutor(self._rank, handlers)

    def run(self) -> tuple[Trace, bool]:
        """As _Steps."""
        trace = self._executor.trace = Trace()
        self._executor.run(self._plan.actions[self._rank])
        return trace, self._pipeline.copies

    def _stage(self, chunk: int) -> Stage:
        spec = self._plan.chunks[chunk].input or self._plan.chunks[chunk].output
        assert spec is not None, "with several chunks there is a boundary"
        tensor = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), requires_grad=True)
        is_first, is_last = chunk == 0, chunk == len(self._plan.chunks) - 1
        return Stage(
            lambda x: _Waiting.apply(x, self._pauses, self._halves, chunk),
            _Same(tensor),
            is_first=is_first,
            is_last=is_last,
        )

    def _wait(self, action: Action) -> None:
        trace = self._executor.trace
        assert trace is not None, "every step is traced"
        for transfer in action.subs:
            begin, was_complete = trace.now(), self._pipeline.is_complete(transfer)
            self._pipeline.wait_for(transfer)
            trace.waited(transfer, begin, was_complete)


class Pause:
    """Sleeps for a given time, minus the time by which a sleep is too long here.

    Args: seconds: from the call to its return.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self) -> None:
        begin = time.perf_counter()
        time.sleep(max(0.0, self.seconds - overshoot_seconds()))
        # It wakes early and polls only briefly: a neighbour may need the core.
        while time.perf_counter() - begin < self.seconds:
            time.sleep(0)


_overshoot: list[float] = []


def overshoot_seconds() -> float:
    """Return how much longer a sleep lasts than asked for, measured once: most sleeps are at least this much longer."""
    if not _overshoot:
        samples = []
        for _ in range(_NUM_CALIBRATIONS):
            begin = time.perf_counter()
            time.sleep(1e-3)
            samples.append(time.perf_counter() - begin - 1e-3)
        _overshoot.append(sorted(samples)[_NUM_CALIBRATIONS // 2])
    return _overshoot[0]


class _Waiting(Function):
    """y = x after a pause; backward pauses too, and in a split backward the weight half as well."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pauses: Mapping[tuple[Kind, int], Pause], halves: WeightHalves, chunk: int
    ) -> Tensor:
        ctx.pauses, ctx.halves, ctx.chunk = pauses, halves, chunk
        pauses[Kind.F, chunk]()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        pauses, halves, chunk = ctx.pauses, ctx.halves, ctx.chunk
        pauses[Kind.I if halves.is_open else Kind.B, chunk]()
        if halves.is_open:
            halves.add(pauses[Kind.W, chunk])
        return dy.clone(), None, None, None


class _Same:
    """Micro-batches of one tensor (pipeline.stage.Batch)."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def begin(self, microbatch: int) -> None:
        """Nothing: no layer drops."""

    def tokens(self, microbatch: int) -> Tensor:
        """See Batch."""
        return self._tensor

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        """See Batch."""
        return y.sum()


class _TogetherExecutor(Executor):
    """An executor whose plans begin on all ranks together, as simulated ones do."""

    def run(self, actions: Sequence[Action]) -> None:
        """Run as Executor, once all ranks have arrived here."""
        dist.barrier()
        super().run(actions)


class Member:
    """One rank of all cases; see tpengine.distributed.local_ranks.Ranks.

    Args:
        cases: by name, the configuration; with `seconds`, stages wait for these times.
    """

    def __init__(self, cases: Mapping[str, tuple[Config, Seconds | None]]) -> None:
        resident_memory.keep_what_is_freed()
        overshoot_seconds()
        self._steps: dict[str, _Steps] = {
            name: TrainingSteps(config) if seconds is None else WaitingSteps(config, seconds)
            for name, (config, seconds) in cases.items()
        }

    def run(self, name: str) -> bytes:
        """Run a step of a case; return what ran, encoded."""
        trace, copies = self._steps[name].run()
        return encode_record(
            [(event.action, event.begin_ns, event.end_ns) for event in trace.events],
            [(w.action, w.begin_ns, w.end_ns, w.was_complete, w.done_ns) for w in trace.awaited],
            copies,
        )
