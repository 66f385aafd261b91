"""Shard weights, gradients and optimizer state of any module with torch's fully_shard: alone, and as pipeline stages.

Run: torchrun --nproc-per-node 4 -m tpengine.examples.fully_shard
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tpengine.distributed.process import stop
from tpengine.modules import Pipeline


def model_of() -> nn.Sequential:
    """Return six layers, the same on every rank."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(16, 1))


def main() -> None:
    """Learn a function of the inputs, on four replicas, then on two pipelines of two stages; print the losses."""
    dist.init_process_group("gloo")
    # Alone: gathered before each layer's forward and backward, freed after it.
    model = model_of()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    y = x[:, :1] * x[:, 1:2]
    for _ in range(60):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # As stages: each layer of a stage is a root of its own, since a pipeline calls layers, not the stage.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe = Pipeline(model_of(), x[:8], nn.functional.mse_loss, num_micro_batches=8, group=mesh.get_group("pp"))
    for layer in pipe.stage:
        fully_shard(layer, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(pipe.stage.parameters(), lr=1e-2)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    y = x[:, :1] * x[:, 1:2]
    for _ in range(60):
        # Every micro-batch is summed over the replicas by itself: no whole gradient is kept.
        piped = pipe.step(x, y)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"alone {loss.item():.4f}, stages {pipe.layers}, loss {piped:.4f}")


if __name__ == "__main__":
    main()
    # End the groups' threads while the interpreter is still running.
    stop()
