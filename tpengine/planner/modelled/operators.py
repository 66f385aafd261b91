"""What single operators take on a tp rank: products with their exchanges, and small kernels between them. No torch.

An exchange belongs to the operator that gathers its input or scatters its output. Where they are fused, both take the
longer of their times; else their sum. So an action knows which part of it is an exposed exchange. Which
operators a chunk's actions have is in chunk.py; seconds are added up, by cause, in `OperatorSum` and `ActionSeconds`.

Attention is one kernel, over whole sequences or their documents. Packed documents do not see each other, so what
attention computes of a micro-batch depends on their lengths: a document of n tokens has n (n + 1) / 2 pairs of a query
and a key. So of two micro-batches with equally many tokens one may cost many times as much as the other: in a pipeline
every stage waits for the dearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from tpkernels.work import (
    Work,
    activation_backward_work,
    activation_work,
    attention_backward_work,
    attention_work,
    cross_entropy_gradient_work,
    cross_entropy_work,
    embedding_backward_work,
    embedding_work,
    norm_backward_work,
    norm_work,
    rope_work,
    visible_pairs,
)

from tpengine.architectures.describe import Attention
from tpengine.architectures.registry import architecture_of
from tpengine.config import Config
from tpengine.planner.machine import Machine
from tpengine.planner.modelled.caches import prepares
from tpengine.planner.modelled.held import BlockBytes


@dataclass(frozen=True)
class ActionSeconds:
    """What a compute action takes, by cause; the parts add up to the whole.

    Attributes:
        compute: operators that a plain forward and backward have.
        again: operators that backward runs a second time.
        exchange: of tensor-parallel ranks, as far as no operator hides it.
        host: starting operators, as far as it takes longer than they do.
        exact: what exact mode takes longer: smaller products, exchanges that nothing hides and whose partial sums are
            wide, and sums in trees.
    """

    compute: float = 0.0
    again: float = 0.0
    exchange: float = 0.0
    host: float = 0.0
    exact: float = 0.0

    @property
    def total(self) -> float:
        """Return how long the action occupies its rank."""
        return self.compute + self.again + self.exchange + self.host + self.exact

    def __mul__(self, times: float) -> ActionSeconds:
        return ActionSeconds(*(times * part for part in astuple(self)))


@dataclass(frozen=True)
class OperatorSum:
    """Operators that run one after another.

    Attributes:
        operators: their seconds.
        exchanges: seconds of exchanges that none of them hides.
        number: how many there are, each of which the host starts.
    """

    operators: float = 0.0
    exchanges: float = 0.0
    number: int = 0

    def __add__(self, other: OperatorSum) -> OperatorSum:
        return OperatorSum(
            self.operators + other.operators, self.exchanges + other.exchanges, self.number + other.number
        )

    def __mul__(self, times: int) -> OperatorSum:
        return OperatorSum(self.operators * times, self.exchanges * times, self.number * times)


# What blocks and ends take, by what they depend on: chunks of one configuration have them in common.
KnownSums = dict[tuple[object, ...], OperatorSum]


class Operators:
    """A tp rank's operators for one micro-batch.

    Args:
        config, tp, machine: sizes, the number of tensor-parallel ranks, rates.
        shards: that the rank computes one after another, in exact mode; 0 in fast mode.
    """

    def __init__(self, config: Config, tp: int, machine: Machine, shards: int = 0) -> None:
        self.tp, self.machine, self.shards = tp, machine, shards
        self.size = self.size_of(config, tp)
        # Rows between products: each rank has its share of the tokens, gathered before a product, scattered behind it.
        self.rows = self.size.own_tokens
        self.dtype, self.is_fused = config.train.dtype, config.parallel.tp_comm == "fused" and not shards
        link = machine.link(tp, 1)
        exchanged = self.size.x * tp
        exchange_seconds = link.exchange_seconds if self.is_fused else link.gather_seconds
        self.exchange_seconds = exchange_seconds(exchanged, tp)
        # What a fused matmul takes longer, where it was measured: nothing of that is hidden.
        self.fused_seconds = link.fused_seconds(exchanged, tp) if self.is_fused else None
        # Weights are converted once per step for the products of a CPU (Trainer); ZeRO's come and go.
        self.prepares = prepares(config, machine)
        parts = architecture_of(config.model).block(config.model, 0).values()
        self.rotates = any(part.rotates for part in parts if isinstance(part, Attention))

    def size_of(self, config: Config, tp: int) -> BlockBytes:
        """Return the sizes of a block on one of `tp` ranks."""
        return BlockBytes.of(config, tp)

    def others(self, *works: Work, name: str = "") -> OperatorSum:
        """Return kernels that are no products: by their rate under `name` where it was measured, else by their bytes.

        Args:
            works: of each kernel.
            name: of the operator among the machine's rates.
        """
        seconds = sum(self.machine.other_seconds(work, self.dtype, name) for work in works)
        return OperatorSum(seconds, 0.0, len(works))

    def products(self, exchanges: int, kind: str = "forward") -> tuple[OperatorSum, ...]:
        """Return a block's four products: qkv, attention's output, gate and up, down.

        Args:
            exchanges: of each product.
            kind: forward, input_gradient or weight_gradient.
        """
        size = self.size
        mixed, keys = size.heads * size.head_size, size.kv_heads * size.head_size
        return (
            self.by_columns(mixed + 2 * keys, exchanges, kind),
            self.by_rows(mixed, exchanges, kind),
            self.by_columns(size.num_gated * size.ffn, exchanges, kind),
            self.by_rows(size.ffn, exchanges, kind),
        )

    def by_columns(self, columns: int, exchanges: int, kind: str = "forward") -> OperatorSum:
        """Return a product whose columns the ranks share, and in exact mode the shards of a rank.

        Args:
            columns: of this rank.
            exchanges: of the product.
            kind: forward, input_gradient or weight_gradient.
        """
        size, num = self.size, max(1, self.shards)
        if num == 1:
            return self._matmul(size.tokens, columns, size.hidden, exchanges, kind)
        once = self._matmul(size.tokens, -(-columns // num), size.hidden, 0, kind)
        return once * num + OperatorSum(exchanges=exchanges * self.exchange_seconds)

    def by_rows(self, inner: int, exchanges: int, kind: str = "forward") -> OperatorSum:
        """Return a product whose inner dimension is shared: its outputs are partial sums.

        Args:
            inner: the dimension's part of this rank.
            exchanges: of the product.
            kind: forward, input_gradient or weight_gradient.
        """
        size, num = self.size, max(1, self.shards)
        if num == 1:
            return self._matmul(size.tokens, size.hidden, inner, exchanges, kind)
        once = self._matmul(size.tokens, size.hidden, -(-inner // num), 0, kind)
        return once * num + OperatorSum(exchanges=exchanges * self.exchange_seconds)

    def tree(self) -> OperatorSum:
        """Return what a scatter of partial sums [T, D] takes longer in exact mode: it is wide, and adds in a tree.

        A rank reads two and writes one for each sum of its own shards, and of the ranks' sums for its tokens.
        """
        if not self.shards:
            return OperatorSum()
        size, elements = self.size, self.size.tokens * self.size.hidden
        num_sums = (self.shards - 1) + (self.tp - 1) / self.tp
        added = Work(int(num_sums * elements), int(num_sums * 3 * elements * size.wide))
        return self.others(added) + OperatorSum(exchanges=(size.wide / size.item - 1) * self.exchange_seconds)

    def norm(self, *, residual: bool = False, backward: bool = False) -> OperatorSum:
        """Return a norm, or its gradients; with `residual` of x and what it is added to."""
        work_of = norm_backward_work if backward else norm_work
        work = work_of(self.rows, self.size.hidden, self.size.item, residual=residual)
        return self.others(work, name="norm_backward" if backward else "norm")

    @property
    def knows_additions(self) -> bool:
        """Return whether the additions of residuals that no norm is known to make are counted: where a rate is."""
        return self.dtype in self.machine.measured

    @property
    def leaves_sums(self) -> bool:
        """Return whether a block's last sum is the next norm's (model/block.py): on a GPU, in fast mode.

        On a CPU a norm makes it too, in a pass of its own.
        """
        return self.knows_additions and not self.shards and self.machine.is_asynchronous

    def added(self) -> OperatorSum:
        """Return the addition of a residual that no norm takes over, where its rate was measured."""
        elements = self.rows * self.size.hidden
        work = Work(elements, 3 * elements * self.size.item)
        return self.others(work, name="add") if self.knows_additions else OperatorSum()

    def rope(self, *, backward: bool = False) -> OperatorSum:
        """Return the rotation of queries and keys, or of their gradients, where positions are rotations."""
        size = self.size
        if not self.rotates:
            return OperatorSum()
        work = rope_work(size.tokens, size.heads + size.kv_heads, size.head_size, size.item)
        return self.others(work, name="rope_backward" if backward else "rope")

    def activation(self, *, backward: bool = False) -> OperatorSum:
        """Return the feed-forward network's activation, or its gradient."""
        size = self.size
        work_of = activation_backward_work if backward else activation_work
        work = work_of(size.tokens, size.ffn, size.item, gated=size.num_gated > 1)
        return self.others(work, name="activation_backward" if backward else "activation")

    def lookup(self) -> OperatorSum:
        """Return the tokens' rows of the embedding, which the ranks exchange."""
        work = embedding_work(self.size.tokens, self.size.hidden, self.size.item)
        return self._with_exchanges(self.machine.other_seconds(work, self.dtype, "embedding"), 1)

    def lookup_backward(self) -> OperatorSum:
        """Return the embedding's gradient."""
        work = embedding_backward_work(self.size.tokens, self.size.vocab, self.size.hidden, self.size.item)
        return self.others(work, name="embedding_backward")

    def cross_entropy(self, *, backward: bool = False) -> OperatorSum:
        """Return the loss, or the logits' gradient."""
        work_of = cross_entropy_gradient_work if backward else cross_entropy_work
        work = work_of(self.size.tokens, self.size.vocab, self.size.item)
        return self.others(work, name="cross_entropy_gradient" if backward else "cross_entropy")

    def _matmul(self, rows: int, columns: int, inner: int, exchanges: int, kind: str) -> OperatorSum:
        of = f"prepared_{kind}" if self.prepares and kind != "weight_gradient" else kind
        seconds = self.machine.product_seconds(rows, columns, inner, self.size.item, self.dtype, kind=of)
        return self._with_exchanges(seconds, exchanges)

    def _with_exchanges(self, seconds: float, exchanges: int) -> OperatorSum:
        """Return an operator with its exchanges, which overlap with it where they are fused."""
        if self.fused_seconds is not None:
            return OperatorSum(seconds, exchanges * self.fused_seconds, 1)
        links = exchanges * self.exchange_seconds
        return OperatorSum(seconds, max(0.0, links - seconds) if self.is_fused else links, 1)


class AttentionOperators:
    """Attention between the rotation of queries and keys and the output's product.

    Args:
        operators: of the rank.
        batch: sequences of a micro-batch.
        packed: the documents of micro-batches, where attention does not cross them.
    """

    def __init__(self, operators: Operators, batch: int, packed: Packed | None = None) -> None:
        self.operators, self.batch, self.packed = operators, batch, packed
        self.machine, self.size, self.dtype = operators.machine, operators.size, operators.dtype

    def attend(self, window: int | None, *, backward: bool = False) -> OperatorSum:
        """Return the attention of one block, or its gradient.

        Args:
            window: how many tokens back a query sees; None for all.
            backward: whether it is the gradient.
        """
        size = self.size
        pairs = None if window is None else self.batch * visible_pairs([size.seq], window)
        seq = size.seq
        if self.packed is not None:
            pairs = self.packed.pairs(window)
            # Kernels attain what they attain at the length that has as many pairs per token.
            seq = max(1, min(seq, 2 * self.packed.pairs() // self.packed.num_tokens))
        work = (attention_backward_work if backward else attention_work)(
            self.batch, size.seq, size.heads, size.kv_heads, size.head_size, size.item, causal_half=True, pairs=pairs
        )
        name = "attention_backward" if backward else "attention"
        return OperatorSum(self.machine.attention_seconds(work, self.dtype, seq=seq, name=name), 0.0, 1)


@dataclass(frozen=True)
class Packed:
    """The documents of some micro-batches.

    Attributes:
        lengths: of each micro-batch, the tokens of each document, or part of one.
    """

    lengths: tuple[tuple[int, ...], ...]

    def pairs(self, window: int | None = None) -> int:
        """Return the pairs of a query and a key that attention computes in a micro-batch: the mean.

        Args:
            window: as visible_pairs.
        """
        return round(sum(visible_pairs(of, window) for of in self.lengths) / len(self.lengths))

    @property
    def worst(self) -> Packed:
        """The micro-batch with most pairs, alone."""
        return Packed((max(self.lengths, key=visible_pairs),))

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return sum(self.lengths[0])


def packed_of(starts: Sequence[Sequence[int]], seq_len: int, micro_batch_size: int) -> Packed:
    """Return the documents of micro-batches.

    Args:
        starts: where documents begin in each sample after its first token (Samples.document_starts); samples that do
            not fill a micro-batch are left out.
        seq_len: tokens of a sample.
        micro_batch_size: samples of a micro-batch.
    """
    of_sample = []
    for inner in starts:
        ends = [*inner, seq_len]
        of_sample.append([end - begin for begin, end in zip([0, *inner], ends, strict=True)])
    lengths = []
    for first in range(0, len(of_sample) - micro_batch_size + 1, micro_batch_size):
        lengths.append(tuple(length for sample in of_sample[first : first + micro_batch_size] for length in sample))
    return Packed(tuple(lengths))
