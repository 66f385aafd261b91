"""Operators of tensor-parallel transformers: usable alone, without the tpengine engine.

The public names load on first use (PEP 562), so that `tpkernels.work` stays free of torch and importing the
package never loads triton. What exists today is listed in `_HOME`; the README above this package is its catalogue.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "philox_4x32": "random",
    "random_words": "random",
    "uniform": "random",
    "normal": "random",
    "normal_block": "random",
    "matmul": "ops.matmul",
    "matmul_swiglu": "ops.matmul",
    "attention": "ops.attention",
    "attention_qkv": "ops.attention",
    "rms_norm": "ops.norm.operator",
    "layer_norm": "ops.norm.operator",
    "add_rms_norm": "ops.norm.operator",
    "add_layer_norm": "ops.norm.operator",
    "rope": "ops.rope",
    "document_positions": "ops.rope",
    "rope_tables": "ops.rope_tables",
    "LinearScaling": "ops.rope_tables",
    "Llama3Scaling": "ops.rope_tables",
    "LongRopeScaling": "ops.rope_tables",
    "YarnScaling": "ops.rope_tables",
    "swiglu": "ops.activation",
    "geglu": "ops.activation",
    "gelu": "ops.activation",
    "cross_entropy": "ops.cross_entropy.operator",
    "linear_cross_entropy": "ops.cross_entropy.linear",
    "cross_entropy_partials": "ops.cross_entropy.operator",
    "combine_partials": "ops.cross_entropy.operator",
    "token_losses": "ops.cross_entropy.operator",
    "cross_entropy_gradient_": "ops.cross_entropy.operator",
    "embedding": "ops.embedding",
    "embedding_backward_": "ops.embedding",
    "adamw_": "ops.adamw",
    "adamw_numbers": "ops.adamw",
    "square_sums": "ops.clip",
    "zero_all_": "ops.buffers",
    "scale_all_": "ops.buffers",
    "dropout": "ops.dropout",
    "DropoutStream": "ops.dropout",
    "keep_at": "ops.dropout",
    "route": "ops.experts.route",
    "Routing": "ops.experts.route",
    "choose": "ops.experts.choose",
    "sort_by_expert": "ops.experts.order",
    "take_rows": "ops.experts.rows",
    "combine_rows": "ops.experts.rows",
    "matmul_work": "work",
    "attention_work": "work",
    "all_gather_work": "work",
    "reduce_scatter_work": "work",
    "all_reduce_work": "work",
    "dispatch_work": "work_experts",
    "combine_work": "work_experts",
    "crossing_rows": "work_experts",
    "hottest_share": "work_experts",
    "Work": "work",
    "tree_sum": "exchange.tree",
    "Communicator": "exchange.communicator",
    "all_gather_matmul": "fused.all_gather_matmul",
    "matmul_reduce_scatter": "fused.matmul_reduce_scatter",
    "matmul_all_reduce": "fused.matmul_all_reduce",
    "Routes": "exchange.experts",
    "routes_of": "fused.experts",
    "dispatch": "fused.experts",
    "combine": "fused.experts",
    "wgrad_": "ops.matmul.wgrad",
    "grouped_matmul": "ops.experts.grouped",
    "grouped_swiglu": "ops.experts.grouped_swiglu",
    "grouped_wgrad_": "ops.experts.grouped",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tpkernels' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"tpkernels.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
