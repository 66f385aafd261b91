"""Runs whose ranks take the time they are told to, and the faults that can be put into them; called on every rank.

A real trainer runs real plans over gloo. Where it is paced, what it computes is tiny; beside it every block sleeps in
its forward and in its backward, in proportion to what the model says of its stage, so that a host with too few cores
shows the times of one that has enough. Else it computes what its model asks for. Faults are put in around handlers, the
text and a communicator, as a user's code could.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Done, Work

from tpengine.config import Config
from tpengine.config.toml import dump_toml
from tpengine.data import Corpus, open_corpus
from tpengine.distributed.mesh import Communicators, Shape
from tpengine.observe.metrics import MetricsWriter, step_record
from tpengine.pipeline.executor import Handler
from tpengine.plan import Action, Chunk, Kind, Recompute
from tpengine.plan.actions import COMPUTE
from tpengine.planner.machine import CPU_CORE
from tpengine.planner.modelled.costs import action_seconds
from tpengine.planner.profiles.recorded import write_recording
from tpengine.runs.profiler import Profiler
from tpengine.runs.trainer import Trainer

# The first loads kernels. Recorded are two, between two that are not.
NUM_STEPS = 6
PROFILED = "2:4"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Fault:
    """What is wrong with a run.

    Args:
        slow_stage: what its first stage sleeps longer in each action, as a share of it.
        read: seconds that a step's text takes to be read on its first stage; a thread reads beside the step before.
        reduce: seconds that all reductions of a step take.
        inside: whether they end before backward goes on.
        exchange: seconds of a step that tensor-parallel ranks' memory is seen late by their peers.
        backward: what a backward takes, in forwards.
    """

    slow_stage: float = 0.0
    read: float = 0.0
    reduce: float = 0.0
    inside: bool = False
    exchange: float = 0.0
    backward: float = 2.0


def run_with(config: Config, run_dir: str, fault: Fault, forward_seconds: float) -> list[float]:
    """Train some steps and leave a run's directory; return the seconds of each step but the first.

    Args:
        forward_seconds: of a forward of the mean stage, for a micro-batch of 4 sequences; 0 for what it takes anyway.
    """
    first = dist.get_rank() == 0
    corpus: Corpus = open_corpus(config)
    if fault.read and Shape.of(config.parallel).coordinates(dist.get_rank()).pp == 0:
        samples = config.train.num_micro_batches * config.train.micro_batch_size
        corpus = cast(Corpus, SlowCorpus(corpus, fault.read / samples))
    with _slow_link(fault) as links:
        trainer = Trainer(config, corpus, CPU)
    num_bytes = sum(flat.numel() * flat.itemsize for flat in trainer.state.buckets.flat.values())
    pace = Pace()
    for link in links:
        link.seconds_per_byte, link.pace = fault.reduce / num_bytes, pace
    if forward_seconds:
        _pace(trainer, forward_seconds, fault, pace)
    if fault.slow_stage and trainer.state.rank.mesh.at.pp == 0 and trainer.state.rank.mesh.at.dp == 0:
        handlers = trainer.step.executor.handlers
        trainer.step.executor.handlers = {
            kind: _longer(handler, fault.slow_stage) if kind in COMPUTE else handler
            for kind, handler in handlers.items()
        }
    late = LateMemory(trainer) if fault.exchange else None
    directory = Path(run_dir)
    profiler = Profiler(
        trainer.planned, trainer.state.rank.device, directory if first else None, write_recording, say=lambda _: None
    )
    writer = MetricsWriter(directory) if first else None
    if first:
        (directory / "config.toml").write_text(dump_toml(config))
    taken = []
    for step in range(NUM_STEPS):
        profiler.begin(step, trainer.step)
        begin = time.perf_counter()
        result = trainer.step.run(step, lambda begin=begin: [time.perf_counter() - begin])  # type: ignore[misc]
        seconds = max(result.largest[0], time.perf_counter() - begin)
        if writer is not None:
            writer.write(
                step_record(
                    config,
                    CPU,
                    step=step,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=result.lr,
                    step_seconds=seconds,
                    peak_memory_bytes=0,
                )
            )
        profiler.end(step, seconds)
        taken.append(seconds)
        if late is not None and step == 0:
            late.begin(fault.exchange)
    if writer is not None:
        writer.close()
    return taken[1:]


def _pace(trainer: Trainer, forward_seconds: float, fault: Fault, pace: Pace) -> None:
    """Let every block take its part of its stage's time."""
    config, plan = trainer.state.part.config, trainer.state.part.plan
    kept = replace(plan, chunks=tuple(replace(chunk, recompute=Recompute.NONE) for chunk in plan.chunks))
    modelled = {key: s.compute for key, s in action_seconds(config, trainer.state.part.layout, kept, CPU_CORE).items()}
    whole = sum(modelled[Kind.F, number] for number in range(len(plan.chunks))) / plan.num_ranks
    tokens = config.train.micro_batch_size / 4
    # A schedule that splits backward computes one half in I, through the blocks, and the other in W.
    parts = 2 if any(action.kind is Kind.W for action in plan.actions[trainer.state.rank.mesh.at.pp]) else 1
    of_halves = {}
    for number in plan.chunks_of(trainer.state.rank.mesh.at.pp):
        chunk: Chunk = plan.chunks[number]
        of_chunk = forward_seconds * tokens * modelled[Kind.F, number] / whole
        of_halves[number] = of_chunk * fault.backward / parts
        layers = range(*chunk.layers)
        for layer in layers:
            block = trainer.state.model.layers[str(layer)]
            _pace_block(block, of_chunk / len(layers), of_halves[number] / len(layers), pace)
    if parts > 1:
        handlers = trainer.step.executor.handlers
        trainer.step.executor.handlers = {**handlers, Kind.W: _at_least(handlers[Kind.W], of_halves)}


class Pace:
    """The clock by which a rank's blocks take their time: it stands while a slow link holds the rank up.

    Attributes:
        free: when the last block had ended. A block's output is the next one's input, and its hooks run in the order of
            forward, so that in backward the one that begins is told before the one that ends.
    """

    def __init__(self) -> None:
        self.free, self._stood = 0.0, 0.0

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._stood

    @contextmanager
    def stands(self) -> Iterator[None]:
        """Do not count the time inside."""
        begin = time.perf_counter()
        yield
        self._stood += time.perf_counter() - begin

    def rest(self, began: float, seconds: float) -> None:
        """Sleep until a block that began then has taken so long."""
        time.sleep(max(0.0, max(began, self.free) + seconds - self.now()))
        self.free = self.now()


def _pace_block(block: torch.nn.Module, forward: float, backward: float, pace: Pace) -> None:
    """Let a block take so long, as far as it does not anyway: from its input to its output, and back."""
    began = {"forward": 0.0, "backward": 0.0}

    def begin(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        began["forward"] = pace.now()
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: pace.rest(began["backward"], backward))

    def end(_: torch.nn.Module, __: Any, y: torch.Tensor) -> None:
        pace.rest(began["forward"], forward)
        if y.requires_grad:
            y.register_hook(lambda _: began.update(backward=pace.now()))

    block.register_forward_pre_hook(begin)
    block.register_forward_hook(end)


def _at_least(handler: Handler, seconds: Mapping[int, float]) -> Handler:
    """An action that takes so long, by its chunk, if it does not anyway."""

    def handle(action: Action) -> None:
        end = time.perf_counter() + seconds[action.piece[0]]
        handler(action)
        time.sleep(max(0.0, end - time.perf_counter()))

    return handle


def _longer(handler: Handler, share: float) -> Handler:
    """An action that takes longer than it needs."""

    def handle(action: Action) -> None:
        begin = time.perf_counter()
        handler(action)
        time.sleep(share * (time.perf_counter() - begin))

    return handle


class SlowCorpus:
    """A text or mixture of which the part for training is on a slow disk; see SlowText."""

    def __init__(self, corpus: Corpus, seconds: float) -> None:
        self._corpus, self.train = corpus, SlowText(corpus.train, seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._corpus, name)


class SlowText:
    """A text on a slow disk.

    Args:
        samples: the text's.
        seconds: that each of its samples takes to be read.
    """

    def __init__(self, samples: Any, seconds: float) -> None:
        self._samples, self._seconds = samples, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def read_with_starts(self, samples: Any) -> Any:
        """As Samples.read_with_starts, which every reader goes through."""
        time.sleep(self._seconds * len(samples))
        return self._samples.read_with_starts(samples)


class LateMemory:
    """Memory whose flags a rank sees late: a slow link between tensor-parallel ranks. It first counts a step's waits.

    Args:
        trainer: whose ranks exchange through shared memory.
    """

    def __init__(self, trainer: Trainer) -> None:
        arena = trainer.state.rank.comms.tp.arena
        assert arena is not None, "tensor-parallel ranks exchange through shared memory"
        self._signals, self._seen = arena.signals, arena.signals.has_notified
        self._first: dict[int, tuple[int, float]] = {}
        self._count, self._seconds = 0, 0.0
        self._signals.has_notified = self._has_notified  # type: ignore[method-assign]

    def begin(self, seconds: float) -> None:
        """From now on let a step's waits take so long in all."""
        self._seconds = seconds / self._count

    def _has_notified(self, peer: int, epoch: int) -> bool:
        now = time.perf_counter()
        known, asked = self._first.get(peer, (-1, 0.0))
        if known != epoch:
            self._first[peer], asked = (epoch, now), now
            self._count += 1
        return now >= asked + self._seconds and self._seen(peer, epoch)


class SlowLink:
    """A communicator whose sums take as long as their bytes say.

    Args:
        comm: makes the sums.
        fault: says how long all of a step take, and whether a sum is there when its start returns.
    """

    def __init__(self, comm: Communicator, fault: Fault) -> None:
        self._comm, self._fault = comm, fault
        self.seconds_per_byte, self._until, self.pace = 0.0, 0.0, Pace()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def start_all_reduce(self, x: torch.Tensor) -> Work:
        """As Communicator.start_all_reduce."""
        seconds = self.seconds_per_byte * x.numel() * x.itemsize
        if self._fault.inside:
            with self.pace.stands():
                end = time.perf_counter() + seconds
                self._comm.start_all_reduce(x).wait()
                time.sleep(max(0.0, end - time.perf_counter()))
            return Done()
        work = self._comm.start_all_reduce(x)
        self._until = max(self._until, time.perf_counter()) + seconds
        return SlowWork(work, self._until)


class SlowWork:
    """A sum under way on a slow link, until a time of time.perf_counter."""

    def __init__(self, work: Work, until: float) -> None:
        self._work, self._until = work, until

    def wait(self) -> None:
        """See Work."""
        self._work.wait()
        time.sleep(max(0.0, self._until - time.perf_counter()))

    def is_complete(self) -> bool:
        """See Work."""
        return time.perf_counter() >= self._until and self._work.is_complete()

    def ended_ns(self) -> int:
        """See Work."""
        return max(round(self._until * 1e9), self._work.ended_ns() or 0)


@contextmanager
def _slow_link(fault: Fault) -> Iterator[list[SlowLink]]:
    """Let a trainer that is built inside sum gradients over a slow link; yield the links."""
    make: Callable[..., Communicators] = Communicators.of
    links: list[SlowLink] = []
    if not fault.reduce:
        yield links
        return

    def slow(*given: Any) -> Communicators:
        comms = make(*given)
        link = SlowLink(comms.dp, fault)
        links.append(link)
        same = {f.name: link for f in fields(comms) if f.name != "tp" and getattr(comms, f.name) is comms.dp}
        return replace(comms, **same)  # type: ignore[arg-type]

    with patch("tpengine.runs.trainer.Communicators.of", slow):
        yield links
