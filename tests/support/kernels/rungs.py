"""Where a check of an operator runs: its host path, its Triton kernels interpreted, its Triton kernels on a GPU.

A check is a module's function `check(device, ...)`; the fixture `rung` calls it: here with "cpu", in a process of the
pool that was started with TRITON_INTERPRET=1 with "cpu", or here with "cuda", which skips for want of a GPU only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.ranks.rank_pool import RankPool

_HALVES = (torch.float16, torch.bfloat16)
# bfloat16 is not interpreted: the interpreter rounds it wrongly, so a pass would mean nothing.
_DTYPES = {
    "host": (torch.float32, *_HALVES),
    "interpreter": (torch.float32, torch.float16),
    "gpu": (torch.float32, *_HALVES),
}

every_rung = pytest.mark.parametrize("rung", list(_DTYPES), indirect=True)
# Of dear checks, which are told whether to take their whole grid: interpreted they take a part by default.
every_rung_and_grid = pytest.mark.parametrize(
    ("rung", "whole"),
    [
        pytest.param("host", True, id="host"),
        pytest.param("interpreter", False, id="interpreter-part"),
        pytest.param("interpreter", True, marks=pytest.mark.slow, id="interpreter-whole"),
        pytest.param("gpu", True, id="gpu"),
    ],
    indirect=["rung"],
)


def _each(slow: torch.dtype | None) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("rung", "dtype"),
        [
            pytest.param(rung, dtype, marks=pytest.mark.slow if rung == "interpreter" and dtype == slow else ())
            for rung, dtypes in _DTYPES.items()
            for dtype in dtypes
        ],
        indirect=["rung"],
        ids=lambda value: str(value).removeprefix("torch."),
    )


every_rung_and_dtype = _each(None)
# For checks that are dear where kernels are interpreted: by default in the dtype that has more branches there. Kernels
# that multiply matrices convert operands of 16 bits; the others compute all dtypes alike, and lose nothing in float32.
every_rung_and_dtype_of_a_product = _each(slow=torch.float32)
every_rung_and_dtype_of_rows = _each(slow=torch.float16)


def _grids(interpreted: torch.dtype) -> pytest.MarkDecorator:
    """Return the parameters `rung`, `dtype`, `whole`."""
    every = [(rung, dtype, True) for rung, dtypes in _DTYPES.items() for dtype in dtypes]
    by_default = [("host", torch.bfloat16, True), *(one for one in every if one[0] == "gpu")]
    whole = [pytest.param(*one, marks=() if one in by_default else pytest.mark.slow) for one in every]
    return pytest.mark.parametrize(
        ("rung", "dtype", "whole"),
        [*whole, ("interpreter", interpreted, False)],
        indirect=["rung"],
        ids=lambda value: {True: "whole", False: "part"}.get(value, str(value).removeprefix("torch.")),
    )


# Errors over many sizes, by default in one dtype: on the host over all sizes, interpreted over a part of them, which
# the check chooses. All sizes in all dtypes are slow. The dtypes interpreted are those above.
every_grid_of_a_product = _grids(interpreted=torch.float16)
every_grid_of_rows = _grids(interpreted=torch.float32)


class Rung:
    """Calls checks on one rung."""

    def __init__(self, name: str, interpreters: RankPool) -> None:
        self.name, self._interpreters = name, interpreters

    def __call__(self, check: Callable[..., Any], *args: Any) -> Any:
        """Return check(device, *args); an AssertionError where it raises."""
        if self.name == "interpreter":
            return self._interpreters.run(check, 1, "cpu", *args)[0]
        return check("cuda" if self.name == "gpu" else "cpu", *args)
