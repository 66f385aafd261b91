"""What a micro-batch holds on a chunk of the model, in bytes: what is kept, and what an action works with. No torch.

The first is a sum of formulas (bytes.py), the second the most that there is at once on a walk through the chunk
(working.py), less what is kept. What the plan counts is not counted here: a chunk's received input and the gradient of
its output are in slots (simulate/memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from tpengine.config import Config
from tpengine.plan import Chunk, Kind, Plan, Recompute
from tpengine.simulate import ChunkBytes
from tpengine.simulate.modelled.held.bytes import BlockBytes
from tpengine.simulate.modelled.held.working import (
    Ledger,
    backward_block,
    backward_head,
    forward_block,
    forward_head,
)


def activation_bytes(config: Config, tp: int, plan: Plan) -> dict[int, ChunkBytes]:
    """Return what a micro-batch of `config` holds, by chunk.

    Args:
        config: sizes, dtype, dropout rates.
        tp: number of tensor-parallel ranks; the bytes are those of one of them.
        plan: chunks, with what each recomputes and gathers again.
    """
    return dict(enumerate(bytes_of_chunks(config, tp, plan.chunks)))


def bytes_of_chunks(
    config: Config, tp: int, chunks: Sequence[Chunk], known: dict[object, ChunkBytes] | None = None
) -> tuple[ChunkBytes, ...]:
    """Return what a micro-batch holds on each chunk; chunks that are alike are walked through once.

    Args:
        config, tp: as for `activation_bytes`.
        chunks: of the whole model, in its order; their boundaries do not matter.
        known: what was found for this configuration and tp before, to be kept from call to call.
    """
    known = {} if known is None else known
    found = []
    for index in range(len(chunks)):
        walks = ChunkWalks(config, tp, chunks, index)
        if walks.kind not in known:
            known[walks.kind] = walks.bytes()
        found.append(known[walks.kind])
    return tuple(found)


class ChunkWalks:
    """One of a model's chunks, walked through; forward and backward return the ledger of the walk."""

    def __init__(self, config: Config, tp: int, chunks: Sequence[Chunk], index: int) -> None:
        chunk, last = chunks[index], len(chunks) - 1
        self.chunk: Chunk = chunk
        windows = config.model.details.windows or (0,) * config.model.num_layers
        kinds = {window: BlockBytes.of(config, tp, chunk.gathered, window=window) for window in {0, *windows}}
        self.blocks = [kinds[window] for window in windows[slice(*chunk.layers)]]
        self.block = kinds[0]  # for what all blocks have alike, and the ends
        self.is_first, self.is_last = index == 0, index == last
        # Where a neighbour is on the same rank, its tensor is handed over; else it is in a slot.
        self.has_input = index > 0 and chunks[index - 1].rank == chunk.rank
        self.has_gradient = index < last and chunks[index + 1].rank == chunk.rank
        self.in_slot = index > 0 and not self.has_input

    @property
    def kind(self) -> object:
        """What the bytes of chunks of one configuration depend on."""
        ends = self.is_first, self.is_last, self.has_input, self.has_gradient
        return (*ends, self.chunk.recompute, self.chunk.gathered, tuple(block.window for block in self.blocks))

    def bytes(self) -> ChunkBytes:
        block = self.block
        ends = (block.embedding if self.is_first else 0) + (block.head if self.is_last else 0) - self.in_slot * block.x
        saved = sum(of.saved(self.chunk.recompute) for of in self.blocks) + ends
        if self.chunk.recompute is Recompute.FULL:
            saved = self.has_input * block.x
        gradient_in_slot = not self.is_last and not self.has_gradient
        return ChunkBytes(
            saved=saved,
            deferred=len(self.blocks) * block.deferred
            + (block.deferred_embedding if self.is_first else 0)
            + (block.deferred_head if self.is_last else 0)
            - (block.output_gradient if gradient_in_slot else 0),
            working={
                Kind.F: self.forward(self.chunk.recompute).most - saved,
                Kind.B: self.backward(saved, defers=False).most - saved,
                Kind.I: self.backward(saved, defers=True).most - saved,
                Kind.W: self._largest_gradient(),
            },
        )

    def forward(self, recompute: Recompute) -> Ledger:
        """Walk through a forward, to the output or the loss; an input that is in no slot is held from the start."""
        block, held = self.block, Ledger()
        held.make(self.has_input * block.x)
        if self.is_first:
            held.make(block.embedding, block.x)
        for number, block in enumerate(self.blocks):
            forward_block(block, held, recompute)
            if recompute is Recompute.FULL and (number or self.is_first):
                held.free(block.x)
        if self.is_last:
            forward_head(block, held)
        return held

    def backward(self, saved: int, *, defers: bool) -> Ledger:
        """Walk through a backward, or its input half, from what forward has saved to the input's gradient."""
        block, recompute, held = self.block, self.chunk.recompute, Ledger(saved)
        if recompute is Recompute.FULL:
            # The whole chunk once more, from its input, which has been saved; its output is forgotten.
            again, kept = self.forward(Recompute.NONE), self.has_input * block.x
            held.briefly(again.most - kept)
            held.make(again.now - kept - (0 if self.is_last else block.x))
        held.make(self.has_gradient * block.x)
        if self.is_last:
            backward_head(block, held, defers=defers)
        for number in reversed(range(len(self.blocks))):
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
            held.free(block.x, block.embedding)
            held.make(defers * block.deferred_embedding)
        return held

    def _largest_gradient(self) -> int:
        block = self.block
        matrices = [block.hidden * block.heads * block.head_size, block.hidden * block.ffn]
        return block.weight_gradient(max(*matrices, self.is_last * block.hidden * block.vocab))
