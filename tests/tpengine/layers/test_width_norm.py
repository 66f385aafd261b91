"""Rung: one process. A norm over the heads of all shards is torch's over all columns, forward and backward.

That ranks exchange what shards of one process add up is architectures/test_layouts.py's (OLMo 3).
"""

from __future__ import annotations

import pytest
import torch
from tpkernels.exchange.communicator import Communicator

from tpengine.layers.collectives import ShardCommunicator
from tpengine.layers.width_norm import WidthNorm, norm_over_ranks

T, E, H, V, EPS = 5, 6, 4, 4, 1e-2
ALONE = Communicator(None)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def normed(columns: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(columns, columns.shape[1:], weight, EPS)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_shards_together_are_the_whole(kv_heads: int) -> None:
    """With fewer KV heads than shards each shard has a copy, of which the gradients are parts of a sum."""
    share = V // kv_heads
    generator = torch.Generator().manual_seed(kv_heads)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = drawn(T, H * E), drawn(T, kv_heads * E), drawn(T, kv_heads * E)
    q_weight, k_weight = drawn(H * E), drawn(kv_heads * E)
    dqs, dks = drawn(T, H * E), [drawn(T, E) for _ in range(V)]
    # Whole: a KV head's gradient is the sum of those of the shards that have it.
    want_q, want_k = normed(q, q_weight), normed(k, k_weight)
    dk = torch.cat([sum(dks[i * share : (i + 1) * share], torch.zeros(T, E)) for i in range(kv_heads)], dim=1)
    want = torch.autograd.grad((want_q * dqs).sum() + (want_k * dk).sum(), (q, k, q_weight, k_weight))

    norms, qkvs = [], []
    for shard in range(V):
        replicas = ShardCommunicator(shard % share, share, ALONE) if share > 1 else None
        ranks = ShardCommunicator(shard, V, ALONE)
        pair = (
            WidthNorm(H * E, ranks, eps=EPS, dtype=torch.float64),
            WidthNorm(kv_heads * E, ranks, eps=EPS, replicas=replicas, dtype=torch.float64),
        )
        own, of_kv = slice(shard * E, (shard + 1) * E), slice(shard // share * E, (shard // share + 1) * E)
        with torch.no_grad():
            pair[0].weight.copy_(q_weight[own])
            pair[1].weight.copy_(k_weight[of_kv])
        norms.append(pair)
        qkvs.append(torch.cat((q[:, own], k[:, of_kv], v[:, of_kv]), dim=1).detach().requires_grad_())
    got = norm_over_ranks(qkvs, norms, ALONE)
    for shard, y in enumerate(got):
        of_kv = slice(shard // share * E, (shard // share + 1) * E)
        assert_close(y[:, :E], want_q[:, shard * E : (shard + 1) * E])
        assert_close(y[:, E : 2 * E], want_k[:, of_kv])
        assert torch.equal(y[:, 2 * E :], v[:, of_kv])
    loss = sum(
        (y[:, :E] * dqs[:, i * E : (i + 1) * E]).sum() + (y[:, E : 2 * E] * dks[i]).sum() for i, y in enumerate(got)
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    grads = [qkv.grad for qkv in qkvs if qkv.grad is not None]
    assert_close(torch.cat([grad[:, :E] for grad in grads], dim=1), want[0])
    assert_close(torch.cat([norm.weight.grad for norm, _ in norms]), want[2])  # type: ignore[misc]
    of_keys = [grad[:, E : 2 * E] for grad in grads]
    of_weights = [norm.weight.grad for _, norm in norms]
    for head in range(kv_heads):
        shards, columns = slice(head * share, (head + 1) * share), slice(head * E, (head + 1) * E)
        assert_close(torch.stack(of_keys[shards]).sum(0), want[1][:, columns])
        # Without buffers a sink adds up over real ranks alone: here each shard has its part.
        assert_close(torch.stack(of_weights[shards]).sum(0), want[3][columns])  # type: ignore[arg-type]


def test_columns_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="a norm over all heads 6 is not divisible by 4 shards: use 4 or 8"):
        WidthNorm(6, ShardCommunicator(0, 4, ALONE))
