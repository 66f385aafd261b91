"""Rung: host, interpreter, GPU; compiled only. Matrix products, with what is added to them, accumulated, and SwiGLU.

Interpreted, a GPU has 4 processors, so that a program has several tiles. What triton makes of the kernel for a
target is read in its PTX. Only a GPU shows the compiled kernels' numbers, bfloat16 in them, and equal bits of `fixed`
there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernels.compiled import codes_of
from support.kernels.precision import check_errors, unwritten_is_nan, with_gaps, with_longer_rows
from support.kernels.rungs import Rung, every_grid_of_a_product, every_rung, every_rung_and_dtype_of_a_product
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.launch import Target, num_processors, observed, target_of
from tpkernels.ops.activation import activation_reference
from tpkernels.ops.matmul import configs
from tpkernels.ops.matmul.configs import MatmulConfig, config_of
from tpkernels.ops.matmul.kernel import launch_matmul
from tpkernels.ops.matmul.operator import matmul, matmul_op, matmul_reference
from tpkernels.ops.matmul.swiglu import matmul_swiglu, matmul_swiglu_op, matmul_swiglu_reference
from tpkernels.ops.matmul.swiglu_kernel import launch_matmul_swiglu
from tpkernels.ops.matmul.wgrad import accumulate_wgrad, wgrad_

# M, N, K. Rows of the fourth begin at multiples of 16 bytes, as TMA wants them; the last have nothing to multiply.
SIZES = [(1, 1, 1), (63, 65, 100), (257, 100, 63), (100, 72, 136), (65, 1, 257), (0, 5, 3), (5, 0, 3), (5, 3, 0)]
PART = [(63, 65, 100), (5, 3, 0)]
# Of 32 rows and columns: several tiles per program, groups that the last does not fill.
SMALL_TILES = MatmulConfig(32, 32, 32, 2, 4, 2)
TARGETS = [Target("cuda", 80), Target("cuda", 86), Target("cuda", 90), Target("cuda", 100), Target("cuda", 120)]
TARGETS += [Target("hip", "gfx942")]

kernels_only = pytest.mark.parametrize("rung", ["interpreter", "gpu"], indirect=True)


def by_columns(t: Tensor) -> Tensor:
    """The same values, whose columns have no gaps."""
    return t.T.contiguous().T


def whole_numbers(*sizes: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Return whole numbers from -2 to 2: sums of 500 products are exact in float16."""
    return torch.randint(-2, 3, sizes, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Tensor]:
    """a, b, bias and residual, each seed with another layout: dense rows, dense columns, gaps in both dims."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (m, k), "b": (k, n), "bias": (n,), "residual": (m, n)}
    tensors = {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}
    layouts: list[tuple[Callable[[Tensor], Tensor], ...]] = [
        (with_longer_rows, by_columns),
        (by_columns, with_longer_rows),
        (with_gaps, lambda t: with_gaps(t.T).T),
    ]
    for name, change in zip(("a", "b"), layouts[seed % 3], strict=True):
        tensors[name] = change(tensors[name])
    if seed:
        tensors["residual"], tensors["bias"] = by_columns(tensors["residual"]), with_gaps(tensors["bias"])
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def check_a_product(names: str, size: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    def draw(seed: int) -> dict[str, Tensor]:
        tensors = operands(*size, dtype, device, seed)
        return {name: tensors[name] for name in names.split()}

    check_errors(f"{names} {size}", matmul, matmul_reference, draw)


def check_all_products(device: str, dtype: torch.dtype, whole: bool) -> None:
    for size in SIZES if whole else PART:
        check_a_product("a b", size, dtype, device)
    for names in ("a b bias", "a b residual", "a b bias residual") if whole else ("a b bias residual",):
        check_a_product(names, (63, 65, 100), dtype, device)
    check_a_product("a b bias residual", (5, 3, 0), dtype, device)


@every_grid_of_a_product
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_all_products, dtype, whole)


def check_whole_numbers(device: str, dtype: torch.dtype) -> None:
    """Exact in every layout and with everything that is added; by TMA where the interpreter, or the GPU, has it."""
    for m, n, k in ((63, 65, 100), (100, 72, 136)):
        numbers = functools.partial(whole_numbers, dtype=dtype, device=device)
        a, b, bias, residual = numbers(m, k), numbers(k, n, seed=1), numbers(n, seed=2), numbers(m, n, seed=3)
        for left, right in itertools.product((a, by_columns(a), with_gaps(a)), (b, by_columns(b), with_gaps(b))):
            with unwritten_is_nan():
                assert torch.equal(matmul(left, right), a @ b)
        for added in itertools.product((None, bias), (None, residual, by_columns(residual))):
            with unwritten_is_nan():
                c = matmul(a, b, bias=added[0], residual=added[1])
            assert torch.equal(c, matmul_reference(a, b, *added)), [t is not None for t in added]


@every_rung_and_dtype_of_a_product
def test_whole_numbers_are_exact(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_whole_numbers, dtype)


def check_outputs(device: str) -> None:
    """Into a given tensor of any strides, wider than the operands or not, instead of what it holds or added to it."""
    for dtype in (torch.float16, torch.float32):
        numbers = functools.partial(whole_numbers, dtype=dtype, device=device)
        a, b, c, bias = numbers(70, 40), numbers(40, 100, seed=1), numbers(70, 100, seed=2), numbers(100, seed=3)
        for out_dtype in {dtype, torch.float32}:
            wide = a.to(out_dtype) @ b.to(out_dtype)
            assert torch.equal(launch_matmul(a, b, dtype=out_dtype), wide)
            for change in (Tensor.contiguous, with_longer_rows, by_columns, with_gaps):
                out = change(c.to(out_dtype).clone())
                assert launch_matmul(a, b, out=out, accumulate=True) is out
                assert torch.equal(out, c + wide)
                launch_matmul(a, b, bias=bias, out=out.fill_(torch.nan))
                assert torch.equal(out, wide + bias)
    around = torch.zeros(70, 104, device=device)
    launch_matmul(a, b, out=around[:, 2:102])
    assert not around[:, :2].any() and not around[:, 102:].any()


@pytest.mark.by_default("gpu")
@kernels_only
def test_given_outputs(rung: Rung) -> None:
    rung(check_outputs)


def check_configurations(device: str, whole: bool) -> None:
    """The same whole numbers by every configuration that there is; a part: by the smallest and the largest tiles."""
    for dtype in (torch.float16, torch.float32) if whole else (torch.float16,):
        a, b, weight = (
            whole_numbers(*sizes, dtype=dtype, device=device) for sizes in ((257, 72), (72, 136), (2 * 136, 72))
        )
        expected, gated = a @ b, a @ weight.T
        # What float32 compiles with tiles of 128 takes minutes.
        tables = [configs.FLOAT32] if dtype == torch.float32 else [configs.HOPPER, configs.AMPERE, configs.CDNA]
        every = {SMALL_TILES, *(choice.config for table in tables for choice in table.choices)}
        for config in every if whole else {SMALL_TILES, configs.HOPPER.choices[0].config}:
            with unwritten_is_nan():
                assert torch.equal(launch_matmul(a, b, config=config), expected), config
                assert torch.equal(launch_matmul(by_columns(a), by_columns(b), config=config), expected), config
        with unwritten_is_nan():
            _, y = launch_matmul_swiglu(a, weight, True, config=SMALL_TILES)
        assert torch.equal(y, gated)


@pytest.mark.by_default("gpu")
@pytest.mark.parametrize(
    ("rung", "whole"),
    [("interpreter", False), pytest.param("interpreter", True, marks=pytest.mark.slow), ("gpu", True)],
    indirect=["rung"],
    ids=["interpreter-part", "interpreter-whole", "gpu"],
)
def test_every_configuration(rung: Rung, whole: bool) -> None:
    rung(check_configurations, whole)


def check_grids(device: str) -> None:
    """The same bits by any number of programs: random numbers, whose sums another order would round otherwise."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float16,) if device == "cpu" else (torch.float16, torch.bfloat16, torch.float32):
        a, b, weight = (
            torch.randn(shape, generator=generator).to(device, dtype) for shape in ((70, 72), (72, 90), (100, 72))
        )
        first: list[Tensor] = []
        # 9 tiles, and 6 of gate and up: one program has all, some have one more than others, each has one.
        for processors in (1, 2, 40):
            options: dict[str, Any] = {"config": SMALL_TILES, "processors": processors}
            with unwritten_is_nan():
                got = [launch_matmul(a, b, **options), *launch_matmul_swiglu(a, weight, True, **options)]
            sums = torch.ones(70, 90, device=device)
            got.append(launch_matmul(a, b, out=sums, accumulate=True, **options))
            first = first or got
            assert all(torch.equal(one, other) for one, other in zip(got, first, strict=True)), processors


@kernels_only
def test_bits_do_not_depend_on_the_number_of_programs(rung: Rung) -> None:
    rung(check_grids)


def rounded_between_blocks(m: int, n: int, k: int, block_k: int) -> tuple[Tensor, Tensor]:
    """A and B, of which a block of K adds up exactly in whatever order, while the sums of the blocks are rounded.

    Of four blocks the first holds large products, the third takes them away again, and what is left of the small
    products of the second was rounded beside the large ones: it shows which blocks were added up in which order.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, sizes, generator=generator).float() for sizes in ((m, k), (k, n)))
    block = torch.arange(k) // block_k
    large, taken = (block % 4 == 0).nonzero()[:, 0], (block % 4 == 2).nonzero()[:, 0]
    a[:, taken], b[taken] = a[:, large[: len(taken)]], -b[large[: len(taken)]]
    scale = torch.where(block % 2 == 0, 1.0, 2.0**-10)
    return a * scale, b * scale[:, None]


def check_fixed(device: str, dtype: torch.dtype) -> None:
    """Rows and columns of a product are the product of these rows and columns, bit by bit, wherever they lie.

    Interpreted, the host's BLAS multiplies the blocks, and on some processors the bits of a product of random numbers
    depend on its place in the block. There the kernel's part is shown alone: the order and the size of the blocks.
    """
    sizes = (257, 264, 200)
    if device == "cpu":
        target = target_of(torch.empty(0))
        a, b = rounded_between_blocks(*sizes, config_of(*sizes, dtype, target, fixed=True).block_k)
    else:
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(shape, generator=generator) for shape in ((257, 200), (200, 264)))
    a, b = a.to(device, dtype), b.to(device, dtype)
    whole = matmul(a, b, fixed=True)
    parts = [(slice(0, 257), slice(0, 264)), (slice(5, 69), slice(7, 40)), (slice(200, 201), slice(263, 264))]
    for rows, columns in parts:
        for change in (Tensor.contiguous, by_columns, with_gaps):
            product = matmul(change(a[rows]), change(b[:, columns]), fixed=True)
            assert torch.equal(product, whole[rows, columns])
    # Beside other columns, gate and up have the same neighbours.
    weight = b.T.contiguous()
    h, y = launch_matmul_swiglu(a, weight, True, fixed=True)
    few = torch.cat([weight[3:40], weight[135:172]])
    some_h, some_y = launch_matmul_swiglu(a[9:80], few, True, fixed=True)
    assert torch.equal(some_h, h[9:80, 3:40])
    assert torch.equal(some_y, torch.cat([y[9:80, 3:40], y[9:80, 135:172]], dim=1))


@kernels_only
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_fixed_bits_are_a_rows_and_a_columns_own(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_fixed, dtype)


def check_wgrad(device: str) -> None:
    """Into wider buffers, equal ones, and columns of larger ones; the same bits twice."""
    for dtype, wide in ((torch.float16, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float32)):
        numbers = functools.partial(whole_numbers, dtype=dtype, device=device)
        dy, x, before = numbers(100, 65), numbers(100, 72, seed=1), numbers(65, 72, seed=2).to(wide)
        for change in (Tensor.contiguous, with_longer_rows, by_columns):
            buffer = change(before.clone())
            assert wgrad_(buffer, dy, x) is buffer
            assert torch.equal(buffer, before + (dy.T @ x).to(wide))
    dy, x = (torch.randn(100, width, generator=torch.Generator().manual_seed(0)).to(device) for width in (65, 72))
    buffers = [torch.ones(65, 72, device=device) for _ in range(2)]
    for buffer in buffers:
        wgrad_(buffer, dy, x)
    assert torch.equal(*buffers)
    torch.testing.assert_close(buffers[0], 1 + dy.T @ x)


@every_rung
def test_wgrad(rung: Rung) -> None:
    rung(check_wgrad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_wgrad_of_16_bit_operands_is_one_launch(dtype: torch.dtype) -> None:
    """The launch is on a GPU, into a float32 buffer; with equal dtypes torch's product accumulates."""
    pytest.importorskip("triton")
    seen = []
    dy, x = torch.empty(8, 4, dtype=dtype, device="meta"), torch.empty(8, 6, dtype=dtype, device="meta")
    buffers = torch.empty(4, 6, device="meta"), torch.empty(4, 6, dtype=dtype, device="meta")
    with observed(Target("cuda", 90), lambda kernel, _, arguments, options: seen.append((arguments[0], options))):
        for buffer in buffers:
            accumulate_wgrad(buffer, dy, x)
    if dtype == torch.float32:
        assert not seen
    else:
        ((out, options),) = seen
        assert out is buffers[0] and options["ACCUMULATE"]


def check_all_swiglu(device: str, dtype: torch.dtype, whole: bool) -> None:
    sizes = ((1, 65, 1), (63, 65, 100), (100, 72, 136), (0, 5, 3), (5, 3, 0))
    for m, n, k in sizes if whole else sizes[1:2]:

        def draw(seed: int, m: int = m, n: int = n, k: int = k) -> dict[str, Tensor]:
            tensors = operands(m, 2 * n, k, dtype, device, seed)
            weight = tensors["b"].detach().T / max(1, k) ** 0.5
            return {"x": tensors["a"], "weight": (by_columns(weight) if seed else weight).requires_grad_()}

        for recompute in (False, True) if m in (1, 63) else (False,):
            check_errors(
                f"swiglu {(m, n, k)} {recompute=}",
                functools.partial(matmul_swiglu, recompute=recompute),
                matmul_swiglu_reference,
                draw,
            )
    x, weight = torch.ones(1, 1, dtype=dtype, device=device), torch.ones(2, 1, dtype=dtype, device=device)
    torch.testing.assert_close(matmul_swiglu(x, weight), matmul_swiglu_reference(x, weight))


@every_grid_of_a_product
def test_swiglus_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_all_swiglu, dtype, whole)


def check_gelus(device: str, dtype: torch.dtype) -> None:
    """GeGLU in the epilogue errs at most twice as much as torch's two operators; without y, h has the same bits."""
    tensors = operands(63, 2 * 40, 100, dtype, device)
    x, weight = tensors["a"].detach(), tensors["b"].detach().T / 10
    for kind in ("gelu", "gelu_tanh"):
        h, y = launch_matmul_swiglu(x, weight, True, kind=kind)
        wide = x.double() @ weight.double().T
        want, of_torch = activation_reference(wide, kind, True), activation_reference(x @ weight.T, kind, True)
        unit = torch.finfo(dtype).eps * float(want.abs().max())
        allowed = max(unit, 2 * float((of_torch.double() - want).abs().max()))
        assert float((h.double() - want).abs().max()) <= allowed, kind
        torch.testing.assert_close(y, wide.to(dtype))
        assert torch.equal(launch_matmul_swiglu(x, weight, False, kind=kind)[0], h)


@kernels_only
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_gelus_in_the_epilogue(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_gelus, dtype)


def check_keeping(device: str) -> None:
    """What is kept changes no bit of h; nothing is where no gradient can be asked for."""
    x, weight = (torch.randn(sizes, generator=torch.Generator().manual_seed(0)) for sizes in ((9, 5), (14, 5)))
    x, weight = x.to(device), weight.to(device)
    h, y = matmul_swiglu_op(x, weight, True, False)
    again, nothing = matmul_swiglu_op(x, weight, False, False)
    assert torch.equal(h, again) and nothing.numel() == 0 and y.shape == (9, 14)
    kept: list[tuple[int, ...]] = []
    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)), lambda _: x):
        matmul_swiglu(leaf, weight, recompute=True)
        assert kept == [(9, 5), (14, 5)]
        matmul_swiglu(leaf, weight)
        assert kept[2:] == [(9, 5), (14, 5), (9, 14)]


@every_rung
def test_what_swiglu_keeps(rung: Rung) -> None:
    rung(check_keeping)


def check_gradients_alone(device: str) -> None:
    """One operand's gradient keeps the other alone; a slope without memory of its own, as of a sum, is read."""
    tensors = operands(9, 7, 5, torch.float32, device)
    for name, other in (("a", "b"), ("b", "a")):
        leaves = {n: t.detach() for n, t in tensors.items()}
        leaves[name].requires_grad_()
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.data_ptr()) or t, lambda t: t):
            c = matmul(**leaves)
        assert kept == [leaves[other].data_ptr()]
        (grad,) = torch.autograd.grad(c.sum(), leaves[name])
        (expected,) = torch.autograd.grad(matmul_reference(**leaves).sum(), leaves[name])
        torch.testing.assert_close(grad, expected)


@every_rung
def test_gradients_alone(rung: Rung) -> None:
    rung(check_gradients_alone)


def check_float64(device: str) -> None:
    """No kernel: torch's product, with all its digits."""
    tensors = operands(9, 8, 5, torch.float64, device)
    torch.testing.assert_close(matmul(**tensors), matmul_reference(**tensors), rtol=1e-14, atol=1e-14)
    x, weight = tensors["a"], tensors["b"].T
    torch.testing.assert_close(matmul_swiglu(x, weight), matmul_swiglu_reference(x, weight), rtol=1e-13, atol=1e-13)


@every_rung
def test_float64(rung: Rung) -> None:
    rung(check_float64)


def test_gradcheck_of_host_path_and_reference() -> None:
    every = operands(3, 4, 5, torch.float64, "cpu")
    for function in (lambda *t: matmul(t[0], t[1], bias=t[2], residual=t[3]), matmul_reference):
        assert torch.autograd.gradcheck(function, tuple(every.values()))
    x, weight = every["a"], every["b"].detach().T.requires_grad_()
    for function in (matmul_swiglu, functools.partial(matmul_swiglu, recompute=True), matmul_swiglu_reference):
        assert torch.autograd.gradcheck(function, (x, weight))


@pytest.mark.parametrize(
    "size", [(5, 7, 3), *(pytest.param(size, marks=pytest.mark.slow) for size in ((0, 7, 3), (5, 7, 0)))]
)
def test_opcheck(size: tuple[int, int, int]) -> None:
    every = operands(*size, torch.float32, "cpu")
    for bias, residual in ((None, None), (every["bias"], every["residual"])):
        torch.library.opcheck(matmul_op, (every["a"], every["b"], bias, residual, False))
    x, weight = every["a"], torch.randn(4, size[2], requires_grad=True)
    for keeps_y in (False, True):
        torch.library.opcheck(matmul_swiglu_op, (x, weight, keeps_y, False))


def test_compiled_as_eager() -> None:
    every = operands(6, 5, 4, torch.float32, "cpu")
    a, weight = every["a"], torch.randn(6, 5)

    def both(a: Tensor) -> Tensor:
        return matmul_swiglu(matmul(2 * a, every["b"], bias=every["bias"]), weight)

    outcomes = []
    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        h = function(a)
        outcomes.append((h, torch.autograd.grad(h.square().sum(), a)[0]))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


def test_swiglu_of_any_shape_before_the_columns() -> None:
    x, weight = torch.randn(2, 3, 4, 5), torch.randn(6, 5)
    assert torch.equal(matmul_swiglu(x, weight).view(24, 3), matmul_swiglu(x.view(24, 5), weight))
    assert matmul_swiglu(x[0, 0, 0], weight).shape == (3,)


A, B = torch.ones(3, 4), torch.ones(4, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: matmul(A, B.T), r"a \(3, 4\) torch.float32, b \(5, 4\) .* pass weight.T"),
        (lambda: matmul(A[0], B), r"a \(4,\)"),
        (lambda: matmul(A, B.half()), r"one floating-point dtype: .* b \(4, 5\) torch.float16"),
        (lambda: matmul(A.int(), B.int()), "torch.int32"),
        (lambda: matmul(A, B, bias=A[0]), r"bias \(4,\)"),
        (lambda: matmul(A, B, residual=A), r"residual \(3, 4\)"),
        (lambda: matmul(A, B, residual=torch.ones(3, 5).half()), r"residual \(3, 5\) torch.float16"),
        (lambda: matmul_swiglu(A, B), r"x \(3, 4\) torch.float32, weight \(4, 5\) .* lay gate's rows above up's"),
        (lambda: matmul_swiglu(A, torch.ones(3, 4)), r"weight \(3, 4\)"),
        (lambda: matmul_swiglu(A, torch.ones(2, 4).half()), r"weight \(2, 4\) torch.float16"),
        (lambda: matmul_swiglu(torch.ones(()), B), r"x \(\)"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_configurations_fit_and_follow_from_sizes(target: Target, dtype: torch.dtype, gated: bool) -> None:
    found = set()
    for m, n, k in itertools.product((1, 100, 4096, 32768), (8, 1792, 53248), (64, 4096, 16384)):
        config = config_of(m, n, k, dtype, target, gated=gated)
        found.add(config)
        stage_bytes = (config.block_m + (1 + gated) * config.block_n) * config.block_k * dtype.itemsize
        # On AMD's one of the stages is in registers.
        stages_in_memory = config.num_stages - (target.backend == "hip")
        assert stages_in_memory * stage_bytes <= target.shared_memory_bytes
        assert config.block_m <= max(64, 2 * m) and not config.warp_specialize
        for tokens in (m - m // 50, m + m // 50):
            assert config_of(tokens, n, k, dtype, target, gated=gated) == config
            assert config_of(m, n, k + k // 50, dtype, target, gated=gated) == config
    assert len(found) > 1
    fixed = {config_of(m, 8 * m, 3 * m, dtype, target, fixed=True, gated=gated) for m in (1, 100, 10000)}
    assert len(fixed) == 1


def test_tiles_are_chosen_by_the_busiest_processors_load() -> None:
    choose = functools.partial(config_of, k=4096, dtype=torch.bfloat16, target=Target("cuda", 90))
    # Wide ones for however many rows: tall ones lost wherever both were timed.
    assert [choose(m, 28672)[:2] for m in (4096, 32768)] == [(128, 256), (128, 256)]
    # 128 tiles of 128x128 are one round; of 128x256 half the processors would have none.
    assert choose(1024, 2048)[:2] == (128, 128)
    assert choose(64, 4096)[:2] == (64, 64)


def test_num_processors() -> None:
    found = []
    x = torch.empty(1, device="meta")
    for target in (Target("cuda", 80), Target("cuda", 90), Target("cuda", 100), Target("hip", "gfx942")):
        with observed(target, lambda *_: None):
            found.append(num_processors(x))
    assert found == [108, 132, 148, 304]
    assert num_processors(torch.empty(1)) == 4


def assembly(target: str, config: MatmulConfig, aligned: bool) -> str:
    """PTX of x @ weight.T."""
    x, weight = (torch.empty(n, 4096 + (not aligned), dtype=torch.bfloat16, device="meta") for n in (4096, 3584))
    return codes_of(target, lambda: launch_matmul(x, weight.T, config=config))[0]


LARGE = MatmulConfig(128, 256, 64, 4, 8, 3)
SPECIALIZED = MatmulConfig(64, 128, 64, 8, 4, 3, warp_specialize=True)


@pytest.mark.parametrize(
    ("target", "unit"), [("sm_90", "wgmma.mma_async"), pytest.param("sm_100", "tcgen05.mma", marks=pytest.mark.slow)]
)
def test_operands_come_by_tma_where_it_is(compilers: RankPool, target: str, unit: str) -> None:
    ptx = compilers.run(assembly, 1, target, LARGE, True)[0]
    assert "cp.async.bulk.tensor" in ptx and unit in ptx and "setmaxnreg" not in ptx
    assert "st.global.v4" in ptx and "st.global.b16" not in ptx


def test_operands_come_16_bytes_at_once_where_there_is_no_tma(compilers: RankPool) -> None:
    ptx = compilers.run(assembly, 1, "sm_80", MatmulConfig(128, 128, 32, 8, 8, 4), True)[0]
    assert "cp.async.bulk" not in ptx and "mma.sync" in ptx
    assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx and "ld.global" not in ptx
    assert "st.global.v4" in ptx and "st.global.b16" not in ptx


@pytest.mark.by_default("wanted", "large tiles")
@pytest.mark.parametrize(
    ("config", "aligned"),
    [
        (SPECIALIZED, True),
        (SPECIALIZED._replace(warp_specialize=False), True),
        # What triton does not compile is left out.
        (LARGE._replace(warp_specialize=True), True),
        (SPECIALIZED._replace(block_m=128), True),
        (SPECIALIZED, False),
    ],
    ids=["wanted", "not wanted", "large tiles", "two groups of rows", "pointers"],
)
def test_warps_are_specialized_where_wanted_and_possible(
    compilers: RankPool, config: MatmulConfig, aligned: bool
) -> None:
    ptx = compilers.run(assembly, 1, "sm_90", config, aligned)[0]
    assert ("setmaxnreg" in ptx) == (config == SPECIALIZED and aligned)
    assert ("cp.async.bulk.tensor" in ptx) == aligned
