"""What single operators take on a tp rank: products with their exchanges, and small kernels between them. No torch.

An exchange belongs to the operator that gathers its input or scatters its output. Where they are fused, both take the
longer of their times; else their sum. So an action knows which part of it is an exposed exchange. Attention is in
attention.py; which operators a chunk's actions have is in chunk.py.
"""

from __future__ import annotations

from tpkernels.work import (
    Work,
    activation_backward_work,
    activation_work,
    cross_entropy_gradient_work,
    cross_entropy_work,
    embedding_backward_work,
    embedding_work,
    norm_backward_work,
    norm_work,
    rope_work,
)

from tpengine.architectures.describe import Attention
from tpengine.architectures.registry import architecture_of
from tpengine.config import Config
from tpengine.simulate.machine import Machine
from tpengine.simulate.modelled.engines.engine import Beside, Engine, num_logits, sizes_for
from tpengine.simulate.modelled.held.prepared import prepares
from tpengine.simulate.modelled.times.sums import OperatorSum

# Per logit of a loss in float32, beside what cross_entropy_work counts: copied (2 + 4), maximum (4), difference (8),
# exponential (8), sum (4), quotient (8). Of its gradient: product (8), copied back (4 + 2).
_WIDE_LOSS_BYTES, _WIDE_LOSS_GRADIENT_BYTES = 36, 10


class Operators:
    """A tp rank's operators for one micro-batch; what an engine does not have takes nothing.

    Args:
        config, tp, machine: sizes, the number of tensor-parallel ranks, rates.
        engine: what it does differently from ours.
        shards: that the rank computes one after another, in exact mode; 0 in fast mode.
    """

    def __init__(self, config: Config, tp: int, machine: Machine, engine: Engine, shards: int = 0) -> None:
        self.tp, self.machine, self.engine, self.shards = tp, machine, engine, shards
        self.size = sizes_for(config, tp, engine)
        # Rows between products.
        self.rows = self.size.own_tokens if engine.cuts_rows else self.size.tokens
        self.dtype, self.is_fused = config.train.dtype, config.parallel.tp_comm == "fused" and not shards
        link = machine.link(tp, 1)
        exchanged = self.size.x * tp
        self.ring_seconds = link.gather_seconds(exchanged, tp)
        self.exchange_seconds = link.exchange_seconds(exchanged, tp) if self.is_fused else self.ring_seconds
        # What a fused matmul takes longer, where it was measured: nothing of that is hidden.
        self.fused_seconds = link.fused_seconds(exchanged, tp) if self.is_fused else None
        # Weights are converted once per step for the products of a CPU (Trainer); ZeRO's come and go.
        self.prepares = prepares(config, machine)
        parts = architecture_of(config.model).block(config.model, 0).values()
        self.rotates = any(part.rotates for part in parts if isinstance(part, Attention))

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

    def by_columns(self, columns: int, exchanges: int, kind: str = "forward") -> OperatorSum:
        """Return a product whose columns the ranks share, and in exact mode the shards of a rank.

        Args:
            columns: of this rank.
            exchanges: of the product.
            kind: forward, input_gradient or weight_gradient.
        """
        size, num = self.size, max(1, self.shards)
        if num == 1:
            added = self._parts_added(exchanges if kind == "input_gradient" else 0)
            return self._matmul(size.tokens, columns, size.hidden, exchanges, kind) + added
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
            added = self._parts_added(exchanges if kind == "forward" else 0)
            return self._matmul(size.tokens, size.hidden, inner, exchanges, kind) + added
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

    def norm(self, *, residual: bool = False, backward: bool = False) -> OperatorSum:
        """Return a norm, or its gradients; with `residual` of x and what it is added to."""
        work_of = norm_backward_work if backward else norm_work
        work = work_of(self.rows, self.size.hidden, self.size.item, residual=residual)
        return self.others(work, name="norm_backward" if backward else "norm")

    def norms_again(self) -> OperatorSum:
        """Return the gradients of two norms' weights, for which input and output's gradient are read once more."""
        work = Work(0, 2 * self.rows * self.size.hidden * self.size.item)
        return self.others(work, work) if self.engine.reads_norms_twice else OperatorSum()

    @property
    def knows_additions(self) -> bool:
        """Return whether the additions of residuals that no norm is known to make are counted: where a rate is."""
        return self.dtype in self.machine.measured and self.engine.joins_residuals

    @property
    def leaves_sums(self) -> bool:
        """Return whether a block's last sum is the next norm's (model/residual.py): ours on a GPU, in fast mode.

        On a CPU a norm makes it too, in a pass of its own.
        """
        return self.knows_additions and self.engine.is_ours and not self.shards and self.machine.is_asynchronous

    def added(self) -> OperatorSum:
        """Return the addition of a residual that no norm takes over, where its rate was measured."""
        elements = self.rows * self.size.hidden
        work = Work(elements, 3 * elements * self.size.item)
        return self.others(work, name="add") if self.knows_additions else OperatorSum()

    def dropped(self) -> OperatorSum:
        """Return what follows a row-parallel product: bias, dropout and the residual's addition in one kernel."""
        if self.engine.joins_residuals:
            return OperatorSum()
        elements = self.rows * self.size.hidden
        return self.others(Work(elements, elements * (3 * self.size.item + self.engine.drops)))

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
