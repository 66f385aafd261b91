"""Rung: gloo ranks. Exact mode's layers as modules of anybody's model: without the engine's sinks, under torch's
optimizers, copied, loaded, pickled and compiled; and what they refuse.

Their numbers and bits are in test_exact_layers.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from support.engine.exact_cases import (
    CASES,
    EPS,
    SEQ,
    VOCAB,
    D,
    T,
    assert_close,
    load,
    model_of,
    parameter_of,
    plain_attention,
    rows,
    tensor,
    world,
)
from support.ranks.rank_pool import RankError, RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.architectures import describe
from tpengine.config import ModelConfig
from tpengine.layers.collectives import ShardCommunicator
from tpengine.model.exact import ExactNorm, Shards
from tpengine.model.parts import ExactParts


def gradients_by_default(kv_heads: int) -> dict[str, Tensor]:
    """`weight.grad` by shard, in a model of one's own: an embedding that is also the head, a norm, attention."""
    shards = world(8)
    parts = ExactParts(model_of(kv_heads), shards, dtype=torch.float64)
    embedding, norm = parts.embedding(VOCAB), parts.layer(describe.Norm())
    attention = parts.layer(describe.Attention(), None)
    head = parts.head(VOCAB, embedding)
    layers = {"embedding": embedding, "norm": norm, f"attention of {kv_heads} kv heads": attention}
    for name, layer in layers.items():
        load(layer, CASES[name], CASES[name].tensors(torch.float64)[1], shards)
    x = embedding(CASES["embedding"].input)
    logits = head(x + attention(norm(x), SEQ))
    target = rearrange(tensor(8, T, VOCAB), "t (v c) -> v t c", v=8)
    (logits * rows(target, shards.comm)).sum().backward()
    return {
        f"{name} {weight} {shard}": parameter_of(layer, shard, weight).grad  # type: ignore[misc]
        for name, layer in layers.items()
        for shard in shards.held
        for weight in CASES[name].weights
    }


def plain_gradients(kv_heads: int) -> dict[str, Tensor]:
    """The gradient of each shard of the same model in plain torch."""
    names = ("embedding", "norm", f"attention of {kv_heads} kv heads")
    leaves = {
        (name, weight): value.requires_grad_()
        for name in names
        for weight, value in CASES[name].tensors(torch.float64)[1].items()
    }
    table, norm, *projections = leaves.values()
    x = F.embedding(CASES["embedding"].input, table)
    y = x + plain_attention(F.rms_norm(x, (D,), norm, EPS), *projections)
    (y @ table.T * tensor(8, T, VOCAB)).sum().backward()
    return {
        f"{name} {weight} {shard}": CASES[name].weights[weight].cut(leaf.grad, shard, 8)  # type: ignore[arg-type]
        for (name, weight), leaf in leaves.items()
        for shard in range(8)
    }


@pytest.mark.parametrize(("num_ranks", "kv_heads"), [(1, 1), (2, 2), (4, 4), (4, 8)])
def test_weight_grad_is_whole_without_a_sink(ranks: RankPool, num_ranks: int, kv_heads: int) -> None:
    """`weight.grad` of a parameter that several shards use is the sum over all of them:

    - a norm weight, held by every rank: the layer sums it over ranks at once;
    - a KV head's weight: a rank that has it holds all shards that share it, else the layer is refused;
    - an embedding that is also the head: both uses together.

    The orders of these sums depend on the number of ranks, hence their last bits do: the engine has sinks of its own.
    """
    found = {
        name: grad for of_rank in ranks.run(gradients_by_default, num_ranks, kv_heads) for name, grad in of_rank.items()
    }
    want = plain_gradients(kv_heads)
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert_close(name, found[name], gradient)


def build_attention(kv_heads: int) -> None:
    ExactParts(model_of(kv_heads), world(8)).layer(describe.Attention(), None)


def test_ranks_that_share_a_kv_head_need_sinks(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"num_kv_heads must be at least tp .*: num_kv_heads 1, tp 2: pass sinks"):
        ranks.run(build_attention, 2, 1)


def train_with_torchs_optimizer() -> list[Tensor]:
    """Gate, up and down projection after 5 steps, whole."""
    shards, case = world(4), CASES["swiglu"]
    layer = ExactParts(case.model, shards, dtype=torch.float64).layer(describe.FeedForward(), None)
    x, weights, target = case.tensors(torch.float64)
    load(layer, case, weights, shards)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        (layer(rows(x, shards.comm)) - rows(target, shards.comm)).square().sum().backward()
        optimizer.step()
    return [
        torch.cat(list(shards.comm.all_gather(torch.stack(mine))), how.dim)
        for name, how in case.weights.items()
        for mine in [[parameter_of(layer, shard, name).detach() for shard in shards.held]]
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_any_optimizer_trains_them(ranks: RankPool, num_ranks: int) -> None:
    """A step changes weights in place, which the prepared copies of the next forward must not miss."""
    case = CASES["swiglu"]
    x, weights, target = case.tensors(torch.float64)
    leaves = [value.requires_grad_() for value in weights.values()]
    optimizer = torch.optim.Adam(leaves, lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        (case.plain(x, *leaves) - target).square().sum().backward()
        optimizer.step()
    for trained in ranks.run(train_with_torchs_optimizer, num_ranks):
        for got, want in zip(trained, leaves, strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-9)


def parts_of(shards: Shards, **sizes: int) -> ExactParts:
    settings: dict[str, Any] = {"hidden_size": 8, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 8, **sizes}
    return ExactParts(ModelConfig(**settings), shards)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda v: parts_of(v).layer(describe.Norm())(torch.zeros(10, 8)), "10 tokens, shards 4: pad to 12"),
        (lambda v: parts_of(v).embedding(12)(torch.zeros(10, dtype=torch.int64)), "10 tokens, shards 4: pad to 12"),
        (lambda v: parts_of(v).embedding(12)(torch.full((4,), 12)), "got 12 to 12, vocabulary 12: use 0 to 11"),
        (lambda v: parts_of(v).embedding(13), "13 rows, tp 4: pad to 16"),
        (
            lambda v: parts_of(v).head(13, None),
            "out_features 13 is not divisible by 4 shards: use 12 or 16",
        ),
        (
            lambda v: parts_of(v, ffn_size=13).layer(describe.FeedForward(), None),
            "out_features 13 is not divisible by 4 shards: use 12 or 16",
        ),
        (
            lambda v: parts_of(v, hidden_size=24, num_heads=6, num_kv_heads=6).layer(describe.Attention(), None),
            "num_heads 6, num_kv_heads 6, tp 4: use num_heads a multiple of num_kv_heads and tp",
        ),
        (
            lambda v: parts_of(v, hidden_size=24, num_heads=12, num_kv_heads=3).layer(describe.Attention(), None),
            "num_kv_heads 3, tp 4, replicas None: use num_kv_heads 4",
        ),
        (lambda v: Shards(v.comm, 6), "6 shards, tp 1: use 8 on 1, 2, 4 or 8 ranks"),
    ],
)
def test_impossible_shapes_are_refused(build: Callable[[Shards], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(Shards(Communicator(None), 4))


def test_a_kv_heads_weight_is_one_parameter_of_the_shards_that_share_it() -> None:
    """It stays one in a copy, and after its memory was replaced; each shard multiplies by its present value."""
    case, shards = CASES["attention of 2 kv heads"], Shards(Communicator(None), 8)
    layer = ExactParts(case.model, shards, dtype=torch.float64).layer(describe.Attention(), None)
    x, weights, _ = case.tensors(torch.float64)
    load(layer, case, weights, shards)
    kv = {id(parameter_of(layer, shard, "k_proj")) for shard in shards.held}
    assert len(kv) == 2 and len(list(layer.parameters())) == 2 * 8 + 2 * 2
    assert_close("y", layer(x, SEQ), case.plain(x, *weights.values()))
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for name in ("k_proj", "v_proj"):
            weights[name] *= -2
            for shard in (0, 4):
                parameter_of(layer, shard, name).mul_(-2)
                # As load_state_dict(assign=True): other memory.
                parameter_of(other, shard, name).data = parameter_of(layer, shard, name).detach().clone()
    for changed in (layer, other):
        assert_close("y", changed(x, SEQ), case.plain(x, *weights.values()))


def test_a_shards_ranks_exchange_nothing_by_themselves() -> None:
    ranks, x = ShardCommunicator(2, 4, Communicator(None)), torch.ones(3, 2)
    assert ranks.all_gather(x) is x and ranks.reduce_scatter(x) is x
    assert torch.equal(ranks.all_reduce_(x), torch.ones(3, 2)), "of one real rank"
    with pytest.raises(AssertionError, match="exchanges nothing by itself"):
        ranks.all_reduce_max_(x)


def test_the_norms_of_all_shards_have_one_weight() -> None:
    norm = parts_of(Shards(Communicator(None), 4)).layer(describe.Norm())
    assert isinstance(norm, ExactNorm) and list(norm.parameters()) == [norm.weight]


NUM_TOKENS = 4
MODEL = ModelConfig(hidden_size=16, num_heads=8, num_kv_heads=2, ffn_size=16, vocab_size=16)


def parts() -> ExactParts:
    return ExactParts(MODEL, Shards(Communicator(None), 4), dtype=torch.float64)


def layers() -> nn.Sequential:
    """Attention whose shards share KV heads, and a norm, all of whose shards have one weight."""
    return nn.Sequential(parts().layer(describe.Attention(), None), parts().layer(describe.Norm()))


def num_parameters(module: nn.Module) -> list[int]:
    """How many each layer has."""
    return [len(list(layer.parameters())) for layer in module.children()]


def outputs(module: nn.Module) -> Tensor:
    attention, norm = module.children()
    x = torch.arange(16.0 * NUM_TOKENS, dtype=torch.float64).sin().view(NUM_TOKENS, 16)
    y: Tensor = norm(attention(x, NUM_TOKENS))
    return y


def test_memory_after_the_meta_device_is_shared() -> None:
    filled = layers()
    moved = layers().to("meta")
    assert num_parameters(moved) == num_parameters(filled)
    moved.to_empty(device="cpu")
    assert num_parameters(moved) == num_parameters(filled) == [2 * 4 + 2 * 2, 1]
    moved.load_state_dict(filled.state_dict())
    torch.testing.assert_close(outputs(moved), outputs(filled), rtol=0, atol=0)


def test_parameters_that_a_state_dict_brings_are_shared() -> None:
    source, target = layers(), layers()
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    target.load_state_dict(state, assign=True)
    assert num_parameters(target) == num_parameters(source)
    torch.testing.assert_close(outputs(target), outputs(source), rtol=0, atol=0)


def test_layers_of_one_process_are_pickled() -> None:
    module = layers()
    copied = pickle.loads(pickle.dumps(module))
    assert num_parameters(copied) == num_parameters(module)
    torch.testing.assert_close(outputs(copied), outputs(module), rtol=0, atol=0)


@pytest.mark.slow
def test_under_the_compiler_a_shards_layer_computes_the_same() -> None:
    """The operators that the compiler sees find ranks by name, and would take the shards for them."""
    torch.manual_seed(0)
    layer: Any = parts().layer(describe.FeedForward(), None).shards["1"].get_submodule("gate_proj")
    x = torch.randn(NUM_TOKENS, 16, dtype=torch.float64)
    try:
        compiled = torch.compile(lambda x: layer(x).view(NUM_TOKENS, 4), backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))
    finally:
        torch._dynamo.reset()
