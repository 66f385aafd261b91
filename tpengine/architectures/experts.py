"""Experts: feed-forward networks of which each token passes the few that a router chooses for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from tpkernels.work import Work, activation_backward_work, activation_work, matmul_work

from tpengine.architectures.part import BackwardWalk, Kept, Kernel, Ledger, Operator, Part, Product, Shapes, Sizes
from tpengine.config import ModelConfig

# Bytes of the number of an expert, or of a row.
_INDEX_BYTES = 4
# Of each expert: added to the scores by which is chosen.
ROUTER_BIAS = "gate.e_score_correction_bias"


@dataclass(frozen=True)
class Experts(Part):
    """E experts of width F, of which each token chooses k; every token passes shared ones, if there are any.

        scores[T, E] = softmax(x w_gate.T), or sigmoid;    weights[T, k] of the k best, / their sum if `normalize`
        y[t] = sum over j of weights[t, j] down_e(silu(gate_e x[t]) * up_e x[t]),  e = experts[t, j], in falling order
               + shared(x[t]), times sigmoid(x[t] w_shared.T) if `shared_gated`

    Each expert's F is cut over tp. The router is whole on every rank: all choose alike, and each has the part of the
    router's gradient that its columns of F make.

    Attributes:
        num_experts: E.
        top_k: k.
        ffn_size: F of one expert, global.
        scoring: of the router's logits; softmax is over all E.
        normalize: whether a token's weights are divided by their sum.
        scale: multiplies the weights.
        num_groups, top_groups: a token chooses within the `top_groups` best groups of E / num_groups experts each.
        shared_size: width of the shared experts, a feed-forward network; 0 for none.
        shared_gated: whether their output is gated.
        has_bias: whether a bias of each expert is added to the scores by which is chosen; it has no gradient.
    """

    title: ClassVar[str] = "the experts"
    layer: ClassVar[str] = "tpengine.model.parts:experts"

    num_experts: int
    top_k: int
    ffn_size: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    shared_size: int = 0
    shared_gated: bool = False
    has_bias: bool = False

    @classmethod
    def of(cls, model: ModelConfig) -> Experts:
        """Return the experts of a model's details."""
        numbers = model.details
        return cls(
            num_experts=numbers.num_experts,
            top_k=numbers.experts_per_token,
            ffn_size=numbers.expert_ffn_size,
            scoring=numbers.router_scores,
            normalize=numbers.normalizes_scores,
            scale=numbers.router_scale,
            num_groups=numbers.expert_groups,
            top_groups=numbers.groups_per_token,
            shared_size=numbers.shared_expert_size,
            shared_gated=numbers.gates_shared_expert,
            has_bias=numbers.router_bias,
        )

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters by their names in the part: one tensor of all experts for each of their matrices."""
        d, e, f, s = model.hidden_size, self.num_experts, self.ffn_size, self.shared_size
        shapes: dict[str, tuple[int, ...]] = {"gate.weight": (e, d)}
        if self.has_bias:
            shapes[ROUTER_BIAS] = (e,)
        shapes |= {f"experts.{name}_proj.weight": (e, f, d) for name in ("gate", "up")}
        shapes["experts.down_proj.weight"] = (e, d, f)
        if s:
            shapes |= {f"shared_expert.{name}_proj.weight": (s, d) for name in ("gate", "up")}
            shapes["shared_expert.down_proj.weight"] = (d, s)
        if s and self.shared_gated:
            shapes["shared_expert_gate.weight"] = (1, d)
        return shapes

    def has_gradient(self, name: str) -> bool:
        """Choices have none, and so neither has the bias that they follow."""
        return name != ROUTER_BIAS

    def behind(self) -> Mapping[str, str]:
        """Gate and up of the shared experts are one matrix."""
        name = "shared_expert.{}_proj.weight"
        return {name.format("up"): name.format("gate")} if self.shared_size else {}

    def elements_per_token(self, model: ModelConfig) -> Mapping[str, int]:
        """Return by matrix how many of its elements a token is multiplied with: k of E experts."""
        share = {name: self.top_k if len(shape) > 2 else shape[0] for name, shape in self.shapes(model).items()}
        shapes = {name: shape for name, shape in self.shapes(model).items() if len(shape) > 1}
        return {name: share[name] * math.prod(shape[1:]) for name, shape in shapes.items()}

    def rows(self, s: Sizes) -> int:
        """Return R, the rows of a rank's experts: k for each token, times the rank's load."""
        return s.loaded(s.tokens * self.top_k)

    def width(self, s: Sizes) -> int:
        """Return F of this rank."""
        return self.ffn_size // s.tp

    def products(self, s: Sizes) -> tuple[Product, ...]:
        """Return gate and up of the chosen experts, side by side, and down; then those of the shared ones."""
        rows, num, width, shared = self.rows(s), self.num_experts, self.width(s), self.shared_size // s.tp
        chosen = Product(2 * width, s.hidden, "columns", rows, num), Product(s.hidden, width, "inner", rows, num)
        if not shared:
            return chosen
        return *chosen, Product(2 * shared, s.hidden, "columns"), Product(s.hidden, shared, "inner")

    def forward(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the router, the rows of each expert, the products with the activation between them, their sums."""
        gate_up, down, *shared = self.products(s)
        middle = Kernel("activation", activation_work(self.rows(s), self.width(s), s.item, gated=True))
        operators: list[Operator] = [*self._routed(s), gate_up, middle, down, self._moved(s)]
        if shared:
            work = activation_work(s.tokens, self.shared_size // s.tp, s.item, gated=True)
            operators += [shared[0], Kernel("activation", work), shared[1]]
        return tuple(operators)

    def backward_operators(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the gradients of the sums, of the activation, of the rows, and of the router's product: two."""
        middle = activation_backward_work(self.rows(s), self.width(s), s.item, gated=True)
        operators = [self._moved(s), Kernel("activation_backward", middle), *self._routed(s), self._router(s)]
        if self.shared_size:
            work = activation_backward_work(s.tokens, self.shared_size // s.tp, s.item, gated=True)
            operators.append(Kernel("activation_backward", work))
        return tuple(operators)

    def _router(self, s: Sizes) -> Kernel:
        """Return the product x[T, D] w[E, D].T, or one of its gradients, in the wider dtype."""
        return Kernel("", matmul_work(s.tokens, self.num_experts, s.hidden, s.wide))

    def _routed(self, s: Sizes) -> tuple[Kernel, ...]:
        """Return the router's product, its scores and choice, and the copy of the rows in the order of experts."""
        scores = s.tokens * self.num_experts
        chosen = s.tokens * self.top_k * (s.wide + _INDEX_BYTES)
        copied = 2 * self.rows(s) * s.hidden * s.item
        return (
            self._router(s),
            Kernel("", Work((3 + self.top_k) * scores, 2 * scores * s.wide + chosen)),
            Kernel("", Work(memory_bytes=copied)),
        )

    def _moved(self, s: Sizes) -> Kernel:
        """Return the sum of a token's k rows, or its gradient."""
        elements = self.rows(s) * s.hidden
        return Kernel("", Work(2 * elements, (elements + s.tokens * s.hidden) * s.item))

    def kept(self, s: Sizes) -> tuple[Kept, ...]:
        """Return gathered tokens, choices, the experts' rows, gate, up and product, and outputs, by sorted row."""
        rows, width = self.rows(s), self.width(s)
        routed = s.tokens * (self.num_experts * s.wide + self.top_k * (s.wide + 2 * _INDEX_BYTES))
        routing = f"T (E a + k (a + 8)) = {s.tokens} x ({self.num_experts} x {s.wide} + {self.top_k} x {s.wide + 8})"
        around = f"2 T k D e = 2 x {rows} x {s.hidden} x {s.item}"
        inside = f"3 T k F e = 3 x {rows} x {width} x {s.item}"
        kept = (
            s.gathered_input(),
            Kept("choices", routing, routed),
            Kept("experts' rows and outputs", around, 2 * rows * s.hidden * s.item),
            Kept("experts' gate, up, product", inside, 3 * rows * width * s.item),
        )
        if not self.shared_size:
            return kept
        shared = self.shared_size // s.tp
        sizes = f"3 T F e = 3 x {s.tokens} x {shared} x {s.item}"
        return *kept, Kept("shared experts' gate, up, product", sizes, 3 * s.tokens * shared * s.item)

    def forward_walk(self, s: Sizes, ledger: Ledger) -> None:
        """Make what is kept, and the sum of a token's rows in the wider dtype."""
        ledger.make(*(of.num_bytes for of in self.kept(s)))
        ledger.briefly(s.tokens * s.hidden * (s.item + s.wide * s.is_narrow))

    def backward(self, walk: BackwardWalk) -> None:
        """Walk through the sum of rows, the second product, the middle, the first, and the router."""
        s, ledger = walk.s, walk.ledger
        gathered, routed, around, inside, *shared = (of.num_bytes for of in self.kept(s))
        outputs, middle = around // 2, inside // 3
        numel = self.num_experts * self.width(s) * s.hidden
        # The gradient of the outputs, then of the product of gate and up.
        ledger.make(outputs, middle)
        walk.weight_gradient(numel, middle)
        walk.output_gradient_used()
        ledger.free(outputs)
        ledger.make(2 * middle)
        ledger.free(outputs, middle, 2 * middle)
        # The gradient of the rows, and of the tokens.
        ledger.make(outputs)
        walk.weight_gradient(numel, outputs, 2 * middle)
        ledger.free(outputs)
        ledger.make(s.x)
        walk.weight_gradient(self.num_experts * s.hidden, gathered)
        ledger.free(routed, *shared)
        walk.norm()
        ledger.free(s.residual_mask)
