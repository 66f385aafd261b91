"""The operators between matmuls, through the engine's layers: bytes per second by bytes, as tpkernels.work counts them.

The host's time of an operator is measured by itself (host.py) and left out here, because the planner adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tpkernels import work
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.attention.host import causal_attention

from tpengine.config import OptimConfig
from tpengine.doctor.measure.clock import CallClock
from tpengine.doctor.measure.sizes import MeasuredSizes
from tpengine.layers.attention import attend
from tpengine.layers.mlp import activated
from tpengine.layers.norm import RMSNorm
from tpengine.layers.scores import Scores
from tpengine.layers.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tpengine.training.optimizer import AdamW

Points = dict[str, list[tuple[float, float]]]

_HEAD_SIZE = 64
# What is left of a time without the host's, at least; and of attention's, what its rotation takes at least.
_LEAST, _LEAST_ROTATION = 0.2, 0.02
_NUMBER = 3


def operator_rates(clock: CallClock, dtype: torch.dtype, sizes: MeasuredSizes, host_s: float) -> Points:
    """Return rates by operator: (bytes of a call, bytes per second); attention (tokens, operations per second).

    Args:
        clock: times calls.
        dtype: of the activations.
        sizes: what is measured.
        host_s: the host's time of an operator.
    """
    found: Points = {}

    def add(name: str, at: float, amount: float, seconds: float) -> None:
        net = max(seconds - host_s, _LEAST * seconds)
        found.setdefault(name, []).append((float(at), amount / net))

    def measure(names: tuple[str, str], case: Callable[[int, int], Any]) -> None:
        for tokens, width in sizes.operators:
            works, make, run = case(tokens, width)
            for name, of, seconds in zip(names, works, clock.of_graph(make, run, _NUMBER), strict=True):
                add(name, of.memory_bytes, of.memory_bytes, seconds)

    for names, case in _cases(clock.device, dtype, sizes.vocabulary).items():
        measure(names, case)
    _attention(clock, dtype, sizes, found)
    for name, points in found.items():
        found[name] = sorted(dict(points).items())
    return found


def _cases(
    device: torch.device, dtype: torch.dtype, vocabulary: int
) -> dict[tuple[str, str], Callable[[int, int], Any]]:
    """Return by names of forward and backward: (tokens, width) to their work, an input, and the operator."""
    comm, item = Communicator(None), dtype.itemsize

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    def norm(tokens: int, width: int) -> Any:
        layer = RMSNorm(width, comm, dtype=dtype, device=device)
        works = work.norm_work(tokens, width, item), work.norm_backward_work(tokens, width, item)
        return works, lambda: drawn(tokens, width), layer

    def activation(tokens: int, width: int) -> Any:
        works = (
            work.activation_work(tokens, width, item, gated=True),
            work.activation_backward_work(tokens, width, item, gated=True),
        )
        return works, lambda: drawn(tokens, 2 * width), lambda y: activated(y, "silu", True)

    def add(tokens: int, width: int) -> Any:
        other = drawn(tokens, width).detach()
        works = work.Work(0, 3 * tokens * width * item), work.Work(0, tokens * width * item)
        return works, lambda: drawn(tokens, width), lambda x: x + other

    def loss(tokens: int, width: int) -> Any:
        labels = torch.randint(vocabulary, (tokens,), device=device)
        works = (
            work.cross_entropy_work(tokens, vocabulary, item),
            work.cross_entropy_gradient_work(tokens, vocabulary, item),
        )
        # The gradient overwrites the logits, but no leaf.
        return (
            works,
            lambda: drawn(tokens * vocabulary).view(tokens, vocabulary),
            lambda z: vocab_parallel_cross_entropy(z, labels, vocabulary, comm),
        )

    def embedding(tokens: int, width: int) -> Any:
        layer = VocabParallelEmbedding(vocabulary, width, comm, dtype=dtype, device=device)
        layer.weight.grad = torch.zeros_like(layer.weight)
        works = (
            work.embedding_work(tokens, width, item),
            work.embedding_backward_work(tokens, vocabulary, width, item),
        )
        return works, lambda: torch.randint(vocabulary, (tokens,), device=device), layer

    return {
        ("norm", "norm_backward"): norm,
        ("activation", "activation_backward"): activation,
        ("add", "add_backward"): add,
        ("cross_entropy", "cross_entropy_gradient"): loss,
        ("embedding", "embedding_backward"): embedding,
    }


def _attention(clock: CallClock, dtype: torch.dtype, sizes: MeasuredSizes, found: Points) -> None:
    """Add attention by length of sequence; and the rotation, which is what is left of the layer's own function."""
    device, head_size, (heads, kv_heads) = clock.device, _HEAD_SIZE, sizes.heads
    tokens = max(sizes.seqs)
    for seq in sizes.seqs:
        batch = tokens // seq

        def qkv(tokens: int = batch * seq) -> Tensor:
            columns = (heads + 2 * kv_heads) * head_size
            return torch.randn(tokens, columns, device=device).to(dtype).requires_grad_()

        def run(x: Tensor, seq: int = seq) -> Tensor:
            return attend(x, heads, kv_heads, seq, Scores(), None, whose="auto")

        core = _core(device, batch, heads, kv_heads, seq)
        whole, inner = (clock.of_graph(qkv, of, _NUMBER) for of in (run, core))
        for name, of, seconds in zip(
            ("attention", "attention_backward"), (work.attention_work, work.attention_backward_work), inner, strict=True
        ):
            flops = of(batch, seq, heads, kv_heads, head_size, dtype.itemsize, causal_half=True).flops
            found.setdefault(name, []).append((float(seq), flops / seconds))
        num_bytes = work.rope_work(batch * seq, heads + kv_heads, head_size, dtype.itemsize).memory_bytes
        for name, both, alone in zip(("rope", "rope_backward"), whole, inner, strict=True):
            rate = num_bytes / max(both - alone, _LEAST_ROTATION * both)
            # All lengths have the same bytes: the median of them.
            found.setdefault(f"{name}_all", []).append((float(num_bytes), rate))
    for name in ("rope", "rope_backward"):
        rates = sorted(rate for _, rate in found[f"{name}_all"])
        found[name] = [(found.pop(f"{name}_all")[0][0], rates[len(rates) // 2])]


def _core(device: torch.device, batch: int, heads: int, kv_heads: int, seq: int) -> Callable[[Tensor], Tensor]:
    """Return attention without the rotation, which on a CPU writes each head's rows side by side."""

    def on_host(x: Tensor) -> Tensor:
        q, k, v = x.view(3, batch, heads, seq, _HEAD_SIZE).unbind()
        return causal_attention(q, k, v)

    def by_kernels(x: Tensor) -> Tensor:
        return attend(x, heads, kv_heads, seq, Scores(rotation=None), None, whose="auto")

    return on_host if device.type == "cpu" else by_kernels


def update_rates(clock: CallClock, dtype: torch.dtype, sizes: Sequence[int]) -> Points:
    """Return the rates of AdamW's step on weights of a dtype, and of clearing gradients, by bytes of all elements."""
    found: Points = {"adamw": [], "zero": []}
    wide = torch.promote_types(dtype, torch.float32)
    item, copied = wide.itemsize, dtype.itemsize if dtype != wide else 0
    for numel in sizes:
        weights = {"w": torch.zeros(numel, device=clock.device, dtype=dtype)}
        gradients = {"w": torch.ones(numel, device=clock.device, dtype=wide)}
        optimizer = AdamW(weights, gradients, {"w": (1.0, OptimConfig().weight_decay)}, OptimConfig())
        num_bytes = work.adamw_work(numel, item, copied).memory_bytes
        seconds = clock.of_call([lambda optimizer=optimizer: optimizer.step(1e-3, 2)])  # type: ignore[misc]
        found["adamw"].append((float(num_bytes), num_bytes / seconds))
        seconds = clock.of_call([gradients["w"].zero_])
        found["zero"].append((float(item * numel), item * numel / seconds))
    return found
