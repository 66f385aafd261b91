"""Rung: interpreter, several processes; GPU. Experts' rows moved by kernels, against all-to-all: equal bits.

Ranks interpret the kernels that a GPU compiles, on memory that they share, or share a GPU. Arenas are hostile
(kernel_ranks.py), and what nobody has written is NaN: torch's empty tensors, and the arena. Rows must not be written
behind a buffer's end: buffers are a part of larger ones. What is taken out of the kernels must be noticed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.kernels.compiled import CACHE_VARIABLE, modules_of
from support.kernels.precision import unwritten_is_nan
from support.kernels.routing_cases import ROUTINGS, drawn_experts
from support.ranks.gpu_ranks import Run, hostile, needs_gpu, rungs, settle
from support.ranks.rank_pool import RankPool
from support.ranks.standstill import Standstill
from torch import Tensor
from tpkernels.exchange.arena import CallMismatch
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.experts import Routes
from tpkernels.fused import bounded_rows
from tpkernels.fused.bounded_rows import BoundedRoutes
from tpkernels.fused.experts import combine, dispatch, routes_of
from tpkernels.fused.kernels import counts_kernel, rows_kernel
from tpkernels.ops.experts.grouped import grouped_matmul
from tpkernels.ops.experts.route import Routing
from tpkernels.symmetric.signals import PeerError
from tpkernels.work_experts import expert_rows_arena_bytes

pytest.importorskip("triton")

ROOMY, TINY = 1 << 18, 1 << 13


class Drawn(NamedTuple):
    """One rank's tokens, their routing, all experts' matrices [E, D, D], and the gradient of y."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    matrices: Tensor
    dy: Tensor

    def to(self, device: str) -> Drawn:
        return Drawn(*(t.to(device) for t in self))


def drawn(
    routing: str, rank: int, tokens: int, num_experts: int, k: int, columns: int, dtype: torch.dtype = torch.float32
) -> Drawn:
    generator = torch.Generator().manual_seed(100 * rank + tokens)

    def draw(*shape: int, at: torch.Generator = generator) -> Tensor:
        return torch.randn(shape, generator=at, dtype=torch.float64).to(dtype)

    experts = drawn_experts(routing, tokens, num_experts, k, seed=rank)
    matrices = draw(num_experts, columns, columns, at=torch.Generator().manual_seed(5))
    return Drawn(draw(tokens, columns), experts, draw(tokens, k).float(), matrices, draw(tokens, columns))


def routes_for(mine: Drawn, comm: Communicator, weights: Tensor, bounds: tuple[int | None, int | None]) -> Routes:
    counts = torch.bincount(mine.experts.flatten(), minlength=len(mine.matrices)).int()
    routing = Routing(mine.experts, weights, counts, torch.empty(0))
    return routes_of(routing, comm, most_tokens=bounds[0], rows_bound=bounds[1])


def results(
    mine: Drawn, comm: Communicator, most_tokens: int | None, rows_bound: int | None = None
) -> tuple[dict[str, Tensor], Routes]:
    """What this rank gets, and its routes: rows as far as they are an expert's, y, all gradients, and what follows."""
    x, weights, matrices = (leaf.detach().requires_grad_() for leaf in (mine.x, mine.weights, mine.matrices))
    own = slice(comm.rank * len(matrices) // comm.size, (comm.rank + 1) * len(matrices) // comm.size)
    with unwritten_is_nan():
        routes = routes_for(mine, comm, weights, (most_tokens, rows_bound))
        rows = dispatch(x, routes, comm)
        h = grouped_matmul(rows, matrices[own], routes.offsets, fixed=True)
        y = combine(h, routes, comm)
        dx, dweights, dmatrices, dh = torch.autograd.grad(y, (x, weights, matrices, h), mine.dy)
    end = int(routes.offsets[-1])
    found = {"offsets": routes.offsets, "rows": rows[:end], "y": y, "dh": dh[:end]}
    found |= {"dx": dx, "dweights": dweights, "dmatrices": dmatrices, "tail": torch.cat((rows[end:], dh[end:]))}
    return {name: t.detach().cpu() for name, t in found.items()}, routes


def differences(got: dict[str, Tensor], want: dict[str, Tensor], same: Callable[[Tensor, Tensor], bool]) -> list[str]:
    """The results that are not the same, and "tail" if anything but zeros follows the rows."""
    wrong = [name for name in want if name != "tail" and not same(got[name], want[name])]
    return [*wrong, "tail"] if got["tail"].isnan().any() or got["tail"].any() else wrong


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class Case(NamedTuple):
    """Tokens by rank, and how they are routed.

    Attributes:
        share: of the worst case that fits at an owner.
    """

    routing: str
    tokens: tuple[int, ...]
    num_experts: int = 8
    k: int = 3
    columns: int = 20
    dtype: torch.dtype = torch.float32
    share: float = 1.0

    @property
    def bound(self) -> int:
        return int(self.share * len(self.tokens) * max(self.tokens) * self.k)

    def everyone(self) -> list[Drawn]:
        sizes = self.num_experts, self.k, self.columns, self.dtype
        return [drawn(self.routing, rank, tokens, *sizes) for rank, tokens in enumerate(self.tokens)]


def kept(everyone: list[Drawn], bound: int) -> tuple[list[Tensor], list[int]]:
    """Which choices of every rank fit at their expert's owner, bool [t, k] by rank; and what is spilled by owner."""
    world, num_experts = len(everyone), len(everyone[0].matrices)
    fits = [torch.zeros(each.experts.shape, dtype=torch.bool) for each in everyone]
    places = [0] * world
    for expert, (source, each) in itertools.product(range(num_experts), enumerate(everyone)):
        owner = expert * world // num_experts
        for token, choice in (each.experts == expert).nonzero().tolist():
            fits[source][token, choice] = places[owner] < bound
            places[owner] += 1
    return fits, [max(place - bound, 0) for place in places]


def wanted(case: Case, device: str) -> tuple[Drawn, dict[str, Tensor], list[int]]:
    """This rank's inputs, what all-to-all makes of the choices that fit, and how many rows do not, by owner."""
    exact = Communicator(dist.group.WORLD)
    everyone = case.everyone()
    fits, spilled = kept(everyone, case.bound)
    mine = everyone[exact.rank].to(device)
    fit = fits[exact.rank].to(device)
    want, routes = results(mine._replace(weights=torch.where(fit, mine.weights, 0.0)), exact, None)
    assert not isinstance(routes, BoundedRoutes)
    end = min(int(want["offsets"][-1]), case.bound)
    want |= {"offsets": want["offsets"].clamp(max=case.bound), "rows": want["rows"][:end], "dh": want["dh"][:end]}
    want["dweights"] = torch.where(fit.cpu(), want["dweights"], 0.0)
    return mine, want, spilled


@contextlib.contextmanager
def guarded() -> Iterator[list[str]]:
    """Make buffers of rows a part of larger ones, and list what has been written behind their end."""
    launch, written = vars(bounded_rows)["launch_take"], []

    def launch_guarded(rows: Tensor, *rest: Any) -> None:
        larger = rows.new_full((2 * len(rows) + 50, rows.shape[1]), float("nan"))
        launch(larger[: len(rows)], *rest)
        rows.copy_(larger[: len(rows)])
        if not larger[len(rows) :].isnan().all():
            written.append("rows behind the buffer's end are written")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_rows, "launch_take", launch_guarded)
        yield written


def hostile_of(device: str, arena_bytes: int, seed: int = 0) -> Communicator:
    """A communicator whose arena holds NaN at first."""
    comm = hostile(device, "fused", arena_bytes, seed)
    arena = comm.device_arena
    assert arena is not None
    for generation in range(2):
        arena.block(arena.rank, generation, (arena.generation_bytes,), torch.uint8).fill_(0xFF)
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return comm


def wrong_results(
    comm: Communicator, case: Case, mine: Drawn, want: dict[str, Tensor], spilled: list[int]
) -> list[str]:
    """Where kernels differ from all-to-all: in bits if everything fits, else in values (a sum may end with -0)."""
    with guarded() as written:
        got, routes = results(mine, comm, max(case.tokens), None if case.share == 1 else case.bound)
    settle(comm)
    assert isinstance(routes, BoundedRoutes)
    wrong = differences(got, want, torch.equal if any(spilled) else same_bits) + written
    return [*wrong, f"spilled {routes.spilled.tolist()}"] if routes.spilled.tolist() != spilled else wrong


def check_cases(device: str, arena_bytes: int, cases: Sequence[Case], seed: int = 0) -> None:
    """All calls one after another, without a barrier between them."""
    comm = hostile_of(device, arena_bytes, seed)
    for case in cases:
        wrong = wrong_results(comm, case, *wanted(case, device))
        assert not wrong, (case, wrong)


TWO, FOUR = (5, 7), (6, 0, 9, 1)
EVERY = [
    *(Case(routing, tokens) for routing in ROUTINGS for tokens in (TWO, FOUR)),
    *(Case("uniform", tokens) for tokens in ((1, 0), (0, 0), (0, 1, 0, 0), (33, 40))),
    Case("one expert", (1, 1), num_experts=2, k=1, columns=3),
    Case("zipf", TWO, num_experts=128, k=8, columns=33),
    Case("zipf", (3, 1, 4, 1), num_experts=12, k=5, columns=130, dtype=torch.bfloat16),
    Case("uniform", (20, 9), columns=64, dtype=torch.float16),
]
SPILLING = [
    *(Case(routing, tokens, share=0.4) for routing in ("zipf", "one expert") for tokens in (TWO, FOUR)),
    Case("alternating", (20, 33), columns=64, dtype=torch.bfloat16, share=0.3),
    Case("uniform", TWO, share=0.0),
]


def of_world(cases: Sequence[Case], world: int) -> list[Case]:
    return [case for case in cases if len(case.tokens) == world]


@rungs("world, cases", (2, [EVERY[0], SPILLING[0]]), *((w, of_world(EVERY + SPILLING, w)) for w in (2, 4)))
def test_equal_bits_with_all_to_all(run: Run, device: str, world: int, cases: Sequence[Case]) -> None:
    run(device, world, check_cases, ROOMY, cases)


def check_arena_of_one_piece() -> None:
    """What work_experts.py says that an arena needs suffices, and a page less does not."""
    case = Case("one expert", (16, 16), k=2, columns=512)
    enough = expert_rows_arena_bytes(16, 2, 512, 4)
    for num_bytes, calls in ((enough, 5), (enough - (1 << 13), 7)):
        comm = hostile_of("cpu", num_bytes)
        arena = comm.device_arena
        assert arena is not None
        before = int(arena.epoch)
        assert not wrong_results(comm, case, *wanted(case, "cpu"))
        # The counts, and each way there and back.
        assert int(arena.epoch) - before == calls


@pytest.mark.slow
def test_an_arena_of_the_said_size_moves_all_columns_at_once(interpreters: RankPool) -> None:
    interpreters.run(check_arena_of_one_piece, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_routing_as_interpreted(interpreters: RankPool, world: int) -> None:
    interpreters.run(check_cases, world, "cpu", ROOMY, of_world(EVERY + SPILLING, world))


@pytest.mark.by_default("cuda-2", "cuda-4")
@rungs("world", (2,), (2,), (4,))
def test_what_is_larger_than_the_arena_moves_in_pieces(run: Run, device: str, world: int) -> None:
    tokens = TWO if world == 2 else FOUR
    run(
        device,
        world,
        check_cases,
        TINY,
        [Case("zipf", tokens, columns=150), Case("zipf", tokens, columns=150, share=0.4)],
    )


def check_with_a_late_rank(late: int, cases: Sequence[Case]) -> list[str]:
    """What differs where one rank draws every item only when no other can go on."""
    comm, wrong = hostile_of("cpu", ROOMY), []
    arena = comm.device_arena
    assert arena is not None
    for case in cases:
        found = wanted(case, "cpu")
        with pytest.MonkeyPatch.context() as patch, Standstill(arena, dist.group.WORLD) as standstill:
            if comm.rank == late:
                for module in (counts_kernel, rows_kernel):
                    patch.setattr(module, "claim", kept_back(standstill.until_others_wait, module.claim))
            wrong += wrong_results(comm, case, *found)
        dist.barrier()
    return wrong


def kept_back(wait: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any, **kwargs: Any) -> Any:
        wait()
        return function(*args, **kwargs)

    return late


@pytest.mark.slow
@pytest.mark.parametrize(("world", "late"), [(w, late) for w in (2, 4) for late in range(w)])
def test_equal_bits_whoever_is_late(interpreters: RankPool, world: int, late: int) -> None:
    cases = of_world([Case("zipf", TWO), Case("uniform", FOUR), *SPILLING[:2]], world)
    assert interpreters.run(check_with_a_late_rank, world, late, cases) == [[]] * world


class Mutation(NamedTuple):
    """What is changed in the source of a kernel.

    Attributes:
        module: whose it is, of fused.kernels.
        old, new: what stands there once, and what replaces it.
    """

    module: str
    old: str
    new: str


_TAKES, _TELLS = "rows_kernel", "counts_kernel"
_WAIT = "wait(p_control, source, {}_line(source{}), epoch, call)\n"
MUTATIONS = {
    "rows behind the last are left as they were": Mutation(
        _TAKES, "mask=(o_row < bound)[:, None] & m_column", "mask=m_row[:, None] & m_column"
    ),
    "what does not fit is not counted": Mutation(_TELLS, "tl.maximum(total - bound, 0)", "0"),
    "the rest of a block is written behind the end": Mutation(
        _TAKES, "mask=(o_row < bound)[:, None] & m_column", "mask=m_column"
    ),
    "what did not fit is not zeros": Mutation(_TAKES, "tl.where(spilled > 0, tl.cdiv(num_sorted, BLOCK_ROWS), 0)", "0"),
    "a segment's rows in another order": Mutation(
        _TAKES,
        "sorted_row = tl.load(p_firsts + segment) + o_row - begin_row",
        "p_num = p_places - num_experts * WORLD + segment\n            "
        "sorted_row = tl.load(p_firsts + segment) + tl.load(p_num) - 1 - o_row + begin_row",
    ),
    "rows of the rank that comes next first": Mutation(
        _TAKES,
        "memory_of(p_control, segment % WORLD)\n            p_pair",
        "memory_of(p_control, (segment + 1) % WORLD)\n            p_pair",
    ),
    "rows are taken before they are published": Mutation(
        _TAKES,
        "                    " + _WAIT.format("published", "") + "                has_heard",
        "                    pass\n                has_heard",
    ),
    "a launch ends before rows have come": Mutation(_TAKES, _WAIT.format("arrived", ", 0"), "pass\n"),
    "rows are announced behind the first item": Mutation(
        _TAKES, "count_done(p_control, rank, num_sent)", "count_done(p_control, rank, 1)"
    ),
    "nobody is told of counts": Mutation(
        _TELLS, "notify(p_control, peer, arrived_line(rank, 0), epoch, call)\n", "pass\n"
    ),
    "nobody is told of tokens": Mutation(
        _TAKES, "notify(p_control, (rank + i) % WORLD, published_line(rank), epoch, call)\n", "pass\n"
    ),
}
BY_DEFAULT = ("rows behind the last are left as they were", "what does not fit is not counted")


def noticed(name: str, directory: str) -> list[str]:
    """What this rank notices of a change, or of none: wrong results, or that no rank can go on. Rank 0 is late."""
    comm, said = hostile_of("cpu", ROOMY), []
    arena = comm.device_arena
    assert arena is not None
    # Several blocks of rows on every rank.
    cases = [Case("zipf", (20, 33)), Case("zipf", (20, 33), share=0.4)]
    found = [wanted(case, "cpu") for case in cases]
    with pytest.MonkeyPatch.context() as patch, Standstill(arena, dist.group.WORLD) as standstill:
        modules: dict[str, Any] = {_TAKES: rows_kernel, _TELLS: counts_kernel}
        if name:
            mutation = MUTATIONS[name]
            source = Path(str(modules[mutation.module].__file__)).read_text()
            assert source.count(mutation.old) == 1, f"not once in the source: {mutation.old}"
            patch.setenv(CACHE_VARIABLE, directory)
            changed = modules_of({mutation.module: source.replace(mutation.old, mutation.new)})[mutation.module]
            modules[mutation.module] = changed
            for launcher in ("launch_take", "launch_return", "launch_counts"):
                if hasattr(changed, launcher):
                    patch.setattr(bounded_rows, launcher, getattr(changed, launcher))
        if comm.rank == 0:
            for module in modules.values():
                patch.setattr(module, "claim", kept_back(standstill.until_others_wait, module.claim))
        try:
            for case, inputs in zip(cases, found, strict=True):
                said += wrong_results(comm, case, *inputs)
        except (PeerError, CallMismatch, IndexError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if said:
            with contextlib.suppress(PeerError, CallMismatch):
                arena.leave()
    dist.barrier()
    return said


@pytest.mark.slow
def test_nothing_is_noticed_where_nothing_is_changed(interpreters: RankPool, tmp_path: Path) -> None:
    assert interpreters.run(noticed, 2, "", str(tmp_path)) == [[], []]


@pytest.mark.parametrize(
    "names", [BY_DEFAULT[:1], pytest.param(tuple(MUTATIONS), marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_changes_of_the_kernels_are_noticed(
    interpreters: RankPool, count_mutations: CountMutations, names: tuple[str, ...], tmp_path: Path
) -> None:
    unnoticed = [name for name in names if not any(interpreters.run(noticed, 2, name, str(tmp_path)))]
    count_mutations("experts' rows by kernels", len(names) - len(unnoticed), len(names))
    assert not unnoticed


def check_refusals() -> None:
    comm = hostile_of("cpu", ROOMY)
    arena = comm.device_arena
    assert arena is not None
    mine = Case("uniform", (4, 4)).everyone()[comm.rank]
    late = comm.size - 1

    def fails(call: Callable[[], object], message: str, *, alone: bool) -> None:
        """On all ranks, or on the last alone, whom the others then miss."""
        if alone and comm.rank != late:
            with pytest.raises(CallMismatch, match="rank 1 refused its own"):
                call()
                arena.check_all()
        else:
            with pytest.raises(ValueError, match=message):
                call()
        dist.barrier()
        arena.reset(dist.group.WORLD)

    def routes(most_tokens: int = 4, rows_bound: int | None = None, experts: int = 8) -> Routes:
        less = mine._replace(experts=mine.experts % experts, matrices=mine.matrices[:experts])
        return routes_for(less, comm, mine.weights, (most_tokens, rows_bound))

    fails(lambda: routes(experts=7), "7 experts do not divide by 2 ranks: use 1 ranks", alone=False)
    fails(lambda: routes(rows_bound=-1), "with most_tokens 4 and rows_bound -1", alone=False)
    fails(lambda: routes(4 if comm.rank != late else 3), "got 4 x 3 with most_tokens 3", alone=True)
    found = routes()
    fails(lambda: dispatch(mine.x[: 3 if comm.rank == late else 4], found, comm), "4 rows of floating", alone=True)
    with pytest.raises(ValueError, match=r"by kernels moves float16, bfloat16 and float32: got torch\.float64"):
        dispatch(mine.x.double(), found, comm)
    with pytest.raises(ValueError, match=r"need an arena of kernels on cpu, and group .* has none"):
        routes_for(mine, Communicator(dist.group.WORLD), mine.weights, (4, None))
    with pytest.raises(CallMismatch, match=r"calls routes_of of 2. x 8 int32 from row 0, which pushes, for 3 choices"):
        routes(rows_bound=20 + comm.rank)
        arena.check_all()
    dist.barrier()
    small = hostile_of("cpu", 1 << 13)
    many = Case("uniform", (3000, 3000), columns=3).everyone()[comm.rank]
    made = routes_for(many, small, many.weights, (3000, None))
    with pytest.raises(ValueError, match="a column of all rows must fit into the arena: dispatch has"):
        dispatch(many.x, made, small)


@pytest.mark.slow
def test_what_cannot_be_exchanged_is_refused(interpreters: RankPool) -> None:
    interpreters.run(check_refusals, 2)


def check_host_goes_on(device: str) -> None:
    """Nothing in a layer waits for the device: rank 0 has made all its calls before any other begins."""
    comm = Communicator(dist.group.WORLD, arena_bytes=ROOMY, device=torch.device(device))
    case = Case("zipf", (20, 33), columns=64)
    mine, want, spilled = wanted(case, device)
    own = slice(comm.rank * 4, comm.rank * 4 + 4)
    # At first memory is allocated and kernels are loaded, for which a device may stop.
    for ahead in (False, True):
        if ahead and comm.rank:
            dist.barrier()
        torch.cuda.set_sync_debug_mode("error" if ahead else "default")
        x = mine.x.detach().requires_grad_()
        counts = torch.zeros(8, dtype=torch.int32, device=device).scatter_add_(
            0, mine.experts.flatten().long(), torch.ones_like(mine.experts.flatten())
        )
        routing = Routing(mine.experts, mine.weights, counts, counts)
        routes = routes_of(routing, comm, most_tokens=33)
        h = grouped_matmul(dispatch(x, routes, comm), mine.matrices[own], routes.offsets, fixed=True)
        y = combine(h, routes, comm)
        (dx,) = torch.autograd.grad(y, x, mine.dy)
        torch.cuda.set_sync_debug_mode("default")
        if ahead and not comm.rank:
            dist.barrier()
        settle(comm)
        dist.barrier()
    assert same_bits(y.detach().cpu(), want["y"]) and same_bits(dx.cpu(), want["dx"])
    assert isinstance(routes, BoundedRoutes) and routes.spilled.tolist() == spilled


@needs_gpu
def test_the_host_goes_on(run: Run) -> None:
    run("cuda", 2, check_host_goes_on)
