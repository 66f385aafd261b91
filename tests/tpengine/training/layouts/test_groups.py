"""Rung: gloo ranks. Groups of parameters train as in a torch loop of one process, in float64, in every layout.

The loop asks autograd for no gradient of frozen weights, and updates each of the others at its own rate and decay. By
default three layouts; `pytest -m slow` has the whole product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from support.engine.parity import STEPS, Outcome, compare, config_of, outcome_of
from support.ranks.rank_pool import RankPool
from torch.nn.functional import cross_entropy
from tpkernels.exchange.communicator import Communicator

from tpengine.config import Config, ParameterGroup, validate
from tpengine.data import open_corpus
from tpengine.layout.groups import frozen_of, updates_of
from tpengine.layout.state_bytes import StateBytes, state_bytes
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer
from tpengine.plan import Kind
from tpengine.runs.trainer import Trainer
from tpengine.training.planned_run import RunError
from tpengine.training.state_check import check_frozen, check_replicas

CPU = torch.device("cpu")
GROUPS = {
    # The first half of the model, and with tied embeddings its output matrix.
    "below": (
        ParameterGroup("model.embed_tokens.*", frozen=True),
        ParameterGroup("model.layers.[0-4].*", frozen=True),
        ParameterGroup("*.o_proj.weight", lr=0.5, weight_decay=0.0),
        ParameterGroup("*layernorm*", weight_decay=0.3),
    ),
    # Single weights of packed products, norms, all of a layer above trained ones.
    "between": (
        ParameterGroup("*.k_proj.weight", frozen=True),
        ParameterGroup("model.layers.[2-4].mlp.up_proj.weight", frozen=True),
        ParameterGroup("model.layers.[56].*", frozen=True),
        ParameterGroup("model.layers.*.input_layernorm.weight", frozen=True),
        ParameterGroup("model.layers.*", lr=2.0),
    ),
}
STAGES = [(0, "auto"), (1, "auto"), (2, "auto"), (3, "step"), (3, "use")]
LAYOUTS = [(2, 1, 1), (2, 1, 2), (2, 2, 2)]
BY_DEFAULT = [
    (0, "auto", (2, 1, 2), "1f1b", "below"),
    (1, "auto", (2, 1, 2), "zbv", "between"),
    (3, "use", (2, 1, 2), "zbv", "below"),
]


def cases() -> list[object]:
    everything = [
        (zero, residency, layout, schedule, groups)
        for (zero, residency), layout, schedule, groups in itertools.product(
            STAGES, LAYOUTS, ("1f1b", "interleaved", "zb-h1", "zbv"), GROUPS
        )
        if layout[2] > 1 or schedule == "1f1b"
    ]
    return [pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow) for case in everything]


def grouped(config: Config, groups: str) -> Config:
    config = replace(config, optim=replace(config.optim, groups=GROUPS[groups]))
    assert config.parallel.tp and config.parallel.pp and config.parallel.dp
    return validate(config, config.parallel.tp * config.parallel.pp * config.parallel.dp)


def torch_loop(config: Config) -> Outcome:
    """Train with autograd and AdamW written out; the trainer reads the batches."""
    trainer, optim = Trainer(config, open_corpus(config), CPU), config.optim
    model = Transformer(FastParts(config.model, Communicator(None), dtype=torch.float64))
    model.initialise(config.train.seed)
    frozen, updates = frozen_of(config), updates_of(config)
    trained = {name: parameter for name, parameter in model.held.items() if name not in frozen}
    for name in frozen:
        model.held[name].requires_grad_(False)
    moments = {name: (torch.zeros_like(of), torch.zeros_like(of)) for name, of in trained.items()}
    numbers = []
    for step in range(STEPS):
        batch, rate = trainer.step.reader.read(step).given, trainer.planned.rate(step)
        labels = batch.labels.flatten()
        logits = model(batch.tokens.flatten(), config.train.seq_len)[:, : config.model.vocab_size]
        loss = cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum()
        gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
        norm = sum(gradient.square().sum().item() for gradient in gradients.values()) ** 0.5
        for name, gradient in gradients.items():
            (m, v), (factor, decay), weight = moments[name], updates[name], trained[name].detach()
            gradient = gradient * min(1.0, optim.clip_norm / norm)
            m.mul_(optim.beta1).add_((1 - optim.beta1) * gradient)
            v.mul_(optim.beta2).add_((1 - optim.beta2) * gradient.square())
            root = (v / (1 - optim.beta2 ** (step + 1))).sqrt() + optim.eps
            weight -= rate * factor * (decay * weight + m / (1 - optim.beta1 ** (step + 1)) / root)
        numbers.append((loss.item(), norm))
    return numbers, {name: (model.pieces[name].block[0], of.detach()) for name, of in model.held.items()}


@pytest.fixture(scope="module")
def references(ranks: RankPool) -> dict[str, Outcome]:
    return {
        groups: ranks.run(torch_loop, 1, grouped(config_of(1, 1, 1, tied=True, kv_heads=1, num_layers=8), groups))[0]
        for groups in GROUPS
    }


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct memories of tensors."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def train_and_look(config: Config) -> Outcome:
    """Train; nothing is kept, reduced or computed of what is frozen."""
    trainer = Trainer(config, open_corpus(config), CPU)
    state, frozen = trainer.state, frozen_of(config)
    trained = {name for name, piece in state.model.pieces.items() if piece.spec.name not in frozen}
    assert {name for name in state.buckets.gradients} == trained
    assert set(state.optimizer.masters) <= trained and set(state.gradients.of) <= trained
    part, at = state.part, state.rank.mesh.at.pp
    without = {chunk for chunk in part.plan.chunks_of(at) if chunk < part.layout.first_trained}
    computed = {(action.kind, action.chunk) for action in part.plan.actions[at]}
    assert not any((kind, chunk) in computed for chunk in without for kind in (Kind.B, Kind.I, Kind.W, Kind.RECV_B))
    assert (Kind.SEND_B, part.layout.first_trained) not in computed
    outcome = outcome_of(trainer)
    assert all(parameter.grad is None for parameter in state.model.parameters())
    return outcome


@pytest.mark.parametrize(("zero", "residency", "layout", "schedule", "groups"), cases())
def test_parity_with_a_torch_loop(
    ranks: RankPool,
    references: dict[str, Outcome],
    zero: int,
    residency: str,
    layout: tuple[int, int, int],
    schedule: str,
    groups: str,
) -> None:
    dp, tp, pp = layout
    config = config_of(
        dp, tp, pp, tied=True, kv_heads=1, schedule=schedule, num_layers=8, zero=zero, residency=residency
    )
    compare(ranks.run(train_and_look, dp * tp * pp, grouped(config, groups)), references[groups])


def state_and_moved(config: Config) -> tuple[list[tuple[StateBytes, StateBytes]], str]:
    """Count what is held after a step; then move a frozen weight on every rank alike."""
    trainer = Trainer(config, open_corpus(config), CPU)
    trainer.step.run(0)
    state, at = trainer.state, trainer.state.rank.mesh.at
    check_replicas(state, 1)
    check_frozen(state, 1)
    states = [state.optimizer.state_of(name) for name in state.weights]
    found = StateBytes(
        storage_bytes([*state.model.held.values(), *state.held.values()]),
        storage_bytes([*state.buckets.flat.values(), *state.gradients.of.values()]),
        0,
        storage_bytes(tensor for of_weight in states for tensor in of_weight.values()),
        (expected := state_bytes(config, state.part.layout, at.pp, at.dp)).padding,
    )
    for weight in state.frozen.values():
        weight.detach().mul_(1.5)
    check_replicas(state, 1)
    try:
        check_frozen(state, 1)
    except RunError as error:
        return [(found, expected)], str(error)
    return [(found, expected)], ""


@pytest.mark.by_default("3-between")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("zero", range(4))
def test_a_rank_holds_the_formulas_bytes_and_a_frozen_weight_that_moves_is_noticed(
    ranks: RankPool, zero: int, groups: str
) -> None:
    config = grouped(config_of(2, 1, 1, tied=True, kv_heads=1, num_layers=8, zero=zero), groups)
    for counted, said in ranks.run(state_and_moved, 2, config):
        for found, expected in counted:
            assert found == expected
        assert "frozen weights must stay as they are: after step 1 model." in said
