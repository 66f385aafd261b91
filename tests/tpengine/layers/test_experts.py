"""Rung: gloo ranks. A mixture of experts against a loop over tokens, forward and every gradient, in float64.

Routing is skewed: the bias of one column sends most tokens to one expert, and one expert has none.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tpkernels.again import same_choices
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.experts.choose import ChoiceRule

from tpengine.layers import MixtureOfExperts
from tpengine.layers.collectives import WholeRows
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves
from tpengine.layers.placement import placements_of

T, D, FFN, E, SHARED = 12, 8, 12, 5, 24
RULES = {
    "qwen3": ChoiceRule(2, normalize=True),
    "one": ChoiceRule(1),
    "all": ChoiceRule(E, scale=0.5),
    "sigmoid": ChoiceRule(3, "sigmoid", normalize=True, scale=2.5),
}
SHAPES = {
    "gate.weight": (E, D),
    "experts.gate_proj.weight": (E, FFN, D),
    "experts.up_proj.weight": (E, FFN, D),
    "experts.down_proj.weight": (E, D, FFN),
    "shared_expert.gate_proj.weight": (SHARED, D),
    "shared_expert.up_proj.weight": (SHARED, D),
    "shared_expert.down_proj.weight": (D, SHARED),
    "shared_expert_gate.weight": (1, D),
}


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs() -> Tensor:
    """Tokens whose first element is large: a column of the router decides about most of them."""
    x = tensor(0, T, D)
    x[:, 0] = x[:, 0].abs() + 1
    return x


def whole_weights() -> dict[str, Tensor]:
    weights = {name: tensor(i + 1, *shape) * 0.5 for i, (name, shape) in enumerate(SHAPES.items())}
    weights["gate.weight"][:, 0] = torch.tensor([0.0, 1.0, 0.0, -40.0, 0.5])
    return weights


def layer_of(comm: Communicator, rule: ChoiceRule, **options: Any) -> MixtureOfExperts:
    """A layer with this rank's parts of the whole weights."""
    layer = MixtureOfExperts(
        D, FFN, E, rule, comm, shared_size=SHARED, shared_gated=True, dtype=torch.float64, **options
    )
    held = placements_of(layer)
    assert set(SHAPES) == {name for name, _ in layer.named_parameters()}
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(own(whole_weights()[name], held[weight].dim, comm))
    return layer


def own(value: Tensor, dim: int | None, comm: Communicator) -> Tensor:
    return value if dim is None else value.chunk(comm.size, dim)[comm.rank]


def by_loops(x: Tensor, w: dict[str, Tensor], rule: ChoiceRule) -> Tensor:
    """Token by token, expert by expert."""
    outputs = []
    for row in x:
        logits = w["gate.weight"] @ row
        scores = logits.softmax(0) if rule.scoring == "softmax" else logits.sigmoid()
        chosen = scores.sort(descending=True).indices[: rule.k]
        weights = scores[chosen] / (scores[chosen].sum() if rule.normalize else 1) * rule.scale
        y = torch.zeros(D, dtype=torch.float64)
        for weight, e in zip(weights, chosen, strict=True):
            gate, up, down = (w[f"experts.{name}_proj.weight"][e] for name in ("gate", "up", "down"))
            y = y + weight * (down @ (F.silu(gate @ row) * (up @ row)))
        gate, up, down = (w[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
        shared = down @ (F.silu(gate @ row) * (up @ row))
        outputs.append(y + (w["shared_expert_gate.weight"] @ row).sigmoid() * shared)
    return torch.stack(outputs)


def expected(rule: ChoiceRule) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x, weights = inputs().requires_grad_(), {name: w.requires_grad_() for name, w in whole_weights().items()}
    y = by_loops(x, weights, rule)
    y.backward(tensor(20, T, D))
    assert x.grad is not None
    return y.detach(), x.grad, {name: w.grad if w.grad is not None else torch.zeros_like(w) for name, w in weights.items()}


def rows(x: Tensor, comm: Communicator) -> Tensor:
    return x.chunk(comm.size)[comm.rank].contiguous()


def assert_same(name: str, got: Tensor | None, want: Tensor) -> None:
    assert got is not None and got.shape == want.shape, name
    error = (got - want).abs().max().item()
    assert error <= 1e-12 * max(want.abs().max().item(), 1.0), f"{name}: error {error}"


def assert_gradients(layer: MixtureOfExperts, want: dict[str, Tensor], comm: Communicator) -> None:
    held = placements_of(layer)
    for name, weight in layer.named_parameters():
        assert_same(name, weight.grad, own(want[name], held[weight].dim, comm))


def check_layer(name: str) -> None:
    comm, rule = Communicator(dist.group.WORLD), RULES[name]
    layer = layer_of(comm, rule)
    counts = layer.gate(inputs()).counts.tolist()
    assert sum(counts) == T * rule.k and (rule.k == E or counts[3] == 0) and max(counts) >= T / 2
    x = rows(inputs(), comm).requires_grad_()
    y = layer(x)
    y.backward(rows(tensor(20, T, D), comm))
    want, dx, gradients = expected(rule)
    assert_same("y", y.detach(), rows(want, comm))
    assert_same("dx", x.grad, rows(dx, comm))
    assert_gradients(layer, gradients, comm)
    # Where every rank has all rows, a number of them that no rank count divides.
    few = MixtureOfExperts(D, FFN, E, rule, WholeRows(comm), shared_size=SHARED, shared_gated=True, dtype=x.dtype)
    few.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert_same("few rows", few(inputs()[:3]), want[:3])


@pytest.mark.parametrize(("tp", "name"), [(1, "qwen3"), (2, "qwen3"), (2, "sigmoid"), (3, "one"), (4, "all")])
def test_it_is_a_loop_over_tokens_and_experts(ranks: RankPool, tp: int, name: str) -> None:
    ranks.run(check_layer, tp, name)
