"""Rung: host, interpreter, GPU; compiled only. RMSNorm and LayerNorm with and without a residual, all gradients.

Only a GPU shows the compiled kernels' numbers, and bfloat16 in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernels.compiled import codes_of
from support.kernels.precision import check_errors, unwritten_is_nan, with_gaps, with_longer_rows
from support.kernels.rungs import Rung, every_grid_of_rows, every_rung
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.launch import Target, observed
from tpkernels.ops.norm.kernel import BackwardConfig, launch_norm_backward
from tpkernels.ops.norm.operator import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    norm_backward_op,
    norm_forward,
    norm_op,
    norm_reference,
    rms_norm,
)

# The last has more rows than fit into the parts of one chunk's first block.
SIZES = [(1, 1), (1, 100), (63, 65), (100, 257), (0, 65), (257, 4)]
PART = [(63, 65), (1, 100)]
EPS = 1e-5

kernels_only = pytest.mark.parametrize("rung", ["interpreter", "gpu"], indirect=True)


def operands(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Tensor]:
    """x of long rows, a residual with gaps, both of another scale in every row; weights of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, columns, generator=generator) * 10 ** torch.linspace(-1, 1, rows)[:, None]
    weight, bias = torch.randn(2, columns, generator=generator)
    named = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    tensors = {name: tensor.to(device, dtype) for name, tensor in named.items()}
    tensors |= {"x": with_longer_rows(tensors["x"]), "residual": with_gaps(tensors["residual"])}
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def check_a_norm(
    function: Callable[..., Any], names: str, centered: bool, size: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    def draw(seed: int) -> dict[str, Tensor]:
        tensors = operands(*size, dtype, device, seed)
        return {name: tensors[name] for name in names.split()}

    def reference(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, total = norm_reference(x, weight, bias, residual, EPS, centered)
        return y if residual is None else (y, total)

    check_errors(f"{function.__name__} {size}", functools.partial(function, eps=EPS), reference, draw)


def check_all_norms(device: str, dtype: torch.dtype, whole: bool) -> None:
    sizes = SIZES if whole else PART
    for size in sizes:
        check_a_norm(rms_norm, "x weight", False, size, dtype, device)
        check_a_norm(add_layer_norm, "x residual weight bias", True, size, dtype, device)
    check_a_norm(add_rms_norm, "x residual weight", False, sizes[-1], dtype, device)
    check_a_norm(layer_norm, "x weight", True, sizes[-1], dtype, device)
    check_a_norm(layer_norm, "x weight bias", True, sizes[-1], dtype, device)


@every_grid_of_rows
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_all_norms, dtype, whole)


def check_chunks(device: str) -> None:
    """Weight gradients of chunks are those of each chunk alone, bit by bit, and dx is the whole's."""
    every = operands(192, 65, torch.float32, device)
    total, weight = every["x"].detach(), every["weight"].detach()
    dy = torch.randn(192, 65, generator=torch.Generator().manual_seed(1)).to(device)
    _, _, mean, rstd = norm_op(total, weight, None, None, EPS, True)
    with unwritten_is_nan():
        dx, sums = norm_backward_op(dy, None, total, weight, mean, rstd, 4, True, True)
        whole, _ = norm_backward_op(dy, None, total, weight, mean, rstd, 1, True, True)
        assert sums.shape == (2, 4, 65) and torch.equal(dx, whole)
        for i in range(4):
            rows = slice(48 * i, 48 * (i + 1))
            alone = norm_backward_op(dy[rows], None, total[rows], weight, mean[rows], rstd[rows], 1, True, True)
            assert torch.equal(alone[0], dx[rows]) and torch.equal(alone[1][:, 0], sums[:, i])
    torch.testing.assert_close(sums[1].sum(0), dy.sum(0))


@every_rung
def test_weight_gradients_of_chunks(rung: Rung) -> None:
    rung(check_chunks)


def check_only_one_gradient(device: str) -> None:
    """Check the gradients of y alone and of total alone; the gradient of a bias has the bias's dtype."""
    every = operands(5, 7, torch.float32, device)
    x, residual, weight = (every[name] for name in ("x", "residual", "weight"))
    bias = every["bias"].detach().double().requires_grad_()
    for index in (0, 1):
        outputs = add_layer_norm(x, residual, weight, bias, EPS)
        dx, dbias = torch.autograd.grad(outputs[index].square().sum(), [x, bias])
        narrow = bias.detach().float().requires_grad_()
        expected = norm_reference(x, weight, narrow, residual, EPS, True)[index].square().sum()
        want = torch.autograd.grad(expected, [x, narrow], allow_unused=True, materialize_grads=True)
        assert dbias.dtype == torch.float64
        torch.testing.assert_close((dx, dbias.float()), want)


@every_rung
def test_gradients_of_one_output(rung: Rung) -> None:
    rung(check_only_one_gradient)


def check_zeros_and_large_rows(device: str) -> None:
    """A row of zeros has a finite gradient; one whose squares leave float16 is right."""
    x = torch.zeros(3, 65, dtype=torch.float16)
    x[1] = 6e4
    x[2] = 6e4 * (-1) ** torch.arange(65)
    x, weight = x.to(device).requires_grad_(), torch.ones(65, dtype=torch.float16, device=device)
    y = rms_norm(x, weight, EPS)
    assert torch.equal(y[1].cpu(), torch.ones(65).half()) and not y[0].any()
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    centered = layer_norm(x, weight, None, EPS)
    assert not centered[1].any() and centered[2].isfinite().all()


@every_rung
def test_zeros_and_large_rows(rung: Rung) -> None:
    rung(check_zeros_and_large_rows)


@pytest.mark.parametrize("dtype", [torch.float64])
def test_gradcheck_of_host_path_and_reference(dtype: torch.dtype) -> None:
    every = operands(3, 5, dtype, "cpu")
    x, residual, weight, bias = every.values()
    assert torch.autograd.gradcheck(lambda *a: add_layer_norm(*a, eps=0.1), (x, residual, weight, bias))
    assert torch.autograd.gradcheck(lambda *a: add_rms_norm(*a, eps=0.1), (x, residual, weight))
    for centered in (False, True):
        given = (weight, bias if centered else None, residual, 0.1, centered)
        assert torch.autograd.gradcheck(lambda x, given=given: norm_reference(x, *given), x)


@pytest.mark.by_default("5-True-True")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("rows", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_opcheck(rows: int, with_residual: bool, with_bias: bool) -> None:
    every = operands(rows, 7, torch.float32, "cpu")
    residual = every["residual"] if with_residual else None
    arguments = (every["x"], every["weight"], every["bias"] if with_bias else None, residual, EPS, with_bias)
    torch.library.opcheck(norm_op, arguments)
    x, weight = every["x"].detach(), every["weight"].detach()
    _, _, mean, rstd = norm_op(x, weight, None, None, EPS, with_bias)
    torch.library.opcheck(norm_backward_op, (x, None, x, weight, mean, rstd, 1, with_bias, with_bias))


def test_compiled_as_eager() -> None:
    every = operands(6, 5, torch.float32, "cpu")
    x, residual, weight, bias = every.values()

    def double(x: Tensor) -> Tensor:
        return add_layer_norm(2 * x, residual, weight, bias)[0]

    outcomes = []
    for function in (double, torch.compile(double, backend="aot_eager", fullgraph=True)):
        y = function(x)
        outcomes.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


def test_any_shape_before_the_columns() -> None:
    x, weight = torch.randn(2, 3, 4, 5), torch.randn(5)
    assert torch.equal(rms_norm(x, weight).view(24, 5), rms_norm(x.view(24, 5), weight))
    y, total = add_rms_norm(x[:, :, 1:3], x.transpose(1, 2)[:, :3, :2].transpose(2, 1).transpose(1, 2), weight)
    assert y.shape == total.shape == (2, 3, 2, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(3, 4, dtype=torch.int64)}, r"floating-point numbers .* x \(3, 4\) torch.int64"),
        ({"weight": torch.ones(5)}, r"weight \[D\], .* weight \(5,\): pass a weight of x's last dim"),
        ({"x": torch.ones(())}, "x()"),
        ({"x": torch.ones(3, 0), "weight": torch.ones(0)}, "D from 1 to 16384"),
        ({"residual": torch.ones(3, 5)}, r"residual must be \(3, 4\) of torch.float32: got \(3, 5\)"),
        ({"residual": torch.ones(3, 4).half()}, "got .* torch.float16"),
        ({"bias": torch.ones(3)}, r"bias must be \(4,\)"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Tensor], message: str) -> None:
    given = {"x": torch.ones(3, 4), "residual": torch.ones(3, 4), "weight": torch.ones(4), **arguments}
    with pytest.raises(ValueError, match=message):
        add_layer_norm(**given)


def test_many_short_rows_fit_into_a_grid() -> None:
    """A norm of every head: 4 million rows. Only a grid's first axis takes more than 65535 programs."""
    grids = []
    x = torch.empty(1 << 22, 128, dtype=torch.bfloat16, device="meta")
    statistics = x[:, 0].float()
    with observed(Target("cuda", 90), lambda _, grid, *__: grids.append(grid)):
        launch_norm_backward(x, None, x, x[0], statistics, statistics, 1, True, True)
    assert len(grids) == 2 and all(max(grid[1:], default=1) <= 65535 for grid in grids)
    assert grids[0][0] <= 2048  # partial rows, which few programs add


def check_wide_rows(device: str) -> None:
    """Rows of three blocks of columns: each program reads the others' blocks for the means alone."""
    every = operands(2, 8200, torch.float32, device)
    x, residual, weight, bias = every.values()
    wide = [tensor.detach().double().requires_grad_() for tensor in every.values()]
    dy, dtotal = (torch.randn(2, 8200, generator=torch.Generator().manual_seed(n)).to(device) for n in (1, 2))
    outputs = add_layer_norm(x, residual, weight, bias, EPS)
    wanted = norm_reference(wide[0], wide[2], wide[3], wide[1], EPS, True)
    got = torch.autograd.grad(outputs, list(every.values()), (dy, dtotal))
    want = torch.autograd.grad(wanted, wide, (dy.double(), dtotal.double()))
    for one, reference in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.by_default("gpu")
@kernels_only
def test_rows_of_several_blocks(rung: Rung) -> None:
    rung(check_wide_rows)


def check_ways_through_rows(device: str) -> None:
    """How many blocks are loaded ahead changes no bit, how they are cut none but by the order of sums."""
    every = {name: tensor.detach() for name, tensor in operands(70, 40, torch.float16, device).items()}
    total, weight = every["x"], every["weight"]
    dy, dtotal = torch.randn(2, 70, 40, generator=torch.Generator().manual_seed(1)).to(device, torch.float16)
    _, _, mean, rstd = norm_op(total, weight, None, None, EPS, False)
    given = dy, dtotal, total, weight, mean, rstd, 1, False, False
    dx, sums = launch_norm_backward(*given)
    for config in (BackwardConfig(num_stages=1), BackwardConfig(num_stages=2), BackwardConfig(num_stages=4)):
        other, others = launch_norm_backward(*given, config=config)
        assert torch.equal(other, dx) and torch.equal(others, sums)
    for config in (BackwardConfig(block_bytes=1), BackwardConfig(block_bytes=4096, most_programs=2)):
        other, others = launch_norm_backward(*given, config=config)
        torch.testing.assert_close(other, dx)
        torch.testing.assert_close(others, sums)


@pytest.mark.by_default("gpu")
@kernels_only
def test_ways_through_rows(rung: Rung) -> None:
    rung(check_ways_through_rows)


def backward_code(target: str) -> str:
    x = torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(8192, dtype=torch.float32, device="meta")
    code, _ = codes_of(target, lambda: launch_norm_backward(x, x, x, x[0], rows, rows, 1, False, False))
    return code


def test_the_next_rows_are_loaded_while_these_are_computed(compilers: RankPool) -> None:
    """By 16 bytes a thread, past registers; the weight is read before the first of them."""
    code = compilers.run(backward_code, 1, "sm_90")[0]
    first = code.index("cp.async")
    assert code.count("cp.async.cg.shared.global") >= 2 * 3, "three operands of two blocks before the loop"
    assert "cp.async.wait_group" in code and "ld.global" in code[:first]


@pytest.mark.parametrize("num_chunks", [1, 3, 4])
def test_chunks_of_rows_have_the_bits_of_calls_of_their_own(num_chunks: int) -> None:
    """With so many columns the host takes 16 rows at a time, which does not divide a chunk."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(60, 16384, generator=generator), torch.randn(16384, generator=generator)
    y, _, _, rstd = norm_forward(x, weight, None, None, 1e-5, False, num_chunks)
    parts = [norm_forward(rows, weight, None, None, 1e-5, False) for rows in x.chunk(num_chunks)]
    assert torch.equal(y, torch.cat([part[0] for part in parts]))
    assert torch.equal(rstd, torch.cat([part[3] for part in parts]))
