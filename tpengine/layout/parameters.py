"""The model's parameters as a table: names, global shapes, how each is cut over tp, how its gradient is summed.

Torch-free, because every rank builds the plan of all ranks and the planner counts bytes without a device. What there is
and how it is cut comes from the architecture (tpengine/architectures). The modules in `layers/` hold the tensors; the
model checks that they agree with this table name by name.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from tpengine.architectures.experts import Experts
from tpengine.architectures.part import Axis, Part
from tpengine.architectures.registry import architecture_of, rule_of
from tpengine.config import ModelConfig

EMBEDDING = "embed_tokens.weight"
POSITIONS = "embed_positions.weight"
HEAD = "lm_head.weight"

# What the name of a buffer ends in that the embedding has as output head (leaf_name).
HEAD_USE = "#head"

# A cache line. Exact mode's operands begin at one: a library may add in another order elsewhere.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ParameterSpec:
    """One named parameter.

    Attributes:
        name: unique in the model.
        shape: global shape, vocabulary padded; [E, out, in] of stacked matrices.
        shard_dim: the dim cut over tp; None if every tp rank holds the whole tensor.
        replicas: how many consecutive tp ranks hold the same shard (more than 1 only for k and v with fewer KV
            heads than tp ranks).
        init_std: standard deviation of the initial values; None where all of them are `init`.
        init: the initial value of norms and biases.
        valid_rows: rows that mean something; the rest is vocabulary padding, initialised to zero.
        over: the axes over which its part says that its gradient is summed; None for those that follow from the cut.
        behind: the parameter behind which it lies, where one product reads both as one matrix; empty for none.
        has_gradient: False for the bias of a router, in at least float32, which counts of tokens move (train.balance).
        ep: how many ranks of a stage its first dim, of experts, is cut over, where these are more than tp; else 0.
        apart: the same in exact mode, where each expert is cut into shards besides, of which a rank has all; else 0.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None
    replicas: int = 1
    init_std: float | None = None
    valid_rows: int | None = None
    init: float = 1.0
    over: tuple[Axis, ...] | None = field(default=None, repr=False)
    behind: str = field(default="", repr=False)
    has_gradient: bool = field(default=True, repr=False)
    ep: int = field(default=0, repr=False)
    apart: int = field(default=0, repr=False)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that checkpoints and files have: without padding."""
        return self.shape if self.valid_rows is None else (self.valid_rows, *self.shape[1:])

    @property
    def reduce_over(self) -> tuple[Axis, ...]:
        """The axes over which each rank's gradient is only a partial sum.

        A sharded weight sees all tokens of its replica after the gather: dp alone. What is whole on every tp rank has
        seen its T/tp tokens, or, as a norm of heads, its own heads: dp and tp. A replicated KV shard has seen its
        rank's query heads: dp and the replicas. Experts of more ranks than tp have seen all tokens of theirs: edp.
        """
        if self.ep or self.apart:
            return ("edp",)
        if self.over is not None:
            return self.over
        if self.shard_dim is None:
            return ("dp", "tp")
        return ("dp", "replica") if self.replicas > 1 else ("dp",)

    def block(self, tp: int, tp_rank: int, part: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (offset, size) of the block of the global tensor that tp rank `tp_rank` of `tp` holds.

        Of experts that are cut over ep ranks these are meant.

        Args: part: of experts that lie `apart`, which of these ranks is meant.
        """
        offset, size = [0] * len(self.shape), list(self.shape)
        if self.shard_dim is not None:
            num_shards = tp // self.replicas
            size[self.shard_dim] //= num_shards
            offset[self.shard_dim] = (tp_rank // self.replicas) * size[self.shard_dim]
        if self.apart:
            size[0] //= self.apart
            offset[0] = part * size[0]
        return tuple(offset), tuple(size)

    def local_numel(self, tp: int) -> int:
        """Elements on one rank."""
        return math.prod(self.block(self.ep or tp, 0)[1])

    @property
    def is_matrix(self) -> bool:
        """Whether it is no norm weight and no bias."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class Piece:
    """What a rank holds of one parameter: a shard, as one of `tp` ranks has it.

    Attributes:
        name: unique on the rank: the parameter's own, followed by the shard's number in brackets where a rank holds
            several.
        spec: the parameter, from the table of `tp`.
        tp: over how many ranks the table cuts: the real ones, or exact mode's shards; the ep ones that share experts.
        holder: the first of them that holds this shard.
        part: of experts that lie apart (exact mode), which of the ranks that share them has these.
    """

    name: str
    spec: ParameterSpec
    tp: int
    holder: int
    part: int = 0

    @property
    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, size) in the global tensor."""
        return self.spec.block(self.tp, self.holder, self.part)

    @property
    def num_holders(self) -> int:
        """How many consecutive ranks of the table hold this shard."""
        return self.tp if self.spec.shard_dim is None else self.spec.replicas


def pieces_of(spec: ParameterSpec, tp: int, held: range, ep_rank: int = 0) -> tuple[Piece, ...]:
    """The shards of one parameter that the ranks `held` of a table of `tp` ranks hold.

    Args: ep_rank: which of those that share experts they are.
    """
    if spec.ep:
        return (Piece(spec.name, spec, spec.ep, ep_rank),)
    if spec.apart:
        # All shards, of some experts.
        pieces = pieces_of(replace(spec, apart=0), tp, range(tp))
        return tuple(replace(piece, spec=spec, part=ep_rank) for piece in pieces)
    num_holders = tp if spec.shard_dim is None else spec.replicas
    shards = sorted({rank // num_holders for rank in held})
    if len(held) == 1 or spec.shard_dim is None:
        return tuple(Piece(spec.name, spec, tp, shard * num_holders) for shard in shards)
    return tuple(Piece(f"{spec.name}[{shard}]", spec, tp, shard * num_holders) for shard in shards)


def all_pieces(spec: ParameterSpec, tp: int) -> tuple[Piece, ...]:
    """The shards of one parameter that all ranks together hold, each once."""
    if spec.ep:
        return tuple(Piece(spec.name, spec, spec.ep, ep_rank) for ep_rank in range(spec.ep))
    return tuple(piece for part in range(max(1, spec.apart)) for piece in pieces_of(spec, tp, range(tp), part))


def hf_name(name: str) -> str:
    """Return Hugging Face's name of one of our parameters, which checkpoints have too."""
    return name if name == HEAD else f"model.{name}"


def init_std(model: ModelConfig) -> float:
    """Standard deviation of initial weights, sqrt(2 / (5 D)); 0.02 at D = 1000.

    At width 128 a mean loss of 1.9 nats takes a third fewer tokens than with GPT-2's constant 0.02 (row init_std of
    benchmarks/results). Source: Nguyen and Salazar, "Transformers without tears", arXiv 1910.05895, section 3.
    """
    return math.sqrt(2 / (5 * model.hidden_size))


def kv_replicas(model: ModelConfig, tp: int) -> int:
    """How many consecutive tp ranks share one KV head: 1 unless kv heads < tp."""
    return max(1, tp // model.num_kv_heads)


def embedding_spec(model: ModelConfig, tp: int) -> ParameterSpec:
    """Token embedding [V, D], cut by vocabulary rows."""
    shape = (model.padded_vocab_size(tp), model.hidden_size)
    return ParameterSpec(EMBEDDING, shape, 0, init_std=init_std(model), valid_rows=model.vocab_size)


@functools.lru_cache(maxsize=4096)
def layer_specs(
    model: ModelConfig, tp: int, layer: int, ep: int = 1, in_chunks: bool = False
) -> tuple[ParameterSpec, ...]:
    """Parameters of one block in the order of their use in forward; arguments as stage_specs."""
    specs: list[ParameterSpec] = []
    for part_name, part in architecture_of(model).block(model, layer).items():
        specs += _part_specs(model, tp, f"layers.{layer}.{part_name}", part, ep, in_chunks)
    return tuple(specs)


def _part_specs(
    model: ModelConfig, tp: int, prefix: str, part: Part, ep: int = 1, in_chunks: bool = False
) -> Iterator[ParameterSpec]:
    """Yield a part's parameters, each as its rule has it, with what the part says of it besides."""
    behind = part.behind()
    for name, shape in part.shapes(model).items():
        spec = _spec(model, tp, f"{prefix}.{name}", shape, part.first_value(name))
        before = f"{prefix}.{behind[name]}" if name in behind else ""
        spec = replace(spec, over=part.reduce_over(name), behind=before, has_gradient=part.has_gradient(name))
        if ep > 1 and part.counts_experts(name) and in_chunks:
            spec = replace(spec, apart=ep)
        elif ep > 1 and part.counts_experts(name):
            # Whole experts, whatever the rule cuts inside each. Over tp they lie as any other shard does.
            spec = replace(spec, shard_dim=0, replicas=1, ep=ep if ep != tp else 0)
        yield spec


def _spec(model: ModelConfig, tp: int, name: str, shape: tuple[int, ...], first: float = 0.0) -> ParameterSpec:
    """Return the parameter as its rule has it; vectors begin as `first`."""
    module = name.rpartition(".")[0]
    rule = rule_of(model, module).rule
    is_matrix, dim = len(shape) > 1, rule.dim_of(len(shape))
    if dim is None and not is_matrix:
        return ParameterSpec(name, shape, None, init=first)
    std = init_std(model)
    if rule.cut == "row":
        # Every block adds two terms to the residual stream: their scale keeps its variance independent of depth.
        std /= math.sqrt(2 * model.num_layers)
    replicas = max(1, tp // (shape[dim] // model.head_size)) if rule.by_heads and dim is not None else 1
    return ParameterSpec(
        name, shape, dim, replicas, init_std=std if is_matrix else None, init=0.0 if is_matrix else first
    )


def stage_specs(
    model: ModelConfig, tp: int, first: int, last: int, ep: int = 1, *, in_chunks: bool = False
) -> tuple[ParameterSpec, ...]:
    """Parameters that the stage of layers [first, last) holds, in the order of their first use in forward.

    The stage of layer 0 holds the embedding, that of the last layer the final norm and the head. Tied embeddings
    have no `lm_head.weight`: the last stage holds a copy of `embed_tokens.weight`, or, if it is also the first
    stage, the same tensor.

    Args:
        ep: ranks that share experts (parallel.ep); with 1 each expert is cut over tp.
        in_chunks: such a rank has whole experts as all shards of the table of `tp` (exact mode).
    """
    specs: list[ParameterSpec] = []
    embedding, ends = embedding_spec(model, tp), architecture_of(model).ends(model)
    if first == 0:
        specs.append(embedding)
        specs += [_spec(model, tp, POSITIONS, shape) for shape in ends.positions(model).values()]
    for layer in range(first, last):
        specs.extend(layer_specs(model, tp, layer, ep, in_chunks))
    if last == model.num_layers:
        specs += _part_specs(model, tp, "norm", ends.norm)
        if not model.tie_embeddings:
            specs.append(replace(embedding, name=HEAD))
        elif first != 0:
            specs.append(embedding)
    return tuple(specs)


def chunk_specs(
    model: ModelConfig, tp: int, layers: Sequence[tuple[int, int]], chunk: int
) -> tuple[ParameterSpec, ...]:
    """Parameters of chunk `chunk` of a model cut into `layers`, whose first and last range may hold no layer.

    Other engines give the embedding or the head a chunk of its own. The neighbour that begins or ends where that chunk
    does holds its layers alone.
    """
    specs, num = stage_specs(model, tp, *layers[chunk]), model.num_layers
    elsewhere: set[str] = set()
    if chunk > 0 and layers[chunk][0] == 0:
        elsewhere |= {spec.name for spec in stage_specs(model, tp, 0, 0)}
    if chunk < len(layers) - 1 and layers[chunk][1] == num:
        elsewhere |= {spec.name for spec in stage_specs(model, tp, num, num)}
    return tuple(spec for spec in specs if spec.name not in elsewhere)


def decays(model: ModelConfig, spec: ParameterSpec) -> bool:
    """Return whether weight decay applies: to matrices, but for those that the architecture names."""
    passed_over = architecture_of(model).undecayed
    return spec.is_matrix and not any(fnmatchcase(spec.name, pattern) for pattern in passed_over)


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, tied ones counted once, vocabulary padding not counted."""
    total = 0
    for spec in stage_specs(model, 1, 0, model.num_layers):
        rows = spec.shape[0] if spec.valid_rows is None else spec.valid_rows
        total += rows * math.prod(spec.shape[1:])
    return total


def num_matmul_parameters(model: ModelConfig) -> int:
    """Parameters that a token is multiplied with: all matrices but the lookups, of experts k; a tied head counts."""
    head = model.vocab_size * model.hidden_size
    return head + sum(num for layer in range(model.num_layers) for num in elements_per_token(model, layer).values())


def layers_of_experts(model: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of the layers whose tokens a router sends to experts."""
    blocks = ((layer, architecture_of(model).block(model, layer)) for layer in range(model.num_layers))
    return tuple(layer for layer, parts in blocks if any(isinstance(part, Experts) for part in parts.values()))


def elements_per_token(model: ModelConfig, layer: int) -> dict[str, int]:
    """Return by name of a layer's matrix how many of its elements a token is multiplied with."""
    return {
        f"layers.{layer}.{part_name}.{name}": num
        for part_name, part in architecture_of(model).block(model, layer).items()
        for name, num in part.elements_per_token(model).items()
    }


@dataclass(frozen=True)
class Gradient:
    """One buffer that backward adds to.

    Attributes:
        name: unique on the rank.
        numel: elements on one rank.
        reduce_over: axes of the ranks over which it is summed while backward runs.
        joined: lies in one bucket with the gradient before it, and right behind that.
        alone: has a bucket of its own.
        behind: the gradient behind which it lies, where one product adds to both.
    """

    name: str
    numel: int
    reduce_over: tuple[Axis, ...]
    joined: bool = False
    alone: bool = False
    behind: str = ""


def gradients_of(specs: Sequence[ParameterSpec], tp: int, *, packed: bool = False) -> tuple[Gradient, ...]:
    """A buffer for each parameter, under its name.

    Args:
        packed: what one matmul reads as one matrix shares a bucket. Where several ranks hold the same KV heads, Q is
            summed over others than K and V, and so lies apart.
    """
    return tuple(
        Gradient(
            spec.name,
            spec.local_numel(tp),
            spec.reduce_over,
            joined=packed
            and before is not None
            and before.name == spec.behind
            and before.reduce_over == spec.reduce_over,
            behind=spec.behind,
        )
        for before, spec in zip((None, *specs), specs, strict=False)
    )


def packs_of(gradients: Sequence[Gradient]) -> tuple[tuple[str, ...], ...]:
    """Return those of a bucket's gradients, in their order, that belong to one matrix and lie behind each other."""
    packs: list[list[str]] = []
    for before, gradient in itertools.pairwise(gradients):
        if before.name != gradient.behind:
            continue
        if packs and packs[-1][-1] == before.name:
            packs[-1].append(gradient.name)
        else:
            packs.append([before.name, gradient.name])
    return tuple(map(tuple, packs))


def in_order_of_packing(pieces: Mapping[str, Piece]) -> list[str]:
    """Return the names of a rank's pieces so that what one shard's matmul reads as one matrix lies together."""
    keys: dict[str, tuple[int, int, int]] = {}
    group, before = 0, ""
    for place, (name, piece) in enumerate(pieces.items()):
        # The shards of one parameter follow each other, and so do those of the parameters that are packed behind it.
        if piece.spec.name != before and not piece.spec.behind:
            group += 1
        before, keys[name] = piece.spec.name, (group, piece.holder, place)
    return sorted(pieces, key=keys.__getitem__)


def sliced_gradients(specs: Sequence[ParameterSpec], tp: int, alone: Collection[str] = ()) -> tuple[Gradient, ...]:
    """A buffer for each parameter, where replicas own slices of buckets (ZeRO) and weights lie as their gradients do.

    Sums over ranks that hold the same KV heads are taken later, of the slices, so that Q, K and V share a bucket.

    Args:
        alone: names of those that need buckets of their own.
    """
    return tuple(
        Gradient(
            spec.name,
            spec.local_numel(tp),
            tuple(axis for axis in spec.reduce_over if axis != "replica"),
            joined=bool(spec.behind),
            alone=spec.name in alone,
            behind=spec.behind,
        )
        for spec in specs
    )


def leaf_name(name: str, shard: int, head: bool = False) -> str:
    """Name of the buffer that the rank's shard, counted from its first, adds to; `head`: as output head."""
    return f"{name}#{shard}{HEAD_USE if head else ''}"


def leaf_parts(leaf: str) -> tuple[str, int, bool]:
    """What `leaf_name` made a name of."""
    name, shard, *head = leaf.split("#")
    return name, int(shard), bool(head)


def exact_gradients(
    specs: Sequence[ParameterSpec],
    num_shards: int,
    num_held: int,
    embedding_uses: Sequence[bool],
    *,
    sliced: bool = False,
) -> tuple[Gradient, ...]:
    """A buffer for each parameter and shard: in exact mode each adds to its own, and they are added at the end.

    Args:
        specs: of a chunk, from the table of `num_shards` ranks.
        num_held: shards that a rank holds.
        embedding_uses: the uses that the chunk makes of the embedding table, each with buffers of its own; True where
            it is the head of a model whose embedding lies on the same rank.
        sliced: replicas own slices (ZeRO): all shards' buffers of what one matmul reads share a bucket; those of the
            embedding have buckets of their own.
    """
    # Each buffer begins at a cache line, so that its alignment does not follow from what lies before it.
    elements = ALIGNMENT_BYTES // 4
    return tuple(
        Gradient(
            leaf_name(spec.name, rank, head),
            -(-spec.local_numel(num_shards) // elements) * elements,
            # The trees add the shards' gradients, and those of who shares a KV head.
            tuple(axis for axis in spec.reduce_over if axis not in ("tp", "replica")),
            joined=sliced and (rank > 0 or bool(spec.behind)),
            alone=sliced and spec.name == EMBEDDING,
        )
        for spec in specs
        for head in (embedding_uses if spec.name == EMBEDDING else (False,))
        # Whole experts are there with all their shards.
        for rank in range(num_shards if spec.apart else num_held)
    )


@dataclass(frozen=True)
class BucketLayout:
    """One flat gradient buffer: which gradients lie in it, in which order, and who sums it.

    Attributes:
        reduce_over: axes of the ranks that hold parts of its sum; where replicas own slices (ZeRO), dp alone is summed
            while backward runs.
        names: its gradients, in the order in which backward completes them; in that of their use in forward where
            replicas own slices or gradients are packed.
        numels: elements of each on one rank.
        packs: names of gradients that one product adds to, each right behind the last: they are rows of one matrix.
    """

    reduce_over: tuple[Axis, ...]
    names: tuple[str, ...]
    numels: tuple[int, ...]
    packs: tuple[tuple[str, ...], ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self.numels)


# What is reduced in smaller pieces costs more in latency than it saves in waiting.
_SMALLEST_BUCKET_BYTES = 1_000_000


def bucket_layouts(
    gradients: Sequence[Gradient],
    bucket_bytes: int,
    item_bytes: int,
    *,
    tapered: bool = False,
    in_order_of_use: bool = False,
    packed: bool = False,
) -> tuple[BucketLayout, ...]:
    """Cut a chunk's gradients into flat buckets, ordered by when backward completes them.

    Args:
        gradients: the chunk's, in the order of their parameters' first use in forward.
        bucket_bytes: a bucket is closed as soon as it holds at least so many; one gradient is never cut.
        item_bytes: bytes of a gradient element (gradients accumulate in promote_types(dtype, float32)).
        tapered: the buckets become smaller towards the end, each about half of what is left, down to 1 MB: for a chunk
            whose last backward is the step's last, where only the last bucket's reduction is not hidden.
        in_order_of_use: a bucket's gradients lie in the order of their use in forward, as weights do that share it.
        packed: the same order, and what lies behind each other as rows of one matrix is declared to.

    Returns:
        Buckets in the order of their last contribution. Backward completes gradients in the reverse order of
        first use; a bucket is complete with its last one. Gradients summed over different ranks lie in different
        buckets.
    """
    open_buckets: dict[tuple[Axis, ...], list[Gradient]] = {}
    closed: list[list[Gradient]] = []
    completion = {gradient.name: place for place, gradient in enumerate(reversed(gradients))}
    left = item_bytes * sum(gradient.numel for gradient in gradients)
    for gradient in reversed(gradients):
        left -= item_bytes * gradient.numel
        if gradient.alone:
            closed.append([gradient])
            continue
        bucket = open_buckets.setdefault(gradient.reduce_over, [])
        bucket.append(gradient)
        limit = min(bucket_bytes, max(left, _SMALLEST_BUCKET_BYTES)) if tapered else bucket_bytes
        if item_bytes * sum(g.numel for g in bucket) >= limit and not gradient.joined:
            closed.append(open_buckets.pop(gradient.reduce_over))
    closed.extend(open_buckets.values())
    closed.sort(key=lambda bucket: completion[bucket[-1].name])
    if in_order_of_use or packed:
        closed = [bucket[::-1] for bucket in closed]
    return tuple(
        BucketLayout(
            bucket[0].reduce_over,
            tuple(g.name for g in bucket),
            tuple(g.numel for g in bucket),
            packs_of(bucket) if packed else (),
        )
        for bucket in closed
    )
