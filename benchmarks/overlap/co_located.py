"""Whether the fused operators' kernels are right between co-located ranks, at the sizes of a model: for tests on a GPU.

Nothing is timed here. Ranks that share a GPU cannot show what fusing brings: no link is between them that could be
hidden, the exchange is a few percent of the products, a copy within the GPU runs on the processors that multiply, and
each rank has a part of those. What they can show is that every row, flag and sum is where it should be.

Every variant is checked with integers and tolerance zero; new memory and slots are filled with NaN. `kernel` and `own`
are compared with a rank's products, the others with their sums over the ranks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence

import torch
from tpkernels.exchange.arena import CallMismatch, exchange_bytes
from tpkernels.exchange.device_arena import NUM_GENERATIONS, DeviceArena
from tpkernels.symmetric.signals import PeerError

from benchmarks.harness.shapes import Model
from benchmarks.harness.timing import PASSED
from benchmarks.overlap.cases import Case, Operands, cases_of
from benchmarks.overlap.ranks import (
    TIMEOUT_SECONDS,
    Clock,
    VirtualRanks,
    load,
    matmul_on,
    unwritten_is_nan,
)
from benchmarks.overlap.ways import PUSH, Fused, Own, Reference, Way


def checks(
    model: Model, tokens: int, ranks: VirtualRanks, clock: Clock, dtype: torch.dtype = torch.bfloat16
) -> dict[str, str]:
    """Return "passed" or "failed: ..." of each case; one that fails affects no other.

    Args:
        model: sizes of a rank.
        tokens: of all ranks together.
        ranks: co-located.
        clock: makes a call so that all ranks begin together.
        dtype: of activations and weights.
    """
    o = Operands(model, tokens, ranks, dtype)
    return {case.name: _checked(case, o, clock) for case in cases_of(o)}


def ways_of(case: Case, o: Operands, arenas: Sequence[DeviceArena]) -> dict[str, Way]:
    """Return the variants of a case, the plain one first, so that its kernel is loaded before anything waits.

    Args:
        arenas: by rank.
    """
    ways: dict[str, Way] = {
        "kernel": Way(o.ranks, functools.partial(matmul_on, o.ranks.processors)),
        "own": Own(o.ranks, arenas),
        "fused": Fused(o.ranks, arenas, push=False),
    }
    return ways | ({PUSH: Fused(o.ranks, arenas, push=True)} if case.is_pushed else {})


def arenas_for(o: Operands, timeout_seconds: float = TIMEOUT_SECONDS) -> list[DeviceArena]:
    """Return arenas so large that every case's exchange is one piece."""
    row_bytes = o.model.hidden * o.h[0].element_size()
    return o.ranks.arenas(exchange_bytes(o.tokens, row_bytes, o.ranks.world) // NUM_GENERATIONS, timeout_seconds)


def _checked(case: Case, o: Operands, clock: Clock) -> str:
    """Check the variants of a case. Its arenas are new, so that a failed call affects no other case."""
    arenas = arenas_for(o)
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    # Without this, torch may add parts of the sums in bfloat16.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        check(case, o, ways_of(case, o, arenas), arenas, clock)
    except (AssertionError, PeerError, CallMismatch) as error:
        return f"failed: {' '.join(str(error).split())}"
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before
    return PASSED


def check(case: Case, o: Operands, ways: Mapping[str, Way], arenas: Sequence[DeviceArena], clock: Clock) -> None:
    """Compare each variant's results, for small integers, with the right ones.

    Raises:
        AssertionError: they differ; says which variant, and by how much.
        PeerError, CallMismatch: a wait was given up.
    """
    with unwritten_is_nan(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about deterministic algorithms, which are not needed here
        o.fill(integers=True)
        for way in ways.values():
            load(functools.partial(case.compute, way), o.ranks)
        right: dict[bool, list[torch.Tensor]] = {}
        for exchanges in {way.exchanges for way in ways.values()}:
            o.clear()
            reference = case.compute(Reference(o.ranks, exchanges))
            # Products are computed on the ranks' streams, which this one does not wait for.
            o.ranks.settle()
            right[exchanges] = [x.clone() for x in reference]
        for name, way in ways.items():
            o.clear()
            _spoil(arenas)
            _, results = clock.timed(functools.partial(case.compute, way))
            for arena in arenas:
                arena.check()
            for got, want in zip(results, right[way.exchanges], strict=True):
                difference = (got.float() - want.float()).abs().max().item() if want.numel() else 0.0
                assert torch.equal(got, want), f"{name}: differs by up to {difference:g} from what is right"


def _spoil(arenas: Sequence[DeviceArena]) -> None:
    """Fill the arenas with NaN."""
    for arena in arenas:
        for generation in range(NUM_GENERATIONS):
            arena.block(arena.rank, generation, (arena.generation_bytes,), torch.uint8).fill_(0xFF)
