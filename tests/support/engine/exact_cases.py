"""Layers of exact mode with their inputs and weights, and the same in plain torch on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator

from tpengine.architectures import describe
from tpengine.config import ModelConfig
from tpengine.model.exact import Shards
from tpengine.model.parts import ExactParts

D, HEADS, HEAD_SIZE, FFN, VOCAB = 48, 8, 6, 72, 104
BATCH, SEQ = 3, 16
T = BATCH * SEQ
EPS, THETA = 1e-3, 100.0


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Weight:
    """A global weight: how it is cut over the shards, in how many pieces; None: whole in all of them."""

    shape: tuple[int, ...]
    dim: int | None = 0
    num_pieces: int | None = None

    def cut(self, whole: Tensor, shard: int, num_shards: int) -> Tensor:
        if self.dim is None:
            return whole
        num = min(self.num_pieces or num_shards, num_shards)
        return whole.chunk(num, self.dim)[shard // (num_shards // num)]

    def gradient(self, of_shards: Tensor) -> Tensor:
        """The whole gradient from what each shard has added."""
        if self.dim is None:
            return of_shards.sum(0)
        num = min(self.num_pieces or len(of_shards), len(of_shards))
        pieces = of_shards.unflatten(0, (num, -1)).sum(1)
        return torch.cat(list(pieces), self.dim)


def model_of(kv_heads: int = HEADS) -> ModelConfig:
    return ModelConfig(
        hidden_size=D,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        ffn_size=FFN,
        vocab_size=VOCAB,
        rope_theta=THETA,
        norm_eps=EPS,
    )


@dataclass(frozen=True)
class Case:
    """A layer, its weights by the name of their module in a shard, and the same in plain torch on whole tensors."""

    build: Callable[[ExactParts], nn.Module]
    weights: Mapping[str, Weight]
    plain: Callable[..., Tensor]
    input: Tensor
    model: ModelConfig = field(default_factory=model_of)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Input, weights and output gradient, whole."""
        x = self.input if self.input.dtype == torch.int64 else self.input.to(dtype)
        weights = {
            name: (tensor(i + 1, *weight.shape) / weight.shape[-1] ** 0.5).to(dtype)
            for i, (name, weight) in enumerate(self.weights.items())
        }
        with torch.no_grad():
            shape = self.plain(x, *weights.values()).shape
        return x, weights, tensor(9, *shape).to(dtype)


def plain_attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    """Written out: complex rotation, explicit mask and softmax; the rotation in double precision."""
    q, k, v = (rearrange(x @ w.T, "(b s) (h e) -> b h s e", s=SEQ, e=HEAD_SIZE) for w in (wq, wk, wv))
    angle = torch.arange(SEQ)[:, None] * THETA ** (-torch.arange(0, HEAD_SIZE, 2, dtype=torch.float64) / HEAD_SIZE)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotate(t: Tensor) -> Tensor:
        z = torch.complex(*t.double().chunk(2, dim=-1)) * turn
        return torch.cat((z.real, z.imag), -1).to(t.dtype)

    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (rotate(k), v))
    scores = rotate(q) @ k.transpose(2, 3) / HEAD_SIZE**0.5
    scores = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -torch.inf)
    return rearrange(scores.softmax(-1) @ v, "b h s e -> (b s) (h e)") @ wo.T


def attention(kv_heads: int) -> Case:
    kv = Weight((kv_heads * HEAD_SIZE, D), 0, kv_heads)
    return Case(
        lambda parts: parts.layer(describe.Attention(), None),
        {"q_proj": Weight((D, D)), "k_proj": kv, "v_proj": kv, "o_proj": Weight((D, D), 1)},
        plain_attention,
        tensor(0, T, D),
        model_of(kv_heads),
    )


CASES = {
    **{f"attention of {kv_heads} kv heads": attention(kv_heads) for kv_heads in (HEADS, 4, 2, 1)},
    "swiglu": Case(
        lambda parts: parts.layer(describe.FeedForward(), None),
        {"gate_proj": Weight((FFN, D)), "up_proj": Weight((FFN, D)), "down_proj": Weight((D, FFN), 1)},
        lambda x, gate, up, down: (F.silu(x @ gate.T) * (x @ up.T)) @ down.T,
        tensor(0, T, D),
    ),
    "norm": Case(
        lambda parts: parts.layer(describe.Norm()),
        {"": Weight((D,), None)},
        lambda x, w: F.rms_norm(x, (D,), w, EPS),
        tensor(0, T, D),
    ),
    "embedding": Case(
        lambda parts: parts.embedding(VOCAB),
        {"": Weight((VOCAB, D))},
        lambda tokens, w: F.embedding(tokens, w),
        # Few, so that they repeat.
        torch.randint(0, VOCAB, (T,), generator=torch.Generator().manual_seed(0)) // 3 * 3,
    ),
    "head": Case(
        lambda parts: parts.head(VOCAB, None),
        {"": Weight((VOCAB, D))},
        lambda x, w: x @ w.T,
        tensor(0, T, D),
    ),
}


def world(num_shards: int) -> Shards:
    return Shards(Communicator(dist.group.WORLD), num_shards)


def parameter_of(layer: nn.Module, shard: int, name: str) -> Parameter:
    of_shard = layer.get_submodule(f"shards.{shard}")
    weight = of_shard.get_submodule(name).weight
    assert isinstance(weight, Parameter)
    return weight


def load(layer: nn.Module, case: Case, weights: Mapping[str, Tensor], shards: Shards) -> None:
    with torch.no_grad():
        for shard in shards.held:
            for name, weight in case.weights.items():
                parameter_of(layer, shard, name).copy_(weight.cut(weights[name], shard, shards.size))


def rows(x: Tensor, comm: Communicator) -> Tensor:
    return x.chunk(comm.size)[comm.rank]


def assert_close(what: str, got: Tensor, want: Tensor) -> None:
    error = (got - want).abs().max().item()
    assert error <= 1e-12 * want.abs().max().item(), f"{what}: error {error}"
