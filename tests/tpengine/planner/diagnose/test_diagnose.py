"""Rung: pure. Verdicts on runs that the simulator made, where the fault, its size and the change's worth are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.plans.synthetic_runs import Truth, seconds_of, write_run

from tpengine.cli import main
from tpengine.config import Config, ModelConfig, ParallelConfig, TrainConfig, phases_of, validate, validate_run
from tpengine.config.toml import dump_toml
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.plan import Kind, Residency
from tpengine.planner.diagnose import Diagnosis, Fault, diagnose
from tpengine.planner.diagnose.changes import changed
from tpengine.planner.diagnose.evidence import Baseline, percent, read_evidence
from tpengine.planner.modelled.memory import memory_of

SHARES = (0.2, 0.4)


def config_of(pp: int = 2, dp: int = 1, tp: int = 1, m: int = 16, micro_batch_size: int = 4, **parallel: Any) -> Config:
    """A model whose layers outweigh its head."""
    config = Config(
        model=ModelConfig(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=8, ffn_size=2048, vocab_size=256),
        parallel=ParallelConfig(tp=tp, pp=pp, dp=dp, **parallel),
        train=TrainConfig(seq_len=256, micro_batch_size=micro_batch_size, num_micro_batches=m, steps=30),
        device="cpu",
    )
    return validate(config, pp * dp * tp)


def diagnosed(tmp_path: Path, config: Config, truth: Truth, residency: Residency | None = None) -> Diagnosis:
    return diagnose(write_run(tmp_path / "run", config, truth, residency))


def check(found: Diagnosis, fault: Fault, brings: float) -> None:
    """The first verdict is this fault, and what its removal brings is true to a tenth."""
    assert found.fault is fault, found.lines()
    assert found.findings[0].seconds == pytest.approx(brings, rel=0.1), found.lines()


def grown(share: float, of: Callable[[float], float]) -> float:
    """The size of a fault that makes up `share` of the step, found by halving; `of` gives the step's seconds."""
    low, high = 0.0, 1.0
    whole = of(0.0)
    while 1.0 - whole / of(high) < share:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if 1.0 - whole / of(middle) < share else (low, middle)
    return high


@pytest.mark.by_default("1-2-4-0.2")
@pytest.mark.parametrize("share", [0.2, pytest.param(0.4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("pp", "dp", "m"), [(2, 1, 16), pytest.param(4, 1, 32, marks=pytest.mark.slow), (1, 2, 4), (2, 2, 16)]
)
def test_a_slow_rank(tmp_path: Path, pp: int, dp: int, m: int, share: float) -> None:
    config = config_of(pp, dp, m=m)
    place = (pp - 1, dp - 1, 0) if dp > 1 else (0, 0, 0)

    def slowed(factor: float) -> Truth:
        return Truth(slower={place: 1.0 + factor})

    factor = grown(share, lambda factor: seconds_of(config, slowed(factor)))
    found = diagnosed(tmp_path, config, slowed(factor))
    check(found, Fault.SLOW_RANK, seconds_of(config, slowed(factor)) - seconds_of(config, Truth()))
    assert f"rank {place[0] * dp + place[1]} " in found.findings[0].evidence
    assert f"{factor:.0%} longer".replace("%", " %") in found.findings[0].evidence


def test_a_slow_tensor_parallel_rank_is_told_from_those_that_wait_for_it(tmp_path: Path) -> None:
    config = config_of(pp=1, tp=4, m=4)
    found = diagnosed(tmp_path, config, Truth(slower={(0, 0, 2): 1.5}))
    check(found, Fault.SLOW_RANK, seconds_of(config, Truth(slower={(0, 0, 2): 1.5})) - seconds_of(config, Truth()))
    assert found.findings[0].evidence.startswith("rank 2 (tp 2) computes 50 % longer than others of its stage")


@pytest.mark.by_default("1-2-0.2", "1-1-0.4")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (4, 1), (1, 2)])
def test_a_slow_reader(tmp_path: Path, pp: int, tp: int, share: float) -> None:
    config = config_of(pp, tp=tp, m=32)
    read = seconds_of(config, Truth()) * share / (1.0 - share)
    found = diagnosed(tmp_path, config, Truth(read={pp - 1: read}))
    check(found, Fault.SLOW_INPUT, read)
    assert f"rank {(pp - 1) * tp} reads" in found.findings[0].evidence


@pytest.mark.by_default("2-1f1b")
@pytest.mark.parametrize(("pp", "schedule"), [(2, "1f1b"), (4, "1f1b"), (4, "gpipe"), (4, "interleaved")])
def test_as_many_micro_batches_as_stages(tmp_path: Path, pp: int, schedule: str) -> None:
    """The change is a run's: the truth of the changed run is what the diagnosis says."""
    config = config_of(pp, m=pp, schedule=schedule, micro_batch_size=8)
    found = diagnosed(tmp_path, config, Truth())
    assert found.fault is Fault.FEW_MICRO_BATCHES, found.lines()
    check_change(found, config, Truth())


def check_change(found: Diagnosis, config: Config, truth: Truth, residency: Residency | None = None) -> None:
    """What the verdict's change brings is what a run with it takes less, to a tenth."""
    first = found.findings[0]
    words = first.change.split(" (")[0].split()
    settings = {
        flag.partition(".")[2].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    typed = {name: int(value) if value.isdecimal() else value for name, value in settings.items()}
    after = validate(changed(config, **typed), (config.parallel.pp or 1) * (config.parallel.dp or 1))
    brought = seconds_of(config, truth, residency) - seconds_of(after, truth)
    assert first.brings == pytest.approx(brought, rel=0.1), (found.lines(), brought)


@pytest.mark.by_default("0.4")
@pytest.mark.parametrize("share", SHARES)
def test_a_reduction_that_nothing_hides(tmp_path: Path, share: float) -> None:
    """The buckets are as small as they can be: it takes less of a larger batch."""
    config = config_of(1, 2, m=1)
    slow = grown(share, lambda factor: seconds_of(config, Truth(seconds_per_byte=factor * 1e-9))) * 1e-9
    truth = Truth(seconds_per_byte=slow)
    found = diagnosed(tmp_path, config, truth)
    check(found, Fault.EXPOSED_DP, seconds_of(config, truth) - seconds_of(config, Truth()))
    first = found.findings[0]
    assert "w[r]" in first.evidence and first.change.startswith("--train.num-micro-batches 2")
    both = 2 * seconds_of(config, truth) - seconds_of(changed(config, num_micro_batches=2), truth)
    assert first.brings == pytest.approx(both / 2, rel=0.1)


@pytest.mark.parametrize("share", SHARES)
def test_a_reduction_inside_backward(tmp_path: Path, share: float) -> None:
    """What it brings to sum beside backward is all of it, but for what nothing hides there either."""
    config = config_of(1, 2, m=2)
    beside = Truth(seconds_per_byte=1e-9)
    truth = replace(beside, reduced=share / (1.0 - share) * seconds_of(config, beside))
    found = diagnosed(tmp_path, config, truth)
    check(found, Fault.EXPOSED_DP, truth.reduced)
    exposed = seconds_of(config, beside) - seconds_of(config, Truth())
    assert found.findings[0].brings == pytest.approx(truth.reduced - exposed, rel=0.1)
    assert "inside backward, as in 0B1[r0 " in found.findings[0].evidence


def test_a_pipeline_without_sequences_to_split_takes_a_larger_batch(tmp_path: Path) -> None:
    """A schedule that fills better would be offered first; no other does than zbv."""
    config = config_of(4, m=2, micro_batch_size=1, schedule="zbv")
    found = diagnosed(tmp_path, config, Truth())
    assert found.fault is Fault.FEW_MICRO_BATCHES, found.lines()
    assert found.findings[0].change.startswith("--train.num-micro-batches 4 (45.6 MB more), a batch 2 times"), (
        found.lines()
    )
    both = 2 * seconds_of(config, Truth()) - seconds_of(changed(config, num_micro_batches=4), Truth())
    assert found.findings[0].brings == pytest.approx(both / 2, rel=0.1)


def test_gradients_that_are_reduced_for_each_micro_batch(tmp_path: Path) -> None:
    config = config_of(1, 2, m=8, zero=2)
    truth = Truth(seconds_per_byte=2e-8)
    found = diagnosed(tmp_path, config, truth)
    assert found.fault is Fault.EXPOSED_DP and "--parallel.zero 0 (" in found.findings[0].change, found.lines()
    check_change(found, config, truth)


@pytest.mark.parametrize("recompute", ["block", "full"])
def test_recomputation(tmp_path: Path, recompute: str) -> None:
    config = config_of(2, recompute=recompute)
    truth = Truth()
    without = changed(config, recompute="none")
    found = diagnosed(tmp_path, config, truth)
    check(found, Fault.MEMORY, seconds_of(config, truth) - seconds_of(without, truth))
    assert found.findings[0].change.startswith("--parallel.recompute none (") and "MB more" in found.findings[0].change
    check_change(found, config, truth)


def test_a_memory_limit_that_only_recomputation_keeps(tmp_path: Path) -> None:
    """Replicas can shard instead: the change fits; one replica cannot, and is told which limit it needs."""
    found = diagnosed(
        tmp_path, limited(config_of(1, 2, m=2, micro_batch_size=1, recompute="block"), extra=1_000_000), Truth()
    )
    assert found.fault is Fault.MEMORY and "--parallel.zero" in found.findings[0].change, found.lines()
    found = diagnosed(tmp_path, limited(config_of(2, 1, recompute="full"), extra=1_000_000), Truth())
    assert found.fault is Fault.MEMORY, found.lines()
    assert "--parallel.recompute none --parallel.memory-limit" in found.findings[0].change


def limited(config: Config, extra: int) -> Config:
    """The configuration with the memory that it needs, and some more."""
    layout = layout_of(config)
    needed = max(rank.peak for rank in memory_of(config, layout, training_plan(config, layout)))
    return changed(config, memory_limit=needed + extra)


def test_weights_that_are_gathered_for_each_use(tmp_path: Path) -> None:
    config = config_of(1, 2, m=8, zero=3)
    truth = Truth(seconds_per_byte=2e-9)
    found = diagnosed(tmp_path, config, truth, Residency.USE)
    brings = seconds_of(config, truth, Residency.USE) - seconds_of(config, truth, Residency.STEP)
    memory = next(finding for finding in found.findings if finding.fault is Fault.MEMORY)
    assert memory.seconds == pytest.approx(brings, rel=0.1) and "--parallel.residency step" in memory.change


def test_an_allocator_that_asks_again(tmp_path: Path) -> None:
    config = config_of(1, m=4)
    stall = 0.3 * seconds_of(config, Truth())
    found = diagnosed(tmp_path, config, Truth(stall=stall))
    check(found, Fault.MEMORY, stall)
    assert "ask again 5 times" in found.findings[0].evidence


@pytest.mark.parametrize("share", SHARES)
def test_exchanges_of_tensor_parallel_ranks(tmp_path: Path, share: float) -> None:
    config = config_of(1, 1, tp=2, m=8)
    found = diagnosed(tmp_path, config, Truth(exchange=share))
    check(found, Fault.EXPOSED_TP, seconds_of(config, Truth(exchange=share)) - seconds_of(config, Truth()))
    plain = diagnosed(tmp_path, changed(config, tp_comm="plain"), Truth(exchange=share))
    assert plain.findings[0].change.startswith("--parallel.tp-comm fused"), plain.lines()


def test_sums_of_tensor_parallel_ranks_do_not_price_those_of_replicas(tmp_path: Path) -> None:
    """One replica sums the norms' gradients over tp: some hundred bytes, by which 25 MB would take minutes."""
    config = config_of(1, 1, tp=2, m=8)
    truth = Truth(exchange=0.4, seconds_per_byte=1e-7)
    found = diagnosed(tmp_path, config, truth).findings[0]
    assert found.fault is Fault.EXPOSED_TP
    assert found.change.startswith("--parallel.tp 1 --parallel.dp 2 --train.num-micro-batches 4"), found
    assert "its reductions over replicas not counted" in found.change
    whole = seconds_of(config, truth) - seconds_of(config, replace(truth, exchange=0.0))
    assert found.brings == pytest.approx(whole, rel=0.1)


def test_a_stage_without_the_models_ends_has_none_on_any_machine(tmp_path: Path) -> None:
    """What the model says of layers and of whole actions is of one machine: the slowest of all chips."""
    evidence = read_evidence(write_run(tmp_path, config_of(4, 1, m=8), Truth()))
    baseline = Baseline(replace(evidence, config=replace(evidence.config, device="cuda")))
    for kind in (Kind.F, Kind.B):
        assert baseline.modelled[kind, 1] == baseline.modelled_layers[kind, 1]
        assert baseline.modelled[kind, 3].total > baseline.modelled_layers[kind, 3].total


def test_stages_of_unequal_work(tmp_path: Path) -> None:
    """Three layers on two stages: the model knows it, so no rank is slow."""
    config = config_of(2)
    config = validate(replace(config, model=replace(config.model, num_layers=3)), 2)
    found = diagnosed(tmp_path, config, Truth())
    assert found.fault is Fault.UNEVEN_STAGES, found.lines()
    assert "longer than the others, who wait" in found.findings[0].evidence


@pytest.mark.slow
def test_a_stage_with_a_dear_head_is_uneven_and_not_slow(tmp_path: Path) -> None:
    """A head that takes many times what its flops say: nothing but a measurement tells it from a slow rank."""
    config = config_of(2)
    dear = Truth(ends=40.0)
    found = diagnosed(tmp_path, config, dear)
    assert found.fault is Fault.UNEVEN_STAGES, found.lines()
    assert found.findings[0].evidence.startswith("stage 1 computes ")
    # Beside it a rank that is slow is told apart, also where it has the head.
    for place, number in (((0, 0, 0), 0), ((1, 0, 0), 1)):
        slow = Truth(ends=40.0, slower={place: 1.6})
        found = diagnosed(tmp_path, config, slow)
        finding = next(finding for finding in found.findings if finding.fault is Fault.SLOW_RANK)
        healed = seconds_of(config, slow) - seconds_of(config, dear)
        assert finding.evidence.startswith(f"rank {number} ") and "layers as fast" in finding.evidence
        # A slow rank's head is slow too, which is not counted.
        assert 0.5 * healed <= finding.seconds <= 1.1 * healed, (found.lines(), healed)


@pytest.mark.by_default("2-1")
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_a_rank_whose_core_has_other_work_is_not_slow(tmp_path: Path, pp: int, dp: int) -> None:
    """It takes half as long again, and the host says why; what is slow beside it is told apart."""
    config, place = config_of(pp, dp, m=16), (pp - 1, dp - 1, 0)
    crowded = Truth(starved={place: 1.5})
    found = diagnosed(tmp_path, config, crowded)
    assert found.fault is Fault.NONE and "stood in line for a core in " in found.lines()[-1], found.lines()
    numbers, said = found.to_json(), " ".join(found.lines())
    assert f"{percent(numbers['computing_share'])} compute, bubble {percent(numbers['bubble_share'])} as" in said
    assert f"in line for a core in {percent(numbers['starved_share'])} of" in said and numbers["starved_share"] > 0.05
    slow = replace(crowded, slower={place: 1.4})
    found = diagnosed(tmp_path, config, slow)
    assert found.fault is Fault.SLOW_RANK and "computes 40 % longer" in found.findings[0].evidence, found.lines()


def test_a_gpu_that_waits_for_its_host(tmp_path: Path) -> None:
    config = replace(config_of(1, m=8), device="cuda")
    run = write_run(tmp_path / "run", config, Truth(issue=0.99))
    found = diagnose(run)
    assert found.fault is Fault.HOST and "--train.num-micro-batches 4" in found.findings[0].change, found.lines()
    assert diagnose(write_run(tmp_path / "run", config, Truth(issue=0.6))).fault is Fault.NONE


@pytest.mark.by_default("1-2-2-1f1b-1", "2-1-1-1f1b-0", "1-1-1-1f1b-0")
@pytest.mark.parametrize(
    "config",
    [
        config_of(1, m=4),
        config_of(1, 2, m=4),
        config_of(2, m=16),
        config_of(2, 2, m=16),
        config_of(4, m=32),
        config_of(4, m=16, schedule="zbv"),
        pytest.param(config_of(4, m=24, schedule="interleaved"), marks=pytest.mark.slow),
        config_of(1, tp=2, m=4),
        config_of(2, 2, m=16, zero=1),
        config_of(1, 2, m=4, zero=3),
    ],
    ids=lambda config: "-".join(str(getattr(config.parallel, name)) for name in ("tp", "pp", "dp", "schedule", "zero")),
)
def test_a_healthy_run(tmp_path: Path, config: Config) -> None:
    """Also with a slow rank, a slow reader and exchanges that are each 2 % of the step."""
    for number, truth in enumerate(
        (Truth(), Truth(slower={(0, 0, 0): 1.02}, exchange=0.02 * (config.parallel.tp != 1)))
    ):
        found = diagnose(write_run(tmp_path / str(number), config, truth))
        assert found.fault is Fault.NONE, found.lines()
        assert found.lines()[0].startswith("healthy: ") and " % compute, bubble " in found.lines()[0]


def test_what_differs_less_than_the_steps_themselves_is_no_verdict(tmp_path: Path) -> None:
    config = config_of(2)
    truth = Truth(slower={(0, 0, 0): 1.15})
    assert diagnosed(tmp_path, config, truth).fault is Fault.SLOW_RANK
    noisy = diagnosed(tmp_path, config, replace(truth, jitter=30.0))
    assert noisy.fault is Fault.NONE and "by which its own steps differ: record more steps" in noisy.lines()[0]


def test_one_long_step_hides_no_fault(tmp_path: Path) -> None:
    """Of three steps that were not recorded one took ten times as long: the machine did something else."""
    run = write_run(tmp_path / "run", config_of(2), Truth(slower={(0, 0, 0): 1.4}, jitter=0.0))
    recorded = {step["step"] for step in json.loads((run / "profile.json").read_text())["steps"]}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    others = [row for row in rows if row["step"] > 1 and row["step"] not in recorded][:3]
    others[1]["step_seconds"] *= 10
    kept = [*(row for row in rows if row["step"] in recorded), *others]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert diagnose(run).fault is Fault.SLOW_RANK


def test_what_differs_less_than_the_recorded_steps_do_is_no_verdict(tmp_path: Path) -> None:
    """A host that was busy in one of two recorded steps does not make a rank slow."""
    run = write_run(tmp_path / "run", config_of(2), Truth(slower={(0, 0, 0): 1.15}))
    content = json.loads((run / "profile.json").read_text())
    content["steps"][1]["seconds"] *= 1.5
    (run / "profile.json").write_text(json.dumps(content))
    assert diagnose(run).fault is Fault.NONE


def test_recorded_steps_that_are_unlike_the_others_are_no_verdict(tmp_path: Path) -> None:
    """Whatever made the recorded step long, as the loading of kernels in a run's first, the others do not have it."""
    run = write_run(tmp_path / "run", config_of(2), Truth(slower={(0, 0, 0): 1.15}))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["step_seconds"] /= 1.5
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert diagnose(run).fault is Fault.NONE


def test_a_run_with_phases_is_judged_by_the_phase_that_was_recorded(tmp_path: Path) -> None:
    """Also where the directory has moved: the run's own copy of the phases is read."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    phases = "[[phase]]\nuntil = 2\n[[phase]]\nmicro_batches = 32\nuntil = 20\n[[phase]]\ntrain.seq_len = 64\n"
    (run_dir / "phases.toml").write_text(phases)
    config = validate_run(replace(config_of(2), phases=str(run_dir / "phases.toml")), 2)
    write_run(run_dir, phases_of(config)[1].config, Truth(slower={(0, 0, 0): 1.3}))
    (run_dir / "config.toml").write_text(dump_toml(replace(config, phases="elsewhere/phases.toml")))
    # Steps of other phases take other times.
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["step_seconds"] *= 1.0 if 2 < row["step"] <= 20 else 0.3
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = diagnose(run_dir)
    assert found.fault is Fault.SLOW_RANK and "32 micro-batches" in found.lines()[-1], found.lines()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(4, m=4, micro_batch_size=8)
    run = write_run(tmp_path / "run", config, Truth(read={0: 0.01}))
    assert main(["diagnose", str(run)]) == 0
    verdict, *_, basis = capsys.readouterr().out.splitlines()
    assert verdict.startswith("too few micro-batches, ") and " of the step: 4 micro-batches on 4 stages" in verdict
    assert " brings " in verdict and "1f1b, tp 1, pp 4, dp 1, 4 micro-batches" in basis
    assert main(["diagnose", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["findings"][0]
    assert found["verdict"] == first["fault"] == "too few micro-batches" and first["brings_seconds"] > 0.0
    assert first["share_of_step"] == pytest.approx(first["seconds"] / found["step_seconds"])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda run: (run / "profile.json").unlink(),
            "profile.json: No such file or directory: run with --train.profile",
        ),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl of a run: "),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n{"st'), "it has no step with step_seconds"),
        (lambda run: (run / "config.toml").unlink(), "config.toml: No such file or directory"),
        (lambda run: with_model(run, "num_layers", 4), "its layers by chunk: "),
        (
            lambda run: with_model(run, "hidden_size", 256),
            "its boundary tensors: float32[1024,512], and by config.toml",
        ),
        (lambda run: with_parallel(run, "schedule", "zb-h1"), "its schedule: 1f1b, and by config.toml zb-h1"),
        (lambda run: with_model(run, "ffn_size", 1024), "its bytes of weights by stage: ["),
        (lambda run: without_ranks(run), "it has no ranks, as before there was a diagnosis"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], says: str
) -> None:
    run = write_run(tmp_path / "run", config_of(2), Truth())
    damage(run)
    assert main(["diagnose", str(run)]) == 2
    heard = capsys.readouterr()
    assert not heard.out and heard.err.count("\n") == 1 and says in heard.err, heard.err


def with_model(run: Path, name: str, value: int) -> None:
    replaced(run, name, value)


def with_parallel(run: Path, name: str, value: str) -> None:
    replaced(run, name, json.dumps(value))


def replaced(run: Path, name: str, value: Any) -> None:
    lines = (run / "config.toml").read_text().splitlines()
    # The first of that name: a schedule is the pipeline's, and further down the learning rate's.
    place = next(number for number, line in enumerate(lines) if line.startswith(f"{name} ="))
    assert lines[place] != f"{name} = {value}"
    lines[place] = f"{name} = {value}"
    (run / "config.toml").write_text("\n".join(lines) + "\n")


def without_ranks(run: Path) -> None:
    content = json.loads((run / "profile.json").read_text())
    del content["ranks"]
    (run / "profile.json").write_text(json.dumps(content))


def test_no_directory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path / "absent")]) == 2
    assert "needs the directory of a run" in capsys.readouterr().err
