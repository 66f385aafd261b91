"""Rung: gloo ranks. What a loss may ask of cut logits: torch's in float64 to 1e-12, values and gradients, on all ranks.

Also cross-entropy with weights, label smoothing and z-loss. One loss of all of them: each rank's gradient is the loss's
own, and not that of so many losses as there are ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import IGNORED_LABEL, vocab_parallel_cross_entropy
from tpengine.layers.token_values import entropy, token_logprobs, whole_logits, whole_rows

T, D, PADDED = 48, 6, 48


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(vocab_size: int) -> Tensor:
    drawn = torch.randint(0, vocab_size, (T,), generator=torch.Generator().manual_seed(0))
    drawn[::7] = IGNORED_LABEL
    return drawn


def given() -> tuple[Tensor, Tensor]:
    """Logits of all columns, one of them without a chance, and hidden states."""
    z = 5 * tensor(0, T, PADDED)
    z[3, 2] = -torch.inf
    return z, tensor(1, T, D)


def total(logprobs: Tensor, spread: Tensor, logits: Tensor, hidden: Tensor) -> Tensor:
    finite = logits.masked_fill(logits == -torch.inf, 0)
    return (logprobs * tensor(2, T)).sum() + spread.square().sum() + finite.pow(3).sum() + (hidden**3).sum()


def by_ranks(num_shards: int, vocab_size: int) -> tuple[Tensor, ...]:
    """The loss of one rank, its values, and the gradients of all ranks together."""
    comm = Communicator(dist.group.WORLD)
    z, x = given()
    shards = z.view(T, num_shards, -1).transpose(0, 1)
    mine = shards.chunk(comm.size)[comm.rank].clone().requires_grad_()
    rows = x.chunk(comm.size)[comm.rank].clone().requires_grad_()
    values = (
        token_logprobs(mine, labels(vocab_size), vocab_size, comm),
        entropy(mine, vocab_size, comm),
        whole_logits(mine, vocab_size, comm),
        whole_rows(rows, comm),
    )
    loss = total(*values)
    (0.37 * loss).backward()
    assert mine.grad is not None and rows.grad is not None
    dz = comm.all_gather(mine.grad).transpose(0, 1).flatten(1)[:, :vocab_size]
    return loss.detach(), *(value.detach() for value in values), dz, comm.all_gather(rows.grad)


@pytest.mark.by_default("2-2-41")
@pytest.mark.parametrize("vocab_size", [41, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_ranks", "num_shards"),
    [(1, 1), (2, 2), *(pytest.param(*slow, marks=pytest.mark.slow) for slow in ((1, 4), (2, 4), (3, 3), (4, 4)))],
)
def test_values_of_tokens(ranks: RankPool, num_ranks: int, num_shards: int, vocab_size: int) -> None:
    whole, x = (part.requires_grad_() for part in given())
    z, known = whole[:, :vocab_size], labels(vocab_size)
    logprobs = -F.cross_entropy(z, known, ignore_index=IGNORED_LABEL, reduction="none")
    log_q = z.log_softmax(1)
    values = logprobs, -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0)).sum(1), z, x
    loss = total(*values)
    (0.37 * loss).backward()
    assert whole.grad is not None and x.grad is not None
    wanted = (loss, *values, whole.grad[:, :vocab_size], x.grad)
    for found in ranks.run(by_ranks, num_ranks, num_shards, vocab_size):
        for name, got, want in zip(("loss", "logprobs", "entropy", "z", "x", "dz", "dx"), found, wanted, strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12, msg=name)


def smoothed(vocab_size: int, label_smoothing: float, z_loss: float, keeps: bool) -> tuple[Tensor, Tensor]:
    comm = Communicator(dist.group.WORLD)
    leaf = given()[0].nan_to_num(neginf=0).chunk(comm.size, 1)[comm.rank].clone().requires_grad_()
    mine = leaf * 1
    loss = vocab_parallel_cross_entropy(
        mine,
        labels(vocab_size),
        vocab_size,
        comm,
        weights=tensor(2, T).float(),
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        keeps_logits=keeps,
    )
    (0.37 * loss).backward()
    assert leaf.grad is not None
    assert torch.equal(mine, leaf) == keeps
    return loss.detach(), comm.all_gather(leaf.grad.T.contiguous()).T[:, :vocab_size]


@pytest.mark.by_default("0.1-0.01-True")
@pytest.mark.parametrize(
    ("label_smoothing", "z_loss", "keeps"), [(0.1, 0.01, True), (0.3, 0.0, False), (0, 0.1, False)]
)
def test_cross_entropy_with_weights_label_smoothing_and_z_loss(
    ranks: RankPool, label_smoothing: float, z_loss: float, keeps: bool
) -> None:
    z = given()[0].nan_to_num(neginf=0).requires_grad_()
    known, weights = labels(41), tensor(2, T).float()
    losses = F.cross_entropy(
        z[:, :41], known, ignore_index=IGNORED_LABEL, reduction="none", label_smoothing=label_smoothing
    )
    losses = losses + z_loss * z[:, :41].logsumexp(1).square() * (known != IGNORED_LABEL)
    want = (losses * weights).sum()
    (0.37 * want).backward()
    assert z.grad is not None
    for loss, dz in ranks.run(smoothed, 2, 41, label_smoothing, z_loss, keeps):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dz, z.grad[:, :41], rtol=1e-12, atol=1e-12)


def test_weights_that_are_not_one_of_each_label_are_refused() -> None:
    with pytest.raises(ValueError, match="every label needs its weight"):
        vocab_parallel_cross_entropy(
            torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), 8, Communicator(None), weights=torch.ones(3)
        )
