"""Rung: host, interpreter, GPU. Dropout's mask is the stated function of its place; every path has the same bits.

What is compiled without a GPU is looked at here for the width of its accesses only; test_compile.py does the rest. That
compiled bits are the same, also of bfloat16, and that another number of rows compiles nothing, only a GPU shows.
"""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.compiled import codes_of
from support.kernels.precision import unwritten_is_nan
from support.kernels.rungs import Rung, every_rung
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.launch import INTERPRETED, by_triton
from tpkernels.ops.dropout import DropoutStream, dropout, dropout_reference, keep_at
from tpkernels.ops.dropout_kernel import launch_dropout
from tpkernels.random import philox_4x32, stream_key

STREAM = DropoutStream(rate=0.3, seed=5, site="layer 1/mlp", step=7, microbatch=2)
# Blocks that begin and end inside a Philox call, rows beyond 32 bits, rows longer than a program of the kernel.
BLOCKS = [
    # rows, columns, first_row, first_column, row_length
    (1, 1, 0, 0, 1),
    (63, 65, 5, 3, 100),
    (100, 63, 2**31 + 3, 2, 65),
    (7, 100, 2**33, 97, 201),
    (3, 5, 1, 1022, 1030),
    (2, 1025, 0, 0, 1025),
]


def word_at(stream: DropoutStream, row: int, column: int, row_length: int) -> int:
    """The definition, one element at a time, in Python's integers."""
    index = row * math.ceil(row_length / 4) + column // 4
    fixed = stream.microbatch | ((stream.step >> 32) << 24), stream.step & 0xFFFFFFFF
    counter = [torch.tensor([word]) for word in (index & 0xFFFFFFFF, index >> 32, *fixed)]
    return int(philox_4x32(counter, stream_key(stream.seed, "dropout/" + stream.site))[column % 4])


@pytest.mark.parametrize(
    ("step", "microbatch", "rows", "row_length"),
    [
        (0, 0, [0, 1, 2], 9),
        (7, 65535, [5, 3], 8),
        (2**33 + 5, 3, [1], 6),
        (2**40 - 1, 1, [0], 5),
        (1, 1, [2**33, 2**33 + 1, 2**40], 7),
    ],
)
def test_the_mask_is_its_definition(step: int, microbatch: int, rows: list[int], row_length: int) -> None:
    stream = replace(STREAM, step=step, microbatch=microbatch)
    want = [[word_at(stream, row, j, row_length) >= round(0.3 * 2**32) for j in range(row_length)] for row in rows]
    assert torch.equal(keep_at(stream, torch.tensor(rows), 0, row_length, row_length), torch.tensor(want))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_a_block_is_cut_from_the_global_mask(data: st.DataObject) -> None:
    row_length = data.draw(st.sampled_from([1, 2, 63, 65, 100]))
    first = data.draw(st.integers(0, row_length))
    size = data.draw(st.integers(0, row_length - first))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 40), max_size=5)), dtype=torch.int64)
    whole = keep_at(STREAM, torch.arange(41), 0, row_length, row_length)
    assert torch.equal(keep_at(STREAM, rows, first, size, row_length), whole[rows, first : first + size])


def test_large_masks_are_drawn_piecewise_without_seams() -> None:
    rows = torch.arange(600).view(2, 3, 100)
    whole = keep_at(STREAM, rows, 0, 1001, 1001)
    assert whole.shape == (2, 3, 100, 1001) and whole.is_contiguous()
    for row in (0, 63, 65, 66, 131, 599):
        assert torch.equal(whole.view(600, 1001)[row], keep_at(STREAM, torch.tensor(row), 0, 1001, 1001))


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.1, 0.5, 0.9, 1 - 2**-40])
def test_the_fraction_dropped_is_the_rate(rate: float) -> None:
    keep = keep_at(replace(STREAM, rate=rate), torch.arange(800), 0, 1000, 1000).view(-1, 4)
    for lane in (keep, *keep.unbind(1)):
        assert abs(lane.double().mean() - (1 - rate)) <= 5 * math.sqrt(rate * (1 - rate) / lane.numel()) + 2**-33


def test_streams_are_independent() -> None:
    base = DropoutStream(rate=0.5, seed=0, site="a", step=1, microbatch=1)
    others = [{"seed": 1}, {"site": "b"}, {"step": 2}, {"microbatch": 2}, {"step": 2**32 + 1}, {"step": 2**16}]
    streams = [base, *(replace(base, **other) for other in others)]  # type: ignore[arg-type]
    masks = torch.stack([keep_at(stream, torch.arange(200), 0, 200, 200).flatten() for stream in streams])
    correlation = torch.corrcoef(masks.double()) - torch.eye(len(streams), dtype=torch.float64)
    assert correlation.abs().max() < 5 / math.sqrt(200 * 200)


def operand(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix whose elements lie 2 apart in memory, with an infinity and NaNs in it."""
    x = torch.randn(rows, 2 * columns, generator=torch.Generator().manual_seed(rows)).to(dtype)[:, ::2]
    x[0, 0], x[:, columns // 2] = torch.inf, torch.nan
    return x


def assert_equal_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.stride() == (want.shape[1], 1)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def check_a_block(device: str, block: tuple[int, ...]) -> None:
    """The operator's bits and its gradient's are the specification's on a CPU, in every dtype."""
    rows, columns, first_row, first_column, row_length = block
    # bfloat16 is not interpreted: see rungs.py.
    for dtype in (torch.float64, torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])):
        x, dy = operand(rows, columns, dtype), operand(rows, columns, dtype).flip(0)
        leaf = x.to(device).requires_grad_()
        with unwritten_is_nan():
            y = dropout(leaf, STREAM, first_row, first_column, row_length)
            (dx,) = torch.autograd.grad(y, leaf, dy.to(device))
        y, dx = y.detach().cpu(), dx.cpu()
        assert_equal_bits(y, dropout_reference(x, STREAM, first_row, first_column, row_length))
        assert_equal_bits(dx, dropout_reference(dy, STREAM, first_row, first_column, row_length))
        # By hand: one product in the wide dtype where kept, and 0 elsewhere even of an infinity or NaN.
        keep = keep_at(STREAM, torch.arange(first_row, first_row + rows), first_column, columns, row_length)
        wide = torch.promote_types(dtype, torch.float32)
        scaled = (x.to(wide) * torch.tensor(1 / 0.7, dtype=wide)).to(dtype)
        assert torch.equal(y.isnan(), keep & x.isnan()) and not y[~keep].any()
        assert torch.equal(y[keep].nan_to_num(), scaled[keep].nan_to_num())


@every_rung
@pytest.mark.parametrize("block", BLOCKS)
def test_dropout_is_its_specification(rung: Rung, block: tuple[int, ...]) -> None:
    rung(check_a_block, block)


def check_streams_strides_and_empty(device: str) -> None:
    streams = [
        replace(STREAM, step=2**33 + 2**31, microbatch=2**24 - 1, site="another"),
        replace(STREAM, rate=0.5),
        replace(STREAM, rate=0.75),
        replace(STREAM, rate=1 - 2**-40),
    ]
    generator = torch.Generator().manual_seed(0)
    for stream in streams:
        x = torch.randn(10, 6, generator=generator).T
        assert_equal_bits(dropout(x.to(device), stream).cpu(), dropout_reference(x, stream, 0, 0, 10))
    x = torch.randn(1, 10, generator=generator).expand(6, 10)
    assert_equal_bits(dropout(x.to(device).expand(6, 10), STREAM).cpu(), dropout_reference(x, STREAM, 0, 0, 10))
    for shape in ((0, 5), (5, 0), (0, 0)):
        leaf = torch.randn(shape, device=device, requires_grad=True)
        y = dropout(leaf, STREAM, 9, 1, 20)
        assert y.shape == shape and torch.autograd.grad(y.sum(), leaf)[0].shape == shape


@every_rung
def test_streams_strides_and_empty_shards(rung: Rung) -> None:
    rung(check_streams_strides_and_empty)


def check_which_path(device: str) -> bool:
    """Whether the kernel was taken, which keeps no mask; without it the interpreter's rung would be the host's."""
    x = torch.ones(3, 4, device=device)
    keep = torch.ops.tpkernels.dropout(x, *STREAM.numbers, 0, 0, 4)[1]
    assert (keep.numel() == 0) == by_triton(x)
    return by_triton(x)


@every_rung
def test_the_kernel_is_taken_where_there_is_one(rung: Rung) -> None:
    assert rung(check_which_path) == (rung.name != "host")


@pytest.mark.parametrize("strides", ["rows", "transposed", "expanded"])
def test_gradients_of_any_strides(strides: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64, generator=generator, requires_grad=True)

    def drop(x: Tensor) -> Tensor:
        x = {"rows": x, "transposed": x.T, "expanded": x[:1].expand(5, 7)}[strides]
        return dropout(x, STREAM, 3, 2, 11)

    assert torch.autograd.gradcheck(drop, x) and torch.autograd.gradgradcheck(drop, x)


def test_shards_of_tokens_and_of_features_are_cut_from_the_whole() -> None:
    x = torch.randn(100, 63)
    whole = dropout(x, STREAM)
    for rows in (slice(0, 33), slice(33, 100)):
        for columns in (slice(0, 21), slice(21, 63)):
            shard = dropout(x[rows, columns], STREAM, rows.start, columns.start, 63)
            assert torch.equal(shard, whole[rows, columns])


def test_rate_0_returns_x() -> None:
    x = torch.randn(3, 4)
    assert dropout(x, replace(STREAM, rate=0.0)) is x


@pytest.mark.parametrize("x", [torch.randn(1, 6)[:, ::2], torch.randn(3, 1).T, torch.randn(5, 3).T, torch.randn(0, 3)])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(x: Tensor, grad: bool) -> None:
    arguments = (x.detach().requires_grad_(grad), *STREAM.numbers, 3, 2, 9)
    torch.library.opcheck(torch.ops.tpkernels.dropout.default, arguments)


def test_compiled_as_eager() -> None:
    x = torch.randn(6, 5, requires_grad=True)
    numbers = STREAM.numbers

    def double(x: Tensor) -> Tensor:
        return torch.ops.tpkernels.dropout(2 * x, *numbers, 0, 0, 5)[0]

    outcomes = []
    for function in (double, torch.compile(double, backend="aot_eager", fullgraph=True)):
        y = function(x)
        outcomes.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    for got, want in zip(*outcomes, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_a_rate_outside_0_to_1_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"at least 0 and below 1: layer 1/mlp has .*: pass"):
        replace(STREAM, rate=rate)


@pytest.mark.parametrize("place", [{"step": -1}, {"step": 2**40}, {"microbatch": -1}, {"microbatch": 2**24}])
def test_a_step_or_microbatch_out_of_range_is_refused(place: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"layer 1/mlp is at .*{next(iter(place.values()))}"):
        replace(STREAM, **place)  # type: ignore[arg-type]


def test_what_is_no_block_of_the_matrix_is_refused() -> None:
    x = torch.randn(3, 4)
    for first_column, row_length in ((-1, 4), (1, 4), (1, None)):
        with pytest.raises(ValueError, match="columns must lie inside their row: layer 1/mlp has 4 columns from"):
            dropout(x, STREAM, 0, first_column, row_length)
    for bad, first_row in ((x.long(), 0), (x[0], 0), (x[None], 0), (x, -1)):
        with pytest.raises(ValueError, match="dropout takes rows of floating-point numbers at a row >= 0"):
            dropout(bad, STREAM, first_row)


@pytest.mark.slow
def test_a_cpu_needs_no_triton() -> None:
    program = """
        import sys
        sys.modules["triton"] = None
        import torch, tpkernels.ops.attention.host, tpkernels.random
        from tpkernels.ops.dropout import DropoutStream, dropout
        dropout(torch.ones(2, 3), DropoutStream(rate=0.5, seed=0, site="x", step=0, microbatch=0))
    """
    done = subprocess.run([sys.executable, "-c", inspect.cleandoc(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compiled_for(target: str, dtype: torch.dtype) -> str:
    """The code for whole rows of a layer."""
    x = torch.empty(64, 4096, dtype=dtype, device="meta")
    (code,) = codes_of(target, lambda: launch_dropout(x, 0.1, (0, 0), (0, 0), 0, 0, 4096))
    return code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_80", "sm_100"))]
)
def test_threads_load_and_store_16_bytes_at_a_time(compilers: RankPool, target: str, dtype: torch.dtype) -> None:
    wide = r"v2\.b64" if dtype == torch.float64 else r"v4\.b32"
    (code,) = compilers.run(compiled_for, 1, target, dtype)
    for access in ("ld", "st"):
        assert re.search(rf"{access}\.global\.{wide}", code), access


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_another_step_or_number_of_rows_compiles_nothing() -> None:
    from tpkernels.ops.dropout_kernel import _dropout_kernel

    def num_compiled() -> int:
        return len(_dropout_kernel.device_caches[torch.cuda.current_device()][0])

    dropout(torch.randn(16, 64, device="cuda"), STREAM)
    before = num_compiled()
    for num_rows, step, first_row in ((1, 0, 1), (17, 1, 16), (64, 2**33, 2**33 + 1), (1000, 16, 0)):
        dropout(torch.randn(num_rows, 64, device="cuda"), replace(STREAM, step=step), first_row)
    assert num_compiled() == before
