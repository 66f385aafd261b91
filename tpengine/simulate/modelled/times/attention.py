"""What attention takes on a tp rank: one kernel or a kernel each step, over documents, or in a ring. No torch."""

from __future__ import annotations

from tpkernels.work import Work, attention_backward_work, attention_work, visible_pairs

from tpengine.simulate.modelled.times.operators import Operators
from tpengine.simulate.modelled.times.packed import Packed
from tpengine.simulate.modelled.times.sums import OperatorSum


class AttentionOperators:
    """Attention between the rotation of queries and keys and the output's product.

    Args:
        operators: of the rank.
        batch: sequences of a micro-batch.
        packed: the documents of micro-batches, where attention does not cross them.
    """

    def __init__(self, operators: Operators, batch: int, packed: Packed | None = None) -> None:
        self.operators, self.batch, self.packed = operators, batch, packed
        self.machine, self.engine, self.size = operators.machine, operators.engine, operators.size
        self.dtype, self.context = operators.dtype, operators.engine.context_ranks

    def attend(self, window: int | None, *, backward: bool = False) -> OperatorSum:
        """Return the attention of one block, or its gradient.

        Args:
            window: how many tokens back a query sees; None for all.
            backward: whether it is the gradient.
        """
        size, copied = self.size, self._heads_copied(backward=backward)
        if self.engine.keeps_scores:
            return copied + self._attend_in_memory(backward=backward)
        pairs = None if window is None else self.batch * visible_pairs([size.seq], window)
        seq = size.seq
        if self.packed is not None:
            pairs = self.packed.pairs(window)
            # Kernels attain what they attain at the length that has as many pairs per token.
            seq = max(1, min(seq, 2 * self.packed.pairs() // self.packed.num_tokens))
        if self.context > 1:
            pairs = (pairs or self.batch * visible_pairs([size.seq])) // self.context
            # Each step of the ring attends to one rank's keys.
            seq = max(1, seq // self.context)
            copied += self._ring_steps(backward=backward)
        work = (attention_backward_work if backward else attention_work)(
            self.batch, size.seq, size.heads, size.kv_heads, size.head_size, size.item, causal_half=True, pairs=pairs
        )
        flash = self.engine.flash
        share = flash.share(seq, size.head_size, backward=backward) if flash else None
        name = "attention_backward" if backward else "attention"
        seconds = self.machine.attention_seconds(work, self.dtype, share, seq=seq, name=name)
        ring = self._ring(seconds, backward=backward) if self.context > 1 else 0.0
        return copied + OperatorSum(seconds, ring, 1)

    def _attend_in_memory(self, *, backward: bool) -> OperatorSum:
        """Return attention of the whole square, each step a kernel: scores, softmax, dropout, values.

        Backward has two products for each of forward's, and the kernels' gradients.
        """
        size, products = self.size, 4 if backward else 2
        num, length = self.batch * size.heads, size.seq // self.context
        product = self.machine.product_seconds(length, size.seq, size.head_size, size.item, self.dtype, batch=num)
        scores = num * length * size.seq
        # Read and written: scores into probabilities; a gradient is made of two. A mask is 1 byte.
        softmax = Work(
            5 * scores, (3 if backward else 2) * scores * size.item + self.engine.score_steps[backward] * scores
        )
        dropout = Work(scores, scores * (2 * size.item + 1))
        others = self.operators.others(softmax, *[dropout] * self.engine.drops)
        return OperatorSum(products * product, 0.0, products) + others

    def _heads_copied(self, *, backward: bool) -> OperatorSum:
        size = self.size
        numel = (size.queries + 2 * size.keys + size.queries) * (1 + backward)
        return self.operators.others(Work(0, 2 * numel * size.item)) if self.engine.copies_heads else OperatorSum()

    def _ring_steps(self, *, backward: bool) -> OperatorSum:
        """Return what a ring's steps read and write besides: results that are added step by step, keys side by side."""
        size, num = self.size, self.context
        # Of each step's result and of the sum: two read, one written. Forward adds outputs, which begin as zeros; then
        # come the gradients of queries, keys and values.
        queries = size.queries * size.item * (3 * num if backward else 3 * num + 1)
        keys = 2 * size.keys * size.item * (3 * num if backward else 2)
        return self.operators.others(*[Work(0, queries // num)] * num, Work(0, keys))

    def _ring(self, seconds: float, *, backward: bool) -> float:
        """Return what a ring's messages take longer than the attention that hides them."""
        size, num = self.size, self.context
        keys = 2 * size.keys * size.item * (1 + backward)
        link = self.machine.link(num, max(1, round(size.tokens / max(1, size.own_tokens))))
        return max(0.0, (num - 1) * link.message_seconds(keys) - seconds * (num - 1) / num)
