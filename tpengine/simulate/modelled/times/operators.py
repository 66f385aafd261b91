"""The operators of a chunk's actions, and what they take on a machine: computing, exchanging, starting. No torch.

An exchange belongs to the operator that gathers its input or scatters its output. Where they are fused, both take the
longer of their times; else their sum. So an action knows which part of it is an exposed exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
from tpengine.plan import Chunk, Gathered, Kind, Recompute
from tpengine.simulate.machine import Machine
from tpengine.simulate.modelled.engines.engine import Beside, Engine, num_logits, sizes_for
from tpengine.simulate.modelled.held.prepared import prepares
from tpengine.simulate.modelled.times.packed import Packed

# Per logit of a loss in float32, beside what cross_entropy_work counts: copied (2 + 4), maximum (4), difference (8),
# exponential (8), sum (4), quotient (8). Of its gradient: product (8), copied back (4 + 2).
_WIDE_LOSS_BYTES, _WIDE_LOSS_GRADIENT_BYTES = 36, 10


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
class _Sum:
    """Operators that run one after another: their seconds, those of exposed exchanges, and their number."""

    operators: float = 0.0
    exchanges: float = 0.0
    number: int = 0

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(self.operators + other.operators, self.exchanges + other.exchanges, self.number + other.number)

    def __mul__(self, times: int) -> _Sum:
        return _Sum(self.operators * times, self.exchanges * times, self.number * times)


# What blocks and ends take, by what they depend on: chunks of one configuration have them in common.
Sums = dict[tuple[object, ...], _Sum]


class ChunkOperators:
    """One chunk's actions on one tp rank.

    Args:
        config, tp, machine: sizes, the number of tensor-parallel ranks, rates.
        chunk: its layers, with what it recomputes and gathers again.
        is_first, is_last: which ends of the model it holds.
        engine: what it does differently from ours.
        known: what chunks of this configuration, tp, machine and engine have in common, kept from chunk to chunk.
        shards: that the rank computes one after another, in exact mode; 0 in fast mode.
        packed: the documents of micro-batches, where attention does not cross them.
    """

    def __init__(
        self,
        config: Config,
        tp: int,
        machine: Machine,
        chunk: Chunk,
        is_first: bool,
        is_last: bool,
        engine: Engine,
        known: Sums,
        shards: int = 0,
        packed: Packed | None = None,
    ) -> None:
        self.known = known
        # Shards that the rank computes one after another, in exact mode.
        self.shards, self.tp, self.packed = shards, tp, packed
        self.machine, self.chunk, self.is_first, self.is_last = machine, chunk, is_first, is_last
        self.engine, self.context = engine, engine.context_ranks
        self.size, self.batch = sizes_for(config, tp, engine), config.train.micro_batch_size
        # Rows between products.
        self.rows = self.size.own_tokens if engine.cuts_rows else self.size.tokens
        self.dtype, self.is_fused = config.train.dtype, config.parallel.tp_comm == "fused" and not shards
        size = self.size
        link = machine.link(tp, 1)
        exchanged = size.x * tp
        seconds = link.exchange_seconds(exchanged, tp) if self.is_fused else link.gather_seconds(exchanged, tp)
        self.exchange_seconds = seconds
        # What a fused matmul takes longer, where it was measured: nothing of that is hidden.
        self.fused_seconds = link.fused_seconds(exchanged, tp) if self.is_fused else None
        # Weights are converted once per step for the products of a CPU (Trainer); ZeRO's come and go.
        self.prepares = prepares(config, machine)
        parts = architecture_of(config.model).block(config.model, 0).values()
        self.rotates = any(part.rotates for part in parts if isinstance(part, Attention))
        windows = config.model.details.windows or (0,) * config.model.num_layers
        # Blocks that see equally far are alike: their number by window.
        self.windows = Counter(of if 0 < of < size.seq else None for of in windows[slice(*chunk.layers)])
        gathers_again = chunk.gathered is Gathered.AGAIN and size.own_tokens < size.tokens
        # Exchanges of the weight half: of the inputs of column-parallel products, and, in W, of dy of the others.
        self.columns_again = int(gathers_again)

    def by_kind(self) -> Mapping[Kind, ActionSeconds]:
        """Return F; I with what is computed again; W; B, which is I and W without gathering dy a second time."""
        attention = self._each_block(self._attention)
        mlp = self._once(self._mlp) * self.num_blocks
        forward = attention + mlp + self._once(self._ends)
        scores = self._each_block(self._scores_again) if self.engine.computes_scores_again else _Sum()
        if self.engine.computes_half_again:
            scores = self._half_again() * self.num_blocks
        again = {
            Recompute.NONE: scores,
            Recompute.ATTENTION: attention,
            Recompute.BLOCK: attention + mlp,
            Recompute.FULL: forward,
        }[self.chunk.recompute]
        inputs = self._each_block(self._input_half) + self._once(self._input_half_of_ends)
        weights = self._weight_half(0)
        copied = self._copied_out()
        return {
            Kind.F: self._action(forward + copied),
            Kind.B: self._action(inputs + weights + copied, again),
            Kind.I: self._action(inputs + copied, again),
            Kind.W: self._action(self._weight_half(self.columns_again)),
        }

    @property
    def num_blocks(self) -> int:
        return self.windows.total()

    @property
    def _block_numel(self) -> int:
        """Elements of a block's matrices."""
        size = self.size
        mixed = 2 * size.heads + 2 * size.kv_heads
        return size.hidden * (mixed * size.head_size + (size.num_gated + 1) * size.ffn)

    def _copied_out(self) -> _Sum:
        """Return the copy of gathered weights out of their buffer."""
        num_bytes = self.engine.copied_item * self._block_numel
        return self._others(Work(0, num_bytes)) * self.num_blocks if num_bytes else _Sum()

    def _action(self, sums: _Sum, again: _Sum = _Sum()) -> ActionSeconds:
        machine, number = self.machine, sums.number + again.number
        kernels = sums.operators + again.operators + sums.exchanges + again.exchanges
        host = machine.host_s_per_action + number * machine.host_s_per_operator
        exposed = max(0.0, host - kernels) if machine.is_asynchronous else host
        return ActionSeconds(sums.operators, again.operators, sums.exchanges + again.exchanges, exposed)

    def _each_block(self, operators: Callable[[int | None], _Sum]) -> _Sum:
        total = _Sum()
        for window, number in self.windows.items():
            total += self._once(operators, window) * number
        return total

    def _once(self, operators: Callable[..., _Sum], *of: object) -> _Sum:
        """Return what operators take, which are worked out once for all chunks that have them alike."""
        key = (operators.__name__, *of, self.shards, self.columns_again, self.is_first, self.is_last)
        if key not in self.known:
            self.known[key] = operators(*of)
        return self.known[key]

    def _matmul(self, rows: int, columns: int, inner: int, exchanges: int = 0, kind: str = "forward") -> _Sum:
        of = f"prepared_{kind}" if self.prepares and kind != "weight_gradient" else kind
        seconds = self.machine.product_seconds(rows, columns, inner, self.size.item, self.dtype, kind=of)
        return self._with_exchanges(seconds, exchanges)

    def _with_exchanges(self, seconds: float, exchanges: int) -> _Sum:
        """Return an operator with its exchanges, which overlap with it where they are fused."""
        if self.fused_seconds is not None:
            return _Sum(seconds, exchanges * self.fused_seconds, 1)
        links = exchanges * self.exchange_seconds
        return _Sum(seconds, max(0.0, links - seconds) if self.is_fused else links, 1)

    def _others(self, *works: Work, name: str = "") -> _Sum:
        return _Sum(sum(self.machine.other_seconds(work, self.dtype, name) for work in works), 0.0, len(works))

    def _added(self) -> _Sum:
        """Return the addition of a residual that no norm takes over, where its rate was measured."""
        elements = self.rows * self.size.hidden
        is_known = self.dtype in self.machine.measured and self.engine.joins_residuals
        return self._others(Work(elements, 3 * elements * self.size.item), name="add") if is_known else _Sum()

    def _products(self, exchanges: int, kind: str = "forward") -> tuple[_Sum, _Sum, _Sum, _Sum]:
        """Return a block's four products, each with as many exchanges: qkv, attention's output, gate and up, down."""
        size, engine = self.size, self.engine
        mixed, keys = size.heads * size.head_size, size.kv_heads * size.head_size
        packed = (mixed, keys, keys) if engine.splits_heads else (mixed + 2 * keys,)
        gated = (size.ffn,) * size.num_gated if engine.splits_gate else (size.num_gated * size.ffn,)
        qkv, output = self._side_by_side(packed, exchanges, kind), self._by_rows(mixed, exchanges, kind)
        gate_up, down = self._side_by_side(gated, exchanges, kind), self._by_rows(size.ffn, exchanges, kind)
        if engine.beside is None or not self.is_fused:
            return qkv, output, gate_up, down
        return (
            self._beside(engine.beside, 0, qkv, kind),
            self._beside(engine.beside, 1, output, kind),
            self._beside(engine.beside, 2, gate_up, kind),
            self._beside(engine.beside, 3, down, kind),
        )

    def _beside(self, beside: Beside, index: int, product: _Sum, kind: str) -> _Sum:
        """Return a fused product that has fewer processors than there are, the others being its exchange's."""
        num, links = self.machine.num_processors, self.exchange_seconds
        kept = beside.kept[index] if kind == "forward" else 0
        by_kind = {"input_gradient": beside.lent_by_inputs, "weight_gradient": beside.lent_by_weights}
        lent = by_kind[kind][index] if kind in by_kind else 0
        if not num or num <= max(kept, lent):
            return product
        slower = product.operators * kept / (num - kept) + min(links, product.operators) * lent / (num - lent)
        behind = max(0.0, links / beside.num_splits - product.exchanges) if kept else 0.0
        return product + _Sum(slower, behind)

    def _side_by_side(self, columns: tuple[int, ...], exchanges: int, kind: str) -> _Sum:
        """Return products of one input, which is exchanged once; the gradients of that input are added one by one."""
        products = [self._by_columns(of, exchanges * (not index), kind) for index, of in enumerate(columns)]
        if kind == "input_gradient" and len(columns) > 1:
            added = Work(0, 3 * self.size.tokens * self.size.hidden * self.size.item)
            products.append(self._others(*[added] * (len(columns) - 1)))
        return _total(products)

    def _by_columns(self, columns: int, exchanges: int, kind: str = "forward") -> _Sum:
        """Return a product whose columns the ranks share, and in exact mode the shards of a rank."""
        size, num = self.size, max(1, self.shards)
        if num == 1:
            return self._matmul(size.tokens, columns, size.hidden, exchanges, kind)
        once = self._matmul(size.tokens, -(-columns // num), size.hidden, 0, kind)
        return once * num + _Sum(exchanges=exchanges * self.exchange_seconds)

    def _by_rows(self, inner: int, exchanges: int, kind: str = "forward") -> _Sum:
        """Return a product whose inner dimension is shared: its outputs are partial sums."""
        size, num = self.size, max(1, self.shards)
        if num == 1:
            return self._matmul(size.tokens, size.hidden, inner, exchanges, kind)
        once = self._matmul(size.tokens, size.hidden, -(-inner // num), 0, kind)
        return once * num + _Sum(exchanges=exchanges * self.exchange_seconds)

    def _tree(self) -> _Sum:
        """Return what a scatter of partial sums [T, D] takes longer in exact mode: it is wide, and adds in a tree.

        A rank reads two and writes one for each sum of its own shards, and of the ranks' sums for its tokens.
        """
        if not self.shards:
            return _Sum()
        size, elements = self.size, self.size.tokens * self.size.hidden
        num_sums = (self.shards - 1) + (self.tp - 1) / self.tp
        added = Work(int(num_sums * elements), int(num_sums * 3 * elements * size.wide))
        return self._others(added) + _Sum(exchanges=(size.wide / size.item - 1) * self.exchange_seconds)

    def _attend(self, window: int | None, *, backward: bool) -> _Sum:
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
        return copied + _Sum(seconds, ring, 1)

    def _dropped(self) -> _Sum:
        """Return what follows a row-parallel product: bias, dropout and the residual's addition in one kernel."""
        if self.engine.joins_residuals:
            return _Sum()
        elements = self.rows * self.size.hidden
        return self._others(Work(elements, elements * (3 * self.size.item + self.engine.drops)))

    def _norms_again(self) -> _Sum:
        """Return the gradients of two norms' weights, for which input and output's gradient are read once more."""
        work = Work(0, 2 * self.rows * self.size.hidden * self.size.item)
        return self._others(work, work) if self.engine.reads_norms_twice else _Sum()

    def _wide_loss(self, bytes_per_logit: int) -> tuple[Work, ...]:
        logits = num_logits(self.size, self.engine)
        return (Work(logits, logits * bytes_per_logit),) if self.engine.wide_loss else ()

    def _gathered_logits(self) -> _Sum:
        """Return the exchange of logits among ranks that each compute the whole loss."""
        logits = num_logits(self.size, self.engine)
        if not self.engine.whole_logits or self.tp == 1:
            return _Sum()
        gathered = self.machine.link(self.tp, 1).gather_seconds(logits * self.size.item, self.tp)
        # Copied apart, and joined along the vocabulary.
        return _Sum(exchanges=gathered) + self._others(Work(0, 4 * self.size.item * logits))

    def _attend_in_memory(self, *, backward: bool) -> _Sum:
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
        return _Sum(products * product, 0.0, products) + self._others(softmax, *[dropout] * self.engine.drops)

    def _heads_copied(self, *, backward: bool) -> _Sum:
        size = self.size
        numel = (size.queries + 2 * size.keys + size.queries) * (1 + backward)
        return self._others(Work(0, 2 * numel * size.item)) if self.engine.copies_heads else _Sum()

    def _ring_steps(self, *, backward: bool) -> _Sum:
        """Return what a ring's steps read and write besides: results that are added step by step, keys side by side."""
        size, num = self.size, self.context
        # Of each step's result and of the sum: two read, one written. Forward adds outputs, which begin as zeros; then
        # come the gradients of queries, keys and values.
        queries = size.queries * size.item * (3 * num if backward else 3 * num + 1)
        keys = 2 * size.keys * size.item * (3 * num if backward else 2)
        return self._others(*[Work(0, queries // num)] * num, Work(0, keys))

    def _ring(self, seconds: float, *, backward: bool) -> float:
        """Return what a ring's messages take longer than the attention that hides them."""
        size, num = self.size, self.context
        keys = 2 * size.keys * size.item * (1 + backward)
        link = self.machine.link(num, max(1, round(size.tokens / max(1, size.own_tokens))))
        return max(0.0, (num - 1) * link.message_seconds(keys) - seconds * (num - 1) / num)

    def _rope(self, *, backward: bool = False) -> _Sum:
        size = self.size
        if not self.rotates:
            return _Sum()
        work = rope_work(size.tokens, size.heads + size.kv_heads, size.head_size, size.item)
        return self._others(work, name="rope_backward" if backward else "rope")

    def _scores_again(self, window: int | None) -> _Sum:
        return self._attend(window, backward=False)

    def _steps(self, *, norms: int, backward: bool) -> _Sum:
        """Return what kernels for single steps read and write more: of norms, a rotation and a gate."""
        size, works, steps = self.size, [], self.engine.steps
        if steps is None:
            return _Sum()
        num_rows = self.rows * size.hidden
        of_norm = steps.norm_backward if backward else steps.norm
        if of_norm:
            works += [Work(0, num_rows * of_norm)] * norms
        if self.rotates:
            each = steps.rotation_backward if backward else steps.rotation
            works += [Work(0, (size.queries + size.keys) * each)] * (each > 0)
        if size.num_gated > 1:
            each = steps.gate_backward if backward else steps.gate
            works += [Work(0, size.middle * each)] * (each > 0)
        if backward and self.engine.joins_heads:
            works.append(Work(0, 2 * (size.queries + 2 * size.keys) * size.item))
        return self._others(*works)

    def _half_again(self) -> _Sum:
        """Return what selective checkpointing by operator computes again of one block.

        Of the products q, k, v, attention's output, gate, up, down every second is: k, attention's output, up. Gathers
        are made again, scatters and attention are not.
        """
        size = self.size
        norms = [norm_work(self.rows, size.hidden, size.item, residual=of) for of in (False, True)]
        activation = activation_work(size.tokens, size.ffn, size.item, gated=size.num_gated > 1)
        return _total(
            [
                self._others(*norms, name="norm"),
                self._by_columns(size.kv_heads * size.head_size, 1),
                self._rope(),
                self._by_rows(size.heads * size.head_size, 0),
                self._by_columns(size.ffn, 1),
                self._others(activation, name="activation"),
                self._steps(norms=2, backward=False),
            ]
        )

    def _attention(self, window: int | None) -> _Sum:
        size = self.size
        qkv, output, _, _ = self._products(1)
        norm = self._others(norm_work(self.rows, size.hidden, size.item), name="norm")
        output += self._tree()
        return norm + qkv + self._rope() + self._attend(window, backward=False) + output + self._dropped()

    def _mlp(self) -> _Sum:
        size = self.size
        _, _, gate_up, down = self._products(1)
        return (
            gate_up
            + down
            + self._tree()
            + self._others(
                norm_work(self.rows, size.hidden, size.item, residual=self.engine.joins_residuals), name="norm"
            )
            + self._others(
                activation_work(size.tokens, size.ffn, size.item, gated=size.num_gated > 1), name="activation"
            )
            + self._dropped()
            + self._added()
            + self._steps(norms=2, backward=False)
        )

    def _input_half(self, window: int | None) -> _Sum:
        size = self.size
        total = (
            self._rope(backward=True)
            + self._attend(window, backward=True)
            + self._others(
                norm_backward_work(self.rows, size.hidden, size.item),
                norm_backward_work(self.rows, size.hidden, size.item, residual=True),
                name="norm_backward",
            )
            + self._others(
                activation_backward_work(size.tokens, size.ffn, size.item, gated=size.num_gated > 1),
                name="activation_backward",
            )
            + self._dropped() * 2
            + self._added()
            + self._norms_again()
            + self._steps(norms=2, backward=True)
        )
        if self.engine.reduces_gate_apart and size.num_gated > 1:
            # A second sum of ranks, as two exchanges.
            total += _Sum(exchanges=2 * self.exchange_seconds * (not self.engine.cuts_rows))
        return _total([total, *self._products(1, "input_gradient"), self._tree() * 2])

    def _weight_half(self, rows_again: int) -> _Sum:
        of_blocks = self._once(self._weight_half_of_block, rows_again) * self.num_blocks
        return of_blocks + self._once(self._weight_half_of_ends)

    def _weight_half_of_block(self, rows_again: int) -> _Sum:
        qkv, _, gate_up, _ = self._products(self.columns_again, "weight_gradient")
        _, output, _, down = self._products(rows_again, "weight_gradient")
        block, added = _total([qkv, output, gate_up, down]), self.engine.added_item
        if added:
            block += self._others(Work(self._block_numel, added * self._block_numel))
        return block

    def _weight_half_of_ends(self) -> _Sum:
        size, ends = self.size, _Sum()
        if self.is_first:
            ends += self._others(
                embedding_backward_work(size.tokens, size.vocab, size.hidden, size.item), name="embedding_backward"
            )
        if self.is_last:
            ends += self._by_columns(size.vocab, self.columns_again, "weight_gradient")
        return ends

    def _ends(self) -> _Sum:
        """Return lookup before the first block; norm, logits and loss behind the last."""
        size, total = self.size, _Sum()
        if self.is_first:
            work = embedding_work(size.tokens, size.hidden, size.item)
            seconds = self.machine.other_seconds(work, self.dtype, "embedding")
            total += self._with_exchanges(seconds, 1)
        if self.is_last:
            total += self._by_columns(size.vocab, 1)
            total += self._others(norm_work(self.rows, size.hidden, size.item), name="norm")
            total += self._others(cross_entropy_work(size.tokens, size.vocab, size.item), name="cross_entropy")
            total += self._gathered_logits() + self._others(*self._wide_loss(_WIDE_LOSS_BYTES))
        return total

    def _input_half_of_ends(self) -> _Sum:
        size = self.size
        # The embedding's gradient needs all tokens: a gather that no operator hides.
        total = _Sum(exchanges=self.exchange_seconds * self.is_first)
        if self.is_last:
            total += self._by_columns(size.vocab, 1, "input_gradient")
            total += self._others(norm_backward_work(self.rows, size.hidden, size.item), name="norm_backward")
            work = cross_entropy_gradient_work(size.tokens, size.vocab, size.item)
            total += self._others(work, name="cross_entropy_gradient")
            total += self._others(*self._wide_loss(_WIDE_LOSS_GRADIENT_BYTES))
        return total


def _total(sums: Iterable[_Sum]) -> _Sum:
    total = _Sum()
    for each in sums:
        total += each
    return total
