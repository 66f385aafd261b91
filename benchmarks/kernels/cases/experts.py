"""Cases of `benchmarks.run kernels`: grouped products of experts, each direction a case, and experts as a whole.

A grouped product multiplies rows, sorted by expert, each by its expert's weight: torch's is
torch.nn.functional.grouped_mm, whose weight gradients are new tensors in the dtype of its operands. Ours adds them to
float32 buffers, as training does. The whole begins at tokens and their choice of experts, without the router; Liger has
it as one function. All tokens' choices are equally likely.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.cases.cases import Case, Contestant, Direction, Draw, Shape, against_torch, by_liger


def experts(shape: Shape) -> Sequence[Case]:
    """Grouped products forward, with SwiGLU, of dy, into weight gradients; and from tokens to tokens."""
    from tpkernels.ops.experts.grouped import grouped_matmul, grouped_wgrad_
    from tpkernels.ops.experts.grouped_swiglu import grouped_swiglu

    model, rows = shape.model, shape.seq * shape.model.top_k
    num, d, f = model.num_experts, model.hidden, model.expert_width
    sizes = {"tokens": shape.seq, "num_experts": num, "top_k": model.top_k, "hidden": d, "ffn": f}

    def offsets(draw: Draw) -> Tensor:
        chosen = draw.experts(num, model.top_k, shape.seq).flatten()
        counts = torch.bincount(chosen.long(), minlength=num)
        return F.pad(counts.cumsum(0), (1, 0)).int()

    def case(
        name: str,
        ours: Callable[..., Any],
        plain: Callable[..., Any],
        reference: Callable[..., Any],
        operands: Mapping[str, tuple[int, ...]],
        products: int = 1,
        **how: Any,
    ) -> Case:
        def inputs(draw: Draw) -> dict[str, Tensor]:
            found = {key: draw.normal(*of, scale=of[-1] ** -0.5, requires_grad=False) for key, of in operands.items()}
            if "buffer" in found:
                found["buffer"] = found["buffer"].to(torch.promote_types(shape.dtype, torch.float32))
            return found | {"offsets": offsets(draw)}

        def work(direction: Direction) -> Any:
            return _products_work(products, rows, f, d, num, shape.item_bytes)

        contestants = against_torch(ours, plain)
        contestants = {key: Contestant(of.function, **how) for key, of in contestants.items()}
        return Case(name, inputs, contestants, work, "matmul", sizes, reference, ("forward",))

    def by_torch(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        return F.grouped_mm(x, w.transpose(1, 2), offs=offsets[1:])

    def gradient_by_torch(dy: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        return F.grouped_mm(dy, w, offs=offsets[1:])

    def swiglu_by_torch(x: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor) -> Tensor:
        return F.silu(by_torch(x, w_gate, offsets)) * by_torch(x, w_up, offsets)

    def wgrad_by_torch(buffer: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        return buffer.add_(F.grouped_mm(dy.T, x, offs=offsets[1:]))

    of_forward = {"x": (rows, d), "w": (num, f, d)}
    return (
        case("grouped_matmul", grouped_matmul, by_torch, _products, of_forward),
        case(
            "grouped_matmul_dgrad",
            functools.partial(_transposed, grouped_matmul),
            gradient_by_torch,
            lambda dy, w, offsets: _products(dy, w.transpose(1, 2), offsets),
            {"dy": (rows, f), "w": (num, f, d)},
        ),
        case(
            "grouped_wgrad",
            grouped_wgrad_,
            wgrad_by_torch,
            _wgrads,
            {"buffer": (num, f, d), "dy": (rows, f), "x": (rows, d)},
            overwrites=("buffer",),
        ),
        case(
            "grouped_swiglu",
            grouped_swiglu,
            swiglu_by_torch,
            _swiglu,
            {"x": (rows, d), "w_gate": (num, f, d), "w_up": (num, f, d)},
            products=2,
        ),
        _whole(shape, sizes),
    )


def _whole(shape: Shape, sizes: Mapping[str, int]) -> Case:
    """Return the case of experts from tokens to tokens, with every gradient."""
    from tpkernels.ops.experts.grouped import grouped_matmul
    from tpkernels.ops.experts.grouped_swiglu import grouped_swiglu
    from tpkernels.ops.experts.order import sort_by_expert
    from tpkernels.ops.experts.rows import combine_rows, take_rows

    model = shape.model
    num, top_k, d, f = model.num_experts, model.top_k, model.hidden, model.expert_width

    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {
            "x": draw.normal(shape.seq, d),
            "w_gate_up": draw.normal(num, 2 * f, d, scale=d**-0.5),
            "w_down": draw.normal(num, d, f, scale=f**-0.5),
            "chosen": draw.experts(num, top_k, shape.seq),
            "weights": draw.normal(shape.seq, top_k),
        }

    def ours(x: Tensor, w_gate_up: Tensor, w_down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order, offsets = sort_by_expert(chosen, num)
        gate, up = w_gate_up.chunk(2, 1)
        h = grouped_swiglu(take_rows(x, order, top_k), gate, up, offsets)
        return combine_rows(grouped_matmul(h, w_down, offsets), order, weights)

    def plain(x: Tensor, w_gate_up: Tensor, w_down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        _, order = torch.sort(chosen.flatten(), stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=num).cumsum(0).int()
        gate, up = F.grouped_mm(x[order // top_k], w_gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), offs=ends)
        return _added(rows, order, weights)

    def reference(x: Tensor, w_gate_up: Tensor, w_down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        _, order = torch.sort(chosen.flatten(), stable=True)
        offsets = F.pad(torch.bincount(chosen.flatten(), minlength=num).cumsum(0), (1, 0))
        gate, up = _products(x[order // top_k], w_gate_up, offsets).chunk(2, -1)
        return _added(_products(F.silu(gate) * up, w_down, offsets), order, weights)

    def liger(
        apply: Callable[..., Any], x: Tensor, w_gate_up: Tensor, w_down: Tensor, chosen: Tensor, weights: Tensor
    ) -> Any:
        return apply(x, w_gate_up, w_down, chosen, weights)

    def work(direction: Direction) -> Any:
        return _products_work(3 if direction == "forward" else 6, shape.seq * top_k, f, d, num, shape.item_bytes)

    of_liger = by_liger(shape, "fused_moe", "LigerFusedMoEFunction", liger)
    return Case("experts", inputs, against_torch(ours, plain, of_liger), work, "matmul", sizes, reference)


def _transposed(product: Callable[..., Tensor], dy: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return product(dy, w, offsets, transposed=True)


def _products_work(number: int, rows: int, columns: int, inner: int, num_experts: int, item_bytes: int) -> Any:
    """Return the work of so many grouped products alike."""
    from tpkernels.work import Work

    moved = rows * (columns + inner) + num_experts * columns * inner
    return Work(number * 2 * rows * columns * inner, number * item_bytes * moved)


def _products(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """Return y[R, F], expert by expert."""
    parts = [rows @ of.T for rows, of in zip(_split(x, offsets), w, strict=True)]
    return torch.cat(parts)


def _swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor) -> Tensor:
    return F.silu(_products(x, w_gate, offsets)) * _products(x, w_up, offsets)


def _wgrads(buffer: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    parts = [of.T @ rows for of, rows in zip(_split(dy, offsets), _split(x, offsets), strict=True)]
    return buffer + torch.stack(parts).to(buffer.dtype)


def _split(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    return x.split(offsets.diff().tolist())


def _added(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return y[T, D]: the weighted rows of each token, of rows that are sorted by expert."""
    weighted = torch.empty_like(rows).index_copy(0, order, rows) * weights.reshape(-1, 1)
    return weighted.view(*weights.shape, -1).sum(1)
