"""The Llama-style transformer in stock torch modules, as a rival would write it, without any of tpengine's layers.

Names, shapes and equations are those of tpengine/layout/parameters.py and tpengine/model/transformer.py, so that both
engines can start from the same weights and must find the same losses. Parallelism is applied from outside: see
torch_rival.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpengine.config import ModelConfig


class Attention(nn.Module):
    """Causal grouped-query attention.

        y[B, S, D] = softmax(q k.T / sqrt(E), causal) v @ wo.T

    The number of heads is taken from the projections' outputs, which tensor parallelism makes narrower.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelConfig, seq_len: int) -> None:
        super().__init__()
        d, kv_size = model.hidden_size, model.num_kv_heads * model.head_size
        self.head_size = model.head_size
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, kv_size, bias=False)
        self.v_proj = nn.Linear(d, kv_size, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        angle = torch.arange(seq_len, dtype=torch.float64)[:, None] * model.rope_theta ** (
            -torch.arange(0, model.head_size, 2, dtype=torch.float64) / model.head_size
        )
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x[B, S, D] -> y[B, S, D]."""
        batch, seq = x.shape[:2]
        q, k, v = (p(x).view(batch, seq, -1, self.head_size).transpose(1, 2) for p in self._projections())
        q, k = self._rotate(q), self._rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        y: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return y

    def _projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj

    def _rotate(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * self.cos - high * self.sin, high * self.cos + low * self.sin), dim=-1)


class SwiGLU(nn.Module):
    """y[B, S, D] = (silu(x @ wg.T) * (x @ wu.T)) @ wd.T."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down_proj = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x[B, S, D] -> y[B, S, D]."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, model: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.self_attn = Attention(model, seq_len)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.mlp = SwiGLU(model)

    def forward(self, x: Tensor) -> Tensor:
        """x[B, S, D] -> y[B, S, D]."""
        x = x + self.self_attn(self.input_layernorm(x))
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class LlamaStage(nn.Module):
    """Layers [first, last) of the model, with embedding and head in their stages.

        first == 0:            tokens[B, S] -> x[B, S, D]
        last == num_layers:    x[B, S, D] -> logits[B, S, V]

    Args:
        model: sizes; the vocabulary is not padded.
        seq_len: S.
        layers: half-open range.
    """

    def __init__(self, model: ModelConfig, seq_len: int, layers: tuple[int, int]) -> None:
        super().__init__()
        first, last = layers
        self.is_first, self.is_last = first == 0, last == model.num_layers
        if self.is_first:
            self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(model, seq_len) for i in range(first, last)})
        if self.is_last:
            self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        self._is_tied = model.tie_embeddings
        self.tie()

    def tie(self) -> None:
        """Make the head the embedding, if the model says so; call it again after either was replaced."""
        if self._is_tied and self.is_first and self.is_last:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Tokens[B, S] or x[B, S, D] -> x[B, S, D] or logits[B, S, V]."""
        if self.is_first:
            x = self.embed_tokens(x)
        for block in self.layers.values():
            x = block(x)
        if self.is_last:
            x = self.lm_head(self.norm(x))
        return x
