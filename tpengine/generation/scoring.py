"""One rank of `tpengine logprobs`: builds its part of a model, fills it, and says how likely it finds each label.

A pass is that of a held-out loss: micro-batches through a verified forward-only plan, each replica its own. What a user
can mend is returned in words, as rank.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tpengine.config import Config
from tpengine.distributed.launch import Launch
from tpengine.distributed.mesh import Shape, exchange_seconds
from tpengine.distributed.process import choose_device, to_device
from tpengine.generation.decoder import executor_of
from tpengine.generation.rank import build, check_memory, rank_bytes
from tpengine.layers.token_values import token_logprobs
from tpengine.layout.step_plan import forward_plan, layout_of
from tpengine.model.transformer import Transformer
from tpengine.pipeline.transfers import open_mailbox
from tpengine.runs.evaluation import EvaluatedBatch
from tpengine.runs.restoring import on_all_ranks
from tpengine.training.planned_run import RunError
from tpengine.training.step_batch import documents_of

_LOGITS = "logits", "a shorter --seq-len"


class ScoringRank:
    """What a started rank holds (distributed/local_ranks.py).

    Args:
        config: validated; train says the shape of a pass, model.path where the weights are.
        num_threads: of a rank on a CPU.
        fill: as GeneratingRank.
    """

    def __init__(self, config: Config, num_threads: int, fill: Callable[[Transformer, Config], None]) -> None:
        torch.set_num_threads(num_threads)
        self._config, self._fill = config, fill

    def prepare(self) -> str:
        """Build the model and read its weights; collective. Returns what is wrong, on all ranks alike, or nothing."""
        config, rank, world = self._config, dist.get_rank(), dist.get_world_size()
        train = config.train
        try:
            device = choose_device(config.device, Launch(rank, world, rank, world))
            layout = layout_of(config)
            weights, _ = rank_bytes(config, layout, [], 0)
            num_logits = (
                train.micro_batch_size * train.seq_len * config.model.vocab_size // Shape.of(config.parallel).tp
            )
            more = num_logits * getattr(torch, train.dtype).itemsize
            on_all_ranks(lambda: check_memory(weights, more, device, _LOGITS))
            # As in training, rows are cut over tp.
            self._ranks = build(config, layout, device, lambda tp: tp)
            self._fill(self._ranks.model, config)
        except (RunError, ValueError) as problem:  # a CheckpointError is one
            return str(problem)
        self._plan = forward_plan(config, layout, train.num_micro_batches, train.micro_batch_size)
        self._mailbox = open_mailbox([self._plan], self._ranks.mesh.pp, device, exchange_seconds(config))
        return ""

    def score(
        self, tokens: NDArray[np.int32], labels: NDArray[np.int32], starts: Sequence[NDArray[np.int64]]
    ) -> NDArray[np.float32] | None:
        """Return log softmax(logits)[label] of each label; collective.

        Args:
            tokens, labels: of the samples of all replicas, [dp * micro-batches * micro-batch size, S].
            starts: where documents begin in each, after its first token; none where each sample is one.

        Returns: of this replica's samples, [micro-batches * micro-batch size, S], 0 where a label is ignored; None but
            on the first tp rank of the last stage.
        """
        ranks, train = self._ranks, self._config.train
        at, shape, plan = ranks.mesh.at, ranks.mesh.shape, self._plan
        # Take this replica's samples.
        each = len(tokens) // shape.dp
        mine = slice(at.dp * each, (at.dp + 1) * each)
        own_tokens, own_labels = (
            to_device(torch.from_numpy(of[mine]).long().view(train.num_micro_batches, -1), ranks.device)
            for of in (tokens, labels)
        )
        documents = documents_of(starts[mine], train.seq_len, train.micro_batch_size, ranks.device)
        vocab_size, tp = ranks.config.model.vocab_size, ranks.comms.tp
        found: dict[int, Tensor] = {}

        def keep(logits: Tensor, microbatch: int) -> None:
            found[microbatch] = token_logprobs(logits, own_labels[microbatch], vocab_size, tp)

        # Run the model, as a held-out loss does.
        batch = EvaluatedBatch(own_tokens, keep, ranks.model.position, documents)
        with torch.no_grad():
            executor_of(ranks, plan, batch, train.seq_len, self._mailbox).run(plan.actions[at.pp])
        tp.check()
        if not found or at.tp:
            return None
        of_all = torch.stack([found[number] for number in range(train.num_micro_batches)])
        values: NDArray[np.float32] = of_all.float().cpu().numpy().reshape(each, -1)
        return values
