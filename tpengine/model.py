"""The transformer: a block, and the slice of layers that one pipeline stage holds.

The modules' parameter names are those of the table in parameters.py; `initialise` fills them from it, each element a
function of (seed, parameter name, global index), so that every layout starts from the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from tpkernels.random import normal_block

from tpengine.collectives import Communicator
from tpengine.config import ModelConfig
from tpengine.gradients import GradientSink
from tpengine.layers import Attention, ColumnParallelLinear, RMSNorm, SwiGLU, VocabParallelEmbedding
from tpengine.parameters import ParameterSpec, stage_specs


class Block(nn.Module):
    """One pre-norm transformer block.

        x = x + attention(norm(x));  y = x + mlp(norm(x))          all of them [T/tp, D]

    Args:
        model: sizes.
        tp: the tp ranks.
        replicas: the tp ranks that share a KV head, if kv heads < tp.
        sink, dtype, device: as ColumnParallelLinear.
    """

    def __init__(
        self,
        model: ModelConfig,
        tp: Communicator,
        *,
        replicas: Communicator | None = None,
        sink: GradientSink | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        d = model.hidden_size
        self.input_layernorm = RMSNorm(d, tp, eps=model.norm_eps, sink=sink, dtype=dtype, device=device)
        self.self_attn = Attention(
            d,
            model.num_heads,
            model.num_kv_heads,
            tp,
            replicas=replicas,
            rope_theta=model.rope_theta,
            sink=sink,
            dtype=dtype,
            device=device,
        )
        self.post_attention_layernorm = RMSNorm(d, tp, eps=model.norm_eps, sink=sink, dtype=dtype, device=device)
        self.mlp = SwiGLU(d, model.ffn_size, tp, sink=sink, dtype=dtype, device=device)

    def forward(self, x: Tensor, seq: int) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D], sequences of `seq` tokens."""
        x = x + self.self_attn(self.input_layernorm(x), seq)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Transformer(nn.Module):
    """Layers [first, last) of a Llama-style transformer: the whole model, or what one stage holds of it.

        first == 0:            tokens[T] -> embedding -> x[T/tp, D]
        blocks:                x[T/tp, D] -> x[T/tp, D]
        last == num_layers:    x[T/tp, D] -> norm -> logits[T, V/tp]

    Args:
        model: sizes of the whole model.
        tp: the tp ranks.
        layers: half-open range of layers; default all.
        replicas, sink, dtype, device: as Block.

    Attributes:
        specs: the table of the parameters held here, by name.

    The weights are uninitialised: call `initialise`.
    """

    def __init__(
        self,
        model: ModelConfig,
        tp: Communicator,
        *,
        layers: tuple[int, int] | None = None,
        replicas: Communicator | None = None,
        sink: GradientSink | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.model, self.tp = model, tp
        first, last = layers or (0, model.num_layers)
        self.specs: dict[str, ParameterSpec] = {spec.name: spec for spec in stage_specs(model, tp.size, first, last)}
        vocab = model.padded_vocab_size(tp.size)
        d = model.hidden_size
        is_first, is_last = first == 0, last == model.num_layers
        if is_first or (is_last and model.tie_embeddings):
            self.embed_tokens = VocabParallelEmbedding(vocab, d, tp, sink=sink, dtype=dtype, device=device)
        self.layers = nn.ModuleDict(
            {
                str(i): Block(model, tp, replicas=replicas, sink=sink, dtype=dtype, device=device)
                for i in range(first, last)
            }
        )
        if is_last:
            self.norm = RMSNorm(d, tp, eps=model.norm_eps, sink=sink, dtype=dtype, device=device)
            self.lm_head = ColumnParallelLinear(d, vocab, tp, sink=sink, dtype=dtype, device=device)
            if model.tie_embeddings:
                self.lm_head.weight = self.embed_tokens.weight
        self.is_first, self.is_last = is_first, is_last
        self._check_against_table()

    def forward(self, x: Tensor, seq: int) -> Tensor:
        """Tokens [T] or x[T/tp, D] -> x[T/tp, D] or logits[T, V/tp]; T consists of sequences of `seq` tokens."""
        if self.is_first:
            x = self.embed_tokens(x)
        for block in self.layers.values():
            x = block(x, seq)
        if self.is_last:
            x = self.lm_head(self.norm(x))
        return x

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the weights: ones for norms, normal_block(seed, name, ...) for matrices, zeros for padding rows."""
        for name, parameter in self.named_parameters():
            spec = self.specs[name]
            offset, size = spec.block(self.tp.size, self.tp.rank)
            if spec.init_std is None:
                parameter.fill_(1.0)
                continue
            parameter.copy_(
                normal_block(
                    seed,
                    name,
                    spec.shape,
                    offset,
                    size,
                    std=spec.init_std,
                    dtype=parameter.dtype,
                    device=parameter.device,
                )
            )
            if spec.valid_rows is not None:
                parameter[max(spec.valid_rows - offset[0], 0) :] = 0

    def prepare(self, num_tokens: int) -> None:
        """Bring the weights into the layout their products read fastest; used until a weight changes.

        Args:
            num_tokens: of a micro-batch, all tp ranks'.

        Memory: on CPUs where it helps (tpkernels.host_gemm), two more copies of the matrices.
        """
        for layer in self._matmuls():
            layer.prepare(num_tokens)

    def release(self) -> None:
        """Give the prepared copies' memory back."""
        for layer in self._matmuls():
            layer.release()

    def _matmuls(self) -> Iterator[Attention | SwiGLU | ColumnParallelLinear]:
        for module in self.modules():
            if isinstance(module, Attention | SwiGLU) or module is getattr(self, "lm_head", None):
                yield module

    def contributions(self) -> dict[str, int]:
        """How often one backward pass adds to each parameter's gradient: twice for a tied embedding used at both ends
        of this slice, else once."""
        twice = self.model.tie_embeddings and self.is_first and self.is_last
        return {name: 2 if twice and "embed_tokens" in name else 1 for name in self.specs}

    def _check_against_table(self) -> None:
        held = {name: tuple(p.shape) for name, p in self.named_parameters()}
        table = {name: spec.block(self.tp.size, self.tp.rank)[1] for name, spec in self.specs.items()}
        assert held == table, f"modules and parameter table differ: {sorted(held.items() ^ table.items())}"
