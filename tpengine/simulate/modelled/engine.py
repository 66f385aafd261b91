"""What an engine does differently from ours, as options of the cost model. No torch.

Our own engine is the default. Others are described by what they compute and keep, so that published runs of theirs can
be predicted by the same simulator. No option is a setting of a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpengine.simulate.modelled.flash import FlashKernel


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
        splits_steps: each step of a norm in float32, of a rotation and of a gated activation is a kernel (eager torch).
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
    splits_steps: bool = False
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
