"""Causal self-attention over groups of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from tpkernels.work import Work, attention_backward_work, attention_work, rope_work, visible_pairs

from tpengine.architectures.norm import Norm
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

# Its backward takes blocks of so many keys (tpkernels/ops/attention/host.py).
_KEYS_PER_BLOCK = 32
# With a window, or of packed documents, it takes so many queries (tpkernels/ops/attention/reference.py).
_QUERIES_PER_PIECE = 128


@dataclass(frozen=True)
class Attention(Part):
    """Causal self-attention over H query and G key and value heads of size E.

    Attributes:
        qkv_bias, output_bias: whether the projections have biases.
        head_norm: a norm of each head's queries and keys, before they are rotated.
        norms_width: whether there is an RMS norm of the queries of all heads together, and one of the keys, before they
            are rotated: over the ranks that have them, which exchange two numbers per token.
        rotates: whether queries and keys are rotated by their positions.
        window: how many tokens back a query sees, its own included; 0 for all.
        rope_theta: base of the rotary frequencies; 0 for the model's, with the model's scaling.
        scale: of the scores; 0 for E^(-1/2).
        query_beta, query_length: queries are multiplied by 1 + beta ln(1 + floor(position / length)); 0 for none.
    """

    role: ClassVar[Literal["norm", "attend", "feed"]] = "attend"
    title: ClassVar[str] = "attention"
    is_computed_again: ClassVar[bool] = True
    chooses_attention: ClassVar[bool] = True
    layer: ClassVar[str] = "tpengine.model.parts:attention"
    exact_layer: ClassVar[str] = "tpengine.model.parts:exact_attention"

    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: Norm | None = None
    norms_width: bool = False
    rotates: bool = True
    window: int = 0
    rope_theta: float = 0.0
    scale: float = 0.0
    query_beta: float = 0.0
    query_length: int = 0

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters by their names in the part."""
        d, size = model.hidden_size, model.head_size
        rows = {"q": model.num_heads * size, "k": model.num_kv_heads * size, "v": model.num_kv_heads * size}
        shapes: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": (n, d) for name, n in rows.items()}
        if self.qkv_bias:
            shapes |= {f"{name}_proj.bias": (n,) for name, n in rows.items()}
        if self.head_norm:
            shapes |= {f"{of}_norm.{name}": s for of in "qk" for name, s in self.head_norm.over(size).items()}
        if self.norms_width:
            shapes |= {f"{of}_norm.weight": (rows[of],) for of in "qk"}
        shapes["o_proj.weight"] = (d, rows["q"])
        if self.output_bias:
            shapes["o_proj.bias"] = (d,)
        return shapes

    def first_value(self, name: str) -> float:
        """Return what a norm of heads begins with; biases begin as zeros."""
        norm = Norm() if self.norms_width else self.head_norm
        return norm.first_value(name) if norm and name.endswith(".weight") else 0.0

    def behind(self) -> Mapping[str, str]:
        """Queries, keys and values are one matrix."""
        return {"k_proj.weight": "q_proj.weight", "v_proj.weight": "k_proj.weight"}

    def least(self) -> Part:
        """Return the attention of which a query sees itself alone."""
        return replace(self, window=1)

    def narrow_window(self, seq: int) -> int | None:
        """Return how many tokens back a query sees; None for all: a window that no sequence exceeds is none."""
        return self.window if 0 < self.window < seq else None

    def is_rotary(self) -> bool:
        """Return whether queries and keys are rotated."""
        return self.rotates

    def flops(self, model: ModelConfig, sequences: int, seq: int, *, causal_half: bool, windowed: bool = True) -> int:
        """Return the flops of its products and its scores."""
        window = self.narrow_window(seq) if causal_half and windowed else None
        pairs = None if window is None else sequences * visible_pairs([seq], window)
        heads = model.num_heads, model.num_kv_heads, model.head_size
        scores = attention_work(sequences, seq, *heads, 1, causal_half=causal_half, pairs=pairs)
        return scores.flops + super().flops(model, sequences, seq, causal_half=causal_half)

    def products(self, s: Sizes) -> tuple[Product, ...]:
        """Return queries, keys and values, side by side, and the output."""
        mixed, keys = s.heads * s.head_size, s.kv_heads * s.head_size
        return Product(mixed + 2 * keys, s.hidden, "columns"), Product(s.hidden, mixed, "inner")

    def forward(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the products with rotation and attention between them; norms of heads take no time.

        A norm of all heads does: ranks wait for each other's sums.
        """
        qkv, output = self.products(s)
        return qkv, *self._width_norm(s), *self._between(s), output

    def backward_operators(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the gradients of rotation and attention, and of a norm of all heads."""
        return *self._between(s, backward=True), *self._width_norm(s)

    def _width_norm(self, s: Sizes) -> tuple[Operator, ...]:
        if not self.norms_width:
            return ()
        elements = s.queries + s.keys
        return Kernel("", Work(6 * elements, 4 * elements * s.item)), Exchange(2 * s.tokens * s.wide * s.tp)

    def _between(self, s: Sizes, *, backward: bool = False) -> tuple[Kernel, ...]:
        suffix, window, pairs, seq = "_backward" * backward, self.narrow_window(s.seq), None, s.seq
        if window is not None:
            pairs = s.batch * visible_pairs([s.seq], window)
        if s.packed is not None:
            pairs = s.packed.pairs(window)
            # Kernels attain what they attain at the length that has as many pairs per token.
            seq = max(1, min(s.seq, 2 * s.packed.pairs() // s.packed.num_tokens))
        work = (attention_backward_work if backward else attention_work)(
            s.batch, s.seq, s.heads, s.kv_heads, s.head_size, s.item, causal_half=True, pairs=pairs
        )
        attended = Kernel(f"attention{suffix}", work, seq)
        if not self.rotates:
            return (attended,)
        grown = (Kernel("", Work(s.queries, 2 * (s.queries + 2 * s.keys) * s.item)),) if self._grows(s) else ()
        rotated = rope_work(s.tokens, s.heads + s.kv_heads, s.head_size, s.item)
        return *grown, Kernel(f"rope{suffix}", rotated), attended

    def _grows(self, s: Sizes) -> bool:
        """Return whether some queries of a sequence are multiplied by their position's factor."""
        return self.query_beta > 0 and s.seq > self.query_length

    def kept(self, s: Sizes) -> tuple[Kept, ...]:
        """Return gathered tokens, what is kept between the two products, and what norms of heads keep.

        Between the products: q and k rotated, and v, each in a tensor of its own; the output; the log-sum-exp. Where
        torch computes attention (below float32, and with fewer KV heads) it keeps an output in its own layout, unless
        there is one head, and the product keeps a copy with heads side by side. With dropout all of it is widened, and
        k and v repeated to H heads. With a window, or packed documents, attention is ours in every dtype, with dropout
        too.
        """
        normed = Kept("norms of heads", "their inputs and statistics", self._normed_heads(s))
        statistics = s.tokens * s.heads * s.wide
        if s.model.attention_dropout > 0 and not self._is_ours(s):
            narrow_output = 0 if s.item == s.wide else s.queries * s.item
            num_bytes = 4 * s.queries * s.wide + narrow_output + statistics
            return s.gathered_input(), Kept("attention", "with dropout, in float32", num_bytes), normed
        is_wide = s.item == s.wide and s.heads == s.kv_heads
        copies = 2 if self._is_ours(s) or is_wide or s.heads == 1 or s.seq == 1 else 3
        heads = copies * s.heads + 2 * s.kv_heads
        sizes = f"T ({copies} H + 2 G) E e = {s.tokens} x {heads} x {s.head_size} x {s.item}"
        log_sum_exp = f"T H a = {s.tokens} x {s.heads} x {s.wide}"
        return (
            s.gathered_input(),
            Kept("attention", sizes, s.tokens * heads * s.head_size * s.item),
            Kept("its log-sum-exp", log_sum_exp, statistics),
            normed,
        )

    def _is_ours(self, s: Sizes) -> bool:
        """Return whether a query does not see all earlier tokens: then our attention computes it in every dtype."""
        return self.narrow_window(s.seq) is not None or s.has_documents

    def _normed_heads(self, s: Sizes) -> int:
        """Return the bytes of queries and keys before the norms of heads, and of rstd of each head.

        A norm of all heads keeps q, k and v, as they lie side by side, and two numbers per token.
        """
        if self.norms_width:
            return (s.queries + 2 * s.keys) * s.item + 2 * s.tokens * s.wide
        if self.head_norm is None:
            return 0
        rows = s.tokens * (s.heads + s.kv_heads)
        offsets = 2 * (self.head_norm.kind == "rms_offset") * s.head_size * s.wide
        return rows * s.head_size * s.item + rows * s.wide + offsets

    def forward_walk(self, s: Sizes, ledger: Ledger) -> None:
        """Make the columns of q, k and v side by side, then what is kept of them."""
        gathered, *kept = (of.num_bytes for of in self.kept(s))
        qkv = (s.queries + 2 * s.keys) * s.item
        ledger.make(gathered, qkv)
        ledger.briefly(2 * s.widened(s.queries), self._grows(s) * qkv)
        ledger.make(*kept)
        if self._is_ours(s):
            ledger.briefly(s.widened(s.queries + 2 * s.keys), self._scores_of_pieces(s))
        ledger.free(qkv)

    def backward(self, walk: BackwardWalk) -> None:
        """Walk through the second product, attention, and the first product."""
        s, ledger, numel = walk.s, walk.ledger, walk.s.hidden * walk.s.heads * walk.s.head_size
        gathered, *kept = (of.num_bytes for of in self.kept(s))
        queries, qkv = s.queries * s.item, (s.queries + 2 * s.keys) * s.item
        ledger.make(queries)
        walk.weight_gradient(numel)
        walk.output_gradient_used()
        self._backward_scores(s, ledger)
        if self.norms_width:
            # The gradient behind it and before, and of the queries four products of the equation.
            ledger.briefly(qkv, 4 * s.queries * s.wide)
        ledger.free(queries, *kept, s.residual_mask)
        if walk.defers:
            ledger.make(queries)
        # The columns of q, k and v side by side, and their product.
        ledger.briefly(max(qkv, 2 * s.widened(s.queries)))
        ledger.make(s.x)
        walk.weight_gradient(numel, gathered, qkv)
        walk.norm()

    def _backward_scores(self, s: Sizes, ledger: Ledger) -> None:
        """Walk from the gradient of attention's output to those of q, k and v."""
        qkv = (s.queries + 2 * s.keys) * s.item
        if self._is_ours(s):
            # Operands, the output's gradient with heads side by side, three sums, and scores with their gradients.
            operands = s.widened(s.queries + 2 * s.keys)
            sums = (2 * s.queries + 2 * s.keys) * s.wide
            ledger.briefly(qkv, operands, sums, max(2 * self._scores_of_pieces(s), s.queries * s.wide))
            ledger.make(qkv)
            return
        seq, first = s.seq, min(s.seq, _KEYS_PER_BLOCK)
        later = seq - first
        # Two tensors of scores of a block of keys, and two of the next.
        scores = 2 * s.tokens * s.heads * (first + later * min(later, _KEYS_PER_BLOCK) // seq) * s.wide
        if s.is_narrow and s.model.attention_dropout == 0:
            scores = 0
        ledger.briefly(2 * s.queries * s.item, qkv, scores)
        ledger.make(qkv)

    def _scores_of_pieces(self, s: Sizes) -> int:
        """Scores of as many queries as are taken at once, of every head, with the keys that they see.

        Those of the queries before are freed when the next ones are there.
        """
        num_alive = min(2, -(-s.seq // _QUERIES_PER_PIECE))
        rows = min(s.seq, _QUERIES_PER_PIECE)
        keys = min(s.seq, rows + (self.narrow_window(s.seq) or s.seq) - 1)
        return num_alive * (s.tokens // s.seq) * s.heads * rows * keys * s.wide
