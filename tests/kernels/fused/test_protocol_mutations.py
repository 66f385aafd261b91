"""Rung: interpreter, several processes. What is taken out of the fused operators' kernels is noticed.

Programs of a launch are interpreted one by one, and below also in turns (support/kernels/turns.py).

Only a wrong result, calls that differ, or ranks of which none can go on are a verdict. What is taken out shows when one
rank, or its copy engine, is slower than the others; so rank 0 is kept back at that place until nothing that it has done
so far lets anybody else go on (standstill.py). No sleep decides. Calls run forward alone: who waits for a copy engine
outside a kernel would not poll.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.ranks.kernel_ranks import kernel_communicator
from support.ranks.rank_pool import RankPool
from support.ranks.standstill import Standstill
from tpkernels.exchange.arena import CallMismatch
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.fused.scatter import scatter_and_gather
from tpkernels.symmetric.signals import PeerError

pytest.importorskip("triton")

ARENA_BYTES = 1 << 15
# Several tiles of what is interpreted: of a scatter each is a split, whose flag goes up behind its tiles, one for each
# 16 rows.
COLUMNS, NUM_SPLITS, ROWS = 40, 3, 20


def skipped(*_: Any, **__: Any) -> Any:
    return 0


def early(control: Any, peer: Any, num_tiles: Any, split: Any) -> bool:
    """Say that all tiles are done when the first is."""
    from tpkernels.symmetric import signals_kernel

    signals_kernel.count_done(control, peer, num_tiles, split)
    return True


class Counts:
    """Stands for `_count`, of a rank whose first interpreted program draws all tiles.

    Args:
        counted: says of the nth of so many calls in a launch which tiles for peers are counted, by their numbers.
    """

    def __init__(self, counted: Callable[[int, int], Sequence[int]]) -> None:
        self._counted, self._calls = counted, 0

    def __call__(self, control: Any, owner: Any, split: Any, num_tiles: Any, epoch: Any, call: Any) -> None:
        from tpkernels.symmetric import signals_kernel

        world, rank = dist.get_world_size(), dist.get_rank()
        tiles_per_owner = NUM_SPLITS * int(num_tiles)
        total = (world - 1) * tiles_per_owner
        for tile in self._counted(self._calls % total, total):
            peer = owner - owner + (rank + 1 + tile // tiles_per_owner) % world
            of_tile = split - split + tile % tiles_per_owner // int(num_tiles)
            if signals_kernel.count_done(control, peer, num_tiles, of_tile):
                line = signals_kernel.arrived_line(owner - owner + rank, of_tile)
                signals_kernel.notify(control, peer, line, epoch, call)
        self._calls += 1


def first_split(source: Any, split: Any) -> Any:
    """The line of another split than is asked for."""
    from tpkernels.symmetric import signals_kernel

    return signals_kernel.arrived_line(source, split - split)


def without_the_second(control: Any) -> Any:
    """Draw a number, but lose the second one."""
    from tpkernels.symmetric import signals_kernel

    number = signals_kernel.claim(control)
    return signals_kernel.claim(control) if int(number) == 1 else number


def without_meeting(control: Any, epoch: Any, generation: Any, next_meets: Any = False) -> None:
    """End a launch, but do not have the next call meet."""
    from tpkernels.symmetric import signals_kernel

    signals_kernel.end_launch(control, epoch, generation)


def arena_of(comm: Communicator) -> DeviceArena:
    assert comm.device_arena is not None
    return comm.device_arena


def first_wrong_gather(comm: Communicator) -> str:
    """Three gathers, each of other numbers: x_r[2, 3] holds number + r, the matrix ones."""
    for number in (1.0, 5.0, 9.0):
        (y,) = all_gather_matmul(torch.full((2, 3), number + comm.rank), [torch.ones(COLUMNS, 3)], comm)
        rows = torch.arange(comm.size).repeat_interleave(2)[:, None]
        if not torch.equal(y, (3 * (number + rows)).expand(-1, COLUMNS)):
            return f"rank {comm.rank}: the products of {number} are {y.tolist()}"
    return ""


def first_wrong_sum(comm: Communicator) -> str:
    """Three sums in a row in one generation of the arena, as a replayed CUDA graph of one call makes them."""
    for number in (1.0, 2.0, 3.0):
        arena_of(comm).generation = 0  # `begin` takes the other
        # [T, F/tp] @ [D, F/tp]^T, summed over the ranks
        y = matmul_reduce_scatter(torch.full((ROWS * comm.size, 3), number), torch.ones(COLUMNS, 3), comm)
        if not torch.equal(y, torch.full((ROWS, COLUMNS), 3 * number * comm.size)):
            return f"rank {comm.rank}: sums of {number} are {y.tolist()}"
    return ""


def first_wrong_beside(comm: Communicator) -> str:
    """Scatters before and beside a gather, and a gather of the same generation after both."""
    rows = torch.arange(comm.size).repeat_interleave(2)[:, None]
    for number in (1.0, 5.0, 9.0):
        wide, ones = torch.full((2 * comm.size, 3), number), torch.ones(3, COLUMNS)
        total = torch.full((2, COLUMNS), 3 * number * comm.size)
        before = matmul_reduce_scatter(wide, ones.T, comm)
        shard = torch.full((2, 3), number + comm.rank)
        beside, gathered = scatter_and_gather([(10 * wide, ones)], shard, comm, len(wide), "all_gather_matmul")
        (after,) = all_gather_matmul(100 * shard, [torch.ones(COLUMNS, 3)], comm)
        each = (number + rows).expand(-1, 3)
        for what, got, expected in (
            ("the sums before", before, total),
            ("the sums beside", beside, 10 * total),
            ("what is gathered", gathered, each),
            ("the products after", after, 300 * (number + rows).expand(-1, COLUMNS)),
        ):
            if not torch.equal(got, expected):
                return f"rank {comm.rank}: {what} of {number} are {got.tolist()}"
    return ""


class Mutation(NamedTuple):
    """What is taken out of the kernels.

    Attributes:
        place: the module of tpkernels and the function in it.
        other: what stands there instead.
        late: the function, of a module, before which rank 0 is kept back.
        check: what the ranks run.
        strategy: how they exchange.
        until: what it is kept back for.
    """

    place: tuple[str, str]
    other: Callable[..., Any]
    late: tuple[str, str]
    check: Callable[[Communicator], str]
    strategy: str = "fused"
    until: Callable[[Standstill], None] = Standstill.until_others_wait


MUTATIONS = {
    "tiles do not wait for the copy": Mutation(
        ("fused.kernels.gather_kernel", "wait_for_epoch"),
        skipped,
        late=("exchange.copies", "has_published"),
        check=first_wrong_gather,
        until=Standstill.until_own_kernel_waits,
    ),
    "programs that fetch do not wait": Mutation(
        ("fused.kernels.gather_kernel", "wait"),
        skipped,
        late=("fused.gather", "launch_publish"),
        check=first_wrong_gather,
        strategy="fetch",
    ),
    "tiles do not wait for what is pushed": Mutation(
        ("fused.kernels.gather_kernel", "wait"),
        skipped,
        late=("fused.gather", "launch_gather_matmul"),
        check=first_wrong_gather,
        strategy="push",
    ),
    "sums do not wait": Mutation(
        ("fused.kernels.scatter_kernel", "wait"),
        skipped,
        late=("fused.scatter", "launch_matmul_scatter"),
        check=first_wrong_sum,
    ),
    "nobody is told of partial sums": Mutation(
        ("fused.kernels.scatter_kernel", "notify"),
        skipped,
        late=("fused.kernels.scatter_kernel", "claim"),
        check=first_wrong_sum,
    ),
    "partial sums are announced early": Mutation(
        ("fused.kernels.scatter_kernel", "count_done"),
        early,
        late=("fused.kernels.scatter_kernel", "claim"),
        check=first_wrong_sum,
    ),
    "tiles before a program's last are not counted": Mutation(
        ("fused.kernels.scatter_kernel", "_count"),
        Counts(lambda nth, total: [nth] if nth == total - 1 else []),
        late=("fused.kernels.scatter_kernel", "claim"),
        check=first_wrong_sum,
    ),
    "a program's last tile is not counted": Mutation(
        ("fused.kernels.scatter_kernel", "_count"),
        Counts(lambda nth, total: [nth] if nth < total - 1 else []),
        late=("fused.kernels.scatter_kernel", "claim"),
        check=first_wrong_sum,
    ),
    "tiles are counted before they are stored": Mutation(
        ("fused.kernels.scatter_kernel", "_count"),
        Counts(lambda nth, total: range(nth + (nth > 0), min(nth + 2, total))),
        late=("fused.kernels.scatter_kernel", "finish"),
        check=first_wrong_sum,
    ),
    "a tile that was drawn is lost": Mutation(
        ("fused.kernels.scatter_kernel", "claim"),
        without_the_second,
        late=("fused.kernels.scatter_kernel", "finish"),
        check=first_wrong_sum,
    ),
    "a tile waits for another split": Mutation(
        ("fused.kernels.scatter_kernel", "arrived_line"),
        first_split,
        late=("fused.kernels.scatter_kernel", "notify"),
        check=first_wrong_sum,
    ),
    "a scatter beside a gather does not wait until the generation is free": Mutation(
        ("fused.kernels.scatter_kernel", "wait_for_epoch"),
        skipped,
        late=("fused.kernels.scatter_kernel", "add_own"),
        check=first_wrong_beside,
    ),
    "the call after a gather beside a scatter does not meet": Mutation(
        ("fused.kernels.scatter_kernel", "end_launch"),
        without_meeting,
        late=("exchange.copies", "has_published"),
        check=first_wrong_beside,
    ),
    "the copy engine does not wait": Mutation(
        ("exchange.copies", "has_published"),
        lambda *_: True,
        late=("fused.gather", "launch_publish"),
        check=first_wrong_gather,
    ),
    "calls of one generation do not meet": Mutation(
        ("symmetric.signals_kernel", "barrier"),
        skipped,
        late=("fused.kernels.scatter_kernel", "add_own"),
        check=first_wrong_sum,
    ),
}


# One, with its control; each further one takes as long again.
BY_DEFAULT = ("calls of one generation do not meet",)


def module_of(place: tuple[str, str]) -> Any:
    return importlib.import_module(f"tpkernels.{place[0]}")


def noticed(name: str, is_control: bool) -> str:
    """What this rank notices of a mutation: a wrong result, calls that differ, or that no rank can go on.

    Nothing else is a verdict: it leaves this function. A control has the late rank, and nothing taken out.
    """
    mutation, said = MUTATIONS[name], ""
    comm = kernel_communicator(dist.group.WORLD, mutation.strategy, ARENA_BYTES)
    arena = arena_of(comm)
    with pytest.MonkeyPatch.context() as patch, Standstill(arena, dist.group.WORLD) as standstill:
        if not is_control:
            patch.setattr(module_of(mutation.place), mutation.place[1], mutation.other)
        if comm.rank == 0:
            wait = functools.partial(mutation.until, standstill)
            module, function = module_of(mutation.late), mutation.late[1]
            patch.setattr(module, function, kept_back(wait, getattr(module, function)))
        try:
            said = mutation.check(comm)
        except (PeerError, CallMismatch) as error:
            said = f"{type(error).__name__}: {error}"
        if said:
            with contextlib.suppress(PeerError, CallMismatch):
                arena.leave()
    dist.barrier()
    return said


def kept_back(wait: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any, **kwargs: Any) -> Any:
        wait()
        return function(*args, **kwargs)

    return late


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in MUTATIONS]
)
def test_nothing_is_noticed_where_nothing_is_taken_out(interpreters: RankPool, name: str) -> None:
    assert interpreters.run(noticed, 3, name, True) == [""] * 3


@pytest.mark.parametrize(
    "names", [BY_DEFAULT, pytest.param(tuple(MUTATIONS), marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_mutations_of_the_kernels_protocol(
    interpreters: RankPool, count_mutations: CountMutations, names: tuple[str, ...]
) -> None:
    unnoticed = [name for name in names if not any(interpreters.run(noticed, 3, name, False))]
    count_mutations("the kernels' protocol (fused operators)", len(names) - len(unnoticed), len(names))
    assert not unnoticed


class InTurns(NamedTuple):
    """What is changed in the scatter's sources, where the programs of a launch take turns.

    Attributes:
        changes: what stands there, once, and what replaces it.
        late: whether rank 0 is kept back before each flag that it raises.
    """

    changes: tuple[tuple[str, str], ...]
    late: bool = False


_COUNTING = """        if uncounted >= 0:
            _count(p_control, uncounted, uncounted_split, uncounted_tiles, epoch, call)
"""
IN_TURNS = {
    "own tiles come first": InTurns(
        (("(rank + 1 + max(item, 0) // tiles_per_owner)", "(rank + max(item, 0) // tiles_per_owner)"),)
    ),
    "a tile is counted behind the sum of the next": InTurns(
        (
            (_COUNTING + "        next_item", "        next_item"),
            ("        uncounted = tl.where(", _COUNTING + "        uncounted = tl.where("),
        )
    ),
    "a program waits for the first split alone": InTurns((("if split != heard:", "if heard < 0:"),), late=True),
    "splits share a counter": InTurns(
        (("count_done(p_control, owner, num_tiles, split)", "count_done(p_control, owner, num_tiles)"),)
    ),
}


def noticed_in_turns(name: str, seed: int, directory: str) -> str:
    """What this rank notices of a change, or of none, where programs take turns."""
    from support.kernels.compiled import CACHE_VARIABLE, modules_of
    from support.kernels.turns import Turns
    from tpkernels.fused import scatter
    from tpkernels.fused.kernels import scatter_kernel

    changed = IN_TURNS.get(name, InTurns(()))
    comm, said = kernel_communicator(dist.group.WORLD, "fused", ARENA_BYTES, seed), ""
    arena = arena_of(comm)
    with pytest.MonkeyPatch.context() as patch, Standstill(arena, dist.group.WORLD) as standstill:
        module: Any = scatter_kernel
        if changed.changes:
            source = Path(scatter_kernel.__file__).read_text()
            for old, new in changed.changes:
                assert source.count(old) == 1, f"not once in the source: {old}"
                source = source.replace(old, new)
            patch.setenv(CACHE_VARIABLE, directory)
            module = modules_of({"scatter_kernel": source})["scatter_kernel"]
            patch.setattr(scatter, "launch_matmul_scatter", module.launch_matmul_scatter)
        if changed.late and comm.rank == 0:
            patch.setattr(module, "notify", kept_back(standstill.until_others_wait, module.notify))
        with Turns(10 * seed + comm.rank, standstill).of(module):
            try:
                said = first_wrong_sum(comm)
            except (PeerError, CallMismatch) as error:
                said = f"{type(error).__name__}: {error}"
        if said:
            with contextlib.suppress(PeerError, CallMismatch):
                arena.leave()
    dist.barrier()
    return said


def said_of_a_peer_that_gave_up(directory: str, is_told: bool) -> str:
    """What a scatter of rank 0 raises if rank 1 gives up between two of its programs, and raises its flag all the same.

    The first program has an own tile. It is kept back before its wait until the second, which draws the last number,
    has ended the launch, and rank 1 has raised its flag. So nobody polls while the group is poisoned.
    """
    from support.kernels.turns import Turns
    from tpkernels.fused.kernels import scatter_kernel
    from tpkernels.symmetric import signals_kernel

    comm, said = kernel_communicator(dist.group.WORLD, "fused", ARENA_BYTES), ""
    arena = arena_of(comm)
    ended, raised = Path(directory, "ended"), Path(directory, "raised")
    module: Any = scatter_kernel
    wait, notify = module.wait, module.notify

    def late_wait(*args: Any) -> None:
        turns.until_others_end()
        ended.touch()
        until_there(raised)
        wait(*args)

    def give_up_and_notify(control: Any, peer: Any, line: Any, epoch: Any, call: Any) -> None:
        until_there(ended)
        signals_kernel.give_up(control, signals_kernel._TIMED_OUT, peer, line, epoch, epoch - 1, call)
        notify(control, peer, line, epoch, call)
        raised.touch()

    with pytest.MonkeyPatch.context() as patch, Standstill(arena, dist.group.WORLD) as standstill:
        turns = Turns(0, standstill, share=0.0)
        with turns.of(module) if comm.rank == 0 else contextlib.nullcontext():
            patch.setattr(module, *(("wait", late_wait) if comm.rank == 0 else ("notify", give_up_and_notify)))
            if not is_told:
                patch.setattr(module, "report", skipped)
            try:
                # A tile for each rank.
                matmul_reduce_scatter(torch.ones(2 * comm.size, 3), torch.ones(16, 3), comm)
            except PeerError as error:
                said = f"{type(error).__name__}: {error}"
    dist.barrier()
    return said


def until_there(path: Path) -> None:
    while not path.exists():
        time.sleep(1e-3)


def test_a_program_that_waited_tells_its_host_of_poison(
    interpreters: RankPool, count_mutations: CountMutations, tmp_path: Path
) -> None:
    """Also if the launch has been ended before."""
    for name in ("told", "not told"):
        (tmp_path / name).mkdir()
    told, _ = interpreters.run(said_of_a_peer_that_gave_up, 2, str(tmp_path / "told"), True)
    assert "rank 1 waited in matmul_reduce_scatter" in told
    not_told, _ = interpreters.run(said_of_a_peer_that_gave_up, 2, str(tmp_path / "not told"), False)
    count_mutations("the kernels' protocol (programs in turns)", int(not_told == ""), 1)
    assert not_told == ""


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 23), marks=pytest.mark.slow)], ids=["3", "23"])
def test_programs_may_take_turns_in_any_order(
    interpreters: RankPool, world: int, seeds: Sequence[int], tmp_path: Path
) -> None:
    """No order of a launch's programs is wrong, or one in which ranks wait for each other for ever."""
    for seed in seeds:
        assert interpreters.run(noticed_in_turns, world, "", seed, str(tmp_path)) == [""] * world, seed


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [tuple(IN_TURNS)[:2], pytest.param(tuple(IN_TURNS), marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_mutations_of_programs_in_turns(
    interpreters: RankPool, count_mutations: CountMutations, names: tuple[str, ...], tmp_path: Path
) -> None:
    def is_noticed(name: str) -> bool:
        return any(any(interpreters.run(noticed_in_turns, 2, name, seed, str(tmp_path))) for seed in range(10))

    unnoticed = [name for name in names if not is_noticed(name)]
    count_mutations("the kernels' protocol (programs in turns)", len(names) - len(unnoticed), len(names))
    assert not unnoticed
