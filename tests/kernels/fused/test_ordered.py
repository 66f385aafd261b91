"""Rung: gloo ranks. torch.compile keeps each exchange: equal calls, unused ones, and the order of all.

The exchanges are those that a rank's arena counts, with the sizes that ranks compare. A program is compiled anew each
time, because inductor's cache on disk does not look at effects. That a missing effect or edge shows is tested too.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tpkernels.fused.experts  # noqa: F401  # registers its operators
from support import CountMutations
from support.ranks.arena_ranks import hostile_communicator
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch._higher_order_ops.effects import _get_effect
from torch._library.custom_ops import OPDEFS
from torch._library.effects import EffectType
from torch.utils.checkpoint import checkpoint
from tpkernels.exchange.arena import Arena, shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused import ordered
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.matmul_all_reduce import matmul_all_reduce
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.fused.ordered import keep_exchanges

DIM, WIDTH = 5, 3
OPERATORS = {
    "tpkernels::all_gather",
    "tpkernels::all_gather_matmul",
    "tpkernels::all_gather_matmul_dgrad",
    "tpkernels::all_gather_matmul_dgrad_and_gather",
    "tpkernels::combine",
    "tpkernels::combine_backward",
    "tpkernels::dispatch",
    "tpkernels::dispatch_backward",
    "tpkernels::matmul_all_reduce",
    "tpkernels::matmul_reduce_scatter",
    "tpkernels::matmul_reduce_scatter_dgrad",
    "tpkernels::matmul_reduce_scatter_gather",
}

Exchanges = list[tuple[int, ...]]


def test_operators_that_exchange_are_ordered_and_no_others() -> None:
    effects = {name: _get_effect(name) for name in OPDEFS if name.startswith("tpkernels::")}
    assert effects.keys() > OPERATORS
    assert {name for name, effect in effects.items() if effect is EffectType.ORDERED} == OPERATORS


def program(x: Tensor, up: Tensor, down: Tensor, comm: Communicator, tokens: int, uses_more: bool) -> Tensor:
    """Call operators twice with equal inputs, in vain, and independently of each other."""
    (first,) = all_gather_matmul(x, [up], comm, num_tokens=tokens)
    (second,) = all_gather_matmul(x, [up], comm, num_tokens=tokens)
    often_unused = matmul_reduce_scatter(first.detach(), down.detach(), comm)
    y = matmul_reduce_scatter(torch.relu(first) + second, down, comm)
    z = matmul_all_reduce(second, down, comm)
    all_gather_matmul(x, [up], comm, num_tokens=tokens)
    total = y.square().sum() + z.square().sum()
    return total + often_unused.sum() if uses_more else total


def record(arena: Arena) -> Exchanges:
    """Return the list in which an arena's exchanges are written down from now on."""
    exchanges: Exchanges = []
    begin = arena.begin

    def counted(call: tuple[int, ...]) -> int:
        exchanges.append(call)
        return begin(call)

    arena.begin = counted  # type: ignore[method-assign]
    return exchanges


def values_and_gradients(run: Any, leaves: list[Tensor], *rest: Any) -> list[Tensor]:
    y = run(*leaves, *rest)
    return [y.detach(), *torch.autograd.grad(y, leaves)]


def exchanges_of(backend: str, broken: str) -> tuple[Exchanges, Exchanges]:
    """Return the exchanges of a pass through the program as it is, and compiled; their results are equal.

    The ranks' programs and shards differ. If something is broken they are alike, or none would come to an end.
    """
    comm = hostile_communicator(dist.group.WORLD, 1 << 13)
    assert comm.arena is not None
    generator = torch.Generator().manual_seed(3)
    tokens, uses_more = (8, False) if broken else (7, comm.rank == 0)
    rows = shard_rows(tokens, comm.size, comm.rank)
    shapes = ((rows.stop - rows.start, DIM), (WIDTH, DIM), (DIM, WIDTH))
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    exchanges = record(comm.arena)
    wants = values_and_gradients(program, leaves, comm, tokens, uses_more)
    eager = exchanges.copy()
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(force_disable_caches=True):
        if broken:
            BROKEN[broken](patch)
        compiled = torch.compile(program, backend=backend, fullgraph=True, dynamic=False)
        for _ in range(2):
            exchanges.clear()
            gots = values_and_gradients(compiled, leaves, comm, tokens, uses_more)
            for got, want in zip(gots, wants, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    return eager, exchanges


def exchanges_of_a_checkpoint() -> tuple[Exchanges, Exchanges]:
    """Return the exchanges of a region that is computed again, as it is and compiled; their results are equal."""
    comm = hostile_communicator(dist.group.WORLD, 1 << 13)
    assert comm.arena is not None

    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        (hidden,) = all_gather_matmul(x, [up], comm)
        return matmul_reduce_scatter(torch.relu(hidden), down, comm)

    def region(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = checkpoint(block, x, up, down, use_reentrant=False, context_fn=keep_exchanges)
        return (x + y).square().sum()

    generator = torch.Generator().manual_seed(5)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, DIM), (2, DIM), (DIM, 2))]
    exchanges = record(comm.arena)
    wants = values_and_gradients(region, leaves)
    eager = exchanges.copy()
    exchanges.clear()
    gots = values_and_gradients(torch.compile(region, backend="aot_eager", fullgraph=True), leaves)
    for got, want in zip(gots, wants, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    return eager, exchanges


@pytest.mark.slow
def test_a_checkpointed_region_keeps_what_it_exchanged(ranks: RankPool) -> None:
    of_ranks = ranks.run(exchanges_of_a_checkpoint, 2)
    eager, _ = of_ranks[0]
    assert len(eager) == 4, "a gather and a scatter in each direction, and none again"
    assert of_ranks == [(eager, eager)] * 2


def without_effects(patch: pytest.MonkeyPatch) -> None:
    for name in OPERATORS:
        holder = torch._library.simple_registry.singleton.find(name).effect
        patch.setattr(holder, "_effect", None)
    # From torch 2.14 on what was traced with an effect is noted in fx too, for as long as the process lives.
    without = torch.fx.node._side_effectful_functions - {OPDEFS[name]._opoverload for name in OPERATORS}
    patch.setattr(torch.fx.node, "_side_effectful_functions", without)


def without_edges(patch: pytest.MonkeyPatch) -> None:
    """Take the lowerings out, as they are before inductor is loaded."""
    from torch._inductor.lowering import lowerings

    for name in OPERATORS:
        patch.delitem(lowerings, OPDEFS[name]._opoverload, raising=False)
    patch.setattr(ordered, "_lower_in_order", lambda operator: None)


BROKEN = {"without effects": without_effects, "without edges": without_edges}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler])])
def test_compiled_programs_exchange_what_they_say(ranks: RankPool, backend: str) -> None:
    of_ranks = ranks.run(exchanges_of, 2, backend, "")
    eager, _ = of_ranks[0]
    assert len(eager) == 10, "six calls, one of which exchanges twice, and three in backward"
    assert of_ranks == [(eager, eager)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "broken"),
    [
        ("aot_eager", "without effects"),
        pytest.param("inductor", "without effects", marks=[pytest.mark.slow, needs_compiler]),
        pytest.param("inductor", "without edges", marks=[pytest.mark.slow, needs_compiler]),
    ],
)
def test_what_torch_would_do_is_noticed(
    ranks: RankPool, count_mutations: CountMutations, backend: str, broken: str
) -> None:
    (eager, compiled), others = ranks.run(exchanges_of, 2, backend, broken)
    assert others == (eager, compiled)
    is_noticed = eager != compiled
    count_mutations("exchanges under torch.compile", int(is_noticed), 1)
    assert is_noticed
    assert (sorted(eager) == sorted(compiled)) == (broken == "without edges")
