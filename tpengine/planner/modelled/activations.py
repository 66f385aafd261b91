"""What a micro-batch holds on a chunk of the model, in bytes: what is kept, and what an action works with. No torch.

The first is a sum of formulas (held.py), the second the most that there is at once on a walk through the chunk, less
what is kept. What the plan counts is not counted here: a chunk's received input and the gradient of its output are in
slots (planner/memory.py).

The walk follows our layers on a CPU: their tensors in the order in which they make and free them. Each function walks
through one part of the model, forward or backward, and tells a ledger what it makes and frees. From the ledger comes
the most that there is at once. The letters are those of held.py, where what is kept is a formula; the tests hold both
against each other. Left out are small tensors, of a number or two per token, and the pieces in which tp ranks exchange.

With `defers` a backward is an input half: what the weight half needs stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpengine.config import Config
from tpengine.plan import Chunk, Kind, Plan, Recompute
from tpengine.planner import ChunkBytes
from tpengine.planner.modelled.held import BlockBytes

# Attention's backward takes blocks of so many keys (tpkernels/ops/attention/host.py).
_KEYS_PER_BLOCK = 32
# Attention with a window, or of packed documents, takes so many queries (tpkernels/ops/attention/reference.py).
_QUERIES_PER_PIECE = 128
# The loss takes rows of so many logits at a time (tpkernels/ops/cross_entropy/operator.py).
_LOGITS_PER_BLOCK = 1 << 18


class Ledger:
    """Bytes held now, and at most so far.

    Args:
        now: what is held at the beginning.
    """

    def __init__(self, now: int = 0) -> None:
        self.now = self.most = now

    def make(self, *sizes: int) -> None:
        """Hold tensors of these sizes from now on."""
        self.now += sum(sizes)
        self.most = max(self.most, self.now)

    def free(self, *sizes: int) -> None:
        """Hold them no longer."""
        self.now -= sum(sizes)

    def briefly(self, *sizes: int) -> None:
        """Hold them all at once, and free them before anything else happens."""
        self.make(*sizes)
        self.free(*sizes)


def forward_block(block: BlockBytes, ledger: Ledger, recompute: Recompute) -> None:
    """Walk from a block's input, which is held already, to its output; keep what `recompute` says."""
    middle, mask = block.middle * block.item, block.drops_residual * block.own_tokens * block.hidden
    # Attention: its output stays until the block ends.
    _forward_attention(block, ledger)
    if recompute is not Recompute.NONE:
        ledger.free(block.attention)
    # Feed-forward: x + attended, gate and up, their product.
    ledger.make(block.x, block.norm, block.gathered, block.num_gated * middle)
    ledger.briefly(middle, (block.num_gated + 1) * block.widened(block.middle))
    ledger.make(middle, block.drops_mlp * block.middle, mask)
    # What it adds, and the output.
    ledger.make(block.normed_output)
    ledger.make(2 * block.x)
    ledger.free(2 * block.x)
    if recompute in (Recompute.BLOCK, Recompute.FULL):
        ledger.free(block.mlp)


def _forward_attention(block: BlockBytes, ledger: Ledger) -> None:
    """Walk from a block's input to what attention adds to it."""
    qkv = (block.queries + 2 * block.keys) * block.item
    ledger.make(block.norm, block.gathered, qkv)
    ledger.briefly(2 * block.widened(block.queries))
    ledger.make(block.normed_heads, block.attended)
    if block.is_windowed:
        ledger.briefly(block.widened(block.queries + 2 * block.keys), _scores_of_pieces(block))
    ledger.free(qkv)
    ledger.make(block.drops_residual * block.own_tokens * block.hidden, block.x, block.normed_output)


def forward_head(block: BlockBytes, ledger: Ledger) -> None:
    """Walk from the last block's output to the loss."""
    rows = min(block.tokens * block.vocab, _LOGITS_PER_BLOCK)
    ledger.make(block.norm, block.gathered, block.logits)
    ledger.briefly(rows * block.wide, block.widened(rows))
    ledger.make(block.head - block.x - block.norm - block.gathered - block.logits)


def backward_head(block: BlockBytes, ledger: Ledger, *, defers: bool) -> None:
    """Walk from the loss to the gradient of the last block's output."""
    # The gradient of the logits overwrites them.
    ledger.briefly(block.widened(min(block.tokens * block.vocab, _LOGITS_PER_BLOCK)))
    ledger.free(block.head - block.x - block.norm - block.gathered - block.logits)
    ledger.make(block.x)
    if not defers:
        ledger.briefly(block.weight_gradient(block.hidden * block.vocab))
        ledger.free(block.gathered, block.logits)
    _backward_norm(block, ledger, defers=defers)
    ledger.free(block.x)


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
    qkv = (block.queries + 2 * block.keys) * block.item
    queries, middle = block.queries * block.item, block.middle * block.item
    if recompute is Recompute.BLOCK:
        forward_block(block, ledger, Recompute.NONE)
        ledger.free(block.x)
    # Feed-forward's second product, its middle, and its first.
    _backward_output_norm(block, ledger)
    ledger.make(middle)
    if not defers:
        ledger.briefly(block.weight_gradient(block.hidden * block.ffn))
        ledger.free(middle)
    ledger.free(block.norms_outputs * block.x)
    # With a gate: dy of both, and dh * up.
    num = block.num_gated
    ledger.briefly(max((2 * num - 1) * middle, 3 * num * block.widened(block.middle)))
    ledger.make(block.num_gated * middle)
    ledger.free(middle, block.num_gated * middle)
    ledger.make(block.x)
    if not defers:
        ledger.briefly(block.weight_gradient(block.hidden * block.ffn))
        ledger.free(block.gathered, block.num_gated * middle)
    _backward_norm(block, ledger, defers=defers)
    ledger.free(block.x, block.drops_mlp * block.middle, block.drops_residual * block.own_tokens * block.hidden)
    # The gradient of the output goes, unless the second product needs it.
    keeps = defers and block.output_gradient > 0
    if not gradient_in_slot and not keeps:
        ledger.free(block.x)
    if defers and not keeps:
        ledger.make(block.gathered)
    # Attention's second product.
    if recompute is Recompute.ATTENTION:
        _forward_attention(block, ledger)
        ledger.free(block.x)
    _backward_output_norm(block, ledger)
    ledger.make(queries)
    if not defers:
        ledger.briefly(block.weight_gradient(block.hidden * block.heads * block.head_size))
    ledger.free(block.norms_outputs * block.x)
    # Attention.
    _backward_attention(block, ledger)
    ledger.free(queries, block.normed_heads, block.attended, block.drops_residual * block.own_tokens * block.hidden)
    if defers:
        ledger.make(queries)
    # The columns of q, k and v side by side, and their product.
    ledger.briefly(max(qkv, 2 * block.widened(block.queries)))
    ledger.make(block.x)
    if not defers:
        ledger.briefly(block.weight_gradient(block.hidden * block.heads * block.head_size))
        ledger.free(block.gathered, qkv)
    _backward_norm(block, ledger, defers=defers)
    # Biases and norms of heads.
    if defers:
        ledger.make((block.vectors - 2 * block.end_vectors) * block.wide)
    # The input's gradient is the sum of two; one of them is an operand of the weight half.
    if defers:
        ledger.make(block.gathered)
    ledger.free(block.x)
    if not input_in_slot:
        ledger.free(block.x)


def _backward_norm(block: BlockBytes, ledger: Ledger, *, defers: bool) -> None:
    """Walk from the gradient of a norm's output to that of its input, which takes its place; free the statistics."""
    ledger.briefly(block.x, 3 * block.widened(block.own_tokens * block.hidden))
    ledger.free(block.norm)
    if defers:
        ledger.make(block.end_vectors * block.wide)


def _backward_output_norm(block: BlockBytes, ledger: Ledger) -> None:
    """Walk through the norm of a half's output, if there is one: its gradient stands beside that of the block."""
    if block.norms_outputs:
        ledger.make(block.x)
        ledger.briefly(block.x, 3 * block.widened(block.own_tokens * block.hidden))
        ledger.free(block.normed_output)


def _scores_of_pieces(block: BlockBytes) -> int:
    """Scores of as many queries as are taken at once, of every head, with the keys that they see.

    Those of the queries before are freed when the next ones are there.
    """
    num_alive = min(2, -(-block.seq // _QUERIES_PER_PIECE))
    rows = min(block.seq, _QUERIES_PER_PIECE)
    keys = min(block.seq, rows + block.window - 1)
    return num_alive * (block.tokens // block.seq) * block.heads * rows * keys * block.wide


def _backward_attention(block: BlockBytes, ledger: Ledger) -> None:
    """Walk from the gradient of attention's output to those of q, k and v."""
    qkv = (block.queries + 2 * block.keys) * block.item
    if block.is_windowed:
        # Operands, the output's gradient with heads side by side, three sums, and scores with their gradients.
        operands = block.widened(block.queries + 2 * block.keys)
        sums = (2 * block.queries + 2 * block.keys) * block.wide
        ledger.briefly(qkv, operands, sums, max(2 * _scores_of_pieces(block), block.queries * block.wide))
        ledger.make(qkv)
        return
    seq, first = block.seq, min(block.seq, _KEYS_PER_BLOCK)
    later = seq - first
    # Two tensors of scores of a block of keys, and two of the next.
    scores = 2 * block.tokens * block.heads * (first + later * min(later, _KEYS_PER_BLOCK) // seq) * block.wide
    if block.is_narrow and not block.drops_attention:
        scores = 0
    ledger.briefly(2 * block.queries * block.item, qkv, scores)
    ledger.make(qkv)


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
