"""A pass of micro-batches through a run's model without training, pipelined, by a verified forward-only plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from tpengine.layers.dropout import Position
from tpengine.layers.rows import Documents
from tpengine.layout.step_plan import forward_plan
from tpengine.pipeline.executor import Executor
from tpengine.pipeline.handlers import RankPipeline
from tpengine.plan import Kind
from tpengine.training.train_state import TrainState
from tpengine.training.weight_moves import WeightMoves


@dataclass(frozen=True)
class _Evaluated:
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
        stages = state.stages(_Evaluated(tokens, on_logits, state.model.position, documents))
        pipeline = RankPipeline(self._plan, at, stages, rank.mesh.pp, rank.device, rank.mailbox)
        moves = WeightMoves(state.sliced, lambda _: None, state.model.release)
        handlers = {**moves.around(pipeline.handlers()), Kind.WAIT: moves.waiting(pipeline.wait_for)}
        Executor(dist.get_rank(), handlers, activity=rank.activity).run(self._plan.actions[at])
