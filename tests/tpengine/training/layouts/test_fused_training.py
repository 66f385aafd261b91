"""Rung: interpreter, several processes. A training step whose matmuls exchange inside their kernels.

All of the engine's kernels are interpreted, on ranks that share memory. Numbers err from float64's by at most twice as
much as a host's in float32.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool
from tpkernels.exchange import device_arena
from tpkernels.exchange.communicator import Communicator

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.distributed.mesh import Communicators
from tpengine.runs.trainer import Trainer

pytest.importorskip("triton")

Numbers = dict[str, float]


def config(tp: int, dtype: str, *, small: bool = True) -> Config:
    """One layer, one micro-batch, by default of one short sequence: the interpreter is slow."""
    base = config_of(1, tp, 1, tied=False, kv_heads=2)
    train = replace(base.train, num_micro_batches=1, dtype=dtype)
    return replace(
        base,
        model=replace(base.model, num_layers=1, ffn_size=16 if small else base.model.ffn_size),
        train=replace(train, seq_len=16, micro_batch_size=1) if small else train,
    )


def first_step(config: Config, strategy: str) -> tuple[Numbers, int, str]:
    """Loss, gradient norm and sums of the gradients' squares of the first step; the arena's calls; what is said."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    trainer.state.rank.comms.tp.strategy = strategy
    arena = trainer.state.rank.comms.tp.device_arena
    said = trainer.state.rank.comms.describe(trainer.state.rank.mailbox)
    result = trainer.step.run(0)
    return {"loss": result.loss, "norm": result.grad_norm}, int(arena.epoch) if arena else 0, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "small"),
    [("fused", True), *(pytest.param(slow, False, marks=pytest.mark.slow) for slow in ("fused", "push"))],
)
def test_a_step_through_fused_kernels(ranks: RankPool, interpreters: RankPool, strategy: str, small: bool) -> None:
    ((exact, _, _),) = ranks.run(first_step, 1, config(1, "float64", small=small), "plain")
    ((host, _, _),) = ranks.run(first_step, 1, config(1, "float32", small=small), "plain")
    for numbers, calls, said in interpreters.run(first_step, 2, config(2, "float32", small=small), strategy):
        # A gather and a scatter forward and backward, for attention, feed-forward and the head's gather.
        assert calls >= 10
        assert "tp's matmuls by kernels through" in said
        for name, want in exact.items():
            # The rounding of a float32 result, where the host happened to hit closer.
            allowed = 2 * max(abs(host[name] - want), 2.0**-23 * want)
            assert abs(numbers[name] - want) <= allowed, (name, numbers, host, exact)


@pytest.mark.slow
def test_collectives_where_nothing_is_to_be_fused(interpreters: RankPool) -> None:
    plain = replace(config(2, "float32"), parallel=replace(config(2, "float32").parallel, tp_comm="plain"))
    for _, calls, said in interpreters.run(first_step, 2, plain, "auto"):
        assert calls == 0 and "kernels" not in said


def exchanges_said() -> list[tuple[str, str]]:
    """Return for each strategy what a communicator prints of an unknown GPU, and how the engine describes the run."""
    alone, found = Communicator(None), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_arena, "rates_of", lambda model: None)
        for strategy in ("auto", "auto", "fused", "plain"):
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                tp = Communicator(dist.group.WORLD, arena_bytes=1 << 16, strategy=strategy)
            comms = Communicators(tp, alone, alone, None, alone, alone, alone)
            found.append((said.getvalue(), comms.describe(None)))
    return found


def test_what_is_said_of_a_gpu_that_nobody_knows(interpreters: RankPool) -> None:
    """Kernels exchange only if the strategy says so; that auto takes collectives is printed once."""
    for rank, found in enumerate(interpreters.run(exchanges_said, 2)):
        assert [bool(said) for said, _ in found] == [rank == 0, False, False, False]
        assert ["by kernels" in described for _, described in found] == [False, False, True, False]
        assert rank or "the rates and links of H100 are not known: strategy auto takes collectives" in found[0][0]
