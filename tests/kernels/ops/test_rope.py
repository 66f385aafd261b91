"""Rung: host, interpreter, GPU. Rotary position embedding, forward and backward, and packed positions.

Only a GPU shows the compiled kernel's numbers, and bfloat16 in it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.precision import check_errors, unwritten_is_nan, with_gaps, with_longer_rows
from support.kernels.rungs import Rung, every_grid_of_rows, every_rung, every_rung_and_dtype_of_rows
from torch import Tensor
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.rope import document_positions, rope, rope_op, rope_reference
from tpkernels.ops.rope_tables import rope_tables

# Tokens, heads, head size: every head size that models have, halves that are no power of two, more heads than a
# program has, fewer tokens than a block and more, no tokens.
SIZES = [(1, 1, 128), (257, 2, 2), (63, 2, 64), (9, 5, 80), (7, 3, 96), (100, 1, 8), (3, 6, 256), (0, 2, 64)]
PART = [(7, 3, 96), (9, 5, 80)]
NUM_POSITIONS = 40


def operands(
    size: tuple[int, int, int], dtype: torch.dtype, device: str, seed: int = 0, num_positions: int = NUM_POSITIONS
) -> dict[str, Tensor]:
    """x as the middle of a fused projection's output, tables, and positions in no order."""
    tokens, heads, elements = size
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads * elements, generator=generator).to(device, dtype)
    cos, sin = rope_tables(num_positions, elements, dtype=accumulation_dtype(dtype), device=device)
    positions = torch.randint(num_positions, (tokens,), generator=generator)
    return {
        "x": with_longer_rows(x).unflatten(1, (heads, elements)).requires_grad_(),
        "cos": cos,
        "sin": with_gaps(sin),
        "positions": positions.to(device, torch.int32 if seed else torch.int64),
    }


def check_all_sizes(device: str, dtype: torch.dtype, whole: bool) -> None:
    for i, size in enumerate(SIZES if whole else PART):
        flags = {"interleaved": i % 2 == 1, "inverse": i % 3 == 1}
        check_one(size, flags, i % 4 != 0, dtype, device)
        check_one(size, {"interleaved": not flags["interleaved"], "inverse": False}, i % 4 == 0, dtype, device)


def check_one(
    size: tuple[int, int, int], flags: dict[str, bool], with_positions: bool, dtype: torch.dtype, device: str
) -> None:
    def draw(seed: int) -> dict[str, Any]:
        if with_positions:
            return operands(size, dtype, device, seed)
        # One sequence, or two.
        every = operands(size, dtype, device, seed, max(1, size[0] // (2 - size[0] % 2)))
        return {name: every[name] for name in ("x", "cos", "sin")}

    def reference(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
        return rope_reference(x, cos, sin, positions, **flags)

    check_errors(f"rope {size} {flags}", lambda **given: rope(**given, **flags), reference, draw)


@every_grid_of_rows
def test_errors_are_at_most_twice_torchs(rung: Rung, dtype: torch.dtype, whole: bool) -> None:
    rung(check_all_sizes, dtype, whole)


def check_any_strides(device: str) -> None:
    """Heads first, elements apart, tokens all alike: the same bits as of a contiguous x."""
    x, cos, sin, positions = (t.detach() for t in operands((7, 3, 8), torch.float32, device).values())
    x = x.contiguous()
    for interleaved in (False, True):
        expected = rope(x, cos, sin, positions, interleaved=interleaved)
        heads_first = x.transpose(0, 1).contiguous().transpose(0, 1)
        for view in (heads_first, with_gaps(x)):
            got = rope(view, cos, sin.contiguous(), positions, interleaved=interleaved)
            assert torch.equal(got, expected) and got.is_contiguous()
        alike, positions_apart = x[:1].expand(7, 3, 8), positions.repeat_interleave(2)[::2]
        assert torch.equal(
            rope(alike, cos, sin, positions_apart, interleaved=interleaved),
            rope(alike.contiguous(), cos, sin, positions, interleaved=interleaved),
        )


@every_rung
def test_any_strides(rung: Rung) -> None:
    rung(check_any_strides)


def check_default_positions(device: str) -> None:
    """Whole sequences one after the other: each begins at position 0 again."""
    x, cos, sin, _ = operands((2 * NUM_POSITIONS, 2, 8), torch.float32, device).values()
    positions = torch.arange(NUM_POSITIONS, device=device).repeat(2)
    assert torch.equal(rope(x, cos, sin), rope(x, cos, sin, positions))
    assert torch.equal(rope(x, cos, sin)[NUM_POSITIONS:], rope(x[NUM_POSITIONS:], cos, sin))


@every_rung
def test_default_positions(rung: Rung) -> None:
    rung(check_default_positions)


def check_integers(device: str) -> None:
    """A quarter turn of small integers is exact: it shows which elements are a pair, and the signs."""
    x = torch.arange(1.0, 9.0, device=device).view(1, 1, 8)
    cos, sin = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    turned = {
        (False, False): [-5, -6, -7, -8, 1, 2, 3, 4],
        (False, True): [5, 6, 7, 8, -1, -2, -3, -4],
        (True, False): [-2, 1, -4, 3, -6, 5, -8, 7],
        (True, True): [2, -1, 4, -3, 6, -5, 8, -7],
    }
    for (interleaved, inverse), expected in turned.items():
        assert rope(x, cos, sin, interleaved=interleaved, inverse=inverse).flatten().tolist() == expected


@every_rung
def test_a_quarter_turn(rung: Rung) -> None:
    rung(check_integers)


def check_outside_the_tables(device: str, refuses: bool) -> None:
    """A position that the tables lack is refused or NaN; the other tokens are right."""
    x, cos, sin, positions = operands((5, 2, 8), torch.float32, device).values()
    expected = rope(x, cos, sin, positions)
    for outside in (-1, NUM_POSITIONS, 2**40):
        wrong = positions.clone()
        wrong[2] = outside
        if refuses:
            with pytest.raises(ValueError, match=rf"0 to {NUM_POSITIONS - 1}: they are .*{outside}"):
                rope(x, cos, sin, wrong)
            continue
        y = rope(x, cos, sin, wrong)
        assert y[2].isnan().all() and torch.equal(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@every_rung
def test_positions_outside_the_tables(rung: Rung) -> None:
    rung(check_outside_the_tables, rung.name == "host")


def check_against_transformers(device: str, dtype: torch.dtype) -> None:
    """Hugging Face's Llama for halves; its GPT-J, whose tables are computed otherwise, for neighbours."""
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")

    def halves(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        twice = (torch.cat([table[positions]] * 2, dim=-1).to(x.dtype)[None] for table in (cos, sin))
        y, _ = llama.apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *twice)
        return y[0].transpose(0, 1)

    def neighbours(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        tables = (table[positions].to(x.dtype)[None] for table in (sin, cos))
        return gptj.apply_rotary_pos_emb(x[None], *tables)[0]

    for interleaved, theirs in ((False, halves), (True, neighbours)):
        check_errors(
            f"{theirs.__name__} of transformers",
            lambda interleaved=interleaved, **given: rope(**given, interleaved=interleaved),
            theirs,
            lambda seed: operands((9, 4, 64), dtype, device, seed),
        )


@every_rung_and_dtype_of_rows
def test_against_transformers(rung: Rung, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    rung(check_against_transformers, dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[5], [1, 1, 3], [0, 2, 0, 0, 4, 0], [], [0]])
def test_document_positions(lengths: list[int], dtype: torch.dtype) -> None:
    cumulative = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    positions = document_positions(cumulative, sum(lengths))
    assert positions.dtype == torch.int32
    assert positions.tolist() == [i for length in lengths for i in range(length)]


def test_gradcheck_of_host_path_and_reference() -> None:
    x, cos, sin, positions = operands((3, 2, 6), torch.float64, "cpu").values()
    for interleaved in (False, True):
        for inverse in (False, True):
            flags = {"interleaved": interleaved, "inverse": inverse}
            assert torch.autograd.gradcheck(lambda x, flags=flags: rope(x, cos, sin, positions, **flags), x)
            assert torch.autograd.gradcheck(lambda x, flags=flags: rope_reference(x, cos, sin, positions, **flags), x)


def check_float64(device: str) -> None:
    """Nothing passes through float32 in float64: back and forth is the identity to float64's roundings."""
    x, cos, sin, positions = operands((5, 3, 80), torch.float64, device).values()
    for interleaved in (False, True):
        with unwritten_is_nan():
            y = rope(x, cos, sin, positions, interleaved=interleaved)
            back = rope(y, cos, sin, positions, interleaved=interleaved, inverse=True)
        torch.testing.assert_close(y, rope_reference(x, cos, sin, positions, interleaved, False))
        torch.testing.assert_close(back, x)


@every_rung
def test_float64(rung: Rung) -> None:
    rung(check_float64)


@pytest.mark.by_default("5-True-True")
@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_opcheck(tokens: int, interleaved: bool, with_positions: bool) -> None:
    x, cos, sin, positions = operands((tokens, 2, 6), torch.float32, "cpu").values()
    torch.library.opcheck(rope_op, (x, cos, sin, positions if with_positions else None, interleaved, False))


def test_compiled_as_eager() -> None:
    x, cos, sin, positions = operands((6, 2, 8), torch.float32, "cpu").values()

    def double(x: Tensor) -> Tensor:
        return rope(2 * x, cos, sin, positions, interleaved=True)

    outcomes = []
    for function in (double, torch.compile(double, backend="aot_eager", fullgraph=True)):
        y = function(x)
        outcomes.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(3, 16)}, r"x\[T, H, E\] .* x is \(3, 16\) torch.float32: split"),
        ({"x": torch.ones(3, 2, 7)}, "E even and 2 to 1024"),
        ({"x": torch.ones(3, 2, 0)}, "E even and 2 to 1024"),
        ({"x": torch.ones(3, 2, 2048)}, "E even and 2 to 1024"),
        ({"x": torch.ones(3, 2, 8, dtype=torch.int64)}, "floating-point numbers, .* torch.int64"),
        ({"x": torch.ones(3, 2, 6)}, r"\[P, 3\] of torch.float32 .* cos is \(5, 4\)"),
        ({"x": torch.ones(3, 2, 8).double()}, r"of torch.float64 .* cos is \(5, 4\) torch.float32"),
        ({"sin": torch.ones(4, 4)}, r"sin is \(4, 4\)"),
        ({"sin": torch.ones(5, 4).half()}, "sin is .* torch.float16"),
        ({"cos": torch.ones(5, 4, requires_grad=True)}, "requires_grad True: make them by rope_tables"),
        ({"cos": torch.ones(0, 4), "sin": torch.ones(0, 4)}, r"cos is \(0, 4\)"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, r"\[3\] of int32 or int64: got \(4,\)"),
        ({"positions": torch.zeros(3)}, "got .* torch.float32"),
        ({"cos": torch.ones(2, 4), "sin": torch.ones(2, 4)}, "3 tokens, 2 rows: make longer tables, or pass positions"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Tensor], message: str) -> None:
    given = {"x": torch.ones(3, 2, 8), "cos": torch.ones(5, 4), "sin": torch.ones(5, 4), **arguments}
    with pytest.raises(ValueError, match=message):
        rope(**given)


def test_lengths_that_are_no_vector_of_integers_are_refused() -> None:
    for cumulative in (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(2)):
        with pytest.raises(ValueError, match=r"\[num_documents \+ 1\] of int32 or int64"):
            document_positions(cumulative, 3)
