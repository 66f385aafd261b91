"""Train one transformer block of tensor-parallel layers, under torch's own optimizer.

Run: torchrun --nproc-per-node 2 -m tpengine.examples.block

Activations are x[T/tp, D]: the tokens, flattened batch first, are cut over the tensor-parallel ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from tpkernels.exchange.communicator import Communicator

from tpengine.distributed.process import stop
from tpengine.layers import Attention, RMSNorm, SwiGLU


class ExampleBlock(nn.Module):
    """Attention and a feed-forward network, each after a norm and with a residual."""

    def __init__(self, dim: int, heads: int, tp: Communicator) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim, tp), RMSNorm(dim, tp)
        self.attention = Attention(dim, heads, num_kv_heads=heads, comm=tp)
        self.mlp = SwiGLU(dim, 4 * dim, tp)

    def forward(self, x: torch.Tensor, seq: int) -> torch.Tensor:
        """x[T/tp, D] -> y[T/tp, D], for sequences of `seq` tokens."""
        x = x + self.attention(self.norm1(x), seq)
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


def main() -> None:
    """Train on random tokens and print the loss."""
    dist.init_process_group("gloo")
    # Ranks of one host exchange through shared memory: arena_bytes per rank.
    tp = Communicator(dist.group.WORLD, arena_bytes=1 << 20)
    # Every rank holds another part of each weight, so every rank has its own seed.
    torch.manual_seed(tp.rank)
    block = ExampleBlock(64, 4, tp)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    # This rank's rows of 2 sequences of 16 tokens.
    x = torch.randn(2 * 16 // tp.size, 64)
    for _ in range(20):
        optimizer.zero_grad()
        loss = block(x, seq=16).square().mean()
        loss.backward()
        optimizer.step()
    if tp.rank == 0:
        print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
    # End the groups' threads while the interpreter is still running.
    stop()
