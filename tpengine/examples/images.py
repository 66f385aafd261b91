"""Train a convolutional network on four replicas, which divide the optimizer's state among themselves.

Run: torchrun --nproc-per-node 4 -m tpengine.examples.images
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tpkernels.exchange.communicator import Communicator

from tpengine.distributed.process import stop
from tpengine.modules import DataParallel, ShardedOptimizer


def main() -> None:
    """Train two epochs on random images of two classes, dark and bright; print the loss."""
    dist.init_process_group("gloo")
    # The same images and the same initial weights on every rank.
    torch.manual_seed(0)
    classes = torch.randint(2, (64,))
    data = TensorDataset(torch.randn(64, 3, 224, 224) + classes.view(-1, 1, 1, 1), classes)
    sampler: DistributedSampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    convs = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    model = nn.Sequential(*convs, nn.Flatten(), nn.Linear(512, 2))

    replicas = Communicator(dist.group.WORLD)
    parallel = DataParallel(model, replicas)
    optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), replicas)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            # Gradients are reduced while this runs.
            loss.backward()
            # From here on gradients are the mean over the replicas.
            parallel.finish()
            # Each replica updates a quarter, and sends it to the others.
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
    # End the groups' threads while the interpreter is still running.
    stop()
