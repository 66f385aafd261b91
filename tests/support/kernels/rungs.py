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


class Rung:
    """Calls checks on one rung."""

    def __init__(self, name: str, interpreters: RankPool) -> None:
        self.name, self._interpreters = name, interpreters

    def __call__(self, check: Callable[..., Any], *args: Any) -> Any:
        """Return check(device, *args); an AssertionError where it raises."""
        if self.name == "interpreter":
            return self._interpreters.run(check, 1, "cpu", *args)[0]
        return check("cuda" if self.name == "gpu" else "cpu", *args)
