"""What a micro-batch keeps in a block of the model, in bytes: formulas for what our layers keep. No torch.

They hold for fast mode on a CPU, for every architecture that is here. Saved is exact: the distinct storages that
autograd keeps between F and B, without weights, rope tables and the batch's tokens and labels, which many micro-batches
share. Deferred is exact too: the operands of the weight half. Exact mode and GPUs keep other tensors; for them these
figures are estimates.

Letters: T tokens of a micro-batch, t = T/tp, D width, H and G query and key/value heads of this rank, E head width,
F feed-forward and V vocabulary columns of this rank; e bytes per element, a bytes per element of
promote_types(dtype, float32).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpengine.architectures.describe import Attention, FeedForward, Norm
from tpengine.architectures.registry import architecture_of
from tpengine.config import Config
from tpengine.dtypes import dtype_bytes
from tpengine.layout.parameters import layer_specs
from tpengine.plan import Gathered, Recompute

# Bytes of a row number of the embedding table.
_INDEX_BYTES = 8
# Per token: the maximum, the sum of exponentials, the label's logit and the sum of logits.
_LOSS_STATISTICS = 4


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one micro-batch in one block, and in the model's ends: before the first and behind the last block.

    Args:
        tokens, own_tokens: T and t.
        seq: tokens of a sequence.
        hidden, heads, kv_heads, head_size, ffn, vocab: D, H, G, E, F, V.
        item, wide: e and a.
        keeps_gathered: Gathered.KEEP.
        drops_residual, drops_attention, drops_mlp: whether there is dropout.
        num_gated: matrices of the feed-forward network's first product: 2 with a gate, else 1.
        norms_heads: whether queries and keys have norms.
        norm_statistics: numbers per row that a norm keeps: 2 if it subtracts the mean, else 1.
        norms_outputs: whether what a block's halves add goes through a norm first (Gemma 3).
        offsets_norms: whether norms' weights are stored less one: the sum is made, and kept, for each call.
        vectors, end_vectors: elements of a block's norms and biases on this rank, and of the last norm.
        positions: elements of the table of learned positions.
        scales_rows: whether the rows of the embedding are multiplied by a number.
        is_windowed: whether a query does not see all earlier tokens of its sequence: windows, packed documents.
        window: how many tokens back a query sees, its own included; a sequence without a window.
    """

    tokens: int
    own_tokens: int
    seq: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    item: int
    wide: int
    keeps_gathered: bool
    drops_residual: bool
    drops_attention: bool
    drops_mlp: bool
    num_gated: int
    norms_heads: bool
    norm_statistics: int
    norms_outputs: bool
    offsets_norms: bool
    vectors: int
    end_vectors: int
    positions: int
    scales_rows: bool
    is_windowed: bool
    window: int

    @classmethod
    def of(cls, config: Config, tp: int, gathered: Gathered = Gathered.KEEP, *, window: int = 0) -> BlockBytes:
        """Return the bytes for a configuration on one of `tp` ranks, of a block with a window, or 0 for none."""
        model, train = config.model, config.train
        architecture = architecture_of(model)
        parts, ends = architecture.block(model, 0).values(), architecture.ends(model)
        tokens, item = train.micro_batch_size * train.seq_len, dtype_bytes(train.dtype)
        return cls(
            tokens=tokens,
            own_tokens=tokens // tp,
            seq=train.seq_len,
            hidden=model.hidden_size,
            heads=model.num_heads // tp,
            kv_heads=max(1, model.num_kv_heads // tp),
            head_size=model.head_size,
            ffn=model.ffn_size // tp,
            vocab=model.padded_vocab_size(tp) // tp,
            item=item,
            wide=max(4, item),
            keeps_gathered=gathered is Gathered.KEEP,
            drops_residual=model.residual_dropout > 0,
            drops_attention=model.attention_dropout > 0,
            drops_mlp=model.mlp_dropout > 0,
            num_gated=1 + any(part.gated for part in parts if isinstance(part, FeedForward)),
            norms_heads=any(part.head_norm is not None for part in parts if isinstance(part, Attention)),
            norm_statistics=1 + (ends.norm.kind == "layer"),
            norms_outputs=sum(isinstance(part, Norm) for part in parts) > 2,
            offsets_norms=ends.norm.kind == "rms_offset",
            vectors=sum(spec.local_numel(tp) for spec in layer_specs(model, tp, 0) if not spec.is_matrix),
            end_vectors=sum(math.prod(shape) for shape in ends.norm.shapes(model).values()),
            positions=model.details.max_positions * model.hidden_size if ends.has_positions else 0,
            scales_rows=ends.embedding_scale != 1.0,
            # A window that no sequence exceeds is none.
            is_windowed=0 < window < train.seq_len or config.data.packing != "cut",
            window=window if 0 < window < train.seq_len else train.seq_len,
        )

    @property
    def is_narrow(self) -> bool:
        """Whether sums are taken in a wider dtype than that of the activations."""
        return self.item < self.wide

    def widened(self, num_elements: int) -> int:
        """Bytes of a copy in the wider dtype; 0 where there is none, so that nothing is copied."""
        return num_elements * self.wide * self.is_narrow

    def weight_gradient(self, num_elements: int) -> int:
        """Bytes of a weight's gradient on its way into the buffer: a product, and its copy in the buffer's dtype.

        Where the dtypes agree the product is added as it is computed.
        """
        return num_elements * (self.item + self.wide) * self.is_narrow

    @property
    def x(self) -> int:
        """x[t, D], between blocks."""
        return self.own_tokens * self.hidden * self.item

    @property
    def gathered(self) -> int:
        """What a column-parallel layer keeps of its input: [T, D], or [t, D] if it gathers again."""
        return (self.tokens if self.keeps_gathered else self.own_tokens) * self.hidden * self.item

    @property
    def queries(self) -> int:
        """Elements of q[T, H E], or of attention's output."""
        return self.tokens * self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Elements of k[T, G E], or of v."""
        return self.tokens * self.kv_heads * self.head_size

    @property
    def middle(self) -> int:
        """Elements of the feed-forward network's middle, [T, F]; gate and up are as large each."""
        return self.tokens * self.ffn

    @property
    def norm(self) -> int:
        """rstd[t] of a norm, its mean and 1 + w, if it has them; its input is counted as the tensor it is."""
        return (self.own_tokens * self.norm_statistics + self.offsets_norms * self.hidden) * self.wide

    @property
    def normed_output(self) -> int:
        """What the norm of a half's output keeps, if there is one: its input [t, D], and its statistics."""
        return self.norms_outputs * (self.x + self.norm)

    @property
    def attended(self) -> int:
        """What attention keeps between its two matmuls, and the input of the second.

        q and k rotated, and v, each in a tensor of its own; the output; the log-sum-exp. Where torch computes attention
        (below float32, and with fewer KV heads) it keeps an output in its own layout, unless there is one head, and the
        matmul keeps a copy with heads side by side. With dropout all of it is widened, and k and v repeated to H heads.
        With a window, or packed documents, attention is ours in every dtype, with dropout too.
        """
        q, kv, statistics = self.queries, self.keys, self.tokens * self.heads * self.wide
        if self.is_windowed:
            return (2 * q + 2 * kv) * self.item + statistics
        if not self.drops_attention:
            is_ours = self.item == self.wide and self.heads == self.kv_heads
            copies = 1 if is_ours or self.heads == 1 or self.seq == 1 else 2
            return (q + 2 * kv + copies * q) * self.item + statistics
        narrow_output = 0 if self.item == self.wide else q * self.item
        return 4 * q * self.wide + narrow_output + statistics

    @property
    def normed_heads(self) -> int:
        """Queries and keys before the norms of heads, and rstd of each head."""
        rows = self.tokens * (self.heads + self.kv_heads)
        offsets = 2 * self.offsets_norms * self.head_size * self.wide
        return self.norms_heads * (rows * self.head_size * self.item + rows * self.wide + offsets)

    @property
    def attention(self) -> int:
        """Norm, gathered tokens, attention, mask of the residual dropout: what is kept after the block's x."""
        return (
            self.norm
            + self.gathered
            + self.normed_heads
            + self.attended
            + self.drops_residual * self.own_tokens * self.hidden
            + self.normed_output
        )

    @property
    def mlp(self) -> int:
        """Norm of x + attended, gathered tokens, gate and up, their product, masks of dropout (1 byte per element)."""
        masks = self.drops_mlp * self.tokens * self.ffn + self.drops_residual * self.own_tokens * self.hidden
        products = (self.num_gated + 1) * self.tokens * self.ffn * self.item
        return self.x + self.norm + self.gathered + products + masks + self.normed_output

    def saved(self, recompute: Recompute) -> int:
        """Return what a block keeps from F to B, including its input; FULL keeps nothing inside a chunk."""
        match recompute:
            case Recompute.NONE:
                return self.x + self.attention + self.mlp
            case Recompute.ATTENTION:
                return self.x + self.mlp
            case Recompute.BLOCK:
                return self.x
        return 0

    @property
    def logits(self) -> int:
        """z[T, V]; its gradient overwrites it."""
        return self.tokens * self.vocab * self.item

    @property
    def embedding(self) -> int:
        """The rows looked up, and those of learned positions; what rows are multiplied by."""
        rows = self.tokens + self.own_tokens * (self.positions > 0)
        return rows * _INDEX_BYTES + self.scales_rows * self.item

    @property
    def head(self) -> int:
        """The last block's output, norm, gathered tokens, logits and the loss's statistics."""
        return self.x + self.norm + self.gathered + self.logits + _LOSS_STATISTICS * self.tokens * self.wide

    @property
    def output_gradient(self) -> int:
        """The part of `deferred` that is the gradient of the block's output itself, [t, D].

        It is another tensor with dropout, a norm of the output, or gathering. It has t rows where each rank has all
        tokens, or gathers again.
        """
        is_itself = (
            not self.drops_residual
            and not self.norms_outputs
            and (self.own_tokens == self.tokens or not self.keeps_gathered)
        )
        return self.x if is_itself else 0

    @property
    def deferred(self) -> int:
        """What the weight half needs of a block: both operands of each matmul, and the norms' gradients.

        The gathered input and the output's gradient of qkv, and of gate and up; the input and the gathered gradient of
        attention's output matmul, and of the feed-forward network's second.
        """
        qkv = self.gathered + (self.queries + 2 * self.keys) * self.item
        gate_up = self.gathered + self.num_gated * self.tokens * self.ffn * self.item
        output = self.queries * self.item + self.gathered
        down = self.tokens * self.ffn * self.item + self.gathered
        return qkv + output + gate_up + down + self.vectors * self.wide

    @property
    def deferred_embedding(self) -> int:
        """Row numbers and the gathered gradient; the gradient of the learned positions."""
        rows = self.tokens * (_INDEX_BYTES + self.hidden * self.item)
        return rows + self.positions * self.wide

    @property
    def deferred_head(self) -> int:
        """Gathered tokens and logits' gradient; the norm's gradient."""
        return self.gathered + self.logits + self.end_vectors * self.wide
