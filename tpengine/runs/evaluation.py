"""The loss on the held-out text, and text that the model draws token by token: the same in every layout.

Both are passes of micro-batches without training, pipelined, by a verified forward-only plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from tpkernels.random import uniform

from tpengine.config import num_evaluated
from tpengine.distributed.agreement import all_gather_json, broadcast_json
from tpengine.distributed.process import to_device
from tpengine.layers.dropout import Position
from tpengine.layers.rows import Documents
from tpengine.layout.step_plan import evaluation_micro_batches, forward_plan
from tpengine.pipeline.executor import Executor
from tpengine.pipeline.stage import RankPipeline
from tpengine.plan import Kind
from tpengine.training.ahead import StepSamples, read_samples
from tpengine.training.last_output import LastOutput
from tpengine.training.objective import Objective, ObjectiveError, resolved
from tpengine.training.planned_run import RunError
from tpengine.training.samples import HeldOut
from tpengine.training.step_batch import micro_batches_of
from tpengine.training.train_state import TrainState
from tpengine.training.train_step import WeightMoves

# In place of the source of a sample that does not count.
_OF_NONE = -1


@dataclass(frozen=True)
class EvaluatedBatch:
    """The batch of a pass without training (pipeline.stage.Batch): `on_logits` is given the logits."""

    all_tokens: Tensor
    on_logits: Callable[[Tensor, int], None]
    position: Position
    documents: tuple[Documents, ...]

    def begin(self, microbatch: int) -> None:
        """See Batch; without training no layer drops elements."""
        self.position.documents = self.documents[microbatch] if self.documents else None

    def tokens(self, microbatch: int) -> Tensor:
        """See Batch."""
        return self.all_tokens[microbatch]

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        """See Batch."""
        self.on_logits(y, microbatch)
        return y


class ForwardPass:
    """Runs the model of a state forward over given micro-batches, pipelined.

    Args:
        state: has the model, in a phase.
        num_micro_batches, micro_batch_size: per replica and pass.
    """

    def __init__(self, state: TrainState, num_micro_batches: int, micro_batch_size: int) -> None:
        self._state = state
        self._plan = forward_plan(state.part.config, state.part.layout, num_micro_batches, micro_batch_size)

    def run(
        self, tokens: Tensor, on_logits: Callable[[Tensor, int], None], documents: tuple[Documents, ...] = ()
    ) -> None:
        """Run one pass; collective over all ranks.

        Args:
            tokens: [micro-batches, T]; used on the first stage.
            on_logits: (logits[T, V/tp], micro-batch) -> None; called on the last stage.
            documents: those of each micro-batch, on every stage; none where sequences are whole.
        """
        state, rank = self._state, self._state.rank
        at = rank.mesh.at.pp
        stages = state.stages(EvaluatedBatch(tokens, on_logits, state.model.position, documents))
        pipeline = RankPipeline(self._plan, at, stages, rank.mesh.pp, rank.device, rank.mailbox)
        moves = WeightMoves(state.sliced, lambda _: None, state.model.release)
        handlers = {**moves.around(pipeline.handlers()), Kind.WAIT: moves.waiting(pipeline.wait_for)}
        Executor(dist.get_rank(), handlers, activity=rank.activity).run(self._plan.actions[at])


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean losses over the valid targets of the held-out samples, in nats; the same in every layout.

    Attributes:
        of_all: of a mixture the mean of its sources' losses, each by its share in training; None if no target is valid.
        of_source: by name, of those sources of a mixture that have a valid target.
        metrics: by name, as the loss; of a source of a mixture by METRIC/SOURCE. None of one whose count is 0.
    """

    of_all: float | None
    of_source: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def evaluation_pass(state: TrainState) -> ForwardPass:
    """Return the pass over a replica's held-out micro-batches."""
    return ForwardPass(state, evaluation_micro_batches(state.part.config), state.part.config.train.micro_batch_size)


def held_out_loss(state: TrainState, forward: ForwardPass | None = None) -> float | None:
    """Return the held-out loss of all sources; as `held_out_losses`."""
    return held_out_losses(state, forward).of_all


def held_out_losses(
    state: TrainState, forward: ForwardPass | None = None, objective: Objective | None = None
) -> HeldOutLoss:
    """Compute the mean loss over the valid targets of the first held-out samples.

    Their number (config.num_evaluated) is of all replicas, which share the micro-batches as evenly as possible. No
    sample counts twice, so that a short held-out text gives fewer. Collective; equal on all ranks.

    Args:
        forward: the evaluation_pass of this state, in its phase, to verify its plan once for many calls.
        objective: what the run minimises, and its metrics; default next-token loss. Of samples that do not count, or
            are of another source, it is given nothing.

    Raises:
        RunError: on all ranks alike: a rank cannot read its samples, ranks of a replica have read different ones, or
            loss, count or a metric cannot be used.
    """
    objective = resolved(objective, state.part.config.train)
    config, mesh, comms, device = state.part.config, state.rank.mesh, state.rank.comms, state.rank.device
    size, seq_len = config.train.micro_batch_size, config.train.seq_len
    # Read this replica's samples; those beyond the last one do not count.
    each = evaluation_micro_batches(config)
    first = mesh.at.dp * each * size
    samples = _read_held_out(state, first, each * size)
    held_out = state.part.corpus.held_out
    last = min(num_evaluated(config.train), held_out.num_windows)
    sources = held_out.place(np.arange(first, first + each * size))[0]
    sources[max(last - first, 0) :] = _OF_NONE
    # Loss, count, and the same of each metric, have a place for each source of each micro-batch: others add zeros
    # there, which is exact in any order.
    num_rows = 2 * (1 + len(objective.metrics))
    sums = torch.zeros(num_rows, len(held_out.names), mesh.shape.dp * each, dtype=torch.float64, device=device)
    error = ""

    def add(logits: Tensor, microbatch: int) -> None:
        """Add what the samples of each source have."""
        nonlocal error
        hidden, place = state.model.take_hidden(), mesh.at.dp * each + microbatch
        of_samples = sources[microbatch * size : (microbatch + 1) * size]
        for source in np.setdiff1d(of_samples, [_OF_NONE]).tolist():
            which = np.flatnonzero(of_samples == source)
            batch = micro_batches_of(samples.of(microbatch * size + which), seq_len, len(which), device).of(0)
            rows = None if len(which) == size else _rows_of(which, seq_len, device)
            documents = seq_len if batch.documents is None else batch.documents
            output = LastOutput(logits, config.model.vocab_size, comms.tp, documents, hidden, rows)
            try:
                count = objective.count_of(batch)
                found = objective.evaluate(output, batch.to(device), count)
            except ObjectiveError as problem:
                error = error or str(problem)
                return
            for row, value in enumerate((found.loss, count, *chain.from_iterable(found.metrics))):
                sums[row, source, place] = value

    # Run the model, then sum over replicas and stages.
    whole = micro_batches_of(samples, seq_len, size, device)
    keeps_hidden, state.model.keeps_hidden = state.model.keeps_hidden, not objective.is_plain
    try:
        (forward or evaluation_pass(state)).run(to_device(whole.tokens, device), add, whole.documents)
    finally:
        state.model.keeps_hidden = keeps_hidden
    state.rank.activity.begin("summing the held-out loss")
    comms.dp.all_reduce_(sums)
    comms.pp.all_reduce_(sums)
    numbers: list[list[list[float]]] = sums.tolist()
    comms.tp.check()
    if not objective.is_plain and (errors := [of_rank for of_rank in all_gather_json(error) if of_rank]):
        raise RunError(f"{errors[0]} (in the held-out loss)")
    loss, of_source = _means(held_out, *numbers[:2])
    if loss is None and not of_source:
        return HeldOutLoss(None)
    metrics: dict[str, float] = {}
    for place, name in enumerate(objective.metrics, 1):
        metric, of_sources = _means(held_out, *numbers[2 * place : 2 * place + 2])
        metrics |= {} if metric is None else {name: metric}
        metrics |= {f"{name}/{source}": mean for source, mean in of_sources.items()}
    return HeldOutLoss(loss, of_source, metrics)


def _rows_of(samples: NDArray[np.int64], seq_len: int, device: torch.device) -> Tensor:
    """Return the tokens of some samples of a micro-batch, int64."""
    return to_device(torch.from_numpy((samples[:, None] * seq_len + np.arange(seq_len)).reshape(-1)), device)


def _means(
    held_out: HeldOut, sums: list[list[float]], counts: list[list[float]]
) -> tuple[float | None, dict[str, float]]:
    """Return the mean over all sources and, of a mixture, that of each, from sums and counts [sources, places]."""
    totals, number = [math.fsum(of_source) for of_source in sums], [math.fsum(of_source) for of_source in counts]
    means = {place: totals[place] / count for place, count in enumerate(number) if count}
    if len(held_out.names) == 1:
        return means.get(0), {}
    # Weigh each source as training does. One of share 0 has its own loss and no part in the whole.
    shares = {place: held_out.shares[place] for place in means if held_out.shares[place]}
    whole = math.fsum(means[place] * share for place, share in shares.items())
    of_source = {held_out.names[place]: mean for place, mean in means.items()}
    return whole / math.fsum(shares.values()) if shares else None, of_source


def _read_held_out(state: TrainState, first: int, count: int) -> StepSamples:
    """Read samples of the held-out text on the stages that use them, and compare what the ranks of a replica have read.

    Args: first, count: first sample of this rank's replica, and their number.
    Returns: the samples, with tokens and labels that are zeros where neither is used; where documents begin in each
        sample, on every stage, if they are packed.
    """
    state.rank.activity.begin("reading the held-out text")
    samples, model = state.part.corpus.held_out, state.model
    found = read_samples(samples, np.arange(first, first + count), model.is_first or model.is_last)
    digest = None if found.tokens is None else found.digest
    everyone = all_gather_json([state.rank.mesh.at.dp, found.error, digest])
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
    if found.tokens is None:
        nothing = np.zeros((count, samples.seq_len), dtype=np.int64)
        found = replace(found, tokens=nothing, labels=nothing)
    return found


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
