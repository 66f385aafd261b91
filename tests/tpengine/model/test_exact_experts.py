"""Rung: gloo ranks. Exact mode where ranks share out whole experts (parallel.ep): the bits of one process.

Routing is as skewed as it can be: one expert is among the choices of every token, one is chosen by none, and biases
move. `pytest -m slow` has the grid, and `tpengine certify --ep 2` compares what ranks compute on the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.exactness import (
    CPU,
    Bits,
    Found,
    alone,
    assert_same_bits,
    digests_of,
    exact_config,
    merge,
    num_ranks,
    train_steps,
)
from support.engine.resuming import resumed
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.ops.experts.order import ExpertOrder

from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.config import Config, validate
from tpengine.config.settings import ModelDetails, ParameterGroup
from tpengine.data import open_corpus
from tpengine.data_parallel.bucket import FlatBucket
from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.layers import routing
from tpengine.layers.chunked_experts import RowRoutes
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layout.parameters import pieces_of, stage_specs
from tpengine.layout.state_bytes import state_bytes
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.state_check import check_replicas

# 4 shards, of which a rank of ep 4 has 1,024 elements of each projection: what a norm's block is.
DETAILS = ModelDetails(
    num_experts=4, experts_per_token=2, expert_ffn_size=128, normalizes_scores=True, has_experts=(False, True)
)
# A network that every token goes through beside them: of exact mode's shards, where experts lie on their owners.
SHARED = replace(DETAILS, shared_expert_size=32)
GATED = replace(SHARED, gates_shared_expert=True)
HOT, EMPTY = 1, 2


def config_of(
    layout: tuple[int, int, int], ep: int = 1, details: ModelDetails = DETAILS, balance: str = "bias", **settings: Any
) -> Config:
    """A small model with experts in the second of two layers; layout is dp, tp, pp."""
    settings = {"layers": 2, "tied": False, "dropout": 0.0, "steps": 2, **settings}
    config = exact_config(*layout, **settings)
    details = replace(details, router_bias=balance == "bias")
    if settings["layers"] != 2:
        details = replace(details, has_experts=())
    model = replace(config.model, architecture="qwen3_moe", details=details)
    train: Any = replace(config.train, balance=balance, balance_rate=0.05)
    config = replace(config, model=model, train=train, parallel=replace(config.parallel, ep=ep))
    return validate(config, num_ranks(config))


def skewed(config: Config) -> Trainer:
    """A trainer whose biases send every token to one expert, and none to another."""
    trainer = Trainer(config, open_corpus(config), CPU)
    for name, parameter in trainer.state.model.held.items():
        if name.endswith("e_score_correction_bias"):
            with torch.no_grad():
                parameter[HOT], parameter[EMPTY] = 10.0, -10.0
    return trainer


def train(config: Config, mutation: str = "") -> Found:
    with globals()[mutation]() if mutation else pytest.MonkeyPatch.context():
        trainer = skewed(config)
        found = train_steps(trainer, 0, config.train.steps)
    check_replicas(trainer.state, config.train.steps)
    if config.train.balance == "bias":
        assert trainer.step.loads is not None
        counts = trainer.step.loads.counts[0]
        assert counts[HOT] == 2 * counts.sum() // 4 and counts[EMPTY] == 0, counts
    return found


OneProcess = Callable[[Config], Bits]


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> OneProcess:
    @functools.cache
    def of(config: Config) -> Bits:
        return merge(config, ranks.run(train, 1, config))

    return lambda config: of(alone(config))


# Layout, ep, further settings. By default two replicas share experts, beside two others: lanes, then ranks.
CASES: list[tuple[tuple[int, int, int], int, dict[str, Any]]] = [
    ((4, 1, 1), 2, {}),
    ((1, 2, 1), 2, {}),
    ((1, 4, 1), 4, {"dtype": "bfloat16"}),
    ((2, 1, 1), 2, {"micro_batches": 16}),
    ((2, 2, 1), 4, {"balance": "loss"}),
    ((2, 2, 1), 2, {"balance": "none", "recompute": "block"}),
    ((4, 1, 1), 4, {"dtype": "float64", "recompute": "full"}),
    ((2, 1, 2), 2, {"schedule": "zb-h1"}),
    ((2, 1, 2), 2, {"schedule": "zbv", "layers": 4}),
    ((1, 2, 2), 2, {"schedule": "interleaved", "layers": 4, "recompute": "attention"}),
    *(((4, 1, 1), 2, {"zero": zero}) for zero in (1, 2, 3)),
    *(((2, 2, 1), 2, {"zero": zero}) for zero in (1, 3)),
    ((2, 2, 1), 4, {"zero": 3, "dtype": "bfloat16"}),
    ((4, 2, 1), 4, {"kv_heads": 1, "micro_batches": 8}),
    ((1, 2, 1), 2, {"details": GATED}),
    ((2, 2, 1), 4, {"details": GATED, "recompute": "block", "zero": 3}),
    ((2, 2, 1), 2, {"details": SHARED, "recompute": "full"}),
    ((2, 1, 2), 2, {"details": SHARED, "schedule": "zb-h1"}),
    ((4, 1, 1), 2, {"details": GATED, "dtype": "bfloat16"}),
]
BY_DEFAULT = [CASES[0], ((1, 2, 1), 2, {"details": GATED})]


@pytest.mark.parametrize(
    ("layout", "ep", "settings"),
    [pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow) for case in CASES],
)
def test_shared_experts_have_the_bits_of_one_process(
    ranks: RankPool, one_process: OneProcess, layout: tuple[int, int, int], ep: int, settings: dict[str, Any]
) -> None:
    config = config_of(layout, ep, **settings)
    found = ranks.run(train, num_ranks(config), config)
    assert_same_bits(merge(config, found), one_process(config))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*.experts.up_proj.weight", "*.experts.*", "*.mlp.gate.weight"])
def test_frozen_experts_and_routers_too(ranks: RankPool, one_process: OneProcess, pattern: str) -> None:
    config = config_of((2, 2, 1), 4, balance="none")
    config = replace(config, optim=replace(config.optim, groups=(ParameterGroup(pattern, frozen=True),)))
    assert_same_bits(merge(config, ranks.run(train, 4, config)), one_process(config))


def save_halfway(config: Config, run_dir: str) -> Found:
    trainer = skewed(config)
    found = train_steps(trainer, 0, 1)
    saver = Saver(checkpoints_of(run_dir), keep=2)
    saver.save(1, blocks_of(trainer.state), state_of(config, trainer.state.part.corpus.fingerprint(), 1))
    assert saver.wait() is None
    return found


def go_on(config: Config, run_dir: str, mutation: str = "") -> tuple[Found, Found]:
    """What was loaded, and what the second step came to."""
    trainer = resumed(config, run_dir, 1)
    with globals()[mutation](trainer) if mutation else pytest.MonkeyPatch.context():
        return ([], digests_of(trainer)), train_steps(trainer, 1, 2)


def assert_goes_on(first: Bits, after: Config, found: Sequence[tuple[Found, Found]], want: Bits) -> None:
    """What was loaded is what was saved, and the next step's bits are those of one process."""
    loaded, second = zip(*found, strict=True)
    state = merge(after, loaded).digests
    assert [key for key in state if key[2] != "gradient" and state[key] != first.digests[key]] == []
    bits = merge(after, second)
    assert_same_bits(replace(bits, numbers=first.numbers + bits.numbers), want)


@pytest.mark.parametrize(
    ("saving", "going_on"),
    [
        (((2, 1, 1), 2), ((1, 2, 1), 1)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(((1, 2, 1), 1), ((2, 2, 1), 4)), (((1, 4, 1), 4), ((1, 1, 1), 1))]
        ),
    ],
)
def test_a_run_goes_on_with_the_same_bits_where_experts_lie_otherwise(
    ranks: RankPool,
    one_process: OneProcess,
    tmp_path: Path,
    saving: tuple[tuple[int, int, int], int],
    going_on: tuple[tuple[int, int, int], int],
) -> None:
    before, after = config_of(*saving), config_of(*going_on)
    first = merge(before, ranks.run(save_halfway, num_ranks(before), before, str(tmp_path)))
    assert_goes_on(first, after, ranks.run(go_on, num_ranks(after), after, str(tmp_path)), one_process(before))


@contextmanager
def experts_exchanged(trainer: Trainer) -> Iterator[None]:
    """Each expert's matrices are the next one's."""
    for name, weight in trainer.state.model.held.items():
        if ".experts." in name:
            weight.data.copy_(weight.data.roll(1, 0))
    yield


@contextmanager
def moments_exchanged(trainer: Trainer) -> Iterator[None]:
    """Each expert's moments are the next one's."""
    for name in trainer.state.weights:
        if ".experts." in name:
            for moment in trainer.state.optimizer.state_of(name).values():
                moment.copy_(moment.roll(1, 0))
    yield


@contextmanager
def tokens_exchanged(trainer: Trainer) -> Iterator[None]:
    """Of each expert's rows the last token's comes first: sums over tokens are taken in another order."""
    sort = routing.sort_forward

    def backwards(experts: Tensor, num_experts: int) -> ExpertOrder:
        order, offsets, _ = sort(experts, num_experts)
        order = torch.cat([rows.flip(0) for rows in order.split(offsets.diff().tolist())])
        return ExpertOrder(order, offsets, order.argsort().int())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "sort_forward", backwards)
        yield


ON_RESUME = (experts_exchanged, moments_exchanged, tokens_exchanged)


@pytest.mark.slow
def test_what_is_exchanged_on_resume_is_noticed(
    ranks: RankPool, one_process: OneProcess, tmp_path: Path, count_mutations: Callable[[str, int, int], None]
) -> None:
    """From two replicas that share experts to one whose experts are cut over tp."""
    before, after = config_of((2, 1, 1), 2), config_of((1, 2, 1), 1)
    first = merge(before, ranks.run(save_halfway, 2, before, str(tmp_path)))

    def found(mutation: str) -> list[tuple[Found, Found]]:
        return ranks.run(go_on, 2, after, str(tmp_path), mutation)

    def check(bits: list[tuple[Found, Found]]) -> None:
        assert_goes_on(first, after, bits, one_process(before))

    check(found(""))
    unnoticed = survivors([mutation.__name__ for mutation in ON_RESUME], found, check)
    count_mutations("experts resumed (bits)", len(ON_RESUME) - len(unnoticed), len(ON_RESUME))
    assert not unnoticed


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (1, 4), (2, 2), (2, 4), (4, 4)])
def test_each_element_of_an_expert_lies_on_one_rank(tp: int, ep: int) -> None:
    """Of the ranks that share them; each has all shards of its own experts."""
    config = config_of((4, 1, 1))
    for spec in stage_specs(config.model, 4, 1, 2, ep, in_chunks=True):
        if ".experts." not in spec.name:
            continue
        covered = torch.zeros(spec.shape, dtype=torch.int32)
        for rank in range(max(tp, ep)):
            held = range(rank % tp * (4 // tp), (rank % tp + 1) * (4 // tp))
            for piece in pieces_of(spec, 4, held, rank):
                assert spec.local_numel(4) == torch.Size(piece.block[1]).numel()
                covered[tuple(slice(o, o + n) for o, n in zip(*piece.block, strict=True))] += 1
        assert bool((covered == 1).all())


def bytes_held(config: Config) -> list[int]:
    """Of weights, gradients with their lanes and blocks, and moments, between steps; and what is predicted."""
    trainer = Trainer(config, open_corpus(config), CPU)
    state, part = trainer.state, trainer.state.part
    blocks = state.buckets.blocks
    assert blocks is not None
    subtrees = [subtree for of_bucket in blocks._subtrees.values() for subtree in of_bucket]
    buckets = [state.buckets[index] for index in state.buckets.flat]
    gradients = [bucket.lanes for bucket in buckets] + subtrees
    gradients += [bucket.own for bucket in buckets if bucket.cut is not None]
    moments = [moment for name in state.weights for moment in state.optimizer.state_of(name).values()]
    weights = list(state.model.held.values()) + (list(state.held.values()) if state.sliced else [])
    at = state.rank.mesh.at
    predicted = state_bytes(config, part.layout, at.pp, at.dp)
    measured = [sum(tensor.nbytes for tensor in tensors) for tensors in (gradients, moments)]
    assert sum(weight.nbytes for weight in weights) > 0
    return [*measured, predicted.gradients, predicted.moments]


@pytest.mark.parametrize(
    ("layout", "ep", "zero"),
    [((4, 1, 1), 2, 0), *(pytest.param(*c, marks=pytest.mark.slow) for c in [((2, 2, 1), 4, 0), ((4, 1, 1), 2, 2)])],
)
def test_lanes_are_in_the_predicted_memory(ranks: RankPool, layout: tuple[int, int, int], ep: int, zero: int) -> None:
    config = config_of(layout, ep, zero=zero)
    for gradients, moments, predicted, of_moments in ranks.run(bytes_held, num_ranks(config), config):
        assert gradients == predicted and moments == of_moments


def by_expert(rows: Tensor, offsets: Tensor, others: Tensor, of_others: Tensor) -> Tensor:
    """The rows of both, those of each expert together."""
    pairs = zip(rows.split(offsets.diff().tolist()), others.split(of_others.diff().tolist()), strict=True)
    return torch.cat([part for pair in pairs for part in pair])


@contextmanager
def rows_of_two_replicas_in_one_product() -> Iterator[None]:
    """An expert's gradient is one product of the rows of two replicas' micro-batches."""
    inner = GradientSink.grouped_weight_grad
    waiting: dict[Tensor, tuple[Tensor, Tensor, Tensor]] = {}

    def joined(self: GradientSink, param: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, **sizes: Any) -> None:
        if param not in waiting:
            waiting[param] = dy, x, offsets
            self._counted(self._places[param][1])
            return
        first_dy, first_x, firsts = waiting.pop(param)
        dy, x = (by_expert(of, firsts, other, offsets) for of, other in ((first_dy, dy), (first_x, x)))
        inner(self, param, dy, x, firsts + offsets, **sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientSink, "grouped_weight_grad", joined)
        yield


@contextmanager
def terms_added_over_the_sum_of_shards() -> Iterator[None]:
    """The V partial rows are added first, then a token's k rows: what an owner that adds before it sends back does."""
    give_back = RowRoutes.give_back

    def added(self: RowRoutes, of_lanes: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        totals = [functools.reduce(torch.add, of_shards) for of_shards in of_lanes]
        zeros = [[total if not v else torch.zeros_like(total) for v in range(self.num_shards)] for total in totals]
        return give_back(self, zeros)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowRoutes, "give_back", added)
        yield


@contextmanager
def lanes_joined_behind_the_ranks() -> Iterator[None]:
    """Replicas that share experts are added when all ranks have been: another tree than that of all replicas."""
    end_sum = FlatBucket.end_sum
    join = FlatBucket.join_lanes

    def late(self: FlatBucket) -> None:
        if self.num_lanes > 1:
            for lane in self.lanes[1:]:
                self.comm.all_reduce_in_tree_(lane)
            join(self)
        end_sum(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatBucket, "join_lanes", lambda self: None)
        patch.setattr(FlatBucket, "end_sum", late)
        yield


@contextmanager
def one_lane_for_all_replicas() -> Iterator[None]:
    """Replicas that share experts add to one gradient, micro-batch by micro-batch."""
    place = GradientBuckets.place
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientBuckets, "place", lambda self, name, lane=0: place(self, name))
        yield


MUTATIONS = (
    terms_added_over_the_sum_of_shards,
    rows_of_two_replicas_in_one_product,
    lanes_joined_behind_the_ranks,
    one_lane_for_all_replicas,
)


@pytest.mark.parametrize(
    "mutations", [MUTATIONS[:1], pytest.param(MUTATIONS[1:], marks=pytest.mark.slow)], ids=["one", "others"]
)
def test_every_mutation_of_shared_experts_changes_the_hash(
    ranks: RankPool,
    one_process: OneProcess,
    mutations: Sequence[Callable[[], Any]],
    count_mutations: Callable[[str, int, int], None],
) -> None:
    config = config_of((4, 1, 1), 2, micro_batches=8)
    reference = one_process(config)

    def outcome_of(mutation: str) -> Bits:
        return merge(config, ranks.run(train, 4, config, mutation))

    names = [mutation.__name__ for mutation in mutations]
    unnoticed = survivors(names, outcome_of, lambda bits: assert_same_bits(bits, reference))
    count_mutations("exact mode's shared experts (bits)", len(names) - len(unnoticed), len(names))
    assert not unnoticed
