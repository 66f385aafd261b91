"""Rung: gloo ranks. The layers of exact mode against plain torch, and their bits in worlds of 1, 2 and 4 ranks.

In float64 against torch to 1e-12 of the largest element, forward and every gradient; in float32 and bfloat16 the same
bits in every world; in bfloat16 at most twice torch's own error. What only a GPU checks: the same there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from support.engine.exactness import digest
from support.ranks.rank_pool import RankError, RankPool
from torch import Tensor, nn
from torch.nn import Parameter

from tpengine.config import ModelConfig
from tpengine.layers.attention import attend
from tpengine.layers.collectives import Communicator
from tpengine.layers.dropout import Dropout, Position
from tpengine.layers.exact import ExactNorm, ShardCommunicator, Shards
from tpengine.layers.gradient_sink import BufferSink, accumulation_dtype
from tpengine.layers.mlp import gated_silu
from tpengine.model.parts import ExactParts, FastParts

D, HEADS, HEAD_SIZE, FFN, VOCAB = 48, 8, 6, 72, 104
BATCH, SEQ = 3, 16
T = BATCH * SEQ
EPS, THETA = 1e-3, 100.0
DTYPES = [torch.float32, torch.bfloat16]


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Weight:
    """A global weight: how it is cut over the shards, in how many pieces; None: whole in all of them."""

    shape: tuple[int, ...]
    dim: int | None = 0
    num_pieces: int | None = None

    def cut(self, whole: Tensor, shard: int, num_shards: int) -> Tensor:
        if self.dim is None:
            return whole
        num = min(self.num_pieces or num_shards, num_shards)
        return whole.chunk(num, self.dim)[shard // (num_shards // num)]

    def gradient(self, of_shards: Tensor) -> Tensor:
        """The whole gradient from what each shard has added."""
        if self.dim is None:
            return of_shards.sum(0)
        num = min(self.num_pieces or len(of_shards), len(of_shards))
        pieces = of_shards.unflatten(0, (num, -1)).sum(1)
        return torch.cat(list(pieces), self.dim)


def model_of(kv_heads: int = HEADS) -> ModelConfig:
    return ModelConfig(
        hidden_size=D,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        ffn_size=FFN,
        vocab_size=VOCAB,
        rope_theta=THETA,
        norm_eps=EPS,
    )


@dataclass(frozen=True)
class Case:
    """A layer, its weights by the name of their module in a shard, and the same in plain torch on whole tensors."""

    build: Callable[[ExactParts], nn.Module]
    weights: Mapping[str, Weight]
    plain: Callable[..., Tensor]
    input: Tensor
    model: ModelConfig = field(default_factory=model_of)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Input, weights and output gradient, whole."""
        x = self.input if self.input.dtype == torch.int64 else self.input.to(dtype)
        weights = {
            name: (tensor(i + 1, *weight.shape) / weight.shape[-1] ** 0.5).to(dtype)
            for i, (name, weight) in enumerate(self.weights.items())
        }
        with torch.no_grad():
            shape = self.plain(x, *weights.values()).shape
        return x, weights, tensor(9, *shape).to(dtype)


def plain_attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    """Written out: complex rotation, explicit mask and softmax; the rotation in double precision."""
    q, k, v = (rearrange(x @ w.T, "(b s) (h e) -> b h s e", s=SEQ, e=HEAD_SIZE) for w in (wq, wk, wv))
    angle = torch.arange(SEQ)[:, None] * THETA ** (-torch.arange(0, HEAD_SIZE, 2, dtype=torch.float64) / HEAD_SIZE)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotate(t: Tensor) -> Tensor:
        z = torch.complex(*t.double().chunk(2, dim=-1)) * turn
        return torch.cat((z.real, z.imag), -1).to(t.dtype)

    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (rotate(k), v))
    scores = rotate(q) @ k.transpose(2, 3) / HEAD_SIZE**0.5
    scores = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -torch.inf)
    return rearrange(scores.softmax(-1) @ v, "b h s e -> (b s) (h e)") @ wo.T


def attention(kv_heads: int) -> Case:
    kv = Weight((kv_heads * HEAD_SIZE, D), 0, kv_heads)
    return Case(
        lambda parts: parts.attention(None),
        {"q_proj": Weight((D, D)), "k_proj": kv, "v_proj": kv, "o_proj": Weight((D, D), 1)},
        plain_attention,
        tensor(0, T, D),
        model_of(kv_heads),
    )


CASES = {
    **{f"attention of {kv_heads} kv heads": attention(kv_heads) for kv_heads in (HEADS, 4, 2, 1)},
    "swiglu": Case(
        lambda parts: parts.mlp(None),
        {"gate_proj": Weight((FFN, D)), "up_proj": Weight((FFN, D)), "down_proj": Weight((D, FFN), 1)},
        lambda x, gate, up, down: (F.silu(x @ gate.T) * (x @ up.T)) @ down.T,
        tensor(0, T, D),
    ),
    "norm": Case(
        lambda parts: parts.norm(),
        {"": Weight((D,), None)},
        lambda x, w: F.rms_norm(x, (D,), w, EPS),
        tensor(0, T, D),
    ),
    "embedding": Case(
        lambda parts: parts.embedding(VOCAB),
        {"": Weight((VOCAB, D))},
        lambda tokens, w: F.embedding(tokens, w),
        # Few, so that they repeat.
        torch.randint(0, VOCAB, (T,), generator=torch.Generator().manual_seed(0)) // 3 * 3,
    ),
    "head": Case(
        lambda parts: parts.head(VOCAB, None),
        {"": Weight((VOCAB, D))},
        lambda x, w: x @ w.T,
        tensor(0, T, D),
    ),
}


# By case, dtype, layout of input and output gradient, and what of it.
Digests = dict[tuple[str, torch.dtype, str, str], str]
DigestsByWorld = Callable[[int, int], list[Digests]]


def world(num_shards: int) -> Shards:
    return Shards(Communicator(dist.group.WORLD), num_shards)


def parameter_of(layer: nn.Module, shard: int, name: str) -> Parameter:
    of_shard = layer.get_submodule(f"shards.{shard}")
    weight = of_shard.get_submodule(name).weight
    assert isinstance(weight, Parameter)
    return weight


def load(layer: nn.Module, case: Case, weights: Mapping[str, Tensor], shards: Shards) -> None:
    with torch.no_grad():
        for shard in shards.held:
            for name, weight in case.weights.items():
                parameter_of(layer, shard, name).copy_(weight.cut(weights[name], shard, shards.size))


def rows(x: Tensor, comm: Communicator) -> Tensor:
    return x.chunk(comm.size)[comm.rank]


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
    sinks = [BufferSink() for _ in shards.held]
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


def assert_close(what: str, got: Tensor, want: Tensor) -> None:
    error = (got - want).abs().max().item()
    assert error <= 1e-12 * want.abs().max().item(), f"{what}: error {error}"


def check_against_torch(num_shards: int) -> None:
    for name in CASES:
        got = whole_gradients(name, computed(name, num_shards, torch.float64))
        want = by_torch(name, torch.float64)
        assert got.keys() == want.keys()
        for what, value in want.items():
            assert_close(f"{name}, {what}", got[what], value)


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
            hidden = gated_silu(product)
        else:
            hidden = attend(product, HEADS // num_shards, max(1, kv_heads // num_shards), SEQ, THETA, None)
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


@pytest.mark.parametrize("num_shards", [4, 8])
def test_bits_are_the_same_in_every_world_and_wherever_operands_lie(
    digests_by_world: DigestsByWorld, num_shards: int
) -> None:
    (alone,) = digests_by_world(num_shards, 1)
    for num_ranks in (1, 2, 4):
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
        f"attention of {HEADS} kv heads": (exact.attention(dropout), alone.attention(dropout)),
        "swiglu": (exact.mlp(dropout), alone.mlp(dropout)),
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


def gradients_by_default(kv_heads: int) -> dict[str, Tensor]:
    """`weight.grad` by shard, in a model of one's own: an embedding that is also the head, a norm, attention."""
    shards = world(8)
    parts = ExactParts(model_of(kv_heads), shards, dtype=torch.float64)
    embedding, norm, attention = parts.embedding(VOCAB), parts.norm(), parts.attention(None)
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
    """Of a parameter that several shards use, `weight.grad` is the sum over all of them:

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
    ExactParts(model_of(kv_heads), world(8)).attention(None)


def test_ranks_that_share_a_kv_head_need_sinks(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"num_kv_heads must be at least tp .*: num_kv_heads 1, tp 2: pass sinks"):
        ranks.run(build_attention, 2, 1)


def train_with_torchs_optimizer() -> list[Tensor]:
    """Gate, up and down projection after 5 steps, whole."""
    shards, case = world(4), CASES["swiglu"]
    layer = ExactParts(case.model, shards, dtype=torch.float64).mlp(None)
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
        (lambda v: parts_of(v).norm()(torch.zeros(10, 8)), "10 tokens, shards 4: pad to 12"),
        (lambda v: parts_of(v).embedding(12)(torch.zeros(10, dtype=torch.int64)), "10 tokens, shards 4: pad to 12"),
        (lambda v: parts_of(v).embedding(12)(torch.full((4,), 12)), "got 12 to 12, vocabulary 12: use 0 to 11"),
        (lambda v: parts_of(v).embedding(13), "13 rows, tp 4: pad to 16"),
        (lambda v: parts_of(v).head(13, None), "out_features 13 is not divisible by 4 shards: use 12 or 16"),
        (lambda v: parts_of(v, ffn_size=13).mlp(None), "out_features 13 is not divisible by 4 shards: use 12 or 16"),
        (
            lambda v: parts_of(v, hidden_size=24, num_heads=6, num_kv_heads=6).attention(None),
            "num_heads 6, num_kv_heads 6, tp 4: use num_heads a multiple of num_kv_heads and tp",
        ),
        (
            lambda v: parts_of(v, hidden_size=24, num_heads=12, num_kv_heads=3).attention(None),
            "num_kv_heads 3, tp 4, replicas None: use num_kv_heads 4",
        ),
        (lambda v: Shards(v.comm, 6), "6 shards, tp 1: use 8 on 1, 2, 4 or 8 ranks"),
    ],
)
def test_impossible_shapes_are_refused(build: Callable[[Shards], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(Shards(Communicator(None), 4))


def test_a_kv_heads_weight_is_one_parameter_of_the_shards_that_share_it() -> None:
    """Also in a copy and after another has taken its memory's place; each shard multiplies by what it is now."""
    case, shards = CASES["attention of 2 kv heads"], Shards(Communicator(None), 8)
    layer = ExactParts(case.model, shards, dtype=torch.float64).attention(None)
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
    norm = parts_of(Shards(Communicator(None), 4)).norm()
    assert isinstance(norm, ExactNorm) and list(norm.parameters()) == [norm.weight]
