"""What tests of exact mode share: a small configuration, its training on one rank, the bits of what comes of it.

The bits are one SHA-256 per shard of weights, summed gradients and optimizer state, under the shard's place in the
parameter table of the shards, which no layout changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tpengine.commands.certify_witness import whole
from tpengine.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    num_shards_of,
    optimizer_kind,
    validate,
)
from tpengine.data import open_corpus
from tpengine.layout.groups import frozen_of
from tpengine.layout.parameters import Piece, pieces_of, stage_specs
from tpengine.runs.trainer import Trainer

STEPS = 3
# 8 shards and 8 blocks of micro-batches, the most there are; four times the work.
WIDE: dict[str, Any] = {"heads": 8, "micro_batches": 8}
CPU = torch.device("cpu")

DType = Literal["float64", "float32", "bfloat16", "float16"]
# Those whose optimizer keeps masters.
NARROW = ("bfloat16", "float16")
Reduction = Literal["fast", "exact"]
# (parameter, number of the shard, what of it)
Key = tuple[str, int, str]
Numbers = list[tuple[str, str]]
# Loss and gradient norm of each step, digests of what this rank holds.
Found = tuple[Numbers, dict[Key, str]]


def exact_config(
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    *,
    dtype: DType = "float32",
    tied: bool = True,
    kv_heads: int = 2,
    dropout: float = 0.1,
    reduction: Reduction = "exact",
    schedule: str = "1f1b",
    recompute: Literal["none", "attention", "block", "full"] = "none",
    tp_comm: Literal["fused", "plain"] = "fused",
    layers: int = 5,
    heads: int = 4,
    micro_batches: int = 4,
    steps: int = STEPS,
    **more: Any,
) -> Config:
    """A small model whose every step is clipped: as many shards as heads, 4 or 8.

    5 layers are uneven on 2 and 4 stages, 250 tokens are padded, 2 KV heads are fewer than tp 4. `micro_batches` are
    those of a step, whatever dp is.
    """
    config = Config(
        model=ModelConfig(
            hidden_size=8 * heads,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            ffn_size=96,
            vocab_size=250,
            tie_embeddings=tied,
            residual_dropout=dropout,
            attention_dropout=dropout,
            mlp_dropout=dropout,
        ),
        parallel=ParallelConfig(
            tp=tp, pp=pp, dp=dp, schedule=schedule, recompute=recompute, tp_comm=tp_comm, bucket_bytes=40_000, **more
        ),
        train=TrainConfig(
            seq_len=24,
            micro_batch_size=2,
            num_micro_batches=micro_batches // dp,
            steps=steps,
            seed=5,
            dtype=dtype,
            reduction=reduction,
            eval_micro_batches=3,
        ),
        data=DataConfig(ignore_token=32),
        optim=OptimConfig(clip_norm=0.5, warmup_steps=1),
        device="cpu",
    )
    return validate(config, dp * tp * pp)


def alone(config: Config) -> Config:
    """The same training in one process."""
    in_all = config.train.num_micro_batches * (config.parallel.dp or 1)
    parallel = ParallelConfig(tp=1, pp=1, dp=1, bucket_bytes=config.parallel.bucket_bytes)
    return validate(replace(config, parallel=parallel, train=replace(config.train, num_micro_batches=in_all)), 1)


def num_ranks(config: Config) -> int:
    """Processes of a validated configuration."""
    parallel = config.parallel
    assert parallel.tp and parallel.pp and parallel.dp
    return parallel.tp * parallel.pp * parallel.dp


def train(config: Config) -> Found:
    """Train on this rank."""
    return train_steps(Trainer(config, open_corpus(config), CPU), 0, config.train.steps)


def train_steps(trainer: Trainer, first: int, last: int) -> Found:
    """Train steps [first, last) on this rank."""
    numbers = []
    for step in range(first, last):
        result = trainer.step.run(step)
        numbers.append((result.loss.hex(), result.grad_norm.hex()))
    return numbers, digests_of(trainer)


def digests_of(trainer: Trainer) -> dict[Key, str]:
    """A digest of everything that decides later steps, and of the gradients, for each shard that this rank holds."""
    digests = {}
    # By kind, its dtype; None: that in which gradients are added.
    kinds: dict[str, torch.dtype | None] = {"weight": None, "gradient": None, **trainer.state.optimizer.state_dtypes}
    if trainer.state.part.config.train.dtype in NARROW:
        kinds["master"] = None
    for name, piece in trainer.state.model.pieces.items():
        tensors: dict[str, Tensor] = {}
        if name in trainer.state.weights:
            tensors = {"weight": trainer.state.weights[name], "gradient": trainer.state.gradients.of[name]}
            tensors |= trainer.state.optimizer.state_of(name)
        elif name in trainer.state.frozen:
            tensors = {"weight": trainer.state.frozen[name]}
        is_trained = trainer.state.model.held[name].requires_grad
        for kind, dtype in kinds.items() if is_trained else [("weight", None)]:
            dtype = trainer.state.model.held[name].dtype if kind == "weight" else dtype
            found = whole(trainer.state, name, tensors.get(kind), dtype)
            for which, part in by_expert(piece, found):
                digests[piece.spec.name + which, piece.holder // piece.num_holders, kind] = digest(part)
    return digests


def by_expert(piece: Piece, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A piece's tensor, of experts each one's with its number: ranks have more or fewer of them."""
    if len(piece.spec.shape) < 3:
        yield "", tensor
        return
    for number, part in enumerate(tensor, piece.block[0][0]):
        yield f"/{number}", part


def digest(tensor: Tensor) -> str:
    """SHA-256 of the elements' bytes, row by row."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Bits:
    """What a run of all its ranks came to."""

    numbers: Numbers
    digests: Mapping[Key, str]

    @property
    def hash(self) -> str:
        """One for everything."""
        return hashlib.sha256(repr((self.numbers, sorted(self.digests.items()))).encode()).hexdigest()


def merge(config: Config, found: Sequence[Found]) -> Bits:
    """Put the ranks' results together: ranks that hold the same shard agree, and every shard of the model is there."""
    numbers = found[0][0]
    digests: dict[Key, str] = {}
    for rank, (numbers_of_rank, digests_of_rank) in enumerate(found):
        assert numbers_of_rank == numbers, f"loss or norm of rank {rank} differ from rank 0's"
        for key, value in digests_of_rank.items():
            assert digests.setdefault(key, value) == value, f"rank {rank} holds another {key} than a rank before it"
    size = num_shards_of(config)
    kinds = ["weight", "gradient", *optimizer_kind(config.optim).states]
    kinds += ["master"] * (config.train.dtype in NARROW)
    table = {
        (spec.name + which, piece.holder // piece.num_holders, kind)
        for spec in stage_specs(config.model, size, 0, config.model.num_layers)
        for piece in pieces_of(spec, size, range(size))
        for which in ([f"/{number}" for number in range(spec.shape[0])] if len(spec.shape) > 2 else [""])
        for kind in (["weight"] if spec.name in frozen_of(config) else kinds)
    }
    assert digests.keys() == table, f"not what the table has: {sorted(digests.keys() ^ table)}"
    return Bits(numbers, digests)


def assert_same_bits(got: Bits, want: Bits) -> None:
    """One hash against another; where they differ, say what does."""
    if got.hash != want.hash:
        differing = [key for key in want.digests if got.digests.get(key) != want.digests[key]]
        raise AssertionError(
            f"{len(differing)} of {len(want.digests)} digests differ, the first {differing[:5]}; "
            f"(loss, norm) {got.numbers}, in one process {want.numbers}"
        )
