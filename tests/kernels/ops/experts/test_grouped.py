"""Rung: host, interpreter, GPU. Products of rows sorted by expert, their weight gradients, and SwiGLU of them.

Interpreted, a GPU has 4 processors, so that a program has tiles of several experts. Only a GPU shows the compiled
kernels' numbers, and bfloat16 in them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from support.kernels.precision import check_errors, unwritten_is_nan, with_gaps, with_longer_rows
from support.kernels.rungs import Rung, every_grid_of_a_product, every_rung, every_rung_and_dtype_of_a_product
from torch import Tensor
from tpkernels.ops.experts.grouped import (
    accumulate_grouped_wgrad,
    grouped_matmul,
    grouped_matmul_forward,
    grouped_matmul_op,
    grouped_matmul_reference,
    grouped_wgrad_,
    grouped_wgrad_op,
    grouped_wgrad_reference,
)
from tpkernels.ops.experts.grouped_kernel import launch_grouped_matmul, launch_grouped_wgrad, launch_zero_rows
from tpkernels.ops.experts.grouped_swiglu import (
    grouped_swiglu,
    grouped_swiglu_backward,
    grouped_swiglu_backward_op,
    grouped_swiglu_forward,
    grouped_swiglu_op,
    grouped_swiglu_reference,
)
from tpkernels.ops.experts.grouped_swiglu_kernel import launch_grouped_swiglu
from tpkernels.ops.matmul.configs import MatmulConfig

ROUTINGS = ("uniform", "zipf", "one expert", "every second")
# Of 32 rows and columns: several tiles per expert and per program, groups that the last does not fill.
SMALL_TILES = MatmulConfig(32, 32, 32, 2, 4, 2)


def offsets_of(routing: str, rows: int, experts: int, device: str = "cpu") -> Tensor:
    """Where the rows of each expert begin, int32 [E + 1]."""
    shares = torch.ones(experts)
    if routing == "zipf":
        shares /= torch.arange(1, experts + 1)
    elif routing == "one expert":
        shares[: experts // 2], shares[experts // 2 + 1 :] = 0, 0
    elif routing == "every second":
        shares[::2] = 0 if experts > 1 else 1
    generator = torch.Generator().manual_seed(rows)
    # At least one is drawn, and left out where there are no rows.
    chosen = torch.multinomial(shares, max(1, rows), replacement=True, generator=generator)[:rows]
    counts = torch.bincount(chosen, minlength=experts)
    return torch.cat((torch.zeros(1), counts.cumsum(0))).to(device, torch.int32)


def drawn(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype == torch.float64:
        return torch.randn(shape, generator=generator, dtype=dtype)
    # Whole numbers: sums of 500 products are exact in float16.
    return torch.randint(-2, 3, shape, generator=generator).to(device, dtype)


def with_a_tail(t: Tensor, num: int) -> Tensor:
    """Return rows and, behind them, some that nobody wrote."""
    return torch.cat((t, t.new_full((num, t.shape[1]), torch.nan)))


def row_by_row(x: Tensor, w: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """The products written out: of each row with the weight that it looks up."""
    experts = torch.repeat_interleave(torch.arange(len(w), device=x.device), offsets.diff())
    return torch.einsum("rk,rkn->rn" if transposed else "rk,rnk->rn", x, w[experts])


def check_products(
    rows: int,
    experts: int,
    routing: str,
    dtype: torch.dtype,
    device: str,
    sizes: tuple[int, int] = (12, 20),
    tails: Sequence[int] = (0, 5),
) -> None:
    """Every product against one row at a time; rows beyond the last expert's are NaN, and so is all fresh memory."""
    ffn, width = sizes
    offsets = offsets_of(routing, rows, experts, device)
    draw = functools.partial(drawn, dtype=dtype, device=device)
    x, dy, w, v = draw(rows, width), draw(rows, ffn), draw(experts, ffn, width), draw(experts, ffn, width, seed=1)
    tolerance = 1e-10 if dtype == torch.float64 else 0.0
    where = f"{rows=} {experts=} {routing} {dtype}"

    def close(got: Tensor, want: Tensor, what: str) -> None:
        assert got.shape == want.shape and got.dtype == want.dtype, (what, where, got.shape, got.dtype)
        error = float((got - want).abs().max()) if want.numel() else 0.0
        assert error <= tolerance * max(1.0, float(want.abs().max()) if want.numel() else 0.0), (what, where, error)

    y, dx, pair = (row_by_row(x, w, offsets, False), row_by_row(dy, w, offsets, True), row_by_row(dy, v, offsets, True))
    for tail in tails:
        x_, dy_ = with_a_tail(x, tail), with_a_tail(dy, tail)
        padded = functools.partial(torch.nn.functional.pad, pad=(0, 0, 0, tail))
        with unwritten_is_nan():
            close(grouped_matmul(x_, w, offsets), padded(y), "y")
            close(grouped_matmul(dy_, w, offsets, transposed=True), padded(dx), "dx")
            both = grouped_matmul_forward(dy_, w, offsets, transposed=True, also=(dy_, v))
            close(both, padded(dx + pair), "a sum of two products")
            h, side_by_side = grouped_swiglu_forward(x_, w, v, offsets, True)
            alone, nothing = grouped_swiglu_forward(x_, w, v, offsets, False)
        close(side_by_side, padded(torch.cat((y, row_by_row(x, v, offsets, False)), dim=1)), "gate and up")
        gate, up = side_by_side.double().chunk(2, dim=1)
        unit = torch.finfo(dtype).eps * 64
        torch.testing.assert_close(h.double(), gate * gate.sigmoid() * up, rtol=unit, atol=unit)
        assert torch.equal(h, alone) and nothing.numel() == 0
        buffer = drawn(experts, ffn, width, dtype=dtype, device=device, seed=2)
        buffer = buffer if dtype == torch.float64 else buffer.float()
        is_empty = offsets.diff() == 0
        buffer[is_empty] = torch.nan
        want = buffer.clone()
        for expert, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            want[expert] += (dy[start:end].to(want.dtype).T @ x[start:end].to(want.dtype)) if start < end else 0
        assert grouped_wgrad_(buffer, dy_, x_, offsets) is buffer
        assert bool(buffer[is_empty].isnan().all()), "an expert without rows was touched"
        close(buffer[~is_empty], want[~is_empty], "dw")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_products_on_a_host_in_float64(routing: str) -> None:
    for rows, experts in ((0, 1), (0, 5), (1, 1), (1, 128), (63, 8), (300, 3), (4096, 128)):
        check_products(rows, experts, routing, torch.float64, "cpu", (12, 20) if rows < 1000 else (3, 5))


def check_exact(device: str, dtype: torch.dtype, whole: bool) -> None:
    for routing in ROUTINGS if whole else ("every second",):
        for rows, experts in ((0, 2), (1, 1), (70, 5), (300, 8)) if whole else ((70, 5),):
            check_products(rows, experts, routing, dtype, device, (40, 72), (0, 5) if whole else (5,))
    if whole:
        # Few rows each: bfloat16 holds whole numbers up to 256.
        check_products(4096, 128, "uniform", dtype, device, (16, 16))


@every_grid_of_a_product
def test_whole_numbers_are_exact(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_exact, dtype, whole)


def check_small_tiles(device: str, dtype: torch.dtype) -> None:
    """By tiles of which experts have several: those of the sizes tested are larger."""
    offsets = offsets_of("zipf", 150, 4, device)
    draw = functools.partial(drawn, dtype=dtype, device=device)
    # 72 columns are no whole number of blocks of K, where TMA may not be used.
    x, dy, w, v = draw(150, 100), draw(150, 72), draw(4, 72, 100), draw(4, 72, 100, seed=1)
    with unwritten_is_nan():
        y = launch_grouped_matmul(x, w, offsets, config=SMALL_TILES)
        dx = launch_grouped_matmul(dy, w, offsets, transposed=True, also=(dy, v), config=SMALL_TILES)
        _, both = launch_grouped_swiglu(x, w, v, offsets, True, config=SMALL_TILES)
    assert torch.equal(y, row_by_row(x, w, offsets, False))
    assert torch.equal(dx, row_by_row(dy, w, offsets, True) + row_by_row(dy, v, offsets, True))
    assert torch.equal(both, torch.cat([row_by_row(x, of, offsets, False) for of in (w, v)], dim=1))
    buffer = torch.ones(4, 72, 100, device=device)
    launch_grouped_wgrad(buffer, dy, x, offsets, config=SMALL_TILES)
    assert torch.equal(buffer, grouped_wgrad_reference(torch.ones_like(buffer), dy.float(), x.float(), offsets))
    tail = torch.ones(170, 72, dtype=dtype, device=device)
    launch_zero_rows(tail, offsets)
    assert bool((tail[:150] == 1).all()) and not bool(tail[150:].any())


def check_grids(device: str) -> None:
    """The same bits by any number of programs: random numbers, whose sums another order would round otherwise."""
    offsets = offsets_of("zipf", 70, 4, device)
    generator = torch.Generator().manual_seed(0)
    x, w, v = (
        torch.randn(shape, generator=generator).to(device, torch.float16)
        for shape in ((75, 100), (4, 72, 100), (4, 72, 100))
    )
    first: list[Tensor] = []
    for processors in (1, 3, 40):
        with unwritten_is_nan():
            got = [
                launch_grouped_matmul(x, w, offsets, config=SMALL_TILES, processors=processors),
                *launch_grouped_swiglu(x, w, v, offsets, True, config=SMALL_TILES, processors=processors),
            ]
        first = first or got
        assert all(torch.equal(one, other) for one, other in zip(got, first, strict=True)), processors


@pytest.mark.parametrize("rung", ["interpreter", "gpu"], indirect=True)
def test_bits_do_not_depend_on_the_number_of_programs(rung: Rung) -> None:
    rung(check_grids)


@pytest.mark.parametrize("rung", ["interpreter", "gpu"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_small_tiles(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_small_tiles, dtype)


def check_layouts(device: str, dtype: torch.dtype) -> None:
    """Rows with gaps or within longer rows, weights by columns or in longer rows, as halves of one tensor."""
    offsets = offsets_of("every second", 40, 4, device)
    x, w, v = (drawn(*shape, dtype=dtype, device=device) for shape in ((40, 24), (4, 16, 24), (4, 16, 24)))
    want = row_by_row(x, w, offsets, False)
    for change in (with_gaps, with_longer_rows, lambda t: t.mT.contiguous().mT):
        assert torch.equal(grouped_matmul(change(x), w, offsets), want)
        assert torch.equal(grouped_matmul(x, change(w), offsets), want)
        assert torch.equal(grouped_swiglu_forward(change(x), change(w), v, offsets, True)[1][:, :16], want)
        buffer = change(torch.ones(4, 16, 24, device=device))
        grouped_wgrad_(buffer, change(want), change(x), offsets)
        assert torch.equal(buffer, grouped_wgrad_reference(torch.ones_like(buffer), want.float(), x.float(), offsets))
    halves = torch.cat((want, want), dim=1).chunk(2, dim=1)
    assert torch.equal(grouped_matmul(halves[1], w, offsets, transposed=True), row_by_row(want, w, offsets, True))


@pytest.mark.parametrize("rung", ["host", pytest.param("interpreter", marks=pytest.mark.slow), "gpu"], indirect=True)
def test_every_layout(rung: Rung) -> None:
    rung(check_layouts, torch.float32 if rung.name == "host" else torch.float16)


def check_all_errors(device: str, dtype: torch.dtype, whole: bool) -> None:
    """At most twice as wrong as torch's loop, in every gradient."""
    for routing, rows in (("zipf", 63), ("every second", 31), ("uniform", 0)) if whole else (("zipf", 63),):
        offsets = offsets_of(routing, rows, 5, device)

        def draw(seed: int, *names: str, rows: int = rows, offsets: Tensor = offsets) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(seed)
            shapes = {"x": (rows, 40), "w": (5, 24, 40), "w_gate": (5, 24, 40), "w_up": (5, 24, 40), "dy": (rows, 24)}
            scale = {"x": 1.0, "dy": 1.0}
            made = {n: torch.randn(shapes[n], generator=generator) * scale.get(n, 40**-0.5) for n in names}
            leaves = {name: t.to(device, dtype).requires_grad_() for name, t in made.items()}
            return {**leaves, "offsets": offsets}

        cases: list[tuple[Callable, Callable, tuple[str, ...]]] = [
            (grouped_matmul, grouped_matmul_reference, ("x", "w")),
            (grouped_swiglu, grouped_swiglu_reference, ("x", "w_gate", "w_up")),
        ]
        for operator, reference, names in cases:
            check_errors(
                f"{operator.__name__} {routing}", operator, reference, lambda seed, names=names: draw(seed, *names)
            )
        check_errors(
            f"transposed {routing}",
            lambda dy, w, offsets: grouped_matmul(dy, w, offsets, transposed=True),
            lambda dy, w, offsets: grouped_matmul_reference(dy, w, offsets, transposed=True),
            lambda seed: draw(seed, "dy", "w"),
        )


@every_grid_of_a_product
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_all_errors, dtype, whole)


def check_backward(device: str) -> None:
    """The parts that a layer calls are the operator's gradients; a weight whose gradient nobody wants gets none."""
    offsets = offsets_of("zipf", 30, 3, device)
    x, w, v = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        for shape in ((30, 16), (3, 12, 16), (3, 12, 16))
    )
    dh = torch.randn(30, 12, generator=torch.Generator().manual_seed(1)).to(device)
    want = torch.autograd.grad(grouped_swiglu(x, w, v, offsets), (x, w, v), dh)
    with torch.no_grad():
        _, y = grouped_swiglu_forward(x, w, v, offsets, True)
        dx, dy = grouped_swiglu_backward(dh, y, w, v, offsets)
        assert grouped_swiglu_backward(dh, y, w, v, offsets, needs_dx=False)[0] is None
        buffers = torch.zeros(2, 3, 12, 16, device=device)
        for buffer, half in zip(buffers, dy.chunk(2, dim=1), strict=True):
            accumulate_grouped_wgrad(buffer, half, x, offsets)
    assert dx is not None and torch.equal(dx, want[0])
    assert torch.equal(buffers[0], want[1]) and torch.equal(buffers[1], want[2])
    (alone,) = torch.autograd.grad(grouped_swiglu(x.detach(), w.detach(), v, offsets), v, dh)
    assert torch.equal(alone, want[2])


@every_rung
def test_the_parts_of_a_backward(rung: Rung) -> None:
    rung(check_backward)


def check_far(device: str) -> None:
    """Experts, rows and sums that lie behind 2**31 elements are read and written there."""
    try:
        memory = torch.empty(2**31 + 2**16, dtype=torch.float16, device=device)
    except (RuntimeError, torch.OutOfMemoryError):
        pytest.skip("needs 4 GiB of addresses")
    offsets = torch.tensor([0, 0, 3], dtype=torch.int32, device=device)
    x, dy = drawn(3, 16, dtype=torch.float16, device=device), drawn(3, 16, dtype=torch.float16, device=device, seed=1)
    w = drawn(2, 16, 16, dtype=torch.float16, device=device)
    far_rows = memory.as_strided((3, 16), (2**30, 1))
    far_rows.copy_(x)
    assert torch.equal(launch_grouped_matmul(far_rows, w, offsets), row_by_row(x, w, offsets, False))
    buffer = memory.as_strided((2, 16, 16), (2**31, 16, 1))
    buffer[1] = 1
    launch_grouped_wgrad(buffer, dy, x, offsets)
    assert torch.equal(buffer[1], 1 + dy.T @ x)


# On a host that interprets, of 4 GiB some pages are touched.
@pytest.mark.slow
@pytest.mark.parametrize("rung", ["interpreter", "gpu"], indirect=True)
def test_more_than_2_to_the_31_elements(rung: Rung) -> None:
    rung(check_far)


def check_autocast(device: str) -> None:
    offsets = offsets_of("zipf", 30, 3, device)
    x, w = torch.randn(30, 16, device=device), torch.randn(3, 12, 16, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert grouped_matmul(x, w, offsets).dtype == grouped_swiglu(x, w, w, offsets).dtype == torch.bfloat16
        # Behind its entry everything has one dtype, whatever autocast would do with it.
        assert grouped_matmul_forward(x, w, offsets).dtype == torch.float32


@pytest.mark.parametrize("rung", ["host", "gpu"], indirect=True)
def test_autocast(rung: Rung) -> None:
    rung(check_autocast)


@every_rung_and_dtype_of_a_product
def test_the_same_bits_twice(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_twice, dtype)


def check_twice(device: str, dtype: torch.dtype) -> None:
    offsets = offsets_of("zipf", 70, 3, device)
    x, w = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in ((70, 33), (3, 17, 33)))
    x, w = x.to(device, dtype), w.to(device, dtype)
    for fixed in (False, True):
        results = []
        for _ in range(2):
            h, y = grouped_swiglu_forward(x, w, w, offsets, True, fixed=fixed)
            buffer = torch.zeros(3, 17, 33, device=device)
            accumulate_grouped_wgrad(buffer, h, x, offsets, fixed=fixed)
            results.append((h, y, buffer, grouped_matmul_forward(h, w, offsets, transposed=True, fixed=fixed)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fixed_bits_are_an_experts_own(dtype: torch.dtype) -> None:
    """On a host: whatever rows the experts before have, and whichever expert it is, an expert's bits are the same.

    Rows and weights of odd sizes begin at a cache line once in many. On a processor whose library adds alike at every
    address this passes without copies too: the addresses themselves are looked at below.
    """
    rows, ffn, width = 41, 51, 77
    generator = torch.Generator().manual_seed(0)
    x, w, v = (torch.randn(shape, generator=generator, dtype=dtype) for shape in ((rows, width), *[(ffn, width)] * 2))
    found = []
    for before, expert in ((0, 0), (1, 1), (2, 3), (7, 2), (13, 1)):
        offsets = torch.zeros(5, dtype=torch.int32)
        offsets[1 : expert + 1], offsets[expert + 1 :] = before, before + rows
        place = slice(before, before + rows)
        all_x = torch.randn(before + rows, width, dtype=dtype)
        all_w, all_v = torch.randn(2, 4, ffn, width, dtype=dtype)
        all_x[place], all_w[expert], all_v[expert] = x, w, v
        h, y = grouped_swiglu_forward(all_x, all_w, all_v, offsets, True, fixed=True)
        dx, dy = grouped_swiglu_backward(h, y, all_w, all_v, offsets, fixed=True)
        assert dx is not None
        buffer = torch.ones(4, ffn, width, dtype=dtype)
        accumulate_grouped_wgrad(buffer, dy[:, :ffn], all_x, offsets, fixed=True)
        products = grouped_matmul_forward(h, all_w, offsets, transposed=True, fixed=True)
        found.append((h[place], y[place], dx[place], products[place], buffer[expert]))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("fixed", [False, True])
def test_fixed_operands_begin_at_a_cache_line(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with `fixed`, and only those are copied that do not begin there."""
    seen: list[int] = []

    def watched(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def product(*operands: Tensor, **options: Tensor) -> Tensor:
            seen.extend(t.data_ptr() % 64 for t in operands)
            return real(*operands, **options)

        return product

    x, w, offsets = torch.randn(9, 5), torch.randn(3, 7, 5), torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "addmm", watched(torch.addmm))
        patch.setattr(torch, "mm", watched(torch.mm))
        patch.setattr(Tensor, "addmm_", watched(Tensor.addmm_))
        y = grouped_matmul_forward(x, w, offsets, fixed=fixed)
        grouped_swiglu_forward(x, w, w, offsets, True, fixed=fixed)
        accumulate_grouped_wgrad(torch.zeros(3, 7, 5), y, x, offsets, fixed=fixed)
    assert len(seen) == 3 * (3 + 2 * 2 + 3) and any(seen) is not fixed


def test_offsets_that_a_host_cannot_follow_are_refused() -> None:
    x, w = torch.zeros(4, 3), torch.zeros(2, 5, 3)
    for offsets in ([1, 2, 4], [0, 3, 2], [0, 2, 5]):
        with pytest.raises(ValueError, match=r"offsets must rise from 0 to at most the number of rows, 4: got \["):
            grouped_matmul(x, w, torch.tensor(offsets, dtype=torch.int32))


def test_what_does_not_fit_is_refused_in_a_line() -> None:
    x, w, offsets = torch.zeros(4, 3), torch.zeros(2, 5, 3), torch.zeros(3, dtype=torch.int32)
    y, buffer = torch.zeros(4, 5), torch.zeros(2, 5, 3)
    wrong: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (grouped_matmul, (x, w, offsets.long())),
        (grouped_matmul, (x, w, offsets[1:])),
        (grouped_matmul, (x, w.double(), offsets)),
        (grouped_matmul, (y, w, offsets)),
        (grouped_matmul, (x.long(), w.long(), offsets)),
        (grouped_swiglu, (x, w, w[:, :4], offsets)),
        (grouped_swiglu, (x, w, w, offsets[None])),
        (grouped_wgrad_, (buffer, y[:3], x, offsets)),
        (grouped_wgrad_, (buffer.half(), y, x, offsets)),
        (grouped_wgrad_, (buffer, x, y, offsets)),
        (grouped_wgrad_, (buffer, y, x, offsets[:2])),
    ]
    for operator, operands in wrong:
        with pytest.raises(ValueError, match=r"needs .*offsets int32 \[E \+ 1\].*: (take|pass) [^\n]*$"):
            operator(*operands)
    with pytest.raises(ValueError, match=r"y\[R, D\] = x_r w_e\(r\) needs x\[R, F\].*: \[4, 3\] float32, \[2, 5, 3\]"):
        grouped_matmul(x, w, offsets, transposed=True)


def check_registered(device: str, whole: bool) -> None:
    """What torch.library sees: schemas, fakes, autograd, tracing; a part: each operator once."""
    offsets = offsets_of("zipf", 9, 3, device)
    x, w, v, dh = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
        for shape in ((9, 5), (3, 4, 5), (3, 4, 5), (9, 4))
    )
    leaves = [t.clone().requires_grad_() for t in (x, w, v, dh)]
    cases = [
        (grouped_matmul_op, (*leaves[:2], offsets, False, False)),
        (grouped_swiglu_op, (*leaves[:3], offsets, True, False)),
        (grouped_swiglu_backward_op, (dh, torch.cat((dh, dh), dim=1), w, v, offsets, False)),
        (grouped_wgrad_op, (torch.zeros_like(w), dh, x, offsets, False)),
    ]
    if whole:
        cases += [
            (grouped_matmul_op, (leaves[3], leaves[1], offsets, True, True)),
            (grouped_matmul_op, (x, w, offsets, False, False)),
            (grouped_swiglu_op, (x, w, v, offsets, False, True)),
        ]
    for operator, operands in cases:
        torch.library.opcheck(operator, operands)


@pytest.mark.parametrize(
    ("rung", "whole"),
    [("host", False), pytest.param("host", True, marks=pytest.mark.slow), ("gpu", True)],
    indirect=["rung"],
    ids=["host-part", "host-whole", "gpu"],
)
def test_opcheck(rung: Rung, whole: bool) -> None:
    rung(check_registered, whole)


def test_gradcheck() -> None:
    offsets = offsets_of("every second", 9, 4)
    x, w, v = (drawn(*s, dtype=torch.float64).requires_grad_() for s in ((9, 5), (4, 3, 5), (4, 3, 5)))
    dy = drawn(9, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: grouped_matmul(x, w, offsets), (x, w))
    assert torch.autograd.gradcheck(lambda dy, w: grouped_matmul(dy, w, offsets, transposed=True), (dy, w))
    assert torch.autograd.gradcheck(lambda x, w, v: grouped_swiglu(x, w, v, offsets), (x, w, v))


def test_compiled_as_eager() -> None:
    offsets = offsets_of("zipf", 9, 3)
    leaves = [torch.randn(*s).requires_grad_() for s in ((9, 5), (3, 4, 5), (3, 4, 5), (3, 5, 4))]

    def experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return grouped_matmul(grouped_swiglu(x, gate, up, offsets), down, offsets).square().sum()

    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for got, want in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, experts)), strict=True):
        assert torch.equal(got, want)
