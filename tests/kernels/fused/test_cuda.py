"""Rung: GPU. The fused operators' kernels as compiled, two and four ranks sharing a GPU, tolerance zero.

What test_kernels.py asks of interpreted kernels is asked here again, and what only a GPU has: copy engines beside
kernels, and bfloat16. One small case of each check is interpreted, so that it runs everywhere. Ranks of one GPU take
turns: nothing here is about time, and that another GPU's memory is reached, only two GPUs show. Calls that go wrong or
are under way while the host goes on, and CUDA graphs: test_cuda_calls.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from support.ranks.arena_ranks import Case, cases, hostile_communicator, inputs_of, results
from support.ranks.gpu_ranks import ROOMY, Run, hostile, moved, rungs, settle, wrong_results
from torch import Tensor

pytest.importorskip("triton")

TINY = 1 << 13
FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


def check_cases(device: str, strategy: str, arena_bytes: int, many: Sequence[Case]) -> None:
    comm = hostile(device, strategy, arena_bytes, seed=len(many))
    wrong = wrong_results(device, comm, many)
    assert not wrong, "\n".join(wrong)


@rungs(
    "world, strategy, dtype",
    (2, "fused", FLOAT),
    (2, "fused", FLOAT),
    (2, "push", FLOAT),
    (2, "fused", BRAIN),
    (2, "push", BRAIN),
    (2, "fused", HALF),
    (2, "push", HALF),
    (4, "fused", BRAIN),
    (4, "push", HALF),
)
def test_outputs_and_gradients(run: Run, device: str, world: int, strategy: str, dtype: torch.dtype) -> None:
    if device == "cpu":
        many = cases((7,), dtype=dtype, strided=True)[2:4]
    else:
        # Rows that begin anywhere; at multiples of 16 bytes, which TMA and vectors read; and inputs full of gaps.
        many = cases((1, 100) if world == 2 else (7, 65), dtype=dtype)
        many += cases((100,), dim=64, dtype=dtype) + cases((33,), dtype=dtype, strided=True)
    run(device, world, check_cases, strategy, ROOMY, many)


@pytest.mark.by_default("cuda-2-fused", "cuda-2-push", "cuda-4-fused")
@rungs("world, strategy", (2, "fused"), (2, "fused"), (2, "push"), (4, "fused"))
def test_what_is_larger_than_the_arena_moves_in_pieces(run: Run, device: str, world: int, strategy: str) -> None:
    many = cases((70,), dim=33)
    run(device, world, check_cases, strategy, TINY, many[2:4] if device == "cpu" else many)


def large_cases(tokens: int, dim: int, width: int) -> list[Case]:
    return [
        Case("all_gather_matmul", tokens, dim, (width,), HALF),
        Case("all_gather_matmul", tokens, dim, (width // 2, width // 4), HALF, biased=True, keep_gathered=False),
        Case("matmul_reduce_scatter", tokens, width, (dim,), HALF, biased=True),
        Case("matmul_all_reduce", tokens, width, (dim,), HALF),
    ]


@pytest.mark.by_default("cuda-2-push-sizes2", "cuda-2-fused-sizes1")
@rungs(
    "world, strategy, sizes", (2, "push", (21, 8, 24)), (2, "fused", (2047, 256, 1024)), (2, "push", (2047, 256, 1024))
)
def test_many_tiles(run: Run, device: str, world: int, strategy: str, sizes: tuple[int, int, int]) -> None:
    """Tiles are as many and as large as in models, and calls are exchanged in pieces."""
    run(device, world, check_cases, strategy, 1 << 22, large_cases(*sizes))


def check_mixed_calls(device: str, strategy: str, num_calls: int) -> None:
    """No barrier between calls: the ranks run as far ahead of each other as the signals let them."""
    comm = hostile(device, strategy, 1 << 14, seed=7)
    mixed = cases((1, 7, 40))
    wrong = wrong_results(device, comm, [mixed[5 * i % len(mixed)] for i in range(num_calls)])
    assert not wrong, "\n".join(wrong)


@rungs(
    "world, strategy, num_calls", (2, "push", 3), (2, "fused", 50), (2, "push", 50), (4, "fused", 50), (4, "push", 50)
)
def test_mixed_calls_back_to_back(run: Run, device: str, world: int, strategy: str, num_calls: int) -> None:
    run(device, world, check_mixed_calls, strategy, num_calls)


def check_two_groups_at_once(device: str, firsts: Sequence[Case], seconds: Sequence[Case]) -> None:
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    across, down = hostile(device, "fused", ROOMY, 0, group=rows), hostile(device, "push", ROOMY, 1, group=columns)
    wrong = []
    for first, second in zip(firsts, seconds, strict=True):
        wrong += [*wrong_results(device, across, [first]), *wrong_results(device, down, [second])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.by_default("cuda-select1")
@rungs("select", (slice(3, 4),), (slice(None),))
def test_two_groups_at_once(run: Run, device: str, select: slice) -> None:
    run(device, 4, check_two_groups_at_once, cases((7,))[select], cases((20,))[::-1][select])


def check_wrapping_epochs(device: str, strategy: str, many: Sequence[Case]) -> None:
    comm = hostile(device, strategy, ROOMY, first_epoch=2**31 - 3)
    assert comm.device_arena is not None
    wrong = wrong_results(device, comm, many)
    assert not wrong, "\n".join(wrong)
    assert int(comm.device_arena.epoch) < -(2**31) + 100, "the epochs wrapped around"


@pytest.mark.by_default("cuda-2-push", "cuda-2-fused")
@rungs("world, strategy", (2, "push"), (2, "fused"), (2, "push"))
def test_epochs_wrap_around(run: Run, device: str, world: int, strategy: str) -> None:
    run(device, world, check_wrapping_epochs, strategy, cases((7,))[1:4])


def check_same_generation_again(device: str, strategy: str, num_calls: int) -> None:
    """Use one generation twice in a row, as a replayed CUDA graph of an odd number of calls does.

    Such calls meet first.
    """
    comm = hostile(device, strategy, ROOMY)
    arena = comm.device_arena
    assert arena is not None
    for case in num_calls * cases((7, 33))[3:4] + num_calls * cases((40,))[:1]:
        arena.generation = 0  # `begin` takes the other
        wrong = wrong_results(device, comm, [case])
        assert not wrong, "\n".join(wrong)


@pytest.mark.by_default("cuda-2-push-6", "cuda-2-fused-6", "cuda-4-fused-6")
@rungs("world, strategy, num_calls", (2, "push", 2), (2, "fused", 6), (2, "push", 6), (4, "fused", 6))
def test_a_generation_used_twice_in_a_row(run: Run, device: str, world: int, strategy: str, num_calls: int) -> None:
    run(device, world, check_same_generation_again, strategy, num_calls)


def bits_of_runs(device: str, strategy: str, num_runs: int) -> list[int]:
    """Runs whose bits differ from the first's: real numbers, so that every order of summation has other bits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    some = [
        Case("all_gather_matmul", 40, 17, (11, 3), biased=True, return_gathered=True),
        Case("matmul_reduce_scatter", 40, 17, (11,), biased=True),
    ]
    drawn = [inputs_of(case, rank, world) for case in some]
    generator = torch.Generator().manual_seed(rank)
    for inputs in drawn:
        for t in [inputs.x, *inputs.weights, *inputs.biases, *inputs.dys]:
            t.copy_(torch.randn(t.shape, generator=generator))
    first: list[Tensor] = []
    different = []
    for number in range(num_runs):
        comm = hostile(device, strategy, 1 << 14, seed=number)
        got = [
            t.cpu()
            for case, inputs in zip(some, drawn, strict=True)
            for t in results(case, comm, moved(device, inputs))
        ]
        settle(comm)
        first = first or got
        if not all(torch.equal(a, b) for a, b in zip(got, first, strict=True)):
            different.append(number)
        dist.barrier()
    return different


@pytest.mark.by_default("cuda-2-push-6", "cuda-2-fused-6", "cuda-4-fused-6")
@rungs("world, strategy, num_runs", (2, "push", 2), (2, "fused", 6), (2, "push", 6), (4, "fused", 6))
def test_equal_bits_on_every_run(run: Run, device: str, world: int, strategy: str, num_runs: int) -> None:
    assert run(device, world, bits_of_runs, strategy, num_runs) == [[]] * world


def check_bits_of_the_host_path(device: str) -> None:
    """Where products are exact, only the order of sums between ranks has a say, and it is the same tree."""
    case = Case("matmul_reduce_scatter", 40, 17, (1,))
    inputs = inputs_of(case, dist.get_rank(), dist.get_world_size())
    inputs.x.copy_(torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(dist.get_rank())))
    inputs.weights[0].fill_(1)
    comm = hostile(device, "fused", ROOMY)
    by_kernels = results(case, comm, moved(device, inputs))[0].cpu()
    settle(comm)
    assert torch.equal(by_kernels, results(case, hostile_communicator(dist.group.WORLD, ROOMY), inputs)[0])


@rungs("world", (2,), (4,))
def test_equal_bits_with_the_host_path(run: Run, device: str, world: int) -> None:
    run(device, world, check_bits_of_the_host_path)
