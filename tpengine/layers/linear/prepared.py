"""The forms in which a layer's weight is multiplied, copied for its products and used until the weight changes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor
from tpkernels.fused.exchange_matmul import DTYPES
from tpkernels.ops.matmul.host import PreparedMatrix


class PreparedWeight:
    """The two forms in which a weight w[out, in] is multiplied, copied into the layout that a matmul reads fastest.

    forward:  m = w.T       dgrad:  m = w, copied when a backward first asks for it
    """

    def __init__(self, weight: Tensor, num_rows: int, parameters: Sequence[Tensor]) -> None:
        self._weight, self._num_rows = weight, num_rows
        self.forward = PreparedMatrix(weight.T, num_rows)
        self._made_of = contents_of(parameters)
        self._is_multiplied = weight.dtype in DTYPES

    @functools.cached_property
    def dgrad(self) -> PreparedMatrix:
        """The form that dgrad multiplies by; without a backward nobody pays for it."""
        return PreparedMatrix(self._weight, self._num_rows)

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copied layer has another weight, which is not prepared."""
        return None

    def for_product(self, x: Tensor, parameters: Sequence[Tensor]) -> PreparedWeight | None:
        """Return self, or None: a parameter was written to or replaced since, or x[., in] does not fit.

        If it is self, nothing is left to check: a pass over one token has many products, and little time for each.
        """
        weight = self._weight
        fits = x.ndim == 2 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype and x.device == weight.device
        return self if fits and self._is_multiplied and contents_of(parameters) == self._made_of else None


def contents_of(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return address and autograd version of each parameter: they change when it is written to or replaced."""
    return [(parameter.data_ptr(), parameter._version) for parameter in parameters]
