"""Rung: pure. Weights whose gradients are declared to lie behind each other get them from one product, others not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import SwiGLU, gradient_sink
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves, WeightTerm

ROWS = {"q": 4, "k": 2, "v": 2}
T, D = 5, 3


class Packed:
    """A sink with the gradients of q, k and v in one matrix, and what it multiplied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights = {name: Parameter(torch.zeros(rows, D, dtype=torch.float64)) for name, rows in ROWS.items()}
        self.matrix = torch.zeros(sum(ROWS.values()), D, dtype=torch.float64)
        self.sink, self.counted, self.products = GradientSink(), [], []
        rows = self.matrix.split(list(ROWS.values()))
        places = {weight: (row, 7) for weight, row in zip(self.weights.values(), rows, strict=True)}
        buckets = SimpleNamespace(contributed=self.counted.append)
        self.sink.attach(places, buckets, {tuple(self.weights.values()): self.matrix})
        add = gradient_sink.accumulate_wgrad

        def seen(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
            self.products.append(tuple(buffer.shape))
            add(buffer, dy, x)

        monkeypatch.setattr(gradient_sink, "accumulate_wgrad", seen)

    def terms(self, order: str, gap: int = 0) -> list[WeightTerm]:
        """Return the weights named, each's columns behind the last one's and a gap."""
        terms, first = [], 0
        for name in order:
            terms.append(WeightTerm(self.weights[name], first, None))
            first += ROWS[name] + gap
        return terms


def operands(columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(T, n, generator=generator, dtype=torch.float64) for n in (columns, D))
    return dy, x


@pytest.mark.parametrize("defers", [False, True])
def test_all_of_them_are_one_product(defers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, halves = Packed(monkeypatch), WeightHalves()
    dy, x = operands(8)
    sink = DeferringSink(packed.sink, halves)
    if defers:
        with halves.of((0, 0)):
            assert sink.weight_grads(packed.terms("qkv"), dy, x) == [None] * 3
        assert not packed.products
        halves.run((0, 0))
    else:
        assert sink.weight_grads(packed.terms("qkv"), dy, x) == [None] * 3
    assert packed.products == [(8, D)] and packed.counted == [7, 7, 7]
    torch.testing.assert_close(packed.matrix, dy.T @ x)


@pytest.mark.parametrize(
    ("order", "gap"),
    [("qk", 0), ("kv", 0), ("qvk", 0), ("qkv", 1), ("k", 0)],
    ids=["frozen", "first", "order", "gap", "one"],
)
def test_otherwise_each_is_a_product_of_its_own(order: str, gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Packed(monkeypatch)
    dy, x = operands(12)
    terms = packed.terms(order, gap)
    packed.sink.weight_grads(terms, dy, x)
    assert packed.products == [(ROWS[name], D) for name in order] and packed.counted == [7] * len(order)
    starts = {"q": 0, "k": 4, "v": 6}
    expected = torch.zeros_like(packed.matrix)
    for name, term in zip(order, terms, strict=True):
        expected[starts[name] :][: ROWS[name]] = dy[:, term.first : term.first + ROWS[name]].T @ x
    torch.testing.assert_close(packed.matrix, expected)


def test_a_layer_with_hooks_is_called_alone_and_its_gradient_still_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook on one of the layers that share a product: each is called by itself, and adds to its rows."""
    sink, found = GradientSink(), []
    mlp = SwiGLU(D, 4, Communicator(None), sink=sink, dtype=torch.float64)
    matrix, down = torch.zeros(8, D, dtype=torch.float64), torch.zeros(D, 4, dtype=torch.float64)
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    places = {gate: (matrix[:4], 0), up: (matrix[4:], 0), mlp.down_proj.weight: (down, 0)}
    sink.attach(places, SimpleNamespace(contributed=found.append), {(gate, up): matrix})
    x = operands(1)[1]
    mlp(x).sum().backward()
    together, products = matrix.clone(), len(found)
    matrix.zero_()
    mlp.up_proj.register_forward_hook(lambda *_: None)
    mlp(x).sum().backward()
    torch.testing.assert_close(matrix, together)
    assert products == 3 and len(found) == 6 and together.any()
