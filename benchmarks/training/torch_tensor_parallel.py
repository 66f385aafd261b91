"""The rival's tensor parallelism: which of torch's parallel styles each module uses."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.training.contestants import RivalOptions
from benchmarks.training.torch_model import LlamaStage


def tensor_parallelise(model: LlamaStage, mesh: DeviceMesh, options: RivalOptions) -> None:
    """Cut a stage over `mesh` in place, as torchtitan's Llama: activations between blocks are plain local tensors.

    "sequence": x[B, S/tp, D], norms on this rank's tokens, one gather before and one reduce-scatter after each pair of
    matmuls. "replicated": x[B, S, D] on every rank, norms repeated, one all-reduce after each pair.
    """
    cut = options.tensor_parallel == "sequence"
    between = Shard(1) if cut else Replicate()
    for block in model.layers.values():
        gather = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        column, row = ColwiseParallel(), RowwiseParallel(output_layouts=between)
        plan: dict[str, Any] = {
            "self_attn": gather,
            "self_attn.q_proj": column,
            "self_attn.k_proj": column,
            "self_attn.v_proj": column,
            "self_attn.o_proj": row,
            "mlp": gather,
            "mlp.gate_proj": column,
            "mlp.up_proj": column,
            "mlp.down_proj": row,
        }
        if cut:
            plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        parallelize_module(block, mesh, plan, src_data_rank=None)
    ends: dict[str, Any] = {}
    if model.is_first:
        ends["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if model.is_last:
        if cut:
            ends["norm"] = SequenceParallel()
        is_parallel = options.loss == "parallel"
        ends["lm_head"] = ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if is_parallel else Replicate(),
            use_local_output=not is_parallel,
        )
    parallelize_module(model, mesh, ends, src_data_rank=None)
    model.tie()
