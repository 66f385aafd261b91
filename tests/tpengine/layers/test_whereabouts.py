"""Rung: gloo ranks. What goes wrong in a layer of experts says the layer, the micro-batch and who has which experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool
from support.ranks.standstill import Standstill
from torch import Tensor
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.experts.choose import ChoiceRule
from tpkernels.symmetric.signals import GroupPoisoned, PeerError, PeerTimeout

from tpengine.config import Config, validate
from tpengine.config.settings import ModelDetails
from tpengine.data import open_corpus
from tpengine.layers import SpreadExperts
from tpengine.layers import experts as mixtures
from tpengine.layers.dropout import Position
from tpengine.layers.whereabouts import Whereabouts
from tpengine.pipeline.executor import ActionError
from tpengine.runs.trainer import Trainer

E = 8
SAID = "; layer 3, micro-batch 5, where rank 1 has experts 4 to 7 of 8"


def check_a_lost_rank() -> None:
    """In forward, and in backward after another micro-batch has begun."""
    comm = Communicator(dist.group.WORLD, arena_bytes=1 << 16, timeout_seconds=1.0)
    layer, position = SpreadExperts(8, 12, E, ChoiceRule(2), comm, comm), Position(microbatch=5)
    layer.whereabouts = Whereabouts(3, position, E, comm)
    assert comm.arena is not None
    for is_backward in (False, True):
        x = torch.ones(4, 8, requires_grad=True)
        call = layer(x).sum().backward if is_backward else functools.partial(layer, x)
        raised(comm, call)
        dist.barrier()
        comm.arena.reset()


def raised(comm: Communicator, call: Callable[[], Any]) -> None:
    """The last rank stays away, and is named by the others with what it has."""
    assert comm.arena is not None
    standstill = Standstill(comm.arena, dist.group.WORLD)
    if comm.rank == comm.size - 1:
        standstill.leave()
        return
    with standstill, pytest.raises((PeerTimeout, GroupPoisoned)) as found:
        call()
    error = found.value
    assert isinstance(error, PeerError) and error.awaited == 1
    assert str(error).endswith(SAID) and str(error).count("micro-batch") == 1
    assert error.what.endswith(SAID) and ("waited in dispatch" in error.what or "in combine" in error.what)


def test_a_lost_rank_is_named_with_layer_and_experts(ranks: RankPool) -> None:
    ranks.run(check_a_lost_rank, 2)


def config(ep: int, reduction: Any) -> Config:
    base = config_of(1, 2, 1, tied=False, kv_heads=4, num_layers=4, recompute="block")
    details = ModelDetails(
        num_experts=4, experts_per_token=2, expert_ffn_size=128, has_experts=(True, False, True, True)
    )
    model = replace(base.model, architecture="qwen3_moe", details=details)
    train, parallel = replace(base.train, reduction=reduction), replace(base.parallel, ep=ep)
    return validate(replace(base, model=model, train=train, parallel=parallel), 2)


def used_up(config: Config, in_backward: bool) -> str:
    """A run whose memory is used up in the third layer, where it takes rows for the second micro-batch."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    name = "grouped_swiglu_backward" if in_backward else "grouped_swiglu_forward"
    multiply, position = getattr(mixtures, name), trainer.state.model.position
    (layer,) = [of for of in trainer.state.model.layers["2"].modules() if getattr(of, "whereabouts", None)][:1]
    weights = {of.data_ptr() for of in layer.parameters()}

    def without_memory(xs: Tensor, *rest: Any, **options: Any) -> Any:
        if position.microbatch == 1 and any(of.data_ptr() in weights for of in rest if isinstance(of, Tensor)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return multiply(xs, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixtures, name, without_memory)
        with pytest.raises(ActionError) as found:
            trainer.step.run(0)
    assert isinstance(found.value.__cause__, torch.OutOfMemoryError)
    return str(found.value)


@pytest.mark.parametrize(
    ("ep", "reduction", "in_backward"),
    [
        (2, "fast", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(2, "fast", True), (1, "fast", True), (2, "exact", False), (2, "exact", True)]
        ),
    ],
)
def test_memory_that_is_used_up_is_named_too(ranks: RankPool, ep: int, reduction: str, in_backward: bool) -> None:
    """In a run: with the action of the plan; of experts that are cut over tp nobody has whole ones."""
    owners = ", where rank 0 has experts 0 to 1, rank 1 has experts 2 to 3 of 4" if ep == 2 else ""
    action = "0B1" if in_backward else "0F1"
    for said in ranks.run(used_up, 2, config(ep, reduction), in_backward):
        assert f"action {action} " in said
        assert f"20.00 GiB.; layer 2, micro-batch 1{owners}')" in said, said
