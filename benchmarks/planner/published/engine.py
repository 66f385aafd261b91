"""What another engine does differently from ours, as options of its costs; and its kernels of attention.

Others are described by what they compute and keep, so that runs of theirs are simulated as our own are. No option is a
setting of a run. frameworks.py says which ones a row's engine has; operators.py, chunk.py and costs.py what each
changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpengine.architectures.describe import Attention, FeedForward
from tpengine.architectures.part import Sizes
from tpengine.architectures.registry import layer_halves
from tpengine.config import Config
from tpengine.planner.machine import Curve

# Attention kernels that keep no scores: shares of a GPU's peak, from the kernels' own microbenchmarks.
#
# Dao, "FlashAttention-2", 2023: on an A100 it attains up to 0.73 of the peak forward and 0.63 backward, and is 1.3 to
# 1.5 times as fast forward, and about twice as fast backward, as FlashAttention in Triton. Shah et al.,
# "FlashAttention-3", 2024, figures 5 and 6, on an H100, causal, heads of 128: FlashAttention-2 191, 260, 298, 319,
# 333, 335 TFLOP/s forward for sequences of 512 to 16,384, cuDNN 539 at the longest. Causal attention attains 0.9 of the
# other (335 of 370); heads of 64 attain 0.875 of heads of 128 (324 of 370); backward of FlashAttention-2 0.83 of
# forward (264 of 318, heads of 64), of cuDNN the same as forward (395, heads of 64).
_CAUSAL, _HEADS_OF_64 = 335 / 370, 324 / 370
_BACKWARD = 264 / 318
# Of what the longest sequences attain.
_BY_LENGTH = Curve(((512.0, 191 / 335), (1024.0, 260 / 335), (2048.0, 298 / 335), (4096.0, 319 / 335), (8192.0, 1.0)))


@dataclass(frozen=True)
class FlashKernel:
    """A kernel on one kind of GPU.

    Attributes:
        name: in words.
        forward, backward: share of the peak, of long causal sequences and heads of 128.
    """

    name: str
    forward: float
    backward: float

    def share(self, seq: int, head_size: int, *, backward: bool) -> float:
        """Return the share of the peak for sequences and heads of these sizes."""
        size = _HEADS_OF_64 if head_size <= 64 else 1.0
        return (self.backward if backward else self.forward) * _BY_LENGTH.at(seq) * size


FLASH_1_ON_AMPERE = FlashKernel("FlashAttention 1 in Triton", 0.73 * _CAUSAL / 1.4, 0.63 * _CAUSAL / 2)
# "About twice as fast" is said of FlashAttention 1 in CUDA in both directions.
FLASH_1_IN_CUDA_ON_AMPERE = FlashKernel("FlashAttention 1", 0.73 * _CAUSAL / 2, 0.63 * _CAUSAL / 2)
FLASH_2_ON_AMPERE = FlashKernel("FlashAttention 2", 0.73 * _CAUSAL, 0.63 * _CAUSAL)
FLASH_2_ON_HOPPER = FlashKernel("FlashAttention 2", 335 / 989, _BACKWARD * 335 / 989)
# 1.5 to 2.0 times FlashAttention 2 forward, 1.5 to 1.75 times backward (FlashAttention-3, abstract and section 4.1).
FLASH_3_ON_HOPPER = FlashKernel("FlashAttention 3", 1.75 * 335 / 989, 1.625 * _BACKWARD * 335 / 989)
# The same kernel on the newer GPU, by its distance from FlashAttention 2.
FLASH_1_ON_HOPPER = FlashKernel("FlashAttention 1 in Triton", 335 / 989 / 1.4, 335 / 989 * _BACKWARD / 2)
CUDNN_ON_HOPPER = FlashKernel("cuDNN's attention", 539 / 989, 539 / 989)


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
    """Options of lowering and cost; a default is what ours does.

    Attributes:
        weight_item, gradient_item, optimizer_item: bytes per parameter of weights, gradients and the optimizer's state.
        reduced_item: bytes per element of a gradient on its way between replicas.
        loss_bytes: bytes per logit that are kept from forward to backward, and that forward and backward of the loss
            work with besides.
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
        frees_reduced: a gradient that is reduced every micro-batch gives its buffer back as soon as that is done, so
            that two are held: one being filled, one being reduced.
        waits_for_transfers: a stage computes nothing while it sends.
        scatters_transfers: tp ranks that hold all tokens each send a share of them, and the receivers gather.
        context_ranks: ranks that share a sequence, which attention passes around in a ring.
        added_item: bytes that a kernel reads and writes per parameter to add a micro-batch's gradient to the others; 0
            where the product adds it.
        copied_item: bytes that a kernel reads and writes per parameter to unpack gathered weights before each use.
    """

    weight_item: int
    gradient_item: int
    optimizer_item: int
    reduced_item: int
    loss_bytes: tuple[int, int, int]
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
    frees_reduced: bool = False
    waits_for_transfers: bool = False
    scatters_transfers: bool = False
    context_ranks: int = 1
    added_item: int = 0
    copied_item: int = 0


@dataclass(frozen=True)
class BlockSizes(Sizes):
    """Sizes of a rank with what the formulas of other engines need of a published model's block.

    Attributes:
        num_gated: matrices of the feed-forward network's first product: 2 with a gate, else 1.
        rotates: whether queries and keys are rotated by their positions.
    """

    num_gated: int = 2
    rotates: bool = True


def sizes_for(config: Config, tp: int, engine: Engine) -> BlockSizes:
    """Return the sizes of a block of which ranks of a context hold a share of the tokens each."""
    attention, feed_forward = (half.part for half in layer_halves(config.model, 0))
    assert isinstance(attention, Attention) and isinstance(feed_forward, FeedForward), "published models have these"
    size, ranks = BlockSizes.of(config, tp), engine.context_ranks
    size = replace(size, num_gated=feed_forward.num_gated, rotates=attention.rotates)
    if ranks == 1:
        return size
    return replace(size, tokens=size.tokens // ranks, own_tokens=max(1, size.own_tokens // ranks))


def num_logits(size: Sizes, engine: Engine) -> int:
    """Return the logits that a tp rank computes the loss of."""
    num_ranks = size.tokens // max(1, size.own_tokens) if engine.whole_logits else 1
    return size.tokens * size.vocab * num_ranks
