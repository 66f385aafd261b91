"""Train GPT-2 as transformers writes it on tp 2 x pp 2; with 8 ranks dp is 2. First: pip install "transformers>=5,<6".

Run: torchrun --nproc-per-node 4 -m tpengine.examples.transformers_gpt2
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from tpkernels.exchange.communicator import Communicator
from transformers import GPT2Config, GPT2LMHeadModel

from tpengine.architectures.gpt2 import TABLE
from tpengine.distributed.process import stop
from tpengine.modules import DataParallel, Pipeline, parallelize


class GPT2Embedding(nn.ModuleList):
    """The tables of tokens and positions: what GPT2Model.forward does before its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens[B, S] -> x[B, S, D]."""
        return self[0](tokens) + self[1](torch.arange(tokens.shape[1]))


def main() -> None:
    """Learn a function of the token; print the stages and the loss."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 4, 2), mesh_dim_names=("pp", "dp", "tp"))
    pp, dp, tp = (Communicator(mesh.get_group(axis)) for axis in ("pp", "dp", "tp"))
    torch.manual_seed(0)
    # Both ends of a pipeline cannot have one table, and dropout would differ between tp ranks.
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=64, n_layer=4, n_head=4, tie_word_embeddings=False)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    gpt2 = GPT2LMHeadModel(config)
    parallelize(gpt2, TABLE, tp, prefix="transformer.", head_size=16, divide={"h.*.attn": ["split_size"]})
    body = gpt2.transformer
    model = nn.Sequential(GPT2Embedding([body.wte, body.wpe]), *body.h, body.ln_f, gpt2.lm_head)
    tokens = torch.randint(32, (16, 16), generator=torch.Generator().manual_seed(dp.rank))
    pipe = Pipeline(model, tokens[:2], lambda z, y: cross_entropy(z.mT, y), num_micro_batches=8, group=pp.group)
    replicas = DataParallel(pipe.stage, dp)
    optimizer = torch.optim.AdamW(pipe.stage.parameters(), lr=1e-2)
    for _ in range(40):
        with replicas.no_sync():
            loss = pipe.step(tokens, (5 * tokens + 3) % 32)
        replicas.finish()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"stages {pipe.layers}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
    stop()
