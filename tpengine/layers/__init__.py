"""Tensor-parallel layers: token-major, sequence-sharded activations x[T/tp, D]; usable inside any model.

linear/            column- and row-parallel layers, their products and weights
attention.py mlp.py norm.py   the other layers of a block
vocabulary/        embedding and loss, cut over the vocabulary
rows/              what rows are: sequences, packed documents, what follows on a cache of keys and values
dropout.py         masks that are the same in every layout
gradient_sink.py   where weight gradients go
collectives.py     the seam between layers and communication
replicated/        parameters that every tensor-parallel rank holds whole, and the norm that counts them once

Under torch.autocast layers are as nn.Linear is: products in its dtype, by weights that stay float32 and get float32
gradients; norms add a residual of another dtype. So are they under activation checkpointing (tpkernels.autocast).

Exact mode, which computes a layer shard by shard, is in model/exact.py.
"""

from tpengine.config import IGNORED_LABEL
from tpengine.layers.attention import Attention
from tpengine.layers.linear.layers import ColumnParallelLinear, RowParallelLinear
from tpengine.layers.linear.packed import PackedWeights
from tpengine.layers.mlp import SwiGLU
from tpengine.layers.norm import RMSNorm
from tpengine.layers.replicated.clip import clip_grad_norm_
from tpengine.layers.replicated.modules import check_replicated, replicate, sharded, summed
from tpengine.layers.rows.cache import KeyValueCache
from tpengine.layers.rows.documents import Documents
from tpengine.layers.vocabulary.embedding import VocabParallelEmbedding
from tpengine.layers.vocabulary.loss import vocab_parallel_cross_entropy

__all__ = [
    "IGNORED_LABEL",
    "Attention",
    "ColumnParallelLinear",
    "Documents",
    "KeyValueCache",
    "PackedWeights",
    "RMSNorm",
    "RowParallelLinear",
    "SwiGLU",
    "VocabParallelEmbedding",
    "check_replicated",
    "clip_grad_norm_",
    "replicate",
    "sharded",
    "summed",
    "vocab_parallel_cross_entropy",
]
