"""A pass of micro-batches through the trainer's model without training, pipelined, by a verified forward-only plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from tpengine.layers.dropout import Position
from tpengine.layers.rows.documents import Documents
from tpengine.layout.step_plan import forward_plan
from tpengine.pipeline.executor import Executor
from tpengine.pipeline.handlers import RankPipeline
from tpengine.plan import Kind
from tpengine.training.trainer import Trainer


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
    """Runs the trainer's model forward over given micro-batches, pipelined.

    Args:
        trainer: has the model and the mesh.
        num_micro_batches, micro_batch_size: per replica and pass.
    """

    def __init__(self, trainer: Trainer, num_micro_batches: int, micro_batch_size: int) -> None:
        self._trainer = trainer
        self._plan = forward_plan(trainer.config, trainer.layout, num_micro_batches, micro_batch_size)

    def run(
        self, tokens: Tensor, on_logits: Callable[[Tensor, int], None], documents: tuple[Documents, ...] = ()
    ) -> None:
        """Run one pass; collective over all ranks.

        Args:
            tokens: [micro-batches, T]; used on the first stage.
            on_logits: (logits[T, V/tp], micro-batch) -> None; called on the last stage.
            documents: those of each micro-batch, on every stage; none where sequences are whole.
        """
        trainer = self._trainer
        at = trainer.mesh.at.pp
        stages = trainer.make_stages(_Evaluated(tokens, on_logits, trainer.model.position, documents))
        pipeline = RankPipeline(self._plan, at, stages, trainer.mesh.pp, trainer.device, trainer.mailbox)
        handlers = {**trainer.moves.around(pipeline.handlers()), Kind.WAIT: trainer.moves.waiting(pipeline.wait_for)}
        Executor(dist.get_rank(), handlers, activity=trainer.activity).run(self._plan.actions[at])
