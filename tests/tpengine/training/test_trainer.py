"""Rung: gloo ranks. The trainer runs exactly the verified plan; overlap, evaluation and sampling in every layout.

What only a GPU checks: NCCL, pinned copies, CUDA-event timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.engine.parity import config_of
from support.ranks.rank_pool import RankError, RankPool
from tpkernels.exchange.pending import Work

from tpengine.config import Config, DataConfig
from tpengine.data import open_corpus, write_tokens
from tpengine.pipeline.executor import Trace
from tpengine.plan import parse_action
from tpengine.runs.evaluation import held_out_loss, sample
from tpengine.runs.trainer import Trainer
from tpengine.training.planned_run import RunError

CPU = torch.device("cpu")
# An axis each; several together are slow.
SMALL_LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
LARGE_LAYOUTS = [(2, 1, 2), (1, 4, 2), (2, 2, 1)]


def traced_step(config: Config) -> tuple[list[str], list[tuple[str, int, int]], dict[str, int]]:
    """Train one step; return (this rank's verified list, what ran, how many places each kind of receive came from)."""
    trace = Trace()
    trainer = Trainer(config, open_corpus(config), CPU, trace)
    inputs: set[int] = set()
    output_grads: set[int] = set()
    for stage in trainer.step.stages.values():
        stage.receive_input = noting(stage.receive_input, inputs)  # type: ignore[method-assign]
        stage.receive_output_grad = noting(stage.receive_output_grad, output_grads)  # type: ignore[method-assign]
    trainer.step.run(0)
    verified = [str(action) for action in trainer.state.part.plan.actions[trainer.state.rank.mesh.at.pp]]
    slots = {"RECV_F": len(inputs), "RECV_B": len(output_grads)}
    return verified, [(e.action, e.begin_ns, e.end_ns) for e in trace.events], slots


def noting(receive: Callable[[int, torch.Tensor], None], places: set[int]) -> Callable[[int, torch.Tensor], None]:
    """A stage's `receive` that notes where the tensors lie that it is given."""

    def note(microbatch: int, tensor: torch.Tensor) -> None:
        places.add(tensor.data_ptr())
        receive(microbatch, tensor)

    return note


@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 1, 2), pytest.param(2, 2, 2, marks=pytest.mark.slow)])
def test_the_executed_list_is_the_verified_list(ranks: RankPool, dp: int, tp: int, pp: int) -> None:
    for verified, ran, _ in ranks.run(traced_step, dp * tp * pp, config_of(dp, tp, pp, tied=True, kv_heads=1)):
        subs = {str(sub) for text in verified for sub in parse_action(text).reduces}
        assert [name for name, _, _ in ran if name not in subs] == verified


def overlapped_step(config: Config) -> tuple[list[str], list[str]]:
    """Train one step; return the reductions in the plan's order, and contributions and reductions as they came."""
    trainer = Trainer(config, open_corpus(config), CPU)
    events: list[str] = []
    contributed, reduce = trainer.state.buckets.contributed, trainer.state.buckets.reduce

    def record_contribution(bucket: int) -> None:
        events.append("contribution")
        contributed(bucket)

    def record_reduction(index: int) -> Work:
        events.append(f"r{index}")
        return reduce(index)

    trainer.state.buckets.contributed = record_contribution  # type: ignore[method-assign]
    trainer.state.buckets.reduce = record_reduction  # type: ignore[method-assign]
    trainer.step.run(0)
    actions = trainer.state.part.plan.actions[trainer.state.rank.mesh.at.pp]
    return [str(sub) for action in actions for sub in action.reduces], events


def test_reductions_start_inside_the_last_backward_in_the_plans_order(ranks: RankPool) -> None:
    """Overlap proved by order, not by a stopwatch: backward goes on contributing after the first reductions began."""
    config = config_of(2, 1, 2, tied=False, kv_heads=2)
    for planned, events in ranks.run(overlapped_step, 4, config):
        started = [event for event in events if event != "contribution"]
        assert started == planned and len(planned) >= 3
        before = events[: events.index(started[0])].count("contribution")
        after = events[events.index(started[0]) :].count("contribution")
        each_pass = (before + after) // config.train.num_micro_batches
        assert before >= each_pass * (config.train.num_micro_batches - 1), "a reduction before the last micro-batch"
        assert after > each_pass // 2, "the first reduction waited for the end of backward"


def test_the_trace_has_reductions_inside_the_action_that_starts_them(ranks: RankPool) -> None:
    for verified, ran, _ in ranks.run(traced_step, 4, config_of(2, 1, 2, tied=False, kv_heads=2)):
        (last,) = [text for text in verified if parse_action(text).reduces]
        begin, end = next((b, e) for name, b, e in ran if name == last)
        wanted = [str(sub) for sub in parse_action(last).reduces]
        starts = [(name, at) for name, at, _ in ran if name in wanted]
        assert [name for name, _ in starts] == wanted
        assert all(begin < at < end for _, at in starts)


@pytest.mark.slow
def test_receive_buffers_are_as_many_as_the_plan_needs(ranks: RankPool) -> None:
    config = config_of(1, 1, 4, tied=False, kv_heads=2)
    config = replace(config, train=replace(config.train, num_micro_batches=12))
    for stage, (_, _, slots) in enumerate(ranks.run(traced_step, 4, config)):
        if stage > 0:
            assert 1 <= slots["RECV_F"] <= 4 - stage + 1
        if stage < 3:
            assert 1 <= slots["RECV_B"] <= 2


def evaluate_and_sample(config: Config) -> tuple[float, list[int]]:
    trainer = Trainer(config, open_corpus(config), CPU)
    trainer.step.run(0)
    return held_out_loss(trainer.state), sample(trainer.state, [100, 101], 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "num_layers"),
    [(SMALL_LAYOUTS, 2), pytest.param(LARGE_LAYOUTS, 5, marks=pytest.mark.slow)],
    ids=["small", "large"],
)
def test_held_out_loss_and_sample_are_the_same_in_every_layout(
    ranks: RankPool, layouts: list[tuple[int, int, int]], num_layers: int
) -> None:
    """They are, even if micro-batches do not divide over replicas, and past one window of text."""
    results = {}
    for dp, tp, pp in ((1, 1, 1), *layouts):
        config = config_of(dp, tp, pp, tied=False, kv_heads=1, num_layers=num_layers)
        config = replace(config, train=replace(config.train, eval_micro_batches=3))
        everyone = ranks.run(evaluate_and_sample, dp * tp * pp, config)
        assert all(other == everyone[0] for other in everyone), "ranks disagree"
        results[dp, tp, pp] = everyone[0]
    loss, tokens = results[1, 1, 1]
    assert len(tokens) == 42 and tokens[:2] == [100, 101] and len(set(tokens)) > 10
    for layout, (other_loss, other_tokens) in results.items():
        assert abs(other_loss - loss) <= 1e-9 * loss, layout
        assert other_tokens == tokens, layout


def different_plans(configs: list[Config]) -> None:
    config = configs[dist.get_rank()]
    Trainer(config, open_corpus(config), CPU)


def test_ranks_with_different_plans_stop(ranks: RankPool) -> None:
    config = config_of(1, 1, 2, tied=False, kv_heads=2)
    other = replace(config, parallel=replace(config.parallel, schedule="gpipe"))
    with pytest.raises(RankError, match=r"must have the same plan: ranks \[1\] differ"):
        ranks.run(different_plans, 2, [config, other])


def test_ranks_with_different_configurations_or_texts_stop(ranks: RankPool, tmp_path: Path) -> None:
    config = config_of(1, 1, 2, tied=False, kv_heads=2)
    other = replace(config, optim=replace(config.optim, lr=1e-4))
    with pytest.raises(RankError, match=r"must have the same configuration: ranks \[1\] differ"):
        ranks.run(different_plans, 2, [config, other])
    layout = replace(config, parallel=replace(config.parallel, tp=2, pp=1))
    with pytest.raises(RankError, match=r"must have the same plan: ranks \[1\] differ"):
        ranks.run(different_plans, 2, [config, layout])
    with pytest.raises(RankError, match=r"must have the same text: ranks \[1\] differ"):
        ranks.run(different_texts, 2, config, str(tmp_path / "tokens"))


def different_texts(config: Config, path: str) -> None:
    """The same path holds another text on another node: one token of it, far from its ends."""
    mine = f"{path}-{dist.get_rank()}"
    tokens = np.arange(300_000) % 200
    tokens[150_000] = dist.get_rank()
    write_tokens(mine, tokens, vocab_size=200)
    corpus = open_corpus(replace(config, data=DataConfig(path=mine)))
    Trainer(config, corpus, CPU)


def test_a_token_beyond_the_vocabulary_stops_every_replica(ranks: RankPool, tmp_path: Path) -> None:
    """The header lies, and only one replica reads the token."""
    write_tokens(tmp_path / "tokens", np.random.default_rng(0).integers(0, 200, 9000), vocab_size=200)
    config = config_of(2, 1, 1, tied=False, kv_heads=2)
    config = replace(config, data=DataConfig(path=str(tmp_path / "tokens")))
    second_replica = config.train.num_micro_batches * config.train.micro_batch_size
    window, _ = open_corpus(config).train.batch(second_replica, 1)
    raw = bytearray((tmp_path / "tokens").read_bytes())
    raw[raw.index(window.astype(np.uint8).tobytes()) + 5] = 255
    (tmp_path / "tokens").write_bytes(raw)
    (message,) = set(ranks.run(first_step_error, 2, config))
    assert "got 255" in message and "ranks [1] alone found this" in message


def losses(config: Config, steps: int) -> list[float]:
    trainer = Trainer(config, open_corpus(config), CPU)
    return [trainer.step.run(step).loss for step in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tp", "pp"),
    [("bfloat16", 1, 2), *(pytest.param(dtype, 2, 2, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16"))],
)
def test_narrow_dtypes_follow_float64(ranks: RankPool, dtype: str, tp: int, pp: int) -> None:
    """Eight steps stay within a few roundings of the dtype per step; masters keep bfloat16 learning."""
    config = config_of(1, tp, pp, tied=True, kv_heads=1)
    wide = ranks.run(losses, tp * pp, config, 8)[0]
    narrow = ranks.run(losses, tp * pp, replace(config, train=replace(config.train, dtype=dtype)), 8)[0]  # type: ignore[arg-type]
    assert wide[-1] < wide[0] - 0.3
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert max(abs(a - b) / b for a, b in zip(narrow, wide, strict=True)) < 4 * eps


def first_step_error(config: Config) -> str:
    trainer = Trainer(config, open_corpus(config), CPU)
    try:
        trainer.step.run(0)
    except RunError as error:
        return str(error)
    return "no error"


def test_a_step_without_any_target_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    write_tokens(tmp_path / "sevens", np.full(5000, 7), vocab_size=8)
    config = config_of(1, 1, 2, tied=False, kv_heads=2)
    config = replace(config, data=DataConfig(path=str(tmp_path / "sevens"), ignore_token=7))
    for message in ranks.run(first_step_error, 2, config):
        assert "at least one valid target" in message


def held_out(config: Config) -> float | None:
    return held_out_loss(Trainer(config, open_corpus(config), CPU).state)


@pytest.mark.slow
def test_held_out_samples_count_once_and_valid_targets_only(ranks: RankPool, tmp_path: Path) -> None:
    """A held-out text of two windows gives the same loss for two samples asked and for two hundred."""
    write_tokens(tmp_path / "tokens", np.arange(1000) % 50, vocab_size=50)
    config = config_of(2, 1, 1, tied=False, kv_heads=2)
    config = replace(config, data=DataConfig(path=str(tmp_path / "tokens"), held_out_fraction=0.06))
    few, many = (replace(config, train=replace(config.train, eval_micro_batches=n)) for n in (1, 100))
    assert ranks.run(held_out, 2, few) == ranks.run(held_out, 2, many)
    write_tokens(tmp_path / "tokens", np.r_[np.arange(900) % 50, np.full(100, 7)], vocab_size=50)
    ignoring = replace(config, data=replace(config.data, ignore_token=7))
    assert ranks.run(held_out, 2, ignoring) == [None, None]


def exploding(config: Config) -> list[tuple[str, str, bool]]:
    """Weights of the first stage alone are not finite: the loss is made on the last."""
    trainer = Trainer(config, open_corpus(config), CPU)
    if trainer.state.rank.mesh.at.pp == 0:
        with torch.no_grad():
            for parameter in trainer.state.model.parameters():
                parameter.fill_(torch.inf)
    results = [trainer.step.run(step) for step in range(2)]
    return [(str(result.loss), str(result.grad_norm), result.skipped) for result in results]


def test_a_loss_that_is_not_a_number_is_reported_as_that_on_every_stage(ranks: RankPool) -> None:
    for results in ranks.run(exploding, 2, config_of(1, 1, 2, tied=False, kv_heads=2)):
        assert results == [("nan", "nan", True)] * 2


@pytest.mark.by_default("fast")
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_masters_begin_with_what_the_weights_are_roundings_of(ranks: RankPool, reduction: str) -> None:
    """In bfloat16 a weight keeps 8 bits of its initial value; its master has them all."""
    config = config_of(1, 2, 1, tied=False, kv_heads=1)
    config = replace(config, train=replace(config.train, dtype="bfloat16", reduction=reduction))  # type: ignore[arg-type]
    assert ranks.run(initial_masters, 2, config) == [(True, True)] * 2


def initial_masters(config: Config) -> tuple[bool, bool]:
    """Whether masters are float32's initial values, and weights their roundings."""
    trainer = Trainer(config, open_corpus(config), CPU)
    wide = Trainer(replace(config, train=replace(config.train, dtype="float32")), open_corpus(config), CPU)
    masters, held = trainer.state.optimizer.masters, trainer.state.model.held
    are_wide = all(torch.equal(masters[name], weight) for name, weight in wide.state.model.held.items())
    return are_wide, all(torch.equal(held[name], masters[name].bfloat16()) for name in held)
