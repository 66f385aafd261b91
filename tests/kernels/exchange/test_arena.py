"""Rung: gloo ranks. The arena's memory: how much of it is used, who keeps it, and what happens where there is none."""

from __future__ import annotations

import contextlib
import ctypes.util
import gc
import io
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.ranks.arena_ranks import Case, cases, differences, hostile_communicator, inputs_of, results
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.arena import Arena, CallMismatch, exchange_bytes, shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.tree import tree_sum
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.symmetric.host_memory import MemoryRefused

KILOBYTE, PAGE = 1 << 10, 1 << 12


@given(st.integers(0, 1000), st.integers(1, 20))
def test_shards_are_a_cut_of_the_rows(num_rows: int, world: int) -> None:
    shards = [shard_rows(num_rows, world, rank) for rank in range(world)]
    assert [row for rows in shards for row in range(num_rows)[rows]] == list(range(num_rows))
    lengths = [rows.stop - rows.start for rows in shards]
    assert max(lengths) == -(-num_rows // world) and lengths == sorted(lengths, reverse=True)


def epochs_of_an_exchange(num_rows: int, columns: int, arena_bytes: int) -> tuple[int, int]:
    """Return in how many pieces a gather and a reduce-scatter of float32 rows move."""
    arena = Arena.open(dist.group.WORLD, arena_bytes)
    own = shard_rows(num_rows, arena.world, arena.rank)
    x = torch.arange(num_rows * columns, dtype=torch.float32).view(num_rows, columns)
    for rows, shard in arena.gather(x[own], num_rows, "all_gather"):
        assert torch.equal(shard, x[rows])
    gathers = arena.epoch
    total = arena.reduce_scatter(
        num_rows,
        columns,
        torch.float32,
        lambda rows, out: x[rows].clone() if out is None else out.copy_(x[rows]),
        "reduce_scatter",
    )
    assert torch.equal(total, arena.world * x[own])
    return gathers, arena.epoch - gathers


def test_exchange_bytes_suffice_for_one_piece(ranks: RankPool) -> None:
    for num_rows, columns in ((100, 333), (7, 4099)):
        enough = exchange_bytes(num_rows, 4 * columns, 3)
        assert ranks.run(epochs_of_an_exchange, 3, num_rows, columns, enough) == [(1, 1)] * 3
        # 34 rows of 1332 bytes, and 3 of 16396, are more than a quarter of what they need in one piece.
        gathers, scatters = ranks.run(epochs_of_an_exchange, 3, num_rows, columns, enough // 2 - PAGE)[0]
        assert gathers == 1 and scatters > 1


def check_sums_of_rows() -> None:
    """One call each; the sum is the tree's, the same bits on all ranks, whatever the next calls write."""
    arena = Arena.open(dist.group.WORLD, 4 * PAGE)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        terms = [torch.randn(3, 65, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(arena.world)]
        before = arena.epoch
        sums = [arena.sum_of_rows(terms[arena.rank] * factor) for factor in (1, 2, 4)]
        assert arena.epoch - before == 3
        for found, factor in zip(sums, (1, 2, 4), strict=True):
            assert torch.equal(found, tree_sum([term * factor for term in terms], out=torch.empty_like(found)))
    with pytest.raises(ValueError, match="a row must fit into the arena"):
        arena.sum_of_rows(torch.zeros(3, 2 * PAGE))
    arena = Arena.open(dist.group.WORLD, 4 * PAGE)
    x = torch.zeros(1, 8)
    with pytest.raises(CallMismatch, match=r"which (sums|gathers) rows, rank \d .* which (gathers|sums) rows"):
        for _ in arena.gather(x, arena.world, "all_reduce") if arena.rank else [arena.sum_of_rows(x)]:
            pass


def test_sums_of_rows(ranks: RankPool) -> None:
    ranks.run(check_sums_of_rows, 3)


def zeros_of(columns: int) -> Callable[[slice, torch.Tensor | None], torch.Tensor]:
    """A partial result of zeros."""

    def partial(rows: slice, out: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(rows.stop - rows.start, columns) if out is None else out.zero_()

    return partial


def remedy(columns: int, arena_bytes: int) -> tuple[int, int]:
    """The bytes that a refused reduce-scatter names, and the pieces it takes with so many."""
    arena = Arena.open(dist.group.WORLD, arena_bytes)
    with pytest.raises(ValueError, match="open it with") as error:
        arena.reduce_scatter(4, columns, torch.float32, zeros_of(columns), "reduce_scatter")
    named = int(str(error.value).split("open it with ")[1].split()[0])
    larger = Arena.open(dist.group.WORLD, named)
    larger.reduce_scatter(4, columns, torch.float32, zeros_of(columns), "reduce_scatter")
    return named, larger.epoch


@pytest.mark.parametrize("columns", [337, 1365, 2000])
def test_the_size_that_a_refusal_names_is_enough(ranks: RankPool, columns: int) -> None:
    (named, _), *others = ranks.run(remedy, 3, columns, 2 * PAGE)
    assert all(other[0] == named for other in others)
    assert named < 20 * 4 * columns + 2 * PAGE, "and not far more than needed"


def in_memory(arena: Arena, t: Tensor) -> bool:
    """Whether a tensor's storage touches the arena, of any rank."""
    storage = t.untyped_storage()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return any(begin < address + arena.memory.num_bytes and address < end for address in arena.memory.addresses)


def check_no_views() -> None:
    comm = hostile_communicator(dist.group.WORLD, 8 * KILOBYTE)
    arena = comm.arena
    assert arena is not None
    assert in_memory(arena, arena.memory.block(1 - arena.rank, PAGE, (2, 3), torch.float32)), "the check itself"
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = [t for case in cases((2, 7, 63)) for t in results(case, comm)]
    plain = torch.ones(4, 3)
    found += [comm.all_gather(plain), comm.reduce_scatter(plain), comm.all_reduce_(plain.clone())]
    assert saved and found and not any(in_memory(arena, t) for t in (*found, *saved))


def test_nothing_returned_or_saved_is_in_the_arena(ranks: RankPool) -> None:
    ranks.run(check_no_views, 2)


def check_autograd_across_calls() -> None:
    """Many forward passes before the first backward: no call disturbs what another has saved."""
    comm = hostile_communicator(dist.group.WORLD, 8 * KILOBYTE)
    w = torch.ones(3, 5, requires_grad=True)
    outputs = []
    for call in range(6):
        x = torch.full((4, 5), float(call + comm.rank), requires_grad=True)
        outputs.append((x, all_gather_matmul(x, [w], comm)[0]))
    for call, (x, y) in reversed(list(enumerate(outputs))):
        dx, dw = torch.autograd.grad(y.sum(), (x, w))
        assert torch.equal(dx, torch.full((4, 5), 3.0 * comm.size))
        assert torch.equal(dw, torch.full((3, 5), sum(4.0 * (call + rank) for rank in range(comm.size))))


def check_blocks_have_versions_of_their_own() -> None:
    memory = Arena.open(dist.group.WORLD, 8 * KILOBYTE).memory
    first = memory.block(memory.rank, PAGE, (3,), torch.float32)
    second = memory.block(memory.rank, PAGE + 64, (3,), torch.float32)
    assert memory.block(memory.rank, PAGE, (3,), torch.float32) is first
    first.fill_(2.0)
    x = torch.ones(3, requires_grad=True)
    y = (x * first).sum()
    second.fill_(7.0)
    y.backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3


def check_inference_mode() -> None:
    """What was first called in inference mode is called again outside of it, and the other way round."""
    comm = hostile_communicator(dist.group.WORLD, 8 * KILOBYTE)
    x = torch.full((2, 3), float(comm.rank))
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            full = comm.all_gather(x)
            assert full[:, 0].tolist() == [rank for rank in range(comm.size) for _ in range(2)]
            assert torch.equal(comm.reduce_scatter(full), comm.size * x)
            assert torch.equal(comm.all_reduce_(full.clone()), comm.size * full)
        assert not differences(cases((7,))[0], comm)


@pytest.mark.parametrize("check", [check_autograd_across_calls, check_blocks_have_versions_of_their_own])
def test_autograd_safety(ranks: RankPool, check: Callable[[], None]) -> None:
    ranks.run(check, 2)


def test_calls_in_and_out_of_inference_mode(ranks: RankPool) -> None:
    ranks.run(check_inference_mode, 2)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("tpkernels")


def open_files() -> list[str]:
    """What this process holds open, without the sockets that gloo opens and closes in threads of its own."""
    gc.collect()
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(name for name in found if name.startswith("/"))


def check_nothing_is_left() -> None:
    """No name while it is open; no descriptor and no mapping when it is gone."""
    before = open_files(), sorted(os.listdir("/dev/shm")), mapped()
    for _ in range(3):
        comm = hostile_communicator(dist.group.WORLD, 64 * KILOBYTE)
        assert mapped() - before[2] >= comm.size
        assert not differences(cases((7,))[0], comm)
        assert sorted(os.listdir("/dev/shm")) == before[1]
        assert len(open_files()) <= len(before[0]) + comm.size, "Python keeps a descriptor a mapping, no more"
        del comm
        gc.collect()
        assert (open_files(), sorted(os.listdir("/dev/shm"))) == before[:2]
        assert mapped() == before[2], "the memory is given back"


def test_nothing_is_left(ranks: RankPool) -> None:
    ranks.run(check_nothing_is_left, 2)


def refusal(arena_bytes: int) -> str:
    before = open_files()
    with pytest.raises(MemoryRefused) as error:
        Arena.open(dist.group.WORLD, arena_bytes)
    message = str(error.value)
    del error  # its frames hold the mappings
    assert open_files() == before
    return message


def fallback(arena_bytes: int) -> str:
    """Make a communicator whose arena is refused, use it, and return what was said on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        comm = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
        assert comm.arena is None
        wrong = [differences(case, comm) for case in cases((1, 7))]
    assert not any(wrong), wrong
    return said.getvalue()


@pytest.mark.parametrize("world", [2, 3])
def test_an_arena_larger_than_the_machine(ranks: RankPool, world: int) -> None:
    messages = ranks.run(refusal, world, 1 << 50)
    assert all(message == messages[0] for message in messages)
    assert f"for each of {world} ranks does not fit" in messages[0] and "bytes are free" in messages[0]
    said, *others = ranks.run(fallback, world, 1 << 50)
    assert said.count("\n") == 1 and "uses collectives" in said and "does not fit" in said
    assert others == [""] * (world - 1), "one rank says so"


def refusal_of_unequal_sizes() -> str:
    with pytest.raises(ValueError, match=r"the same memory: got \[\d+, \d+\] bytes") as error:
        Arena.open(dist.group.WORLD, (1 + dist.get_rank()) * 64 * KILOBYTE)
    return str(error.value)


def test_sizes_that_differ_are_refused_on_every_rank(ranks: RankPool) -> None:
    messages = ranks.run(refusal_of_unequal_sizes, 2)
    assert messages[0] == messages[1] != ""


@contextlib.contextmanager
def address_space(spare_bytes: int) -> Iterator[None]:
    """Let this process map only so much more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + spare_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def refusal_where_one_rank_may_not_map() -> str:
    with address_space(32 * KILOBYTE * KILOBYTE) if dist.get_rank() == 0 else contextlib.nullcontext():
        return refusal(128 * KILOBYTE * KILOBYTE)


def test_a_limit_on_one_rank_is_a_refusal_on_every_rank(ranks: RankPool) -> None:
    messages = ranks.run(refusal_where_one_rank_may_not_map, 2)
    assert messages[0] == messages[1] and "rank 0" in messages[0]


def fallback_on_two_hosts() -> str:
    with patch("tpkernels.symmetric.memory.host_identity", lambda: 5 + (dist.get_rank() == 1)):
        return fallback(64 * KILOBYTE)


def fallback_without_libatomic() -> str:
    with (
        patch("tpkernels.symmetric.signals.stores_are_ordered", lambda: False),
        patch("ctypes.util.find_library", lambda _: None),
    ):
        return fallback(64 * KILOBYTE)


@pytest.mark.parametrize(
    ("program", "why"),
    [(fallback_on_two_hosts, "the ranks are on 2 hosts"), (fallback_without_libatomic, "libatomic")],
    ids=["two hosts", "no libatomic"],
)
def test_collectives_where_an_arena_cannot_be(ranks: RankPool, program: Callable[[], str], why: str) -> None:
    said, *others = ranks.run(program, 3)
    assert said.count("\n") == 1 and why in said and "uses collectives" in said
    assert others == ["", ""]


def check_atomic_words() -> None:
    with patch("tpkernels.symmetric.signals.stores_are_ordered", lambda: False):
        comm = hostile_communicator(dist.group.WORLD, 8 * KILOBYTE)
        assert comm.arena is not None
        wrong = [differences(case, comm) for case in cases((1, 65))]
    assert not any(wrong), wrong


@pytest.mark.skipif(ctypes.util.find_library("atomic") is None, reason="libatomic is not installed")
def test_signals_through_libatomic(ranks: RankPool) -> None:
    ranks.run(check_atomic_words, 3)


def check_two_communicators_of_one_group() -> None:
    """An operator uses the communicator it is given, whatever others its group has or had."""
    first = hostile_communicator(dist.group.WORLD, 8 * KILOBYTE)
    second = Communicator(dist.group.WORLD)
    assert first.arena is not None
    case = Case("matmul_reduce_scatter", 7)
    epoch = first.arena.epoch
    assert not differences(case, second)
    assert first.arena.epoch == epoch, "the second has no arena"
    assert not differences(case, first)
    assert first.arena.epoch > epoch, "the first has one"
    del second
    gc.collect()
    assert not differences(case, first)


def test_two_communicators_of_one_group(ranks: RankPool) -> None:
    ranks.run(check_two_communicators_of_one_group, 2)


def check_other_dtypes() -> None:
    """Bytes are bytes: of any dtype they are gathered, through the arena."""
    comm = hostile_communicator(dist.group.WORLD, 8 * KILOBYTE)
    assert comm.arena is not None
    for dtype in (torch.int16, torch.int8, torch.complex64, torch.float8_e4m3fn, torch.bool):
        epoch = comm.arena.epoch
        full = comm.all_gather(torch.full((1, 3), comm.rank, dtype=torch.float32).to(dtype))
        assert full.dtype == dtype and comm.arena.epoch > epoch
        assert torch.equal(full.to(torch.complex64), torch.tensor([[0.0], [1.0]]).expand(2, 3).to(torch.complex64))
    assert not differences(cases((7,))[0], comm)


def test_other_dtypes(ranks: RankPool) -> None:
    ranks.run(check_other_dtypes, 2)


def check_many_shapes() -> None:
    """More shapes than the memory keeps views of: lengths that change with every call."""
    with patch("tpkernels.symmetric.memory.MOST_BLOCKS", 10):
        comm = hostile_communicator(dist.group.WORLD, 8 * KILOBYTE)
        case, rank, world = Case("matmul_all_reduce", 1), comm.rank, comm.size
        assert inputs_of(case, rank, world).x.shape == (1, 7)
        wrong = [differences(Case("matmul_all_reduce", tokens), comm) for tokens in range(12)]
    assert not any(wrong), wrong


def test_many_shapes(ranks: RankPool) -> None:
    ranks.run(check_many_shapes, 2)
