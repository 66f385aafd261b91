"""Rung: pure, and gloo ranks. The bytes the formulas predict are those that real layers keep, to the byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.nn import Parameter
from tpkernels.again import once
from tpkernels.exchange.communicator import Communicator

from tpengine.config import Config, ModelConfig, ParameterGroup, TrainConfig
from tpengine.config.settings import ModelDetails, RopeScaling
from tpengine.layers import vocab_parallel_cross_entropy
from tpengine.layers.gradient_sink import WeightTerms
from tpengine.layers.query_scaling import QueryScaling
from tpengine.layers.scores import tables_of
from tpengine.layout.groups import first_trained, frozen_of
from tpengine.model.parts import FastParts, rotation_of
from tpengine.model.transformer import Transformer
from tpengine.pipeline.stage import Stage
from tpengine.plan import Chunk, Gathered, Plan, Recompute, TensorSpec
from tpengine.planner import ChunkBytes
from tpengine.planner.modelled.activations import ChunkWalks, activation_bytes

SMALL = ModelConfig(hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=4, ffn_size=40, vocab_size=50)
DROPS = {"residual_dropout": 0.1, "attention_dropout": 0.2, "mlp_dropout": 0.3}
# Layers of the chunk that is built: a whole model, and each kind of part.
CHUNKS = [(0, 3), (0, 1), (1, 2), (1, 3)]


class Kept:
    """Distinct storages, but for those named at the start."""

    def __init__(self, shared: Iterable[Tensor]) -> None:
        self.shared = {tensor.untyped_storage().data_ptr() for tensor in shared}
        # The tensors stay here, so that no storage is freed and its address used again.
        self.tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor

    @property
    def num_bytes(self) -> int:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self.tensors}
        return sum(size for address, size in storages.items() if address not in self.shared)


class KeepingSink:
    """A sink of an input half: notes what the weight half would need, and never adds it."""

    defers = True
    is_autograds = False

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def weight_grads(self, terms: WeightTerms, dy: Tensor, x: Tensor, **_: Any) -> list[None]:
        self.tensors += [x, dy]
        return [None] * len(terms)

    def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Any = None) -> None:
        raise AssertionError("a weight gradient is part of what comes later")

    def add(self, param: Parameter, grad: Tensor, partial: Any = None) -> None:
        self.tensors.append(grad)

    def add_rows(self, param: Parameter, rows: Tensor, grad: Tensor) -> None:
        self.tensors += [rows, grad]

    def grouped_weight_grad(self, param: Parameter, dy: Tensor, x: Tensor, offsets: Tensor, **_: Any) -> None:
        self.tensors += [dy, x, offsets]


def plan_of(config: Config, layers: tuple[int, int], is_local: bool, **choices: Any) -> tuple[Plan, int]:
    """A plan of chunks on a rank each, or all on one, and the number of the chunk of these layers in it."""
    num_layers = config.model.num_layers
    spec = TensorSpec((config.train.micro_batch_size * config.train.seq_len, config.model.hidden_size), "float32")
    bounds = sorted({0, *layers, num_layers})
    ranges = list(itertools.pairwise(bounds))
    chunks = tuple(
        Chunk(0 if is_local else i, of, spec if i else None, spec if i < len(ranges) - 1 else None, **choices)
        for i, of in enumerate(ranges)
    )
    return Plan("by hand", 1, num_layers, chunks, (), (), tuple(() for _ in chunks), True), ranges.index(layers)


def predicted(
    config: Config, layers: tuple[int, int], tp: int = 1, is_local: bool = False, **choices: Any
) -> ChunkBytes:
    plan, index = plan_of(config, layers, is_local, **choices)
    return activation_bytes(config, tp, plan)[index]


def kept(
    config: Config,
    layers: tuple[int, int],
    comm: Communicator,
    recompute: Recompute = Recompute.NONE,
    gathered: Gathered = Gathered.KEEP,
    is_local: bool = False,
) -> tuple[int, int]:
    """What a chunk keeps from F to I, and from I to W, in bytes; its ends too where they are in no slot."""
    model, train = config.model, config.train
    dtype, sink = getattr(torch, train.dtype), KeepingSink()
    parts = FastParts(model, comm, sink=sink, dtype=dtype, gathers_again=gathered is Gathered.AGAIN)
    is_full = recompute is Recompute.FULL
    net = Transformer(parts, chunks=[layers], recompute=Recompute.NONE if is_full else recompute)
    net.initialise(0)
    frozen = frozen_of(config)
    for name, parameter in net.held.items():
        parameter.requires_grad_(net.pieces[name].spec.name not in frozen)
    gives_gradient = first_trained(model, frozen) < layers[0]
    net.position.training = True
    num_tokens = train.micro_batch_size * train.seq_len
    tokens = torch.arange(num_tokens) % model.vocab_size
    x, dy = (torch.ones(num_tokens // comm.size, model.hidden_size, dtype=dtype) for _ in range(2))
    is_first, is_last = layers[0] == 0, layers[1] == model.num_layers

    batch = SimpleNamespace(
        begin=lambda _: None,
        tokens=lambda _: tokens,
        loss=lambda logits, _: vocab_parallel_cross_entropy(logits, tokens, model.vocab_size, comm) * 0.5,
    )
    stage = Stage(
        lambda x: net(x, train.seq_len),
        batch,
        is_first=is_first,
        is_last=is_last,
        recompute=is_full,
        gives_gradient=gives_gradient,
    )
    if not is_first:
        stage.receive_input(0, x)
    if not is_last:
        stage.receive_output_grad(0, dy)
    shared = [*net.parameters(), *rope_tables_of(config, dtype), tokens, *([] if is_local else [x, dy])]
    saved, deferred = Kept(shared), Kept(shared)

    def noted(decide: Callable[[], Any]) -> Any:
        """What a computation decides once is kept beside autograd's tensors, where it is computed again."""
        found = once(decide)
        for tensor in found if recompute in (Recompute.BLOCK, Recompute.FULL) else ():
            saved.add(tensor)
        return found

    with (
        patch("tpengine.layers.routing.once", noted),
        torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor),
    ):
        stage.forward(0)
    if is_local and is_full and not is_first:
        saved.add(x)  # by the stage itself
    if any(parameter.requires_grad for parameter in net.parameters()) or gives_gradient:
        stage.backward(0)
    deferred.tensors = sink.tensors
    return saved.num_bytes, deferred.num_bytes


def rope_tables_of(config: Config, dtype: torch.dtype) -> list[Tensor]:
    """The cosines and sines, and factors of queries, that all layers and micro-batches share."""
    model, seq, rope = config.model, config.train.seq_len, config.model.details.rope
    wide = torch.promote_types(dtype, torch.float32)
    found = [*tables_of(seq, model.head_size, rotation_of(model), wide, torch.device("cpu"))]
    growth = QueryScaling(rope.llama_4_scaling_beta, max(1, rope.original_max_position_embeddings))
    factors = growth.factors(seq, torch.empty(0, dtype=dtype)) if growth.beta else None
    return found if factors is None else [*found, factors]


def config_of(dtype: str, batch: int, seq: int, **model: Any) -> Config:
    train = TrainConfig(seq_len=seq, micro_batch_size=batch, dtype=dtype)  # type: ignore[arg-type]
    return Config(model=replace(SMALL, **model), train=train)


EXPERTS = ModelDetails(num_experts=6, experts_per_token=2, expert_ffn_size=20)
MODELS: list[dict[str, Any]] = [
    {},
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "ffn_size": 72, "vocab_size": 70},
    {"num_heads": 1, "num_kv_heads": 1},
    {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 8, "ffn_size": 100, "vocab_size": 256},
    DROPS,
    {"num_kv_heads": 2, **DROPS},
    {"residual_dropout": 0.5},
    {"attention_dropout": 0.5, "num_heads": 1, "num_kv_heads": 1},
    {"details": ModelDetails(attention_bias=True, mlp_bias=True)},
    {"architecture": "qwen3", "num_kv_heads": 2, "details": ModelDetails(head_size=10)},
    {"architecture": "mistral", "details": ModelDetails(windows=(3, 3, 3))},
    {"architecture": "mistral", "num_kv_heads": 2, "details": ModelDetails(windows=(3, 0, 9)), **DROPS},
    {"architecture": "gpt2", "details": ModelDetails(max_positions=64)},
    {"architecture": "gemma3", "num_kv_heads": 2, "details": ModelDetails(windows=(3, 0, 9), local_rope_theta=1e4)},
    {
        "architecture": "granite",
        "num_kv_heads": 2,
        "details": ModelDetails(
            embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0, attention_scale=0.3
        ),
    },
    {"architecture": "olmo3", "num_kv_heads": 2, "details": ModelDetails(windows=(3, 0, 9), local_rope_theta=1e4)},
    {
        "architecture": "ministral3",
        "details": ModelDetails(rope=RopeScaling("yarn", 4.0, 4, llama_4_scaling_beta=0.1)),
    },
    {"architecture": "smollm3", "details": ModelDetails(rotates=(True, False, True), windows=(0, 3, 0))},
    {
        "architecture": "phi3",
        "num_kv_heads": 2,
        "details": ModelDetails(
            rope=RopeScaling("longrope", 2.0, 4, short_factor=(1.0,), long_factor=(2.0,), partial_rotary_factor=0.34)
        ),
    },
    {"architecture": "qwen3_moe", "num_kv_heads": 2, "details": replace(EXPERTS, has_experts=(True, False, True))},
    {"architecture": "mixtral", "residual_dropout": 0.5, "details": replace(EXPERTS, router_scores="sigmoid")},
    {"architecture": "qwen3_moe", "details": replace(EXPERTS, shared_expert_size=28)},
    {"architecture": "qwen3_moe", "details": replace(EXPERTS, shared_expert_size=28, gates_shared_expert=True)},
]


# Every model in one dtype, one of them in all; the others are slow.
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(
            model, dtype, marks=() if dtype == "float32" or model == DROPS else pytest.mark.slow, id=f"{model}-{dtype}"
        )
        for model, dtype in itertools.product(MODELS, ["float32", "bfloat16", "float64"])
    ],
)
def test_a_micro_batch_keeps_what_is_predicted(model: dict[str, Any], dtype: str) -> None:
    for batch, seq, layers in [(2, 5, layers) for layers in CHUNKS] + [(1, 63, (0, 3)), (3, 1, (0, 3))]:
        config = config_of(dtype, batch, seq, **model)
        want = predicted(config, layers)
        assert kept(config, layers, Communicator(None)) == (want.saved, want.deferred), (batch, seq, layers)


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_walks_end_with_what_is_kept(dtype: str, recompute: Recompute) -> None:
    """Forward: what is saved, and the output. Backward: the input's gradient; an input half, what it defers too."""
    for model in MODELS:
        config = config_of(dtype, 2, 5, **model)
        for layers, is_local in itertools.product(CHUNKS, (False, True)):
            plan, index = plan_of(config, layers, is_local, recompute=recompute)
            walks, size = ChunkWalks(config, 1, plan.chunks, index), activation_bytes(config, 1, plan)[index]
            x = walks.s.x
            saved = int(size.saved) + (recompute is Recompute.FULL and walks.is_first) * walks.ends.kept_first(walks.s)
            if recompute is not Recompute.FULL or not walks.is_last:
                assert walks.forward(recompute).now == saved + (0 if walks.is_last else x)
            for defers, stays in ((False, 0), (True, int(size.deferred))):
                assert walks.backward(int(size.saved), defers=defers).now == stays + (0 if walks.is_first else x)
            assert min(size.working.values()) >= 0


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("is_local", [False, True], ids=["received", "local"])
@pytest.mark.parametrize(
    "model",
    [
        *(pytest.param(model, marks=pytest.mark.slow) for model in ({}, {"num_kv_heads": 2})),
        DROPS,
        {"architecture": "mixtral", "details": EXPERTS},
    ],
    ids=["llama", "shared heads", "dropout", "experts"],
)
def test_what_is_computed_again_is_not_kept(model: dict[str, Any], is_local: bool, recompute: Recompute) -> None:
    """Recomputing does not change what the weight half needs. A tensor from a chunk of the same rank is in no slot."""
    for layers in CHUNKS:
        config = config_of("float32", 2, 5, **model)
        want = predicted(config, layers, is_local=is_local, recompute=recompute)
        got = kept(config, layers, Communicator(None), recompute, is_local=is_local)
        assert got == (want.saved, want.deferred), layers


def by_ranks(layers: tuple[int, int], gathered: Gathered) -> None:
    comm = Communicator(dist.group.WORLD)
    for model in ({}, {"num_kv_heads": 2, "hidden_size": 32}, DROPS, {"architecture": "olmo3"}):
        config = config_of("float32", 2, 6, **model)
        want = predicted(config, layers, comm.size, gathered=gathered)
        got = kept(config, layers, comm, gathered=gathered)
        assert got == (want.saved, want.deferred), f"{model}: {got} kept, {want}"


# By default the whole model.
@pytest.mark.by_default("keep-layers0")
@pytest.mark.parametrize(
    "layers", [CHUNKS[0], *(pytest.param(layers, marks=pytest.mark.slow) for layers in CHUNKS[1:])]
)
@pytest.mark.parametrize("gathered", list(Gathered))
def test_on_two_ranks(ranks: RankPool, gathered: Gathered, layers: tuple[int, int]) -> None:
    ranks.run(by_ranks, 2, layers, gathered)


FROZEN: list[tuple[str, ...]] = [
    ("model.embed_tokens.*", "model.layers.[01].*"),
    ("model.embed_tokens.*", "model.layers.0.*", "*.[kv]_proj.weight", "*.down_proj.weight"),
    ("*.up_proj.weight", "*.o_proj.weight", "*norm*"),
    ("model.layers.1.*", "lm_head.weight"),
]


@pytest.mark.parametrize("patterns", FROZEN, ids=lambda patterns: patterns[-1])
def test_frozen_weights_leave_nothing_for_the_weight_half(patterns: tuple[str, ...]) -> None:
    """Blocks below the lowest trained weight keep nothing at all."""
    groups = tuple(ParameterGroup(pattern, frozen=True) for pattern in patterns)
    base = config_of("float32", 2, 5)
    config = replace(base, optim=replace(base.optim, groups=groups))
    for layers in CHUNKS:
        want, plan = predicted(config, layers), plan_of(config, layers, False)[0]
        assert kept(config, layers, Communicator(None)) == (want.saved, want.deferred), (layers, plan.chunks)
        assert min(want.working.values()) >= 0
