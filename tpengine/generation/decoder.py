"""Passes of a model over prompts, and over one token of each after them, through verified forward-only plans.

A pass is a plan of one micro-batch, as that of a held-out loss is: stages are the model's chunks, transfers the plan's.
All that is new is what the rows of a pass are: tokens that follow on a cache.
The next token of each sequence is drawn from its row of logits by counters: no generator has a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.random import uniform

from tpengine.config import Config
from tpengine.distributed.mesh import Communicators, Mesh, exchange_seconds
from tpengine.generation.text import Drawing
from tpengine.layers import KeyValueCache
from tpengine.layout.step_plan import Layout, forward_plan
from tpengine.model.transformer import Transformer
from tpengine.pipeline.executor import Executor
from tpengine.pipeline.stage import Batch, RankPipeline, Stage
from tpengine.pipeline.transfers import open_mailbox
from tpengine.plan import Kind, Plan

MOST_ROWS = 512
"""Rows of a pass, but for one token of each sequence: longer prompts are read in pieces, for the logits to fit."""


@dataclass(frozen=True)
class DecoderRank:
    """A rank's model and whom it computes with.

    Attributes:
        config: validated, of one replica; train.seq_len is at least the rows of any pass (`most_rows`).
        layout, mesh, comms, model: of that configuration.
        device: where this rank computes.
    """

    config: Config
    layout: Layout
    mesh: Mesh
    comms: Communicators
    model: Transformer
    device: torch.device


def most_rows(lengths: Sequence[int]) -> int:
    """Return the rows of the largest pass over prompts of these lengths."""
    return len(lengths) * min(max(lengths), max(1, MOST_ROWS // len(lengths)))


def rows_to_prepare(num_sequences: int) -> int:
    """Return the rows of the passes that a model's matrices are laid out for, where so many sequences are continued.

    One sequence: one row. Its prompt's rows are multiplied as if nothing was laid out, which takes somewhat longer.
    Several: any number, since few rows are as fast as many then.
    """
    return 1 if num_sequences == 1 else MOST_ROWS


@dataclass
class _Batch:
    """The only micro-batch of a pass (pipeline.stage.Batch); keeps the logits of the last stage."""

    rows: Tensor
    logits: Tensor | None = None

    def begin(self, microbatch: int) -> None:
        """Do nothing: nothing is dropped."""

    def tokens(self, microbatch: int) -> Tensor:
        """See Batch."""
        return self.rows

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        """See Batch."""
        self.logits = y
        return y


def executor_of(
    ranks: DecoderRank, plan: Plan, batch: Batch, seq: KeyValueCache | int, mailbox: Mailbox | None
) -> Executor:
    """Return what runs this rank's actions of a forward-only plan, plan.actions[pp].

    Args:
        ranks: this one's model, and the others.
        plan: verified.
        batch: the micro-batches of a pass.
        seq: what rows follow on, or the length of sequences.
        mailbox: carries the plan's messages.
    """
    at, last = ranks.mesh.at.pp, len(plan.chunks) - 1
    stages = {
        chunk: Stage(partial(ranks.model, seq=seq, chunk=number), batch, is_first=chunk == 0, is_last=chunk == last)
        for number, chunk in enumerate(plan.chunks_of(at))
    }
    pipeline = RankPipeline(plan, at, stages, ranks.mesh.pp, ranks.device, mailbox)
    return Executor(dist.get_rank(), {**pipeline.handlers(), Kind.WAIT: pipeline.wait})


class _Pass:
    """A pass over so many rows on this rank: stages and transfers of one verified plan, made once and run often.

    Args:
        ranks: this one's model, and the others.
        cache: what the rows follow on.
        num_rows: of a pass.
        plan: of so many rows.
        mailbox: carries the plan's messages.
    """

    def __init__(
        self, ranks: DecoderRank, cache: KeyValueCache, num_rows: int, plan: Plan, mailbox: Mailbox | None
    ) -> None:
        self.num_rows = num_rows
        self._batch = _Batch(torch.empty(0, dtype=torch.int64, device=ranks.device))
        self._executor = executor_of(ranks, plan, self._batch, cache, mailbox)
        self._actions = plan.actions[ranks.mesh.at.pp]

    def run(self, rows: Tensor) -> Tensor | None:
        """Run over tokens [T], which the cache has been told of; return the logits [T, V/tp] on the last stage."""
        self._batch.rows = rows
        self._executor.run(self._actions)
        logits, self._batch.logits = self._batch.logits, None
        return logits


class Decoder:
    """Continues sequences token by token; collective over all ranks, each of which knows every token.

    Args:
        ranks: this one's model, and the others.
        prompts: at least one token each; those of one call are continued together.
        room: how many tokens each is continued by at most.
        drawing: how.
        num_drawn: by those before, whose draws are not repeated.

    Memory: layers.rows.cache.cache_bytes.
    """

    def __init__(
        self, ranks: DecoderRank, prompts: Sequence[Sequence[int]], room: int, drawing: Drawing, num_drawn: int = 0
    ) -> None:
        self._ranks, self._drawing, self._num_drawn = ranks, drawing, num_drawn
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        self._cache = KeyValueCache(longest + room, lengths, device=ranks.device)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self._next = torch.tensor(padded, device=ranks.device)
        most = most_rows(lengths)
        plan, seconds = _plan_of(ranks, most), exchange_seconds(ranks.config)
        self._mailbox = open_mailbox([plan], ranks.mesh.pp, ranks.device, seconds)
        # Prompts come first, in pieces of one size and a smaller one, then token after token: one is enough to keep.
        self._pass = _Pass(ranks, self._cache, most, plan, self._mailbox)

    def step(self) -> list[int]:
        """Read what is new (first the prompts, then the tokens drawn last), and draw the next token of each sequence.

        Returns:
            The tokens, equal on all ranks.

        Raises:
            ValueError: there is no room for more.
        """
        width = max(1, MOST_ROWS // len(self._next))
        for piece in self._next.split(width, dim=1):
            logits = self._run(piece)
        drawn = torch.full((len(self._next),), -1, dtype=torch.int64, device=self._ranks.device)
        if logits is not None:
            drawn = draw(self._whole_rows(logits), self._num_drawn, self._drawing)
        # Other stages have -1.
        self._ranks.comms.pp.all_reduce_max_(drawn)
        self._num_drawn += 1
        self._next = drawn[:, None]
        tokens: list[int] = drawn.tolist()
        return tokens

    def _run(self, tokens: Tensor) -> Tensor | None:
        """Run a pass over tokens [B, S]; return the logits [T, V/tp] on the last stage."""
        self._cache.follow(tokens.shape[1])
        logits = self._pass_of(tokens.numel()).run(tokens.flatten())
        self._ranks.comms.tp.check()
        return logits

    def _whole_rows(self, logits: Tensor) -> Tensor:
        """Return the last token's logits of each sequence, of the whole vocabulary: [B, V]."""
        cache, tp = self._cache, self._ranks.comms.tp
        last = logits[cache.num_new - 1 :: cache.num_new]
        whole = last if tp.size == 1 else tp.all_gather(last.T.contiguous()).T
        # Laid out alike in every layout: so draws add up probabilities in one order.
        return whole[:, : self._ranks.config.model.vocab_size].contiguous()

    def _pass_of(self, num_rows: int) -> _Pass:
        if self._pass.num_rows != num_rows:
            plan = _plan_of(self._ranks, num_rows)
            self._pass = _Pass(self._ranks, self._cache, num_rows, plan, self._mailbox)
        return self._pass


def _plan_of(ranks: DecoderRank, num_rows: int) -> Plan:
    # Every tp rank has all rows: together as many as a plan with so many times the tokens cuts.
    seq_len = num_rows * ranks.comms.tp.size
    sized = replace(ranks.config, train=replace(ranks.config.train, seq_len=seq_len))
    return forward_plan(sized, ranks.layout, 1, 1)


def draw(logits: Tensor, number: int, how: Drawing) -> Tensor:
    """Draw a token for each sequence.

        next = argmax over the kept v of logits[v] / temperature + g[v],   g[v] = -log(-log(uniform[v]))

    Adding Gumbel noise and taking the maximum draws from the softmax over what is kept. Equal logits give equal tokens,
    whoever draws, and whatever is drawn besides.

    Args:
        logits: [B, V], without padding.
        number: how many tokens have been drawn before.
        how: see Drawing.

    Returns:
        int64 [B].

    Source: Maddison et al., "A* sampling", NeurIPS 2014, section 2; top-p: Holtzman et al., arXiv 1904.09751.
    """
    if how.temperature == 0:
        return logits.argmax(-1)
    scores = _kept(logits.double() / how.temperature, how)
    columns = torch.arange(logits.shape[1], device=logits.device)
    noise = torch.stack([uniform(how.seed, f"generate/{row}/{number}", columns) for row in range(len(logits))])
    return (scores - (-noise.log()).log()).argmax(-1)


def _kept(scores: Tensor, how: Drawing) -> Tensor:
    """Return scores [B, V], those that may not be drawn as -inf."""
    if 0 < how.top_k < scores.shape[1]:
        least = scores.topk(how.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if how.top_p < 1:
        ordered, places = scores.sort(descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        # What is likelier has enough already. The likeliest of all always stays.
        enough = probabilities.cumsum(-1) - probabilities >= how.top_p
        scores = scores.masked_fill(enough.scatter(1, places, enough), -torch.inf)
    return scores
