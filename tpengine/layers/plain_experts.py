"""Plain torch in the place of tpkernels.ops.experts, until that is there."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor, *, transposed: bool = False) -> Tensor:
    ends = offsets.tolist()
    y = x.new_zeros(len(x), w.shape[2 if transposed else 1])
    for e in range(len(w)):
        if ends[e] < ends[e + 1]:
            y[ends[e] : ends[e + 1]] = x[ends[e] : ends[e + 1]] @ (w[e] if transposed else w[e].T)
    return y


def grouped_swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    g, u = grouped_matmul(x, w_gate, offsets), grouped_matmul(x, w_up, offsets)
    return torch.nn.functional.silu(g) * u, g, u


def swiglu_backward(dh: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    s = g.sigmoid()
    return dh * u * s * (1 + g * (1 - s)), dh * g * s


def grouped_wgrad_(buffer: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    for e in range(len(buffer)):
        if ends[e] < ends[e + 1]:
            buffer[e] += dy[ends[e] : ends[e + 1]].T @ x[ends[e] : ends[e + 1]]
    return buffer
