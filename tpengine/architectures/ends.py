"""What stands before the first block and behind the last: lookup, learned positions, last norm, logits and loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpkernels.work import (
    cross_entropy_gradient_work,
    cross_entropy_work,
    embedding_backward_work,
    embedding_work,
)

from tpengine.architectures.norm import Norm
from tpengine.architectures.part import BackwardWalk, Exchange, Kernel, Ledger, Product, Shapes, Sizes, num_kept
from tpengine.config import ModelConfig

# Bytes of a row number of the embedding table.
_INDEX_BYTES = 8
# Per token: the maximum, the sum of exponentials, the label's logit and the sum of logits.
_LOSS_STATISTICS = 4
# The loss takes rows of so many logits at a time (tpkernels/ops/cross_entropy/operator.py).
_LOGITS_PER_BLOCK = 1 << 18
# A lookup moves D elements per token. Counted as this many flops per element it still never outweighs a layer.
_EMBEDDING_FLOPS_PER_ELEMENT = 2


@dataclass(frozen=True)
class Ends:
    """What stands before the first block and behind the last.

    Attributes:
        embedding_scale: what the rows of the embedding are multiplied by.
        rounds_scale: whether that is rounded before, to float32 and to the activations' dtype.
        logits_scale: what logits are multiplied by.
        has_positions: whether a row of a learned table of positions is added to each token.
        norm: of the last block's output.
    """

    embedding_scale: float = 1.0
    rounds_scale: bool = True
    logits_scale: float = 1.0
    has_positions: bool = False
    norm: Norm = field(default_factory=Norm)

    def positions(self, model: ModelConfig) -> Shapes:
        """Return the table of learned positions, if there is one."""
        return {"weight": (model.details.max_positions, model.hidden_size)} if self.has_positions else {}

    def lookup_flops(self, model: ModelConfig, tokens: int) -> int:
        """Return the flops of which a lookup is worth."""
        return _EMBEDDING_FLOPS_PER_ELEMENT * tokens * model.hidden_size

    def head_flops(self, model: ModelConfig, tokens: int) -> int:
        """Return the flops of the logits, on all ranks together."""
        return 2 * model.vocab_size * model.hidden_size * tokens

    # Time: the first block's side, then the last block's.

    def lookup(self, s: Sizes) -> Kernel:
        """Return the tokens' rows of the embedding, which the ranks exchange."""
        return Kernel("embedding", embedding_work(s.tokens, s.hidden, s.item), exchanges=1)

    def lookup_exchange(self, s: Sizes) -> Exchange:
        """Return the gather of the gradient: the embedding's needs all tokens. No operator hides it."""
        return Exchange(s.x * s.tp)

    def lookup_backward(self, s: Sizes) -> Kernel:
        """Return the embedding's gradient."""
        return Kernel("embedding_backward", embedding_backward_work(s.tokens, s.vocab, s.hidden, s.item))

    def head(self, s: Sizes) -> Product:
        """Return the logits."""
        return Product(s.vocab, s.hidden, "columns")

    def loss(self, s: Sizes, *, backward: bool = False) -> Kernel:
        """Return the loss, or the logits' gradient."""
        work_of = cross_entropy_gradient_work if backward else cross_entropy_work
        name = "cross_entropy_gradient" if backward else "cross_entropy"
        return Kernel(name, work_of(s.tokens, s.vocab, s.item))

    # Bytes.

    def kept_first(self, s: Sizes) -> int:
        """Return the numbers of the rows looked up, and of those of learned positions."""
        rows = s.tokens + s.own_tokens * (self._num_positions(s) > 0)
        return rows * _INDEX_BYTES

    def kept_last(self, s: Sizes) -> int:
        """Return the last block's output, norm, gathered tokens, logits and the loss's statistics."""
        return s.x + num_kept(self.norm.kept(s)) + s.gathered + s.logits + self._statistics(s)

    def deferred_first(self, s: Sizes) -> int:
        """Return row numbers and the gathered gradient; the gradient of the learned positions."""
        return s.tokens * (_INDEX_BYTES + s.hidden * s.item) + self._num_positions(s) * s.wide

    def deferred_last(self, s: Sizes) -> int:
        """Return gathered tokens and logits' gradient; the norm's gradient."""
        return s.gathered + s.logits + self.norm.num_vectors(s) * s.wide

    def forward_last(self, s: Sizes, ledger: Ledger) -> None:
        """Walk from the last block's output to the loss."""
        rows = min(s.tokens * s.vocab, _LOGITS_PER_BLOCK)
        ledger.make(num_kept(self.norm.kept(s)), s.gathered, s.logits)
        ledger.briefly(rows * s.wide, s.widened(rows))
        ledger.make(self._statistics(s))

    def backward_last(self, walk: BackwardWalk) -> None:
        """Walk from the loss to the gradient of the last block's output."""
        s, ledger = walk.s, walk.ledger
        # The gradient of the logits overwrites them.
        ledger.briefly(s.widened(min(s.tokens * s.vocab, _LOGITS_PER_BLOCK)))
        ledger.free(self._statistics(s))
        ledger.make(s.x)
        walk.weight_gradient(s.hidden * s.vocab, s.gathered, s.logits)
        walk.norm()
        ledger.free(s.x)

    def _num_positions(self, s: Sizes) -> int:
        return s.model.details.max_positions * s.hidden if self.has_positions else 0

    def _statistics(self, s: Sizes) -> int:
        return _LOSS_STATISTICS * s.tokens * s.wide
