"""Train a Llama block with the operators of tpkernels, on one device: a GPU if there is one, else a CPU.

Run: python -m tpengine.examples.operators

The operators are Triton kernels on CUDA, torch on a CPU. The whole logits are never in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear
from tpkernels import (
    add_rms_norm,
    attention_qkv,
    embedding,
    linear_cross_entropy,
    rms_norm,
    rope_tables,
    swiglu,
)

DIM, HEADS, KV_HEADS, FFN, VOCAB, BATCH, SEQ = 64, 4, 2, 160, 96, 4, 32
HEAD_SIZE = DIM // HEADS


class BlockWeights:
    """Random weights of one block and of the embedding, which is the output head too."""

    def __init__(self, generator: torch.Generator, device: str) -> None:
        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) * 0.1).to(device).requires_grad_()

        self.table, self.qkv = weight(VOCAB, DIM), weight((HEADS + 2 * KV_HEADS) * HEAD_SIZE, DIM)
        self.o = weight(DIM, DIM)
        self.gate_up, self.down = weight(2 * FFN, DIM), weight(DIM, FFN)
        self.norms = [torch.ones(DIM, device=device, requires_grad=True) for _ in range(3)]
        self.all = [self.table, self.qkv, self.o, self.gate_up, self.down, *self.norms]


def loss_of(w: BlockWeights, tokens: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the mean loss of tokens[T], T = BATCH * SEQ."""
    # [T, DIM]
    x = embedding(tokens, w.table)
    qkv = linear(rms_norm(x, w.norms[0]), w.qkv)
    attended = linear(attention_qkv(qkv, HEADS, KV_HEADS, seq=SEQ, cos=cos, sin=sin), w.o)
    y, x = add_rms_norm(attended, x, w.norms[1])
    y, x = add_rms_norm(linear(swiglu(linear(y, w.gate_up)), w.down), x, w.norms[2])
    loss: Tensor = linear_cross_entropy(y, w.table, labels, token_weights=1 / labels.numel())
    return loss


def main() -> None:
    """Learn one random text by heart; print the loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    weights = BlockWeights(generator, device)
    cos, sin = rope_tables(SEQ, HEAD_SIZE, device=device)
    optimizer = torch.optim.AdamW(weights.all, lr=1e-2)
    text = torch.randint(VOCAB, (BATCH * SEQ + 1,), generator=generator).to(device)
    for _ in range(60):
        loss = loss_of(weights, text[:-1], text[1:], cos, sin)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
