"""Rung: gloo ranks. The trainer runs exactly the verified plan; overlap, evaluation and sampling in every layout.

What only a GPU checks: NCCL, pinned copies, CUDA-event timing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from parity import config_of
from rank_pool import RankError, RankPool

from tpengine.config import Config, DataConfig
from tpengine.data import open_corpus, write_tokens
from tpengine.execute import Trace
from tpengine.forward_pass import held_out_loss, sample
from tpengine.plan import parse_action
from tpengine.trainer import Trainer

CPU = torch.device("cpu")
LAYOUTS = [(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 4, 2), (2, 2, 1)]


def traced_step(config: Config) -> tuple[list[str], list[tuple[str, int, int]], dict[str, int]]:
    """Train one step; return (this rank's verified list, what ran, slots used)."""
    trace = Trace()
    trainer = Trainer(config, open_corpus(config), CPU, trace)
    trainer.train_step(0)
    verified = [str(action) for action in trainer.plan.actions[trainer.mesh.at.pp]]
    slots = {kind.name: 0 for kind, _, _ in trainer._transfers._slots}
    for kind, _, _ in trainer._transfers._slots:
        slots[kind.name] += 1
    return verified, [(e.action, e.begin_ns, e.end_ns) for e in trace.events], slots


def test_the_executed_list_is_the_verified_list(ranks: RankPool) -> None:
    for verified, ran, _ in ranks.run(traced_step, 8, config_of(2, 2, 2, tied=True, kv_heads=1)):
        subs = {str(sub) for text in verified for sub in parse_action(text).reduces}
        assert [name for name, _, _ in ran if name not in subs] == verified


def test_reductions_start_inside_the_last_backward_in_the_plans_order(ranks: RankPool) -> None:
    """Overlap proved by order: with buckets of 40 kB, a reduction starts before the last backward ends."""
    for verified, ran, _ in ranks.run(traced_step, 4, config_of(2, 1, 2, tied=False, kv_heads=2)):
        (last,) = [text for text in verified if parse_action(text).reduces]
        wanted = [str(sub) for sub in parse_action(last).reduces]
        assert len(wanted) >= 3
        begin, end = next((b, e) for name, b, e in ran if name == last)
        starts = [(name, at) for name, at, _ in ran if name in wanted]
        assert [name for name, _ in starts] == wanted
        assert all(begin < at < end for _, at in starts)
        # the first starts while most of the backward pass is still to come, not at its end
        assert starts[0][1] - begin < 0.5 * (end - begin)


def test_receive_buffers_are_as_many_as_the_plan_needs(ranks: RankPool) -> None:
    config = config_of(1, 1, 4, tied=False, kv_heads=2)
    config = replace(config, train=replace(config.train, num_micro_batches=12))
    for stage, (_, _, slots) in enumerate(ranks.run(traced_step, 4, config)):
        if stage > 0:
            assert slots["RECV_F"] <= 4 - stage + 1
        if stage < 3:
            assert slots["RECV_B"] <= 2


def evaluate_and_sample(config: Config) -> tuple[float, list[int]]:
    trainer = Trainer(config, open_corpus(config), CPU)
    trainer.train_step(0)
    return held_out_loss(trainer), sample(trainer, [100, 101], 40)


def test_held_out_loss_and_sample_are_the_same_in_every_layout(ranks: RankPool) -> None:
    """Also where the number of micro-batches does not divide over replicas, and past one window of text."""
    results = {}
    for dp, tp, pp in LAYOUTS:
        config = config_of(dp, tp, pp, tied=False, kv_heads=1)
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
    with pytest.raises(RankError, match=r"must build the same plan: rank 0 has .* ranks \[1\] differ"):
        ranks.run(different_plans, 2, [config, other])


def losses(config: Config, steps: int) -> list[float]:
    trainer = Trainer(config, open_corpus(config), CPU)
    return [trainer.train_step(step).loss for step in range(steps)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_dtypes_follow_float64(ranks: RankPool, dtype: str) -> None:
    """Eight steps stay within a few roundings of the dtype a step; masters keep bfloat16 learning."""
    config = config_of(1, 2, 2, tied=True, kv_heads=1)
    wide = ranks.run(losses, 4, config, 8)[0]
    narrow = ranks.run(losses, 4, replace(config, train=replace(config.train, dtype=dtype)), 8)[0]  # type: ignore[arg-type]
    assert wide[-1] < wide[0] - 0.3
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert max(abs(a - b) / b for a, b in zip(narrow, wide, strict=True)) < 4 * eps


def first_step_error(config: Config) -> str:
    trainer = Trainer(config, open_corpus(config), CPU)
    try:
        trainer.train_step(0)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_step_without_any_target_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    write_tokens(tmp_path / "sevens", np.full(5000, 7), vocab_size=8)
    config = config_of(1, 1, 2, tied=False, kv_heads=2)
    config = replace(config, data=DataConfig(path=str(tmp_path / "sevens"), ignore_token=7))
    for message in ranks.run(first_step_error, 2, config):
        assert "at least one valid target" in message


def exploding(config: Config) -> str:
    trainer = Trainer(config, open_corpus(config), CPU)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(torch.inf)
    try:
        trainer.train_step(0)
    except FloatingPointError as error:
        return str(error)
    return "no error"


def test_a_loss_that_is_not_finite_stops_all_ranks(ranks: RankPool) -> None:
    for message in ranks.run(exploding, 2, config_of(1, 1, 2, tied=False, kv_heads=2)):
        assert "must be finite" in message and "--optim.lr" in message
