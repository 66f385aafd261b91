"""Train an nn.Sequential as a pipeline of two stages.

Run: torchrun --nproc-per-node 2 -m tpengine.examples.stages
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tpengine.distributed.process import stop
from tpengine.modules import Pipeline


def main() -> None:
    """Learn a product of two inputs; print the modules of each stage and the loss."""
    dist.init_process_group("gloo")
    # The same data on every rank.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 20, generator=generator)
    target = x[:, :1] * x[:, 1:2]
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    # The input of one micro-batch gives the shapes.
    pipe = Pipeline(model, x[:8], nn.functional.mse_loss, num_micro_batches=8)
    optimizer = torch.optim.AdamW(pipe.stage.parameters())
    for _ in range(50):
        # Inputs are used on the first rank, targets on the last.
        loss = pipe.step(x, target)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"stages {pipe.layers}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
    # End the groups' threads while the interpreter is still running.
    stop()
