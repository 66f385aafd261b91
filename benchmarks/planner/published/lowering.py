"""The plan of a row: its model as a configuration, its layout as chunks and buckets, lowered and verified as our own.

Schedules are those of the plan's own room, by the names that others give them; one more, ZB-2p, is here: it holds twice
the activations of 1F1B, which ours do not and published runs do. FSDP without a pipeline is a plan too:
each block is a chunk, whose weights are gathered while the chunk before it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.planner.published.frameworks import EngineOfRow
from benchmarks.planner.published.row import Row
from benchmarks.planner.published.sizes import Sizes, schedule_words
from tpengine.config import Config, ModelConfig, ParallelConfig, TrainConfig
from tpengine.config.settings import ModelDetails
from tpengine.layout.parameters import BucketLayout, chunk_specs, num_parameters
from tpengine.layout.step_plan import Layout, PlacedBucket
from tpengine.plan import (
    Bucket,
    Chunk,
    Gathered,
    Plan,
    Recompute,
    Reduced,
    Residency,
    Schedule,
    TensorSpec,
    Tie,
    Weights,
    lower,
    make_schedule,
    verify,
)
from tpengine.plan.actions import Action, Kind

# Words in a row's schedule, the more particular ones first, and our name. ZB-1p holds what 1F1B does, as ZB-H1.
_SCHEDULES = {
    "zb-v": "zbv",
    "zbv": "zbv",
    "zb-2p": "zb-2p",
    "zb-h2": "zb-2p",
    "zb-1p": "zb-h1",
    "zb-h1": "zb-h1",
    **{
        "zb2p": "zb-2p",
        "zbh2": "zb-2p",
        "zb1p": "zb-h1",
        "zbh1": "zb-h1",
        "zero-bubble": "zb-h1",
        "zero bubble": "zb-h1",
    },
    "1f1b-i": "interleaved",
    "interleav": "interleaved",
    "virtual": "interleaved",
    "gpipe": "gpipe",
    "afab": "gpipe",
    "all-forward": "gpipe",
    "1f1b": "1f1b",
    "pipedream": "1f1b",
    "dapple": "1f1b",
}


@dataclass(frozen=True)
class Lowering:
    """What is the same for every number of micro-batches.

    Attributes:
        config: the model and the batch. It is no run's: rules of runs do not hold for it.
        layout: chunks, and a bucket or some for each.
        engine: options.
        schedule: our name.
        tied: whether the ends share the embedding.
        is_asynchronous: no stage waits for the others before it steps.
        counts_ends: the plan counts the embedding and the head as a layer each, for chunks that hold nothing else.
    """

    config: Config
    layout: Layout
    engine: EngineOfRow
    schedule: str
    tied: bool
    is_asynchronous: bool
    counts_ends: bool = False

    def with_blocks(self, plan: Plan) -> Plan:
        """Return a plan whose chunks name the blocks that they hold, for costs; some may hold none."""
        if not self.counts_ends:
            return plan
        pairs = zip(plan.chunks, self.layout.layers, strict=True)
        return replace(plan, chunks=tuple(replace(chunk, layers=layers) for chunk, layers in pairs))

    def plan(self, num_micro_batches: int) -> Plan:
        """Return the verified plan of so many micro-batches."""
        config, layout, engine = self.config, self.layout, self.engine
        train, last = config.train, len(layout.ranks) - 1
        tokens = train.micro_batch_size * train.seq_len // engine.engine.context_ranks
        # Ranks that hold all tokens send a share each, or all of them.
        is_cut = engine.engine.cuts_rows or engine.engine.scatters_transfers
        boundary = TensorSpec((-(-tokens // layout.tp) if is_cut else tokens, config.model.hidden_size), train.dtype)
        chunks = tuple(
            Chunk(
                rank,
                layers,
                input=boundary if index else None,
                output=boundary if index < last else None,
                recompute=Recompute(config.parallel.recompute),
                gathered=Gathered(config.parallel.gathered),
            )
            for index, (rank, layers) in enumerate(zip(layout.ranks, layout.layers, strict=True))
        )
        num_layers = config.model.num_layers + 2 * self.counts_ends
        if self.counts_ends:
            ranges = split_layers(num_layers, len(chunks))
            chunks = tuple(replace(chunk, layers=layers) for chunk, layers in zip(chunks, ranges, strict=True))
        shares_rank = layout.ends_share_a_rank
        plan = lower(
            _schedule(self.schedule, layout, num_micro_batches, config.parallel.chunks_per_rank),
            chunks,
            [_bucket(index, placed, layout.zero, engine) for index, placed in layout.buckets.items()],
            (Tie(0, (0, last)),) if self.tied and not shares_rank else (),
            num_microbatches=num_micro_batches,
            num_layers=num_layers,
            training=True,
            residency=Residency.USE if engine.in_units and layout.pp == 1 else Residency.STEP,
        )
        verify(plan)
        return plan


def lowering_of(row: Row, sizes: Sizes, engine: EngineOfRow) -> Lowering:
    """Return the lowering of a row.

    Raises:
        ValueError: a schedule or network that is not known, or layers that are too few; one line.
    """
    schedule, is_asynchronous = _schedule_name(row, sizes)
    chunks_per_rank = {"interleaved": sizes.chunks, "zbv": 2}.get(schedule, 1)
    in_units = engine.in_units and sizes.pp == 1
    ranks = (0,) * sizes.layers if in_units else make_or_loop(schedule, sizes.pp, chunks_per_rank)
    # One layer less on the first and the last chunk may leave none.
    counts_ends = len(ranks) == sizes.layers + 2
    layers = split_layers(sizes.layers + 2 * counts_ends, len(ranks))
    if engine.num_ends and sizes.pp > 1:
        layers = _split_with_ends(sizes.layers, engine.num_ends, len(ranks)) or layers
    if counts_ends:
        layers = tuple((max(0, first - 1), min(sizes.layers, end - 1)) for first, end in layers)
    model, tied = _model(row, sizes)
    config = Config(
        model=model,
        parallel=ParallelConfig(
            tp=sizes.tp,
            pp=sizes.pp,
            dp=sizes.dp * sizes.cp,
            schedule=schedule,
            chunks_per_rank=chunks_per_rank,
            recompute="block" if engine.recomputes else "none",
            gathered="again"
            if sizes.tp > 1 and engine.engine.cuts_rows and not engine.engine.keeps_gathered
            else "keep",
            tp_comm="fused" if engine.fuses else "plain",
            zero=sizes.zero,  # type: ignore[arg-type]
        ),
        train=TrainConfig(
            seq_len=sizes.seq,
            micro_batch_size=sizes.micro_batch,
            # `plan` takes their number.
            num_micro_batches=1,
            dtype=engine.dtype,  # type: ignore[arg-type]
        ),
    )
    buckets = _buckets(model, sizes, layers, 1 if in_units else engine.num_buckets) if sizes.dp * sizes.cp > 1 else {}
    layout = Layout(sizes.pp, sizes.dp * sizes.cp, sizes.tp, ranks, layers, buckets, sizes.zero)
    return Lowering(config, layout, engine, schedule, tied, is_asynchronous, counts_ends)


def split_layers(num_layers: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Split layers as launchers do: evenly; else the first and the last chunk have one less; else the first ones more.

    Raises:
        ValueError: fewer layers than chunks.
    """
    if num_layers < num_chunks:
        raise ValueError(f"every chunk must have a layer: got {num_layers} layers for {num_chunks} chunks: use fewer")
    sizes = [num_layers // num_chunks] * num_chunks
    left = num_layers % num_chunks
    if num_chunks > 2 and left == num_chunks - 2:
        sizes = [sizes[0], *[sizes[0] + 1] * (num_chunks - 2), sizes[0]]
    else:
        sizes = [size + (index < left) for index, size in enumerate(sizes)]
    ends = [sum(sizes[: index + 1]) for index in range(num_chunks)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _split_with_ends(num_layers: int, num_ends: int, num_chunks: int) -> tuple[tuple[int, int], ...] | None:
    """Split blocks and ends as equal layers, the first chunks longer; None if a chunk would have no block.

    One end is before the first block, the others are behind the last.
    """
    each, left = divmod(num_layers + num_ends, num_chunks)
    starts = [chunk * each + min(chunk, left) for chunk in range(num_chunks + 1)]
    blocks = [min(num_layers, max(0, start - 1)) for start in starts]
    layers = tuple(pairwise(blocks))
    return layers if all(first < end for first, end in layers) else None


def make_or_loop(schedule: str, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Return the rank of each chunk."""
    if schedule == "zb-2p":
        return tuple(range(num_ranks))
    return make_schedule(schedule, num_ranks, 1, num_chunks).ranks


def _schedule_name(row: Row, sizes: Sizes) -> tuple[str, bool]:
    text = schedule_words(row)
    found = next((name for word, name in _SCHEDULES.items() if word in text), "")
    if text and not found:
        raise ValueError(f"schedule must be one of {', '.join(_SCHEDULES)}: got {text!r}: use the nearest")
    if sizes.pp == 1:
        return "1f1b", False
    if found in ("", "1f1b") and sizes.chunks > 1:
        found = "interleaved"
    # Zero-bubble runs validate the step behind it instead of waiting in it (section 4 of their paper).
    return found or "1f1b", found in ("zbv", "zb-2p", "zb-h1") and "sync" not in text


def _schedule(name: str, layout: Layout, num_micro_batches: int, num_chunks: int) -> Schedule:
    if layout.pp == 1 and len(layout.ranks) > 1:
        chunks = range(len(layout.ranks))
        actions = [
            Action(kind, chunk, microbatch)
            for microbatch in range(num_micro_batches)
            for kind, order in ((Kind.F, chunks), (Kind.B, reversed(chunks)))
            for chunk in order
        ]
        return Schedule("units", layout.ranks, (tuple(actions),))
    if name == "zb-2p":
        return zb_2p(layout.pp, num_micro_batches)
    return make_schedule(name, layout.pp, num_micro_batches, num_chunks)


def _model(row: Row, sizes: Sizes) -> tuple[ModelConfig, bool]:
    architecture = "llama" if row.mlp() == "swiglu" else "gpt2"
    is_gpt = architecture == "gpt2"

    def model(tied: bool) -> ModelConfig:
        return ModelConfig(
            architecture=architecture,
            hidden_size=sizes.hidden,
            num_layers=sizes.layers,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            ffn_size=sizes.ffn,
            vocab_size=sizes.vocab,
            tie_embeddings=tied,
            details=ModelDetails(head_size=sizes.head_size, max_positions=sizes.seq if is_gpt else 0),
        )

    both = {tied: model(tied) for tied in (True, False)}
    if "tied" in row.text("emb"):
        tied = "untied" not in row.text("emb")
    elif sizes.params_b:
        # The number of parameters tells, if it has digits enough.
        far = {tied: abs(num_parameters(of) / 1e9 - sizes.params_b) for tied, of in both.items()}
        tied = far[True] <= far[False]
    else:
        tied = is_gpt
    return both[tied], tied


def _buckets(
    model: ModelConfig, sizes: Sizes, layers: Sequence[tuple[int, int]], num_buckets: int
) -> dict[int, PlacedBucket]:
    """Return equal buckets of each chunk's parameters."""
    found: dict[int, PlacedBucket] = {}
    for chunk in range(len(layers)):
        numel = sum(spec.local_numel(sizes.tp) for spec in chunk_specs(model, sizes.tp, layers, chunk))
        for part in range(num_buckets):
            share = numel * (part + 1) // num_buckets - numel * part // num_buckets
            layout = BucketLayout(("dp",), (f"chunk {chunk} part {part}",), (share,))
            found[len(found)] = PlacedBucket((chunk,), layout)
    return found


def _bucket(index: int, placed: PlacedBucket, zero: int, engine: EngineOfRow) -> Bucket:
    weights = {0: Weights.WHOLE, 3: Weights.SLICED}.get(zero, Weights.UPDATED)
    each = engine.in_units and len(placed.chunks) == 1
    return Bucket(index, placed.chunks, weights, Reduced.MICROBATCH if each else Reduced.STEP)


def zb_2p(num_ranks: int, num_microbatches: int) -> Schedule:
    """List forwards until the first gradient can arrive, then input halves and forwards in turns, weight halves behind.

    Rank r begins with 2 (p - r) - 1 forwards, as many as fit before its first gradient if all halves take equally long.
    A weight half runs where its rank would wait, or would hold more than 2 p micro-batches, which is the limit that
    ZB-2p is named after; ZB-H2, which it improves, holds 2 p - 1.

    Args:
        num_ranks: p.
        num_microbatches: m, at least 1.

    Returns:
        The schedule, one chunk per rank.
    Source: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.3, ZB-H2, and the limits of section 4.
    """
    order = [_without_weight_halves(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    put_off: list[deque[Action]] = [deque() for _ in order]
    lists: list[list[Action]] = [[] for _ in order]
    held, most = [0] * num_ranks, 2 * num_ranks
    made: set[tuple[bool, int, int]] = set()
    while any(order) or any(put_off):
        step = []
        for rank in range(num_ranks):
            following = order[rank][0] if order[rank] else None
            is_full = following is not None and following.kind is Kind.F and held[rank] >= most
            needed = None if following is None else _input(following, num_ranks)
            if following is not None and not is_full and (needed is None or needed in made):
                step.append((rank, order[rank].popleft()))
            elif put_off[rank]:
                step.append((rank, put_off[rank].popleft()))
        assert step, f"ZB-2p must not deadlock: no rank can continue, with {num_ranks} ranks"
        for rank, action in step:
            lists[rank].append(action)
            _, microbatch = action.piece
            held[rank] += (action.kind is Kind.F) - (action.kind is Kind.W)
            if action.kind is not Kind.W:
                made.add((action.kind is Kind.F, rank, microbatch))
            if action.kind is Kind.I:
                put_off[rank].append(Action(Kind.W, rank, microbatch))
    return Schedule("zb-2p", tuple(range(num_ranks)), tuple(map(tuple, lists)))


def _without_weight_halves(rank: int, num_ranks: int, num_microbatches: int) -> deque[Action]:
    first = min(num_microbatches, 2 * (num_ranks - rank) - 1)
    actions = deque(Action(Kind.F, rank, i) for i in range(first))
    for microbatch in range(num_microbatches):
        actions.append(Action(Kind.I, rank, microbatch))
        if first + microbatch < num_microbatches:
            actions.append(Action(Kind.F, rank, first + microbatch))
    return actions


def _input(action: Action, num_ranks: int) -> tuple[bool, int, int] | None:
    """Return (is an activation, rank, micro-batch) of what an action needs from another; None for the first rank's."""
    rank, microbatch = action.piece
    if action.kind is Kind.F:
        return (True, rank - 1, microbatch) if rank else None
    return (False, rank + 1, microbatch) if rank < num_ranks - 1 else (True, rank, microbatch)
