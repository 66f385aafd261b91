"""Rung: one process. Logits and gradients are transformers', in float64, for drawn configurations.

By default three configurations of each architecture; `pytest -m slow` has twenty.
"""

from __future__ import annotations

import pytest
import torch
from support.architectures.drawn import CONFIGS, drawn_config
from support.architectures.transformers_models import Widened, built, config_json, ours, tensor_of

from tpengine.architectures.registry import check_architecture, model_of

SEQ, BATCH = 14, 2
BY_DEFAULT = 3


def cases() -> list[object]:
    return [
        pytest.param(name, seed, marks=() if seed < BY_DEFAULT else pytest.mark.slow)
        for name in CONFIGS
        for seed in range(20)
    ]


@pytest.mark.parametrize(("architecture", "seed"), cases())
def test_logits_and_gradients_are_those_of_transformers(architecture: str, seed: int) -> None:
    config = drawn_config(architecture, seed)
    theirs, model = built(config, seed), model_of(config_json(config))
    check_architecture(model)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.vocab_size, (BATCH, SEQ), generator=generator)
    weights = torch.randn(BATCH, SEQ, model.vocab_size, generator=generator, dtype=torch.float64)

    with Widened():
        want = theirs(tokens).logits
        (want * weights).sum().backward()
    net = ours(model, theirs.state_dict())
    got = net(tokens.flatten(), SEQ)[:, : model.vocab_size].view(want.shape)
    (got * weights).sum().backward()

    assert (got - want).abs().max() <= 1e-10 * want.abs().max()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, parameter in net.held.items():
        expected = tensor_of(model, net.pieces[name].spec, gradients)
        assert (parameter.grad - expected).abs().max() <= 1e-9 * max(1.0, expected.abs().max()), name
