"""Rung: pure, gloo ranks. Layers with float32 weights under torch.autocast are as torch's own modules there.

Autocast leaves float64 as it is. So the same plain torch says in float64 what is right, and in float32 how wrong torch
is under autocast: ours is at most twice as wrong, output and every gradient, in the same dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.kernels.precision import check_errors
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.experts.choose import ChoiceRule

from tpengine.layers import (
    Attention,
    ColumnParallelLinear,
    MixtureOfExperts,
    RMSNorm,
    RowParallelLinear,
    SwiGLU,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from tpengine.layers.bias import LearnedPositions
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves
from tpengine.layers.mlp import FeedForward
from tpengine.layers.norm import LayerNorm, Norm, OffsetRMSNorm
from tpengine.layers.scores import Rotation, rope, tables_of

D, FFN, V, SEQ, T = 32, 48, 64, 8, 32
ONE = Communicator(None)
LABELS, TOKENS = torch.arange(T) * 7 % V, torch.arange(T) * 5 % V
Weights = dict[str, Tensor]


class Case(NamedTuple):
    """A layer, and plain torch for it.

    Attributes:
        make: from the tp ranks.
        call: (layer, x[T/tp, D], residual[T/tp, D]) -> y[T/tp, ...].
        plain: (x[T, D], residual[T, D], the whole parameters by name, tp) -> y[T, ...].
    """

    make: Callable[[Communicator], Any]
    call: Callable[[Any, Tensor, Tensor], Tensor]
    plain: Callable[[Tensor, Tensor, Weights, int], Tensor]


def half(x: Tensor) -> Tensor:
    """x as torch's products give it here: in autocast's dtype, but in float64 if it is."""
    return F.linear(x, torch.eye(x.shape[1], dtype=x.dtype))


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}weight"], weights.get(f"{name}bias"))


def row_linear(x: Tensor, weights: Weights, name: str, tp: int) -> Tensor:
    """The product whose sums tp ranks have parts of, each rounded before it is sent."""
    parts = zip(x.chunk(tp, 1), weights[f"{name}weight"].chunk(tp, 1), strict=True)
    y: Any = sum(F.linear(*both) for both in parts)
    bias = weights.get(f"{name}bias")
    return y if bias is None else y + bias.to(y.dtype)


def plain_attention(x: Tensor, weights: Weights, num_kv_heads: int, tp: int) -> Tensor:
    heads = {"q": 4, "k": num_kv_heads, "v": num_kv_heads}
    q, k, v = (linear(x, weights, f"{name}_proj.").view(-1, SEQ, num, 8) for name, num in heads.items())
    q, k = (F.rms_norm(of, (8,), weights[f"{name}_norm.weight"], 1e-5) for of, name in ((q, "q"), (k, "k")))
    q, k, v = (of.transpose(1, 2) for of in (q, k, v))
    cos, sin = tables_of(SEQ, 8, Rotation(), torch.promote_types(q.dtype, torch.float32), q.device)
    y = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True, enable_gqa=True)
    return row_linear(y.transpose(1, 2).reshape(T, D), weights, "o_proj.", tp)


def attention(num_kv_heads: int) -> Case:
    def make(comm: Communicator) -> Attention:
        replicas = comm if num_kv_heads < comm.size else None
        biases = {"qkv_bias": num_kv_heads > 1, "output_bias": num_kv_heads > 1}
        return Attention(D, 4, num_kv_heads, comm, replicas=replicas, head_norm=RMSNorm, **biases)

    return Case(
        make, lambda layer, x, _: layer(half(x), SEQ), lambda x, _, w, tp: plain_attention(half(x), w, num_kv_heads, tp)
    )


def norm(kind: type[Norm], plain: Callable[[Tensor, Weights], Tensor]) -> Case:
    """What comes out of a product, with a residual in float32 and without."""

    def call(layer: Norm, x: Tensor, residual: Tensor) -> Tensor:
        y, total = layer.add(half(x), residual)
        return y + total + layer(half(x))

    def of_torch(x: Tensor, residual: Tensor, weights: Weights, _: int) -> Tensor:
        total = half(x) + residual
        return plain(total, weights) + total + plain(half(x), weights)

    return Case(lambda comm: kind(D, comm), call, of_torch)


def vocabulary() -> Case:
    def make(comm: Communicator) -> nn.ModuleDict:
        return nn.ModuleDict({"table": VocabParallelEmbedding(V, D, comm), "head": ColumnParallelLinear(D, V, comm)})

    def call(layers: nn.ModuleDict, x: Tensor, _: Tensor) -> Tensor:
        head: Any = layers["head"]
        return vocab_parallel_cross_entropy(head(layers["table"](TOKENS) + x), LABELS, V, head.comm)

    def of_torch(x: Tensor, residual: Tensor, weights: Weights, _: int) -> Tensor:
        return F.cross_entropy(linear(F.embedding(TOKENS, weights["table.weight"]) + x, weights, "head."), LABELS) * T

    return Case(make, call, of_torch)


def plain_experts(x: Tensor, weights: Weights, tp: int) -> Tensor:
    """All of 3 experts, so that no choice depends on a rounding; scores and sums in at least float32."""
    with torch.autocast("cpu", enabled=False):
        scores = (x.to(torch.promote_types(x.dtype, torch.float32)) @ weights["gate.weight"].T).softmax(1)
    total = torch.zeros_like(scores[:, :1])
    for e in range(3):
        gate, up, down = (weights[f"experts.{name}_proj.weight"][e] for name in ("gate", "up", "down"))
        y = row_linear(F.silu(F.linear(x, gate)) * F.linear(x, up), {"weight": down}, "", tp)
        total = total + y * scores[:, e, None]
    return total.to(y.dtype)


CASES = {
    "column": Case(
        lambda comm: ColumnParallelLinear(D, V, comm, bias=True),
        lambda layer, x, _: layer(x),
        lambda x, _, w, tp: linear(x, w, ""),
    ),
    "row": Case(
        lambda comm: RowParallelLinear(D, V, comm, bias=True),
        lambda layer, x, _: layer(half(x)),
        lambda x, _, w, tp: linear(half(x), w, ""),
    ),
    "attention": attention(4),
    "shared heads": attention(1),
    "gated": Case(
        lambda comm: FeedForward(D, FFN, comm, bias=True),
        lambda layer, x, _: layer(x),
        lambda x, _, w, tp: row_linear(
            F.silu(linear(x, w, "gate_proj.")) * linear(x, w, "up_proj."), w, "down_proj.", tp
        ),
    ),
    "gelu": Case(
        lambda comm: FeedForward(D, FFN, comm, activation="gelu", gated=False),
        lambda layer, x, _: layer(x),
        lambda x, _, w, tp: row_linear(F.gelu(linear(x, w, "up_proj.")), w, "down_proj.", tp),
    ),
    "experts": Case(
        lambda comm: MixtureOfExperts(D, FFN, 3, ChoiceRule(3), comm),
        lambda layer, x, _: layer(x),
        lambda x, _, w, tp: plain_experts(half(x), w, tp),
    ),
    "rms norm": norm(RMSNorm, lambda x, w: F.rms_norm(x, (D,), w["weight"], 1e-5)),
    "offset norm": norm(OffsetRMSNorm, lambda x, w: F.rms_norm(x, (D,), 1 + w["weight"], 1e-5)),
    "layer norm": norm(LayerNorm, lambda x, w: F.layer_norm(x, (D,), w["weight"], w["bias"])),
    "positions": Case(
        lambda comm: LearnedPositions(SEQ, D, comm),
        lambda layer, x, _: layer(half(x), SEQ),
        lambda x, _, w, tp: half(x) + F.embedding(torch.arange(T) % SEQ, w["weight"]),
    ),
    "vocabulary": vocabulary(),
}


def part(name: str, whole: Tensor, like: Tensor, comm: Communicator) -> Tensor:
    """A rank's part of a parameter of an attention or a feed-forward layer, in the shape of its own."""
    dim = next((dim for dim, size in enumerate(like.shape) if size != whole.shape[dim]), None)
    return whole if dim is None else whole.chunk(comm.size, dim)[comm.rank].contiguous()


def check(name: str, dtype: torch.dtype, comm: Communicator) -> None:
    case = CASES[name]

    def draw(seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        shapes = {n: p.shape for n, p in case.make(ONE).named_parameters()} | dict.fromkeys(("x", "residual"), (T, D))
        return {n: torch.randn(shape, generator=generator) / (D**0.5 if "." in n else 1) for n, shape in shapes.items()}

    def slope(y: Tensor) -> Tensor:
        # Numbers that 16 bits hold.
        return (torch.arange(y.numel()) % 17 - 8).div(8).view(y.shape)

    def ours(x: Tensor, residual: Tensor, **weights: Tensor) -> list[Tensor]:
        layer = case.make(comm)
        with torch.no_grad():
            for n, parameter in layer.named_parameters():
                parameter.copy_(part(n, weights[n], parameter, comm))
        inputs = [t.chunk(comm.size)[comm.rank].clone().requires_grad_() for t in (x, residual)]
        y = case.call(layer, *inputs)
        whole = slope(y) if not y.dim() else slope(y.new_empty(len(y) * comm.size, *y.shape[1:]))
        y.backward(whole.chunk(comm.size)[comm.rank].to(y.dtype) if y.dim() else whole)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in layer.parameters())
        return [y.detach(), inputs[0].grad, *(p.grad for p in layer.parameters())]

    def plain(x: Tensor, residual: Tensor, **weights: Tensor) -> list[Tensor]:
        leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
        x = x.clone().requires_grad_()
        y = case.plain(x, residual, leaves, comm.size)
        y.backward(slope(y).to(y.dtype))
        of_rank = {n: p for n, p in case.make(comm).named_parameters()}
        grads = [part(n, leaves[n].grad, of_rank[n], comm) for n in of_rank]
        cut = [y.detach(), x.grad]
        return [*(t.chunk(comm.size)[comm.rank] if t.dim() else t for t in cut), *grads]

    with torch.autocast("cpu", dtype):
        check_errors(f"{name}, {dtype}", ours, plain, draw, draws=12)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_as_torchs_modules_are(name: str) -> None:
    check(name, torch.bfloat16, ONE)


@pytest.mark.parametrize("name", ["gated", "attention", "rms norm"])
def test_float16(name: str) -> None:
    check(name, torch.float16, ONE)


def check_over_ranks(name: str) -> None:
    check(name, torch.bfloat16, Communicator(dist.group.WORLD, arena_bytes=1 << 20))


@pytest.mark.by_default("gated", "layer norm")
@pytest.mark.parametrize("name", ["gated", "attention", "shared heads", "layer norm"])
def test_over_two_ranks(ranks: RankPool, name: str) -> None:
    ranks.run(check_over_ranks, 2, name)


def swiglu_and_input() -> tuple[SwiGLU, Tensor]:
    torch.manual_seed(0)
    return SwiGLU(D, FFN, ONE), torch.randn(T, D, requires_grad=True)


def gradients(run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
    y.float().square().sum().backward()
    return [y.detach(), *(t.grad for t in (x, *layer.parameters()))]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_computed_again_under_autocast(reentrant: bool) -> None:
    """Backward runs outside of the region: the bits are those without checkpointing."""
    layer, x = swiglu_and_input()
    want = gradients(layer, layer, x)
    got = gradients(lambda of: checkpoint(layer, of, use_reentrant=reentrant), layer, x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_region_around_a_part_of_a_model_and_one_that_is_switched_off() -> None:
    """Inside the region a layer is in its dtype; behind it, or where it is off, in the weights', or refused."""
    (layer, x), (other, _) = swiglu_and_input(), swiglu_and_input()
    want = layer(layer(x).bfloat16().float())
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(layer(x), other(x)) and layer(x).dtype == torch.float32
            with pytest.raises(ValueError, match=r"torch.bfloat16 on cpu.*torch.float32 on cpu.*torch.autocast"):
                layer(y)
    assert y.dtype == torch.bfloat16
    z = layer(y.float())
    torch.testing.assert_close(z, want, rtol=0.02, atol=0.02)
    z.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in (x, *layer.parameters()))


def test_prepared_weights_and_weights_that_change_between_calls() -> None:
    """Copies prepared in float32 are not multiplied; a weight is converted as it is now."""
    (layer, x), (plain, _) = swiglu_and_input(), swiglu_and_input()
    layer.prepare(T)
    for _ in range(2):
        results = [gradients(of, of, x) for of in (layer, plain)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        with torch.no_grad():
            for parameter in (*layer.parameters(), *plain.parameters()):
                parameter.mul_(1.5)
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))


def test_the_engines_buffers_get_what_grad_gets() -> None:
    layer, x = swiglu_and_input()
    want = gradients(layer, layer, x)
    sink = GradientSink()
    buffers = {parameter: torch.zeros_like(parameter) for parameter in layer.parameters()}
    sink.attach({p: (buffer, 0) for p, buffer in buffers.items()}, SimpleNamespace(contributed=lambda _: None))
    for part_of_layer in (layer.gate_proj, layer.up_proj, layer.down_proj):
        part_of_layer.sink = sink
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(buffers.values(), want[2:], strict=True))


def test_a_weight_half_gets_what_a_whole_backward_gets() -> None:
    """A schedule that splits backward: the same bits, in the parameters' dtype."""
    layer, x = swiglu_and_input()
    want = gradients(layer, layer, x)
    halves = WeightHalves()
    for part_of_layer in (layer.gate_proj, layer.up_proj, layer.down_proj):
        part_of_layer.sink = DeferringSink(GradientSink(), halves)
    with halves.of((0, 0)):
        assert gradients(layer, layer, x)[2:] == [None] * 3
    halves.run((0, 0))
    for parameter, gradient in zip(layer.parameters(), want[2:], strict=True):
        assert torch.equal(parameter.grad, gradient) and parameter.grad.dtype == torch.float32


def check_dtypes_of_sums() -> None:
    """What ranks that share heads add over each other is in the parameters' dtype, not in autocast's."""
    tp = Communicator(dist.group.WORLD)
    layer: Any = CASES["shared heads"].make(tp)
    seen, reduce = [], Communicator.all_reduce_

    def noted(comm: Communicator, tensor: Tensor) -> Tensor:
        seen.append(tensor.dtype)
        return reduce(comm, tensor)

    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(T // tp.size, D), SEQ)
    with patch.object(Communicator, "all_reduce_", noted):
        y.float().sum().backward()
    # The weights of k and v, and the norms of q and k.
    assert seen == [torch.float32] * 4


def test_partial_gradients_are_summed_over_ranks_in_the_parameters_dtype(ranks: RankPool) -> None:
    ranks.run(check_dtypes_of_sums, 2)


def test_outside_of_a_region_nothing_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = swiglu_and_input()
    monkeypatch.setattr(torch, "get_autocast_dtype", None)
    assert layer(x).dtype == torch.float32
