"""Cases of `benchmarks.run kernels`, operator by operator; attention's and matmuls' are in files of their own.

Each has plain torch as one would write it: it is a contestant, compiled it is another, and in float64 it is the
reference. Liger's functions have the arguments of `apply`, so they are called by position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.shapes import TP
from benchmarks.kernels.cases.cases import (
    OURS,
    TORCH,
    Case,
    Contestant,
    Direction,
    Draw,
    Shape,
    against_torch,
    by_liger,
)

_EPS = 1e-5
_DROPOUT = 0.1


def norm(shape: Shape) -> Sequence[Case]:
    """Return RMSNorm, with and without adding a residual, and LayerNorm, on a sequence-sharded rank's rows."""
    from tpkernels.ops.norm.operator import add_rms_norm, layer_norm, rms_norm

    rows, columns = max(1, shape.seq // TP), shape.model.hidden

    def plain_rms(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, _EPS)

    def plain_add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, total.shape[-1:], weight, _EPS), total

    def plain_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, _EPS)

    def case(ours: Callable[..., Any], plain: Callable[..., Any], names: str, liger: tuple[str, str]) -> Case:
        centered, residual = "bias" in names.split(), "residual" in names.split()
        # eps, offset of the weight, rounding as Hugging Face's Llama, and not over dy.
        last = (_EPS,) if centered else (_EPS, 0.0, "llama", False)

        def inputs(draw: Draw) -> dict[str, Tensor]:
            return {n: draw.normal(*((rows,) if n in ("x", "residual") else ()), columns) for n in names.split()}

        def work(direction: Direction) -> Any:
            from tpkernels.work import norm_backward_work, norm_work

            function = norm_work if direction == "forward" else norm_backward_work
            return function(rows, columns, shape.item_bytes, residual=residual, centered=centered)

        of_liger = by_liger(shape, *liger, lambda apply, **tensors: apply(*tensors.values(), *last))
        contestants = against_torch(functools.partial(ours, eps=_EPS), plain, of_liger)
        return Case(ours.__name__, inputs, contestants, work, "copy", {"rows": rows, "columns": columns}, plain)

    return (
        case(rms_norm, plain_rms, "x weight", ("rms_norm", "LigerRMSNormFunction")),
        case(
            add_rms_norm,
            plain_add_rms,
            "x residual weight",
            ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"),
        ),
        case(layer_norm, plain_layer, "x weight bias", ("layer_norm", "LigerLayerNormFunction")),
    )


def rope(shape: Shape) -> Sequence[Case]:
    """Return queries and keys of one sequence rotated, as in every layer."""
    from tpkernels.ops.rope import rope as rotate

    model, tokens = shape.model, shape.seq
    size = model.head_size

    def inputs(draw: Draw) -> dict[str, Tensor]:
        q, k = (draw.normal(tokens, heads, size) for heads in (model.heads, model.kv_heads))
        frequencies = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(tokens)[:, None] * frequencies
        return {"q": q, "k": k, "cos": angles.cos().float().to(q.device), "sin": angles.sin().float().to(q.device)}

    def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)

    made: dict[tuple[object, ...], tuple[Tensor, ...]] = {}

    def full_width(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the rivals' tables, made once as a model makes them for all layers, outside the timed calls."""
        key = (cos.data_ptr(), cos.dtype, cos.device, dtype)
        if key not in made:
            made[key] = tuple(torch.cat((t, t), -1)[:, None].to(dtype) for t in (cos, sin))
        return made[key]

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Rotate as Hugging Face's Llama, whose tables have the activations' dtype."""
        full_cos, full_sin = full_width(cos, sin, q.dtype)
        halves = (t.chunk(2, -1) for t in (q, k))
        turned = (torch.cat((-second, first), -1) for first, second in halves)
        return tuple(t * full_cos + other * full_sin for t, other in zip((q, k), turned, strict=True))

    def liger(apply: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        full_cos, full_sin = (t.transpose(0, 1) for t in full_width(cos, sin, cos.dtype))
        rotated = apply(q[None].transpose(1, 2), k[None].transpose(1, 2), full_cos, full_sin)
        return tuple(t.transpose(1, 2)[0] for t in rotated)

    def work(direction: Direction) -> Any:
        from tpkernels.work import rope_work

        return rope_work(tokens, model.heads + model.kv_heads, size, shape.item_bytes)

    in_place = {"overwrites": ("q", "k"), "overwrites_slopes": True}
    of_liger = by_liger(shape, "rope", "LigerRopeFunction", liger, **in_place)
    sizes = {"tokens": tokens, "heads": model.heads, "kv_heads": model.kv_heads, "head_size": size}
    return (Case("rope", inputs, against_torch(ours, plain, of_liger), work, "copy", sizes, plain),)


def activation(shape: Shape) -> Sequence[Case]:
    """Return SwiGLU and GEGLU of gate and up side by side, as one matmul writes them, and GELU."""
    from tpkernels.ops.activation import geglu, gelu, swiglu

    tokens, features = shape.seq, shape.model.ffn

    def plain_swiglu(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    def plain_geglu(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def plain_gelu(y: Tensor) -> Tensor:
        return F.gelu(y)

    def case(
        name: str, ours: Callable[..., Any], plain: Callable[..., Any], liger: Contestant | None, gated: bool
    ) -> Case:
        def work(direction: Direction) -> Any:
            from tpkernels.work import activation_backward_work, activation_work

            function = activation_work if direction == "forward" else activation_backward_work
            return function(tokens, features, shape.item_bytes, gated=gated)

        def inputs(draw: Draw) -> dict[str, Tensor]:
            return {"y": draw.normal(tokens, (1 + gated) * features)}

        sizes = {"tokens": tokens, "ffn": features}
        return Case(name, inputs, against_torch(ours, plain, liger), work, "copy", sizes, plain)

    of_swiglu = by_liger(shape, "swiglu", "LigerFusedGateUpSiLUMulFunction", lambda apply, y: apply(y, False))
    # Liger's takes two tensors, and copies the halves.
    of_geglu = by_liger(shape, "geglu", "LigerGELUMulFunction", lambda apply, y: apply(*y.chunk(2, -1)))
    return (
        case("swiglu", swiglu, plain_swiglu, of_swiglu, True),
        case("geglu_tanh", functools.partial(geglu, approximate="tanh"), plain_geglu, of_geglu, True),
        case("gelu", gelu, plain_gelu, None, False),
    )


def dropout(shape: Shape) -> Sequence[Case]:
    """Return dropout of a sequence-sharded rank's rows. torch's mask has other random numbers, so it is not checked."""
    from tpkernels.ops.dropout import DropoutStream, dropout_reference
    from tpkernels.ops.dropout import dropout as by_coordinates

    rows, columns = max(1, shape.seq // TP), shape.model.hidden
    stream = DropoutStream(_DROPOUT, seed=0, site="layer 0", step=1, microbatch=0)

    def work(direction: Direction) -> Any:
        from tpkernels.work import Work

        return Work(flops=rows * columns, memory_bytes=2 * shape.item_bytes * rows * columns)

    def plain(x: Tensor) -> Tensor:
        return F.dropout(x, _DROPOUT)

    contestants = against_torch(lambda x: by_coordinates(x, stream), plain)
    unchecked = {n: Contestant(c.function, is_checked=n == OURS) for n, c in contestants.items()}
    sizes = {"rows": rows, "columns": columns}

    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {"x": draw.normal(rows, columns)}

    def reference(x: Tensor) -> Tensor:
        return dropout_reference(x, stream, 0, 0, columns)

    return (Case("dropout", inputs, unchecked, work, "copy", sizes, reference),)


def embedding(shape: Shape) -> Sequence[Case]:
    """Return the lookup in a rank's rows of the table, with all tokens, some of them much more frequent than others."""
    from tpkernels.ops.embedding import embedding as look_up

    tokens, model = shape.seq, shape.model

    def plain(rows: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(rows, weight)

    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {"rows": draw.tokens(model.vocabulary, tokens), "weight": draw.normal(model.vocabulary, model.hidden)}

    def work(direction: Direction) -> Any:
        from tpkernels.work import embedding_backward_work, embedding_work

        if direction == "forward":
            return embedding_work(tokens, model.hidden, shape.item_bytes)
        return embedding_backward_work(tokens, model.vocabulary, model.hidden, shape.item_bytes)

    sizes = {"tokens": tokens, "vocabulary": model.vocabulary, "hidden": model.hidden}
    return (Case("embedding", inputs, against_torch(look_up, plain), work, "copy", sizes, plain),)


class _Made(torch.autograd.Function):
    """Makes a leaf look like the output of an operator, in the same memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def cross_entropy(shape: Shape) -> Sequence[Case]:
    """Return each token's loss, with a rank's columns as if they were the vocabulary."""
    from tpkernels.ops.cross_entropy.operator import cross_entropy as losses_of

    tokens, vocabulary = shape.seq, shape.model.vocabulary

    def plain(logits: Tensor, labels: Tensor) -> Tensor:
        """Compute in float32 at least, as in training."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, labels, reduction="none")

    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {"logits": draw.normal(tokens, vocabulary), "labels": draw.tokens(vocabulary, tokens)}

    def work(direction: Direction) -> Any:
        from tpkernels.work import cross_entropy_gradient_work, cross_entropy_work

        function = cross_entropy_work if direction == "forward" else cross_entropy_gradient_work
        return function(tokens, vocabulary, shape.item_bytes)

    def ours(logits: Tensor, labels: Tensor) -> Tensor:
        """Take logits that an operator has made, as in a model: a leaf would be copied before it is overwritten."""
        return losses_of(_Made.apply(logits), labels)

    def liger(apply: Callable[..., Any], logits: Tensor, labels: Tensor) -> Any:
        losses = apply(logits, labels, None, -100, 0.0, 0.0, "none")[0]
        return losses.to(torch.promote_types(logits.dtype, torch.float32))

    # Liger computes the gradient in its forward pass, so neither half can be compared. It rounds losses to the logits'
    # dtype: in 16 bits that is another result than torch's, and is not checked.
    how = {"overwrites": ("logits",), "directions": ("both",), "is_checked": shape.dtype == torch.float32}
    of_liger = by_liger(shape, "cross_entropy", "LigerCrossEntropyFunction", liger, **how)
    contestants = against_torch(ours, plain, of_liger, overwrites=("logits",))
    sizes = {"tokens": tokens, "vocabulary": vocabulary}
    return (Case("cross_entropy", inputs, contestants, work, "copy", sizes, plain),)


def linear_cross_entropy(shape: Shape) -> Sequence[Case]:
    """Return the mean loss from the last layer's rows on. Memory matters besides time: plain torch keeps the logits."""
    from tpkernels.ops.cross_entropy.linear import linear_cross_entropy as fused

    tokens, model = shape.seq, shape.model

    def ours(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return fused(x, weight, labels, 1 / tokens)

    def plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = x @ weight.T
        return F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), labels)

    def liger(apply: Callable[..., Any], x: Tensor, weight: Tensor, labels: Tensor) -> Any:
        """Sum over chunks in float32, as ours does: sums in 16 bits would be another result."""
        return apply(x, weight, labels, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)[0]

    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {
            "x": draw.normal(tokens, model.hidden),
            "weight": draw.normal(model.vocabulary, model.hidden, scale=model.hidden**-0.5),
            "labels": draw.tokens(model.vocabulary, tokens),
        }

    def work(direction: Direction) -> Any:
        from tpkernels.work import linear_cross_entropy_backward_work, linear_cross_entropy_work

        function = linear_cross_entropy_work if direction == "forward" else linear_cross_entropy_backward_work
        return function(tokens, model.hidden, model.vocabulary, shape.item_bytes)

    of_liger = by_liger(shape, "fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", liger)
    contestants = against_torch(ours, plain, of_liger)
    sizes = {"tokens": tokens, "hidden": model.hidden, "vocabulary": model.vocabulary}
    return (Case("linear_cross_entropy", inputs, contestants, work, "matmul", sizes, plain, ("both",)),)


def adamw(shape: Shape) -> Sequence[Case]:
    """Return one step on a flat shard of seq * hidden / tp elements; no shape of the model determines the length.

    16-bit dtypes include the parameters' copy. torch's fused step, as training calls it, needs a pass for the copy, and
    another one for the gradient, since it takes only one dtype.
    """
    from torch.optim.adamw import adamw as by_torch
    from tpkernels.ops.adamw import adamw_, adamw_numbers

    elements = max(1, shape.seq * shape.model.hidden // TP)
    is_narrow = shape.dtype != torch.float32
    numbers: dict[str, Any] = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    step = 10
    row = torch.tensor([adamw_numbers(step=step, **numbers)], dtype=torch.float64, device=shape.device)

    def inputs(draw: Draw) -> dict[str, Tensor]:
        normal = functools.partial(draw.normal, elements, requires_grad=False)
        tensors = {n: normal(dtype=torch.float32, scale=scale) for n, scale in (("master", 1.0), ("exp_avg", 0.1))}
        tensors["exp_avg_sq"] = normal(dtype=torch.float32, scale=0.1).square_()
        tensors["grad"] = normal()
        return tensors | ({"parameter": tensors["master"].to(shape.dtype)} if is_narrow else {})

    def states(tensors: dict[str, Tensor]) -> list[Tensor]:
        return [tensor for name, tensor in tensors.items() if name != "grad"]

    def ours(**tensors: Any) -> list[Tensor]:
        copies = [tensors["parameter"]] if is_narrow else []
        master, exp_avg, exp_avg_sq, grad = ([tensors[n]] for n in ("master", "exp_avg", "exp_avg_sq", "grad"))
        adamw_(master, exp_avg, exp_avg_sq, grad, row, parameters=copies)
        return states(tensors)

    def fused(**tensors: Tensor) -> list[Tensor]:
        master = tensors["master"]
        exp_avgs, exp_avg_sqs = ([tensors[name]] for name in ("exp_avg", "exp_avg_sq"))
        steps = [torch.full((), step - 1.0, dtype=torch.float32, device=master.device)]
        grads = [tensors["grad"].to(master.dtype)]
        by_torch(
            [master], grads, exp_avgs, exp_avg_sqs, [], steps, fused=True, amsgrad=False, maximize=False, **numbers
        )
        if is_narrow:
            tensors["parameter"].copy_(master)
        return states(tensors)

    def plain(**tensors: Tensor) -> list[Tensor]:
        master, exp_avg, exp_avg_sq = (tensors[name] for name in ("master", "exp_avg", "exp_avg_sq"))
        grad = tensors["grad"].to(master.dtype)
        beta1, beta2, lr = numbers["beta1"], numbers["beta2"], numbers["lr"]
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(numbers["eps"])
        master.mul_(1 - lr * numbers["weight_decay"])
        master.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
        if is_narrow:
            tensors["parameter"].copy_(master)
        return states(tensors)

    def work(direction: Direction) -> Any:
        from tpkernels.work import adamw_work

        return adamw_work(elements, shape.item_bytes, shape.item_bytes if is_narrow else 0)

    overwrites = ("master", "exp_avg", "exp_avg_sq", "parameter")
    contestants = against_torch(ours, plain) | {TORCH: Contestant(fused)}
    contestants = {n: Contestant(c.function, overwrites) for n, c in contestants.items()}
    sizes = {"elements": elements}
    return (Case("adamw", inputs, contestants, work, "copy", sizes, plain, ("forward",)),)
