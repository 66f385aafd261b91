"""Rung: gloo ranks. Faults put into real runs of 2 and 4 ranks are named first, with what their removal brings.

What a removal brings is measured by running without the fault. No limit in seconds decides: verdicts do, and the ratio
of two runs' times on the same machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine.paced_runs import PROFILED, Fault, run_paced, step_seconds_of
from support.ranks.rank_pool import RankPool

from tpengine.advice.diagnose import Diagnosis, diagnose
from tpengine.advice.diagnose import Fault as Verdict
from tpengine.advice.diagnose.changes import changed
from tpengine.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig, validate

SHARES = (0.1, 0.2, 0.4)
NAMED_FROM = 0.2
# Of a stage: so long that steps take seconds, and sleeping is most of them.
FORWARD_SECONDS = 0.05


def config_of(pp: int = 1, dp: int = 1, m: int = 4, micro_batch_size: int = 4, **parallel: Any) -> Config:
    """One layer a stage, wide enough that the head is small beside it; four where there is one stage."""
    layers = pp * (2 if parallel.get("schedule") in ("zbv", "interleaved") else 1) if pp > 1 else 4
    config = Config(
        model=ModelConfig(
            hidden_size=32, num_layers=layers, num_heads=2, num_kv_heads=2, ffn_size=2048, vocab_size=256
        ),
        parallel=ParallelConfig(tp=1, pp=pp, dp=dp, **parallel),
        train=TrainConfig(
            seq_len=8,
            micro_batch_size=micro_batch_size,
            num_micro_batches=m,
            steps=20,
            profile_steps=PROFILED,
            eval_micro_batches=0,
        ),
        optim=OptimConfig(warmup_steps=1),
        device="cpu",
    )
    return validate(config, pp * dp)


def ran(ranks: RankPool, run_dir: Path, config: Config, fault: Fault, forward: float) -> Path:
    run_dir.mkdir()
    world = (config.parallel.pp or 1) * (config.parallel.dp or 1)
    ranks.run(run_paced, world, config, str(run_dir), fault, forward)
    return run_dir


def check(
    ranks: RankPool,
    tmp_path: Path,
    with_fault: tuple[Config, Fault],
    without: tuple[Config, Fault],
    verdict: Verdict,
    share: float,
    forward: float = FORWARD_SECONDS,
) -> None:
    """From a share of 20 % on, the verdict is the fault's, and brings what a run without the fault takes less."""
    run = ran(ranks, tmp_path / "with", with_fault[0], with_fault[1], forward)
    found = diagnose(run)
    print(*found.lines(), sep="\n")
    if share < NAMED_FROM:
        # Smaller ones may be below the floor; another fault is never named instead.
        assert found.fault in (verdict, Verdict.NONE), found.lines()
        return
    assert found.fault is verdict, found.lines()
    healthy = ran(ranks, tmp_path / "without", without[0], without[1], forward)
    check_brought(found, run, healthy)


def check_brought(found: Diagnosis, run: Path, other: Path) -> None:
    """What the change brings is what another run takes less: to 25 %, or as far as the runs' own steps differ."""
    (seconds, differ), (other_seconds, others_differ) = step_seconds_of(run), step_seconds_of(other)
    brought, noise = seconds - other_seconds, differ + others_differ
    print(f"brings {found.findings[0].brings:.3f} s, brought {brought:.3f} s, steps differ by {noise:.3f} s")
    assert found.findings[0].brings == pytest.approx(brought, abs=max(0.25 * brought, noise)), found.lines()


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("pp", "m"), [(2, 16), (4, 32)])
def test_a_stage_that_sleeps(ranks: RankPool, tmp_path: Path, pp: int, m: int, share: float) -> None:
    config = config_of(pp, m=m)
    # In a full pipeline a step takes as much longer as its slowest stage does.
    fault = Fault(slow_stage=1.1 * share / (1.0 - share))
    check(ranks, tmp_path, (config, fault), (config, Fault()), Verdict.SLOW_RANK, share)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("pp", "m"), [(2, 16), (4, 32)])
def test_a_slow_reader(ranks: RankPool, tmp_path: Path, pp: int, m: int, share: float) -> None:
    config = config_of(pp, m=m)
    read = 3 * FORWARD_SECONDS * (m + pp) * 1.1 * share / (1.0 - share)
    check(ranks, tmp_path, (config, Fault(read=read)), (config, Fault()), Verdict.SLOW_INPUT, share)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "m", "share"), [(2, 9, 0.1), (2, 4, 0.2), (2, 2, 0.33), (4, 27, 0.1), (4, 12, 0.2), (4, 4, 0.43)]
)
def test_few_micro_batches(ranks: RankPool, tmp_path: Path, pp: int, m: int, share: float) -> None:
    """As many as stages, and more of them with a smaller bubble; removed by the change that the diagnosis names."""
    config = config_of(pp, m=m, micro_batch_size=8)
    run = ran(ranks, tmp_path / "with", config, Fault(), FORWARD_SECONDS)
    found = diagnose(run)
    print(*found.lines(), sep="\n")
    if share < NAMED_FROM:
        assert found.fault in (Verdict.FEW_MICRO_BATCHES, Verdict.NONE), found.lines()
        return
    assert found.fault is Verdict.FEW_MICRO_BATCHES, found.lines()
    after = ran(
        ranks, tmp_path / "after", validate(changed(config, **settings_of(found)), pp), Fault(), FORWARD_SECONDS
    )
    check_brought(found, run, after)


def settings_of(found: Diagnosis) -> dict[str, Any]:
    """The settings of a verdict's change."""
    words = found.findings[0].change.split(" (")[0].split()
    flags = zip(words[::2], words[1::2], strict=True)
    settings = {flag.partition(".")[2].replace("-", "_"): value for flag, value in flags}
    return {name: int(value) if value.isdecimal() else value for name, value in settings.items()}


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dp", [2, 4])
def test_a_reduction_inside_backward(ranks: RankPool, tmp_path: Path, dp: int, share: float) -> None:
    """Without the fault the same link sums beside backward, which is long enough to hide it."""
    config = config_of(1, dp, m=2, bucket_bytes=100_000)
    # Two micro-batches of a forward and a backward of four.
    reduce = 2 * (1 + 4) * 4 * FORWARD_SECONDS * 1.1 * share / (1.0 - share)
    faults = Fault(reduce=reduce, inside=True, backward=4.0), Fault(reduce=reduce, backward=4.0)
    check(ranks, tmp_path, (config, faults[0]), (config, faults[1]), Verdict.EXPOSED_DP, share, 4 * FORWARD_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("pp", "m"), [(2, 16), (4, 32)])
def test_a_memory_limit(ranks: RankPool, tmp_path: Path, pp: int, m: int, share: float) -> None:
    """Every chunk is computed again: a share of the step as large as forward's."""
    config = config_of(pp, m=m, recompute="full")
    again = 0.9 * share
    fault = Fault(backward=1.0 / again - 2.0)
    without = changed(config, recompute="none")
    check(ranks, tmp_path, (config, fault), (without, fault), Verdict.MEMORY, share)


HEALTHY = (
    config_of(1, 2, m=4),
    config_of(1, 4, m=4),
    config_of(1, 2, m=4, zero=1),
    config_of(1, 2, m=4, zero=3),
    config_of(2, 1, m=16),
    config_of(2, 1, m=16, schedule="zb-h1"),
    config_of(2, 1, m=8, schedule="zbv"),
    config_of(2, 2, m=16),
    config_of(4, 1, m=32),
    config_of(4, 1, m=24, schedule="interleaved"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    HEALTHY,
    ids=lambda config: "-".join(str(getattr(config.parallel, name)) for name in ("pp", "dp", "schedule", "zero")),
)
def test_a_healthy_run(ranks: RankPool, tmp_path: Path, config: Config) -> None:
    found = diagnose(ran(ranks, tmp_path / "run", config, Fault(), FORWARD_SECONDS))
    print(*found.lines(), sep="\n")
    assert found.fault is Verdict.NONE, found.lines()


def test_a_slow_reader_in_a_short_run(ranks: RankPool, tmp_path: Path) -> None:
    """By default one real run: what meter, trace and files say comes together. The fault is most of the step."""
    found = diagnose(ran(ranks, tmp_path / "run", config_of(2, m=2), Fault(read=1.0), 0.004))
    assert found.fault is Verdict.SLOW_INPUT, found.lines()
    assert found.findings[0].seconds >= 1.0 and "rank 0 reads" in found.findings[0].evidence
