"""What a micro-batch holds on a chunk of the model, in bytes: what is kept, and what an action works with. No torch.

The first is a sum of what the parts of blocks and the ends say that they keep (architectures/part.py), the second the
most that there is at once on a walk through the chunk, less what is kept. What the plan counts is not counted here: a
chunk's received input and the gradient of its output are in slots (planner/memory.py).

They hold for fast mode on a CPU, for every architecture that is here. Saved is exact: the distinct storages that
autograd keeps between F and B, without weights, rope tables and the batch's tokens and labels, which many micro-batches
share. Deferred is exact too: the operands of the weight half. Exact mode and GPUs keep other tensors; for them these
figures are estimates.

The walk follows our layers on a CPU: their tensors in the order in which they make and free them. A part walks through
itself and tells a ledger what it makes and frees; here are the sums and norms around it. From the ledger comes the
most that there is at once; the tests hold both against each other. Left out are small tensors, of a number or two per
token, and the pieces in which tp ranks exchange.

With `defers` a backward is an input half: what the weight half needs stays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpengine.architectures.description import Half
from tpengine.architectures.norm import Norm
from tpengine.architectures.part import Ledger, Product, Sizes, num_kept
from tpengine.architectures.registry import architecture_of, layer_halves, layers_are_alike
from tpengine.config import Config
from tpengine.layout.groups import first_trained, frozen_of, trains_head, trains_lookup
from tpengine.layout.parameters import layer_specs
from tpengine.plan import Chunk, Kind, Plan, Recompute
from tpengine.planner import ChunkBytes
from tpengine.planner.modelled.trained import trained_products


@dataclass(frozen=True)
class BlockBytes:
    """What a micro-batch keeps in one block, in bytes.

    Attributes:
        s: sizes of the rank.
        halves: the block's.
        vectors: elements of its norms and biases on this rank.
        trained_vectors: of those that are not frozen.
        has_backward: whether it, or what is before it, has anything trained; else nothing is kept of it.
        trained: for each half and each of its products, whether one of its weights is trained; empty for all.
    """

    s: Sizes
    halves: tuple[Half, ...]
    vectors: int
    trained_vectors: int
    has_backward: bool = True
    trained: tuple[tuple[bool, ...], ...] = ()

    @classmethod
    def of(cls, s: Sizes, layer: int, frozen: frozenset[str] = frozenset()) -> BlockBytes:
        """Return those of a layer, of a model with frozen parameters of these names."""
        vectors = [spec for spec in layer_specs(s.model, s.tp, layer) if not spec.is_matrix]
        numel = sum(spec.local_numel(s.tp) for spec in vectors)
        trained = sum(spec.local_numel(s.tp) for spec in vectors if spec.name not in frozen)
        halves = layer_halves(s.model, layer)
        has_backward = layer >= first_trained(s.model, frozen)
        products = tuple(trained_products(half, s, layer, frozen) for half in halves)
        return cls(s, halves, numel, trained, has_backward, products if frozen else ())

    @property
    def least(self) -> BlockBytes:
        """A block whose parts keep as little as any of their kind."""
        return replace(self, halves=tuple(replace(half, part=half.part.least()) for half in self.halves))

    def half(self, place: int) -> int:
        """Return what one half keeps beside its input: what the norms and the part keep, a mask of dropout."""
        half, s = self.halves[place], self.s
        own = num_kept(half.norm.kept(s)) + num_kept(half.part.kept(s)) - self.reads_input(place) * s.gathered
        return own + s.residual_mask + self.behind(place)

    def behind(self, place: int) -> int:
        """Return what the norms of a half's output keep, if there are any: inputs [t, D] and statistics."""
        return sum(self.s.x + num_kept(norm.kept(self.s)) for norm in self.halves[place].behind)

    def saved(self, recompute: Recompute) -> int:
        """Return what a block keeps from F to B, including its input; FULL keeps nothing inside a chunk."""
        x = self.s.x
        if not self.has_backward:
            return 0
        match recompute:
            case Recompute.BLOCK:
                return x + self.decided
            case Recompute.FULL:
                return self.decided
        # The sum before a half is the block's input, or a tensor of its own.
        return sum(
            x * self.keeps_input(place, recompute) + (0 if self.is_again(place, recompute) else self.half(place))
            for place in range(len(self.halves))
        )

    @property
    def decided(self) -> int:
        """What its parts decide once, and keep also where they are computed again."""
        return sum(half.part.decided(self.s) for half in self.halves)

    def is_again(self, place: int, recompute: Recompute) -> bool:
        """Return whether a half alone is computed again."""
        return recompute is Recompute.ATTENTION and self.halves[place].part.is_computed_again

    def reads_input(self, place: int) -> bool:
        """Return whether what a half gathers is its input itself: without a norm before, where nothing is gathered."""
        s = self.s
        return not self.halves[place].norm.keeps_input and (s.own_tokens == s.tokens or not s.keeps_gathered)

    def keeps_input(self, place: int, recompute: Recompute) -> bool:
        """Return whether a half's input is kept: by its norm, by its product, or to be computed from again."""
        is_kept = self.halves[place].norm.keeps_input or self.reads_input(place)
        return is_kept or self.is_again(place, recompute)

    @property
    def output_gradient(self) -> int:
        """The part of `deferred` that is the gradient of the block's output itself, [t, D].

        It is another tensor with dropout, a norm or a scale of the output, or gathering. It has t rows where each rank
        has all tokens, or gathers again.
        """
        s = self.s
        has_all = (s.own_tokens == s.tokens or not s.keeps_gathered) and (not self.trained or self.trained[-1][-1])
        has_all = has_all and self.halves[-1].part.reads_output_gradient()
        return s.x if has_all and not s.residual_mask and not self.halves[-1].changes_output else 0

    @property
    def deferred(self) -> int:
        """What the weight half needs of a block: both operands of each product, and the vectors' gradients."""
        if not self.has_backward:
            return 0
        return self.all_deferred - self._frozen_operands

    @property
    def all_deferred(self) -> int:
        """What it would need if nothing were frozen."""
        own = sum(half.part.deferred(self.s) for half in self.halves)
        return own + sum(product.operands(self.s) for product in self._products()) + self.vectors * self.s.wide

    def _products(self) -> list[Product]:
        return [product for half in self.halves for product in half.part.products(self.s)]

    @property
    def _frozen_operands(self) -> int:
        """What frozen products and vectors leave out of `all_deferred`."""
        are_frozen = [not is_trained for half in self.trained for is_trained in half]
        frozen = itertools.compress(self._products(), are_frozen)
        vectors = (self.vectors - self.trained_vectors) * self.s.wide
        return sum(product.operands(self.s) for product in frozen) + vectors


def forward_block(block: BlockBytes, ledger: Ledger, recompute: Recompute, *, input_in_slot: bool = False) -> None:
    """Walk from a block's input, which is held already, to its output; keep what `recompute` says."""
    x, is_kept = block.s.x, recompute is Recompute.NONE
    whole = recompute in (Recompute.BLOCK, Recompute.FULL)
    for place, half in enumerate(block.halves):
        if place == 0:
            # What it adds stays until the block ends.
            _forward_half(block, place, ledger)
            ledger.make(x)
        else:
            ledger.make(x)
            _forward_half(block, place, ledger)
            # What it adds, and the output.
            ledger.briefly(2 * x)
        if not whole and not block.keeps_input(place, recompute):
            ledger.free(x * (place > 0 or not input_in_slot))
        if whole or (not is_kept and half.part.is_computed_again):
            ledger.free(block.half(place), (place > 0) * whole * x)
            ledger.make(half.part.decided(block.s))


def _forward_half(block: BlockBytes, place: int, ledger: Ledger) -> None:
    """Walk from a half's input to what it adds."""
    half, s = block.halves[place], block.s
    ledger.make(num_kept(half.norm.kept(s)))
    # It is the input, which is held already.
    ledger.free(block.reads_input(place) * s.gathered)
    half.part.forward_walk(s, ledger)
    ledger.briefly((half.part.residual_scale != 1.0) * 2 * s.x)
    ledger.make(s.residual_mask, block.behind(place))


class _HalfBackward:
    """A walk from the gradient of what a part adds to that of its norm's input: see BackwardWalk.

    Args:
        s: sizes of the rank.
        ledger: what is held.
        norm: of the part's input.
        changes_output: the gradient of the part's output stands beside the block's until the part has used it.
        defers: the weight half comes later: what it needs stays.
    """

    def __init__(self, s: Sizes, ledger: Ledger, norm: Norm, changes_output: bool, *, defers: bool) -> None:
        self.s, self.ledger, self.defers = s, ledger, defers
        self._norm, self._changes_output = norm, changes_output

    def weight_gradient(self, num_elements: int, *operands: int) -> None:
        """Add the gradient of a weight of so many elements and free its operands; later, if the half is deferred."""
        if not self.defers:
            self.ledger.briefly(self.s.weight_gradient(num_elements))
            self.ledger.free(*operands)

    def output_gradient_used(self) -> None:
        """Free the gradient that the norms behind the part, or its scale, have made."""
        self.ledger.free(self._changes_output * self.s.x)

    def norm(self) -> None:
        """Walk through the norm of the part's input, whose gradient takes the place of the gradient of its output."""
        self._norm.backward(self)


def backward_block(
    block: BlockBytes,
    ledger: Ledger,
    recompute: Recompute,
    *,
    defers: bool,
    input_in_slot: bool,
    gradient_in_slot: bool,
) -> None:
    """Walk from the gradient of a block's output to that of its input.

    Args:
        recompute: what is computed again first. With FULL that is done already.
        input_in_slot, gradient_in_slot: these lie in receive buffers, which are counted elsewhere.
    """
    s, last = block.s, len(block.halves) - 1
    if recompute is Recompute.BLOCK:
        forward_block(block, ledger, Recompute.NONE, input_in_slot=input_in_slot)
        ledger.free(s.x, block.decided)
    for place in range(last, -1, -1):
        half = block.halves[place]
        if recompute is Recompute.ATTENTION and half.part.is_computed_again:
            _forward_half(block, place, ledger)
            ledger.briefly(s.x)
        _backward_behind(block, place, ledger)
        # The part frees it as if it had gathered it.
        ledger.make(block.reads_input(place) * s.gathered)
        half.part.backward(_HalfBackward(s, ledger, half.norm, half.changes_output, defers=defers))
        if place > 0:
            # The sum before the half.
            ledger.free(s.x * block.keeps_input(place, recompute))
            # The gradient of the output goes, unless the second product needs it.
            keeps = defers and place == last and block.output_gradient > 0
            if place == last and not gradient_in_slot and not keeps:
                ledger.free(s.x)
            if defers and not keeps and half.part.reads_output_gradient():
                ledger.make(s.gathered)
    if defers:
        # Biases, norms of heads and of outputs; the input's gradient is the sum of two; one of them is an operand of
        # the weight half.
        of_inputs = sum(half.norm.num_vectors(s) for half in block.halves)
        ledger.make((block.vectors - of_inputs) * s.wide)
        ledger.make(block.halves[0].part.reads_output_gradient() * s.gathered)
        # What frozen weights do not need went when it had been used: here at the latest.
        ledger.free(block.all_deferred - block.deferred)
    ledger.free(s.x)
    if not input_in_slot:
        ledger.free(s.x * block.keeps_input(0, recompute))
    elif defers and block.reads_input(0):
        ledger.free(s.x)


def _backward_behind(block: BlockBytes, place: int, ledger: Ledger) -> None:
    """Walk through norms and scale of a half's output, if there are any: the gradient stands beside the block's."""
    s = block.s
    ledger.make(block.halves[place].changes_output * s.x)
    if block.halves[place].behind:
        ledger.briefly(s.x, 3 * s.widened(s.own_tokens * s.hidden))
        ledger.free(block.behind(place))


def activation_bytes(config: Config, tp: int, plan: Plan, load: float = 1.0) -> dict[int, ChunkBytes]:
    """Return what a micro-batch of `config` holds, by chunk.

    Args:
        config: sizes, dtype, dropout rates.
        tp: number of tensor-parallel ranks; the bytes are those of one of them.
        plan: chunks, with what each recomputes and gathers again.
        load: of the rank, as Sizes has it.
    """
    return dict(enumerate(bytes_of_chunks(config, tp, plan.chunks, load=load)))


def bytes_of_chunks(
    config: Config,
    tp: int,
    chunks: Sequence[Chunk],
    known: dict[object, ChunkBytes] | None = None,
    load: float = 1.0,
) -> tuple[ChunkBytes, ...]:
    """Return what a micro-batch holds on each chunk; chunks that are alike are walked through once.

    Args:
        config, tp: as for `activation_bytes`.
        chunks: of the whole model, in its order; their boundaries do not matter.
        known: what was found for this configuration, tp and load before, to be kept from call to call.
        load: as for `activation_bytes`.
    """
    known = {} if known is None else known
    found = []
    for index in range(len(chunks)):
        walks = ChunkWalks(config, tp, chunks, index, load)
        if walks.kind not in known:
            known[walks.kind] = walks.bytes()
        found.append(known[walks.kind])
    return tuple(found)


class ChunkWalks:
    """One of a model's chunks, walked through; forward and backward return the ledger of the walk."""

    def __init__(self, config: Config, tp: int, chunks: Sequence[Chunk], index: int, load: float = 1.0) -> None:
        chunk, last = chunks[index], len(chunks) - 1
        self.chunk: Chunk = chunk
        self.s, self.ends = (
            Sizes.of(config, tp, chunk.gathered, load=load),
            architecture_of(config.model).ends(config.model),
        )
        self.frozen = frozen_of(config)
        layers = range(*chunk.layers)
        if layers and not self.frozen and layers_are_alike(config.model):
            self.blocks = [BlockBytes.of(self.s, layers[0])] * len(layers)
        else:
            self.blocks = [BlockBytes.of(self.s, layer, self.frozen) for layer in layers]
        self.is_first, self.is_last = index == 0, index == last
        # Where a neighbour is on the same rank, its tensor is handed over; else it is in a slot.
        self.has_input = index > 0 and chunks[index - 1].rank == chunk.rank
        self.has_gradient = index < last and chunks[index + 1].rank == chunk.rank
        self.in_slot = index > 0 and not self.has_input
        self.looks_up = self.is_first and trains_lookup(config.model, self.frozen)
        # Whether backward comes to the chunk at all, and whether its first block keeps its input.
        self.has_backward = self.is_last or any(block.has_backward for block in self.blocks)
        self.keeps_first = not self.blocks or self.blocks[0].has_backward

    @property
    def kind(self) -> object:
        """What the bytes of chunks of one configuration depend on."""
        ends = self.is_first, self.is_last, self.has_input, self.has_gradient
        of_blocks = tuple(
            (block.halves, block.has_backward, block.trained, block.trained_vectors) for block in self.blocks
        )
        return (*ends, self.chunk.recompute, self.chunk.gathered, of_blocks)

    def bytes(self) -> ChunkBytes:
        s, ends = self.s, self.ends
        if not self.has_backward:
            return ChunkBytes(working={Kind.F: self.forward(Recompute.FULL).most})
        kept = self.looks_up * ends.kept_first(s) + self.is_last * ends.kept_last(s)
        # What lies in a slot is not counted here.
        is_block = self.chunk.recompute is Recompute.BLOCK
        keeps_input = not self.blocks or is_block or self.blocks[0].keeps_input(0, self.chunk.recompute)
        if self.in_slot and self.keeps_first and keeps_input:
            kept -= s.x
        # The stage keeps its input until its backward, though no block does.
        kept += (self.has_input and not self.keeps_first) * s.x
        saved = sum(of.saved(self.chunk.recompute) for of in self.blocks) + kept
        if self.chunk.recompute is Recompute.FULL:
            saved = self.has_input * s.x + sum(of.saved(Recompute.FULL) for of in self.blocks)
        deferred = sum(of.deferred for of in self.blocks)
        deferred += self.looks_up * ends.deferred_first(s) + self.is_last * self._deferred_last()
        deferred -= s.x * bool(self.in_slot and self.blocks and self.keeps_first and self.blocks[0].reads_input(0))
        gradient_in_slot = not self.is_last and not self.has_gradient
        return ChunkBytes(
            saved=saved,
            deferred=deferred - (self.blocks[-1].output_gradient if gradient_in_slot and self.blocks else 0),
            working={
                Kind.F: self.forward(self.chunk.recompute).most - saved,
                Kind.B: self.backward(saved, defers=False).most - saved,
                Kind.I: self.backward(saved, defers=True).most - saved,
                Kind.W: self._largest_gradient(),
            },
        )

    def _deferred_last(self) -> int:
        """Return what the weight half of the model's end needs, of what is trained there."""
        s, ends = self.s, self.ends
        frozen = ends.head(s).operands(s) * (not trains_head(s.model, self.frozen))
        return ends.deferred_last(s) - frozen - ends.norm.num_vectors(s) * s.wide * ("norm.weight" in self.frozen)

    def forward(self, recompute: Recompute) -> Ledger:
        """Walk through a forward, to the output or the loss; an input that is in no slot is held from the start."""
        s, held = self.s, Ledger()
        held.make(self.has_input * s.x)
        if self.is_first:
            held.make(self.ends.kept_first(s), s.x)
            held.free(self.ends.kept_first(s) * (not self.looks_up))
        for number, block in enumerate(self.blocks):
            of_block = recompute if block.has_backward else Recompute.FULL
            forward_block(block, held, of_block, input_in_slot=number == 0 and self.in_slot)
            if of_block is Recompute.FULL and (number or self.is_first):
                held.free(s.x)
        if self.is_last:
            self.ends.forward_last(s, held)
        return held

    def backward(self, saved: int, *, defers: bool) -> Ledger:
        """Walk through a backward, or its input half, from what forward has saved to the input's gradient."""
        s, recompute, held = self.s, self.chunk.recompute, Ledger(saved)
        if recompute is Recompute.FULL:
            # The whole chunk once more, from its input, which has been saved; its output is forgotten.
            again, kept = self.forward(Recompute.NONE), saved
            held.briefly(again.most - kept)
            held.make(again.now - kept - (0 if self.is_last else s.x))
        held.make(self.has_gradient * s.x)
        if self.is_last:
            self.ends.backward_last(_HalfBackward(s, held, self.ends.norm, False, defers=defers))
        for number in reversed(range(len(self.blocks))):
            if not self.blocks[number].has_backward:
                continue
            is_end = number == len(self.blocks) - 1 and not self.is_last
            backward_block(
                self.blocks[number],
                held,
                recompute,
                defers=defers,
                input_in_slot=number == 0 and self.in_slot,
                gradient_in_slot=is_end and not self.has_gradient,
            )
        if self.is_first:
            # Row numbers; the gradient of the rows has been added, or is what the weight half needs.
            held.free(s.x, self.looks_up * self.ends.kept_first(s))
            held.make(defers * self.looks_up * self.ends.deferred_first(s))
        return held

    def _largest_gradient(self) -> int:
        """Return the bytes of the largest weight's gradient on its way into the buffer."""
        s, layers = self.s, range(*self.chunk.layers)
        specs = [spec for layer in layers for spec in layer_specs(s.model, s.tp, layer, s.ep) if spec.is_matrix]
        # Stacked matrices get theirs one by one.
        sizes = [math.prod(spec.block(spec.ep or s.tp, 0)[1][-2:]) for spec in specs if spec.name not in self.frozen]
        return s.weight_gradient(max([*sizes, self.is_last * s.hidden * s.vocab], default=0))
