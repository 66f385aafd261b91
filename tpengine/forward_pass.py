"""Held-out loss and sampling: the trained model run through a forward-only plan, on the engine's own executor."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from tpkernels.random import uniform

from tpengine.distributed import to_device
from tpengine.execute import Executor
from tpengine.layers import IGNORED_LABEL, vocab_parallel_cross_entropy
from tpengine.plan import Kind
from tpengine.rank_pipeline import RankPipeline
from tpengine.step_plan import evaluation_micro_batches, forward_plan
from tpengine.trainer import Trainer


class ForwardPass:
    """Runs the trainer's model forward over given micro-batches, pipelined.

    Args:
        trainer: whose model and mesh are used.
        num_micro_batches, micro_batch_size: of one replica and pass.
    """

    def __init__(self, trainer: Trainer, num_micro_batches: int, micro_batch_size: int) -> None:
        self._trainer = trainer
        self._plan = forward_plan(trainer.config, trainer.layout, num_micro_batches, micro_batch_size)

    def run(self, first_input: Callable[[int], Tensor], on_logits: Callable[[Tensor, int], None]) -> None:
        """Run one pass; collective over all ranks.

        Args:
            first_input: micro-batch -> tokens[T]; called on the first stage.
            on_logits: (logits[T, V/tp], micro-batch) -> None; called on the last stage.
        """
        trainer = self._trainer
        at = trainer.mesh.at.pp

        def take_logits(logits: Tensor, microbatch: int) -> Tensor:
            on_logits(logits, microbatch)
            return logits

        stages = trainer.make_stages(first_input, take_logits)
        pipeline = RankPipeline(self._plan, at, stages, trainer.mesh.pp, trainer.device, trainer.mailbox)
        handlers = {**pipeline.handlers(), Kind.WAIT: pipeline.wait}
        Executor(dist.get_rank(), handlers, activity=trainer.activity).run(self._plan.actions[at])


def held_out_loss(trainer: Trainer) -> float | None:
    """Mean loss over the valid targets of the first held-out samples, in nats, equal on all ranks and for all layouts.

    `eval_micro_batches` counts over all replicas, which share them as evenly as they can. No sample counts twice, so a
    short held-out text gives fewer.

    Returns:
        The mean; None if no target is valid.
    """
    config, mesh = trainer.config, trainer.mesh
    samples, size = trainer.corpus.held_out, config.train.micro_batch_size
    # Samples beyond the last one count nothing.
    each = evaluation_micro_batches(config)
    first = mesh.at.dp * each * size
    arrays = samples.batch(first, each * size)
    last = min(config.train.eval_micro_batches * size, samples.num_windows)
    arrays[1][max(last - first, 0) :] = IGNORED_LABEL
    tokens, labels = (to_device(torch.from_numpy(a).view(each, -1), trainer.device) for a in arrays)
    # Each micro-batch has its place: other replicas and stages add zero there, which is exact in whatever order.
    sums = torch.zeros(2, mesh.shape.dp * each, dtype=torch.float64, device=trainer.device)

    def add_loss(logits: Tensor, microbatch: int) -> None:
        target, place = labels[microbatch], mesh.at.dp * each + microbatch
        sums[0, place] = vocab_parallel_cross_entropy(logits, target, config.model.vocab_size, trainer.comms.tp)
        sums[1, place] = (target != IGNORED_LABEL).sum()

    ForwardPass(trainer, each, size).run(lambda mb: tokens[mb], add_loss)
    trainer.comms.dp.all_reduce_(sums)
    trainer.comms.pp.all_reduce_(sums)
    total, num_valid = math.fsum(sums[0].tolist()), float(sums[1].sum())
    trainer.comms.tp.check()
    return total / num_valid if num_valid else None


def sample(trainer: Trainer, prompt: list[int], num_tokens: int, temperature: float = 0.8) -> list[int]:
    """Continue `prompt` by `num_tokens` tokens drawn from the model; the same text in every layout.

        next = argmax over v of logits[v] / temperature + Gumbel noise(seed, position, v)

    Adding Gumbel noise and taking the maximum draws from the softmax, so the shards need to agree on a maximum
    only and no rank sees the whole row of logits. Source: Gumbel-max trick, Maddison et al., NeurIPS 2014, section 2.

    Args:
        prompt: at least one token.
        num_tokens: how many to add; each is one forward pass over a window of the last seq_len tokens.
        temperature: below 1 sharpens.
    """
    config, tp = trainer.config, trainer.comms.tp
    seq, num_shards = config.train.seq_len, trainer.model.parts.table_size
    batch = num_shards // math.gcd(num_shards, seq)
    forward = ForwardPass(trainer, 1, batch)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = tokens[-seq:]
        place = len(window) - 1
        padded = torch.tensor([window + [0] * (seq - len(window))] * batch).view(-1)
        drawn = torch.full((1,), -1, dtype=torch.int64, device=trainer.device)

        def draw(logits: Tensor, _: int, place: int = place, drawn: Tensor = drawn) -> None:
            rows = logits[..., place, :].double().view(-1, logits.shape[-1]) / temperature
            column = torch.arange(rows.numel(), device=rows.device) + tp.rank * rows.numel()
            # Shard by shard: a logarithm's last bit may depend on its place in what is computed at once.
            noise = [uniform(config.train.seed, f"sample/{len(tokens)}", c) for c in column.view_as(rows)]
            scores = [row - (-n.log()).log() for row, n in zip(rows, noise, strict=True)]
            score = torch.cat(scores).masked_fill(column >= config.model.vocab_size, -torch.inf)
            best = score.max(0)
            candidate = torch.stack([best.values, column[best.indices].double()])
            candidates = tp.all_gather(candidate[None])
            drawn[0] = candidates[candidates[:, 0].argmax(), 1].long()

        forward.run(lambda _, padded=padded: to_device(padded, trainer.device), draw)  # type: ignore[misc]
        trainer.comms.pp.all_reduce_max_(drawn)
        tokens.append(int(drawn))
        tp.check()
    return tokens
