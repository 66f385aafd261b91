"""The rival of the pipeline benchmark: torch.distributed.pipelining over plain torch modules.

Because of torch 2.13: shapes are given, so that no step infers them; the loss is divided by the number of targets
before backward, so that gradients need no scaling pass; outputs are not collected; `defer_pp_recv` stays off, because
it silently swaps activations in V-shaped schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.pipeline.sides import batch_of, gradients_of, torch_model
from tpengine.config import Config
from tpengine.data import Corpus
from tpengine.layout.step_plan import layout_of

# By tpengine's names; a rank holds one chunk, or several.
_SINGLE: Mapping[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: Mapping[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}
TORCH_SCHEDULES = (*_SINGLE, *_MULTI)


class _CountingStage(PipelineStage):
    """torch's stage, which counts the micro-batches that it keeps for backward; with a callback after each forward."""

    def __init__(self, after_forward: Callable[[], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._after_forward = after_forward
        self.num_live = 0

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Do as PipelineStage, then call back."""
        output = super().forward_one_chunk(*args, **kwargs)
        self.num_live += 1
        self._after_forward()
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Do as PipelineStage. Without its weight half a backward pass ends nothing."""
        result = super().backward_one_chunk(*args, **kwargs)
        self.num_live -= kwargs.get("full_backward", True)
        return result

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Do as PipelineStage."""
        result = super().backward_weight_one_chunk(*args, **kwargs)
        self.num_live -= 1
        return result


class TorchSide:
    """torch's own pipeline over its own modules."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self._stages = _stages(config, self._count)
        self._most_live = 0
        train, name = config.train, config.parallel.schedule
        scale = 1.0 / (train.num_micro_batches * train.micro_batch_size * train.seq_len)

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * scale

        schedule, stages = (_SINGLE[name], self._stages[0]) if name in _SINGLE else (_MULTI[name], self._stages)
        self._schedule = schedule(stages, train.num_micro_batches, loss_fn=loss, scale_grads=False)
        self._batch = lambda: batch_of(config, corpus)

    def step(self) -> float:
        """See Side."""
        tokens, labels = self._batch()
        for stage in self._stages:
            stage.submod.zero_grad()
        losses: list[Tensor] = []
        inputs = (tokens,) if any(stage.is_first for stage in self._stages) else ()
        targets = labels if any(stage.is_last for stage in self._stages) else None
        self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return float(torch.stack(losses).detach().sum()) if losses else float("-inf")

    def gradients(self) -> dict[str, Tensor]:
        """See Side."""
        return {name: grad for stage in self._stages for name, grad in gradients_of(stage.submod).items()}

    def most_live(self) -> int:
        """See Side."""
        return self._most_live

    def _count(self) -> None:
        self._most_live = max(self._most_live, sum(stage.num_live for stage in self._stages))


def _stages(config: Config, after_forward: Callable[[], None]) -> list[_CountingStage]:
    """Return this rank's chunks, as torch's stages with given shapes."""
    train, model, layout = config.train, config.model, layout_of(config)
    dtype, rank = getattr(torch, train.dtype), dist.get_rank()
    tokens = torch.empty(train.micro_batch_size, train.seq_len, dtype=torch.int64, device="meta")
    hidden = torch.empty(*tokens.shape, model.hidden_size, dtype=dtype, device="meta", requires_grad=True)
    logits = torch.empty(*tokens.shape, model.vocab_size, dtype=dtype, device="meta")
    last = len(layout.layers) - 1
    return [
        _CountingStage(
            after_forward,
            torch_model(config, layout.layers[chunk]),
            chunk,
            last + 1,
            torch.device("cpu"),
            input_args=tokens if chunk == 0 else hidden,
            output_args=logits if chunk == last else hidden,
        )
        for chunk in layout.chunks_of(rank)
    ]


def check_rival(config: Config) -> None:
    """Refuse what torch.distributed.pipelining, or the modules here, do not have.

    Raises:
        ValueError: the rule, the values, the remedy.
    """
    model, name, num = config.model, config.parallel.schedule, config.train.num_micro_batches
    if name not in TORCH_SCHEDULES:
        raise ValueError(f"torch has the schedules {', '.join(TORCH_SCHEDULES)}: got {name!r}: use those, or --predict")
    pp = config.parallel.pp or 1
    if name == "interleaved" and num % pp:
        raise ValueError(
            f"torch interleaves micro-batches in groups of pp: {num} micro-batches, pp {pp}: use --micro-batches "
            f"{-(-num // pp) * pp}"
        )
    if model.vocab_size % 8 or model.tie_embeddings:
        raise ValueError(
            f"torch's modules here neither pad nor tie: vocab_size {model.vocab_size}, tie_embeddings "
            f"{model.tie_embeddings}: use a vocabulary divisible by 8 and an untied head"
        )
