"""What other engines' layers keep of a micro-batch, in bytes: sums over the tensors that autograd keeps. No torch.

For our own layers held/bytes.py and held/working.py count what is there, tensor by tensor; of other engines only the
operators are known (engine.py), so these figures are estimates.

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023, section 4,
whose s b h (10 + 24/t + 5 a s / (h t)) and s b h / t (34 + 5 a s / h) these sums are for GPT in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.planner.published.engine import Engine, num_logits, sizes_for
from tpengine.config import Config
from tpengine.plan import Kind, Plan, Recompute
from tpengine.simulate.costs import ChunkBytes
from tpengine.simulate.modelled.held.bytes import BlockBytes

# Statistics of attention are float32.
_WIDE = 4


@dataclass(frozen=True)
class _Kept:
    """Bytes of one block: what is kept for the input half of backward, and for its weight half.

    Attributes:
        x: between blocks.
        whole: all that is kept, the block's input included.
        core: what attention keeps of its scores.
        deferred: operands of the weight half.
    """

    x: int
    whole: int
    core: int
    deferred: int


def engine_activations(config: Config, tp: int, plan: Plan, engine: Engine) -> dict[int, ChunkBytes]:
    """Return what a micro-batch of `config` holds on one of `tp` ranks, by chunk.

    Args:
        config: sizes and dtype.
        tp: number of tensor-parallel ranks.
        plan: chunks, with what each recomputes.
        engine: whose layers they are.
    """
    size = sizes_for(config, tp, engine)
    block, last = _kept(size, config, engine), len(plan.chunks) - 1
    found = {}
    for index, chunk in enumerate(plan.chunks):
        num = chunk.layers[1] - chunk.layers[0]
        is_again = chunk.recompute is not Recompute.NONE
        each = block.x if is_again else _half(size, block) if engine.computes_half_again else block.whole
        head = _head(size, block, engine) if index == last else 0
        saved = num * each + head
        # A block computed again is there whole, once; the gradients of its widest tensor and of its input besides.
        gradients = 2 * size.middle * size.num_gated * size.item + block.x
        working = gradients + block.core + block.whole - each
        _, in_forward, in_backward = engine.loss_bytes if index == last else (0, 0, 0)
        logits = num_logits(size, engine)
        forward = max(block.whole - each, 2 * size.middle * size.item) + in_forward * logits
        found[index] = ChunkBytes(
            saved=saved,
            deferred=num * block.deferred + (size.gathered + size.logits if index == last else 0),
            working={
                Kind.F: forward,
                Kind.B: working + in_backward * logits,
                Kind.I: working + in_backward * logits,
                Kind.W: 0.0,
            },
        )
    return found


def _kept(size: BlockBytes, config: Config, engine: Engine) -> _Kept:
    rows = size.own_tokens if engine.cuts_rows else size.tokens
    x, item = rows * size.hidden * size.item, size.item
    length = config.train.seq_len
    scores = size.heads * (size.tokens // length) * length * length if length <= size.tokens else 0
    if length > size.tokens:
        scores = size.heads * size.tokens * length
    masks = 2 * rows * size.hidden if engine.drops else 0
    core = 0
    if engine.keeps_scores and not engine.computes_scores_again:
        core = scores * (2 * item + 1 if engine.drops else item)
    mixed = size.queries * item
    qkv = (size.queries + 2 * size.keys) * item
    # Both norms' inputs and outputs; the products' inputs; what the activation needs and gives.
    normed = size.tokens * size.hidden * item if engine.keeps_gathered else x
    inputs = 2 * normed + mixed + size.middle * item
    whole = 2 * x + inputs + qkv + core + size.num_gated * size.middle * item + masks
    if engine.joins_residuals and not engine.keeps_scores:
        whole += size.tokens * size.heads * _WIDE
    if engine.keeps_rotated:
        whole += (size.queries + size.keys) * item
    if engine.steps is not None:
        # What both norms keep besides; the activation of the gate.
        whole += 2 * engine.steps.kept_norm * rows * size.hidden + (size.num_gated > 1) * size.middle * item
    gradients = qkv + 2 * x + size.num_gated * size.middle * item
    return _Kept(x, whole, scores * 2 * item if engine.keeps_scores else 0, inputs + gradients)


def _half(size: BlockBytes, block: _Kept) -> int:
    """Bytes of a block's input, the products that are not computed again, and attention's output with its statistics.

    q, v, gate and the second product of the feed-forward network, which is kept although nothing reads it.
    """
    products = (2 * size.queries + size.keys + size.middle) * size.item
    return block.x + products + size.tokens * size.hidden * size.item + size.tokens * size.heads * _WIDE


def _head(size: BlockBytes, block: _Kept, engine: Engine) -> int:
    """Bytes of the last norm's input and output, and what the loss keeps."""
    return 2 * block.x + engine.loss_bytes[0] * num_logits(size, engine)
