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
