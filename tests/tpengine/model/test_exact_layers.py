"""Rung: gloo ranks. The layers of exact mode against plain torch, and their bits in worlds of 1, 2 and 4 ranks.

In float64 against torch to 1e-12 of the largest element, forward and every gradient; in float32 and bfloat16 the same
bits in every world; in bfloat16 at most twice torch's own error. What only a GPU checks: the same there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from einops import rearrange
from support.engine.exact_cases import (
    CASES,
    HEADS,
    SEQ,
    THETA,
    assert_close,
    load,
    model_of,
    parameter_of,
    rows,
    world,
)
from support.engine.exactness import digest
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator
from tpkernels.launch import accumulation_dtype

from tpengine.architectures.describe import Attention, FeedForward
from tpengine.layers.attention import attend
from tpengine.layers.dropout import Dropout, Position
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.mlp import activated
from tpengine.layers.scores import Rotation, Scores
from tpengine.model.parts import ExactParts, FastParts

DTYPES = [torch.float32, torch.bfloat16]


# By case, dtype, layout of input and output gradient, and what of it.
Digests = dict[tuple[str, torch.dtype, str, str], str]
DigestsByWorld = Callable[[int, int], list[Digests]]


def misaligned(x: Tensor) -> Tensor:
    y = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    assert y.data_ptr() % 64
    return y.copy_(x)


def every_other_column(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, torch.nan)), dim=-1).flatten(-2)[..., ::2]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.clone,
    "misaligned": misaligned,
    "every other column": every_other_column,
    "transposed": transposed,
}


def computed(name: str, num_shards: int, dtype: torch.dtype, layout: str = "contiguous") -> dict[str, Tensor]:
    """y and dx, whole; of each weight the shards' gradients, one after the other."""
    case, shards, lay_out = CASES[name], world(num_shards), LAYOUTS[layout]
    comm = shards.comm
    sinks = [GradientSink() for _ in shards.held]
    layer = case.build(ExactParts(case.model, shards, sinks=sinks, head_sinks=sinks, dtype=dtype))
    x, weights, dy = case.tensors(dtype)
    load(layer, case, weights, shards)
    wide = accumulation_dtype(dtype)
    buffers = []
    for sink, shard in zip(sinks, shards.held, strict=True):
        parameters = {name: parameter_of(layer, shard, name) for name in case.weights}
        buffers.append({name: torch.zeros_like(p, dtype=wide) for name, p in parameters.items()})
        places = {p: (buffers[-1][name], 0) for name, p in parameters.items()}
        sink.attach(places, SimpleNamespace(contributed=lambda _: None))

    is_lookup, is_head = x.dtype == torch.int64, name == "head"
    # Tokens and labels are whole on every rank, logits cut by columns into one block per shard.
    x = x.clone() if is_lookup else lay_out(rows(x, comm)).detach().requires_grad_()
    if is_head:
        dy = rearrange(dy, "t (v c) -> v t c", v=shards.size)
    y = layer(x, SEQ) if name.startswith("attention") else layer(x)
    y.backward(lay_out(rows(dy, comm)))

    found = {"y": comm.all_gather(y.detach().contiguous())}
    if is_head:
        found["y"] = rearrange(found["y"], "v t c -> t (v c)")
    if not is_lookup:
        assert x.grad is not None
        found["dx"] = comm.all_gather(x.grad.contiguous())
    for weight in case.weights:
        found["d" + weight] = comm.all_gather(torch.stack([buffer[weight] for buffer in buffers]))
    return found


def whole_gradients(name: str, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shards' gradients put together."""
    weights = {"d" + weight: how for weight, how in CASES[name].weights.items()}
    return {what: weights[what].gradient(value) if what in weights else value for what, value in found.items()}


def by_torch(name: str, dtype: torch.dtype, of: torch.dtype | None = None) -> dict[str, Tensor]:
    """The same by plain torch; `of`: of operands that were rounded to that dtype."""
    case = CASES[name]
    x, weights, dy = (case.tensors(of or dtype)[i] for i in range(3))
    x = x if x.dtype == torch.int64 else x.to(dtype).detach().requires_grad_()
    leaves = {weight: value.to(dtype).detach().requires_grad_() for weight, value in weights.items()}
    y = case.plain(x, *leaves.values())
    y.backward(dy.to(dtype))
    found = {"y": y.detach(), **{"d" + weight: leaf.grad for weight, leaf in leaves.items()}}
    if x.requires_grad:
        found["dx"] = x.grad
    assert all(value is not None for value in found.values())
    return found  # type: ignore[return-value]


def check_against_torch(num_shards: int) -> None:
    for name in CASES:
        got = whole_gradients(name, computed(name, num_shards, torch.float64))
        want = by_torch(name, torch.float64)
        assert got.keys() == want.keys()
        for what, value in want.items():
            assert_close(f"{name}, {what}", got[what], value)


@pytest.mark.by_default("2-4", "4-8")
@pytest.mark.parametrize("num_shards", [4, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_layers_match_torch(ranks: RankPool, num_ranks: int, num_shards: int) -> None:
    ranks.run(check_against_torch, num_ranks, num_shards)


def tree(terms: list[Tensor]) -> Tensor:
    """(t0 + t1) + (t2 + t3) and so on, of a power of two of terms."""
    half = len(terms) // 2
    return terms[0] if not half else tree(terms[:half]) + tree(terms[half:])


def by_products(name: str, num_shards: int) -> dict[str, Tensor]:
    """What exact mode is defined to compute, in float32: torch's products of each shard, their sums in a tree."""
    case, kv_heads = CASES[name], CASES[name].model.num_kv_heads
    x, weights, dy = case.tensors(torch.float32)
    found: dict[str, list[Tensor]] = {what: [] for what in ("y", "dx", *("d" + weight for weight in weights))}
    for shard in range(num_shards):
        *inputs, output = (w.cut(weights[n], shard, num_shards).contiguous() for n, w in case.weights.items())
        packed = torch.cat(inputs)
        product = (x @ packed.T).requires_grad_()
        if name == "swiglu":
            hidden = activated(product, "silu", True)
        else:
            hidden = attend(
                product, HEADS // num_shards, max(1, kv_heads // num_shards), SEQ, Scores(Rotation(THETA)), None
            )
        hidden.backward(dy @ output)
        assert product.grad is not None
        found["y"].append(hidden.detach() @ output.T)
        found["dx"].append(product.grad @ packed)
        columns = product.grad.split([len(w) for w in inputs], dim=1)
        grads = [(torch.zeros_like(w), dz, x) for w, dz in zip(inputs, columns, strict=True)]
        grads.append((torch.zeros_like(output), dy, hidden.detach()))
        for weight, (buffer, dz, z) in zip(weights, grads, strict=True):
            found["d" + weight].append(buffer.addmm_(dz.T, z))
    return {what: tree(terms) if what in ("y", "dx") else torch.stack(terms) for what, terms in found.items()}


def check_against_products() -> None:
    for name in CASES:
        if name.startswith("attention") or name == "swiglu":
            for num_shards in (4, 8):
                got, want = computed(name, num_shards, torch.float32), by_products(name, num_shards)
                assert got.keys() == want.keys()
                differing = [what for what, value in want.items() if not torch.equal(got[what], value)]
                assert not differing, f"{name} in {num_shards} shards: {differing}"


def test_bits_are_those_of_each_shards_products_added_in_a_tree(ranks: RankPool) -> None:
    """The definition, written out. Recorded hashes would hold for one matrix library and one processor only."""
    ranks.run(check_against_products, 1)


def digests(num_shards: int) -> Digests:
    return {
        (name, dtype, layout, what): digest(value)
        for name in CASES
        for dtype in DTYPES
        for layout in LAYOUTS
        for what, value in computed(name, num_shards, dtype, layout).items()
    }


@pytest.fixture(scope="module")
def digests_by_world(ranks: RankPool) -> DigestsByWorld:
    """(shards, ranks) -> digests of each rank."""
    return functools.cache(lambda num_shards, num_ranks: ranks.run(digests, num_ranks, num_shards))


@pytest.mark.parametrize(
    ("num_shards", "worlds"),
    [(4, (1, 2)), *(pytest.param(num, (1, 2, 4), marks=pytest.mark.slow) for num in (4, 8))],
)
def test_bits_are_the_same_in_every_world_and_wherever_operands_lie(
    digests_by_world: DigestsByWorld, num_shards: int, worlds: tuple[int, ...]
) -> None:
    (alone,) = digests_by_world(num_shards, 1)
    for num_ranks in worlds:
        for got in digests_by_world(num_shards, num_ranks):
            differing = [
                (name, dtype, layout, what)
                for (name, dtype, layout, what), value in got.items()
                if value != alone[name, dtype, "contiguous", what]
            ]
            assert not differing, f"{num_ranks} ranks: {differing}"


def test_bits_tell_orders_of_sums_apart(digests_by_world: DigestsByWorld) -> None:
    """Else equal bits would say nothing: 4 shards give other bits than 8, where they add anything in dx."""
    (of_four,), (of_eight,) = (digests_by_world(num_shards, 1) for num_shards in (4, 8))
    for name in CASES.keys() - {"embedding", "norm"}:
        key = (name, torch.float32, "contiguous", "dx")
        assert of_four[key] != of_eight[key], name


def check_bfloat16_error() -> None:
    for name in CASES:
        got = whole_gradients(name, computed(name, 8, torch.bfloat16))
        torchs = by_torch(name, torch.bfloat16)
        for what, value in by_torch(name, torch.float64, of=torch.bfloat16).items():
            error, torchs_error = ((t[what].double() - value).norm() for t in (got, torchs))
            assert error <= 2 * torchs_error, f"{name}, {what}: error {error}, torch's {torchs_error}"


@pytest.mark.by_default("1")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_error_in_bfloat16_is_at_most_twice_torchs(ranks: RankPool, num_ranks: int) -> None:
    ranks.run(check_bfloat16_error, num_ranks)


def check_dropout() -> None:
    """Shards drop what one rank drops that holds all of a layer."""
    shards = world(8)
    position = Position(step=3, microbatch=1, training=True)
    dropout = Dropout(0.25, seed=7, site="here", position=position)
    double = torch.float64
    exact = ExactParts(model_of(), shards, dtype=double)
    alone = FastParts(model_of(), Communicator(None), dtype=double)
    pairs: dict[str, tuple[nn.Module, Any]] = {
        f"attention of {HEADS} kv heads": (
            exact.layer(Attention(), dropout),
            alone.layer(Attention(), dropout),
        ),
        "swiglu": (exact.layer(FeedForward(), dropout), alone.layer(FeedForward(), dropout)),
    }
    for name, (layer, fast) in pairs.items():
        case, arguments = CASES[name], [SEQ] if name.startswith("attention") else []
        x, weights, _ = case.tensors(double)
        load(layer, case, weights, shards)
        with torch.no_grad():
            for weight, value in weights.items():
                getattr(fast, weight).weight.copy_(value)
        local, whole = rows(x, shards.comm).clone().requires_grad_(), x.clone().requires_grad_()
        got, want = layer(local, *arguments), fast(whole, *arguments)
        got.square().sum().backward()
        want.square().sum().backward()
        assert local.grad is not None and whole.grad is not None
        assert_close(f"{name}, y", got, rows(want, shards.comm))
        assert_close(f"{name}, dx", local.grad, rows(whole.grad, shards.comm))
        position.training = False
        assert not torch.allclose(layer(local, *arguments), got), "nothing was dropped"
        position.training = True


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_dropout_is_that_of_the_fast_layers(ranks: RankPool, num_ranks: int) -> None:
    ranks.run(check_dropout, num_ranks)
