"""Cases of `benchmarks.run kernels`: the products of one rank's projections, each direction a case, against cuBLAS.

Each direction is a case, because forward, dgrad and wgrad read their operands in three different orders, and a slow one
would be hidden in a sum. torch's side is what one would write: torch.mm, which on a GPU is cuBLAS. On a CPU torch has
two libraries; ours uses the faster one there (matmul/host.py). It adds in another order, so its error is allowed too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.cases.cases import Case, Contestant, Direction, Draw, Shape, against_torch


def matmul(shape: Shape) -> Sequence[Case]:
    """Forward, dgrad and wgrad of the four projections of a block; wgrad as training accumulates it; SwiGLU within."""
    from tpkernels.ops.matmul.operator import matmul as product
    from tpkernels.ops.matmul.swiglu import matmul_swiglu
    from tpkernels.ops.matmul.wgrad import wgrad_

    tokens, model = shape.seq, shape.model

    def case(name: str, m: int, n: int, k: int, order: Callable[..., tuple[Tensor, Tensor]], **operands: Any) -> Case:
        def inputs(draw: Draw) -> dict[str, Tensor]:
            return {name: draw.normal(*sizes, requires_grad=False) for name, sizes in operands.items()}

        def ours(**tensors: Tensor) -> Tensor:
            return product(*order(**tensors))

        def plain(**tensors: Tensor) -> Tensor:
            return torch.mm(*order(**tensors))

        def work(direction: Direction) -> Any:
            from tpkernels.work import matmul_work

            return matmul_work(m, n, k, shape.item_bytes)

        sizes = {"m": m, "n": n, "k": k}
        contestants, also = against_torch(ours, plain), ours if shape.device == "cpu" else None
        return Case(name, inputs, contestants, work, "matmul", sizes, plain, ("forward",), also)

    cases = []
    for name, (out, inner) in model.projections.items():
        x, dy, weight = (tokens, inner), (tokens, out), (out, inner)
        cases += [
            case(f"matmul_{name}", tokens, out, inner, lambda x, weight: (x, weight.T), x=x, weight=weight),
            case(f"matmul_{name}_dgrad", tokens, inner, out, lambda dy, weight: (dy, weight), dy=dy, weight=weight),
            case(f"matmul_{name}_wgrad", out, inner, tokens, lambda dy, x: (dy.T, x), dy=dy, x=x),
        ]
    adding = {"wgrad_accumulated": wgrad_}
    if shape.device == "cuda":
        # The operator itself may take torch's product: this is our kernel, whatever it takes.
        adding["wgrad_by_kernel"] = _by_kernel
    added = [_accumulated(shape, name, ours) for name, ours in adding.items()]
    return (*cases, *added, _swiglu(shape, matmul_swiglu, product))


def _by_kernel(buffer: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    from tpkernels.ops.matmul.kernel import launch_matmul

    return launch_matmul(dy.T, x, out=buffer, accumulate=True)


@functools.cache
def _torch_adds(dtype: torch.dtype) -> bool:
    """Return whether this torch adds products of a dtype to float32 on a GPU.

    Not asked of tpkernels, which may be an older one.
    """
    a, buffer = torch.ones(16, 16, dtype=dtype, device="cuda"), torch.zeros(16, 16, device="cuda")
    try:
        torch.addmm(buffer, a, a, out_dtype=buffer.dtype, out=buffer)
    except (TypeError, RuntimeError):
        return False
    return bool((buffer == 16).all())


def _accumulated(shape: Shape, name: str, ours: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Case:
    """Return the case of adding the largest weight gradient to a float32 buffer, against torch's best way."""
    tokens, (out, inner) = shape.seq, shape.model.projections["gate_up"]

    def inputs(draw: Draw) -> dict[str, Tensor]:
        normal = functools.partial(draw.normal, requires_grad=False)
        return {
            "buffer": normal(out, inner, dtype=torch.float32),
            "dy": normal(tokens, out),
            "x": normal(tokens, inner),
        }

    def plain(buffer: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        if buffer.dtype == dy.dtype:
            return buffer.addmm_(dy.T, x)
        if buffer.is_cuda and _torch_adds(dy.dtype):
            return torch.addmm(buffer, dy.T, x, out_dtype=buffer.dtype, out=buffer)
        if buffer.is_cuda:
            return buffer.add_(torch.mm(dy.T, x, out_dtype=buffer.dtype))
        return buffer.add_(dy.T @ x)

    def reference(buffer: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        return buffer + (dy.T @ x).to(buffer.dtype)

    def work(direction: Direction) -> Any:
        from tpkernels.work import Work

        read = shape.item_bytes * tokens * (out + inner)
        return Work(flops=2 * tokens * out * inner, memory_bytes=read + 2 * torch.float32.itemsize * out * inner)

    contestants = against_torch(ours, plain)
    contestants = {name: Contestant(c.function, overwrites=("buffer",)) for name, c in contestants.items()}
    sizes = {"m": out, "n": inner, "k": tokens}
    return Case(name, inputs, contestants, work, "matmul", sizes, reference, ("forward",))


def _swiglu(
    shape: Shape, matmul_swiglu: Callable[[Tensor, Tensor], Tensor], product: Callable[[Tensor, Tensor], Tensor]
) -> Case:
    """Return the case of gate and up in one product; torch stores them before SwiGLU."""
    tokens, hidden, ffn = shape.seq, shape.model.hidden, shape.model.ffn

    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {"x": draw.normal(tokens, hidden), "weight": draw.normal(2 * ffn, hidden, scale=hidden**-0.5)}

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = (x @ weight.T).chunk(2, -1)
        return F.silu(gate) * up

    def by_faster_library(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = product(x, weight.T).chunk(2, -1)
        return F.silu(gate) * up

    def work(direction: Direction) -> Any:
        from tpkernels.work import activation_backward_work, activation_work, matmul_work

        item = shape.item_bytes
        if direction == "forward":
            return matmul_work(tokens, 2 * ffn, hidden, item) + activation_work(tokens, ffn, item, gated=True)
        dgrad, wgrad = matmul_work(tokens, hidden, 2 * ffn, item), matmul_work(2 * ffn, hidden, tokens, item)
        return activation_backward_work(tokens, ffn, item, gated=True) + dgrad + wgrad

    sizes = {"tokens": tokens, "hidden": hidden, "ffn": ffn}
    contestants, also = against_torch(matmul_swiglu, plain), by_faster_library if shape.device == "cpu" else None
    return Case("matmul_swiglu", inputs, contestants, work, "matmul", sizes, plain, also_torch=also)
