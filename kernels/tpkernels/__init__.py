"""Operators of tensor-parallel transformers: usable alone, without the tpengine engine.

The public names load on first use (PEP 562), so that `tpkernels.work` stays free of torch and importing the
package never loads triton. What exists today is listed in `_HOME`; the README beside this package is its catalogue.
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
    # matmul, attention, rope, dropout, embedding, cross_entropy and linear_cross_entropy are imported from their
    # modules: here the modules have these names.
    "matmul_swiglu": "matmul",
    "attention_qkv": "attention",
    "rms_norm": "norm",
    "layer_norm": "norm",
    "add_rms_norm": "norm",
    "add_layer_norm": "norm",
    "rope_tables": "rope",
    "document_positions": "rope",
    "Llama3Scaling": "rope",
    "swiglu": "activation",
    "geglu": "activation",
    "gelu": "activation",
    "cross_entropy_partials": "cross_entropy",
    "combine_partials": "cross_entropy",
    "token_losses": "cross_entropy",
    "cross_entropy_gradient_": "cross_entropy",
    "embedding_backward_": "embedding",
    "adamw_": "adamw",
    "DropoutStream": "dropout",
    "keep_at": "dropout",
    "matmul_work": "work",
    "attention_work": "work",
    "all_gather_work": "work",
    "reduce_scatter_work": "work",
    "all_reduce_work": "work",
    "Work": "work",
    "tree_sum": "tree",
    "Communicator": "communicator",
    "all_gather_matmul": "fused.all_gather_matmul",
    "matmul_reduce_scatter": "fused.matmul_reduce_scatter",
    "matmul_all_reduce": "fused.matmul_all_reduce",
    "wgrad_": "wgrad",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tpkernels' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"tpkernels.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
