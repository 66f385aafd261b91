"""Rung: gloo ranks. Every layer against plain torch modules on whole tensors, forward and every gradient.

In float64, so that only the order of sums may differ: 1e-12 of the largest element. Inputs and weights are functions
of a seed, so each rank cuts its shard from the same global tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import (
    IGNORED_LABEL,
    Attention,
    ColumnParallelLinear,
    PackedWeights,
    RMSNorm,
    RowParallelLinear,
    SwiGLU,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

TP = [1, 2, 3, 4]
D, BATCH, SEQ = 24, 3, 20
T = BATCH * SEQ


def world() -> Communicator:
    return Communicator(dist.group.WORLD)


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows(x: Tensor, comm: Communicator) -> Tensor:
    return x.chunk(comm.size)[comm.rank].contiguous()


def columns(x: Tensor, comm: Communicator) -> Tensor:
    return x.chunk(comm.size, dim=1)[comm.rank].contiguous()


def set_weight(module: nn.Module, value: Tensor) -> None:
    assert isinstance(module.weight, nn.Parameter)
    with torch.no_grad():
        module.weight.copy_(value)


def assert_same(name: str, got: Tensor | None, want: Tensor | None) -> None:
    assert got is not None and want is not None, name
    assert got.shape == want.shape, f"{name}: {got.shape} != {want.shape}"
    error = (got - want).abs().max().item()
    assert error <= 1e-12 * max(want.abs().max().item(), 1e-300), f"{name}: error {error}"


def column_parallel(comm: Communicator) -> None:
    x, w, dy = tensor(0, T, D), tensor(1, 36, D), tensor(2, T, 36)
    layer = ColumnParallelLinear(D, 36, comm, dtype=torch.float64)
    set_weight(layer, rows(w, comm))
    local = rows(x, comm).requires_grad_()
    y = layer(local)
    y.backward(columns(dy, comm))

    x.requires_grad_(), w.requires_grad_()
    want = F.linear(x, w)
    want.backward(dy)
    assert_same("y", y.detach(), columns(want.detach(), comm))
    assert_same("dx", local.grad, rows(x.grad, comm))
    assert_same("dw", layer.weight.grad, rows(w.grad, comm))


def row_parallel(comm: Communicator) -> None:
    x, w, dy = tensor(0, T, 36), tensor(1, D, 36), tensor(2, T, D)
    layer = RowParallelLinear(36, D, comm, dtype=torch.float64)
    set_weight(layer, columns(w, comm))
    # a non-contiguous input: every second column of a wider tensor
    wide = torch.stack((columns(x, comm), torch.full_like(columns(x, comm), torch.nan)), dim=-1).flatten(1)
    local = wide[:, ::2].detach().requires_grad_()
    y = layer(local)
    y.backward(rows(dy, comm))

    x.requires_grad_(), w.requires_grad_()
    want = F.linear(x, w)
    want.backward(dy)
    assert_same("y", y.detach(), rows(want.detach(), comm))
    assert_same("dx", local.grad, columns(x.grad, comm))
    assert_same("dw", layer.weight.grad, columns(w.grad, comm))


def packed_weights(comm: Communicator) -> None:
    """Three weights of different width share a GEMM, before and after their memory was replaced."""
    x = tensor(0, T, D)
    layers = [ColumnParallelLinear(D, width, comm, dtype=torch.float32) for width in (12, 24, 36)]
    packed = PackedWeights(*layers)
    for layer in layers:
        layer.double()  # replaces the parameters' memory
    for i, layer in enumerate(layers):
        set_weight(layer, rows(tensor(i + 1, layer.weight.shape[0] * comm.size, D), comm))
    for accumulated in (1, 2):
        local = rows(x, comm).requires_grad_()
        outputs = packed.forward(local)
        sum((i + 1) * y.square().sum() for i, y in enumerate(outputs)).backward()

        full = x.clone().requires_grad_()
        weights = [tensor(i + 1, layer.weight.shape[0] * comm.size, D) for i, layer in enumerate(layers)]
        leaves = [w.requires_grad_() for w in weights]
        wants = [F.linear(full, w) for w in leaves]
        sum((i + 1) * y.square().sum() for i, y in enumerate(wants)).backward()
        assert_same("dx", local.grad, rows(full.grad, comm))
        for layer, leaf, y, want in zip(layers, leaves, outputs, wants, strict=True):
            assert_same("y", y.detach(), columns(want.detach(), comm))
            assert_same("dw", layer.weight.grad, accumulated * rows(leaf.grad, comm))
    start = layers[0].weight.data_ptr()
    assert layers[1].weight.data_ptr() == start + layers[0].weight.numel() * 8, "weights are not packed"


def norm(comm: Communicator) -> None:
    x, w, dy = tensor(0, T, D), tensor(1, D), tensor(2, T, D)
    layer = RMSNorm(D, comm, eps=1e-3, dtype=torch.float64)
    set_weight(layer, w)
    local = rows(x, comm).requires_grad_()
    y = layer(local)
    y.backward(rows(dy, comm))

    x.requires_grad_(), w.requires_grad_()
    want = F.rms_norm(x, (D,), w, 1e-3)
    want.backward(dy)
    assert_same("y", y.detach(), rows(want.detach(), comm))
    assert_same("dx", local.grad, rows(x.grad, comm))
    assert_same("dw", layer.weight.grad, w.grad)


def embedding(comm: Communicator) -> None:
    tokens = torch.randint(0, 60, (T,), generator=torch.Generator().manual_seed(0))
    w, dy = tensor(1, 60, D), tensor(2, T, D)
    layer = VocabParallelEmbedding(60, D, comm, dtype=torch.float64)
    set_weight(layer, rows(w, comm))
    y = layer(tokens)
    y.backward(rows(dy, comm))

    w.requires_grad_()
    want = F.embedding(tokens, w)
    want.backward(dy)
    assert_same("y", y.detach(), rows(want.detach(), comm))
    assert_same("dw", layer.weight.grad, rows(w.grad, comm))


def cross_entropy(comm: Communicator, vocab_size: int, padded: int) -> None:
    z, dloss = tensor(0, T, padded) * 5, 0.37
    labels = torch.randint(0, vocab_size, (T,), generator=torch.Generator().manual_seed(0))
    labels[::7] = IGNORED_LABEL
    local = columns(z, comm).clone().requires_grad_()
    made = 1 * local  # its gradient is written over it, a leaf's is not
    loss = vocab_parallel_cross_entropy(made, labels, vocab_size, comm)
    (loss * dloss).backward()

    z.requires_grad_()
    want = F.cross_entropy(z[:, :vocab_size], labels, ignore_index=IGNORED_LABEL, reduction="sum")
    (want * dloss).backward()
    assert_same("loss", loss.detach(), want.detach())
    assert_same("dz", local.grad, columns(z.grad, comm))
    torch.testing.assert_close(made.detach(), local.grad, rtol=0, atol=0)
    leaf = local.detach().clone().requires_grad_()
    (vocab_parallel_cross_entropy(leaf, labels, vocab_size, comm) * dloss).backward()
    assert torch.equal(leaf, columns(z, comm)) and leaf.grad is not None and torch.equal(leaf.grad, made)


def attention(comm: Communicator, num_kv_heads: int) -> None:
    heads, size = 12, 4
    d = heads * size
    x, dy = tensor(0, T, d), tensor(5, T, d)
    wq, wo = tensor(1, d, d) / 7, tensor(4, d, d) / 7
    wk, wv = tensor(2, num_kv_heads * size, d) / 7, tensor(3, num_kv_heads * size, d) / 7
    share = max(1, comm.size // num_kv_heads)
    groups = [dist.new_group(list(range(i, i + share))) for i in range(0, comm.size, share)]
    replicas = Communicator(groups[comm.rank // share]) if share > 1 else None
    layer = Attention(d, heads, num_kv_heads, comm, replicas=replicas, rope_theta=100.0, dtype=torch.float64)
    kv_shard = comm.rank // share
    set_weight(layer.q_proj, rows(wq, comm))
    set_weight(layer.k_proj, wk.chunk(comm.size // share)[kv_shard])
    set_weight(layer.v_proj, wv.chunk(comm.size // share)[kv_shard])
    set_weight(layer.o_proj, columns(wo, comm))
    local = rows(x, comm).requires_grad_()
    y = layer(local, SEQ)
    y.backward(rows(dy, comm))

    leaves = [t.requires_grad_() for t in (x, wq, wk, wv, wo)]
    want = plain_attention(*leaves, heads, num_kv_heads, theta=100.0)
    want.backward(dy)
    assert_same("y", y.detach(), rows(want.detach(), comm))
    assert_same("dx", local.grad, rows(x.grad, comm))
    assert_same("dwq", layer.q_proj.weight.grad, rows(wq.grad, comm))
    assert_same("dwk", layer.k_proj.weight.grad, wk.grad.chunk(comm.size // share)[kv_shard])
    assert_same("dwv", layer.v_proj.weight.grad, wv.grad.chunk(comm.size // share)[kv_shard])
    assert_same("dwo", layer.o_proj.weight.grad, columns(wo.grad, comm))


def plain_attention(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, heads: int, kv_heads: int, theta: float
) -> Tensor:
    """Written out: complex rotation, explicit mask and softmax."""
    size = wq.shape[0] // heads
    split = [(x @ w.T).view(BATCH, SEQ, -1, size).transpose(1, 2) for w in (wq, wk, wv)]
    angle = torch.arange(SEQ)[:, None] * theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotate(t: Tensor) -> Tensor:
        z = torch.complex(t[..., : size // 2], t[..., size // 2 :]) * turn
        return torch.cat((z.real, z.imag), -1)

    q, k = rotate(split[0]), rotate(split[1])
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, split[2]))
    scores = q @ k.transpose(2, 3) / size**0.5
    scores = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(T, -1) @ wo.T


def swiglu(comm: Communicator) -> None:
    x, dy = tensor(0, T, D), tensor(4, T, D)
    gate, up, down = tensor(1, 36, D), tensor(2, 36, D), tensor(3, D, 36)
    layer = SwiGLU(D, 36, comm, dtype=torch.float64)
    set_weight(layer.gate_proj, rows(gate, comm))
    set_weight(layer.up_proj, rows(up, comm))
    set_weight(layer.down_proj, columns(down, comm))
    local = rows(x, comm).requires_grad_()
    y = layer(local)
    y.backward(rows(dy, comm))

    leaves = [t.requires_grad_() for t in (x, gate, up, down)]
    want = (F.silu(x @ leaves[1].T) * (x @ leaves[2].T)) @ leaves[3].T
    want.backward(dy)
    assert_same("y", y.detach(), rows(want.detach(), comm))
    assert_same("dx", local.grad, rows(x.grad, comm))
    assert_same("dgate", layer.gate_proj.weight.grad, rows(gate.grad, comm))
    assert_same("dup", layer.up_proj.weight.grad, rows(up.grad, comm))
    assert_same("ddown", layer.down_proj.weight.grad, columns(down.grad, comm))


CASES: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "column_parallel": (column_parallel, ()),
    "row_parallel": (row_parallel, ()),
    "packed_weights": (packed_weights, ()),
    "norm": (norm, ()),
    "embedding": (embedding, ()),
    "cross_entropy": (cross_entropy, (60, 60)),
    "cross_entropy_padded": (cross_entropy, (50, 60)),
    "cross_entropy_mostly_padding": (cross_entropy, (13, 60)),
    "swiglu": (swiglu, ()),
    "attention": (attention, (12,)),
}


def check(name: str) -> None:
    function, args = CASES[name]
    function(world(), *args)


def check_attention(num_kv_heads: int) -> None:
    attention(world(), num_kv_heads)


def check_replicas_start_equal() -> None:
    comm = world()
    torch.manual_seed(comm.rank)
    layer = ColumnParallelLinear(8, 6, comm, replicas=comm)
    assert torch.equal(comm.all_gather(layer.weight.detach()[None]), layer.weight.detach().expand(comm.size, -1, -1))


def check_frozen() -> None:
    """A frozen weight gets no gradient, and a frozen input needs none."""
    comm = world()
    layer = ColumnParallelLinear(D, 36, comm, dtype=torch.float64).requires_grad_(False)
    x = rows(tensor(0, T, D), comm).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    layer.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("name", CASES)
def test_matches_torch(ranks: RankPool, name: str, tp: int) -> None:
    ranks.run(check, tp, name)


@pytest.mark.parametrize(
    ("tp", "num_kv_heads"), [(1, 1), (1, 6), (2, 1), (2, 2), (2, 6), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)]
)
def test_grouped_query_attention(ranks: RankPool, tp: int, num_kv_heads: int) -> None:
    ranks.run(check_attention, tp, num_kv_heads)


def test_replicas_start_equal_whatever_each_rank_draws(ranks: RankPool) -> None:
    ranks.run(check_replicas_start_equal, 2)


def test_frozen_parameters(ranks: RankPool) -> None:
    ranks.run(check_frozen, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda c: ColumnParallelLinear(8, 7, c), r"out_features 7 is not divisible by 2 shards: use 6 or 8"),
        (lambda c: RowParallelLinear(7, 8, c), r"in_features 7 is not divisible by 2 shards: use 6 or 8"),
        (lambda c: VocabParallelEmbedding(7, 8, c), r"7 rows, tp 2: pad to 8"),
        (lambda c: Attention(24, 3, 3, c), r"num_heads .* tp 2"),
        (
            lambda c: Attention(24, 6, 1, c),
            r"num_kv_heads 1, tp 2, replicas None: use num_kv_heads 2, or replicas of 2",
        ),
        (lambda c: VocabParallelEmbedding(8, 8, c)(torch.zeros(5, dtype=torch.int64)), r"5 tokens, tp 2: pad to 6"),
        (
            lambda c: VocabParallelEmbedding(8, 8, c)(torch.full((2,), 8)),
            r"tokens must lie .* got 8 to 8, vocabulary 8",
        ),
        (
            lambda c: vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([IGNORED_LABEL, 7]), 7, c),
            r"labels must lie in the vocabulary: got 0 to 7, vocabulary 7: use 0 to 6",
        ),
        (lambda c: Attention(24, 6, 2, c)(torch.zeros(5, 24), 4), r"10 tokens over all ranks, seq 4: use 12 tokens"),
        (lambda c: RowParallelLinear(8, 8, c)(torch.zeros(5, 4)), r"5 tokens, tp 2: pad to 6"),
        (lambda c: RowParallelLinear(8, 8, c)(torch.zeros(4, 8)), r"x \(4, 8\), weight \(8, 4\): give the weight x's"),
        (lambda c: ColumnParallelLinear(8, 8, c)(torch.zeros(2, 4)), r"x \(2, 4\), weights \[\(4, 8\)\]: give every"),
        (lambda c: SwiGLU(8, 8, c)(torch.zeros(2, 8).bfloat16()), r"one dtype and device: x .*torch.bfloat16 on cpu"),
    ],
)
def test_impossible_shapes_are_refused(build: Callable[[Communicator], object], message: str) -> None:
    comm = Communicator(None)
    comm.size = 2
    with pytest.raises(ValueError, match=message):
        build(comm)
