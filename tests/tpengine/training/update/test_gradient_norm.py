"""Rung: pure. Squares of blocks of a gradient, in a balanced tree: the same bits whoever owns which blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpengine.layout.slices import BLOCK
from tpengine.training.gradient_norm import squares_of_blocks


@pytest.mark.parametrize("numel", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_add_up_to_the_square_of_the_norm(numel: int, dtype: torch.dtype) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=dtype)
    squares = squares_of_blocks(x)
    assert squares.shape == (-(-numel // BLOCK),) and squares.dtype == torch.float64
    torch.testing.assert_close(squares.sum(), x.double().square().sum(), rtol=1e-14, atol=0)


@given(st.integers(1, 6 * BLOCK), st.integers(0, 5), st.integers(1, 6))
def test_a_part_of_whole_blocks_has_the_wholes_bits(numel: int, first: int, number: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    part = x[first * BLOCK : (first + number) * BLOCK]
    if part.numel():
        whole = squares_of_blocks(x.view(1, numel))[first : first + number]
        # Elsewhere in memory too.
        assert torch.equal(squares_of_blocks(torch.cat((x[:1], part))[1:]), whole)


def test_what_is_not_finite_is_seen() -> None:
    x = torch.ones(3 * BLOCK)
    x[BLOCK] = torch.inf
    assert squares_of_blocks(x).isfinite().tolist() == [True, False, True]
