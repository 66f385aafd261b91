"""Train a GPT-2-like model of your own on tp 2 x pp 2; with 8 ranks dp is 2.

Run: torchrun --nproc-per-node 4 -m tpengine.examples.gpt
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from tpkernels.exchange.communicator import Communicator

from tpengine.distributed.process import stop
from tpengine.layers import (
    Attention,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    clip_grad_norm_,
    replicate,
    vocab_parallel_cross_entropy,
)
from tpengine.modules import DataParallel, Pipeline

VOCAB, DIM, HEADS, SEQ, IGNORED = 32, 64, 4, 16, -100


class Embedding(nn.Module):
    """Token and position embedding: takes all tokens, returns this rank's rows x[T/tp, D]."""

    def __init__(self, tp: Communicator) -> None:
        super().__init__()
        self.tp = tp
        self.tokens = VocabParallelEmbedding(VOCAB, DIM, tp)
        self.positions = replicate(nn.Embedding(SEQ, DIM), tp)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens[B, SEQ] -> x[T/tp, D]."""
        x: Tensor = self.tokens(tokens.flatten())
        places = torch.arange(len(x)) + self.tp.rank * len(x)
        return x + self.positions(places % SEQ)


class GPTBlock(nn.Module):
    """Attention and a feed-forward network with GELU; every rank holds the whole norms."""

    def __init__(self, tp: Communicator) -> None:
        super().__init__()
        self.norm1, self.norm2 = (replicate(nn.LayerNorm(DIM), tp) for _ in range(2))
        self.attention = Attention(DIM, HEADS, HEADS, tp)
        self.up, self.down = ColumnParallelLinear(DIM, 4 * DIM, tp), RowParallelLinear(4 * DIM, DIM, tp)

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        x = x + self.attention(self.norm1(x), SEQ)
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return y


def main() -> None:
    """Learn a function of the token, with a fifth of the labels ignored; print the stages and the loss."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 4, 2), mesh_dim_names=("pp", "dp", "tp"))
    pp, dp, tp = (Communicator(mesh.get_group(axis)) for axis in ("pp", "dp", "tp"))
    # Tensor-parallel ranks hold different parts of each weight, so they have different seeds.
    torch.manual_seed(tp.rank)
    ends = [replicate(nn.LayerNorm(DIM), tp), ColumnParallelLinear(DIM, VOCAB, tp)]
    model = nn.Sequential(Embedding(tp), *(GPTBlock(tp) for _ in range(4)), *ends)

    # Each replica has its own data.
    generator = torch.Generator().manual_seed(dp.rank)
    tokens = torch.randint(VOCAB, (16, SEQ), generator=generator)
    labels = (5 * tokens + 3) % VOCAB
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORED
    pipe = Pipeline(
        model,
        # The input of one micro-batch, as an example of the shapes.
        tokens[:2],
        # The sum over a micro-batch's targets; `count` counts them.
        lambda logits, labels: vocab_parallel_cross_entropy(logits, labels.flatten(), VOCAB, tp),
        count=lambda labels: (labels != IGNORED).sum(),
        num_micro_batches=8,
        group=pp.group,
        replicas=dp,
    )
    replicas = DataParallel(pipe.stage, dp)
    optimizer = torch.optim.AdamW(pipe.stage.parameters(), lr=1e-2)
    for _ in range(40):
        # Gradients of micro-batches are added on this rank, without communication.
        with replicas.no_sync():
            loss = pipe.step(tokens, labels)
        # From here on gradients are those of the batch of all replicas.
        replicas.finish()
        clip_grad_norm_(pipe.stage, 1.0, tp, pp)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"stages {pipe.layers}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
    # End the groups' threads while the interpreter is still running.
    stop()
