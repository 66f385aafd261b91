"""The contestants of the pipeline benchmark: one rank of a pipeline that runs a schedule's step, without an update.

    engine      tpengine's trainer with its own layers
    sequential  tpengine.modules.Pipeline over torch's modules
    torch       torch.distributed.pipelining over the same modules: rival.py

All have the same weights in the same layers of the same chunks. A step is forward and backward of the same
micro-batches, from reading the data to complete gradients. No contestant clips or updates, so every step does the same.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tpkernels.random import normal_block

from benchmarks.training.torch_model import Block
from tpengine.config import Config, ModelConfig
from tpengine.data import Corpus
from tpengine.layout.parameters import stage_specs
from tpengine.layout.step_plan import layout_of
from tpengine.modules import Pipeline
from tpengine.pipeline.executor import Executor
from tpengine.plan import Kind
from tpengine.runs.trainer import Trainer

# torch's modules leave weight gradients to autograd, which computes both halves of a backward together.
SEQUENTIAL_SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Side(Protocol):
    """One rank of a contestant."""

    def step(self) -> float:
        """Run a step; return the loss, or -inf on a rank that does not know it."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last step on this rank, by tpengine's names."""
        ...

    def most_live(self) -> int:
        """Return the most (chunk, micro-batch) pairs held for backward at once on this rank: from F to B, or to W."""
        ...


class EngineSide:
    """tpengine as its command trains, except for the update."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self.trainer = Trainer(config, corpus, torch.device("cpu"))
        handlers = {
            **self.trainer.step.executor.handlers,
            Kind.CLIP: lambda _: self.trainer.state.gradients.finish(),
            Kind.STEP: lambda _: self.trainer.state.model.release(),
        }
        self.trainer.step.executor = Executor(dist.get_rank(), handlers)
        train = config.train
        # One replica, and every label counts.
        self._num_targets = train.num_micro_batches * train.micro_batch_size * train.seq_len

    def step(self) -> float:
        """As Side. The loss is reduced with the gradients' norm, which a step without update does not need."""
        self.trainer.step.run(0)
        if not self.trainer.state.model.is_last:
            return float("-inf")
        return float(self.trainer.step.batch.losses.sum()) / self._num_targets

    def gradients(self) -> dict[str, Tensor]:
        """See Side."""
        return dict(self.trainer.state.gradients.of)

    def most_live(self) -> int:
        """See Side."""
        return self.trainer.step.pipeline.most_live


class SequentialSide:
    """tpengine's pipeline over torch's modules."""

    def __init__(self, config: Config, corpus: Corpus) -> None:
        train, layout = config.train, layout_of(config)
        model = torch_model(config, (0, config.model.num_layers))
        sample = torch.from_numpy(corpus.train.batch(0, train.micro_batch_size)[0])
        self._pipe = Pipeline(
            model,
            sample,
            lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            num_micro_batches=train.num_micro_batches,
            schedule=config.parallel.schedule,
            chunks_per_rank=config.parallel.chunks_per_rank,
            cut=[_num_modules(config.model, span) for span in layout.layers],
        )
        self._batch = lambda: batch_of(config, corpus)

    def step(self) -> float:
        """See Side."""
        self._pipe.stage.zero_grad()
        return self._pipe.step(*self._batch())

    def gradients(self) -> dict[str, Tensor]:
        """See Side."""
        return gradients_of(self._pipe.stage)

    def most_live(self) -> int:
        """As Side, from the list that was run: the pipeline's stages exist during a step only."""
        live = most = 0
        for action in self._pipe.plan.actions[dist.get_rank()]:
            live += {Kind.F: 1, Kind.B: -1}.get(action.kind, 0)
            most = max(most, live)
        return most


class Head(nn.Module):
    """Logits of x[B, S, D]: the last norm and the output matrix."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x[B, S, D] -> logits[B, S, V]."""
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def torch_model(config: Config, layers: tuple[int, int]) -> nn.Sequential:
    """Return layers [first, last) as torch's modules, with embedding and head in their stages, and tpengine's weights.

    Tokens[B, S] or x[B, S, D] -> x[B, S, D] or logits[B, S, V].
    """
    model, (first, last) = config.model, layers
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.train.dtype))
    try:
        if first == 0:
            modules["embed_tokens"] = nn.Embedding(model.vocab_size, model.hidden_size)
        modules |= {str(layer): Block(model, config.train.seq_len) for layer in range(first, last)}
        if last == model.num_layers:
            modules["head"] = Head(model)
    finally:
        torch.set_default_dtype(before)
    made = nn.Sequential(modules)
    specs = {spec.name: spec for spec in stage_specs(model, 1, first, last)}
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            spec = specs[_engine_name(name)]
            if spec.init_std is None:
                parameter.fill_(1.0)
                continue
            whole = tuple(parameter.shape)
            parameter.copy_(
                normal_block(
                    config.train.seed,
                    spec.name,
                    spec.shape,
                    (0,) * len(whole),
                    whole,
                    std=spec.init_std,
                    dtype=parameter.dtype,
                )
            )
    return made


def _num_modules(model: ModelConfig, layers: tuple[int, int]) -> int:
    first, last = layers
    return last - first + (first == 0) + (last == model.num_layers)


def batch_of(config: Config, corpus: Corpus) -> tuple[Tensor, Tensor]:
    """Return tokens and labels [micro-batches * B, S] of step 0."""
    train = config.train
    tokens, labels = corpus.train.batch(0, train.num_micro_batches * train.micro_batch_size)
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of one of torch's modules, by tpengine's names."""
    return {_engine_name(name): p.grad for name, p in module.named_parameters() if p.grad is not None}


def _engine_name(name: str) -> str:
    """Return tpengine's name of a parameter of `torch_model`."""
    return f"layers.{name}" if name[0].isdigit() else name.removeprefix("head.")
