"""On each rank: a trainer, and digests of what it computes while it runs.

Nothing here takes part in training. Outputs and gradients are hashed where they appear: in module and tensor hooks,
around the handlers of the plan's actions, and where GradientBuckets end a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tpkernels.launch import accumulation_dtype

from tpengine.commands.certify_compare import GRADIENT, OPTIMIZER, WEIGHT, Observation, ObservedPlace, StepPhase
from tpengine.config import Config, num_blocks
from tpengine.data import open_corpus
from tpengine.data_parallel.bucket import FlatBucket
from tpengine.layout.parameters import EMBEDDING, HEAD, Piece, leaf_parts
from tpengine.model.block import Block
from tpengine.pipeline.executor import Handler
from tpengine.plan import Action, Kind
from tpengine.runs.trainer import Trainer
from tpengine.training.train_state import TrainState

# More than there are places within one layer.
_PLACES = 8
# Order of a layer's places in backward: the gradient of an output comes before those of the parameters that follow.
_BACKWARD = ("", "mlp", "mlp.", "post_attention_layernorm.", "self_attn", "self_attn.", "input_layernorm.")


class Witness:
    """One rank of an exact run whose tensors are observed.

    Args:
        config: validated, train.reduction exact.
    """

    def __init__(self, config: Config) -> None:
        self.trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
        self._step = 0
        self._block_length = config.train.num_micro_batches * (config.parallel.dp or 1) // num_blocks(config)
        self._observations: list[Observation] = []
        assert self.trainer.state.buckets.blocks is not None, "fast mode has no bits to certify"
        self._watch_blocks()
        _after_sums(self.trainer, self._see_sums)
        self.trainer.step.executor.handlers = {**self.trainer.step.executor.handlers, **self._watched_handlers()}
        self._watch_modules()

    def step(self, step: int) -> tuple[list[Observation], float]:
        """Run a step; return the observations and the loss."""
        self._step, self._observations = step, []
        result = self.trainer.step.run(step)
        for depth, name in enumerate(("loss", "grad_norm", "lr")):
            value = torch.tensor(getattr(result, name), dtype=torch.float64)
            self._see(StepPhase.UPDATE, self._depth_of_head() * 2 + depth, f"reported {name}", value)
        return self._observations, result.loss

    def _see(
        self,
        phase: StepPhase,
        depth: int,
        name: str,
        tensor: Tensor,
        *,
        shard: int = -1,
        of_microbatch: bool = False,
        replicas_on: int = 0,
    ) -> None:
        """Note a tensor.

        Args: replicas_on: by how many replicas the one it belongs to is behind this rank's.
        """
        microbatch = -1
        if of_microbatch:
            behind = replicas_on * self.trainer.state.part.config.train.num_micro_batches
            microbatch = self.trainer.state.model.position.microbatch + behind
        place = ObservedPlace(self._step, phase, microbatch, depth, name, shard)
        self._observations.append(Observation(place, digest(tensor), str(self.trainer.state.rank.activity.now.what)))

    def _see_blocks_of_tokens(self, phase: StepPhase, depth: int, name: str, rows: Tensor) -> None:
        held = self.trainer.state.model.parts.held
        for shard, block in zip(held, rows.detach().chunk(len(held)), strict=True):
            self._see(phase, depth, name, block, shard=shard, of_microbatch=True)

    def _watch_modules(self) -> None:
        model = self.trainer.state.model
        if model.is_first:
            self._watch_output(model.embed_tokens, "embed_tokens", 0)
        for number, block in model.layers.items():
            assert isinstance(block, Block)
            first = (int(number) + 1) * _PLACES
            self._watch_input(block, f"layers.{number}", first - 1)
            for place, (name, part) in enumerate(block.matmuls().items()):
                self._watch_output(part, f"layers.{number}.{name}", first + place)
            self._watch_output(block, f"layers.{number}", first + 2)
        if model.is_last:
            model.lm_head.register_forward_hook(self._see_logits)

    def _watch_input(self, module: nn.Module, name: str, depth: int) -> None:
        def see(_: nn.Module, given: tuple[Tensor, int]) -> None:
            if self.trainer.state.model.position.training:
                self._see_blocks_of_tokens(StepPhase.FORWARD, depth, f"input of {name}", given[0])

        module.register_forward_pre_hook(see)

    def _watch_output(self, module: nn.Module, name: str, depth: int) -> None:
        def see_gradient(gradient: Tensor) -> None:
            what = f"gradient of the output of {name}"
            self._see_blocks_of_tokens(StepPhase.BACKWARD, self._depth_down(name), what, gradient)

        def see(_: nn.Module, __: Any, output: Tensor) -> None:
            if not self.trainer.state.model.position.training:
                return
            self._see_blocks_of_tokens(StepPhase.FORWARD, depth, f"output of {name}", output)
            if output.requires_grad:
                output.register_hook(see_gradient)

        module.register_forward_hook(see)

    def _see_logits(self, _: nn.Module, __: Any, logits: Tensor) -> None:
        if self.trainer.state.model.position.training:
            for shard, z in zip(self.trainer.state.model.parts.held, logits.detach(), strict=True):
                self._see(StepPhase.FORWARD, self._depth_of_head(), "logits", z, shard=shard, of_microbatch=True)

    def _watched_handlers(self) -> dict[Kind, Handler]:
        handlers = self.trainer.step.executor.handlers

        def forward(action: Action) -> None:
            handlers[Kind.F](action)
            if action.piece[0] == len(self.trainer.state.part.plan.chunks) - 1:
                loss = self.trainer.step.batch.losses[self.trainer.state.model.position.microbatch]
                self._see(StepPhase.FORWARD, self._depth_of_head() + 1, "loss", loss, of_microbatch=True)

        def clip(action: Action) -> None:
            handlers[Kind.CLIP](action)
            self._see(StepPhase.UPDATE, 0, "gradient norm", self.trainer.step.grad_norm)

        def step(action: Action) -> None:
            handlers[Kind.STEP](action)
            self._see_update()

        return {Kind.F: forward, Kind.CLIP: clip, Kind.STEP: step}

    def _watch_blocks(self) -> None:
        """See each bucket when it holds the sum of a block of micro-batches."""
        buckets = self.trainer.state.buckets
        end_block = buckets.end_block

        def seen(index: int) -> None:
            self._see_block(buckets[index])
            end_block(index)

        buckets.end_block = seen  # type: ignore[method-assign]

    def _see_block(self, bucket: FlatBucket) -> None:
        state = self.trainer.state
        held, specs = state.model.parts.held, {piece.spec.name: piece for piece in state.model.pieces.values()}
        for leaf in bucket.views:
            name, rank, head = leaf_parts(leaf)
            piece = specs[name]
            # The last stage's copy of tied embeddings is used as the head.
            head = head or (name == EMBEDDING and not state.model.is_first)
            use = " as output head" if head else ""
            if self._block_length > 1:
                use += f", over {self._block_length} micro-batches to the last"
            # Of experts that ranks share a rank has all shards, and a lane for each of these replicas.
            first = state.rank.mesh.at.dp // bucket.num_lanes * bucket.num_lanes
            for lane in range(bucket.num_lanes):
                for which, gradient in _by_expert(piece, bucket.view_of(leaf, lane)):
                    self._see(
                        StepPhase.BACKWARD,
                        self._depth_down(HEAD if head else name),
                        f"gradient of {name}{which}{use}",
                        gradient,
                        shard=rank if piece.spec.apart else held[rank],
                        of_microbatch=True,
                        replicas_on=first + lane - state.rank.mesh.at.dp,
                    )

    def _see_sums(self) -> None:
        for name, piece in _trained(self.trainer.state).items():
            total = whole(self.trainer.state, name, self.trainer.state.gradients.of.get(name))
            for which, gradient in _by_expert(piece, total):
                self._see(
                    StepPhase.SUM,
                    self._depth_down(piece.spec.name),
                    f"{GRADIENT}{piece.spec.name}{which}",
                    gradient,
                    shard=_shard(piece),
                )

    def _see_update(self) -> None:
        trainer = self.trainer
        dtype = trainer.state.model.held[next(iter(trainer.state.model.held))].dtype
        kinds: dict[str, torch.dtype | None] = dict(trainer.state.optimizer.state_dtypes)
        if accumulation_dtype(dtype) != dtype:
            kinds["master"] = None
        for name, piece in trainer.state.model.pieces.items():
            depth, found = self._depth_down(piece.spec.name), trainer.state.optimizer
            states = found.state_of(name) if name in trainer.state.weights else {}
            # Of what is frozen nothing but the weight is kept.
            for kind, kept in kinds.items() if trainer.state.model.held[name].requires_grad else ():
                tensor = whole(trainer.state, name, states.get(kind), kept)
                self._see_experts(1 + depth, f"{OPTIMIZER}{kind} of {piece.spec.name}", piece, tensor)
            weight = whole(trainer.state, name, trainer.state.held.get(name), trainer.state.model.held[name].dtype)
            self._see_experts(1 + depth, f"{WEIGHT}{piece.spec.name}", piece, weight)

    def _see_experts(self, depth: int, name: str, piece: Piece, tensor: Tensor) -> None:
        for which, part in _by_expert(piece, tensor):
            self._see(StepPhase.UPDATE, depth, name + which, part, shard=_shard(piece))

    def _depth_of_head(self) -> int:
        return (self.trainer.state.part.config.model.num_layers + 1) * _PLACES

    def _depth_down(self, name: str) -> int:
        """Return at which depth backward reaches the output of a module, or a parameter, by its name."""
        path = name.split(".", 2)
        if path[0] != "layers":
            return self._depth_of_head() + len(path) if path[0] == "embed_tokens" else 0
        module = path[2] if len(path) > 2 else ""
        within, parameter, _ = module.partition(".")
        layers_above = self.trainer.state.part.config.model.num_layers - 1 - int(path[1])
        return (layers_above + 1) * _PLACES + _BACKWARD.index(within + parameter)


@dataclass(frozen=True)
class Values:
    """A block of a global tensor, in float64.

    Attributes:
        name: of the tensor.
        offset: where the block begins.
        shape: of the whole.
        values: the block.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    values: NDArray[np.float64]


class Gradients:
    """One rank of a run, fast or exact, that returns its gradients and losses.

    Args:
        config: validated.
        weights_in: dtype that the initial weights are rounded to: that of the run for which this one is the reference.
    """

    def __init__(self, config: Config, weights_in: str) -> None:
        self.trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
        dtype = getattr(torch, weights_in)
        with torch.no_grad():
            for parameter in self.trainer.state.model.held.values():
                # Rounded twice, as a weight is whose master has a wider dtype.
                parameter.copy_(parameter.to(accumulation_dtype(dtype)).to(dtype))
        _after_sums(self.trainer, self._keep)
        self._kept: list[Values] = []

    def step(self, step: int) -> list[Values]:
        """Run a step; return this rank's blocks of the gradients before clipping, and of the losses."""
        self.trainer.step.run(step)
        if not self.trainer.state.model.is_last:
            return self._kept
        losses = self.trainer.step.batch.losses.numpy().copy()
        return [*self._kept, Values("loss of each micro-batch", (0,), losses.shape, losses)]

    def _keep(self) -> None:
        self._kept = []
        for name, piece in _trained(self.trainer.state).items():
            values = whole(self.trainer.state, name, self.trainer.state.gradients.of.get(name)).double().numpy().copy()
            self._kept.append(Values(piece.spec.name, piece.block[0], piece.spec.shape, values))


def _after_sums(trainer: Trainer, see: Callable[[], None]) -> None:
    """Have a trainer call `see` when all sums of its gradients are complete."""
    finish = trainer.state.gradients.finish

    def finished() -> None:
        finish()
        see()

    trainer.state.gradients.finish = finished  # type: ignore[method-assign]


def whole(state: TrainState, name: str, tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole of what replicas own parts of (ZeRO); collective over them.

    Args:
        name: of the piece.
        tensor: this replica's elements of it; None if it owns none; whole where replicas own no parts.
        dtype: of the elements; default that in which gradients are added.
    """
    if not state.is_cut(name):
        assert tensor is not None, f"nothing is held of {name}"
        return tensor
    held = state.model.held[name]
    dtype = dtype or accumulation_dtype(held.dtype)
    found = torch.zeros(held.numel(), dtype=dtype)
    if tensor is not None:
        found[state.elements_of(name)] = tensor.detach()
    # Bits, to which other replicas add zeros: -0.0 + 0.0 would be 0.0.
    bits = found.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    return state.replicas_of(name).all_reduce_(bits).view(dtype).view(held.shape)


def _by_expert(piece: Piece, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a piece's tensor, of experts each one's with its number: ranks have more or fewer of them."""
    if len(piece.spec.shape) == 2 or tensor.dim() == 1:
        yield "", tensor
        return
    for expert, part in enumerate(tensor, piece.block[0][0]):
        yield f" of expert {expert}", part


def _trained(state: TrainState) -> dict[str, Piece]:
    """Return the pieces of a rank that are not frozen."""
    return {name: piece for name, piece in state.model.pieces.items() if state.model.held[name].requires_grad}


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hex."""
    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def _shard(piece: Piece) -> int:
    """Return the first shard of exact mode that holds the piece; -1 for a piece that all hold."""
    return -1 if piece.spec.shard_dim is None else piece.holder
