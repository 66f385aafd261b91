"""Experts: feed-forward networks of which each token passes the few that a router chooses for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from tpkernels.work import Work, activation_backward_work, activation_work, matmul_work

from tpengine.architectures.part import (
    BackwardWalk,
    Exchange,
    Kept,
    Kernel,
    Ledger,
    Operator,
    Part,
    Product,
    Shapes,
    Sizes,
)
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

    Each expert's F is cut over tp, or ranks share out whole experts (parallel.ep). The router is whole on every rank.
    Over tp all choose alike, and each has the part of the router's gradient that its columns of F make; where whole
    experts lie apart, each rank routes its own tokens. In exact mode all tp ranks route all tokens there too, and of
    each row that travels the parts of all shards come back.

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
    exact_layer: ClassVar[str] = "tpengine.model.parts:exact_experts"

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

    def counts_experts(self, name: str) -> bool:
        """Whole experts lie on ranks that share them."""
        return name.startswith("experts.")

    def behind(self) -> Mapping[str, str]:
        """Gate and up of the shared experts are one matrix."""
        name = "shared_expert.{}_proj.weight"
        return {name.format("up"): name.format("gate")} if self.shared_size else {}

    def elements_per_token(self, model: ModelConfig) -> Mapping[str, int]:
        """Return by matrix how many of its elements a token is multiplied with: k of E experts."""
        share = {name: self.top_k if len(shape) > 2 else shape[0] for name, shape in self.shapes(model).items()}
        shapes = {name: shape for name, shape in self.shapes(model).items() if len(shape) > 1}
        return {name: share[name] * math.prod(shape[1:]) for name, shape in shapes.items()}

    def tokens(self, s: Sizes) -> int:
        """Return n, the tokens that a rank routes: T, or in fast mode its own t where ranks share out whole experts."""
        return s.own_tokens if s.ep > 1 and not s.partials else s.tokens

    def chosen(self, s: Sizes) -> int:
        """Return n k, the rows that these tokens are in."""
        return self.tokens(s) * self.top_k

    def sent(self, s: Sizes) -> int:
        """Return the rows that a rank sends, t k, where ranks share out whole experts; else all of them."""
        return (s.own_tokens if s.ep > 1 else s.tokens) * self.top_k

    def returned(self, s: Sizes) -> int:
        """Return the rows that come back for them: in exact mode one for each shard."""
        return self.sent(s) * max(1, s.partials)

    def rows(self, s: Sizes) -> int:
        """Return R, the rows of a rank's experts: t k times the rank's load where ranks share out whole experts.

        No rank gets more than all rows. Where each expert is cut over tp, all ranks multiply the same rows.
        """
        return math.ceil(self.sent(s) * min(s.load, s.ep)) if s.ep > 1 else self.sent(s)

    def width(self, s: Sizes) -> int:
        """Return F of this rank."""
        return self.ffn_size if s.ep > 1 else self.ffn_size // s.tp

    def products(self, s: Sizes) -> tuple[Product, ...]:
        """Return gate and up of the chosen experts, side by side, and down; then those of the shared ones."""
        rows, num, width, shared = self.rows(s), self.num_experts // s.ep, self.width(s), self.shared_size // s.tp
        chosen = (
            Product(2 * width, s.hidden, "columns", rows, num, exchanged=False),
            Product(s.hidden, width, "inner", rows, num, exchanged=False),
        )
        if not shared:
            return chosen
        return (
            *chosen,
            Product(2 * shared, s.hidden, "columns", exchanged=False),
            Product(s.hidden, shared, "inner", exchanged=False),
        )

    def exchanges(self, s: Sizes) -> tuple[Exchange, ...]:
        """Return what ranks exchange, forward and again backward: all tokens and their sums, or rows, there and back.

        Nothing hides them. Where whole experts are shared out, the rank that gets most rows takes longest.
        """
        found: list[Exchange] = []
        if s.ep > 1:
            found += [Exchange(self.rows(s) * of * s.hidden * s.item, ("ep",)) for of in (1, max(1, s.partials))]
        if s.tp > 1 and (s.ep == 1 or s.partials or self.shared_size):
            found += 2 * [Exchange(s.tokens * s.hidden * s.item)]
        return tuple(found)

    def forward(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the router, the rows of each expert, the products with the activation between them, their sums."""
        gate_up, down, *shared = self.products(s)
        middle = Kernel("activation", activation_work(self.rows(s), self.width(s), s.item, gated=True))
        operators: list[Operator] = [*self._routed(s), *self.exchanges(s), gate_up, middle, down, self._moved(s)]
        if shared:
            work = activation_work(s.tokens, self.shared_size // s.tp, s.item, gated=True)
            operators += [shared[0], Kernel("activation", work), shared[1]]
        return tuple(operators)

    def backward_operators(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the gradients of the sums, of the activation, of the rows, and of the router's product: two."""
        middle = activation_backward_work(self.rows(s), self.width(s), s.item, gated=True)
        activation = Kernel("activation_backward", middle)
        operators: list[Operator] = [self._moved(s), activation, *self._routed(s), self._router(s), *self.exchanges(s)]
        if self.shared_size:
            work = activation_backward_work(s.tokens, self.shared_size // s.tp, s.item, gated=True)
            operators.append(Kernel("activation_backward", work))
        return tuple(operators)

    def _router(self, s: Sizes) -> Kernel:
        """Return the product x[n, D] w[E, D].T, or one of its gradients, in the wider dtype."""
        return Kernel("", matmul_work(self.tokens(s), self.num_experts, s.hidden, s.wide))

    def _routed(self, s: Sizes) -> tuple[Kernel, ...]:
        """Return the router's product, its scores and choice, and the copy of the rows in the order of experts."""
        scores = self.tokens(s) * self.num_experts
        chosen = self.chosen(s) * (s.wide + _INDEX_BYTES)
        copied = 2 * self.sent(s) * s.hidden * s.item
        return (
            self._router(s),
            Kernel("", Work((3 + self.top_k) * scores, 2 * scores * s.wide + chosen)),
            Kernel("", Work(memory_bytes=copied)),
        )

    def _moved(self, s: Sizes) -> Kernel:
        """Return the sum of a token's k rows, or its gradient."""
        elements = self.returned(s) * s.hidden
        return Kernel("", Work(2 * elements, (elements + self.tokens(s) * s.hidden) * s.item))

    def reads_output_gradient(self) -> bool:
        """Of shared experts without a gate; the chosen ones' outputs have gradients of their own, in sorted rows."""
        return self.shared_size > 0 and not self.shared_gated

    def deferred(self, s: Sizes) -> int:
        """Return the gradients of router and gate, which need no second half, and where each expert's rows begin."""
        gated = self.shared_size > 0 and self.shared_gated
        return (self.num_experts + gated) * s.hidden * s.wide + self._offsets(s)

    def decided(self, s: Sizes) -> int:
        """Return experts and weights of each token, the order of the rows and its inverse, counts and offsets."""
        chosen = self.chosen(s) * (s.wide + _INDEX_BYTES)
        return chosen + 2 * self.chosen(s) * _INDEX_BYTES + self.num_experts * _INDEX_BYTES + self._offsets(s)

    def _offsets(self, s: Sizes) -> int:
        return (self.num_experts // s.ep + 1) * _INDEX_BYTES

    def kept(self, s: Sizes) -> tuple[Kept, ...]:
        """Return all tokens, logits and choices, the experts' rows and outputs, their gate, up and product.

        Tokens are gathered once, for router and experts, and stay with `gathered again` too. Rows are sorted by expert.
        Where ranks share out whole experts, a rank keeps its own tokens, the rows that its experts got, and what came
        back for its own.
        """
        tokens, rows, back, width, num = self.tokens(s), self.rows(s), self.returned(s), self.width(s), self.num_experts
        routed = tokens * num * s.wide + self.decided(s) - num * _INDEX_BYTES
        word = "t" if tokens < s.tokens else "T"
        many, owned = ("R", "E/N") if s.ep > 1 else ("T k", "E")
        kept: tuple[Kept, ...] = (
            Kept("its gathered rows", f"{word} D e = {tokens} x {s.hidden} x {s.item}", tokens * s.hidden * s.item),
            Kept(
                "logits and choices",
                f"{word} (E a + k (a + 12)) + 4 ({owned} + 1) = {tokens} x ({num} x {s.wide} + {self.top_k} x "
                f"{s.wide + 12}) + {self._offsets(s)}",
                routed,
            ),
            Kept(
                "experts' rows and outputs",
                f"(R + {'V ' * bool(s.partials)}t k) D e = ({rows} + {back}) x {s.hidden} x {s.item}"
                if s.ep > 1
                else f"2 T k D e = 2 x {rows} x {s.hidden} x {s.item}",
                (rows + back) * s.hidden * s.item,
            ),
            Kept(
                "experts' gate, up, product",
                f"3 {many} F e = 3 x {rows} x {width} x {s.item}",
                3 * rows * width * s.item,
            ),
        )
        shared = self.shared_size // s.tp
        if not shared:
            return kept
        sizes = f"3 T F e = 3 x {s.tokens} x {shared} x {s.item}"
        kept = *kept, Kept("shared experts' gate, up, product", sizes, 3 * s.tokens * shared * s.item)
        if not self.shared_gated:
            return kept
        gated = s.tokens * (s.hidden * s.item + s.wide)
        return *kept, Kept(
            "their output and its gate", f"T (D e + a) = {s.tokens} x ({s.hidden} x {s.item} + {s.wide})", gated
        )

    def forward_walk(self, s: Sizes, ledger: Ledger) -> None:
        """Route, take rows, multiply, add each token's; then the shared experts."""
        gathered, routed, around, inside, *shared = (of.num_bytes for of in self.kept(s))
        tokens = self.tokens(s) * s.hidden
        ledger.make(gathered, routed)
        ledger.briefly(s.widened(tokens + self.num_experts * s.hidden), 2 * self.tokens(s) * self.num_experts * s.wide)
        ledger.make(around, inside)
        # The outputs where they were made, until they are at their tokens' owners.
        ledger.briefly((s.ep > 1) * max(1, s.partials) * self.rows(s) * s.hidden * s.item)
        # The sum of each token's rows; on a CPU of rows in the wider dtype.
        ledger.briefly(s.widened(self.chosen(s) * s.hidden + tokens), tokens * s.item)
        ledger.make(tokens * s.item, *shared)
        ledger.briefly(tokens * s.item)
        ledger.free(tokens * s.item)

    def backward(self, walk: BackwardWalk) -> None:
        """Walk through the shared experts, the sum of rows, the second product, the middle, the first, the router."""
        s, ledger = walk.s, walk.ledger
        gathered, routed, _, inside, *shared = (of.num_bytes for of in self.kept(s))
        row = s.hidden * s.item
        tokens, sent, rows, middle = self.tokens(s) * row, self.returned(s) * row, self.rows(s) * row, inside // 3
        parts = max(1, s.partials) * rows
        of_expert = self.width(s) * s.hidden
        # The gradient of all tokens' outputs, where it is gathered.
        dy = (s.own_tokens < s.tokens and (s.ep == 1 or s.partials > 0)) * tokens
        ledger.make(dy)
        if shared:
            self._backward_shared(walk)
        # Of the rows' outputs, at their experts; of the product of gate and up, and of both.
        ledger.make(sent)
        walk.output_gradient_used()
        ledger.free(sent, dy)
        if s.ep > 1:
            ledger.make(rows)
            ledger.free(sent)
        ledger.make(middle)
        ledger.briefly(max(3 * middle, 6 * s.widened(self.rows(s) * self.width(s))))
        # Of gate and up, and of the rows, while all operands are there.
        ledger.make(2 * middle, parts)
        walk.weight_gradient(of_expert, 3 * middle, 2 * rows)
        ledger.free(middle, 2 * middle)
        # Of the tokens, whose rows come back.
        if s.ep > 1:
            ledger.make(sent)
            ledger.free(parts)
        ledger.briefly(s.widened(self.chosen(s) * s.hidden))
        ledger.make(tokens)
        ledger.free(sent)
        # Of the router, and what it adds to theirs.
        ledger.briefly(
            2 * self.tokens(s) * self.num_experts * s.wide,
            tokens,
            s.widened(self.tokens(s) * s.hidden + self.num_experts * s.hidden),
        )
        if walk.defers:
            ledger.make(self.num_experts * s.hidden * s.wide, self._offsets(s))
        ledger.free(routed)
        if not (walk.defers and shared):
            ledger.free(gathered)
        ledger.make(s.x)
        ledger.free(tokens, s.tokens * row * bool(shared))
        walk.norm()
        ledger.free(s.residual_mask)

    def _backward_shared(self, walk: BackwardWalk) -> None:
        """Walk through the shared experts, to the gradient of their input."""
        s, ledger = walk.s, walk.ledger
        tokens, middle = s.tokens * s.hidden * s.item, s.tokens * self.shared_size // s.tp * s.item
        numel = s.hidden * self.shared_size // s.tp
        ledger.make(self.shared_gated * tokens, middle)
        walk.weight_gradient(numel, middle, self.shared_gated * tokens)
        ledger.make(2 * middle)
        ledger.free(middle, 2 * middle)
        ledger.make(tokens)
        walk.weight_gradient(numel, 2 * middle)
        ledger.free(self.shared_gated * (tokens + s.tokens * s.wide))
        ledger.make(walk.defers * self.shared_gated * s.hidden * s.wide)
