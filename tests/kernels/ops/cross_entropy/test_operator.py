"""Rung: host, interpreter, GPU. Cross-entropy of whole and of sharded rows, forward and the gradient in place.

Only a GPU shows the compiled kernels' numbers, and bfloat16 in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernels.precision import check_errors, unwritten_is_nan, with_gaps, with_longer_rows
from support.kernels.rungs import (
    Rung,
    every_grid_of_rows,
    every_rung,
    every_rung_and_dtype_of_rows,
)
from torch import Tensor
from tpkernels.ops.cross_entropy.operator import (
    CombinedPartials,
    combine_partials,
    cross_entropy,
    cross_entropy_gradient_,
    cross_entropy_op,
    cross_entropy_partials,
    cross_entropy_reference,
    gradient_op_,
    partials_op,
    token_losses,
)

# The last has more columns than a program's block, and no multiple of it.
SIZES = [(1, 1), (1, 100), (63, 65), (100, 257), (0, 65), (12, 4133)]
PART = [(1, 100), (3, 4133)]
PLAIN: dict[str, float] = {"label_smoothing": 0.0, "z_loss": 0.0}
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01}
Layout = Callable[[Tensor], Tensor]


def columns_first(t: Tensor) -> Tensor:
    """The same values, neighbours along dim 0."""
    return t.T.contiguous().T


def operands(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int, scale: float) -> dict[str, Tensor]:
    """Logits of another scale in every row, some rising; labels at the first and the last column, and ignored ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator) * scale * torch.linspace(0.1, 1, rows)[:, None]
    logits[::2] = logits[::2].sort(dim=1).values  # the largest is seen last
    labels = torch.randint(0, columns, (rows,), generator=generator)
    labels[1:2], labels[2:3], labels[3::7] = 0, columns - 1, -100
    return {"logits": logits.to(device, dtype).requires_grad_(), "labels": labels.to(device)}


def check_one(
    size: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    layout: Layout = with_longer_rows,
    settings: dict[str, float] = PLAIN,
    scale: float = 10.0,
) -> None:
    check_errors(
        f"cross_entropy {size} {layout.__name__} {settings} {scale}",
        # A copy each time: backward overwrites the logits.
        lambda logits, labels: cross_entropy(layout(logits), labels, **settings),
        lambda logits, labels: cross_entropy_reference(logits, labels, **settings),
        lambda seed: operands(*size, dtype, device, seed, scale),
    )


def check_every_size(device: str, dtype: torch.dtype, whole: bool) -> None:
    for size in SIZES if whole else PART:
        check_one(size, dtype, device, settings=SMOOTHED)
        if whole:
            check_one(size, dtype, device)
    for layout in (with_gaps, columns_first):
        check_one((63, 65), dtype, device, layout, SMOOTHED)
    for settings in (PLAIN, SMOOTHED):
        check_one((63, 65), dtype, device, settings=settings, scale=1e4)


@every_grid_of_rows
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_every_size, dtype, whole)


SHARD, VOCAB = 65, 150


def of_shards(logits: Tensor, labels: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient of a vocabulary in four shards: whole, whole, partly padding, all padding (of NaN)."""
    shards, partials = [], []
    for first in range(0, 4 * SHARD, SHARD):
        mine = logits[:, first : min(first + SHARD, VOCAB)]
        shard = torch.full((len(logits), SHARD), torch.nan, dtype=logits.dtype, device=logits.device)
        shard[:, : mine.shape[1]] = mine
        shards.append((shard, {"first_column": first, "num_columns": mine.shape[1]}))
        partials.append(cross_entropy_partials(shard, labels, **shards[-1][1]))
    combined = combine_partials(torch.stack(partials))
    for shard, place in shards:
        cross_entropy_gradient_(shard, labels, combined, slopes, VOCAB, **place, **SMOOTHED)
    dlogits = torch.cat([shard for shard, _ in shards], dim=1)
    assert not dlogits[:, VOCAB:].any()
    return token_losses(combined, labels, VOCAB, **SMOOTHED), dlogits[:, :VOCAB]


def of_whole_rows(logits: Tensor, labels: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    z = logits.detach().clone().requires_grad_()
    losses = cross_entropy_reference(z, labels, **SMOOTHED)
    return losses, torch.autograd.grad(losses, z, slopes.to(losses.dtype))[0]


def check_shards(device: str, dtype: torch.dtype) -> None:
    def draw(seed: int) -> dict[str, Tensor]:
        drawn = operands(32, VOCAB, dtype, device, seed, 10.0)
        labels = [SHARD - 1, SHARD, 2 * SHARD - 1, 2 * SHARD, VOCAB - 1]
        drawn["labels"][-len(labels) :] = torch.tensor(labels)
        slopes = torch.randn(32, generator=torch.Generator().manual_seed(seed)).to(device)
        return {"logits": drawn["logits"].detach(), "labels": drawn["labels"], "slopes": slopes}

    check_errors("shards", of_shards, of_whole_rows, draw)


@every_rung_and_dtype_of_rows
def test_shards_are_as_the_whole(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_shards, dtype)


def check_partials(device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [-torch.inf, 0.0, 5.0], [-torch.inf, -torch.inf, 5.0]], device=device)
    labels = torch.tensor([8, 7, -100], device=device)
    with unwritten_is_nan():
        partials = cross_entropy_partials(logits, labels, first_column=7, num_columns=2).cpu()
        padding = cross_entropy_partials(logits, labels, first_column=7, num_columns=0).cpu()
    inf = torch.inf
    assert partials[0].tolist() == [3, 0, -inf] and partials[2].tolist() == [3, -inf, 0]
    assert partials[3].tolist() == [4, -inf, -inf]
    torch.testing.assert_close(partials[1], torch.tensor([1 + torch.tensor(-2.0).exp(), 1, 0]))
    assert padding[0].tolist() == [-inf] * 3 and not padding[1:].any()


@every_rung
def test_partials(rung: Rung) -> None:
    rung(check_partials)


class Made(torch.autograd.Function):
    """A tensor as if something had made it, in the memory of the leaf that it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def check_memory(device: str) -> None:
    """The gradient is in the caller's memory, and nothing beside it is touched."""
    drawn = operands(9, 33, torch.float32, device, 0, 3.0)
    expected = torch.autograd.grad(cross_entropy_reference(**drawn).sum(), drawn["logits"])[0]
    for layout in (with_longer_rows, with_gaps, columns_first):
        logits = layout(drawn["logits"].detach()).requires_grad_()
        before = logits.detach().clone()
        cross_entropy(logits, drawn["labels"])
        assert torch.equal(logits, before)
        (returned,) = torch.autograd.grad(cross_entropy(Made.apply(logits), drawn["labels"]).sum(), logits)
        torch.testing.assert_close(logits.detach(), expected)
        assert torch.equal(returned, logits)
        if layout is not columns_first:
            assert logits._base is not None and int(logits._base.isnan().sum()) == logits._base.numel() - 9 * 33


@every_rung
def test_gradient_overwrites_the_logits_and_nothing_else(rung: Rung) -> None:
    rung(check_memory)


def check_leaves(device: str) -> None:
    """Logits that a user holds: neither they nor what they are a view of are written to."""
    drawn = operands(9, 33, torch.float32, device, 0, 3.0)
    (expected,) = torch.autograd.grad(cross_entropy_reference(**drawn).sum(), drawn["logits"])
    for view in (lambda z: z, lambda z: z.view(3, 3, 33).flatten(0, 1), lambda z: z[:]):
        leaf = drawn["logits"].detach().clone().requires_grad_()
        before = leaf.detach().clone()
        for _ in range(2):  # what is left as it is may be asked for again
            leaf.grad = None
            cross_entropy(view(leaf), drawn["labels"]).sum().backward()
            assert leaf.grad is not None and torch.equal(leaf, before)
            torch.testing.assert_close(leaf.grad, expected)
            assert leaf.grad.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()


@every_rung
def test_gradient_of_a_leaf_has_memory_of_its_own(rung: Rung) -> None:
    rung(check_leaves)


def test_compiled_logits_are_left() -> None:
    """Traced logits look like no leaf: they are left whatever they are."""
    compiled = torch.compile(lambda z, labels: cross_entropy(z, labels).sum(), backend="aot_eager", fullgraph=True)
    drawn = operands(9, 33, torch.float32, "cpu", 0, 3.0)
    (expected,) = torch.autograd.grad(cross_entropy_reference(**drawn).sum(), drawn["logits"])
    leaf = drawn["logits"].detach().clone().requires_grad_()
    for logits in (leaf, leaf.view(3, 3, 33).flatten(0, 1), 1 * leaf):
        before = logits.detach().clone()
        (gradient,) = torch.autograd.grad(compiled(logits, drawn["labels"]), leaf)
        assert torch.equal(logits, before)
        torch.testing.assert_close(gradient, expected)
    torch._dynamo.reset()


def test_logits_that_share_memory_need_no_gradient_of_their_own() -> None:
    """Where nobody takes the gradient, or it has memory of its own."""
    row, labels = torch.randn(1, 4, requires_grad=True), torch.tensor([0, 3, 1])
    expected = cross_entropy_reference((2 * row).expand(3, 4), labels)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(cross_entropy((2 * row).expand(3, 4), labels), expected)
    with torch.no_grad():
        logits = (2 * row).expand(3, 4)
    torch.testing.assert_close(cross_entropy(logits, labels), expected)
    losses = cross_entropy(row.expand(3, 4), labels)
    wanted = torch.autograd.grad(cross_entropy_reference(row.expand(3, 4), labels).sum(), row)
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), row), wanted)


def check_special_rows(device: str) -> None:
    """Compare with torch: ignored rows whatever they hold, logits of -inf, labels outside the vocabulary."""
    inf, nan = torch.inf, torch.nan
    z = [[nan, inf, 1.0], [-inf, 1.0, 2.0], [-inf, 1.0, 2.0], [-inf] * 3, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [nan] * 3]
    logits = torch.tensor(z, device=device, requires_grad=True)
    labels = torch.tensor([-100, 1, 0, 0, 3, -1, 1], device=device)
    of_torch = cross_entropy_reference(logits[:4], labels[:4])
    (wanted,) = torch.autograd.grad(of_torch[1], logits)
    losses = cross_entropy(logits, labels)
    torch.testing.assert_close(losses[:4], of_torch, equal_nan=True)
    assert losses[0] == 0 and losses[2] == inf and losses[3:].isnan().all()
    (dz,) = torch.autograd.grad(losses.sum(), logits)
    assert not dz[0].any() and dz[1, 0] == 0
    assert dz[4:6].isnan().all(), "as the losses of labels that are nowhere"
    torch.testing.assert_close(dz[1], wanted[1])
    assert cross_entropy(torch.zeros(1, 3, device=device), labels[:1], **SMOOTHED).tolist() == [0]


@every_rung
def test_special_rows(rung: Rung) -> None:
    rung(check_special_rows)


def check_all_ignored(device: str) -> None:
    logits = torch.randn(5, 70).to(device).requires_grad_()
    losses = cross_entropy(logits, torch.full((5,), -100, device=device), **SMOOTHED)
    losses.sum().backward()
    assert not losses.any() and logits.grad is not None and not logits.grad.any()


@every_rung
def test_all_labels_ignored(rung: Rung) -> None:
    rung(check_all_ignored)


def test_second_backward_raises() -> None:
    drawn = operands(5, 7, torch.float32, "cpu", 0, 1.0)
    loss = cross_entropy(1 * drawn["logits"], drawn["labels"]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_that_their_maker_needs_raise() -> None:
    drawn = operands(5, 7, torch.float32, "cpu", 0, 1.0)
    loss = cross_entropy(drawn["logits"].tanh(), drawn["labels"]).sum()
    with pytest.raises(RuntimeError, match="output 0 of Tanh, is at version"):
        loss.backward()


class Repeatable(torch.autograd.Function):
    """cross_entropy of a copy, made again for each backward: gradcheck asks for several."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        return cross_entropy(logits.clone(), labels, **SMOOTHED)

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        with torch.enable_grad():
            copy = logits.detach().clone().requires_grad_()
            return torch.autograd.grad(cross_entropy(copy, labels, **SMOOTHED), copy, dlosses)[0], None


def test_gradcheck_of_host_path_and_reference() -> None:
    logits, labels = operands(5, 7, torch.float64, "cpu", 0, 3.0).values()
    assert torch.autograd.gradcheck(Repeatable.apply, (logits, labels))
    assert torch.autograd.gradcheck(lambda z: cross_entropy_reference(z, labels, **SMOOTHED), logits)


@pytest.mark.by_default("5")
@pytest.mark.parametrize("rows", [0, 5])
def test_opcheck(rows: int) -> None:
    logits, labels = operands(rows, 7, torch.float32, "cpu", 0, 3.0).values()
    torch.library.opcheck(cross_entropy_op, (logits, labels, 0.1, 0.01))
    logits = logits.detach()
    torch.library.opcheck(partials_op, (logits, labels, 2, 5))
    combined = combine_partials(cross_entropy_partials(logits, labels)[None])
    given = (logits, labels, combined.max_logit, combined.exp_sum, torch.ones(rows), 7, 0, 7, 0.1, 0.01)
    torch.library.opcheck(gradient_op_, given)


def test_compiled_as_eager() -> None:
    drawn = operands(6, 5, torch.float32, "cpu", 0, 3.0)

    def of_double(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(2 * logits, labels, **SMOOTHED)

    outcomes = []
    for function in (of_double, torch.compile(of_double, backend="aot_eager", fullgraph=True)):
        losses = function(**drawn)
        outcomes.append((losses, torch.autograd.grad(losses.square().sum(), drawn["logits"])[0]))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


def test_lse_of_two_shards() -> None:
    z = torch.randn(3, 8, dtype=torch.float64)
    nowhere = torch.full((3,), -100)
    shards = [cross_entropy_partials(half, nowhere) for half in z.chunk(2, dim=1)]
    torch.testing.assert_close(combine_partials(torch.stack(shards)).lse, z.logsumexp(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": torch.ones(3, 4, dtype=torch.int64)}, r"floating-point numbers .* logits \(3, 4\) torch.int64"),
        ({"logits": torch.ones(3, 4, 5)}, r"logits \(3, 4, 5\) .* flatten both to tokens"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels \(4,\)"),
        ({"labels": torch.zeros(3)}, r"int64 labels: got torch.float32: .* labels.long\(\)"),
        ({"logits": torch.ones(3, 0)}, r"at least one column: got \(3, 0\)"),
        (
            {"logits": (2 * torch.ones(3, 1, requires_grad=True)).expand(3, 4)},
            r"may not share memory: strides \(1, 0\)",
        ),
        ({"label_smoothing": 1.5}, r"label_smoothing must lie in \[0, 1\] .* got 1.5 and 0.0"),
        ({"z_loss": -1.0}, "got 0.0 and -1.0"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"logits": torch.ones(3, 4), "labels": torch.zeros(3, dtype=torch.int64), **PLAIN, **arguments}
    with pytest.raises(ValueError, match=message):
        cross_entropy(**given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_columns": 5}, r"0 to 4 columns .* num_columns 5, first_column 0: clamp"),
        ({"num_columns": -1}, "num_columns -1"),
        ({"first_column": -4}, "first_column -4"),
        ({"slopes": torch.ones(1)}, r"slopes \(1,\), labels \(3,\): expand slopes"),
        ({"logits": torch.ones(1, 4).expand(3, 4)}, r"strides \(0, 1\) of \(3, 4\)"),
    ],
)
def test_what_does_not_fit_a_shard_is_refused(arguments: dict[str, Any], message: str) -> None:
    combined = CombinedPartials(*torch.ones(4, 3))
    labels, slopes = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    given = {"logits": torch.ones(3, 4), "labels": labels, "combined": combined, "slopes": slopes, **arguments}
    with pytest.raises(ValueError, match=message):
        cross_entropy_gradient_(**given, vocab_size=4)


class Named(Tensor):
    """A tensor of a class of one's own."""


def test_logits_of_another_class_are_taken() -> None:
    z, labels = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, -100, 6])
    assert torch.equal(cross_entropy(z.as_subclass(Named), labels).as_subclass(Tensor), cross_entropy(z, labels))
