"""Rung: pure. A matrix that is prepared for one row multiplies any number, in the layout it is meant to have."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from tpkernels.ops.matmul import host

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this build of torch has no oneDNN: nothing is laid out",
)


@pytest.mark.parametrize(("inner", "columns"), [(24, 96), (96, 24), (48, 48)])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 40])
@pytest.mark.parametrize("fewest", [0, 10**9])
def test_a_matrix_for_one_row_has_its_longer_side_contiguous_and_multiplies_any_number(
    inner: int, columns: int, num_rows: int, fewest: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, inner, generator=generator) for size in (columns, num_rows))
    with patch.object(host, "FEWEST_MULTIPLICATIONS", fewest), patch.object(host, "has_onednn", lambda: True):
        prepared = host.PreparedMatrix(weight.T, 1)
        assert prepared.for_one_row is not None and prepared.laid_out is None
        assert prepared.for_one_row.stride(int(inner <= columns)) == 1
        # What lies that way already is not copied.
        assert (prepared.for_one_row.data_ptr() == weight.data_ptr()) == (inner > columns)
        torch.testing.assert_close(host.product(x, prepared), x @ weight.T)
        out = torch.ones(num_rows, columns)
        torch.testing.assert_close(host.accumulate_product(out, x, prepared), x @ weight.T + 1)


@pytest.mark.parametrize("inner", [1, 34, 65, 127, 128])
def test_what_lies_behind_a_row_does_not_reach_its_product(inner: int) -> None:
    """Red without `rows_apart` on a CPU with AMX only: no other reads it."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.full((66, inner + 6), torch.nan, dtype=torch.bfloat16)
    x, weight = wide[:, 3:-3], torch.randint(-2, 3, (100, inner), generator=generator).bfloat16()
    x[::2] = torch.randint(-2, 3, (33, inner), generator=generator).bfloat16()
    for operand in (x, x.contiguous()):
        for matrix in (weight.T, weight.T.contiguous()):
            want = (x[::2].float() @ weight.float().T).bfloat16()
            out = torch.zeros(66, 100, dtype=torch.bfloat16)
            for got in (host.product(operand, matrix), host.accumulate_product(out, operand, matrix)):
                assert torch.equal(got[::2], want) and bool(got[1::2].isnan().all())


def test_a_left_operand_is_copied_only_where_something_may_be_read_behind_its_rows() -> None:
    x = torch.ones(4, 34, dtype=torch.bfloat16)
    apart = host.rows_apart(x)
    assert torch.equal(apart, x) and apart.stride() == (64, 1)
    assert not bool(torch.as_strided(apart, (4, 30), (64, 1), 34).any())
    for untouched in (x.float(), x[:, :32], x.T):
        assert host.rows_apart(untouched) is untouched
