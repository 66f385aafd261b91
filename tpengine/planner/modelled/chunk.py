"""Which operators the actions of a chunk have, and so what each action takes. No torch.

Backward is an input half and a weight half; before them runs what is computed again. Operators are summed by blocks and
ends, which most chunks have in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from tpengine.config import ModelConfig
from tpengine.plan import Chunk, Gathered, Kind, Recompute
from tpengine.planner.modelled.operators import ActionSeconds, AttentionOperators, KnownSums, Operators, OperatorSum


class ChunkActions:
    """One chunk's actions on one tp rank.

    Args:
        operators, attention: of the rank.
        model: which tokens its layers see.
        chunk: its layers, with what it recomputes and gathers again.
        is_first, is_last: which ends of the model it holds.
        known: what chunks of one configuration, tp and machine have in common, kept from chunk to chunk.
    """

    def __init__(
        self,
        operators: Operators,
        attention: AttentionOperators,
        model: ModelConfig,
        chunk: Chunk,
        is_first: bool,
        is_last: bool,
        known: KnownSums,
    ) -> None:
        self.operators, self.attention, self.known = operators, attention, known
        self.chunk, self.is_first, self.is_last = chunk, is_first, is_last
        size = operators.size
        windows = model.details.windows or (0,) * model.num_layers
        # Blocks that see equally far are alike: their number by window.
        self.windows = Counter(of if 0 < of < size.seq else None for of in windows[slice(*chunk.layers)])
        gathers_again = chunk.gathered is Gathered.AGAIN and size.own_tokens < size.tokens
        # Exchanges of the weight half: of the inputs of column-parallel products, and, in W, of dy of the others.
        self.columns_again = int(gathers_again)
        # Blocks of which backward computes a part again begin with a sum that is made.
        begins_whole = chunk.recompute in (Recompute.ATTENTION, Recompute.BLOCK)
        self.leaves_sums = operators.leaves_sums and not begins_whole

    def by_kind(self) -> Mapping[Kind, ActionSeconds]:
        """Return F; I with what is computed again; W; B, which is I and W without gathering dy a second time."""
        attention = self.each_block(self.attention_of_block)
        mlp = self._once(self.mlp_of_block) * self.num_blocks
        forward = attention + mlp + self._once(self.ends)
        again = self.again(attention, mlp, forward)
        inputs = self.each_block(self.input_half_of_block) + self._once(self.input_half_of_ends)
        weights, nothing = self._weight_half(0), OperatorSum()
        unpacked = self.unpacked_weights()
        return {
            Kind.F: self._action(forward + unpacked, nothing),
            Kind.B: self._action(inputs + weights + unpacked, again),
            Kind.I: self._action(inputs + unpacked, again),
            Kind.W: self._action(self._weight_half(self.columns_again), nothing),
        }

    @property
    def num_blocks(self) -> int:
        """Return the number of the chunk's blocks."""
        return self.windows.total()

    def _action(self, sums: OperatorSum, again: OperatorSum) -> ActionSeconds:
        machine, number = self.operators.machine, sums.number + again.number
        kernels = sums.operators + again.operators + sums.exchanges + again.exchanges
        host = machine.host_s_per_action + number * machine.host_s_per_operator
        exposed = max(0.0, host - kernels) if machine.is_asynchronous else host
        return ActionSeconds(sums.operators, again.operators, sums.exchanges + again.exchanges, exposed)

    def each_block(self, operators: Callable[[int | None], OperatorSum]) -> OperatorSum:
        """Return what operators of a block, which depend on its window, take for all blocks of the chunk."""
        total = OperatorSum()
        for window, number in self.windows.items():
            total += self._once(operators, window) * number
        return total

    def _once(self, operators: Callable[..., OperatorSum], *of: object) -> OperatorSum:
        """Return what operators take, which are worked out once for all chunks that have them alike."""
        ends = self.is_first, self.is_last
        key = (operators.__name__, *of, self.operators.shards, self.columns_again, *ends, self.leaves_sums)
        if key not in self.known:
            self.known[key] = operators(*of)
        return self.known[key]

    def again(self, attention: OperatorSum, mlp: OperatorSum, forward: OperatorSum) -> OperatorSum:
        """Return what backward computes again: nothing, or parts of forward."""
        return {
            Recompute.NONE: OperatorSum(),
            Recompute.ATTENTION: attention,
            Recompute.BLOCK: attention + mlp,
            Recompute.FULL: forward,
        }[self.chunk.recompute]

    def unpacked_weights(self) -> OperatorSum:
        """Return what gathered weights take before each use: nothing, as products read them where they arrive."""
        return OperatorSum()

    def attention_of_block(self, window: int | None) -> OperatorSum:
        """Return the attention half of a block forward, from its norm to what it adds."""
        operators = self.operators
        qkv, output, _, _ = operators.products(1)
        output += operators.tree()
        attended = self.attention.attend(window)
        norm = operators.norm(residual=self.leaves_sums)
        return norm + qkv + operators.rope() + attended + output

    def mlp_of_block(self) -> OperatorSum:
        """Return the feed-forward half of a block forward; its norm adds the residual, too."""
        operators = self.operators
        _, _, gate_up, down = operators.products(1)
        return (
            gate_up + down + operators.tree() + operators.norm(residual=True) + operators.activation() + self._added()
        )

    def _added(self) -> OperatorSum:
        """Return a block's addition that is no norm's: of x, or of its gradients."""
        return OperatorSum() if self.leaves_sums else self.operators.added()

    def input_half_of_block(self, window: int | None) -> OperatorSum:
        """Return the input half of a block's backward."""
        operators = self.operators
        between = (
            operators.rope(backward=True)
            + self.attention.attend(window, backward=True)
            + operators.norm(residual=self.leaves_sums, backward=True)
            + operators.norm(residual=True, backward=True)
            + operators.activation(backward=True)
            + self._added()
        )
        return sum((between, *operators.products(1, "input_gradient"), operators.tree() * 2), OperatorSum())

    def _weight_half(self, rows_again: int) -> OperatorSum:
        of_blocks = self._once(self.weight_half_of_block, rows_again) * self.num_blocks
        return of_blocks + self._once(self._weight_half_of_ends)

    def weight_half_of_block(self, rows_again: int) -> OperatorSum:
        """Return the weight half of a block's backward, whose products add to the gradients of other micro-batches."""
        operators = self.operators
        qkv, _, gate_up, _ = operators.products(self.columns_again, "weight_gradient")
        _, output, _, down = operators.products(rows_again, "weight_gradient")
        return sum((qkv, output, gate_up, down), OperatorSum())

    def ends(self) -> OperatorSum:
        """Return lookup before the first block; norm, logits and loss behind the last."""
        operators, total = self.operators, OperatorSum()
        if self.is_first:
            total += operators.lookup()
        if self.is_last:
            total += operators.by_columns(operators.size.vocab, 1)
            total += operators.norm()
            total += operators.cross_entropy()
        return total

    def input_half_of_ends(self) -> OperatorSum:
        """Return the gradients of logits, of the last norm's output and of the looked-up rows."""
        operators = self.operators
        # The embedding's gradient needs all tokens: a gather that no operator hides.
        total = OperatorSum(exchanges=operators.exchange_seconds * self.is_first)
        if self.is_last:
            total += operators.by_columns(operators.size.vocab, 1, "input_gradient")
            total += operators.norm(backward=True)
            total += operators.cross_entropy(backward=True)
        return total

    def _weight_half_of_ends(self) -> OperatorSum:
        operators, ends = self.operators, OperatorSum()
        if self.is_first:
            ends += operators.lookup_backward()
        if self.is_last:
            ends += operators.by_columns(operators.size.vocab, self.columns_again, "weight_gradient")
        return ends
