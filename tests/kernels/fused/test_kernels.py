"""Rung: interpreter, several processes. The fused operators' kernels against their specifications, tolerance zero.

Every rank is a process that interprets the same kernels that a GPU compiles, on memory that the ranks share; a thread
of each stands for its copy engine. Inputs are small integers, arenas hostile (kernel_ranks.py). What only a GPU shows
is in test_cuda.py, which interprets a small case of most checks too: where it does, the case here is slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.ranks.arena_ranks import Case, cases, hostile_communicator, inputs_of, results
from support.ranks.kernel_ranks import kernel_communicator, wrong_results
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.arena import shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused import strategy as fused_strategy
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.kernels import slots as slots_module

pytest.importorskip("triton")


ROOMY, TINY = 1 << 18, 1 << 13
STRATEGIES = ("fused", "push")


# What both share is tested with one by default.
ONE_BY_DEFAULT = ("fused", pytest.param("push", marks=pytest.mark.slow))


def check_matrix(strategy: str, arena_bytes: int, token_counts: tuple[int, ...], dim: int) -> None:
    comm = kernel_communicator(dist.group.WORLD, strategy, arena_bytes, seed=dim)
    assert (comm.device_arena is not None) == (comm.size > 1)
    wrong = wrong_results(comm, cases(token_counts, dim=dim))
    assert not wrong, "\n".join(wrong)


WORLDS = ((1, (7, 0)), (2, (1, 100)), (3, (0, 63)), (4, (7, 65)))
NUM_OPTIONS = len(cases((1,)))


class Chosen(NamedTuple):
    """A call of part of the matrix: numbers of the strategy, of the number of tokens and of the operator's options."""

    strategy: int
    tokens: int
    option: int


def some_of_matrix(world: int) -> list[Chosen]:
    """Every operator with every option once, in turns of strategy and number of tokens."""
    turns = [(option, (world + option) % 4) for option in range(NUM_OPTIONS)]
    return [Chosen(turn // 2, turn % 2, option) for option, turn in turns]


def test_some_of_the_matrix_has_each_pair() -> None:
    """Each pair of two of these occurs: number of ranks, strategy, first or second number of tokens, option."""
    calls = [(i, *chosen) for i, (world, _) in enumerate(WORLDS) for chosen in some_of_matrix(world)]
    counts = (len(WORLDS), len(STRATEGIES), 2, NUM_OPTIONS)
    for one, other in itertools.combinations(range(len(counts)), 2):
        wanted = set(itertools.product(range(counts[one]), range(counts[other])))
        assert {(call[one], call[other]) for call in calls} == wanted, (one, other)


def check_some_of_matrix(token_counts: tuple[int, int]) -> None:
    every = [cases((tokens,)) for tokens in token_counts]
    for i, strategy in enumerate(STRATEGIES):
        comm = kernel_communicator(dist.group.WORLD, strategy, ROOMY, seed=i)
        assert (comm.device_arena is not None) == (comm.size > 1)
        chosen = [call for call in some_of_matrix(comm.size) if call.strategy == i]
        wrong = wrong_results(comm, [every[call.tokens][call.option] for call in chosen])
        assert not wrong, "\n".join(wrong)


# By default two ranks, of which one holds none of one token.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "token_counts"),
    [pytest.param(*one, marks=() if one[0] == 2 else pytest.mark.slow) for one in WORLDS],
)
def test_outputs_and_gradients(interpreters: RankPool, world: int, token_counts: tuple[int, int]) -> None:
    interpreters.run(check_some_of_matrix, world, token_counts)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("world", "token_counts"), [*WORLDS, (6, (7,))])
def test_outputs_and_gradients_of_every_combination(
    interpreters: RankPool, world: int, token_counts: tuple[int, ...], strategy: str
) -> None:
    interpreters.run(check_matrix, world, strategy, ROOMY, token_counts, 5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_larger_than_the_arena_moves_in_pieces(interpreters: RankPool, world: int, strategy: str) -> None:
    interpreters.run(check_matrix, world, strategy, TINY, (70,), 33)


def check_some_that_are_fetched() -> None:
    comm = kernel_communicator(dist.group.WORLD, "fetch", ROOMY)
    wrong = wrong_results(comm, cases((7,))[::7])
    assert not wrong, "\n".join(wrong)


def test_a_kernel_in_place_of_the_copy_engine(interpreters: RankPool) -> None:
    interpreters.run(check_some_that_are_fetched, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "token_counts", "arena_bytes", "dim"),
    [
        (2, (7,), ROOMY, 5),
        (2, (70,), TINY, 33),
        (3, (0, 63), ROOMY, 5),
        (4, (7, 65), ROOMY, 5),
        (6, (7,), ROOMY, 5),
    ],
)
def test_a_kernel_in_place_of_the_copy_engine_in_every_case(
    interpreters: RankPool, world: int, token_counts: tuple[int, ...], arena_bytes: int, dim: int
) -> None:
    interpreters.run(check_matrix, world, "fetch", arena_bytes, token_counts, dim)


def check_sizes_of_zero(strategy: str) -> None:
    comm = kernel_communicator(dist.group.WORLD, strategy, ROOMY)
    empty: list[Case] = []
    for tokens in (0, 5):
        empty += cases((tokens,), dim=0)[::3]
        empty += cases((tokens,), widths=(0, 3), dim=2)[1:2]
        empty += cases((tokens,), widths=(0,))[3:6:2]
    wrong = wrong_results(comm, empty)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ONE_BY_DEFAULT)
def test_no_columns_or_nothing_to_sum(interpreters: RankPool, strategy: str) -> None:
    """Every peer is notified of nothing, too, or all wait."""
    interpreters.run(check_sizes_of_zero, 2, strategy)


def check_dtypes_and_strides(strategy: str) -> None:
    comm = kernel_communicator(dist.group.WORLD, strategy, ROOMY)
    many = cases((65,), dtype=torch.float16, strided=True) + cases((7,), strided=True)
    wrong = wrong_results(comm, many)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dtypes_and_strides(interpreters: RankPool, strategy: str) -> None:
    interpreters.run(check_dtypes_and_strides, 3, strategy)


def check_halves_and_float64() -> None:
    comm = kernel_communicator(dist.group.WORLD, "fused", ROOMY)
    wrong = wrong_results(comm, cases((7,), dtype=torch.float16, strided=True)[3:4])
    # No kernel multiplies float64: collectives do.
    assert comm.device_arena_for(torch.zeros(1, dtype=torch.float64)) is None
    wrong += wrong_results(comm, cases((7,), dtype=torch.float64))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_halves_and_float64(interpreters: RankPool) -> None:
    interpreters.run(check_halves_and_float64, 3)


def check_mixed_calls(strategy: str) -> None:
    """No barrier between calls: the ranks run as far ahead of each other as the signals let them."""
    comm = kernel_communicator(dist.group.WORLD, strategy, 1 << 14, seed=7)
    mixed = cases((1, 7, 40))
    wrong = wrong_results(comm, [mixed[5 * i % len(mixed)] for i in range(25)])
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_calls_back_to_back(interpreters: RankPool, strategy: str) -> None:
    interpreters.run(check_mixed_calls, 4, strategy)


def check_two_groups_at_once() -> None:
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    across = kernel_communicator(rows, "fused", ROOMY, 0)
    down = kernel_communicator(columns, "push", ROOMY, 1)
    wrong = []
    for first, second in zip(cases((7,)), reversed(cases((20,))), strict=True):
        wrong += [*wrong_results(across, [first]), *wrong_results(down, [second])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_two_groups_at_once(interpreters: RankPool) -> None:
    interpreters.run(check_two_groups_at_once, 4)


def check_wrapping_epochs() -> None:
    for strategy in STRATEGIES:
        comm = kernel_communicator(dist.group.WORLD, strategy, ROOMY, first_epoch=2**31 - 5)
        assert comm.device_arena is not None and int(comm.device_arena.epoch) == 2**31 - 5
        wrong = wrong_results(comm, cases((7,)))
        assert not wrong, "\n".join(wrong)
        assert int(comm.device_arena.epoch) < -(2**31) + 100, "the epochs wrapped around"


@pytest.mark.slow
def test_epochs_wrap_around(interpreters: RankPool) -> None:
    interpreters.run(check_wrapping_epochs, 3)


def check_same_generation_again() -> None:
    """Use one generation twice in a row, as a replayed CUDA graph of an odd number of calls does.

    Such calls meet first.
    """
    comm = kernel_communicator(dist.group.WORLD, "fused", ROOMY, most_seconds=1e-2)
    arena = comm.device_arena
    assert arena is not None
    for case in 4 * cases((7, 33))[3:4] + 4 * cases((40,))[:1]:
        arena.generation = 0  # `begin` takes the other
        wrong = wrong_results(comm, [case])
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_generation_used_twice_in_a_row(interpreters: RankPool) -> None:
    interpreters.run(check_same_generation_again, 3)


def bits_of_runs(strategy: str, num_runs: int) -> list[int]:
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
    first: list[torch.Tensor] = []
    different = []
    for run in range(num_runs):
        comm = kernel_communicator(dist.group.WORLD, strategy, 1 << 14, seed=run)
        got = [t for case, inputs in zip(some, drawn, strict=True) for t in results(case, comm, inputs)]
        first = first or got
        if not all(torch.equal(a, b) for a, b in zip(got, first, strict=True)):
            different.append(run)
    return different


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_bits_on_every_run(interpreters: RankPool, strategy: str) -> None:
    assert interpreters.run(bits_of_runs, 3, strategy, 6) == [[], [], []]


def check_bits_of_the_host_path() -> None:
    """Where products are exact, only the order of sums between ranks has a say, and it is the same tree."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case = Case("matmul_reduce_scatter", 40, 17, (1,))
    inputs = inputs_of(case, rank, world)
    generator = torch.Generator().manual_seed(rank)
    inputs.x.copy_(torch.randn(inputs.x.shape, generator=generator))
    inputs.weights[0].copy_(torch.ones_like(inputs.weights[0]))
    by_kernels = results(case, kernel_communicator(dist.group.WORLD, "fused", ROOMY), inputs)
    on_host = results(case, hostile_communicator(dist.group.WORLD, ROOMY), inputs)
    own = shard_rows(case.num_tokens, world, rank)
    xs = [torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(other))[own] for other in range(world)]
    in_turn = ((xs[0] + xs[1]) + xs[2]) + xs[3]
    assert torch.equal(by_kernels[0], on_host[0]) and not torch.equal(by_kernels[0], in_turn.expand(-1, case.dim))


def test_equal_bits_with_the_host_path(interpreters: RankPool) -> None:
    interpreters.run(check_bits_of_the_host_path, 4)


def in_turn(slots: Any, own: Any, mask: Any, rank: Any, stride: Any, first: int, count: int) -> Any:
    """Add the slots one after another."""
    total = slots_module._added(slots, own, mask, rank, stride, first, 1)
    for i in range(first + 1, first + count):
        total = total + slots_module._added(slots, own, mask, rank, stride, i, 1)
    return total


def own_last(slots: Any, own: Any, mask: Any, rank: Any, stride: Any, first: int, count: int) -> Any:
    """Add the peers' slots in the tree, as one that has no slot of this rank, and then what is own."""
    from tpkernels.launch import tl

    nothing = tl.zeros_like(own)
    return slots_module._added(slots, nothing, mask, rank, stride, first, count) + own.to(tl.float32)


def bits_are_those_of_the_host(mutant: str) -> bool:
    """The check above, of sums in another order."""
    mutants: dict[str, Callable[..., Any]] = {"in turn": in_turn, "own last": own_last}
    tree = slots_module._added

    def once(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(slots_module, "_added", tree)
            return mutants[mutant](*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots_module, "_added", once)
        try:
            check_bits_of_the_host_path()
        except AssertionError:
            return False
    return True


@pytest.mark.slow
def test_another_order_of_the_sum_is_noticed(interpreters: RankPool, count_mutations: CountMutations) -> None:
    """By every rank, wherever in the tree its own tile stands; but 0 + 1 and 1 + 0 are the same, so not all by each."""
    orders = ("in turn", "own last")
    unnoticed = [order for order in orders if all(interpreters.run(bits_are_those_of_the_host, 4, order))]
    count_mutations("the order of a scatter's sum", len(orders) - len(unnoticed), len(orders))
    assert unnoticed == []


def strategies_chosen() -> list[bool]:
    """Whether the arena has seen a call, for a strategy each; the last is what "auto" is predicted to be best at."""
    with pytest.MonkeyPatch.context() as patch:
        # So few tokens are plain otherwise.
        patch.setattr(fused_strategy, "_FEWEST_TOKENS", 0)
        return strategies_chosen_for_few_tokens()


def strategies_chosen_for_few_tokens() -> list[bool]:
    seen = []
    for strategy in ("plain", "auto", "fused", "auto"):
        comm = Communicator(dist.group.WORLD, arena_bytes=ROOMY, strategy=strategy)
        arena = comm.device_arena
        assert arena is not None and comm.arena is not None
        assert arena.rates is not None
        slow = {"launch_seconds": 1.0} if len(seen) == 3 else {"link_bytes_per_s": 1.0}
        arena.rates = replace(arena.rates, **slow)
        all_gather_matmul(torch.ones(4, 16), [torch.ones(8, 16)], comm)
        seen.append(int(arena.epoch) > 0)
    # Of a GPU whose rates nobody knows.
    before = int(arena.epoch)
    arena.rates = None
    all_gather_matmul(torch.ones(4, 16), [torch.ones(8, 16)], comm)
    seen.append(int(arena.epoch) > before)
    return seen


def test_strategies(interpreters: RankPool) -> None:
    """Where links are slow "auto" takes collectives, here the host's arena; where launches are, kernels."""
    assert interpreters.run(strategies_chosen, 2) == [[False, False, True, True, False]] * 2
    with pytest.raises(ValueError, match="strategy must be auto, plain, fused or push"):
        Communicator(None, strategy="fast")
