"""What single operators take in another engine: products that are apart, kernels of their own, attention's kernels.

Only what differs from tpengine/planner/modelled/operators.py is here. chunk.py says which of these a block has.
"""

from __future__ import annotations

from dataclasses import replace

from tpkernels.work import (
    Work,
    activation_backward_work,
    activation_work,
    attention_backward_work,
    attention_work,
    norm_backward_work,
    norm_work,
    rope_work,
    visible_pairs,
)

from benchmarks.planner.published.engine import Beside, BlockSizes, Engine, num_logits, sizes_for
from tpengine.architectures.norm import Norm
from tpengine.architectures.part import Product
from tpengine.config import Config
from tpengine.planner.machine import Curve, Machine
from tpengine.planner.modelled.operators import Operators, OperatorSum

# Per logit of a loss in float32, beside what cross_entropy_work counts: copied (2 + 4), maximum (4), difference (8),
# exponential (8), sum (4), quotient (8). Of its gradient: product (8), copied back (4 + 2).
_WIDE_LOSS_BYTES, _WIDE_LOSS_GRADIENT_BYTES = 36, 10


class EngineOperators(Operators):
    """A tp rank's operators for one micro-batch; what an engine does not have takes nothing.

    Args:
        config, tp, machine: as for ours.
        engine: what it does differently.
    """

    size: BlockSizes

    def __init__(self, config: Config, tp: int, machine: Machine, engine: Engine) -> None:
        self.engine = engine
        super().__init__(config, tp, machine)
        if not engine.cuts_rows:
            self.rows = self.size.tokens
        self.rotates = self.size.rotates
        self.ring_seconds = machine.link(tp, 1).gather_seconds(self.size.x * tp, tp)

    def size_of(self, config: Config, tp: int) -> BlockSizes:
        """Return the sizes of a block, of whose tokens ranks of a context hold a share each."""
        return sizes_for(config, tp, self.engine)

    def products(self, exchanges: int, kind: str = "forward") -> tuple[OperatorSum, ...]:
        """Return a block's four products as ours; each may be several, and may have fewer processors."""
        size, engine = self.size, self.engine
        mixed, keys = size.heads * size.head_size, size.kv_heads * size.head_size
        packed = (mixed, keys, keys) if engine.splits_heads else (mixed + 2 * keys,)
        gated = (size.ffn,) * size.num_gated if engine.splits_gate else (size.num_gated * size.ffn,)
        four = (
            self._side_by_side(packed, exchanges, kind),
            self.by_rows(mixed, exchanges, kind),
            self._side_by_side(gated, exchanges, kind),
            self.by_rows(size.ffn, exchanges, kind),
        )
        if engine.beside is None or not self.is_fused:
            return four
        return tuple(self._beside(engine.beside, index, product, kind) for index, product in enumerate(four))

    def product(self, product: Product, exchanges: int, kind: str = "forward") -> OperatorSum:
        """Return a product as ours, with what adds the parts of a fused scatter of its outputs, or of dx."""
        scatters = kind == ("input_gradient" if product.cut == "columns" else "forward")
        return super().product(product, exchanges, kind) + self._parts_added(exchanges if scatters else 0)

    def by_columns(self, columns: int, exchanges: int, kind: str = "forward") -> OperatorSum:
        """Return a product whose columns the ranks share."""
        return self.product(Product(columns, self.size.hidden, "columns"), exchanges, kind)

    def by_rows(self, inner: int, exchanges: int, kind: str = "forward") -> OperatorSum:
        """Return a product whose inner dimension the ranks share: its outputs are partial sums."""
        return self.product(Product(self.size.hidden, inner, "inner"), exchanges, kind)

    def norm(self, norm: Norm, *, residual: bool = False, backward: bool = False) -> OperatorSum:
        """Return a norm as ours, of the rows that the engine's ranks have."""
        work_of = norm_backward_work if backward else norm_work
        work = work_of(self.rows, self.size.hidden, self.size.item, residual=residual)
        return self.others(work, name="norm_backward" if backward else "norm")

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

    def gate_apart(self) -> OperatorSum:
        """Return the second sum of ranks where the inputs' gradients of gate and up are summed apart: two exchanges."""
        if not self.engine.reduces_gate_apart or self.size.num_gated == 1:
            return OperatorSum()
        return OperatorSum(exchanges=2 * self.exchange_seconds * (not self.engine.cuts_rows))

    def copied_weights(self) -> OperatorSum:
        """Return the copy of a block's gathered weights out of their buffer."""
        num_bytes = self.engine.copied_item * self._block_numel
        return self.others(Work(0, num_bytes)) if num_bytes else OperatorSum()

    def added_gradients(self) -> OperatorSum:
        """Return the addition of a block's gradients to those of other micro-batches by a kernel."""
        added = self.engine.added_item
        return self.others(Work(self._block_numel, added * self._block_numel)) if added else OperatorSum()

    def norms_again(self) -> OperatorSum:
        """Return the gradients of two norms' weights, for which input and output's gradient are read once more."""
        work = Work(0, 2 * self.rows * self.size.hidden * self.size.item)
        return self.others(work, work) if self.engine.reads_norms_twice else OperatorSum()

    def dropped(self) -> OperatorSum:
        """Return what follows a row-parallel product: bias, dropout and the residual's addition in one kernel."""
        if self.engine.joins_residuals:
            return OperatorSum()
        elements = self.rows * self.size.hidden
        return self.others(Work(elements, elements * (3 * self.size.item + self.engine.drops)))

    def steps(self, *, backward: bool = False) -> OperatorSum:
        """Return what kernels for single steps read and write more: of a block's two norms, a rotation and a gate."""
        size, works, steps = self.size, [], self.engine.steps
        if steps is None:
            return OperatorSum()
        num_rows = self.rows * size.hidden
        of_norm = steps.norm_backward if backward else steps.norm
        if of_norm:
            works += [Work(0, num_rows * of_norm)] * 2
        if self.rotates:
            each = steps.rotation_backward if backward else steps.rotation
            works += [Work(0, (size.queries + size.keys) * each)] * (each > 0)
        if size.num_gated > 1:
            each = steps.gate_backward if backward else steps.gate
            works += [Work(0, size.middle * each)] * (each > 0)
        if backward and self.engine.joins_heads:
            works.append(Work(0, 2 * (size.queries + 2 * size.keys) * size.item))
        return self.others(*works)

    def wide_loss(self, *, backward: bool = False) -> OperatorSum:
        """Return what a loss in float32 takes besides, whose steps are a kernel each."""
        if not self.engine.wide_loss:
            return OperatorSum()
        logits = num_logits(self.size, self.engine)
        return self.others(Work(logits, logits * (_WIDE_LOSS_GRADIENT_BYTES if backward else _WIDE_LOSS_BYTES)))

    def gathered_logits(self) -> OperatorSum:
        """Return the exchange of logits among ranks that each compute the whole loss."""
        logits = num_logits(self.size, self.engine)
        if not self.engine.whole_logits or self.tp == 1:
            return OperatorSum()
        gathered = self.machine.link(self.tp, 1).gather_seconds(logits * self.size.item, self.tp)
        # Copied apart, and joined along the vocabulary.
        return OperatorSum(exchanges=gathered) + self.others(Work(0, 4 * self.size.item * logits))

    @property
    def _block_numel(self) -> int:
        """Elements of a block's matrices."""
        size = self.size
        mixed = 2 * size.heads + 2 * size.kv_heads
        return size.hidden * (mixed * size.head_size + (size.num_gated + 1) * size.ffn)

    def _parts_added(self, scatters: int) -> OperatorSum:
        """Return the kernels that add what fused scatters have written apart."""
        if not (self.is_fused and self.engine.adds_parts and scatters):
            return OperatorSum()
        size = self.size
        numel = size.tokens * size.hidden + size.own_tokens * size.hidden
        return self.others(*[Work(0, size.item * numel)] * scatters)

    def _beside(self, beside: Beside, index: int, product: OperatorSum, kind: str) -> OperatorSum:
        """Return a fused product that has fewer processors than there are, the others being its exchange's."""
        num, links = self.machine.num_processors, self.exchange_seconds
        kept = beside.kept[index] if kind == "forward" else 0
        by_kind = {"input_gradient": beside.lent_by_inputs, "weight_gradient": beside.lent_by_weights}
        lent = by_kind[kind][index] if kind in by_kind else 0
        if not num or num <= max(kept, lent):
            return product
        slower = product.operators * kept / (num - kept) + min(links, product.operators) * lent / (num - lent)
        behind = max(0.0, links / beside.num_splits - product.exchanges) if kept else 0.0
        return product + OperatorSum(slower, behind)

    def _side_by_side(self, columns: tuple[int, ...], exchanges: int, kind: str) -> OperatorSum:
        """Return products of one input, which is exchanged once; the gradients of that input are added one by one."""
        sums = kind == "input_gradient" and len(columns) > 1
        behind = exchanges if sums and self.is_fused and self.engine.adds_parts else 0
        products = [self.by_columns(of, (exchanges - behind) * (not index), kind) for index, of in enumerate(columns)]
        if behind:
            products.append(OperatorSum(exchanges=behind * self.ring_seconds))
        if sums:
            added = Work(0, 3 * self.size.tokens * self.size.hidden * self.size.item)
            products.append(self.others(*[added] * (len(columns) - 1)))
        return sum(products, OperatorSum())


class EngineAttention:
    """Attention by a kernel of a known share of the peak, by a kernel each step, or in a ring; of whole sequences.

    Args:
        operators: of the rank.
    """

    def __init__(self, operators: EngineOperators) -> None:
        self.operators, self.batch = operators, operators.size.batch
        self.machine, self.size, self.dtype = operators.machine, operators.size, operators.dtype
        self.engine, self.context = operators.engine, operators.engine.context_ranks

    def attend(self, *, backward: bool = False) -> OperatorSum:
        """Return the attention of one block, or its gradient; no published model that is modelled has a window."""
        size, copied = self.size, self._heads_copied(backward=backward)
        if self.engine.keeps_scores:
            return copied + self._attend_in_memory(backward=backward)
        pairs, seq = None, size.seq
        if self.context > 1:
            pairs = self.batch * visible_pairs([size.seq]) // self.context
            # Each step of the ring attends to one rank's keys.
            seq = max(1, seq // self.context)
            copied += self._ring_steps(backward=backward)
        work = (attention_backward_work if backward else attention_work)(
            self.batch, size.seq, size.heads, size.kv_heads, size.head_size, size.item, causal_half=True, pairs=pairs
        )
        kernel, name = self._kernel(seq, backward=backward), "attention_backward" if backward else "attention"
        seconds = kernel.attention_seconds(work, self.dtype, seq=seq, name=name)
        ring = self._ring(seconds, backward=backward) if self.context > 1 else 0.0
        return copied + OperatorSum(seconds, ring, 1)

    def _kernel(self, seq: int, *, backward: bool) -> Machine:
        """Return the machine whose attention attains what the engine's kernel does, if that is known."""
        flash = self.engine.flash
        if flash is None:
            return self.machine
        share = flash.share(seq, self.size.head_size, backward=backward)
        return replace(self.machine, attention=Curve.flat(share), attention_gradient=1.0)

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
