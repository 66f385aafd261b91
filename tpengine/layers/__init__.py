"""Tensor-parallel layers: token-major, sequence-sharded activations x[T/tp, D]; usable inside any model.

column.py row.py   column- and row-parallel layers, and their products; read column.py first
prepared_weights.py  who owns the memory of a weight, and the forms in which it is multiplied
experts.py routing.py  a mixture of experts: the networks, and which of them a token goes to
spread_experts.py row_buffers.py  the same, whole experts on several ranks, to which rows travel; room for them
chunked_experts.py  the same in exact mode: of each row the parts of all shards come back
bias.py            biases, and learned positions
attention.py mlp.py norm.py   the other layers of a block
scores.py          how scores are made: rotary positions, window, scale
query_scaling.py   queries that grow with their positions
width_norm.py      a norm of queries and keys over the heads of all ranks
torch_attention.py  attention by torch's backends, where they are taken
vocabulary.py      embedding and loss, cut over the vocabulary
token_values.py    what a loss may ask of logits that are cut so: log-probabilities, entropy, the whole
rows.py            what rows are: sequences, packed documents, what follows on a cache of keys and values
scaled.py          a tensor times a number, of which nothing is kept
whereabouts.py     what an error in a layer of experts says of where it was
balance.py         what routers of experts are told and tell: counts, the auxiliary loss
dropout.py         masks that are the same in every layout
gradient_sink.py   where weight gradients go
collectives.py     the seam between layers and communication
placement.py       how each parameter lies over tensor-parallel ranks: every layer says so of its own
replicated.py      sum what others hold whole, refuse what nothing sums, clip by a norm that counts everything once

Under torch.autocast layers are as nn.Linear is: products in its dtype, by weights that stay float32 and get float32
gradients; norms add a residual of another dtype. So are they under activation checkpointing (tpkernels.autocast).

Every layer is exported here, and not what token_values.py has. Exact mode, which computes a layer shard by shard, is in
model/exact.py.
"""

from tpkernels.exchange.communicator import Communicator

from tpengine.config import IGNORED_LABEL
from tpengine.layers.attention import Attention
from tpengine.layers.bias import LearnedPositions
from tpengine.layers.column import ColumnParallelLinear, PackedWeights
from tpengine.layers.dropout import Dropout, Position
from tpengine.layers.experts import MixtureOfExperts
from tpengine.layers.mlp import FeedForward, SwiGLU
from tpengine.layers.norm import LayerNorm, Norm, OffsetRMSNorm, RMSNorm
from tpengine.layers.placement import Placement, placements_of
from tpengine.layers.replicated import check_replicated, clip_grad_norm_, replicate, sharded, summed
from tpengine.layers.row import RowParallelLinear
from tpengine.layers.rows import Documents, KeyValueCache
from tpengine.layers.scores import Rotation, Scores
from tpengine.layers.spread_experts import SpreadExperts
from tpengine.layers.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tpengine.layers.width_norm import WidthNorm, norm_over_ranks

__all__ = [
    "IGNORED_LABEL",
    "Attention",
    "ColumnParallelLinear",
    "Communicator",
    "Documents",
    "Dropout",
    "FeedForward",
    "KeyValueCache",
    "LayerNorm",
    "LearnedPositions",
    "MixtureOfExperts",
    "Norm",
    "OffsetRMSNorm",
    "PackedWeights",
    "Placement",
    "Position",
    "RMSNorm",
    "Rotation",
    "RowParallelLinear",
    "Scores",
    "SpreadExperts",
    "SwiGLU",
    "VocabParallelEmbedding",
    "WidthNorm",
    "check_replicated",
    "clip_grad_norm_",
    "norm_over_ranks",
    "placements_of",
    "replicate",
    "sharded",
    "summed",
    "vocab_parallel_cross_entropy",
]
