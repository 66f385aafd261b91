"""Which operators the actions of a chunk have, and so what each action takes. No torch.

Backward is an input half and a weight half; before them runs what is computed again. Operators are summed by blocks and
ends, which most chunks have in common.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpkernels.work import Work

from tpengine.architectures.description import Half
from tpengine.architectures.norm import Norm
from tpengine.architectures.part import Kernel, Operator, Product, Sizes
from tpengine.architectures.registry import architecture_of, layer_halves, layers_are_alike
from tpengine.config import ModelConfig
from tpengine.layout.groups import first_trained, trains_head, trains_lookup
from tpengine.plan import Chunk, Gathered, Kind, Recompute
from tpengine.planner.modelled.operators import ActionSeconds, KnownSums, Operators, OperatorSum
from tpengine.planner.modelled.trained import trained_products


class ChunkActions:
    """One chunk's actions on one tp rank.

    Args:
        operators: of the rank.
        model: its layers, of which the blocks are made.
        chunk: its layers, with what it recomputes and gathers again.
        is_first, is_last: which ends of the model it holds.
        known: what chunks of one configuration, tp and machine have in common, kept from chunk to chunk.
        frozen: names of frozen parameters.
    """

    def __init__(
        self,
        operators: Operators,
        model: ModelConfig,
        chunk: Chunk,
        is_first: bool,
        is_last: bool,
        known: KnownSums,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        self.operators, self.known = operators, known
        self.chunk, self.is_first, self.is_last = chunk, is_first, is_last
        self.model_ends = architecture_of(model).ends(model)
        size = operators.size
        layers = range(*chunk.layers)

        def halves_of(layer: int) -> tuple[TimedHalf, ...]:
            halves = layer_halves(model, layer)
            return tuple(timed(half, size, trained_products(half, size, layer, frozen)) for half in halves)

        self.blocks: Counter[tuple[TimedHalf, ...]]
        if layers and not frozen and layers_are_alike(model):
            self.blocks = self.trained_blocks = Counter({halves_of(layers[0]): len(layers)})
        else:
            # Blocks of the same operators are alike, however far their parts could see.
            blocks = {layer: halves_of(layer) for layer in layers}
            first = first_trained(model, frozen)
            self.blocks = Counter(blocks.values())
            # Those that backward comes to.
            self.trained_blocks = Counter(halves for layer, halves in blocks.items() if layer >= first)
        self.looks_up = self.is_first and trains_lookup(model, frozen)
        self.trains_head = trains_head(model, frozen)
        gathers_again = chunk.gathered is Gathered.AGAIN and size.own_tokens < size.tokens
        # Exchanges of the weight half: of the inputs of column-parallel products, and, in W, of dy of the others.
        self.columns_again = int(gathers_again)
        # Blocks of which backward computes a part again begin with a sum that is made.
        begins_whole = chunk.recompute in (Recompute.ATTENTION, Recompute.BLOCK)
        self.leaves_sums = operators.leaves_sums and not begins_whole

    def by_kind(self) -> Mapping[Kind, ActionSeconds]:
        """Return F; I with what is computed again; W; B, which is I and W without gathering dy a second time."""
        blocks, _ = self._forward_of_blocks(self.blocks)
        forward = blocks + self._once(self.ends)
        trained, first = self._forward_of_blocks(self.trained_blocks)
        again = self.again(first, trained, forward)
        inputs = self.each_block(self.input_half_of_block) + self._once(self.input_half_of_ends)
        weights, nothing = self._weight_half(0), OperatorSum()
        unpacked = self.unpacked_weights()
        return {
            Kind.F: self._action(forward + unpacked, nothing),
            Kind.B: self._action(inputs + weights + unpacked, again),
            Kind.I: self._action(inputs + unpacked, again),
            Kind.W: self._action(self._weight_half(self.columns_again), nothing),
        }

    def _forward_of_blocks(self, of: Counter[tuple[TimedHalf, ...]]) -> tuple[OperatorSum, OperatorSum]:
        """Return forward of blocks, and of what `recompute attention` repeats: half by half, each of all blocks."""
        blocks, again = OperatorSum(), OperatorSum()
        for place in range(max(map(len, of), default=0)):
            of_half: Counter[TimedHalf] = Counter()
            for halves, number in of.items():
                if place < len(halves):
                    of_half[halves[place]] += number
            for half, number in of_half.items():
                taken = self._once(self.later_half if place else self.first_half, half) * number
                blocks += taken
                again += taken if half.is_computed_again else OperatorSum()
        return blocks, again

    @property
    def num_blocks(self) -> int:
        """Return the number of the chunk's blocks."""
        return self.blocks.total()

    def _action(self, sums: OperatorSum, again: OperatorSum) -> ActionSeconds:
        machine, number = self.operators.machine, sums.number + again.number
        kernels = sums.operators + again.operators + sums.exchanges + again.exchanges
        host = machine.host_s_per_action + number * machine.host_s_per_operator
        exposed = max(0.0, host - kernels) if machine.is_asynchronous else host
        return ActionSeconds(sums.operators, again.operators, sums.exchanges + again.exchanges, exposed)

    def each_block(self, operators: Callable[..., OperatorSum], *of: object) -> OperatorSum:
        """Return what operators of a block's backward, which depend on its halves, take for the chunk's blocks."""
        total = OperatorSum()
        for halves, number in self.trained_blocks.items():
            total += self._once(operators, halves, *of) * number
        return total

    def _once(self, operators: Callable[..., OperatorSum], *of: object) -> OperatorSum:
        """Return what operators take, which are worked out once for all chunks that have them alike."""
        ends = self.is_first, self.is_last
        key = (operators.__name__, *of, self.operators.shards, self.columns_again, *ends, self.leaves_sums)
        if key not in self.known:
            self.known[key] = operators(*of)
        return self.known[key]

    def again(self, attention: OperatorSum, blocks: OperatorSum, forward: OperatorSum) -> OperatorSum:
        """Return what backward computes again: nothing, or parts of forward."""
        return {
            Recompute.NONE: OperatorSum(),
            Recompute.ATTENTION: attention,
            Recompute.BLOCK: blocks,
            Recompute.FULL: forward,
        }[self.chunk.recompute]

    def unpacked_weights(self) -> OperatorSum:
        """Return what gathered weights take before each use: nothing, as products read them where they arrive."""
        return OperatorSum()

    def first_half(self, half: TimedHalf) -> OperatorSum:
        """Return a block's first half forward, from its norm to what it adds."""
        operators = self.operators
        total = operators.norm(half.norm, residual=self.leaves_sums)
        for operator in half.forward:
            taken = operators.operator(operator)
            total += taken + operators.tree() if _adds_up(operator) else taken
        return total

    def later_half(self, half: TimedHalf) -> OperatorSum:
        """Return another half of a block forward; its norm adds the residual, too."""
        operators, total = self.operators, OperatorSum()
        for product in half.products:
            total += operators.product(product, 1)
        for product in half.products:
            total += operators.tree() if _adds_up(product) else OperatorSum()
        total += operators.norm(half.norm, residual=True)
        for operator in half.others:
            total += operators.operator(operator)
        return total + self._added()

    def _added(self) -> OperatorSum:
        """Return a block's addition that is no norm's: of x, or of its gradients."""
        return OperatorSum() if self.leaves_sums else self.operators.added()

    def input_half_of_block(self, halves: tuple[TimedHalf, ...]) -> OperatorSum:
        """Return the input half of a block's backward."""
        operators, total = self.operators, OperatorSum()
        for operator in halves[0].backward:
            total += operators.operator(operator)
        for place, half in enumerate(halves):
            total += operators.norm(half.norm, residual=place > 0 or self.leaves_sums, backward=True)
        for half in halves[1:]:
            for operator in half.backward:
                total += operators.operator(operator)
        total += self._added()
        products = [product for half in halves for product in half.products]
        for product in products:
            total += operators.product(product, 1, "input_gradient")
        return total + operators.tree() * sum(product.cut == "columns" for product in products)

    def _weight_half(self, rows_again: int) -> OperatorSum:
        return self.each_block(self.weight_half_of_block, rows_again) + self._once(self._weight_half_of_ends)

    def weight_half_of_block(self, halves: tuple[TimedHalf, ...], rows_again: int) -> OperatorSum:
        """Return the weight half of a block's backward, whose products add to the gradients of other micro-batches."""
        total = OperatorSum()
        for product in (product for half in halves for product in half.trained_products):
            exchanges = self.columns_again if product.cut == "columns" else rows_again
            total += self.operators.product(product, exchanges, "weight_gradient")
        return total

    def ends(self) -> OperatorSum:
        """Return lookup before the first block; norm, logits and loss behind the last."""
        operators, ends, size, total = self.operators, self.model_ends, self.operators.size, OperatorSum()
        if self.is_first:
            total += operators.operator(ends.lookup(size))
        if self.is_last:
            total += operators.product(ends.head(size), 1)
            total += operators.norm(ends.norm)
            total += operators.operator(ends.loss(size))
        return total

    def input_half_of_ends(self) -> OperatorSum:
        """Return the gradients of logits, of the last norm's output and of the looked-up rows."""
        operators, ends, size, total = self.operators, self.model_ends, self.operators.size, OperatorSum()
        if self.looks_up:
            total += operators.operator(ends.lookup_exchange(size))
        if self.is_last:
            total += operators.product(ends.head(size), 1, "input_gradient")
            total += operators.norm(ends.norm, backward=True)
            total += operators.operator(ends.loss(size, backward=True))
        return total

    def _weight_half_of_ends(self) -> OperatorSum:
        operators, ends, total = self.operators, self.model_ends, OperatorSum()
        if self.looks_up:
            total += operators.operator(ends.lookup_backward(operators.size))
        if self.is_last and self.trains_head:
            total += operators.product(ends.head(operators.size), self.columns_again, "weight_gradient")
        return total


@dataclass(frozen=True)
class TimedHalf:
    """A part's operators on a rank, with its norm: all that its time depends on.

    Attributes:
        norm: of its input.
        forward, backward: its operators; backward's without the two gradients of each product.
        is_computed_again: whether `recompute attention` repeats it.
        trained: for each product, whether one of its weights is trained; empty for all.
    """

    norm: Norm
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    is_computed_again: bool
    trained: tuple[bool, ...] = ()

    @property
    def products(self) -> tuple[Product, ...]:
        """Its products with weights."""
        return tuple(operator for operator in self.forward if isinstance(operator, Product))

    @property
    def trained_products(self) -> tuple[Product, ...]:
        """Those whose weights get a gradient."""
        return tuple(itertools.compress(self.products, self.trained)) if self.trained else self.products

    @property
    def others(self) -> tuple[Operator, ...]:
        """The rest of its forward."""
        return tuple(operator for operator in self.forward if not isinstance(operator, Product))


@functools.lru_cache(maxsize=4096)
def timed(half: Half, size: Sizes, trained: tuple[bool, ...] = ()) -> TimedHalf:
    """Return the operators of a half, of which those products are trained. Output norms take no time."""
    part, elements = half.part, size.own_tokens * size.hidden
    scale = (Kernel("", Work(elements, 2 * elements * size.item)),) if part.residual_scale != 1.0 else ()
    return TimedHalf(
        half.norm,
        (*part.forward(size), *scale),
        (*scale, *part.backward_operators(size)),
        part.is_computed_again,
        trained,
    )


def _adds_up(operator: Operator) -> bool:
    """Return whether a forward's outputs are partial sums."""
    return isinstance(operator, Product) and operator.cut == "inner"
