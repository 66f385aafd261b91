"""Rung: gloo ranks, one test: interpreter. The fused operators against their specifications; integers, tolerance zero.

Every arena here is hostile (arena_ranks.py): NaN where nobody wrote, random delays on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.arena_ranks import Case, Inputs, cases, differences, hostile_communicator, inputs_of, results
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.arena import Arena
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.fused import gather
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.gather import gather_matmul
from tpkernels.fused.matmul_all_reduce import matmul_all_reduce
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.ops.matmul.host import product
from tpkernels.ops.matmul.wgrad import wgrad_
from tpkernels.symmetric.memory import HostMemory

ROOMY, TINY = 1 << 20, 1 << 13
AWKWARD = (0, 1, 2, 7, 63, 65, 100)
DTYPES = (torch.float64, torch.bfloat16)


def check_matrix(arena_bytes: int, token_counts: tuple[int, ...], dim: int) -> None:
    comm = hostile_communicator(dist.group.WORLD, arena_bytes, seed=arena_bytes + dim)
    assert (comm.arena is not None) == (arena_bytes > 0 and comm.size > 1)
    wrong = [differences(case, comm) for case in cases(token_counts, dim=dim)]
    assert not any(wrong), "\n".join(filter(None, wrong))


def check_dtypes_and_strides(arena_bytes: int) -> None:
    comm = hostile_communicator(dist.group.WORLD, arena_bytes, seed=arena_bytes)
    wrong = [differences(case, comm) for dtype in DTYPES for case in cases((7, 65), dtype=dtype, strided=True)]
    wrong += [differences(case, comm) for case in cases((64,), strided=True)]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize("arena_bytes", [ROOMY, 0], ids=["arena", "collectives"])
@pytest.mark.parametrize("world", [1, 3, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4, 6))])
def test_outputs_and_gradients(ranks: RankPool, world: int, arena_bytes: int) -> None:
    ranks.run(check_matrix, world, arena_bytes, AWKWARD, 5)


@pytest.mark.parametrize("world", [2, 3, pytest.param(6, marks=pytest.mark.slow)])
def test_what_is_larger_than_the_arena_moves_in_pieces(ranks: RankPool, world: int) -> None:
    ranks.run(check_matrix, world, TINY, (2, 63, 100), 33)


@pytest.mark.slow
def test_eight_ranks(ranks: RankPool) -> None:
    ranks.run(check_matrix, 8, TINY, (1, 65), 7)


@pytest.mark.by_default("arena")
@pytest.mark.parametrize("arena_bytes", [TINY, 0], ids=["arena", "collectives"])
def test_dtypes_and_strides(ranks: RankPool, arena_bytes: int) -> None:
    ranks.run(check_dtypes_and_strides, 3, arena_bytes)


def refusals_of_wide_rows(arena_bytes: int) -> list[str]:
    """Try rows of 2000 floats in an arena of 8 kB, then in one of the size that the message names."""
    comm = hostile_communicator(dist.group.WORLD, arena_bytes)
    x, rows = torch.ones(2 * comm.size, 3), torch.ones(2, 2000)
    messages = []
    for call in (
        lambda: all_gather_matmul(rows, [torch.ones(3, 2000)], comm),
        lambda: matmul_reduce_scatter(x, torch.ones(2000, 3), comm),
        lambda: matmul_all_reduce(x, torch.ones(2000, 3), comm),
    ):
        with pytest.raises(ValueError, match="a row must fit into the arena") as error:
            call()
        messages.append(str(error.value))
        named = re.search(r"open it with (\d+) bytes", messages[-1])
        assert named is not None, messages[-1]
        assert int(named[1]) < 100_000, "the remedy is within reason"
        arena, comm.arena = comm.arena, Arena.open(dist.group.WORLD, int(named[1]))
        outputs = call()
        assert all(torch.isfinite(y).all() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
        comm.arena = arena
    assert not any(differences(case, comm) for case in cases((7,)))
    return messages


@pytest.mark.parametrize("world", [2, 3])
def test_a_row_wider_than_the_arena_is_refused_on_every_rank(ranks: RankPool, world: int) -> None:
    messages = ranks.run(refusals_of_wide_rows, world, TINY)
    assert all(other == messages[0] for other in messages)
    assert all("8000 bytes" in message for message in messages[0])


def check_fifty_mixed_calls() -> None:
    """No barrier between calls: the ranks run as far ahead of each other as the signals let them."""
    comm = hostile_communicator(dist.group.WORLD, 1 << 14, seed=7)
    mixed = cases((1, 7, 63))
    wrong = [differences(mixed[i % len(mixed)], comm) for i in range(50)]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.slow
def test_fifty_mixed_calls_back_to_back(ranks: RankPool) -> None:
    ranks.run(check_fifty_mixed_calls, 4)


def check_two_groups_at_once() -> None:
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    across, down = (hostile_communicator(group, TINY, seed) for seed, group in enumerate((rows, columns)))
    wrong = []
    for first, second in zip(cases((7, 65)), reversed(cases((1, 63))), strict=True):
        wrong += [differences(first, across), differences(second, down)]
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_two_groups_at_once(ranks: RankPool) -> None:
    ranks.run(check_two_groups_at_once, 4)


def check_wrapping_epochs() -> None:
    comm = hostile_communicator(dist.group.WORLD, TINY, seed=3, first_epoch=2**31 - 5)
    assert comm.arena is not None and comm.arena.epoch == 2**31 - 5
    wrong = [differences(case, comm) for case in cases((1, 7, 65))[:20]]
    assert not any(wrong), "\n".join(filter(None, wrong))
    assert comm.arena.epoch < -(2**31) + 200, "the epochs wrapped around"


def test_epochs_wrap_around(ranks: RankPool) -> None:
    ranks.run(check_wrapping_epochs, 3)


NORMAL = (
    Case("all_gather_matmul", 65, 17, (11, 3), biased=True, return_gathered=True),
    Case("matmul_reduce_scatter", 65, 17, (11,), biased=True),
    Case("matmul_all_reduce", 65, 17, (11,)),
)


def normal_like(inputs: Inputs, seed: int) -> Inputs:
    """Real numbers in the shapes of a case, so that every order of summation has other bits."""
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator)

    return Inputs(draw(inputs.x), *([draw(t) for t in ts] for ts in (inputs.weights, inputs.biases, inputs.dys)))


def runs_with_other_bits(num_runs: int) -> list[int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    drawn = [normal_like(inputs_of(case, rank, world), rank) for case in NORMAL]
    first: list[Tensor] = []
    different = []
    for run in range(num_runs):
        comm = hostile_communicator(dist.group.WORLD, 1 << 14, seed=run)
        got = [t for case, inputs in zip(NORMAL, drawn, strict=True) for t in results(case, comm, inputs)]
        first = first or got
        if not all(torch.equal(a, b) for a, b in zip(got, first, strict=True)):
            different.append(run)
    return different


@pytest.mark.slow
def test_equal_bits_on_twenty_runs(ranks: RankPool) -> None:
    assert ranks.run(runs_with_other_bits, 3, 20) == [[], [], []]


def check_one_result_on_all_ranks() -> None:
    """matmul_all_reduce gives every rank the same bits, over an arena and over collectives."""
    for arena_bytes in (1 << 14, 0):
        comm = hostile_communicator(dist.group.WORLD, arena_bytes)
        drawn = normal_like(inputs_of(NORMAL[2], comm.rank, comm.size), comm.rank)
        y = matmul_all_reduce(drawn.x, drawn.weights[0], comm)
        everyone = [torch.empty_like(y) for _ in range(comm.size)]
        dist.all_gather(everyone, y)
        assert all(torch.equal(other, y) for other in everyone)


def test_all_reduce_has_one_result(ranks: RankPool) -> None:
    ranks.run(check_one_result_on_all_ranks, 4)


def check_plain_exchanges() -> None:
    """The communicator's own gather, reduce-scatter and all-reduce over an arena, any shape."""
    comm = hostile_communicator(dist.group.WORLD, TINY)
    for shape in ((), (5,), (3, 2, 2), (0,), (100,)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            generator = torch.Generator().manual_seed(len(shape))
            everyone = [torch.randint(-9, 9, (5, *shape), generator=generator).to(dtype) for _ in range(comm.size)]
            mine, total = everyone[comm.rank], torch.stack(everyone).sum(0).to(dtype)
            rows = slice(min(comm.rank * -(-5 // comm.size), 5), min((comm.rank + 1) * -(-5 // comm.size), 5))
            assert torch.equal(comm.all_gather(mine), torch.cat(everyone))
            assert torch.equal(comm.all_gather_rows(total[rows], 5), total)
            assert torch.equal(comm.reduce_scatter(mine), total[rows])
            assert torch.equal(comm.all_reduce_(mine.clone()), total)
    scalar = torch.tensor(comm.rank + 1.0)
    assert comm.all_reduce_(scalar) is scalar and scalar.item() == comm.size * (comm.size + 1) / 2


def test_plain_exchanges_over_an_arena(ranks: RankPool) -> None:
    ranks.run(check_plain_exchanges, 3)


def check_strided_all_reduce(arena_bytes: int) -> None:
    """A tensor with gaps is summed in place, and its gaps are left alone."""
    comm = hostile_communicator(dist.group.WORLD, arena_bytes)
    for t in (torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6).T):
        want = t.clone()
        want[:, ::2] *= comm.size
        strided = t[:, ::2]
        assert comm.all_reduce_(strided) is strided
        assert torch.equal(t, want)


@pytest.mark.parametrize("arena_bytes", [TINY, 0], ids=["arena", "collectives"])
def test_all_reduce_of_a_strided_tensor(ranks: RankPool, arena_bytes: int) -> None:
    ranks.run(check_strided_all_reduce, 2, arena_bytes)


def dtypes_under_autocast(arena_bytes: int) -> list[torch.dtype]:
    comm = hostile_communicator(dist.group.WORLD, arena_bytes)
    with torch.autocast("cpu", torch.bfloat16):
        return [t.dtype for case in cases((7,))[:4:3] for t in results(case, comm)[:1]]


@pytest.mark.parametrize("arena_bytes", [TINY, 0], ids=["arena", "collectives"])
def test_outputs_are_of_autocasts_dtype(ranks: RankPool, arena_bytes: int) -> None:
    assert ranks.run(dtypes_under_autocast, 2, arena_bytes) == [[torch.bfloat16] * 2] * 2


def check_only_what_is_asked_for() -> None:
    """Gradients of x alone, of the weights alone, of one of two outputs: as if all had been asked for."""
    comm = hostile_communicator(dist.group.WORLD, TINY)
    for case in cases((7,)):
        mine = inputs_of(case, comm.rank, comm.size)
        whole = results(case, comm, mine)[-len(mine.leaves()) :]
        for wanted in range(len(mine.leaves())):
            leaves = [leaf.detach().requires_grad_(i == wanted) for i, leaf in enumerate(mine.leaves())]
            weights, biases = leaves[1 : 1 + len(mine.weights)], leaves[1 + len(mine.weights) :]
            if case.operator == "all_gather_matmul":
                outputs = all_gather_matmul(
                    leaves[0], weights, comm, biases=biases or None, num_tokens=7,
                    keep_gathered=case.keep_gathered, return_gathered=case.return_gathered,
                )  # fmt: skip
            else:
                operator = {"matmul_reduce_scatter": matmul_reduce_scatter}.get(case.operator, matmul_all_reduce)
                outputs = (operator(leaves[0], weights[0], comm, bias=biases[0] if biases else None),)
            kept = [(y, dy) for y, dy in zip(outputs, mine.dys, strict=True) if y.requires_grad]
            (grad,) = torch.autograd.grad([y for y, _ in kept], [leaves[wanted]], [dy for _, dy in kept])
            assert torch.equal(grad, whole[wanted]), (case, wanted)


def test_gradients_of_some_inputs_only(ranks: RankPool) -> None:
    ranks.run(check_only_what_is_asked_for, 2)


def backward_of_row_parallel(arena_bytes: int, strategy: str = "auto") -> dict[str, Any]:
    """Return for each choice of gradients how often backward multiplied by the weight, whether it kept dy, and bits."""
    comm = Communicator(dist.group.WORLD, arena_bytes=arena_bytes, strategy=strategy)
    generator = torch.Generator().manual_seed(comm.rank)
    # Numbers whose products and sums are exact, so that the order of sums does not matter.
    x, weight, bias, dy = (
        torch.randint(-4, 5, shape, generator=generator).float() for shape in ((6, 4), (5, 4), (5,), (3, 5))
    )
    found: dict[str, Any] = {}
    for wanted in ("x weight bias", "x", "weight", "bias", "x bias", "x by rank 0, weight by rank 1"):
        names = wanted.split()
        if "by" in names:
            names = [names[4 * comm.rank]]
        leaves = {"x": x.clone(), "weight": weight.clone(), "bias": bias.clone()}
        for name in names:
            leaves[name].requires_grad_()
        y = matmul_reduce_scatter(leaves["x"], leaves["weight"], comm, bias=leaves["bias"])
        products, kept = [0], []
        with pytest.MonkeyPatch.context() as patch:

            def counted(*args: Any, products: list[int] = products, **kwargs: Any) -> Tensor:
                products[0] += 1
                return product(*args, **kwargs)

            def watched(*args: Any, keep: bool, kept: list[bool] = kept, **kwargs: Any) -> Any:
                kept.append(keep)
                return gather_matmul(*args, keep=keep, **kwargs)

            patch.setattr(gather, "product", counted)
            patch.setattr("tpkernels.fused.matmul_reduce_scatter.gather_matmul", watched)
            y.backward(dy)
        grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        found[wanted] = names, products[0] > 0, kept, grads
    return found


@pytest.mark.parametrize("arena_bytes", [ROOMY, 0], ids=["arena", "collectives"])
def test_row_parallel_backward_does_what_is_asked_for(ranks: RankPool, arena_bytes: int) -> None:
    for answers in ranks.run(backward_of_row_parallel, 2, arena_bytes):
        _, _, _, whole = answers["x weight bias"]
        assert sorted(whole) == ["bias", "weight", "x"]
        for names, multiplied, kept, grads in answers.values():
            assert multiplied == ("x" in names), names
            assert kept == ([len(names) > 1] if "x" in names else []), names
            assert sorted(grads) == sorted(names)
            assert all(torch.equal(grads[name], whole[name]) for name in names), names


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fused", pytest.param("push", marks=pytest.mark.slow)])
def test_row_parallel_backward_over_kernels_gathers_alike(interpreters: RankPool, strategy: str) -> None:
    """Whatever a rank asks for, it takes part in the others' exchange by kernels."""
    pytest.importorskip("triton")
    for answers in interpreters.run(backward_of_row_parallel, 2, ROOMY, strategy):
        _, _, _, whole = answers["x weight bias"]
        for names, _, kept, grads in answers.values():
            assert kept == [names != ["x"]], names
            assert sorted(grads) == sorted(names)
            assert all(torch.equal(grads[name], whole[name]) for name in names), names


BAD: dict[str, Callable[[Communicator], object]] = {
    "give every weight x's last dim": lambda comm: all_gather_matmul(torch.ones(2, 3), [torch.ones(4, 5)], comm),
    "gather.*one dtype": lambda comm: all_gather_matmul(torch.ones(2, 3), [torch.ones(4, 3).double()], comm),
    "one bias": lambda comm: all_gather_matmul(torch.ones(2, 3), [torch.ones(4, 3)], comm, biases=[torch.ones(3)]),
    "holds 1 of 1 tokens": lambda comm: all_gather_matmul(torch.ones(2, 3), [torch.ones(4, 3)], comm, num_tokens=1),
    "give the weight x's last dim": lambda comm: matmul_reduce_scatter(torch.ones(2, 3), torch.ones(4, 5), comm),
    "scatter.*one dtype": lambda comm: matmul_reduce_scatter(torch.ones(2, 3), torch.ones(4, 3).double(), comm),
    "pass one number per row": lambda comm: matmul_all_reduce(
        torch.ones(2, 3), torch.ones(4, 3), comm, bias=torch.ones(3)
    ),
    "gather_matmul needs x": lambda comm: all_gather_matmul(torch.ones(()), [torch.ones(4, 3)], comm),
    "all_reduce needs x": lambda comm: matmul_all_reduce(torch.ones(3), torch.ones(4, 3), comm),
}


@pytest.mark.parametrize("message", BAD)
def test_arguments_that_do_not_fit(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BAD[message](Communicator(None))


def errors_of_sizes() -> list[str]:
    """Return the errors of arenas and a mailbox of impossible sizes; afterwards the group works as before."""
    group, messages = dist.group.WORLD, []
    for size in (-5, 2**70, 1.5):
        for make in (
            lambda size=size: Communicator(group, arena_bytes=size),
            lambda size=size: Arena.open(group, size),
            lambda size=size: DeviceArena.open(group, size, torch.device("cpu")),
            lambda size=size: Mailbox.open(group, size, 2),
            lambda size=size: HostMemory.allocate(group, size),
        ):
            with pytest.raises(ValueError) as error:
                make()
            messages.append(str(error.value))
    assert Communicator(group, arena_bytes=ROOMY).arena is not None
    return messages


def test_sizes_that_are_none_are_refused_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks.run(errors_of_sizes, 2)
    assert first == second
    for message, size in zip(first, [size for size in (-5, 2**70, 1.5) for _ in range(5)], strict=True):
        assert f"must be a whole number of bytes, 1 to 2**60: got {size}: pass" in message and "\n" not in message
    assert "arena_bytes" in first[0] and "slot_bytes" in first[3]
    with pytest.raises(ValueError, match=r"arena_bytes, or 0 for no arena, must be .*: got -1"):
        Communicator(None, arena_bytes=-1)


UNSUPPORTED = (torch.float8_e4m3fn, torch.int64, torch.complex64, torch.bool)


def errors_of_dtypes(arena_bytes: int) -> list[str]:
    """Return every operator's errors for dtypes that it does not take; after each the group works as before."""
    comm = hostile_communicator(dist.group.WORLD, arena_bytes)
    messages = []
    for dtype in UNSUPPORTED:
        x = torch.ones(2, 4).to(dtype)
        for call in (
            lambda x=x: all_gather_matmul(x, [x], comm),
            lambda x=x: matmul_reduce_scatter(x, x, comm),
            lambda x=x: matmul_all_reduce(x, x, comm),
        ):
            with pytest.raises(ValueError) as error:
                call()
            messages.append(f"{type(error.value).__name__}: {error.value}")
            assert comm.all_gather(torch.ones(1)).tolist() == [1] * comm.size
    return messages


@pytest.mark.parametrize("arena_bytes", [0, ROOMY])
def test_dtypes_that_nothing_multiplies_are_refused_before_the_call(ranks: RankPool, arena_bytes: int) -> None:
    first, second = ranks.run(errors_of_dtypes, 2, arena_bytes)
    assert first == second
    for i, operator in enumerate(("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")):
        for dtype, message in zip(UNSUPPORTED, first[i::3], strict=True):
            expected = f"ValueError: {operator} multiplies float16, bfloat16, float32, float64: got {dtype} (2, 4)"
            assert message.startswith(expected)


def check_dtypes_that_nothing_adds(arena_bytes: int) -> None:
    comm = hostile_communicator(dist.group.WORLD, arena_bytes)
    for dtype in (torch.float8_e5m2, torch.uint16):
        x = torch.ones(2, 4).to(dtype)
        sums = (comm.reduce_scatter, comm.all_reduce_, comm.all_reduce_in_tree_, comm.start_all_reduce)
        for call in (*sums, lambda x: comm.reduce_scatter_in_tree([x])):
            with pytest.raises(ValueError, match=f"cannot add {dtype}: got .2, 4.: convert it"):
                call(x)
            assert comm.reduce_scatter(torch.ones(comm.size)).tolist() == [comm.size]


@pytest.mark.parametrize("arena_bytes", [0, ROOMY])
def test_dtypes_that_nothing_adds_are_refused_before_the_call(ranks: RankPool, arena_bytes: int) -> None:
    ranks.run(check_dtypes_that_nothing_adds, 2, arena_bytes)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16)], ids=str)
def test_wgrad_accumulates(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    buffer, dy, x = torch.ones(3, 5, dtype=dtypes[0]), torch.arange(21.0).view(7, 3), torch.arange(35.0).view(7, 5) % 3
    want = 1 + dy.T @ x
    assert wgrad_(buffer, dy.to(dtypes[1]), x.to(dtypes[1])) is buffer
    if dtypes[1] == torch.bfloat16:
        want = 1 + (dy.T.bfloat16() @ x.bfloat16()).float()
    assert torch.equal(buffer, want)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.int64, torch.float32)], ids=str
)
def test_wgrad_refuses_a_buffer_that_is_not_wider(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    buffer, x = torch.zeros(3, 5, dtype=dtypes[0]), torch.ones(7, 5, dtype=dtypes[1])
    with pytest.raises(ValueError, match=f"dw {dtypes[0]}, x {dtypes[1]}: accumulate into torch.float32"):
        wgrad_(buffer, torch.ones(7, 3, dtype=dtypes[1]), x)
    assert not buffer.any()


def test_wgrad_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="pass dy and x of one call"):
        wgrad_(torch.zeros(3, 5), torch.ones(7, 3), torch.ones(6, 5))
