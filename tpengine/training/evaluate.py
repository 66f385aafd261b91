"""Held-out loss and sampling: the trained model run through a forward-only plan, on the engine's own executor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tpkernels.random import uniform

from tpengine.data import batch_digest
from tpengine.distributed.messages import all_gather_json, broadcast_json
from tpengine.distributed.process import to_device
from tpengine.layers import IGNORED_LABEL, vocab_parallel_cross_entropy
from tpengine.layout.step_plan import evaluation_micro_batches, forward_plan
from tpengine.pipeline.executor import Executor
from tpengine.pipeline.handlers import RankPipeline
from tpengine.plan import Kind
from tpengine.training.trainer import RunError, Trainer


@dataclass(frozen=True)
class _Evaluated:
    """The batch of a pass without training (pipeline.stage.Batch): `on_logits` is given the logits."""

    all_tokens: Tensor
    on_logits: Callable[[Tensor, int], None]

    def begin(self, microbatch: int) -> None:
        """Do nothing: without training no layer drops elements."""

    def tokens(self, microbatch: int) -> Tensor:
        """See Batch."""
        return self.all_tokens[microbatch]

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        """See Batch."""
        self.on_logits(y, microbatch)
        return y


class ForwardPass:
    """Runs the trainer's model forward over given micro-batches, pipelined.

    Args:
        trainer: has the model and the mesh.
        num_micro_batches, micro_batch_size: per replica and pass.
    """

    def __init__(self, trainer: Trainer, num_micro_batches: int, micro_batch_size: int) -> None:
        self._trainer = trainer
        self._plan = forward_plan(trainer.config, trainer.layout, num_micro_batches, micro_batch_size)

    def run(self, tokens: Tensor, on_logits: Callable[[Tensor, int], None]) -> None:
        """Run one pass; collective over all ranks.

        Args:
            tokens: [micro-batches, T]; used on the first stage.
            on_logits: (logits[T, V/tp], micro-batch) -> None; called on the last stage.
        """
        trainer = self._trainer
        at = trainer.mesh.at.pp
        stages = trainer.make_stages(_Evaluated(tokens, on_logits))
        pipeline = RankPipeline(self._plan, at, stages, trainer.mesh.pp, trainer.device, trainer.mailbox)
        handlers = {**trainer.moves.around(pipeline.handlers()), Kind.WAIT: trainer.moves.waiting(pipeline.wait_for)}
        Executor(dist.get_rank(), handlers, activity=trainer.activity).run(self._plan.actions[at])


def held_out_loss(trainer: Trainer) -> float | None:
    """Return the mean loss over the valid targets of the first held-out samples, in nats; the same in every layout.

    `eval_micro_batches` is a number over all replicas, which share them as evenly as possible. No sample counts twice,
    so that a short held-out text gives fewer. Collective; equal on all ranks.

    Returns:
        The mean; None if no target is valid.

    Raises:
        RunError: on all ranks alike: a rank cannot read its samples, or ranks of a replica have read different ones.
    """
    config, mesh = trainer.config, trainer.mesh
    size = config.train.micro_batch_size
    # Read this replica's samples; those beyond the last one do not count.
    each = evaluation_micro_batches(config)
    first = mesh.at.dp * each * size
    tokens, labels = _read_held_out(trainer, first, each * size)
    last = min(config.train.eval_micro_batches * size, trainer.corpus.held_out.num_windows)
    labels[max(last - first, 0) :] = IGNORED_LABEL
    tokens, labels = (to_device(part.view(each, -1), trainer.device) for part in (tokens, labels))
    # Loss and number of targets of each micro-batch have a place: others add zeros there, which is exact in any order.
    sums = torch.zeros(2, mesh.shape.dp * each, dtype=torch.float64, device=trainer.device)

    def add_loss(logits: Tensor, microbatch: int) -> None:
        target, place = labels[microbatch], mesh.at.dp * each + microbatch
        sums[0, place] = vocab_parallel_cross_entropy(logits, target, config.model.vocab_size, trainer.comms.tp)
        sums[1, place] = (target != IGNORED_LABEL).sum()

    # Run the model, then sum over replicas and stages.
    ForwardPass(trainer, each, size).run(tokens, add_loss)
    trainer.activity.begin("summing the held-out loss")
    trainer.comms.dp.all_reduce_(sums)
    trainer.comms.pp.all_reduce_(sums)
    total, num_valid = math.fsum(sums[0].tolist()), float(sums[1].sum())
    trainer.comms.tp.check()
    return total / num_valid if num_valid else None


def _read_held_out(trainer: Trainer, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Read samples of the held-out text on the stages that use them, and compare what the ranks of a replica have read.

    Args: first, count: first sample of this rank's replica, and their number.
    Returns: tokens[count, S] and labels[count, S], int64, on the host; zeros on stages that use neither.
    """
    trainer.activity.begin("reading the held-out text")
    samples, model = trainer.corpus.held_out, trainer.model
    tokens = labels = torch.zeros(count, samples.seq_len, dtype=torch.int64)
    error, digest = "", None
    if model.is_first or model.is_last:
        try:
            arrays = samples.batch(first, count)
        except ValueError as problem:
            error = str(problem)
        else:
            digest = batch_digest(*arrays)
            tokens, labels = (torch.from_numpy(array) for array in arrays)
    everyone = all_gather_json([trainer.mesh.at.dp, error, digest])
    failed = [rank for rank, (_, of_rank, _) in enumerate(everyone) if of_rank]
    if failed:
        others = any(of_rank is not None for _, _, of_rank in everyone)
        raise RunError(everyone[failed[0]][1] + (f" (ranks {failed} alone found this)" if others else ""))
    read = [(rank, dp, of_rank) for rank, (dp, _, of_rank) in enumerate(everyone) if of_rank is not None]
    of_replica = {dp: (rank, of_rank) for rank, dp, of_rank in reversed(read)}
    differing = [rank for rank, dp, of_rank in read if of_rank != of_replica[dp][1]]
    if differing:
        raise RunError(
            f"all ranks of a replica must read the same held-out text: ranks {differing} have read other tokens than "
            "the first of theirs: give every host the same file"
        )
    return tokens, labels


def read_prompt(trainer: Trainer, num_tokens: int) -> list[int]:
    """Return the first tokens of the held-out text, at most a window of them; rank 0 reads them for all ranks.

    Raises:
        RunError: on all ranks alike: the text cannot be read.
    """
    trainer.activity.begin("reading the prompt")
    told: Any = None
    if dist.get_rank() == 0:
        try:
            told = {"prompt": trainer.corpus.held_out.batch(0, 1)[0][0, :num_tokens].tolist()}
        except ValueError as problem:
            told = {"error": str(problem)}
    told = broadcast_json(told)
    if "error" in told:
        raise RunError(told["error"])
    prompt: list[int] = told["prompt"]
    return prompt


def sample(trainer: Trainer, prompt: list[int], num_tokens: int, temperature: float = 0.8) -> list[int]:
    """Continue `prompt` by `num_tokens` tokens drawn from the model; the same text in every layout.

        next = argmax over v of logits[v] / temperature + Gumbel noise(seed, position, v)

    Adding Gumbel noise and taking the maximum draws from the softmax. So the ranks only need to agree on a maximum, and
    no rank needs the whole row of logits. Source: Gumbel-max trick, Maddison et al., NeurIPS 2014, section 2.

    Args:
        prompt: at least one token.
        num_tokens: number of tokens to add; each takes a forward pass over a window of the last seq_len tokens.
        temperature: below 1 makes likely tokens likelier.
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
            # Shard by shard: the last bit of a logarithm may depend on its place in the tensor.
            noise = [uniform(config.train.seed, f"sample/{len(tokens)}", c) for c in column.view_as(rows)]
            scores = [row - (-n.log()).log() for row, n in zip(rows, noise, strict=True)]
            score = torch.cat(scores).masked_fill(column >= config.model.vocab_size, -torch.inf)
            best = score.max(0)
            candidate = torch.stack([best.values, column[best.indices].double()])
            candidates = tp.all_gather(candidate[None])
            drawn[0] = candidates[candidates[:, 0].argmax(), 1].long()

        forward.run(to_device(padded[None], trainer.device), draw)
        trainer.activity.begin("agreeing on the next token")
        trainer.comms.pp.all_reduce_max_(drawn)
        tokens.append(int(drawn))
        tp.check()
    return tokens
