"""The rival: the same training step with torch's own parallelism and nothing else.

It uses `parallelize_module` for tensor parallelism, `torch.distributed.pipelining` for pipelines, DDP or `fully_shard`
for data parallelism, and torch's AdamW. It should be what a good engineer gets from stock torch on the same machine, so
each choice is an option of `RivalOptions`, and its default is the fastest one measured. `benchmarks.run rival` measures
again. On 2 cores, torch 2.13 (rows rival_options of benchmarks/results; tp1 and dp2 beside other processes):

    tp2   whole activations and all-reduce: 1.08 to 1.10 times the speed of activations cut by sequence (gloo's
          reduce-scatter is slow); with them a cut loss: 1.05 times that of gathered logits; torch cannot compile it
    dp2   DDP: 1.10 times fully_shard
    tp1   AdamW fused or foreach, gradients freed or zeroed: within the spread; torch.compile of the blocks: 0.94

Configuration, data, learning rate, the split into stages and the initial values are tpengine's, so that both engines do
the same work; layers and collectives are not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from tpkernels.random import normal_block

from benchmarks.training.contestants import RivalOptions
from benchmarks.training.torch_model import LlamaStage
from benchmarks.training.torch_tensor_parallel import tensor_parallelise
from tpengine.config import IGNORED_LABEL, Config, decay_steps_of
from tpengine.data import Corpus, first_sample_index
from tpengine.layout.parameters import stage_specs
from tpengine.layout.step_plan import layout_of
from tpengine.training.learning_rate import learning_rate


class TorchRival:
    """One rank of a training run in stock torch.

    Args:
        config: validated, layout resolved; CPU, float32 or float64.
        corpus: the text.
        options: the rival's settings.

    Raises:
        ValueError: a layout that stock torch does not offer, on all ranks alike.

    The constructor is collective; the default process group must exist. Ranks are numbered as in distributed/mesh.py.
    """

    def __init__(self, config: Config, corpus: Corpus, options: RivalOptions) -> None:
        check_rival(config)
        parallel = config.parallel
        assert parallel.tp and parallel.pp and parallel.dp
        self.config, self.corpus, self.options = config, corpus, options
        self.tp, self.pp, self.dp = parallel.tp, parallel.pp, parallel.dp
        self.mesh = init_device_mesh("cpu", (self.pp, self.dp, self.tp), mesh_dim_names=("pp", "dp", "tp"))
        self.at_pp, self.at_dp, self.at_tp = (self.mesh.get_local_rank(axis) for axis in ("pp", "dp", "tp"))
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, config.train.dtype))
        try:
            layers = layout_of(config).layers[self.at_pp]
            self.model = LlamaStage(config.model, config.train.seq_len, layers)
        finally:
            torch.set_default_dtype(before)
        if self.tp > 1:
            tensor_parallelise(self.model, self.mesh["tp"], options)
        self._initialise(layers)
        if options.compile:
            for block in self.model.layers.values():
                block.compile()
        self.module = self._data_parallelise()
        self.optimizer = self._optimizer()
        self._scale = 0.0
        self._schedule = self._pipeline() if self.pp > 1 else None

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's part of every parameter, by tpengine's name; the tensors themselves."""
        return {name: _local(p.detach()) for name, p in self.model.named_parameters()}

    def train_step(self, step: int) -> tuple[float, float]:
        """Run one optimizer step.

        Args:
            step: 0-based; decides the data and the learning rate.

        Returns:
            Loss in nats per valid target of the global step, and the global gradient norm before clipping. The loss is
            -inf on ranks that are not in the last stage.
        """
        tokens, labels = self._batch(step)
        self._scale = 1.0 / self._num_targets(labels)
        with loss_parallel() if self._cuts_loss() else contextlib.nullcontext():
            losses = self._run_pipeline(tokens, labels) if self._schedule else self._accumulate(tokens, labels)
        loss = torch.stack(losses).sum() if losses else torch.tensor(-math.inf)
        if self.dp > 1:
            dist.all_reduce(loss, group=self.mesh.get_group("dp"))
        norm = self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optim, step, decay_steps_of(self.config))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.options.zero_to_none)
        return loss.item(), norm

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and labels [micro-batches * B, S] of this replica."""
        train = self.config.train
        first = first_sample_index(
            step,
            self.at_dp,
            self.dp,
            0,
            num_micro_batches=train.num_micro_batches,
            micro_batch_size=train.micro_batch_size,
        )
        tokens, labels = self.corpus.train.batch(first, train.num_micro_batches * train.micro_batch_size)
        return torch.from_numpy(tokens), torch.from_numpy(labels)

    def _num_targets(self, labels: Tensor) -> int:
        count = (labels != IGNORED_LABEL).sum()
        if self.dp > 1:
            dist.all_reduce(count, group=self.mesh.get_group("dp"))
        return int(count)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return this micro-batch's share of the mean over the valid targets of the global step.

        DDP and fully_shard divide the sum of gradients by the number of replicas; it is multiplied in here.
        """
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        return total * (self._scale * self.dp)

    def _accumulate(self, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        """Run forward and backward of every micro-batch; gradients are reduced in the last backward only."""
        pairs = list(zip(*(x.split(self.config.train.micro_batch_size) for x in (tokens, labels)), strict=True))
        losses = []
        for place, (x, y) in enumerate(pairs):
            with self._reducing(place == len(pairs) - 1):
                loss = self._loss(self.module(x), y)
                loss.backward()
            losses.append(_whole(loss.detach()) / self.dp)
        return losses

    @contextlib.contextmanager
    def _reducing(self, reduces: bool) -> Iterator[None]:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(reduces)
            self.module.set_is_last_backward(reduces)
        elif isinstance(self.module, DistributedDataParallel) and not reduces:
            with self.module.no_sync():
                yield
            return
        yield

    def _run_pipeline(self, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        assert self._schedule is not None
        losses: list[Tensor] = []
        if self.at_pp == 0:
            self._schedule.step(tokens)
        elif self.at_pp == self.pp - 1:
            self._schedule.step(target=labels, losses=losses, return_outputs=False)
        else:
            self._schedule.step()
        return [_whole(loss.detach()) / self.dp for loss in losses]

    def _clip(self) -> float:
        """Clip by the global norm, computed from local shards, with each element counted once over tp and pp."""
        sharded: list[Tensor] = []
        replicated: list[Tensor] = []
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                assert isinstance(parameter, DTensor)
                if any(placement.is_partial() for placement in gradient.placements):
                    # The gradient of a norm weight is from this rank's tokens only.
                    gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
                (sharded if _is_cut_over_tp(gradient) else replicated).append(gradient.to_local())
            elif gradient is not None:
                replicated.append(gradient)
        # Norms of parameters that every tp rank holds whole are divided by tp, so that one sum counts them once.
        total = _squared_norm(sharded) + _squared_norm(replicated) / self.tp
        if self.tp > 1:
            dist.all_reduce(total, group=self.mesh.get_group("tp"))
        if self.pp > 1:
            dist.all_reduce(total, group=self.mesh.get_group("pp"))
        if isinstance(self.module, FSDPModule) and self.dp > 1:
            dist.all_reduce(total, group=self.mesh.get_group("dp"))
        norm = math.sqrt(total.item())
        limit = self.config.optim.clip_norm
        if limit and norm > limit:
            torch._foreach_mul_(sharded + replicated, limit / norm)
        return norm

    def _data_parallelise(self) -> nn.Module:
        if self.dp == 1:
            return self.model
        if self.options.data_parallel == "ddp" and self.tp == 1:
            return DistributedDataParallel(
                self.model, process_group=self.mesh.get_group("dp"), gradient_as_bucket_view=True
            )
        # Weights stay whole between micro-batches: gathering them for each costs more time than the memory is worth.
        for block in self.model.layers.values():
            fully_shard(block, mesh=self.mesh["dp"], reshard_after_forward=False)
        fully_shard(self.model, mesh=self.mesh["dp"], reshard_after_forward=False)
        return self.model

    def _optimizer(self) -> torch.optim.Optimizer:
        optim = self.config.optim
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": optim.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=self.options.optimizer == "fused",
            foreach=self.options.optimizer == "foreach",
        )

    def _pipeline(self) -> Any:
        """Return 1F1B over this rank's pipeline; shapes are given, so that no step has to infer them."""
        train, model = self.config.train, self.config.model
        batch, seq, d = train.micro_batch_size, train.seq_len, model.hidden_size
        local_seq = seq // self.tp if self.tp > 1 and self.options.tensor_parallel == "sequence" else seq
        dtype = getattr(torch, train.dtype)
        hidden = torch.empty(batch, local_seq, d, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
        vocab = model.vocab_size // self.tp if self._cuts_loss() else model.vocab_size
        logits = torch.empty(batch, seq, vocab, dtype=dtype, device="meta")
        stage = PipelineStage(
            self.module,
            self.at_pp,
            self.pp,
            torch.device("cpu"),
            input_args=tokens if self.at_pp == 0 else hidden,
            output_args=logits if self.at_pp == self.pp - 1 else hidden,
            group=self.mesh.get_group("pp"),
        )
        return Schedule1F1B(stage, train.num_micro_batches, loss_fn=self._loss, scale_grads=False)

    def _cuts_loss(self) -> bool:
        return self.tp > 1 and self.options.loss == "parallel"

    @torch.no_grad()
    def _initialise(self, layers: tuple[int, int]) -> None:
        """Give every parameter tpengine's initial value: a function of seed, name and global index."""
        config = self.config
        specs = {spec.name: spec for spec in stage_specs(config.model, self.tp, *layers)}
        for name, parameter in self.model.named_parameters():
            spec = specs[name]
            if spec.init_std is None:
                parameter.fill_(1.0)
                continue
            local = _local(parameter)
            offset, size = spec.block(self.tp, self.at_tp)
            assert tuple(local.shape) == size, f"{name}: {tuple(local.shape)} here, {size} there"
            block = normal_block(
                config.train.seed, name, spec.shape, offset, size, std=spec.init_std, dtype=local.dtype
            )
            local.copy_(block)


def check_rival(config: Config) -> None:
    """Refuse a model or layout that this rival cannot run.

    Raises:
        ValueError: the rule, the values, the remedy.
    """
    model, parallel, train = config.model, config.parallel, config.train
    tp, pp = parallel.tp or 1, parallel.pp or 1
    for name, size in (
        ("vocab_size", model.vocab_size),
        ("num_kv_heads", model.num_kv_heads),
        ("seq_len", train.seq_len),
    ):
        if size % tp:
            raise ValueError(f"stock torch needs {name} divisible by tp: {name} {size}, tp {tp}: choose another tp")
    if model.vocab_size % 8:
        raise ValueError(f"the rival does not pad: vocab_size {model.vocab_size}: use a multiple of 8")
    if model.tie_embeddings and pp > 1:
        raise ValueError("stock torch's pipelines do not tie the ends: use an untied head, or pp 1")


def _is_cut_over_tp(tensor: DTensor) -> bool:
    axes = tensor.device_mesh.mesh_dim_names or ()
    return any(axis == "tp" and p.is_shard() for axis, p in zip(axes, tensor.placements, strict=True))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _squared_norm(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
