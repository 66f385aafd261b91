"""What a part of a model says of itself, once, for all who read it. No torch.

    Sizes                        a micro-batch and the model's sizes on a tp rank; all figures follow from them
    Product, Kernel, Exchange    operators, each with its work and what it sends
    Kept                         a tensor that backward needs, with the formula of its bytes
    Ledger, BackwardWalk         what is made and freed while it runs; from these comes its working set
    Part                         the description: parameters, operators, kept bytes, walks, and what makes its layer

Planner, memory sheet, bounds, flops and layout add these up and know no kind of part. A new kind is three files: a
subclass of Part, its layer, and its exact form, which the class names in `layer` and `exact_layer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, Self

from tpkernels.work import Work, all_gather_work, matmul_work, visible_pairs

from tpengine.config import Config, ModelConfig, num_shards_of
from tpengine.dtypes import dtype_bytes
from tpengine.plan import Gathered

Shapes = Mapping[str, tuple[int, ...]]

# An axis of the mesh over which each rank's gradient is only a part of the sum; of several dp stands first.
# "edp" are the ranks of a stage that hold the same experts, where these are not those of dp (parallel.ep above tp).
Axis = Literal["dp", "tp", "replica", "edp"]


# What a memory sheet calls the mask of a dropout, of 1 byte per element.
MASK = "mask of dropout"


@dataclass(frozen=True)
class Packed:
    """The documents of some micro-batches.

    Attributes:
        lengths: of each micro-batch, the tokens of each document, or part of one.
    """

    lengths: tuple[tuple[int, ...], ...]

    def pairs(self, window: int | None = None) -> int:
        """Return the pairs of a query and a key that attention computes in a micro-batch: the mean.

        Args:
            window: as visible_pairs.
        """
        return round(sum(visible_pairs(of, window) for of in self.lengths) / len(self.lengths))

    @property
    def worst(self) -> Packed:
        """The micro-batch with most pairs, alone."""
        return Packed((max(self.lengths, key=visible_pairs),))

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return sum(self.lengths[0])


def packed_of(starts: Sequence[Sequence[int]], seq_len: int, micro_batch_size: int) -> Packed:
    """Return the documents of micro-batches.

    Args:
        starts: where documents begin in each sample after its first token (Samples.document_starts); samples that do
            not fill a micro-batch are left out.
        seq_len: tokens of a sample.
        micro_batch_size: samples of a micro-batch.
    """
    of_sample = []
    for inner in starts:
        ends = [*inner, seq_len]
        of_sample.append([end - begin for begin, end in zip([0, *inner], ends, strict=True)])
    lengths = []
    for first in range(0, len(of_sample) - micro_batch_size + 1, micro_batch_size):
        lengths.append(tuple(length for sample in of_sample[first : first + micro_batch_size] for length in sample))
    return Packed(tuple(lengths))


@dataclass(frozen=True)
class Sizes:
    """A micro-batch and the model's sizes on one of `tp` ranks.

    Letters in formulas: T tokens, t = T/tp, D width, H and G query and key/value heads of this rank, E head width, F
    feed-forward and V vocabulary columns of this rank; e bytes per element, a per element of promote_types(dtype,
    float32).

    Attributes:
        model: the model's sizes.
        tp: number of tensor-parallel ranks.
        tokens, own_tokens: T and t.
        seq: tokens of a sequence.
        batch: sequences of a micro-batch.
        item, wide: e and a.
        keeps_gathered: Gathered.KEEP.
        has_documents: whether documents are packed, which do not see each other.
        packed: their lengths, where they are known.
        load: factor of what this rank gets beside an equal share, known at run time only; 1 is an equal share.
        ep: number of ranks that share out whole experts; with 1 each expert is cut over tp.
        partials: parts that come back of each row that travels to an expert; 0 where tokens' owners route them alone.
            In exact mode the number of shards: there all tp ranks route all tokens.
    """

    model: ModelConfig
    tp: int
    tokens: int
    own_tokens: int
    seq: int
    batch: int
    item: int
    wide: int
    keeps_gathered: bool
    has_documents: bool
    packed: Packed | None = None
    load: float = 1.0
    ep: int = 1
    partials: int = 0

    @classmethod
    def of(
        cls,
        config: Config,
        tp: int,
        gathered: Gathered = Gathered.KEEP,
        *,
        packed: Packed | None = None,
        load: float = 1.0,
    ) -> Self:
        """Return the sizes of a configuration on one of `tp` ranks."""
        train = config.train
        tokens, item = train.micro_batch_size * train.seq_len, dtype_bytes(train.dtype)
        return cls(
            model=config.model,
            tp=tp,
            tokens=tokens,
            own_tokens=tokens // tp,
            seq=train.seq_len,
            batch=train.micro_batch_size,
            item=item,
            wide=max(4, item),
            keeps_gathered=gathered is Gathered.KEEP,
            has_documents=config.data.packing != "cut",
            packed=packed,
            load=load,
            ep=config.parallel.ep,
            partials=num_shards_of(config) if train.reduction == "exact" and config.parallel.ep > 1 else 0,
        )

    @property
    def hidden(self) -> int:
        """D."""
        return self.model.hidden_size

    @property
    def heads(self) -> int:
        """H."""
        return self.model.num_heads // self.tp

    @property
    def kv_heads(self) -> int:
        """G; several ranks may have the same one."""
        return max(1, self.model.num_kv_heads // self.tp)

    @property
    def head_size(self) -> int:
        """E."""
        return self.model.head_size

    @property
    def ffn(self) -> int:
        """F."""
        return self.model.ffn_size // self.tp

    @property
    def vocab(self) -> int:
        """V, padded."""
        return self.model.padded_vocab_size(self.tp) // self.tp

    @property
    def logits(self) -> int:
        """Bytes of z[T, V]; its gradient overwrites it."""
        return self.tokens * self.vocab * self.item

    @property
    def x(self) -> int:
        """Bytes of x[t, D], between blocks."""
        return self.own_tokens * self.hidden * self.item

    @property
    def gathered(self) -> int:
        """Bytes that a column-parallel layer keeps of its input: [T, D], or [t, D] if it gathers again."""
        return (self.tokens if self.keeps_gathered else self.own_tokens) * self.hidden * self.item

    @property
    def queries(self) -> int:
        """Elements of q[T, H E], or of attention's output."""
        return self.tokens * self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Elements of k[T, G E], or of v."""
        return self.tokens * self.kv_heads * self.head_size

    @property
    def middle(self) -> int:
        """Elements of the feed-forward network's middle, [T, F]; gate and up are as large each."""
        return self.tokens * self.ffn

    @property
    def residual_mask(self) -> int:
        """Bytes of the mask of the residual dropout: 1 per element of [t, D]."""
        return (self.model.residual_dropout > 0) * self.own_tokens * self.hidden

    @property
    def is_narrow(self) -> bool:
        """Whether sums are taken in a wider dtype than that of the activations."""
        return self.item < self.wide

    def widened(self, num_elements: int) -> int:
        """Bytes of a copy in the wider dtype; 0 where there is none, so that nothing is copied."""
        return num_elements * self.wide * self.is_narrow

    def weight_gradient(self, num_elements: int) -> int:
        """Bytes of a weight's gradient on its way into the buffer: a product, and its copy in the buffer's dtype.

        Where the dtypes agree the product is added as it is computed.
        """
        return num_elements * (self.item + self.wide) * self.is_narrow

    def gathered_input(self) -> Kept:
        """Return what a part keeps of its input for its first product."""
        rows = self.tokens if self.keeps_gathered else self.own_tokens
        word = "T" if self.keeps_gathered else "t"
        return Kept("its gathered rows", f"{word} D e = {rows} x {self.hidden} x {self.item}", self.gathered)

    def loaded(self, number: int) -> int:
        """Return a number of tokens, elements or bytes that grows with the load."""
        return math.ceil(number * self.load)


@dataclass(frozen=True)
class Product:
    """A product of all tokens with a weight on one rank: y[T, columns] = x[T, inner] @ w.T.

    Forward gathers x or scatters y, and so does the gradient of x; the gradient of w adds to what is there.

    Attributes:
        columns, inner: of this rank.
        cut: which of both the ranks share, and in exact mode a rank's shards. With "inner" y is a partial sum.
        rows: tokens; 0 for those of the micro-batch.
        num_weights: of which each row meets one: with E experts as many products, of rows / E rows in the mean.
        exchanged: False where its part exchanges by itself what it reads and makes (Exchange).
    """

    columns: int
    inner: int
    cut: Literal["columns", "inner"]
    rows: int = 0
    num_weights: int = 1
    exchanged: bool = True

    def work(self, s: Sizes) -> Work:
        """Return the work of forward, and of either gradient."""
        of_one = matmul_work(self.rows or s.tokens, self.columns, self.inner, s.item)
        others = (self.num_weights - 1) * self.columns * self.inner * s.item
        return of_one + Work(memory_bytes=others)

    def operands(self, s: Sizes) -> int:
        """Return the bytes that its weight half needs: of x and of the gradient of y; one of both is gathered.

        With several weights neither is: both are rows of its own.
        """
        if self.num_weights > 1:
            return self.rows * (self.columns + self.inner) * s.item
        cut = self.columns if self.cut == "columns" else self.inner
        return s.gathered + (self.rows or s.tokens) * cut * s.item


@dataclass(frozen=True)
class Kernel:
    """An operator that is no product with a weight.

    Attributes:
        name: its own among a machine's rates; empty for the rate of bytes in memory.
        work: its flops and bytes.
        seq: tokens that see each other, for attention, whose kernels attain more the longer they are; else 0.
        exchanges: exchanges of x[T, D] among tp ranks that belong to it.
    """

    name: str
    work: Work
    seq: int = 0
    exchanges: int = 0


@dataclass(frozen=True)
class Exchange:
    """Bytes that ranks exchange inside forward or backward, and that no operator hides.

    Attributes:
        num_bytes: of the whole tensor, of all ranks together; of rows that travel to ranks that share experts, what one
            rank sends, with the part that stays.
        over: the axes of those ranks; "ep" are those that share experts.
    """

    num_bytes: int
    over: tuple[Axis | Literal["ep"], ...] = ("tp",)

    def work(self, num_ranks: int) -> Work:
        """Return what one rank of so many sends."""
        return all_gather_work(self.num_bytes // num_ranks, num_ranks)


Operator = Product | Kernel | Exchange


@dataclass(frozen=True)
class Kept:
    """A tensor, or several, that forward keeps for backward.

    Attributes:
        name: in a memory sheet.
        formula: of its bytes, in letters and numbers.
        num_bytes: 0 where there is none.
    """

    name: str
    formula: str
    num_bytes: int


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


class BackwardWalk(Protocol):
    """A walk from the gradient of what a part adds to that of its norm's input; planner/modelled/activations.py has it.

    Attributes:
        s: sizes of the rank.
        ledger: what is held.
        defers: the weight half comes later: what it needs stays.
    """

    s: Sizes
    ledger: Ledger
    defers: bool

    def weight_gradient(self, num_elements: int, *operands: int) -> None:
        """Add the gradient of a weight of so many elements and free its operands; later, if the half is deferred."""

    def output_gradient_used(self) -> None:
        """Free the gradient that the norms behind the part have made."""

    def norm(self) -> None:
        """Walk through the norm of the part's input, whose gradient takes the place of the gradient of its output."""


@dataclass(frozen=True)
class Part:
    """One kind of part of a block, as its architecture describes it. A new kind is a subclass.

    Class attributes:
        role: what the orders of a block call it as: a norm; `attend`, which sees other tokens; `feed`, which does not.
        title: what a memory sheet calls it.
        is_computed_again: whether `--parallel.recompute attention` computes it again.
        may_cut_tokens: whether it may be computed of some of a sequence's tokens at a time.
        chooses_attention: whether its scores may be torch's instead of ours (tpkernels/ops/attention/choice.py).
        layer, exact_layer: "module:function" of what makes its layer, and its exact form of one layer a shard; loaded
            where a model is built, since what describes a part needs no torch (model/parts.py).

    Attributes:
        residual_scale: what its block multiplies its output by, before that is dropped and added.
    """

    role: ClassVar[Literal["norm", "attend", "feed"]] = "feed"
    title: ClassVar[str] = "part"
    is_computed_again: ClassVar[bool] = False
    may_cut_tokens: ClassVar[bool] = True
    chooses_attention: ClassVar[bool] = False
    layer: ClassVar[str] = ""
    exact_layer: ClassVar[str] = "tpengine.model.parts:exact_products"

    residual_scale: float = field(default=1.0, kw_only=True)

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters by their names in the part, in the order of their use; the table cuts them."""
        raise NotImplementedError

    def reduce_over(self, name: str) -> tuple[Axis, ...] | None:
        """Return the axes over which a parameter's gradient is summed; None for those that follow from its cut.

        These are dp of a cut parameter, dp and tp of a whole one, dp and those who share it of a shared one.
        """
        return None

    def has_gradient(self, name: str) -> bool:
        """Return whether a parameter has a gradient: one without is moved by something else, if at all."""
        return True

    def counts_experts(self, name: str) -> bool:
        """Return whether a parameter's first dim counts experts, whole ones of which ranks share out (parallel.ep)."""
        return False

    def first_value(self, name: str) -> float:
        """Return what all elements of a vector begin with."""
        return 0.0

    def behind(self) -> Mapping[str, str]:
        """Return by weight the one behind which it lies, where one product reads both as one matrix."""
        return {}

    def narrow_window(self, seq: int) -> int | None:
        """Return how many tokens back a token of a sequence sees; None for all, or if it sees none but itself."""
        return None

    def is_rotary(self) -> bool:
        """Return whether it rotates by positions, so that config.json says their frequencies."""
        return False

    def least(self) -> Part:
        """Return the variant of this part that keeps least for backward: for bounds."""
        return self

    def elements_per_token(self, model: ModelConfig) -> Mapping[str, int]:
        """Return by matrix how many of its elements a token is multiplied with: all, but of experts the chosen ones."""
        return {name: math.prod(shape) for name, shape in self.shapes(model).items() if len(shape) > 1}

    def flops(self, model: ModelConfig, sequences: int, seq: int, *, causal_half: bool, windowed: bool = True) -> int:
        """Return the model flops of forward, on all ranks together.

        Args:
            model: sizes.
            sequences, seq: how many, of how many tokens.
            causal_half: count the half of attention's scores that a causal kernel computes.
            windowed: count of a window only what is inside it, if `causal_half`.
        """
        return 2 * sum(self.elements_per_token(model).values()) * sequences * seq

    def products(self, s: Sizes) -> tuple[Product, ...]:
        """Return its products with weights, in their order."""
        return ()

    def forward(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the operators of forward, products among them, in their order."""
        return self.products(s)

    def backward_operators(self, s: Sizes) -> tuple[Operator, ...]:
        """Return the operators of backward but for the two gradients of each product."""
        return ()

    def reads_output_gradient(self) -> bool:
        """Return whether its weight half needs the gradient of its output itself, gathered."""
        return True

    def deferred(self, s: Sizes) -> int:
        """Return the bytes that its weight half needs beside the operands of its products and vectors' gradients."""
        return 0

    def decided(self, s: Sizes) -> int:
        """Return the bytes of what is decided once, and kept where all else is computed again; part of `kept`."""
        return 0

    def kept(self, s: Sizes) -> tuple[Kept, ...]:
        """Return what forward keeps beside what its norm does, the mask of the residual dropout apart."""
        return ()

    def forward_walk(self, s: Sizes, ledger: Ledger) -> None:
        """Make what forward keeps, and what it holds for a while."""
        ledger.make(*(of.num_bytes for of in self.kept(s)))

    def backward(self, walk: BackwardWalk) -> None:
        """Walk from the gradient of its output to that of its input, and through its norm (`walk.norm()`).

        What forward has kept is freed on the way, and the mask of the residual dropout behind it.
        """
        raise NotImplementedError


def num_kept(kept: Iterable[Kept]) -> int:
    """Return their bytes together."""
    return sum(of.num_bytes for of in kept)
