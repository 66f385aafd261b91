"""Whether fused matmuls between the ranks of a host are right, and what they gain over a matmul and its collective.

Right: integers whose every sum is exact in their dtype, so that the tolerance is zero, against the operators' own
references in float64, forward and gradients. A link that loses or mixes bytes shows here before it spoils a training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tpkernels.exchange.arena import exchange_bytes, shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused.all_gather_matmul import all_gather_matmul, all_gather_matmul_reference
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter, matmul_reduce_scatter_reference

# Rows of all ranks that no tile and no number of ranks divides.
_ROWS, _COLUMNS = 131, 33
# Sums of so many products of -1, 0 and 1 are exact in bfloat16.
_MOST_TERMS = 256
# (tokens of all ranks, width) whose times are compared.
TIMED_ON_CPU, TIMED_ON_GPU = ((128, 512), (512, 512)), ((2048, 4096), (8192, 4096))
_ROUNDS, _WARM_UP = 10, 3
_TIMEOUT_SECONDS = 20.0


def wrong_products(comm: Communicator, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return which results of this rank are not exactly what they must be; collective.

    Args:
        comm: the ranks, with an arena where there can be one.
        device, dtype: of the operands.
    """
    inner = _MOST_TERMS // comm.size
    return [*_wrong_gather(comm, device, dtype, inner), *_wrong_scatter(comm, device, dtype, inner)]


def _wrong_gather(comm: Communicator, device: torch.device, dtype: torch.dtype, inner: int) -> list[str]:
    """all_gather_matmul: x[T/tp, D] of each rank, w[F, D] of each rank, dy[T, F] of each rank."""
    world, rank = comm.size, comm.rank
    x = _drawn(_ROWS, inner, 0)
    shards = [x[shard_rows(_ROWS, world, of)].clone().requires_grad_() for of in range(world)]
    weights = [_drawn(_COLUMNS, inner, 1 + of).requires_grad_() for of in range(world)]
    dys = [_drawn(_ROWS, _COLUMNS, 100 + of) for of in range(world)]
    for of in range(world):
        (y,) = all_gather_matmul_reference(shards, [weights[of]])
        y.backward(dys[of])
    (expected,) = all_gather_matmul_reference([shard.detach() for shard in shards], [weights[rank].detach()])
    own, weight = _moved(shards[rank], device, dtype), _moved(weights[rank], device, dtype)
    (y,) = all_gather_matmul(own, [weight], comm, num_tokens=_ROWS)
    y.backward(dys[rank].to(device, dtype))
    gradients = {"dx": (own.grad, shards[rank].grad), "dw": (weight.grad, weights[rank].grad)}
    return _differing("all_gather_matmul", {"y": (y, expected), **gradients})


def _wrong_scatter(comm: Communicator, device: torch.device, dtype: torch.dtype, inner: int) -> list[str]:
    """matmul_reduce_scatter: x[T, F/tp] of each rank, w[D, F/tp] of each rank, dy[T/tp, D] of each rank."""
    world, rank = comm.size, comm.rank
    xs = [_drawn(_ROWS, inner, 200 + of).requires_grad_() for of in range(world)]
    weights = [_drawn(_COLUMNS, inner, 300 + of).requires_grad_() for of in range(world)]
    dy = _drawn(_ROWS, _COLUMNS, 400)
    for of in range(world):
        matmul_reduce_scatter_reference(xs, weights, of).backward(dy[shard_rows(_ROWS, world, of)])
    expected = matmul_reduce_scatter_reference([x.detach() for x in xs], [w.detach() for w in weights], rank)
    x, weight = _moved(xs[rank], device, dtype), _moved(weights[rank], device, dtype)
    y = matmul_reduce_scatter(x, weight, comm)
    y.backward(dy[shard_rows(_ROWS, world, rank)].to(device, dtype))
    gradients = {"dx": (x.grad, xs[rank].grad), "dw": (weight.grad, weights[rank].grad)}
    return _differing("matmul_reduce_scatter", {"y": (y, expected), **gradients})


def _drawn(rows: int, columns: int, seed: int) -> Tensor:
    """Return -1, 0 and 1 in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (rows, columns), generator=generator).double()


def _moved(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return x.detach().to(device, dtype).requires_grad_()


def _differing(operator: str, results: dict[str, tuple[Tensor | None, Tensor | None]]) -> list[str]:
    wrong = []
    for name, (got, expected) in results.items():
        assert got is not None and expected is not None, "every result is there"
        off = int((got.detach().double().cpu() != expected).sum())
        if off:
            wrong.append(f"{operator}: {off} of {expected.numel()} elements of {name}")
    return wrong


def gains(
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[tuple[int, int]],
    group: dist.ProcessGroup,
    strategy: str = "auto",
) -> list[dict[str, Any]]:
    """Return by size what a fused matmul and a matmul with its collective take on this rank; collective.

    Args:
        device, dtype: of the operands.
        sizes: (tokens of all ranks, width); a weight has as many columns, over all ranks.
        group: the ranks of a host.
        strategy: of the fused communicator (Communicator).

    Returns:
        For each size "bytes" of the gathered rows, and "fused", "apart" and "alone" (the matmul without an exchange)
        in seconds, the mean of gather and reduce-scatter.
    """
    world, found = dist.get_world_size(group), []
    for most, width in sizes:
        tokens = most // world * world
        room = exchange_bytes(tokens, dtype.itemsize * width, world)
        fused = Communicator(
            group, arena_bytes=room, device=device, strategy=strategy, timeout_seconds=_TIMEOUT_SECONDS
        )
        apart = Communicator(group, device=device)
        rows, whole = (torch.randn(number, width, device=device).to(dtype) for number in (tokens // world, tokens))
        full = torch.randn(tokens, width // world, device=device).to(dtype)
        gathering = torch.randn(width // world, width, device=device).to(dtype)
        scattering = torch.randn(width, width // world, device=device).to(dtype)

        def both(
            comm: Communicator, of: tuple[Tensor, ...] = (rows, gathering, full, scattering), tokens: int = tokens
        ) -> None:
            all_gather_matmul(of[0], [of[1]], comm, num_tokens=tokens)
            matmul_reduce_scatter(of[2], of[3], comm)

        def alone(of: tuple[Tensor, ...] = (whole, gathering, full, scattering)) -> None:
            torch.mm(of[0], of[1].T)
            torch.mm(of[2], of[3].T)

        calls: dict[str, Callable[[], None]] = {
            "fused": lambda comm=fused: both(comm),  # type: ignore[misc]
            "apart": lambda comm=apart: both(comm),  # type: ignore[misc]
            "alone": alone,
        }
        seconds = {name: _seconds(call, device, group) / 2 for name, call in calls.items()}
        found.append({"bytes": float(tokens * width * dtype.itemsize), **seconds})
    return found


def _seconds(call: Callable[[], None], device: torch.device, group: dist.ProcessGroup) -> float:
    """Return the median of calls that the ranks of a group begin together."""
    meet = torch.zeros(1, device=device if dist.get_backend(group) == "nccl" else "cpu")
    taken = []
    for _ in range(_WARM_UP + _ROUNDS):
        dist.all_reduce(meet, group=group)
        _settle(device)
        begin = time.perf_counter()
        call()
        _settle(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[_WARM_UP:])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
