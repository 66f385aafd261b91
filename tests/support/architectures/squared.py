"""A kind of part of a test's own, described: squared ReLU between two products. squared_layer.py computes it.

It has what other kinds have not: more work and bytes the more its rank gets (Sizes.load), and bytes on links inside
forward and backward that no operator hides. It may not be cut over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tpkernels.work import Work

from tpengine.architectures.part import (
    Axis,
    BackwardWalk,
    Exchange,
    Kept,
    Kernel,
    Operator,
    Part,
    Product,
    Shapes,
    Sizes,
)
from tpengine.config import ModelConfig


@dataclass(frozen=True)
class Squared(Part):
    """y = relu(x w_up.T)^2 w_down.T + b, with a bias that each rank adds to its own tokens."""

    title: ClassVar[str] = "the squared network"
    may_cut_tokens: ClassVar[bool] = False
    layer: ClassVar[str] = "support.architectures.squared_layer:squared"
    exact_layer: ClassVar[str] = "support.architectures.squared_exact:exact_squared"

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters."""
        d, f = model.hidden_size, model.ffn_size
        return {"up.weight": (f, d), "down.weight": (d, f), "down.bias": (d,)}

    def reduce_over(self, name: str) -> tuple[Axis, ...] | None:
        """The bias is of each rank's tokens."""
        return ("dp", "tp") if name == "down.bias" else None

    def products(self, s: Sizes) -> tuple[Product, ...]:
        """Return up and down, of as many tokens as the rank has got."""
        rows = s.loaded(s.tokens)
        return Product(s.ffn, s.hidden, "columns", rows), Product(s.hidden, s.ffn, "inner", rows)

    def forward(self, s: Sizes) -> tuple[Operator, ...]:
        """Return an exchange, and the products with their square between them."""
        up, down = self.products(s)
        elements = s.loaded(s.middle)
        return Exchange(s.loaded(s.x * s.tp)), up, Kernel("", Work(2 * elements, 2 * elements * s.item)), down

    def backward_operators(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the square's gradient, and the exchange back."""
        elements = s.loaded(s.middle)
        return Kernel("", Work(3 * elements, 3 * elements * s.item)), Exchange(s.loaded(s.x * s.tp))

    def kept(self, s: Sizes) -> tuple[Kept, ...]:
        """Return gathered tokens, and the middle before it is squared and behind."""
        middle = s.loaded(2 * s.middle * s.item)
        return s.gathered_input(), Kept("middle and square", f"2 T F e, times {s.load:g}", middle)

    def backward(self, walk: BackwardWalk) -> None:
        """Walk through the second product, the square, and the first."""
        s, ledger = walk.s, walk.ledger
        middle = s.loaded(2 * s.middle * s.item)
        ledger.make(middle)
        walk.weight_gradient(s.hidden * s.ffn)
        walk.output_gradient_used()
        ledger.make(s.x)
        ledger.free(middle, middle)
        walk.weight_gradient(s.hidden * s.ffn, s.gathered)
        walk.norm()
        ledger.free(s.residual_mask)
