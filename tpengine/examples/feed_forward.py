"""Compute a feed-forward network with the fused matmuls of tpkernels alone, without the engine.

Run: torchrun --nproc-per-node 2 -m tpengine.examples.feed_forward
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from tpkernels import Communicator, all_gather_matmul, matmul_reduce_scatter

NUM_TOKENS, WIDTH, FFN = 64, 32, 128


def main() -> None:
    """Run it forward and backward; print the shape and how the ranks exchanged."""
    dist.init_process_group("gloo")
    tp = Communicator(dist.group.WORLD, arena_bytes=1 << 20)
    torch.manual_seed(tp.rank)
    gate, up = (torch.randn(FFN // tp.size, WIDTH, requires_grad=True) for _ in range(2))
    down = torch.randn(WIDTH, FFN // tp.size, requires_grad=True)
    # This rank's tokens.
    x = torch.randn(NUM_TOKENS // tp.size, WIDTH, requires_grad=True)

    # One gather for both weights: [T, F/tp] each.
    g, u = all_gather_matmul(x, (gate, up), tp)
    # [T/tp, D]
    y = matmul_reduce_scatter(torch.nn.functional.silu(g) * u, down, tp)
    # The backward of each operator is the other one.
    y.square().mean().backward()
    assert all(t.grad is not None for t in (x, gate, up, down))
    if tp.rank == 0:
        print(f"y {list(y.shape)}, through {'shared memory' if tp.arena else 'collectives'}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
