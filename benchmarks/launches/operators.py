"""What each operator launches: its launchers, called on tensors without memory, for every shape that is measured.

For use where launches are observed (tpkernels.launch.observed), not made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from tpkernels.exchange.copies import HostCopies
from tpkernels.exchange.device_arena import CONTROL_BYTES, DeviceArena
from tpkernels.fused.kernels.counts_kernel import launch_counts
from tpkernels.fused.kernels.gather_kernel import launch_fetch, launch_gather_matmul, launch_publish
from tpkernels.fused.kernels.rows_kernel import launch_return, launch_take
from tpkernels.fused.kernels.scatter_kernel import launch_matmul_scatter
from tpkernels.fused.kernels.slots import launch_sum_slots
from tpkernels.launch import cdiv
from tpkernels.ops.activation import launch_activation, launch_activation_backward
from tpkernels.ops.adamw import launch_adamw_
from tpkernels.ops.attention.backward import launch_attention_backward
from tpkernels.ops.attention.forward import launch_attention
from tpkernels.ops.attention.launch import Options, Sides, Tables
from tpkernels.ops.attention.prepare import Heads, Rotary, Weights
from tpkernels.ops.attention.prepare.backward import launch_prepare_backward
from tpkernels.ops.attention.prepare.forward import launch_prepare
from tpkernels.ops.buffers import launch_multiply_
from tpkernels.ops.clip import launch_judged, launch_square_sums
from tpkernels.ops.cross_entropy.kernel import launch_cross_entropy_gradient_, launch_cross_entropy_partials
from tpkernels.ops.dropout_kernel import launch_dropout
from tpkernels.ops.embedding import launch_embedding, launch_embedding_backward_
from tpkernels.ops.experts.choose import ChoiceRule
from tpkernels.ops.experts.choose_kernel import launch_choose, launch_choose_backward
from tpkernels.ops.experts.grouped_kernel import launch_grouped_matmul, launch_grouped_wgrad, launch_zero_rows
from tpkernels.ops.experts.grouped_swiglu_kernel import launch_grouped_swiglu
from tpkernels.ops.experts.order import launch_sort
from tpkernels.ops.experts.rows import (
    launch_add_rows,
    launch_combine_rows_backward,
    launch_take_rows,
    launch_weight_gradients,
)
from tpkernels.ops.matmul.kernel import launch_matmul
from tpkernels.ops.matmul.swiglu_kernel import launch_matmul_swiglu
from tpkernels.ops.norm.kernel import launch_norm, launch_norm_backward
from tpkernels.ops.rope import launch_rope
from tpkernels.symmetric.cuda_memory import VirtualMemory
from tpkernels.symmetric.wait_kernels import launch_wait

from benchmarks.harness.shapes import MODELS, SEQUENCES, TP, Model

DTYPES = (torch.bfloat16, torch.float32)


# Of llama_1b, which one GPU trains whole.
_WHOLE_WIDTH = 2048


class Sizes(NamedTuple):
    """For which dtypes of activations, models, and ranks of fused operators launches are made."""

    dtypes: Sequence[torch.dtype] = DTYPES
    models: Sequence[Model] = MODELS
    world: int = TP


EVERY = Sizes()


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm(sizes: Sizes = EVERY) -> None:
    for dtype in sizes.dtypes:
        # Of heads, of the model that a GPU trains whole, of ranks.
        widths = {size for model in sizes.models for size in (model.head_size, model.hidden)} | {_WHOLE_WIDTH}
        for width in sorted(widths):
            x = _empty(SEQUENCES[0] // TP, width, dtype=dtype)
            weight = x[0]
            for centered, residual in ((False, None), (False, x), (True, x)):
                bias = weight if centered else None
                _, total, mean, rstd = launch_norm(x, weight, bias, residual, 1e-5, centered)
                dtotal = None if residual is None else total
                launch_norm_backward(x, dtotal, x, weight, mean, rstd, 1, centered, centered)


def _cross_entropy(sizes: Sizes = EVERY) -> None:
    for dtype in sizes.dtypes:
        for model in sizes.models:
            logits = _empty(1024, model.vocabulary, dtype=dtype)
            labels = _empty(1024, dtype=torch.int64)
            partials = launch_cross_entropy_partials(logits, labels, 0, model.vocabulary)
            for label_smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-4)):
                launch_cross_entropy_gradient_(
                    logits,
                    labels,
                    partials[0],
                    partials[1],
                    partials[2],
                    TP * model.vocabulary,
                    0,
                    model.vocabulary,
                    label_smoothing,
                    z_loss,
                )


def _activation(sizes: Sizes = EVERY) -> None:
    for dtype in sizes.dtypes:
        for model in sizes.models:
            h = _empty(SEQUENCES[0], model.ffn, dtype=dtype)
            for kind in ("silu", "gelu", "gelu_tanh"):
                for gated in (False, True):
                    y = _empty(SEQUENCES[0], model.ffn * (1 + gated), dtype=dtype)
                    launch_activation(y, kind, gated)
                    launch_activation_backward(h, y, kind, gated)


def _rope(sizes: Sizes = EVERY) -> None:
    for dtype in sizes.dtypes:
        for model in sizes.models:
            table = _empty(SEQUENCES[0], model.head_size // 2, dtype=torch.float32)
            packed = _empty(SEQUENCES[0], dtype=torch.int32)
            qkv = _empty(SEQUENCES[0], model.heads + 2 * model.kv_heads, model.head_size, dtype=dtype)
            for x in qkv.split((model.heads, model.kv_heads, model.kv_heads), dim=1)[:2]:
                for interleaved in (False, True):
                    for positions in (None, packed):
                        launch_rope(x, table, table, positions, interleaved, False)


def _prepare_heads(sizes: Sizes = EVERY) -> None:
    """Launch for heads of several sizes, rotated whole, by positions, in part and not, normed and not.

    A kernel takes seconds to compile: the branches are all there, not all of their products.
    """
    model, dtype = sizes.models[0], sizes.dtypes[0]
    for size, is_normed, rotated in (
        (64, False, "whole"),
        (128, False, "interleaved"),
        (128, True, "placed"),
        (256, True, "part"),
        (80, True, "no"),
    ):
        # Partial rotation is of a quarter of the columns.
        table = _empty(SEQUENCES[0], size // (8 if rotated == "part" else 2), dtype=torch.float32)
        positions = _empty(SEQUENCES[0], dtype=torch.int32) if rotated == "placed" else None
        rotary = Rotary() if rotated == "no" else Rotary(table, table, positions)
        weight = _empty(size, dtype=dtype)
        weights = Weights(weight, weight) if is_normed else Weights()
        qkv = _empty(SEQUENCES[0], (model.heads + 2 * model.kv_heads) * size, dtype=dtype)
        heads = Heads(1, model.heads, model.kv_heads, rotated == "interleaved", False, 1e-6, 1.0)
        q, k, _ = launch_prepare(qkv, heads, rotary, weights, copies_v=not is_normed)
        launch_prepare_backward((q, k, k), qkv if is_normed else None, heads, rotary, weights)


def _embedding(sizes: Sizes = EVERY) -> None:
    rows = _empty(SEQUENCES[0], dtype=torch.int64)
    for dtype in sizes.dtypes:
        for model in sizes.models:
            weight = _empty(model.vocabulary, model.hidden, dtype=dtype)
            dy = launch_embedding(rows, weight)
            for buffer in (weight, weight.float()) if dtype != torch.float32 else (weight,):
                launch_embedding_backward_(buffer, rows, dy)


def _dropout(sizes: Sizes = EVERY) -> None:
    """Launch for whole rows, for a rank's columns, and for columns that begin within a Philox call."""
    for dtype in sizes.dtypes:
        for model in sizes.models:
            x = _empty(SEQUENCES[0], model.hidden, dtype=dtype)
            for columns, first_column in ((model.hidden, 0), (model.hidden // TP, model.hidden // TP), (1023, 1)):
                launch_dropout(x[:, :columns], 0.1, (0, 0), (0, 0), 0, first_column, model.hidden)


def _adamw(sizes: Sizes = EVERY) -> None:
    """Launch without and with copies of the masters, and, as the engine does, with a factor and the flag that skips.

    Tensors of which some begin at multiples of 16 bytes, as whole weights do, and some do not, as ZeRO's slices.
    """
    numbers, judged = _empty(2, 8, dtype=torch.float64), _empty(dtype=torch.float64)
    whole = _empty(1 << 26, dtype=torch.float32)
    masters = [whole, whole[1:]]
    for grads in (masters, [x.bfloat16() for x in masters]):
        for copies in ([], [x.bfloat16() for x in masters], [x.half() for x in masters]):
            for of_step in (None, judged):
                launch_adamw_(masters, masters, masters, grads, copies, numbers, of_step, of_step)


def _gradients(sizes: Sizes = EVERY) -> None:
    """Launch what is done to all gradients of a rank: sums of squares, what follows from them, clearing, scaling."""
    factor, loss = _empty(dtype=torch.float32), _empty(dtype=torch.float64)
    for dtype in sizes.dtypes:
        whole = _empty(1 << 26, dtype=dtype)
        for tensors in ([whole], [whole[1:]]):
            launch_square_sums(tensors, [0], 2)
            for of_pass in (None, factor):
                launch_multiply_(tensors, of_pass)
    launch_judged(_empty(300, dtype=torch.float64), loss, _empty(dtype=torch.bool), 1.0, 1.0, 1.0, 1.0)


def _attention(sizes: Sizes = EVERY) -> None:
    """Launch for head sizes of real models, with and without documents, rotation, a window and dropout."""
    for dtype in sizes.dtypes:
        for head in (64, 80, 96, 128, 256) if dtype == torch.bfloat16 else (64, 128):
            _attend(dtype, head, heads=8, kv_heads=1)
    for model in sizes.models:
        _attend(torch.bfloat16, model.head_size, model.heads, model.kv_heads)
    for causal in (True, False):
        _attend(torch.bfloat16, 128, 8, 1, causal=causal, window=1024)
    _attend(torch.bfloat16, 128, 8, 1, causal=False)
    _attend(torch.bfloat16, 128, 8, 1, packed=True)
    _attend(torch.bfloat16, 80, 8, 1, rate=0.1)
    # What the architectures of the engine launch: heads of these sizes, rotated, of all tokens or of a window.
    for dtype in sizes.dtypes:
        for head in (64, 80, 128, 256) if dtype == torch.bfloat16 else (64, 80, 128):
            for window in (0, 512):
                _attend(dtype, head, heads=8, kv_heads=2, window=window, rotated=True)


def _attend(
    dtype: torch.dtype,
    head: int,
    heads: int,
    kv_heads: int,
    causal: bool = True,
    window: int = 0,
    rotated: bool = False,
    packed: bool = False,
    rate: float = 0.0,
) -> None:
    seq = SEQUENCES[0]
    qkv = _empty(1, seq, heads + 2 * kv_heads, head, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    table = _empty(seq, head // 2, dtype=torch.float32) if rotated else None
    starts = _empty(9, dtype=torch.int32) if packed else None
    options = Options(causal, window, head**-0.5, False, rate, (0, 0, 0, 0, 0, heads) if rate else ())
    problem = (Tables(table, table), Sides(starts, starts), options)
    y, lse = launch_attention(q, k, v, *problem)
    launch_attention_backward(y, q, k, v, y, lse, (q, k, v), *problem)


def _matmul(sizes: Sizes = EVERY) -> None:
    """Launch forward, dgrad, wgrad of every projection; then every operand order, epilogue, kind of configuration."""
    tokens, few = SEQUENCES[0], 64
    for dtype in sizes.dtypes:
        for model in sizes.models:
            for out, inner in model.projections.values():
                x, dy = _empty(tokens, inner, dtype=dtype), _empty(tokens, out, dtype=dtype)
                weight = _empty(out, inner, dtype=dtype)
                _project(x, dy, weight)
            gate_up = _empty(2 * model.ffn, model.hidden, dtype=dtype)
            for keeps_y in (False, True):
                launch_matmul_swiglu(_empty(tokens, model.hidden, dtype=dtype), gate_up, keeps_y)
        _project(x, dy, weight, fixed=True)
        _project(x[:few], dy[:few], weight)
        launch_matmul(x[:256], weight.T)
        launch_matmul(x, weight.T, bias=dy[0], residual=dy)
        launch_matmul(dy.T, x, out=weight, accumulate=True)
        launch_matmul_swiglu(x, weight, True, fixed=True)
        launch_matmul_swiglu(x[:few], weight, False)
        for kind in ("gelu", "gelu_tanh"):
            launch_matmul_swiglu(x, weight, True, kind=kind)
        # Rows that begin anywhere, which neither TMA nor vectors can read; strides do not depend on numbers of tokens.
        a, b = _empty(few, inner + 1, dtype=dtype)[:, :-1], _empty(out, inner + 1, dtype=dtype)[:, :-1]
        by_columns = _empty(inner, few + 1, dtype=dtype)[:, :-1].T
        for left in (a, by_columns):
            launch_matmul(left, b.T)
            launch_matmul(left, b.T.contiguous(), out=_empty(few, out, dtype=torch.float32), accumulate=True)
        launch_matmul(by_columns.T.contiguous().T, weight.T)
        launch_matmul_swiglu(a, b, True)


def _project(x: Tensor, dy: Tensor, weight: Tensor, fixed: bool = False) -> None:
    """y = x @ weight.T, and its gradients, weight's accumulated in float32."""
    launch_matmul(x, weight.T, fixed=fixed)
    launch_matmul(dy, weight, fixed=fixed)
    launch_matmul(dy.T, x, out=weight.float(), accumulate=True, fixed=fixed)


def _routing(sizes: Sizes = EVERY) -> None:
    """Launch the routers of Qwen3-30B-A3B, Mixtral 8x7B and DeepSeek-V3, and what moves their rows.

    Logits are float32 whatever the activations are.
    """
    for num_experts, width, rule in (
        (128, 2048, ChoiceRule(8, normalize=True)),
        (128, 2048, ChoiceRule(8)),
        (8, 4096, ChoiceRule(2, normalize=True)),
        (256, 7168, ChoiceRule(8, "sigmoid", True, 2.5, 8, 4)),
    ):
        logits = _empty(SEQUENCES[0], num_experts, dtype=torch.float32)
        for bias in (None, logits[0]) if rule.scoring == "sigmoid" else (None,):
            experts, weights, _ = launch_choose(logits, bias, rule, 1e-20)
        launch_choose_backward(weights, logits, experts, weights, rule)
        order, _, places = launch_sort(experts, num_experts)
        for dtype in sizes.dtypes:
            x = _empty(SEQUENCES[0], width, dtype=dtype)
            xs = launch_take_rows(x, order, rule.k)
            for factors in (None, weights):
                launch_add_rows(xs, places, factors, rule.k)
            launch_combine_rows_backward(x, xs, places, weights)
            launch_weight_gradients(x, xs, places, weights)


# D, F, experts and choices of Qwen3-30B-A3B (arXiv 2505.09388, table 2), undivided.
_QWEN3_30B_A3B = (2048, 768, 128, 8)


def _grouped(sizes: Sizes = EVERY) -> None:
    """Launch what an expert does, forward and backward; then few rows, fixed tiles, and rows that lie anyhow."""
    width, ffn, experts, choices = _QWEN3_30B_A3B
    offsets = _empty(experts + 1, dtype=torch.int32)
    for dtype in sizes.dtypes:
        w, down = _empty(experts, ffn, width, dtype=dtype), _empty(experts, width, ffn, dtype=dtype)
        for rows, fixed in ((SEQUENCES[0] * choices, False), (2 * experts, False), (SEQUENCES[0] * choices, True)):
            x, y = _empty(rows, width, dtype=dtype), _empty(rows, 2 * ffn, dtype=dtype)
            h = _empty(rows, ffn, dtype=dtype)
            for keeps_y in (False, True):
                launch_grouped_swiglu(x, w, w, offsets, keeps_y, fixed=fixed)
            dgate, dup = y.chunk(2, dim=1)
            launch_grouped_matmul(h, down, offsets, fixed=fixed)
            launch_grouped_matmul(x, down, offsets, transposed=True, fixed=fixed)
            launch_grouped_matmul(dgate, w, offsets, transposed=True, also=(dup, w), fixed=fixed)
            for buffer_dtype in (torch.float32, dtype):
                launch_grouped_wgrad(_empty(*w.shape, dtype=buffer_dtype), dgate, x, offsets, fixed=fixed)
        # Rows that begin anywhere, which neither TMA nor vectors can read.
        odd_x, odd_w = _empty(rows, width + 1, dtype=dtype)[:, :-1], _empty(experts, ffn + 1, width + 1, dtype=dtype)
        launch_grouped_swiglu(odd_x, w, w, offsets, True)
        launch_grouped_matmul(odd_x, w, offsets)
        launch_grouped_matmul(_empty(rows, ffn + 1, dtype=dtype), odd_w, offsets, transposed=True)
        launch_grouped_wgrad(w.float(), h, odd_x, offsets)
        launch_zero_rows(h, offsets)


def _arena(world: int) -> DeviceArena:
    """Return the arena of the first of `world` ranks, as far as launches need it; its data has addresses, no memory."""
    memory = VirtualMemory.allocate(world, CONTROL_BYTES, "cpu")[0]
    record = torch.zeros(8, dtype=torch.int32)
    return DeviceArena(memory, record, HostCopies(), 1 << 30, "of no ranks", range(world), timeout_seconds=1.0)


def _expert_rows(sizes: Sizes = EVERY) -> None:
    """Launch what moves rows to experts and back between ranks; also rows that are no multiple of 16 bytes."""
    width, _, num_experts, k = _QWEN3_30B_A3B
    arena, tokens = _arena(sizes.world), SEQUENCES[0] // sizes.world
    bound = sizes.world * tokens * k
    order, weights = _empty(tokens * k, dtype=torch.int32), _empty(tokens, k, dtype=torch.float32)
    for experts in (512, 8, num_experts):
        segments, offsets, spilled = launch_counts(_empty(experts, dtype=torch.int32), bound, arena, 1, 7)
    for dtype in sizes.dtypes:
        for columns in (width, width + 1):
            x, rows = _empty(tokens, columns, dtype=dtype), _empty(bound, columns, dtype=dtype)
            for factors in (None, weights):
                launch_take(rows, x, order, factors, segments, offsets, arena, k, 1 << 28, 1 << 29, 1, 7)
            launch_return(rows, tokens * k, segments, offsets, spilled, arena, 1, 7)


def _all_gather_matmul(sizes: Sizes = EVERY) -> None:
    """Launch forward of the column-parallel matmuls, and dx of the row-parallel ones; small batches are pushed."""
    arena = _arena(sizes.world)
    launch_wait(arena, 1, 1, 1, 7)
    for dtype in sizes.dtypes:
        for model in sizes.models:
            for name in ("qkv", "gate_up", "down", "out"):
                rows, columns = model.projections[name]
                weight = _empty(rows, columns, dtype=dtype)
                matrix = weight.T if name in ("qkv", "gate_up") else weight
                for tokens, how in ((SEQUENCES[0], "pull"), (SEQUENCES[0], "there"), (512, "push")):
                    x = _empty(tokens // sizes.world, matrix.shape[0], dtype=dtype)
                    y, full = (_empty(tokens, columns, dtype=dtype) for columns in (matrix.shape[1], x.shape[1]))
                    bias = matrix[0].contiguous() if name == "qkv" else None
                    launch_publish(x, arena, 1, 7)
                    launch_fetch(full, arena, tokens, 0, len(x), 1, 1, 7, keep_own=False)
                    split_rows = 256 * cdiv(len(x), 256)
                    launch_gather_matmul(
                        y, x, y, x.numel(), matrix, bias, arena, tokens, 0, len(x), split_rows, 1, 7, how
                    )


def _matmul_reduce_scatter(sizes: Sizes = EVERY) -> None:
    """Launch forward of the row-parallel matmuls, and dx of the column-parallel ones, also for two weights at once."""
    arena = _arena(sizes.world)
    for dtype in sizes.dtypes:
        for model in sizes.models:
            for name in ("qkv", "gate_up", "down", "out"):
                rows, columns = model.projections[name]
                weight = _empty(rows, columns, dtype=dtype)
                matrix = weight.T if name in ("down", "out") else weight
                for tokens in (SEQUENCES[0], 512):
                    x = _empty(tokens, matrix.shape[0], dtype=dtype)
                    y = _empty(tokens // sizes.world, matrix.shape[1], dtype=dtype)
                    addend = _empty(tokens, matrix.shape[1], dtype=dtype)
                    for terms, added, bias in (([(x, matrix)], None, None), (2 * [(x, matrix)], addend, y[0])):
                        launch_matmul_scatter(y, terms, added, bias, arena, tokens, 0, len(y), y.numel(), 1, 7)
                    for bias in (None, y[0]):
                        launch_sum_slots(y, y, bias, arena, y.numel(), 1)


LAUNCHES: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "activation": _activation,
        "all_gather_matmul": _all_gather_matmul,
        "matmul_reduce_scatter": _matmul_reduce_scatter,
        "attention": _attention,
        "cross_entropy": _cross_entropy,
        "dropout": _dropout,
        "expert_rows": _expert_rows,
        "grouped": _grouped,
        "matmul": _matmul,
        "norm": _norm,
        "prepare_heads": _prepare_heads,
        "embedding": _embedding,
        "adamw": _adamw,
        "gradients": _gradients,
        "rope": _rope,
        "routing": _routing,
    }
)
