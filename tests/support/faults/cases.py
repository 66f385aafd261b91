"""The faults that are put into runs, in the sizes that they are named at, and the runs that have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from support.faults.faulty_runs import PROFILED, Fault
from tpengine.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig, validate
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.plan import Kind
from tpengine.planner.diagnose.changes import changed
from tpengine.planner.diagnose.evidence import Fault as Verdict
from tpengine.planner.machine import CPU_CORE
from tpengine.planner.modelled.costs import action_seconds
from tpengine.planner.modelled.memory import memory_of

SHARES = (0.1, 0.2, 0.4)
# From this share of the step on a fault must be named; below it may be.
NAMED_FROM = 0.2
# Of a stage that is paced: steps take seconds, and sleeping is most of them.
FORWARD_SECONDS = 0.03
NO_FAULT = Fault()


@dataclass(frozen=True)
class Case:
    """A run with a fault, and what it is without.

    Args:
        name: says fault, ranks and share.
        verdict: the right one; Verdict.NONE for a healthy run.
        share: of the step that the fault takes, about.
        config: of the run with the fault.
        fault: made from the seconds of a step without; what is wrong.
        healed: alike, without the fault; None where the run without is the change that the diagnosis names.
        bare: what the step is measured with from which the others are made.
        forward_seconds: as faulty_runs.run_with; 0 computes.
    """

    name: str
    verdict: Verdict
    share: float
    config: Config
    fault: Callable[[float], Fault]
    healed: Callable[[float], Fault] | None = None
    bare: Fault = NO_FAULT
    forward_seconds: float = FORWARD_SECONDS

    @property
    def num_ranks(self) -> int:
        """Of the run."""
        return _num_ranks(self.config)


def _num_ranks(config: Config) -> int:
    parallel = config.parallel
    return (parallel.tp or 1) * (parallel.pp or 1) * (parallel.dp or 1)


def paced_config(
    pp: int = 1, dp: int = 1, m: int = 4, micro_batch_size: int = 4, layers: int = 0, **parallel: Any
) -> Config:
    """One layer a chunk, wide enough that the head is small beside it; four where there is one stage."""
    each = 2 if parallel.get("schedule") in ("zbv", "interleaved") else 1
    model = ModelConfig(
        hidden_size=32,
        num_layers=layers or (pp * each if pp > 1 else 4),
        num_heads=2,
        num_kv_heads=2,
        ffn_size=2048,
        vocab_size=256,
    )
    return _config(model, ParallelConfig(tp=1, pp=pp, dp=dp, **parallel), 8, micro_batch_size, m)


def computing_config(tp: int = 1, pp: int = 1, dp: int = 1, m: int = 4, micro_batch_size: int = 4, **of: Any) -> Config:
    """A model that keeps a core busy for some 0.1 s per micro-batch."""
    model = ModelConfig(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=4, ffn_size=1024, vocab_size=256)
    return _config(model, ParallelConfig(tp=tp, pp=pp, dp=dp, **of), 128, micro_batch_size, m)


def _config(model: ModelConfig, parallel: ParallelConfig, seq_len: int, micro_batch_size: int, m: int) -> Config:
    config = Config(
        model=model,
        parallel=parallel,
        train=TrainConfig(
            seq_len=seq_len,
            micro_batch_size=micro_batch_size,
            num_micro_batches=m,
            steps=20,
            profile_steps=PROFILED,
            eval_micro_batches=0,
        ),
        optim=OptimConfig(warmup_steps=1),
        device="cpu",
    )
    return validate(config, _num_ranks(config))


def limited(config: Config) -> Config:
    """The configuration with a memory limit that it just keeps: without its recomputation it would not."""
    layout = layout_of(config)
    needed = max(rank.peak for rank in memory_of(config, layout, training_plan(config, layout)))
    return changed(config, memory_limit=needed + needed // 1000)


def _grown(share: float) -> float:
    """What a fault adds to a step of 1 so that it is this share of what the step is then."""
    return share / (1.0 - share)


def _slow_stage(share: float, config: Config) -> Callable[[float], Fault]:
    """A full pipeline's step takes as much longer as its slowest stage does, but for the filling.

    That is the last, which has the head, until the first is slower.
    """
    layout = layout_of(config)
    seconds = action_seconds(config, layout, training_plan(config, layout), CPU_CORE)
    first, last = seconds[Kind.F, 0].total, seconds[Kind.F, layout.pp - 1].total
    in_step = config.train.num_micro_batches / (config.train.num_micro_batches + layout.pp - 1)
    return lambda _: Fault(slow_stage=last / first * (1.0 + _grown(share) / in_step) - 1.0)


def _read(share: float) -> Callable[[float], Fault]:
    """A thread reads while a step computes, so that a step waits for what reading takes longer than it."""
    return lambda step: Fault(read=(1.0 + _grown(share)) * step)


def _reduction(share: float, inside: bool, backward: float) -> Callable[[float], Fault]:
    return lambda step: Fault(reduce=_grown(share) * step, inside=inside, backward=backward)


def _exchange(share: float) -> Callable[[float], Fault]:
    return lambda step: Fault(exchange=_grown(share) * step)


def _as(fault: Fault = NO_FAULT) -> Callable[[float], Fault]:
    return lambda _: fault


def paced_cases() -> list[Case]:
    """Five faults in three sizes, in runs of 2 and of 4 ranks that take the time they are told to."""
    found = [case for pp, m in ((2, 16), (4, 32)) for share in SHARES for case in _of_pipeline(pp, m, share)]
    # As many micro-batches as stages, and more of them with a smaller bubble.
    few: Mapping[int, tuple[tuple[int, float], ...]] = {
        2: ((9, 0.1), (4, 0.2), (2, 0.33)),
        4: ((27, 0.1), (12, 0.2), (4, 0.43)),
    }
    for pp, of in few.items():
        for m, share in of:
            name = f"{m} micro-batches, {pp} ranks, {share:.0%}"
            config = paced_config(pp, m=m, micro_batch_size=8)
            found.append(Case(name, Verdict.FEW_MICRO_BATCHES, share, config, _as()))
    found += [_of_replicas(dp, share) for dp in (2, 4) for share in SHARES]
    # Three layers on two stages, nine on four: no schedule evens them out, so nothing can be brought.
    for pp, m, layers in ((2, 16, 3), (4, 32, 9)):
        config = paced_config(pp, m=m, layers=layers)
        found.append(Case(f"{layers} layers, {pp} ranks", Verdict.UNEVEN_STAGES, 0.25, config, _as()))
    return found


def _of_pipeline(pp: int, m: int, share: float) -> list[Case]:
    config, name = paced_config(pp, m=m), f"{pp} ranks, {share:.0%}"
    # A forward is computed again: this share of forward, again and backward.
    memory = Fault(backward=1.0 / share - 2.0)
    again = limited(paced_config(pp, m=m, recompute="full"))
    slow = _slow_stage(share, config)
    return [
        Case(f"slow stage, {name}", Verdict.SLOW_RANK, share, config, slow, _as()),
        Case(f"slow reader, {name}", Verdict.SLOW_INPUT, share, config, _read(share), _as()),
        # So that a step takes about as long as the others'.
        Case(
            f"memory limit, {name}",
            Verdict.MEMORY,
            share,
            again,
            _as(memory),
            bare=memory,
            forward_seconds=4 * share * FORWARD_SECONDS,
        ),
    ]


def _of_replicas(dp: int, share: float) -> Case:
    """Without the fault the same link sums beside backward, which is long enough to hide most of it."""
    return Case(
        f"reduction inside backward, {dp} ranks, {share:.0%}",
        Verdict.EXPOSED_DP,
        share,
        paced_config(1, dp, m=2, bucket_bytes=100_000),
        _reduction(share, True, 4.0),
        _reduction(share, False, 4.0),
        Fault(backward=4.0),
        4 * FORWARD_SECONDS,
    )


def computing_cases() -> list[Case]:
    """The faults in runs of 2 ranks that compute."""
    found: list[Case] = []
    pipeline, tensors = computing_config(pp=2, m=16), computing_config(tp=2, m=4)
    replicas = computing_config(dp=2, m=2, bucket_bytes=1_000_000)
    for share in SHARES:
        name = f"computing, {share:.0%}"
        reduction = _reduction(share, True, 2.0), _reduction(share, False, 2.0)
        found += [
            Case(f"slow stage, {name}", Verdict.SLOW_RANK, share, pipeline, _slow_stage(share, pipeline), _as()),
            Case(f"slow reader, {name}", Verdict.SLOW_INPUT, share, pipeline, _read(share), _as()),
            Case(f"late exchanges, {name}", Verdict.EXPOSED_TP, share, tensors, _exchange(share), _as()),
            Case(f"reduction inside backward, {name}", Verdict.EXPOSED_DP, share, replicas, *reduction),
        ]
    again = limited(computing_config(pp=2, m=16, recompute="full"))
    few = computing_config(pp=2, m=2, micro_batch_size=16)
    found += [
        Case("memory limit, computing, 25%", Verdict.MEMORY, 0.25, again, _as()),
        Case("2 micro-batches, computing, 33%", Verdict.FEW_MICRO_BATCHES, 0.33, few, _as()),
    ]
    return [replace(case, forward_seconds=0.0) for case in found]


def healthy_cases() -> list[Case]:
    """Ten runs without a fault that take the time they are told to, and three that compute."""
    paced = [
        paced_config(1, 2, m=4),
        paced_config(1, 4, m=4),
        paced_config(1, 2, m=4, zero=1),
        paced_config(1, 2, m=4, zero=3),
        paced_config(2, 1, m=16),
        paced_config(2, 1, m=16, schedule="zb-h1"),
        paced_config(2, 1, m=8, schedule="zbv"),
        paced_config(2, 2, m=16),
        paced_config(4, 1, m=32),
        paced_config(4, 1, m=24, schedule="interleaved"),
    ]
    computing = [computing_config(pp=2, m=16), computing_config(dp=2, m=4), computing_config(tp=2, m=4)]
    found = [Case(f"healthy, {_layout(of)}", Verdict.NONE, 0.0, of, _as()) for of in paced]
    for of in computing:
        name = f"healthy, computing, {_layout(of)}"
        found.append(Case(name, Verdict.NONE, 0.0, of, _as(), forward_seconds=0.0))
    return found


def all_cases() -> list[Case]:
    """Every case."""
    return [*paced_cases(), *computing_cases(), *healthy_cases()]


def _layout(config: Config) -> str:
    parallel = config.parallel
    pipeline = f" {parallel.schedule} m {config.train.num_micro_batches}" if parallel.pp != 1 else ""
    zero = f" zero {parallel.zero}" if parallel.zero else ""
    return f"tp {parallel.tp} pp {parallel.pp} dp {parallel.dp}{pipeline}{zero}"


def settings_of(change: str) -> dict[str, Any]:
    """Return the settings of a verdict's change, by their names: of --parallel.zero 1 (...), zero 1."""
    words = change.split(" (")[0].split(", a batch")[0].split()
    if not all(flag.startswith("--") for flag in words[::2]):
        return {}
    flags = zip(words[::2], words[1::2], strict=True)
    settings = {flag.partition(".")[2].replace("-", "_"): value for flag, value in flags}
    return {name: int(value) if value.isdecimal() else value for name, value in settings.items()}
