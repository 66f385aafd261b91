"""Rung: GPU. The fused operators' kernels as compiled, two and four ranks sharing a GPU, tolerance zero.

What test_fused_kernels.py asks of interpreted kernels is asked here again, and what only a GPU has: copy engines beside
kernels, calls that are under way while the host goes on, CUDA graphs, and bfloat16. One small case of each check is
interpreted, so that it runs everywhere. Ranks of one GPU take turns: nothing here is about time, and that another GPU's
memory is reached, only two GPUs show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arena_ranks import Case, Inputs, cases, expected, hostile_communicator, inputs_of, results
from kernel_ranks import HostileDeviceArena, kernel_communicator
from precision import unwritten_is_nan
from rank_pool import RankPool
from torch import Tensor
from torch.distributed import ProcessGroup
from tpkernels.communicator import Communicator
from tpkernels.copies import Fetch, StreamCopies
from tpkernels.device_arena import DeviceArena
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter

pytest.importorskip("triton")

ROOMY, TINY = 1 << 18, 1 << 13
FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
# Each process compiles for itself where nobody has yet.
TASK_SECONDS = 400
# At most; of a GPU that runs at 1.7 GHz not a millisecond.
DELAY_CYCLES = 1_000_000

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def rungs(names: str, interpreted: tuple[Any, ...], *compiled: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Parametrize `device`, and these names: by one small case that is interpreted, and by those of a GPU."""
    on_gpu = [pytest.param("cuda", *values, marks=needs_gpu) for values in compiled]
    return pytest.mark.parametrize(f"device, {names}", [("cpu", *interpreted), *on_gpu])


Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run(interpreters: RankPool) -> Iterator[Run]:
    """`run(device, world, program, *args)`: program(device, *args) on every rank, which share the GPU."""
    # For each number of ranks: those of a smaller group would have allocated more often than the others.
    pools: dict[int, RankPool] = {}

    def run_on(device: str, world: int, program: Callable[..., Any], *args: Any) -> list[Any]:
        if device == "cpu":
            return interpreters.run(program, world, device, *args)
        if world not in pools:
            pools[world] = RankPool({"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"})
        return pools[world].run(program, world, device, *args, seconds=TASK_SECONDS)

    yield run_on
    for pool in pools.values():
        pool.close()


class LateArena(HostileDeviceArena):
    """A hostile arena whose device dawdles too before a call."""

    def begin(self, operation: str, kind: str, *what: Any) -> tuple[int, int]:
        if self.delays.random() < 0.5:
            torch.cuda._sleep(self.delays.randrange(DELAY_CYCLES))
        return super().begin(operation, kind, *what)


class LateCopies(StreamCopies):
    """A copy engine that begins late, when kernels wait for it and other memory may have been given away."""

    def __init__(self, device: torch.device, generator: random.Random) -> None:
        super().__init__(device)
        self._generator = generator

    def start(self, arena: DeviceArena, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._generator.randrange(DELAY_CYCLES))
        super().start(arena, fetches, generation, call)


def hostile(
    device: str,
    strategy: str,
    arena_bytes: int,
    seed: int = 0,
    *,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 30.0,
    first_epoch: int = 0,
) -> Communicator:
    """A communicator whose fused operators take their kernels, over a hostile device arena of this device."""
    group = dist.group.WORLD if group is None else group
    times = {"timeout_seconds": timeout_seconds, "first_epoch": first_epoch}
    if device == "cpu":
        return kernel_communicator(group, strategy, arena_bytes, seed, **times)  # type: ignore[arg-type]
    comm = Communicator(group, strategy=strategy)
    place = torch.device(device, 0)
    arena = DeviceArena.open(group, arena_bytes, place, **times)  # type: ignore[arg-type]
    generator = random.Random(1000 * seed + comm.rank)
    arena.__class__ = LateArena
    assert isinstance(arena, LateArena)
    arena.delays, arena.most_seconds, arena.used = generator, 2e-3, None
    arena.split_bytes = 1  # a flag behind each row of tiles, while there are flags
    arena.copies = LateCopies(place, random.Random(generator.random()))
    comm.device_arena = arena
    return comm


def moved(device: str, inputs: Inputs) -> Inputs:
    """The same inputs on a device, with the gaps that they have."""

    def move(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)

    return Inputs(move(inputs.x), *([move(t) for t in many] for many in (inputs.weights, inputs.biases, inputs.dys)))


def settle(comm: Communicator) -> None:
    """Wait for the device, and raise what a kernel has to say."""
    assert comm.device_arena is not None
    if comm.device_arena.control.is_cuda:
        torch.cuda.synchronize()
    comm.device_arena.check()


def wrong_results(device: str, comm: Communicator, many: Sequence[Case]) -> list[str]:
    """Where this rank's results differ from the specification. All calls are made before any result is looked at."""
    with unwritten_is_nan():
        everything = [results(case, comm, moved(device, inputs_of(case, comm.rank, comm.size))) for case in many]
    settle(comm)
    found = []
    for case, got in zip(many, everything, strict=True):
        wrong = [i for i, same in enumerate(agreements(got, expected(case, comm.rank, comm.size))) if not same]
        found += [f"rank {comm.rank} of {comm.size}: results {wrong} of {case}"] if wrong else []
    return found


def agreements(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[bool]:
    return [a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True)]


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


@rungs(
    "world, strategy, sizes", (2, "push", (21, 8, 24)), (2, "fused", (2047, 256, 1024)), (2, "push", (2047, 256, 1024))
)
def test_many_tiles(run: Run, device: str, world: int, strategy: str, sizes: tuple[int, int, int]) -> None:
    """As many as models have, of the sizes that they take, and in pieces."""
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


@rungs("select", (slice(3, 4),), (slice(None),))
def test_two_groups_at_once(run: Run, device: str, select: slice) -> None:
    run(device, 4, check_two_groups_at_once, cases((7,))[select], cases((20,))[::-1][select])


def check_wrapping_epochs(device: str, strategy: str, many: Sequence[Case]) -> None:
    comm = hostile(device, strategy, ROOMY, first_epoch=2**31 - 3)
    assert comm.device_arena is not None
    wrong = wrong_results(device, comm, many)
    assert not wrong, "\n".join(wrong)
    assert int(comm.device_arena.epoch) < -(2**31) + 100, "the epochs wrapped around"


@rungs("world, strategy", (2, "push"), (2, "fused"), (2, "push"))
def test_epochs_wrap_around(run: Run, device: str, world: int, strategy: str) -> None:
    run(device, world, check_wrapping_epochs, strategy, cases((7,))[1:4])


def check_same_generation_again(device: str, strategy: str, num_calls: int) -> None:
    """As a CUDA graph of an odd number of calls does when it is replayed: calls of one generation meet first."""
    comm = hostile(device, strategy, ROOMY)
    arena = comm.device_arena
    assert arena is not None
    for case in num_calls * cases((7, 33))[3:4] + num_calls * cases((40,))[:1]:
        arena._generation = 0  # `begin` takes the other
        wrong = wrong_results(device, comm, [case])
        assert not wrong, "\n".join(wrong)


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


def raised_by(comm: Communicator, call: Callable[[], Any]) -> str:
    try:
        call()
        settle(comm)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gather_some(device: str, comm: Communicator, rows: int) -> None:
    all_gather_matmul(torch.ones(rows, 5, device=device), [torch.ones(4, 5, device=device)], comm)


def scatter_some(device: str, comm: Communicator, rows: int) -> None:
    matmul_reduce_scatter(torch.ones(rows * comm.size, 5, device=device), torch.ones(4, 5, device=device), comm)


def push_some(device: str, comm: Communicator, rows: int) -> None:
    comm.strategy = "push"
    try:
        gather_some(device, comm, rows)
    finally:
        comm.strategy = "fused"


# What a call is named in messages, and how it exchanges.
CALLS = {
    "all_gather_matmul, which pulls": gather_some,
    "all_gather_matmul, which pushes": push_some,
    "matmul_reduce_scatter, which scatters": scatter_some,
}


def errors_when_a_rank_stays_away(device: str, name: str) -> tuple[str, str]:
    """Rank 1 makes no call, and then comes; afterwards all reset, and go on."""
    patient = hostile(device, "fused", ROOMY)
    # Nobody compiles later, when others wait for half a second only.
    assert not wrong_results(device, patient, cases((7,))[3:4])
    CALLS[name](device, patient, 3)
    settle(patient)
    comm = hostile(device, "fused", ROOMY, timeout_seconds=0.5)
    assert comm.device_arena is not None
    error = "" if comm.rank == 1 else raised_by(comm, lambda: CALLS[name](device, comm, 3))
    dist.barrier()
    again = raised_by(comm, lambda: CALLS[name](device, comm, 3))
    dist.barrier()
    comm.device_arena.reset(dist.group.WORLD)
    assert not wrong_results(device, comm, cases((7,))[3:4])
    return error, again


@rungs(
    "world, name",
    (2, "all_gather_matmul, which pulls"),
    *((world, name) for world in (2, 4) for name in CALLS),
)
def test_a_rank_that_stays_away_is_named_by_all(run: Run, device: str, world: int, name: str) -> None:
    operation, how = name.split(", ")
    for rank, (during, after) in enumerate(run(device, world, errors_when_a_rank_stays_away, name)):
        assert f"{operation} of {3 * world} x " in after and f"float32 from row 0, {how}, epoch 1 (seen 0)" in after
        assert "is poisoned: rank" in after and "of rank 1, which gave no signal for 0.5 s" in after
        assert after.startswith("PeerTimeout" if f"rank {rank} waited" in after else "GroupPoisoned")
        assert rank == 1 or during == after


def errors_of_different_calls(device: str, name: str) -> str:
    comm = hostile(device, "fused", ROOMY)
    assert comm.device_arena is not None
    message = raised_by(comm, lambda: CALLS[name](device, comm, 3 if comm.rank else 4))
    dist.barrier()
    comm.device_arena.reset(dist.group.WORLD)
    assert not wrong_results(device, comm, cases((7,))[3:4])
    return message


@rungs("name", ("matmul_reduce_scatter, which scatters",), *((name,) for name in CALLS))
def test_different_calls_are_named(run: Run, device: str, name: str) -> None:
    operation, _ = name.split(", ")
    for rank, message in enumerate(run(device, 2, errors_of_different_calls, name)):
        assert message.startswith("CallMismatch: every rank of group")
        assert "rank 0 and rank 1 do not" in message or "rank 1 and rank 0 do not" in message
        assert f"rank {rank} calls {operation} of {6 if rank else 8} x" in message


def errors_of_a_bad_call(device: str) -> str:
    comm = hostile(device, "fused", ROOMY)
    weight = torch.ones(4, 5 if comm.rank == 1 else 3, device=device)
    return raised_by(comm, lambda: all_gather_matmul(torch.ones(2, 3, device=device), [weight], comm))


@rungs("world", (2,), (4,))
def test_a_bad_call_of_one_rank_ends_on_all(run: Run, device: str, world: int) -> None:
    messages = run(device, world, errors_of_a_bad_call)
    assert messages.pop(1).startswith("ValueError: all_gather_matmul needs x[T/tp, D]")
    assert all(m.startswith("CallMismatch") and "rank 1 refused its own" in m for m in messages)


@contextmanager
def waiting_is_an_error(is_error: bool) -> Iterator[None]:
    """Have torch raise where it would wait for the device."""
    if not is_error:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_host_goes_on(device: str, strategy: str, many: Sequence[Case]) -> None:
    """A call returns before any peer has made it, and nothing in it waits for the device."""
    comm = Communicator(dist.group.WORLD, arena_bytes=ROOMY, device=torch.device(device), strategy=strategy)
    everyone = [moved(device, inputs_of(case, comm.rank, comm.size)) for case in many]
    # At first memory is allocated and kernels are loaded, for which a device may stop.
    for ahead in (False, device == "cuda"):
        if ahead and comm.rank:
            dist.barrier()
        with waiting_is_an_error(ahead):
            got = [results(case, comm, inputs) for case, inputs in zip(many, everyone, strict=True)]
        if ahead and not comm.rank:
            dist.barrier()
        settle(comm)
        dist.barrier()
    for case, tensors in zip(many, got, strict=True):
        assert all(agreements(tensors, expected(case, comm.rank, comm.size))), case


@rungs("world, strategy", (2, "push"), (2, "fused"), (2, "push"))
def test_the_host_goes_on(run: Run, device: str, world: int, strategy: str) -> None:
    many = cases((40,), dim=16, dtype=HALF)
    run(device, world, check_host_goes_on, strategy, many[3:4] if device == "cpu" else many)


def captured(compute: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
    """A CUDA graph of what is computed, to be replayed, and its results."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            compute()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = compute()
    return graph.replay, got


def check_replays(device: str, strategy: str, many: Sequence[Case], is_odd: bool) -> None:
    """Forward and backward in one graph, of an odd or an even number of calls; then calls outside of it.

    Without biases y and dx are multiplied by what x and dy are multiplied by, and dw by its square.
    """
    comm = Communicator(dist.group.WORLD, arena_bytes=ROOMY, device=torch.device(device), strategy=strategy)
    arena = comm.device_arena
    assert arena is not None
    drawn = [inputs_of(case, comm.rank, comm.size) for case in many]
    everyone = [moved(device, inputs) for inputs in drawn]

    def compute() -> list[list[Tensor]]:
        return [results(case, comm, inputs) for case, inputs in zip(many, everyone, strict=True)]

    before = arena._generation
    # Captured, it has been computed three times: an odd number of times too.
    replay, got = captured(compute) if device == "cuda" else (lambda: None, compute())
    assert (arena._generation != before) == is_odd
    wants = [expected(case, comm.rank, comm.size) for case in many]
    for factor in (2, -1, 3, -2, 1):
        for inputs, original in zip(everyone, drawn, strict=True):
            for t, value in zip([inputs.x, *inputs.dys], [original.x, *original.dys], strict=True):
                t.copy_(factor * value)
        replay()
        got = got if device == "cuda" else compute()
        settle(comm)
        for case, tensors, (y, dx, dweight) in zip(many, got, wants, strict=True):
            want = [factor * y, factor * dx, factor * factor * dweight]
            assert agreements(tensors, want) == [True] * 3, f"rank {comm.rank}, times {factor}: {case}"
    wrong = wrong_results(device, comm, cases((7,))[:4])
    assert not wrong, "\n".join(wrong)


GRAPHS = {
    # Gather and scatter, and in backward each the other.
    "even": (
        [Case("all_gather_matmul", 40, 16, (24,), HALF), Case("matmul_reduce_scatter", 40, 16, (24,), HALF)],
        False,
    ),
    # A gather, then one that is hidden behind a scatter.
    "odd": ([Case("all_gather_matmul", 40, 16, (24,), HALF, keep_gathered=False)], True),
    # A gather without a matmul comes first in nothing that has begun.
    "all-reduce": ([Case("matmul_all_reduce", 40, 16, (24,), HALF)], False),
}


@rungs(
    "world, strategy, graph",
    (2, "push", "odd"),
    *((2, strategy, graph) for strategy in ("fused", "push") for graph in GRAPHS),
    (4, "fused", "even"),
    (4, "fused", "odd"),
)
def test_cuda_graphs_replay(run: Run, device: str, world: int, strategy: str, graph: str) -> None:
    run(device, world, check_replays, strategy, *GRAPHS[graph])
