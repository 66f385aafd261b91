"""What attention takes on a tp rank: one kernel, over whole sequences or their documents. No torch."""

from __future__ import annotations

from tpkernels.work import attention_backward_work, attention_work, visible_pairs

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
