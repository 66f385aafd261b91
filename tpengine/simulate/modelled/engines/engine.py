"""What an engine does differently from ours, as options of the cost model. No torch.

Our own engine is the default. Others are described by what they compute and keep, so that published runs of theirs can
be predicted by the same simulator. No option is a setting of a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpengine.config import Config
from tpengine.simulate.modelled.engines.flash import FlashKernel
from tpengine.simulate.modelled.held.bytes import BlockBytes


@dataclass(frozen=True)
class Steps:
    """Kernels of single steps, as eager torch has them: bytes per element beside what one kernel reads and writes.

    Attributes:
        norm, norm_backward: of a norm's input.
        rotation, rotation_backward: of queries and keys.
        gate, gate_backward: of a gated activation's output.
        kept_norm: what autograd keeps of a norm besides its input and output.
    """

    norm: int
    norm_backward: int
    rotation: int
    rotation_backward: int
    gate: int
    gate_backward: int
    kept_norm: int


@dataclass(frozen=True)
class Beside:
    """Processors that fused products leave to their exchanges, in the order qkv, attention's output, gate and up, down.

    Attributes:
        kept: of forward: what a product does without, as long as it runs.
        lent_by_inputs, lent_by_weights: of the gradients of inputs and of weights: what these products do without while
            the exchange runs.
        num_splits: parts of a forward product that keeps processors; the scatter of the last part is behind it.
    """

    kept: tuple[int, int, int, int]
    lent_by_inputs: tuple[int, int, int, int]
    lent_by_weights: tuple[int, int, int, int]
    num_splits: int


@dataclass(frozen=True)
class Engine:
    """Options of lowering and cost; each default is what ours does.

    Attributes:
        cuts_rows: between products each tp rank has its share of the tokens (sequence parallelism), gathered before a
            product and scattered behind it. Else every rank has all tokens, and products are followed by all-reduces,
            which are as many bytes.
        keeps_scores: attention writes scores and probabilities to memory and keeps them; else it is one kernel.
        computes_scores_again: of attention that keeps scores: backward computes them again instead.
        computes_half_again: of each block, backward computes all again but attention, every second product and what
            tp ranks have summed (torchtitan's selective checkpointing by operator).
        flash: the kernel of attention that keeps no scores; None for the machine's curve.
        joins_residuals: a norm's kernel adds the residual; else that is a kernel before it.
        reads_norms_twice: backward of a norm is two kernels, one for its input and one for its weight.
        steps: what kernels for single steps of norms, rotations and gates read, write and keep more; None where each of
            these is one kernel.
        score_steps: bytes per score, forward and backward, that kernels beside a softmax read and write (a mask).
        keeps_rotated: queries and keys are kept beside the product that they were made of.
        keeps_gathered: what was gathered before a product is kept, not gathered again.
        splits_gate, splits_heads: gate and up, and q, k and v, are products of their own; their inputs' gradients are
            summed by kernels.
        reduces_gate_apart: ranks that hold all tokens sum the inputs' gradients of gate and up one after the other.
        beside: processors that fused products leave to their exchanges; None for none, as copies need none.
        adds_parts: fused products write what each rank's rows get apart, and a kernel adds it; the scatter of several
            products' sum is not fused (torch's asynchronous tensor parallelism).
        joins_heads: backward puts the gradients of q, k and v side by side with a kernel.
        whole_logits: each tp rank gathers all logits and computes the whole loss.
        reduces_whole: with the optimizer's state cut too, replicas all-reduce whole gradients.
        once_item: bytes per parameter that kernels read and write once per step, beside the optimizer's.
        copies_heads: queries, keys and values are copied apart, and heads side by side again.
        drops: dropout of 0.1 behind attention, its scores and the feed-forward network.
        wide_loss: logits are copied to float32, and each step of the loss is a kernel of its own.
        loss_bytes: bytes per logit that are kept from forward to backward, and that forward and backward of the loss
            work with besides; None for the logits alone, which their gradient overwrites.
        frees_reduced: a gradient that is reduced every micro-batch gives its buffer back as soon as that is done, so
            that two are held: one being filled, one being reduced.
        waits_for_transfers: a stage computes nothing while it sends.
        scatters_transfers: tp ranks that hold all tokens each send a share of them, and the receivers gather.
        context_ranks: ranks that share a sequence, which attention passes around in a ring.
        weight_item, gradient_item, optimizer_item: bytes per parameter of weights, gradients and the optimizer's
            state; 0 for what our layout says.
        added_item: bytes that a kernel reads and writes per parameter to add a micro-batch's gradient to the others; 0
            where the product adds it.
        copied_item: bytes that a kernel reads and writes per parameter to unpack gathered weights before each use.
        reduced_item: bytes per element of a gradient on its way between replicas; 0 as ours.
    """

    cuts_rows: bool = True
    keeps_scores: bool = False
    computes_scores_again: bool = False
    computes_half_again: bool = False
    flash: FlashKernel | None = None
    joins_residuals: bool = True
    reads_norms_twice: bool = False
    steps: Steps | None = None
    score_steps: tuple[int, int] = (0, 0)
    keeps_rotated: bool = False
    keeps_gathered: bool = False
    splits_gate: bool = False
    splits_heads: bool = False
    reduces_gate_apart: bool = False
    beside: Beside | None = None
    adds_parts: bool = False
    joins_heads: bool = False
    whole_logits: bool = False
    reduces_whole: bool = False
    once_item: int = 0
    copies_heads: bool = False
    drops: bool = False
    wide_loss: bool = False
    loss_bytes: tuple[int, int, int] | None = None
    frees_reduced: bool = False
    waits_for_transfers: bool = False
    scatters_transfers: bool = False
    context_ranks: int = 1
    weight_item: int = 0
    gradient_item: int = 0
    optimizer_item: int = 0
    added_item: int = 0
    copied_item: int = 0
    reduced_item: int = 0

    @property
    def is_ours(self) -> bool:
        """Return whether nothing differs from our own engine."""
        return self == OURS


OURS = Engine()


def sizes_for(config: Config, tp: int, engine: Engine) -> BlockBytes:
    """Return the sizes of a block of which ranks of a context hold a share of the tokens each."""
    size, ranks = BlockBytes.of(config, tp), engine.context_ranks
    if ranks == 1:
        return size
    return replace(size, tokens=size.tokens // ranks, own_tokens=max(1, size.own_tokens // ranks))


def num_logits(size: BlockBytes, engine: Engine) -> int:
    """Return the logits that a tp rank computes the loss of."""
    num_ranks = size.tokens // max(1, size.own_tokens) if engine.whole_logits else 1
    return size.tokens * size.vocab * num_ranks
