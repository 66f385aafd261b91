"""Tensor-parallel layers: token-major, sequence-sharded activations x[T/tp, D]; usable inside any model.

linear.py attention.py mlp.py norm.py embedding.py loss.py   the layers of a transformer
bias.py            biases, and learned positions
cache.py           keys and values of earlier tokens, for generation
documents.py       documents packed into a micro-batch: where each begins
dropout.py         masks that are the same in every layout
gradient_sink.py   where weight gradients go
collectives.py     the seam between layers and communication
replicated/        parameters that every tensor-parallel rank holds whole, and the norm that counts them once

Exact mode, which computes a layer shard by shard, is in model/exact.py.
"""

from tpengine.config import IGNORED_LABEL
from tpengine.layers.attention import Attention
from tpengine.layers.cache import KeyValueCache
from tpengine.layers.documents import Documents
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.linear import ColumnParallelLinear, PackedWeights, RowParallelLinear
from tpengine.layers.loss import vocab_parallel_cross_entropy
from tpengine.layers.mlp import SwiGLU
from tpengine.layers.norm import RMSNorm
from tpengine.layers.replicated.clip import clip_grad_norm_
from tpengine.layers.replicated.modules import check_replicated, replicate, sharded, summed

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
