"""Feed-forward networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from tpkernels.work import activation_backward_work, activation_work

from tpengine.architectures.part import MASK, BackwardWalk, Kept, Kernel, Ledger, Operator, Part, Product, Shapes, Sizes
from tpengine.config import ModelConfig


@dataclass(frozen=True)
class FeedForward(Part):
    """A feed-forward network of width F.

    gated:  y = (act(x w_gate.T) * (x w_up.T)) w_down.T         otherwise:  y = act(x w_up.T + b_up) w_down.T + b_down
    """

    title: ClassVar[str] = "the feed-forward network"
    layer: ClassVar[str] = "tpengine.model.parts:feed_forward"

    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    bias: bool = False

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters by their names in the part."""
        d, f = model.hidden_size, model.ffn_size
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (f, d) for name in names}
        if self.bias:
            shapes |= {f"{name}.bias": (f,) for name in names}
        shapes["down_proj.weight"] = (d, f)
        if self.bias:
            shapes["down_proj.bias"] = (d,)
        return shapes

    def behind(self) -> Mapping[str, str]:
        """Gate and up are one matrix. Without a gate, too, up does not close a bucket: buckets stay what they were."""
        return {"up_proj.weight": "gate_proj.weight"}

    @property
    def num_gated(self) -> int:
        """Matrices of the first product: 2 with a gate, else 1."""
        return 1 + self.gated

    def products(self, s: Sizes) -> tuple[Product, ...]:
        """Return gate and up, side by side, and down."""
        return Product(self.num_gated * s.ffn, s.hidden, "columns"), Product(s.hidden, s.ffn, "inner")

    def forward(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the products with the activation between them."""
        gate_up, down = self.products(s)
        work = activation_work(s.tokens, s.ffn, s.item, gated=self.gated)
        return gate_up, Kernel("activation", work), down

    def backward_operators(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the activation's gradient."""
        work = activation_backward_work(s.tokens, s.ffn, s.item, gated=self.gated)
        return (Kernel("activation_backward", work),)

    def kept(self, s: Sizes) -> tuple[Kept, ...]:
        """Return gathered tokens, gate and up, their product, a mask of dropout (1 byte per element)."""
        num = self.num_gated + 1
        sizes = f"{num} T F e = {num} x {s.tokens} x {s.ffn} x {s.item}"
        mask = Kept(MASK, f"T F = {s.tokens} x {s.ffn}", self._mask(s))
        return s.gathered_input(), Kept("gate, up, product", sizes, num * s.middle * s.item), mask

    def forward_walk(self, s: Sizes, ledger: Ledger) -> None:
        """Make gate and up, then their product."""
        middle, num = s.middle * s.item, self.num_gated
        ledger.make(s.gathered, num * middle)
        ledger.briefly(middle, (num + 1) * s.widened(s.middle))
        ledger.make(middle, self._mask(s))

    def backward(self, walk: BackwardWalk) -> None:
        """Walk through the second product, the middle, and the first."""
        s, ledger, num = walk.s, walk.ledger, self.num_gated
        middle = s.middle * s.item
        ledger.make(middle)
        walk.weight_gradient(s.hidden * s.ffn, middle)
        walk.output_gradient_used()
        # With a gate: dy of both, and dh * up.
        ledger.briefly(max((2 * num - 1) * middle, 3 * num * s.widened(s.middle)))
        ledger.make(num * middle)
        ledger.free(middle, num * middle)
        ledger.make(s.x)
        walk.weight_gradient(s.hidden * s.ffn, s.gathered, num * middle)
        walk.norm()
        ledger.free(self._mask(s), s.residual_mask)

    def _mask(self, s: Sizes) -> int:
        return (s.model.mlp_dropout > 0) * s.middle
