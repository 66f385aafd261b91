"""Rung: gloo ranks. Experts are kept even: the auxiliary loss against autograd, the bias against counts, in any layout.

The oracle of a step is autograd through the whole model in one process, with the auxiliary loss written out by hand;
that of a bias is a loop over the counts of every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.engine import exactness
from support.engine.parity import Outcome, compare, config_of, whole_weights
from support.engine.resuming import resumed
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.nn.functional import cross_entropy
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.experts import Routes, exchange_counts
from tpkernels.work_experts import crossing_rows

from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.config import IGNORED_LABEL, Config, num_evaluated, validate
from tpengine.config.settings import ModelDetails
from tpengine.data import open_corpus
from tpengine.layers import chunked_experts, spread_experts
from tpengine.layers.chunked_experts import RowRoutes
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.routing import Router
from tpengine.plan import Kind
from tpengine.runs.evaluation import held_out_loss
from tpengine.runs.skipped_steps import find_first
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.state_check import check_frozen, check_replicas

CPU = torch.device("cpu")
E, K, STEPS = 4, 2, 20
BIAS = "layers.{}.mlp.gate.e_score_correction_bias"
# The second layer from last is dense.
DETAILS = ModelDetails(
    num_experts=E,
    experts_per_token=K,
    expert_ffn_size=16,
    has_experts=(True, True, False, True),
    normalizes_scores=True,
)
SIGMOID = replace(DETAILS, router_scores="sigmoid", router_scale=1.5)


def experts_config(
    layout: tuple[int, int, int], balance: str, details: ModelDetails = DETAILS, rate: float = 0.05, **settings: Any
) -> Config:
    """A small model with experts in three of four layers; layout is dp, tp, pp."""
    train: dict[str, Any] = {name: settings.pop(name) for name in ("reduction", "dtype") if name in settings}
    ep = settings.pop("ep", 1)
    config = config_of(*layout, tied=False, kv_heads=4, **{"num_layers": 4, **settings})
    details = replace(details, has_experts=details.has_experts[: config.model.num_layers])
    model = replace(config.model, architecture="qwen3_moe", details=details)
    train |= {"balance": balance, "balance_rate": rate, "steps": STEPS}
    parallel = replace(config.parallel, ep=ep)
    config = replace(config, model=model, parallel=parallel, train=replace(config.train, **train))
    return validate(config, layout[0] * layout[1] * layout[2])


def trainer_of(config: Config) -> Trainer:
    return Trainer(config, open_corpus(config), CPU)


def by_hand(logits: Tensor, counts: Tensor, details: ModelDetails) -> Tensor:
    """The auxiliary loss of a layer and micro-batch, expert by expert."""
    scores = logits.softmax(1) if details.router_scores == "softmax" else logits.sigmoid()
    shares = scores / scores.sum(1, keepdim=True)
    total = logits.new_zeros(())
    for expert in range(E):
        total = total + E * (int(counts[expert]) / len(logits)) * shares[:, expert].mean()
    return total


def gradients_by_autograd(config: Config) -> tuple[float, float, dict[str, Tensor]]:
    """The loss, the mean auxiliary loss and the gradients of the first step, of one process without our sinks."""
    trainer = trainer_of(config)
    trainer.step.batch.step = trainer.step.reader.read(0)
    model, given = trainer.state.model, trainer.step.batch.step.given
    for router in model.modules():
        if isinstance(router, Router):
            router.balance = None
    losses: list[Tensor] = []

    def see(router: Router, inputs: tuple[Tensor, ...], routed: Any) -> None:
        # The router's weight, by a product that autograd records.
        logits = inputs[0] @ router.weight.T
        losses.append(by_hand(logits, routed.counts, config.model.details))

    layer: Any
    for layer in model.modules():
        if hasattr(layer, "sink"):
            layer.sink = GradientSink()
        if isinstance(layer, Router):
            layer.register_forward_hook(see)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, labels in zip(given.tokens, given.labels, strict=True):
        logits = model(tokens, config.train.seq_len)[:, : config.model.vocab_size]
        total = total + cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        count += int((labels != IGNORED_LABEL).sum())
    auxiliary = torch.stack(losses).mean()
    loss = total / count + config.train.balance_rate * auxiliary
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.held.items() if weight.grad is not None}
    return loss.item(), auxiliary.item(), found


def first_step(config: Config, mutation: str = "") -> Any:
    """Loss and loads of the first step on this rank, and by parameter its place and gradient, summed, not clipped."""
    trainer = trainer_of(replace(config, optim=replace(config.optim, clip_norm=0.0)))
    if mutation:
        globals()[mutation](trainer)
    result = trainer.step.run(0)
    pieces, found = trainer.state.model.pieces, {}
    for name, gradient in trainer.state.gradients.of.items():
        offset, size = pieces[name].block
        place = tuple(slice(first, first + num) for first, num in zip(offset, size, strict=True))
        found[pieces[name].spec.name] = place, gradient.clone()
    return result.loss, dict(result.loads), found


def apart(found: list[Any], want: tuple[float, float, dict[str, Tensor]]) -> float:
    """The largest difference of loss, auxiliary loss and gradients of all ranks from those of one process."""
    most = 0.0
    for loss, loads, of_rank in found:
        most = max(most, abs(loss - want[0]), abs(loads["balance_loss"] - want[1]))
        for name, (place, gradient) in of_rank.items():
            most = max(most, (gradient - want[2][name][place]).abs().max().item())
    return most


def held_out_by_hand(config: Config) -> tuple[float, float, bool]:
    """The held-out loss behind a step, the mean over targets by hand, and whether nothing was counted meanwhile."""
    trainer = trainer_of(config)
    result = trainer.step.run(0)
    assert trainer.step.loads is not None and result.loads["balance_loss"] > 1
    counts = trainer.step.loads.tables.counts.clone()
    found = held_out_loss(trainer.state)
    held_out, total, count = trainer.state.part.corpus.held_out, 0.0, 0
    rows = min(num_evaluated(config.train), held_out.num_windows)
    tokens, labels = (torch.from_numpy(of) for of in held_out.batch(0, rows))
    with torch.no_grad():
        for some, of_some in zip(tokens, labels, strict=True):
            logits = trainer.state.model(some, config.train.seq_len)[:, : config.model.vocab_size]
            total += float(cross_entropy(logits, of_some, ignore_index=IGNORED_LABEL, reduction="sum"))
            count += int((of_some != IGNORED_LABEL).sum())
    assert found is not None
    return found, total / count, torch.equal(counts, trainer.step.loads.tables.counts)


def test_the_held_out_loss_is_of_tokens_alone(ranks: RankPool) -> None:
    """With a rate of which the auxiliary loss is most of the training loss; routers of evaluation count nothing."""
    ((found, want, counts_nothing),) = ranks.run(held_out_by_hand, 1, experts_config((1, 1, 1), "loss", rate=10.0))
    assert abs(found - want) <= 1e-12 * want and counts_nothing


LAYOUTS = [(1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2)]
SETTINGS: list[dict[str, Any]] = [{}, {"recompute": "block"}, {"recompute": "full"}, {"schedule": "zbv"}]
DEFAULT_GRADIENTS = [
    ((1, 2, 1), SIGMOID, {}),
    ((2, 1, 2), DETAILS, {"schedule": "zb-h1", "recompute": "block"}),
    ((1, 2, 1), SIGMOID, {"ep": 2}),
]
SLOW_GRADIENTS = [((2, 2, 1), DETAILS, {"ep": 4}), ((2, 1, 2), DETAILS, {"ep": 2}), ((2, 2, 1), SIGMOID, {"ep": 2})]


def gradient_cases() -> list[Any]:
    every = [
        (layout, details, settings)
        for layout in LAYOUTS
        for details in (DETAILS, SIGMOID)
        for settings in SETTINGS
        if layout[2] > 1 or "schedule" not in settings
    ]
    every += SLOW_GRADIENTS
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in DEFAULT_GRADIENTS]
    return [*(pytest.param(*case) for case in DEFAULT_GRADIENTS), *slow]


@pytest.mark.parametrize(("layout", "details", "settings"), gradient_cases())
def test_the_gradient_of_the_auxiliary_loss_is_autograds(
    ranks: RankPool, layout: tuple[int, int, int], details: ModelDetails, settings: dict[str, Any]
) -> None:
    (want,) = ranks.run(gradients_by_autograd, 1, experts_config((1, 1, 1), "loss", details))
    config = experts_config(layout, "loss", details, **settings)
    assert apart(ranks.run(first_step, exactness.num_ranks(config), config), want) < 1e-10


def train(config: Config, num_steps: int = STEPS, mutation: str = "") -> tuple[Outcome, list[dict[str, float]]]:
    """Train on this rank; what parity.compare reads, and the loads of each step."""
    trainer = trainer_of(config)
    if mutation:
        globals()[mutation](trainer)
    found = go_on(trainer, 0, num_steps)
    if not mutation:
        check_frozen(trainer.state, num_steps)
        check_replicas(trainer.state, num_steps)
    return found


def go_on(trainer: Trainer, first: int, last: int) -> tuple[Outcome, list[dict[str, float]]]:
    """Train steps [first, last) on this rank."""
    results = [trainer.step.run(step) for step in range(first, last)]
    model = trainer.state.model
    with whole_weights(trainer):
        weights = {name: (model.pieces[name].block[0], weight.detach().clone()) for name, weight in model.held.items()}
    return ([(result.loss, result.grad_norm) for result in results], weights), [dict(of.loads) for of in results]


def by_counts(config: Config, num_steps: int) -> tuple[Outcome, list[dict[str, float]], dict[int, Tensor]]:
    """As `train`, in one process; and the biases, moved expert by expert by what its routers were seen to choose."""
    trainer, rate = trainer_of(config), config.train.balance_rate
    counts: dict[int, list[int]] = {}
    biases: dict[int, list[float]] = {}
    for number, block in trainer.state.model.layers.items():
        for router in block.modules():
            if isinstance(router, Router):
                biases[int(number)] = [0.0] * E
                router.register_forward_hook(partial(count, counts, int(number)))
    losses: list[tuple[float, ...]] = []
    loads: list[dict[str, float]] = []
    for step in range(num_steps):
        counts.update({layer: [0] * E for layer in biases})
        ((outcome, weights), more) = go_on(trainer, step, step + 1)
        losses, loads = [*losses, *outcome], [*loads, *more]
        for layer, of_layer in counts.items():
            assert sum(of_layer) == K * 4 * 48
            for expert, tokens in enumerate(of_layer):
                biases[layer][expert] += rate * ((tokens < sum(of_layer) / E) - (tokens > sum(of_layer) / E))
    return (losses, weights), loads, {layer: torch.tensor(of, dtype=torch.float64) for layer, of in biases.items()}


def count(counts: dict[int, list[int]], layer: int, _: Router, __: Any, routed: Any) -> None:
    for expert in routed.experts.flatten().tolist():
        counts[layer][expert] += 1


def assert_biases(found: list[tuple[Outcome, Any]], want: dict[int, Tensor]) -> None:
    """Every layer's bias, on every rank that has it, to the last bit."""
    seen = set()
    for (_, weights), _ in found:
        for layer, bias in want.items():
            if BIAS.format(layer) in weights:
                assert torch.equal(weights[BIAS.format(layer)][1], bias), f"layer {layer}"
                seen.add(layer)
    assert seen == set(want)


TRAINED = [
    ((2, 1, 2), "bias", {"zero": 3, "num_layers": 2}),
    ((2, 1, 2), "bias", {"zero": 3, "schedule": "zbv"}),
    ((1, 2, 1), "bias", {"ep": 2, "num_layers": 2}),
    ((2, 2, 1), "loss", {"ep": 4, "recompute": "block"}),
    ((2, 1, 1), "bias", {"ep": 2}),
    *(
        (layout, balance, settings)
        for layout in LAYOUTS
        for balance in ("bias", "loss")
        for settings in ({}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"recompute": "full"})
    ),
]


@pytest.mark.parametrize(
    ("layout", "balance", "settings"),
    [pytest.param(*case, marks=pytest.mark.slow if place else ()) for place, case in enumerate(TRAINED)],
)
def test_twenty_steps_are_one_processs_in_every_layout(
    ranks: RankPool, layout: tuple[int, int, int], balance: str, settings: dict[str, Any]
) -> None:
    alone = experts_config((1, 1, 1), balance, num_layers=settings.get("num_layers", 4))
    ((reference, of_reference, biases),) = ranks.run(by_counts, 1, alone, STEPS)
    config = experts_config(layout, balance, **settings)
    found = ranks.run(train, exactness.num_ranks(config), config)
    compare([outcome for outcome, _ in found], reference, least=1e-3)
    for _, loads in found:
        assert [even(row) for row in loads] == [even(row) for row in of_reference]
    if balance == "bias":
        assert any(bias.any() for bias in biases.values())
        assert_biases(found, biases)


def even(loads: dict[str, float]) -> dict[str, float]:
    """What follows from counts alone, and from no layout."""
    return {name: load for name, load in loads.items() if name.startswith(("expert_load/", "expert_tokens/"))}


def routed_rows(config: Config) -> tuple[dict[str, float], list[list[list[int]]], list[tuple[int, int]]]:
    """The loads of a step; what the ranks told each other, [N][E] for each exchange, and this rank's crossing rows."""
    trainer, comm = trainer_of(config), None
    seen: list[Routes] = []

    def exchange(*given: Any) -> Routes:
        nonlocal comm
        comm = given[-1]
        seen.append(exchange_counts(*given))
        return seen[-1]

    with mock.patch.object(spread_experts, "exchange_counts", exchange):
        result = trainer.step.run(0)
    assert comm is not None
    told: list[list[list[int]]] = [routes.counts.tolist() for routes in seen]
    return dict(result.loads), told, [crossing_rows(counts, comm.rank) for counts in told]


@pytest.mark.parametrize(
    ("layout", "ep"),
    [((2, 1, 1), 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [((2, 2, 1), 2), ((2, 2, 1), 4)])],
)
def test_rows_that_cross_are_what_the_ranks_told_each_other(
    ranks: RankPool, layout: tuple[int, int, int], ep: int
) -> None:
    """Each layer's share of crossing rows, and the hottest rank's over the mean, from every exchange of every rank."""
    config = experts_config(layout, "none", ep=ep)
    found = ranks.run(routed_rows, exactness.num_ranks(config), config)
    # In the order of layers, micro-batch after micro-batch.
    layers, rows = (0, 1, 3), K * 4 * 48
    for place, layer in enumerate(layers):
        crossing = sum(sent for _, _, crossing in found for sent, _ in crossing[place :: len(layers)])
        by_owner = [0] * ep
        # Of each group of ranks that share experts, the first.
        for _, told, _ in found[::ep]:
            for counts in told[place :: len(layers)]:
                for expert, tokens in enumerate(map(sum, zip(*counts, strict=True))):
                    by_owner[expert * ep // E] += tokens
        assert sum(by_owner) == rows and crossing > 0
        for loads, _, _ in found:
            assert loads[f"expert_crossing/{layer}"] == crossing / rows
            assert loads[f"expert_rank_load/{layer}"] == max(by_owner) * ep / rows


def sent_rows(config: Config) -> tuple[dict[str, float], list[int]]:
    """Exact mode: the loads of a step, and the rows that this rank sends to others in each exchange."""
    trainer, seen = trainer_of(config), []

    class Noted(RowRoutes):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            lengths = [rows.stop - rows.start for rows in self.sent()]
            seen.append(sum(lengths) - lengths[self.comm.rank])

    with mock.patch.object(chunked_experts, "RowRoutes", Noted):
        result = trainer.step.run(0)
    return dict(result.loads), seen


@pytest.mark.parametrize(
    ("layout", "ep"), [((1, 2, 1), 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [((2, 2, 1), 4)])]
)
def test_rows_that_cross_in_exact_mode_are_those_that_are_sent(
    ranks: RankPool, layout: tuple[int, int, int], ep: int
) -> None:
    """All tp ranks route all tokens, and each sends its part of every owner's rows: all ranks say the same share."""
    # A rank's experts are whole blocks of the norm.
    details = replace(DETAILS, expert_ffn_size=128)
    config = experts_config(layout, "none", details, ep=ep, dtype="float32", reduction="exact")
    found = ranks.run(sent_rows, exactness.num_ranks(config), config)
    layers, rows = (0, 1, 3), K * 4 * 48
    for place, layer in enumerate(layers):
        sent = sum(sum(of_rank[place :: len(layers)]) for _, of_rank in found)
        assert sent > 0
        assert {loads[f"expert_crossing/{layer}"] for loads, _ in found} == {sent / rows}


def test_no_row_crosses_where_ranks_share_no_experts(ranks: RankPool) -> None:
    for _, loads in ranks.run(train, 2, experts_config((2, 1, 1), "none"), 1):
        assert {loads[0][f"expert_crossing/{layer}"] for layer in (0, 1, 3)} == {0.0}
        assert {loads[0][f"expert_rank_load/{layer}"] for layer in (0, 1, 3)} == {1.0}


@pytest.mark.parametrize(
    ("layout", "balance"),
    [((2, 1, 2), "bias"), *(pytest.param(lay, b, marks=pytest.mark.slow) for lay in LAYOUTS for b in ("bias", "loss"))],
)
def test_exact_mode_has_one_processs_bits(ranks: RankPool, layout: tuple[int, int, int], balance: str) -> None:
    def of(layout: tuple[int, int, int]) -> exactness.Bits:
        config = experts_config(layout, balance, dtype="float32", reduction="exact")
        config = replace(config, train=replace(config.train, steps=3))
        return exactness.merge(config, ranks.run(exactness.train, exactness.num_ranks(config), config))

    exactness.assert_same_bits(of(layout), of((1, 1, 1)))


def counts_of_one_rank_only(trainer: Trainer) -> None:
    assert trainer.step.loads is not None
    trainer.step.loads._replicas = Communicator(None)


def counts_of_the_last_micro_batch_only(trainer: Trainer) -> None:
    loads = trainer.step.loads
    assert loads is not None
    own = loads._of_this_rank

    def of_last() -> Tensor:
        loads.tables.counts[:, :-1] = 0
        return own()

    loads._of_this_rank = of_last  # type: ignore[method-assign]


def biases_moved_before_all_counts_are_in(trainer: Trainer) -> None:
    """Each backward moves them by what is there, and STEP no more."""
    loads, handlers = trainer.step.loads, trainer.step.executor.handlers
    assert loads is not None
    backward, move = handlers[Kind.B], loads.move_biases
    moved: list[bool] = []

    def early(action: Any) -> None:
        backward(action)
        if not moved and action.piece[1] == 0:
            moved.append(True)
            loads.start_sum()
            loads.wait(loads.index or 0)
            loads.sum_over_stages()
            move(torch.zeros(()))
            loads._numbers = None

    def forget(step: int) -> Any:
        moved.clear()
        return run(step)

    run = trainer.step.run
    trainer.step.run = forget  # type: ignore[method-assign,assignment]
    trainer.step.executor.handlers = {**handlers, Kind.B: early}
    loads.move_biases = lambda skip: None  # type: ignore[method-assign]


def gradient_counted_tp_times(trainer: Trainer) -> None:
    for router in trainer.state.model.modules():
        if isinstance(router, Router):
            router.add_balance_ = partial(whole_gradient_, router)  # type: ignore[method-assign]


def whole_gradient_(router: Router, dlogits: Tensor, logits: Tensor, fractions: Tensor) -> None:
    assert router.balance is not None
    router.balance.add_gradient_(dlogits, logits, fractions, slice(None))


def gradient_not_divided_by_replicas(trainer: Trainer) -> None:
    assert trainer.step.loads is not None
    trainer.step.loads._rate *= trainer.state.rank.mesh.shape.dp


MOVED = {
    "counts_of_one_rank_only": (2, 1, 1),
    "counts_of_the_last_micro_batch_only": (2, 1, 1),
    "biases_moved_before_all_counts_are_in": (2, 1, 1),
}
ADDED = {"gradient_counted_tp_times": (1, 2, 1), "gradient_not_divided_by_replicas": (2, 1, 1)}


def test_wrong_counts_are_noticed(ranks: RankPool, count_mutations: Callable[[str, int, int], None]) -> None:
    ((_, _, want),) = ranks.run(by_counts, 1, experts_config((1, 1, 1), "bias", num_layers=2), 4)
    config = experts_config((2, 1, 1), "bias", num_layers=2)
    assert_biases(ranks.run(train, 2, config, 4), want)
    unnoticed = survivors(
        MOVED, lambda mutation: ranks.run(train, 2, config, 4, mutation), lambda found: assert_biases(found, want)
    )
    count_mutations("balance of experts", len(MOVED) - len(unnoticed), len(MOVED))
    assert not unnoticed


def test_a_wrong_gradient_is_noticed(ranks: RankPool, count_mutations: Callable[[str, int, int], None]) -> None:
    (want,) = ranks.run(gradients_by_autograd, 1, experts_config((1, 1, 1), "loss"))

    def compared(found: list[Any]) -> None:
        assert apart(found, want) < 1e-10

    unnoticed = survivors(
        ADDED, lambda name: ranks.run(first_step, 2, experts_config(ADDED[name], "loss"), name), compared
    )
    count_mutations("balance of experts", len(ADDED) - len(unnoticed), len(ADDED))
    assert not unnoticed


def save(config: Config, run_dir: str, num_steps: int) -> None:
    """Train, and save the last step."""
    trainer = trainer_of(config)
    go_on(trainer, 0, num_steps)
    saver = Saver(checkpoints_of(run_dir), keep=1)
    state = state_of(config, trainer.state.part.corpus.fingerprint(), num_steps)
    assert saver.save(num_steps, blocks_of(trainer.state), state) is None and saver.wait() is None


def resume(config: Config, run_dir: str, first: int, last: int) -> tuple[Outcome, list[dict[str, float]]]:
    """Go on from there."""
    return go_on(resumed(config, run_dir, first), first, last)


def test_a_run_resumed_in_another_layout_goes_on_with_its_biases(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, 2, experts_config((1, 2, 1), "bias", num_layers=2), str(tmp_path), 3)
    found = ranks.run(resume, 4, experts_config((2, 1, 2), "bias", num_layers=2, zero=3), str(tmp_path), 3, 6)
    ((_, _, want),) = ranks.run(by_counts, 1, experts_config((1, 1, 1), "bias", num_layers=2), 6)
    assert_biases(found, want)


def skipped(config: Config) -> tuple[bool, bool, str]:
    """A step whose scores are no numbers in one layer: whether it is skipped, whether no bias moves, and why."""
    trainer = trainer_of(config)
    trainer.step.run(0)
    names = [name for name in trainer.state.frozen if "correction" in name]
    before = {name: trainer.state.frozen[name].clone() for name in names}
    for number, block in trainer.state.model.layers.items():
        for router in block.modules():
            if isinstance(router, Router) and number == "1":
                router.register_forward_pre_hook(lambda _, given: (poisoned(trainer, given[0]),))
    result = trainer.step.run(1)
    stays = all(torch.equal(before[name], trainer.state.frozen[name]) for name in names)
    return result.skipped, stays, str(find_first(trainer.step, 1))


def poisoned(trainer: Trainer, x: Tensor) -> Tensor:
    """One token of the third micro-batch is no number; of those that tp ranks route by themselves the last one's."""
    at, shape = trainer.state.rank.mesh.at, trainer.state.rank.mesh.shape
    if trainer.state.model.position.microbatch != 2 or at.tp != shape.tp - 1:
        return x
    x = x.clone()
    x.data[5] = torch.nan
    return x


@pytest.mark.parametrize(
    ("layout", "ep", "balance"),
    [
        *(((1, 1, 2), 1, balance) for balance in ("none", "loss", "bias")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [((1, 2, 1), 2, "none"), ((2, 1, 1), 2, "bias")]),
    ],
)
def test_scores_that_are_no_numbers_skip_the_step_and_are_named(
    ranks: RankPool, layout: tuple[int, int, int], ep: int, balance: str
) -> None:
    """Also a token of the second tp rank, which alone sees it."""
    found = ranks.run(skipped, 2, experts_config(layout, balance, ep=ep))
    token = 24 + 5 if layout[1] == 2 else 5
    for is_skipped, stays, first in found:
        assert is_skipped and stays
        assert first == f"the scores of model.layers.1.mlp.gate for token {token}, layer 1, micro-batch 2"


def narrow(config: Config) -> tuple[set[torch.dtype], set[torch.dtype], bool]:
    """Dtypes of weights and of biases, and whether biases are whole multiples of the rate after some steps."""
    trainer = trainer_of(config)
    for step in range(3):
        trainer.step.run(step)
    held = trainer.state.model.held
    biases: list[Tensor] = [weight for name, weight in held.items() if "correction" in name]
    counted = torch.stack(biases) / config.train.balance_rate
    others = {weight.dtype for name, weight in held.items() if "correction" not in name}
    return others, {bias.dtype for bias in biases}, torch.allclose(counted, counted.round(), atol=1e-5)


def test_biases_are_wide_where_weights_are_narrow(ranks: RankPool) -> None:
    config = experts_config((1, 1, 1), "bias", rate=0.001, dtype="bfloat16")
    assert ranks.run(narrow, 1, config) == [({torch.bfloat16}, {torch.float32}, True)]
