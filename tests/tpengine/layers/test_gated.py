"""Rung: one process, host paths. A gated projection with its activation in the epilogue: where taken, what it gives.

The kernel itself is tests/kernels/ops/test_matmul.py's. Only a GPU has a file that says where it is the faster way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.ops.matmul.tuned import TunedGate

from tpengine.layers import FeedForward, column
from tpengine.layers.collectives import ShardCommunicator
from tpengine.layers.dropout import Dropout, Position
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves

D, F, T = 6, 10, 8
CONFIG = MatmulConfig(128, 128, 64, 4, 8, 3)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A file that says: in the epilogue. Returns what the epilogue's way is then asked for."""
    asked: list[Any] = []
    forward = column.matmul_gated_forward

    def noted(x: Tensor, weight: Tensor, kind: str, keeps_y: bool, *rest: Any) -> Any:
        asked.append((kind, keeps_y, *rest))
        return forward(x, weight, kind, keeps_y, *rest)

    monkeypatch.setattr(column, "matmul_gated_forward", noted)
    monkeypatch.setattr(column, "tuned_gate", tuned(1.0))
    return asked


def tuned(us: float) -> Any:
    return lambda x, n, kind: TunedGate(len(x), n, x.shape[1], "bfloat16", kind, CONFIG, us, 2.0)


def network(**options: Any) -> FeedForward:
    torch.manual_seed(0)
    made = FeedForward(D, F, options.pop("comm", Communicator(None)), dtype=torch.float64, **options)
    for weight in made.parameters():
        nn.init.normal_(weight)
    return made


def numbers(made: FeedForward) -> dict[str, Tensor]:
    x = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = made(x)
    y.square().sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {name: w.grad for name, w in made.named_parameters() if w.grad is not None}


@pytest.mark.parametrize(
    "options", [{}, {"activation": "gelu"}, {"activation": "gelu_tanh"}, {"frozen": True}], ids=str
)
def test_the_epilogues_way_computes_the_same(fused: list[Any], options: dict[str, Any], monkeypatch: Any) -> None:
    frozen = options.pop("frozen", False)

    def made() -> FeedForward:
        found = network(**options)
        found.gate_proj.weight.requires_grad_(not frozen)
        return found

    got = numbers(made())
    assert fused == [(options.get("activation", "silu"), True, False, CONFIG)]
    monkeypatch.setattr(column, "tuned_gate", lambda *_: None)
    want = numbers(made())
    assert len(fused) == 1 and got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)


def test_a_weight_half_may_run_later(fused: list[Any]) -> None:
    halves = WeightHalves()
    made = network(sink=DeferringSink(GradientSink(), halves))
    with halves.of((0, 0)):
        numbers(made)
    assert fused and made.gate_proj.weight.grad is None
    halves.run((0, 0))
    want = numbers(network())
    assert made.gate_proj.weight.grad is not None
    torch.testing.assert_close(made.gate_proj.weight.grad, want["gate_proj.weight"], rtol=1e-12, atol=1e-12)


def test_nothing_is_kept_where_no_gradient_can_be_asked_for(fused: list[Any]) -> None:
    with torch.no_grad():
        network()(torch.ones(T, D, dtype=torch.float64))
    assert [keeps for _, keeps, *_ in fused] == [False]


def test_dropout_lies_behind_it(fused: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = Dropout(0.5, 0, "layers.0.mlp", Position(training=True))
    got = numbers(network(dropout=dropout))
    monkeypatch.setattr(column, "tuned_gate", lambda *_: None)
    torch.testing.assert_close(got["dx"], numbers(network(dropout=dropout))["dx"], rtol=1e-12, atol=1e-12)
    assert len(fused) == 1


@pytest.mark.parametrize("why", ["slower", "not timed", "bias", "shard", "hooked", "not gated"])
def test_elsewhere_the_activation_is_a_kernel_of_its_own(
    why: str, fused: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard of exact mode among them: what is tuned depends on sizes."""
    options: dict[str, Any] = {"bias": why == "bias", "gated": why != "not gated"}
    if why == "shard":
        options["comm"] = ShardCommunicator(0, 1, Communicator(None))
    if why == "slower":
        monkeypatch.setattr(column, "tuned_gate", tuned(2.5))
    if why == "not timed":
        monkeypatch.setattr(column, "tuned_gate", lambda *_: None)
    made = network(**options)
    if why == "hooked":
        made.gate_proj.register_forward_hook(lambda *_: None)
    numbers(made)
    assert fused == []
