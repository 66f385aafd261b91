"""Text that the model that is trained draws, token by token: the same in every layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tpkernels.random import uniform

from tpengine.distributed.agreement import broadcast_json
from tpengine.distributed.process import to_device
from tpengine.training.evaluation.forward_pass import ForwardPass
from tpengine.training.planned_run import RunError
from tpengine.training.train_state import TrainState


def read_prompt(state: TrainState, num_tokens: int) -> list[int]:
    """Return the first tokens of the held-out text, at most a window of them; rank 0 reads them for all ranks.

    Where documents do not see each other the prompt is from the first one alone, and never padding.

    Raises:
        RunError: on all ranks alike: the text cannot be read.
    """
    state.rank.activity.begin("reading the prompt")
    told: Any = None
    if dist.get_rank() == 0:
        try:
            tokens, _, starts = state.part.corpus.held_out.read_with_starts(np.arange(1))
            end = min([num_tokens, *(int(inner[0]) for inner in starts if len(inner))])
            told = {"prompt": tokens[0, :end].tolist()}
        except ValueError as problem:
            told = {"error": str(problem)}
    told = broadcast_json(told)
    if "error" in told:
        raise RunError(told["error"])
    prompt: list[int] = told["prompt"]
    return prompt


def sample(state: TrainState, prompt: list[int], num_tokens: int, temperature: float = 0.8) -> list[int]:
    """Continue `prompt` by `num_tokens` tokens drawn from the model; the same text in every layout.

        next = argmax over v of logits[v] / temperature + Gumbel noise(seed, position, v)

    Adding Gumbel noise and taking the maximum draws from the softmax. So the ranks only need to agree on a maximum, and
    no rank needs the whole row of logits. Source: Gumbel-max trick, Maddison et al., NeurIPS 2014, section 2.

    Args:
        prompt: at least one token.
        num_tokens: number of tokens to add; each takes a forward pass over a window of the last seq_len tokens.
        temperature: below 1 makes likely tokens likelier.
    """
    config, tp = state.part.config, state.rank.comms.tp
    seq, num_shards = config.train.seq_len, state.model.parts.table_size
    batch = num_shards // math.gcd(num_shards, seq)
    forward = ForwardPass(state, 1, batch)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = tokens[-seq:]
        place = len(window) - 1
        padded = torch.tensor([window + [0] * (seq - len(window))] * batch).view(-1)
        drawn = torch.full((1,), -1, dtype=torch.int64, device=state.rank.device)

        def draw(logits: Tensor, _: int, place: int = place, drawn: Tensor = drawn) -> None:
            rows = logits[..., place, :].double().view(-1, logits.shape[-1]) / temperature
            column = torch.arange(rows.numel(), device=rows.device) + tp.rank * rows.numel()
            # Shard by shard: the last bit of a logarithm may depend on its place in the tensor.
            noise = [uniform(config.train.seed, f"sample/{len(tokens)}", c) for c in column.view_as(rows)]
            scores = [row - (-n.log()).log() for row, n in zip(rows, noise, strict=True)]
            score = torch.cat(scores).masked_fill(column >= config.model.vocab_size, -torch.inf)
            best = score.max(0)
            candidate = torch.stack([best.values, column[best.indices].double()])
            candidates = tp.all_gather(candidate[None])
            drawn[0] = candidates[candidates[:, 0].argmax(), 1].long()

        forward.run(to_device(padded[None], state.rank.device), draw)
        state.rank.activity.begin("agreeing on the next token")
        state.rank.comms.pp.all_reduce_max_(drawn)
        tokens.append(int(drawn))
        tp.check()
    return tokens
