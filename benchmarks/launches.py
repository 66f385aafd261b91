"""What each operator launches: its launchers, called with tensors without memory, for every shape that is measured.

Used where launches are looked at (tpkernels.launch.observed), not made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from tpkernels.norm import launch_norm, launch_norm_backward

from benchmarks.shapes import MODELS, SEQUENCES, TP

DTYPES = (torch.bfloat16, torch.float32)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm() -> None:
    for dtype in DTYPES:
        for model in MODELS:
            x = _empty(SEQUENCES[0] // TP, model.hidden, dtype=dtype)
            weight = x[0]
            for centered, residual in ((False, None), (False, x), (True, x)):
                bias = weight if centered else None
                _, total, mean, rstd = launch_norm(x, weight, bias, residual, 1e-5, centered)
                dtotal = None if residual is None else total
                launch_norm_backward(x, dtotal, x, weight, mean, rstd, 1, centered, centered)


LAUNCHES: Mapping[str, Callable[[], None]] = MappingProxyType({"norm": _norm})
