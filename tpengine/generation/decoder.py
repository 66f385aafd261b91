"""Passes of a model over prompts, and over one token of each after them, through verified forward-only plans.

A pass is a plan of one micro-batch, as that of a held-out loss is: stages are the model's chunks, transfers the plan's.
All that is new is what the rows of a pass are: tokens that follow on a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from tpkernels.exchange.mailbox import Mailbox

from tpengine.config import Config
from tpengine.distributed.groups import Communicators, exchange_seconds
from tpengine.distributed.mesh import Mesh
from tpengine.generation.draw import draw
from tpengine.generation.drawing import Drawing
from tpengine.layers import KeyValueCache
from tpengine.layout.step_plan import Layout, forward_plan
from tpengine.model.transformer import Transformer
from tpengine.pipeline.executor import Executor
from tpengine.pipeline.handlers import RankPipeline
from tpengine.pipeline.stage import Stage
from tpengine.pipeline.transfers import open_mailbox
from tpengine.plan import Kind, Plan

MOST_ROWS = 512
"""Rows of a pass, but for one token of each sequence: longer prompts are read in pieces, for the logits to fit."""


@dataclass(frozen=True)
class Ranks:
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


@dataclass
class _Pass:
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


class Decoder:
    """Continues sequences token by token; collective over all ranks, each of which knows every token.

    Args:
        ranks: this one's model, and the others.
        prompts: at least one token each; those of one call are continued together.
        room: how many tokens each is continued by at most.
        drawing: how.

    Memory: layers.cache.cache_bytes.
    """

    def __init__(self, ranks: Ranks, prompts: Sequence[Sequence[int]], room: int, drawing: Drawing) -> None:
        self._ranks, self._drawing, self._num_drawn = ranks, drawing, 0
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        self._cache = KeyValueCache(longest + room, lengths, device=ranks.device)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self._next = torch.tensor(padded, device=ranks.device)
        self._plans: dict[int, Plan] = {}
        self._mailbox = self._open_mailbox(most_rows(lengths))

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
        ranks, cache, at = self._ranks, self._cache, self._ranks.mesh.at.pp
        cache.follow(tokens.shape[1])
        batch = _Pass(tokens.flatten())
        plan = self._plan_of(len(batch.rows))
        last = len(plan.chunks) - 1
        stages = {
            chunk: Stage(
                partial(ranks.model, seq=cache, chunk=number), batch, is_first=chunk == 0, is_last=chunk == last
            )
            for number, chunk in enumerate(plan.chunks_of(at))
        }
        pipeline = RankPipeline(plan, at, stages, ranks.mesh.pp, ranks.device, self._mailbox)
        handlers = {**pipeline.handlers(), Kind.WAIT: pipeline.wait}
        Executor(dist.get_rank(), handlers).run(plan.actions[at])
        ranks.comms.tp.check()
        return batch.logits

    def _whole_rows(self, logits: Tensor) -> Tensor:
        """Return the last token's logits of each sequence, of the whole vocabulary: [B, V]."""
        cache, ranks = self._cache, self._ranks
        last = torch.arange(1, cache.num_sequences + 1, device=logits.device) * cache.num_new - 1
        columns = logits[last].T.contiguous()
        return ranks.comms.tp.all_gather(columns)[: ranks.config.model.vocab_size].T.contiguous()

    def _plan_of(self, num_rows: int) -> Plan:
        """Return the plan of a pass over so many rows; there are a few kinds."""
        if num_rows not in self._plans:
            config = self._ranks.config
            # Every tp rank has all rows: together as many as a plan with so many times the tokens cuts.
            seq_len = num_rows * self._ranks.comms.tp.size
            sized = replace(config, train=replace(config.train, seq_len=seq_len))
            self._plans[num_rows] = forward_plan(sized, self._ranks.layout, 1, 1)
        return self._plans[num_rows]

    def _open_mailbox(self, num_rows: int) -> Mailbox | None:
        ranks = self._ranks
        return open_mailbox([self._plan_of(num_rows)], ranks.mesh.pp, ranks.device, exchange_seconds(ranks.config))
