"""Rung: gloo ranks. Cross-entropy over sharded logits: torch's in float64 to 1e-12, the same bits in every world."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import IGNORED_LABEL, vocab_parallel_cross_entropy

T, VOCAB = 48, 104


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_close(what: str, got: Tensor, want: Tensor) -> None:
    error = (got - want).abs().max().item()
    assert error <= 1e-12 * want.abs().max().item(), f"{what}: error {error}"


def sharded_loss(num_shards: int, dtype: torch.dtype, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Loss and dz, whole, of logits in one block per shard of exact mode."""
    comm = Communicator(dist.group.WORLD)
    z = rearrange((5 * tensor(0, T, VOCAB)).to(dtype), "t (v c) -> v t c", v=num_shards)
    local = z.chunk(comm.size)[comm.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(local, labels(vocab_size), vocab_size, comm)
    (loss * 0.37).backward()
    assert local.grad is not None
    return loss.detach(), rearrange(comm.all_gather(local.grad), "v t c -> t (v c)")


def labels(vocab_size: int) -> Tensor:
    drawn = torch.randint(0, vocab_size, (T,), generator=torch.Generator().manual_seed(0))
    drawn[::7] = IGNORED_LABEL
    return drawn


# Whole shards are padding; part of one is; none is.
@pytest.mark.by_default("100")
@pytest.mark.parametrize("vocab_size", [60, 100, VOCAB])
def test_cross_entropy_of_sharded_logits(ranks: RankPool, vocab_size: int) -> None:
    z = (5 * tensor(0, T, VOCAB)).requires_grad_()
    want = F.cross_entropy(z[:, :vocab_size], labels(vocab_size), ignore_index=IGNORED_LABEL, reduction="sum")
    (want * 0.37).backward()
    assert z.grad is not None
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        ((loss, dz),) = ranks.run(sharded_loss, 1, 8, dtype, vocab_size)
        if dtype == torch.float64:
            assert_close("loss", loss, want.detach())
            assert_close("dz", dz, z.grad)
        for num_ranks in (2, 4):
            for other_loss, other_dz in ranks.run(sharded_loss, num_ranks, 8, dtype, vocab_size):
                assert torch.equal(other_loss, loss) and torch.equal(other_dz, dz)


def check_that_a_leaf_is_left(shape: tuple[int, ...]) -> None:
    comm = Communicator(None)

    def loss(z: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(z, labels(100), 100, comm)

    for run in (loss, torch.compile(loss, backend="aot_eager")):
        leaf = tensor(0, *shape).requires_grad_()
        before = leaf.detach().clone()
        run(leaf).backward()
        assert torch.equal(leaf, before) and leaf.grad is not None
        assert not torch.equal(leaf.grad, before)
    torch._dynamo.reset()


# Whole, and in one block per shard.
@pytest.mark.parametrize("shape", [(T, VOCAB), pytest.param((4, T, VOCAB // 4), marks=pytest.mark.slow)])
def test_a_leafs_logits_are_left(ranks: RankPool, shape: tuple[int, ...]) -> None:
    """Compiled too, where a traced tensor looks like no leaf; the gradient has memory of its own."""
    ranks.run(check_that_a_leaf_is_left, 1, shape)
