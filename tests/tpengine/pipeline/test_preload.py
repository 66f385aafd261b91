"""Rung: gloo ranks. What a step launches while receives are posted has been launched before, by its first pass.

The pass is forced here: over gloo it is not needed. What only a GPU checks: NCCL's connections, and that kernels are
loaded by being launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine.parity import Outcome, config_of, outcome_of
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.pipeline.preload import connect, without_transfers
from tpengine.plan import Kind, format_actions, parse_actions
from tpengine.plan.actions import RECEIVES, TRANSFERS
from tpengine.runs.trainer import Trainer

CPU = torch.device("cpu")


class Launches(TorchDispatchMode):
    """Notes each operation, with its shapes, strides and dtypes: before the first posted receive, and after it.

    Attributes:
        before, after: what was launched then; transfers themselves are not noted.
        posted: whether a receive has been posted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: set[str] = set()
        self.after: set[str] = set()
        self.posted = self._pauses = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        kinds = [(tuple(x.shape), x.stride(), x.dtype) for x in leaves if isinstance(x, Tensor)]
        if not self._pauses:
            (self.after if self.posted else self.before).add(f"{func} {kinds}")
        return func(*args, **(kwargs or {}))

    def not_noted(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        def quiet(action: Any) -> None:
            self.posted |= action.kind in RECEIVES
            self._pauses = True
            call(action)
            self._pauses = False

        return quiet


def late_launches(config: Config, preloads: bool) -> tuple[list[str], int]:
    """Train a step; return what is launched for the first time while receives are posted, and how many come earlier."""
    trainer = Trainer(config, open_corpus(config), CPU)
    trainer.step.preloads = preloads
    launches = Launches()
    handlers: Any = trainer.step.executor.handlers
    for kind in TRANSFERS:
        handlers[kind] = launches.not_noted(handlers[kind])
    trainer.step.pipeline.wait_for = launches.not_noted(trainer.step.pipeline.wait_for)  # type: ignore[method-assign]
    early: set[str] = set()

    def ending(call: Callable[[Any], None]) -> Callable[[Any], None]:
        def end(action: Any) -> None:
            early.update(launches.after - launches.before)
            launches.not_noted(call)(action)

        return end

    # Both come when every receive has been waited for.
    for kind in (Kind.TIE_REDUCE, Kind.CLIP):
        handlers[kind] = ending(handlers[kind])
    with launches:
        trainer.step.run(0)
    assert launches.posted
    return sorted(early), len(launches.before)


PREPARED = [
    dict(schedule="1f1b"),
    pytest.param(dict(schedule="zb-h1"), marks=pytest.mark.slow),
    pytest.param(dict(schedule="zbv", recompute="block"), marks=pytest.mark.slow),
    pytest.param(dict(schedule="interleaved", dp=2, zero=3), marks=pytest.mark.slow),
    pytest.param(dict(tp=2, tied=True, recompute="full"), marks=pytest.mark.slow),
]


def prepared(settings: dict[str, Any]) -> Config:
    settings = {"dp": 1, "tp": 1, "tied": False} | settings
    return config_of(settings.pop("dp"), settings.pop("tp"), 2, kv_heads=2, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", PREPARED, ids=str)
def test_nothing_is_launched_for_the_first_time_while_receives_are_posted(
    ranks: RankPool, settings: dict[str, Any]
) -> None:
    config = prepared(settings)
    num_ranks = config.parallel.dp * 2 * (config.parallel.tp or 1)
    for late, num_early in ranks.run(late_launches, num_ranks, config, True):
        assert not late
        assert num_early > 50


@pytest.mark.slow
def test_without_the_pass_most_kernels_are_launched_late(ranks: RankPool) -> None:
    for late, _ in ranks.run(late_launches, 2, prepared({}), False):
        assert len(late) > 50


def outcome(config: Config, preloads: bool) -> Outcome:
    trainer = Trainer(config, open_corpus(config), CPU)
    trainer.step.preloads = preloads
    return outcome_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        (dict(schedule="zb-h1"), False),
        pytest.param(dict(schedule="interleaved", dp=2, zero=3), False, marks=pytest.mark.slow),
        pytest.param(dict(dp=2), True, marks=pytest.mark.slow),
        pytest.param(dict(dp=2, zero=2), True, marks=pytest.mark.slow),
        pytest.param(dict(tp=2, tied=True), False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_pass_changes_no_bit_of_training(ranks: RankPool, settings: dict[str, Any], exact: bool) -> None:
    config = prepared(settings)
    if exact:
        config = replace(config, train=replace(config.train, reduction="exact"))
    num_ranks = config.parallel.dp * 2 * (config.parallel.tp or 1)
    with_pass = ranks.run(outcome, num_ranks, config, True)
    without = ranks.run(outcome, num_ranks, config, False)
    for (numbers, parameters), (want_numbers, want) in zip(with_pass, without, strict=True):
        assert numbers == want_numbers
        assert all(torch.equal(parameters[name][1], want[name][1]) for name in want)


def connected(config: Config) -> tuple[list[int], list[int]]:
    """Connect to the pipeline's peers; return the messages of each group call, activations' groups then gradients'."""
    trainer = Trainer(config, open_corpus(config), CPU)
    mesh, counts, groups = trainer.state.rank.mesh, [], []
    post, backward = dist.batch_isend_irecv, dist.new_group()

    def noting(operations: list[Any]) -> Any:
        counts.append(len(operations))
        groups.extend(int(operation.group is backward) for operation in operations)
        return post(operations)

    dist.batch_isend_irecv = noting  # type: ignore[assignment]
    try:
        connect(trainer.state.part.plan, mesh.at.pp, mesh.pp, CPU, backward)
    finally:
        dist.batch_isend_irecv = post
    return counts, groups


def test_every_pair_of_ranks_with_transfers_is_connected_in_both_directions(ranks: RankPool) -> None:
    ends, between = ([2, 2], [0, 0, 1, 1]), ([4, 4], [0] * 4 + [1] * 4)
    assert ranks.run(connected, 4, config_of(1, 1, 4, tied=False, kv_heads=2)) == [ends, between, between, ends]


def test_a_list_without_its_transfers() -> None:
    actions = parse_actions("1RECV_F0 w[1RECV_F0 g1] 1F0[g2] 1SEND_F0 w[1SEND_F0] 1B0[r1 f2] w[r1] t0 CLIP STEP")
    assert format_actions(without_transfers(actions)) == "w[g1] 1F0[g2] 1B0[r1 f2] w[r1]"
