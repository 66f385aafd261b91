"""What parity tests share: a small configuration, its training on one rank, the comparison with one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from tpengine.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig, validate
from tpengine.data import open_corpus
from tpengine.runs.trainer import Trainer

STEPS = 3
Outcome = tuple[Sequence[tuple[float, ...]], dict[str, tuple[tuple[int, ...], torch.Tensor]]]


def config_of(
    dp: int,
    tp: int,
    pp: int,
    *,
    tied: bool,
    kv_heads: int,
    heads: int = 4,
    schedule: str = "1f1b",
    chunks_per_rank: int = 2,
    recompute: Literal["none", "attention", "block", "full"] = "none",
    gathered: Literal["keep", "again"] = "keep",
    tp_comm: Literal["fused", "plain"] = "fused",
    num_layers: int = 5,
    num_micro_batches: int = 4,
    **parallel: Any,
) -> Config:
    """A small model; the global batch is 4 micro-batches whatever dp is. Other parallel settings by their names."""
    config = Config(
        model=ModelConfig(
            hidden_size=8 * heads,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            ffn_size=48,
            vocab_size=250,
            tie_embeddings=tied,
        ),
        parallel=ParallelConfig(
            tp=tp,
            pp=pp,
            dp=dp,
            schedule=schedule,
            chunks_per_rank=chunks_per_rank,
            recompute=recompute,
            gathered=gathered,
            tp_comm=tp_comm,
            bucket_bytes=40_000,
            **parallel,
        ),
        train=TrainConfig(
            seq_len=24,
            micro_batch_size=2,
            num_micro_batches=num_micro_batches // dp,
            steps=STEPS,
            seed=5,
            dtype="float64",
        ),
        data=DataConfig(ignore_token=32),
        optim=OptimConfig(clip_norm=0.5, warmup_steps=1),
        device="cpu",
    )
    return validate(config, dp * tp * pp)


def train(config: Config) -> Outcome:
    """Train on this rank."""
    return outcome_of(Trainer(config, open_corpus(config), torch.device("cpu")))


def outcome_of(trainer: Trainer) -> Outcome:
    """Run the steps; return (loss, norm) by step and name -> (block offset, local parameter)."""
    numbers = []
    for step in range(STEPS):
        result = trainer.step.run(step)
        numbers.append((result.loss, result.grad_norm))
    with whole_weights(trainer):
        parameters = {
            name: (trainer.state.model.pieces[name].block[0], parameter.detach().clone())
            for name, parameter in trainer.state.model.held.items()
        }
    return numbers, parameters


@contextmanager
def whole_weights(trainer: Trainer) -> Iterator[None]:
    """Gather what replicas own of each other's weights; collective. Then leave them as they were."""
    sliced = trainer.state.sliced
    indices = () if sliced is None else tuple(sliced.flat)
    had_memory = (
        {index: sliced.flat[index].untyped_storage().nbytes() > 0 for index in indices} if sliced is not None else {}
    )
    for index in indices:
        assert sliced is not None
        sliced.gather(index)
        sliced.wait(index)
    yield
    for index in indices:
        if sliced is not None and not had_memory[index]:
            sliced.free(index)


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, least: float = 0.0) -> None:
    error = (got - want).abs().max().item()
    assert error <= 1e-9 * max(want.abs().max().item(), least), f"{name}: error {error}"


def compare(outcomes: list[Outcome], reference: Outcome, least: float = 0.0) -> None:
    """Every rank's numbers and shards against the whole tensors of one process.

    Errors are relative to the largest element, or to `least` if all elements are smaller.

    Vocabulary padding depends on tp: rows that only one side has are compared with nothing. Every element of the
    reference must have been compared, whichever replica held it.
    """
    want_numbers, want = reference
    compared = {name: torch.zeros_like(whole, dtype=torch.bool) for name, (_, whole) in want.items()}
    for numbers, parameters in outcomes:
        for got_step, want_step in zip(numbers, want_numbers, strict=True):
            for got_number, want_number in zip(got_step, want_step, strict=True):
                assert abs(got_number - want_number) <= 1e-9 * abs(want_number), (numbers, want_numbers)
        for name, (offset, local) in parameters.items():
            whole = want[name][1]
            cut = tuple(slice(o, min(o + s, n)) for o, s, n in zip(offset, local.shape, whole.shape, strict=True))
            if (expected := whole[cut]).numel():
                assert_close(name, local[tuple(slice(0, n) for n in expected.shape)], expected, least)
            compared[name][cut] = True
    for name, seen in compared.items():
        assert seen.all(), f"{name}: {int((~seen).sum())} elements were not compared"
