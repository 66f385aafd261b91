"""Rung: host, interpreter, GPU. The embedding and its gradient, of rows that repeat and rows of other shards.

Only a GPU shows the compiled kernels' numbers, and bfloat16 in them. That they are the same on every GPU shows in that
they have the bits of a plain loop in the order documented.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from support.kernels.precision import check_errors, unwritten_is_nan, with_gaps, with_longer_rows
from support.kernels.rungs import Rung, every_grid_of_rows, every_rung, every_rung_and_grid
from torch import Tensor
from tpkernels.launch import INTERPRETED, accumulation_dtype
from tpkernels.ops.embedding import (
    embedding,
    embedding_backward_,
    embedding_backward_op_,
    embedding_backward_reference,
    embedding_op,
    embedding_reference,
)

# Tokens, rows of the table, columns.
SIZES = [(1, 1, 1), (63, 5, 100), (65, 40, 257), (0, 3, 4), (5, 3, 0)]
PART = [(63, 5, 100), (0, 3, 4)]


def random_rows(tokens: int, num_rows: int, seed: int) -> Tensor:
    """Rows of which some are below the table's and some above."""
    return torch.randint(-2, num_rows + 2, (tokens,), generator=torch.Generator().manual_seed(seed))


def random_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_lookups(device: str, dtype: torch.dtype, whole: bool) -> None:
    for tokens, num_rows, columns in SIZES if whole else PART:

        def draw(seed: int, size: tuple[int, int, int] = (tokens, num_rows, columns)) -> dict[str, Tensor]:
            weight = with_longer_rows(random_numbers(*size[1:], seed=seed).to(device, dtype))
            return {"rows": random_rows(*size[:2], seed).to(device), "weight": weight.requires_grad_()}

        check_errors(f"embedding {tokens, num_rows, columns}", embedding, embedding_reference, draw)


@every_grid_of_rows
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_lookups, dtype, whole)


# The long ones take three levels of pieces.
ROWS: dict[str, Callable[[int], Tensor]] = {
    "random": lambda seed: random_rows(100, 7, seed),
    "one": lambda seed: torch.full((1,), 6),
    "all equal, a piece": lambda seed: torch.full((32,), 3),
    "all equal": lambda seed: torch.full((600,), 3),
    "all distinct": lambda seed: torch.randperm(65, generator=torch.Generator().manual_seed(seed)),
    "all outside": lambda seed: torch.tensor([-1, 100, -(2**40), 2**40]).repeat(10),
    "runs of a piece": lambda seed: torch.arange(5).repeat_interleave(32),
    "runs beyond a piece": lambda seed: torch.arange(5).repeat_interleave(33),
    "skewed": lambda seed: torch.where(torch.arange(600) % 9 > 0, 2, random_rows(600, 7, seed)),
}
# test_kernels_add_in_the_documented_order has the long one.
PART_OF_ROWS = ("random", "all outside", "runs of a piece")


def check_accumulation(device: str, dtype: torch.dtype, whole: bool) -> None:
    """Into buffers of the accumulation dtype, and of the dtype once; tokens outside have NaN for a gradient."""
    for what in ROWS if whole else PART_OF_ROWS:
        make_rows = ROWS[what]
        for buffer_dtype in {accumulation_dtype(dtype), dtype if what == "skewed" else accumulation_dtype(dtype)}:

            def draw(
                seed: int, rows_of: Callable[[int], Tensor] = make_rows, buffer_dtype: torch.dtype = buffer_dtype
            ) -> dict[str, Tensor]:
                rows = rows_of(seed)
                num_rows = 65 if len(rows) == 65 else 7
                dy = random_numbers(len(rows), 100, seed=seed)
                dy[(rows < 0) | (rows >= num_rows)] = torch.nan
                buffer = with_gaps(random_numbers(num_rows, 100, seed=seed + 1).to(device, buffer_dtype))
                return {"buffer": buffer, "rows": rows.to(device), "dy": with_gaps(dy.to(device, dtype))}

            def accumulate(buffer: Tensor, rows: Tensor, dy: Tensor) -> Tensor:
                return embedding_backward_(with_gaps(buffer), rows, dy)

            # Interpreted, a draw takes seconds.
            num_draws = 1 if INTERPRETED else 8
            check_errors(f"{what} into {buffer_dtype}", accumulate, embedding_backward_reference, draw, draws=num_draws)


@every_grid_of_rows
def test_accumulation_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_accumulation, dtype, whole)


def sum_in_documented_order(rows: Tensor, dy: Tensor, row: int) -> Tensor:
    """What the row's tokens add up to: in pieces of 32 places of the sorted order, then pieces of their two places."""
    sorted_rows, tokens = rows.sort(stable=True)
    place = int((sorted_rows < row).sum())
    terms = {place + i: dy[token] for i, token in enumerate(tokens[sorted_rows == row].tolist())}
    while True:
        sums: dict[int, Tensor] = {}
        for place, term in terms.items():
            piece = place // 32
            # A sum that does not begin with its piece is the piece's second.
            key = next((key for key in (2 * piece, 2 * piece + 1) if key in sums), 2 * piece + (place % 32 > 0))
            sums[key] = sums[key] + term if key in sums else term
        if len(sums) == 1:
            return next(iter(sums.values()))
        terms = sums


def check_order(device: str) -> None:
    rows = ROWS["skewed"](0)
    dy = random_numbers(len(rows), 5, seed=0)
    buffer = embedding_backward_(torch.zeros(7, 5, device=device), rows.to(device), dy.to(device)).cpu()
    for row in range(7):
        assert torch.equal(buffer[row], sum_in_documented_order(rows, dy, row)), row


@pytest.mark.by_default("gpu")
@pytest.mark.parametrize("rung", ["interpreter", "gpu"], indirect=True)
def test_kernels_add_in_the_documented_order(rung: Rung) -> None:
    rung(check_order)


def check_columns(device: str, whole: bool) -> None:
    """Any columns alone have the bits they have among the others."""
    num_rows = 257 if whole else 65
    rows = random_rows(num_rows, 3, seed=0).to(device)
    dy = random_numbers(num_rows, 1100, seed=0).to(device)
    with unwritten_is_nan():
        whole = embedding_backward_(torch.ones(3, 1100, device=device), rows, dy)
        for columns in (slice(0, 1), slice(0, 63), slice(1000, 1100)):
            alone = embedding_backward_(torch.ones(3, 1100, device=device)[:, columns], rows, dy[:, columns])
            assert torch.equal(alone, whole[:, columns])


@every_rung_and_grid
def test_order_does_not_depend_on_the_columns(rung: Rung, whole: bool) -> None:
    rung(check_columns, whole)


def check_strides_and_dtypes(device: str) -> None:
    """Rows of either dtype and any stride, a gradient that repeats itself, tables that lie transposed."""
    rows = random_rows(40, 7, seed=0).to(device)
    weight = random_numbers(7, 3, seed=0).to(device)
    tall = weight.T.contiguous().T
    want = embedding_reference(rows, weight)
    for given in (rows, rows.int(), with_gaps(rows.float()).long(), torch.stack([rows, rows], 1)[:, 0]):
        assert torch.equal(embedding(given, weight), want) and torch.equal(embedding(given, tall), want)
    assert torch.equal(embedding(rows.view(4, 10).T, weight), want.view(4, 10, 3).transpose(0, 1))
    for dy in (torch.ones(3, device=device).expand(40, 3), torch.arange(40.0, device=device)[:, None].expand(40, 3)):
        buffer = weight.T.contiguous().T
        assert embedding_backward_(buffer, rows.int(), dy) is buffer and buffer.stride() == (1, 7)
        torch.testing.assert_close(buffer, embedding_backward_reference(weight, rows, dy))
    tall.requires_grad_()
    (dw,) = torch.autograd.grad(embedding(rows, tall).sum(), tall)
    assert torch.equal(dw, embedding_backward_reference(torch.zeros_like(weight), rows, torch.ones_like(want)))


@pytest.mark.by_default("host", "gpu")
@every_rung
def test_any_strides(rung: Rung) -> None:
    rung(check_strides_and_dtypes)


def check_shards(device: str) -> None:
    """Shards of the vocabulary add up to the lookup, and have the whole table's gradient, bit by bit."""
    rows = random_rows(65, 9, seed=0).clamp(0, 8).to(device)
    weight, dy = random_numbers(9, 5, seed=0).to(device), random_numbers(65, 5, seed=1).to(device)
    weight[0] = torch.inf
    bounds = [0, 4, 4, 9]  # one shard has no rows
    shards = [(first, weight[first:end].requires_grad_()) for first, end in itertools.pairwise(bounds)]
    parts = [embedding(rows - first, shard) for first, shard in shards]
    assert torch.equal(sum(parts[1:], parts[0]), embedding_reference(rows, weight))
    gradients = [torch.autograd.grad(y, shard, dy)[0] for y, (_, shard) in zip(parts, shards, strict=True)]
    whole = weight.detach().requires_grad_()
    (dw,) = torch.autograd.grad(embedding(rows, whole), whole, dy)
    assert torch.equal(torch.cat(gradients), dw)


@pytest.mark.by_default("host", "gpu")
@every_rung
def test_shards_of_the_vocabulary(rung: Rung) -> None:
    rung(check_shards)


def test_gradcheck_of_host_path_and_reference() -> None:
    rows, weight = random_rows(9, 4, seed=0), random_numbers(4, 3, seed=0).double().requires_grad_()
    for function in (embedding, embedding_reference):
        assert torch.autograd.gradcheck(lambda weight, function=function: function(rows, weight), weight)


@pytest.mark.by_default("dtype0-9")
@pytest.mark.parametrize("tokens", [*(pytest.param(tokens, marks=pytest.mark.slow) for tokens in (0, 1)), 9])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_opcheck(tokens: int, dtype: torch.dtype) -> None:
    rows, weight = random_rows(tokens, 4, seed=0).to(dtype), random_numbers(4, 3, seed=0)
    torch.library.opcheck(embedding_op, (rows, weight))
    torch.library.opcheck(embedding_op, (rows, weight.clone().requires_grad_()))
    torch.library.opcheck(embedding_backward_op_, (weight, rows, torch.ones(tokens, 3)))


def test_compiled_as_eager() -> None:
    rows, weight = random_rows(9, 4, seed=0), random_numbers(4, 3, seed=0).requires_grad_()

    def double(rows: Tensor, weight: Tensor) -> Tensor:
        return embedding(rows, 2 * weight)

    def accumulate(buffer: Tensor, rows: Tensor, dy: Tensor) -> Tensor:
        return embedding_backward_(buffer, rows, 2 * dy) + 1

    outcomes = []
    for compiled in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        y = compiled(double)(rows, weight)
        (dw,) = torch.autograd.grad(y.square().sum(), weight)
        buffer = torch.ones(4, 3)
        outcomes.append((y, dw, compiled(accumulate)(buffer, rows, y.detach()), buffer))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rows", "weight", "message"),
    [
        (torch.ones(3), torch.ones(4, 5), r"int32 or int64 rows .* rows torch.float32.*: convert the rows"),
        (torch.ones(3, dtype=torch.int64), torch.ones(4), r"weight\[V, D\] .* weight \(4,\)"),
        (torch.ones(3, dtype=torch.int64), torch.ones(4, 5).int(), "floating-point numbers.* torch.int32"),
        (torch.ones(3, dtype=torch.int64), torch.ones(1, 1).expand(2**31, 1), "V to 2147483646"),
    ],
)
def test_a_lookup_that_does_not_fit_is_refused(rows: Tensor, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embedding(rows, weight)


@pytest.mark.parametrize(
    ("buffer", "dy", "message"),
    [
        (torch.ones(4, 5), torch.ones(3, 4), r"dw \(4, 5\) .*, rows \(3,\), dy \(3, 4\).*: pass dy and rows of one"),
        (torch.ones(4, 5), torch.ones(2, 5), r"dy \(2, 5\)"),
        (torch.ones(4, 5).half(), torch.ones(3, 5), "needs dw of dy's dtype or torch.float32: .* torch.float16, rows"),
        (torch.ones(4, 5).double(), torch.ones(3, 5), "torch.float64, rows .* or convert dw"),
        (torch.ones(4), torch.ones(3), r"a buffer\[V, D\]"),
    ],
)
def test_an_accumulation_that_does_not_fit_is_refused(buffer: Tensor, dy: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embedding_backward_(buffer, torch.zeros(3, dtype=torch.int64), dy)


class Named(Tensor):
    """A tensor of a class of one's own."""


def test_a_table_of_another_class_is_taken() -> None:
    table, rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([4, 0, 4])
    assert torch.equal(embedding(rows, table.as_subclass(Named)).as_subclass(Tensor), table[rows])
    buffer = torch.zeros(5, 3)
    embedding_backward_(buffer.as_subclass(Named), rows, torch.ones(3, 3))
    assert torch.equal(buffer.sum(1), torch.tensor([3.0, 0.0, 0.0, 0.0, 6.0]))
