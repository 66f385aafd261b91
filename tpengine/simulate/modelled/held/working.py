"""What our layers hold while they run on a CPU: their tensors in the order in which they make and free them. No torch.

Each function walks through one part of the model, forward or backward, and tells a ledger what it makes and frees. From
the ledger comes the most that there is at once. The letters are those of bytes.py, where what is kept is a formula; the
tests hold both against each other. Left out are small tensors, of a number or two per token, and the pieces in which tp
ranks exchange.

With `defers` a backward is an input half: what the weight half needs stays.
"""

from __future__ import annotations

from tpengine.plan import Recompute
from tpengine.simulate.modelled.held.bytes import BlockBytes

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
