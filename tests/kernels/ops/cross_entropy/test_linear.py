"""Rung: host, interpreter, gloo ranks, GPU. Projection and cross-entropy by chunks, whole and by shards.

Only a GPU shows the compiled kernels' numbers, and bfloat16 in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.kernels.precision import check_errors, with_gaps, with_longer_rows
from support.kernels.rungs import Rung, every_grid_of_a_product, every_rung, every_rung_and_dtype_of_a_product
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tpkernels.exchange.communicator import Communicator
from tpkernels.launch import INTERPRETED, Target, observed
from tpkernels.ops.cross_entropy.linear import (
    default_chunk_tokens,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from tpkernels.ops.matmul.operator import has_kernel

# Rows, width, vocabulary.
SIZES = [(1, 7, 100), (63, 16, 65), (100, 65, 257), (0, 16, 65)]
PART = [(63, 16, 65), (0, 16, 65)]
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01}


def operands(rows: int, width: int, vocab: int, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """x with gaps and a weight of long rows, of logits of about 3; weights of both signs; some labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).to(device, dtype)
    weight = (torch.randn(vocab, width, generator=generator) * 3 / width**0.5).to(device, dtype)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[1:2], labels[2:3], labels[3::7] = 0, vocab - 1, -100
    token_weights = torch.randn(rows, generator=generator)
    return {
        "x": with_gaps(x).requires_grad_(),
        "weight": with_longer_rows(weight).requires_grad_(),
        "labels": labels.to(device),
        "token_weights": token_weights.to(device),
    }


def num_draws(num_rows: int) -> int:
    """The loss is one number, which torch may hit: over 64 draws errors like its own stay within twice its own."""
    if not INTERPRETED:
        return 64
    return 32 if num_rows == 1 else 8  # interpreted, a draw takes long


def check_every_size(device: str, dtype: torch.dtype, whole: bool) -> None:
    for size in SIZES if whole else PART:
        reference = functools.partial(linear_cross_entropy_reference, vocab_size=size[2], **SMOOTHED)
        for chunk_tokens in (None, 25) if whole else (25,):
            check_errors(
                f"linear_cross_entropy {size}, chunks of {chunk_tokens}",
                functools.partial(linear_cross_entropy, chunk_tokens=chunk_tokens, **SMOOTHED),
                reference,
                lambda seed, size=size: operands(*size, dtype, device, seed),
                draws=num_draws(size[0]),
            )


@every_grid_of_a_product
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_every_size, dtype, whole)


VOCAB, COLUMNS = 100, 40  # of three shards the last has 20 columns of padding, a fourth is nothing else


def padded_shards(weight: Tensor, num_shards: int) -> list[Tensor]:
    """Rows of weight, cut over shards of COLUMNS; those of padding are large, and must not matter."""
    full = torch.full((num_shards * COLUMNS, weight.shape[1]), 100.0, dtype=weight.dtype, device=weight.device)
    full[: len(weight)] = weight
    return list(full.chunk(num_shards))


def one_after_the_other(
    num_shards: int, run_shard: Callable[[int, Callable[[Tensor], Tensor]], tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """Run shards in one process, twice: the first time their combines only listen."""
    heard: list[list[Tensor]] = [[] for _ in range(num_shards)]

    def listen(i: int, partials: Tensor) -> Tensor:
        heard[i].append(partials)
        return partials[None]

    for i in range(num_shards):
        run_shard(i, functools.partial(listen, i))
    chunks = [torch.stack(of_shards) for of_shards in zip(*heard, strict=True)]
    feeds = [iter(chunks) for _ in range(num_shards)]
    return [run_shard(i, lambda _, feed=feed: next(feed)) for i, feed in enumerate(feeds)]


def of_shards(x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor) -> tuple[Tensor, ...]:
    """The loss, dx and dw of four shards, in chunks of 13 tokens."""
    shards = padded_shards(weight, 4)

    def run_shard(i: int, combine: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = x.clone().requires_grad_(), shards[i].clone().requires_grad_()
        loss = linear_cross_entropy(
            *leaves,
            labels,
            token_weights,
            vocab_size=VOCAB,
            first_column=i * COLUMNS,
            combine=combine,
            chunk_tokens=13,
            **SMOOTHED,
        )
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    losses, dxs, dws = zip(*one_after_the_other(4, run_shard), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    dw = torch.cat(dws)
    assert not dw[VOCAB:].any()
    # Added as a reduce-scatter in the accumulation dtype would.
    return losses[0], torch.stack(dxs).to(losses[0].dtype).sum(0).to(x.dtype), dw[:VOCAB]


def of_the_whole(x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor) -> tuple[Tensor, ...]:
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy_reference(*leaves, labels, token_weights, VOCAB, **SMOOTHED)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def check_shards(device: str, dtype: torch.dtype) -> None:
    def draw(seed: int) -> dict[str, Tensor]:
        drawn = operands(32, 24, VOCAB, dtype, device, seed)
        drawn["labels"][-4:] = torch.tensor([COLUMNS - 1, COLUMNS, 2 * COLUMNS - 1, 2 * COLUMNS])
        return {name: tensor.detach() for name, tensor in drawn.items()}

    check_errors("shards", of_shards, of_the_whole, draw)


@pytest.mark.by_default("host-float32", "host-float16", "host-bfloat16", "gpu-float32", "gpu-float16", "gpu-bfloat16")
@every_rung_and_dtype_of_a_product
def test_shards_are_as_the_whole(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_shards, dtype)


def of_this_rank() -> tuple[Tensor, Tensor, Tensor]:
    """The loss, dx and this rank's dw, over a communicator."""
    comm = Communicator(dist.group.WORLD)
    drawn = operands(32, 24, 2 * COLUMNS - 3, torch.float64, "cpu", 0)
    x, weight, labels, token_weights = drawn.values()
    shard = padded_shards(weight.detach(), 2)[comm.rank].requires_grad_()
    loss = linear_cross_entropy(
        x,
        shard,
        labels,
        token_weights.double(),
        vocab_size=len(weight),
        first_column=comm.rank * COLUMNS,
        combine=lambda partials: comm.all_gather(partials[None]),
        chunk_tokens=10,
        **SMOOTHED,
    )
    dx, dw = torch.autograd.grad(loss, (x, shard))
    return loss.detach(), comm.reduce_scatter(dx), dw


def test_two_ranks(ranks: RankPool) -> None:
    drawn = operands(32, 24, 2 * COLUMNS - 3, torch.float64, "cpu", 0)
    x, weight, labels, token_weights = drawn.values()
    want = linear_cross_entropy_reference(x, weight, labels, token_weights.double(), len(weight), **SMOOTHED)
    want_dx, want_dw = torch.autograd.grad(want, (x, weight))
    losses, dxs, dws = zip(*ranks.run(of_this_rank, 2), strict=True)
    assert torch.equal(*losses)
    torch.testing.assert_close((losses[0], torch.cat(dxs)), (want.detach(), want_dx))
    torch.testing.assert_close(torch.cat(dws)[: len(weight)], want_dw)


class LargestTensor(TorchDispatchMode):
    """How many elements the largest tensor made under it has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor))])
        return made


@pytest.mark.parametrize("num_tokens", [2048, 2055])
def test_logits_are_never_whole(num_tokens: int) -> None:
    width, vocab = 8, 300
    x, weight, labels, token_weights = operands(num_tokens, width, vocab, torch.float32, "cpu", 0).values()
    with LargestTensor() as largest:
        linear_cross_entropy(x, weight, labels, token_weights).backward()
    assert width * num_tokens < largest.numel <= num_tokens * vocab / 8
    with LargestTensor() as largest:
        linear_cross_entropy_reference(x, weight, labels, token_weights, vocab).backward()
    assert largest.numel == num_tokens * vocab  # so the mode sees logits


@pytest.mark.parametrize(("num_tokens", "chunk"), [(0, 128), (128, 128), (1024, 128), (2047, 128), (8192, 1024)])
def test_default_chunk_is_an_eighth_but_128(num_tokens: int, chunk: int) -> None:
    assert default_chunk_tokens(num_tokens) == chunk


def check_work_that_nobody_wants(device: str) -> None:
    """One matmul per chunk without gradients, one more for each gradient that is wanted; the loss is the same."""
    x, weight, labels, _ = operands(30, 8, 20, torch.float32, device, 0).values()
    calls, losses = [], []
    for wants_dx, wants_dw, enabled in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1), (1, 1, 0)):
        leaves = x.detach().requires_grad_(bool(wants_dx)), weight.detach().requires_grad_(bool(wants_dw))
        with Matmuls() as matmuls, torch.set_grad_enabled(bool(enabled)):
            losses.append(linear_cross_entropy(*leaves, labels, 0.5, chunk_tokens=10))
        assert losses[-1].requires_grad == bool(enabled and (wants_dx or wants_dw))
        calls.append(matmuls.count)
        if losses[-1].requires_grad:
            losses[-1].backward()
        assert [leaf.grad is not None for leaf in leaves] == [bool(wants_dx and enabled), bool(wants_dw and enabled)]
    # Interpreted, dw is accumulated by tpkernels' own matmul.
    assert calls == ([3, 6, 3, 6, 3] if has_kernel(x) and not x.is_cuda else [3, 6, 6, 9, 3])
    assert all(torch.equal(loss, losses[0]) for loss in losses)


class Matmuls(TorchDispatchMode):
    """How many matmuls ran under it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith(("aten.mm.", "aten.addmm"))
        return func(*args, **(kwargs or {}))


@every_rung
def test_work_that_nobody_wants_is_not_done(rung: Rung) -> None:
    rung(check_work_that_nobody_wants)


def check_all_ignored(device: str) -> None:
    x, weight, labels, _ = operands(30, 8, 20, torch.float32, device, 0).values()
    loss = linear_cross_entropy(x, weight, labels.fill_(-100), **SMOOTHED, chunk_tokens=16)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    assert loss == 0 and not dx.any() and not dw.any()


@every_rung
def test_all_labels_ignored(rung: Rung) -> None:
    rung(check_all_ignored)


def check_large_scale(device: str) -> None:
    x, weight, labels, _ = operands(30, 8, 20, torch.float16, device, 0).values()
    loss = linear_cross_entropy(x, weight, labels, 1e-3)
    dx, dw = torch.autograd.grad(loss, (x, weight), torch.tensor(2.0**17, device=device))
    assert dx.isfinite().all() and dw.isfinite().all() and dx.any() and dw.any()


@every_rung
def test_a_loss_scale_beyond_float16(rung: Rung) -> None:
    rung(check_large_scale)


def test_second_backward_raises() -> None:
    x, weight, labels, _ = operands(5, 8, 20, torch.float32, "cpu", 0).values()
    loss = linear_cross_entropy(x, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_by_differences() -> None:
    """gradcheck asks for several backwards: each has a forward of its own."""

    class Repeatable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return linear_cross_entropy(x, weight, labels, token_weights, **SMOOTHED, chunk_tokens=2)

        @staticmethod
        def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, ...]:
            leaves = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
            with torch.enable_grad():
                loss = linear_cross_entropy(*leaves, labels, token_weights, **SMOOTHED, chunk_tokens=2)
                return torch.autograd.grad(loss, leaves, dloss)

    x, weight, labels, token_weights = operands(5, 3, 6, torch.float64, "cpu", 0).values()
    assert torch.autograd.gradcheck(Repeatable.apply, (x, weight))
    reference_of = (labels, token_weights, 6, *SMOOTHED.values())
    assert torch.autograd.gradcheck(lambda *leaves: linear_cross_entropy_reference(*leaves, *reference_of), (x, weight))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(3, 5)}, r"x \(3, 5\) torch.float32, weight \(6, 4\) torch.float32, labels \(3,\): flatten"),
        ({"x": torch.ones(3, 4).half()}, "torch.float16, weight .* torch.float32"),
        ({"x": torch.ones(1, 3, 4)}, r"x \(1, 3, 4\)"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels \(4,\)"),
        ({"labels": torch.zeros(3)}, "int64 labels"),
        ({"token_weights": torch.ones(2)}, r"got \(2,\) for 3 tokens"),
        ({"token_weights": torch.ones(3, requires_grad=True)}, "requires_grad=True: expand and detach"),
        ({"vocab_size": 7}, r"the whole vocabulary is here: weight \(6, 4\), vocab_size 7, first_column 0"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"first_column": 6, "vocab_size": 6}, "first_column 6: pass combine"),
        ({"combine": lambda partials: partials[None]}, "vocab_size None, first_column 0: pass vocab_size"),
        ({"combine": lambda partials: partials[None], "vocab_size": 6, "first_column": -6}, "first_column -6"),
        (
            {"combine": lambda partials: partials[None], "vocab_size": 0},
            "vocab_size 0, first_column 0: pass",
        ),
        ({"chunk_tokens": 0}, "at least one token: got 0"),
        ({"label_smoothing": -0.5}, r"got -0.5 and 0.0"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    labels = torch.zeros(3, dtype=torch.int64)
    given = {"x": torch.ones(3, 4), "weight": torch.ones(6, 4), "labels": labels, **arguments}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**given)


def test_a_chunk_is_added_to_dw_by_one_launch() -> None:
    """Where the matmul kernel adds in place, however many rows dw has."""
    pytest.importorskip("triton")
    x, weight = (
        torch.empty(rows, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for rows in (512, 10_000)
    )
    launches: list[str] = []
    with observed(Target("cuda", 90), lambda kernel, *_: launches.append(kernel.fn.__name__)):
        linear_cross_entropy(x, weight, torch.zeros(512, dtype=torch.int64, device="meta"), chunk_tokens=256)
    assert launches.count("matmul_kernel") == 2
