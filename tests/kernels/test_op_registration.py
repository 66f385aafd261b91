"""Rungs: gloo ranks, interpreter. The operators as torch.library knows them: opcheck, fakes, torch.compile, gradcheck.

Over several ranks every rank runs the same checks in the same order: an operator runs as often on each of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.arena_ranks import hostile_communicator
from support.ranks.kernel_ranks import kernel_communicator
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from tpkernels.exchange.arena import shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.experts import Routes
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.bounded_rows import BoundedRoutes
from tpkernels.fused.experts import routes_of
from tpkernels.fused.matmul_all_reduce import matmul_all_reduce
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.ops.dropout import DropoutStream
from tpkernels.ops.experts.route import Routing
from tpkernels.ops.matmul.wgrad import wgrad_

TOKENS, DIM, WIDTH = 7, 5, 3
ops = torch.ops.tpkernels
OF_EXPERTS = (ops.dispatch, ops.dispatch_backward, ops.combine, ops.combine_backward)


def draw(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)


def expert_routes(num_tokens: int, comm: Communicator, most_tokens: int | None = None) -> Routes:
    """Two experts of twelve for each token; tokens of a rank choose alike, so that some experts have none."""
    experts = torch.tensor([[(comm.rank + 1) * 5 % 12, comm.rank]] * num_tokens, dtype=torch.int32).view(-1, 2)
    counts = torch.bincount(experts.flatten(), minlength=12).int()
    return routes_of(Routing(experts, draw(num_tokens, 2), counts, draw(0)), comm, most_tokens=most_tokens)


def expert_samples(routes: Routes, x: Tensor, comm: Communicator, grad: bool) -> list[tuple[Any, tuple[Any, ...]]]:
    """The operators of experts' rows, for routes of either kind."""
    bounded = isinstance(routes, BoundedRoutes)
    tables = (routes.segments, routes.spilled) if bounded else (routes.counts, None)
    rest = routes.offsets, *tables, routes.num_rows, routes.most_tokens if bounded else 0, comm.name
    way = routes.order, routes.places, routes.weights.requires_grad_(grad), *rest
    h = draw(routes.num_rows, DIM, grad=grad)
    found: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.dispatch, (x, *way[:2], routes.weights.detach(), *rest)),
        (ops.combine, (h, grad, *way)),
    ]
    if not grad:
        found += [
            (ops.dispatch_backward, (h, *way)),
            (ops.combine_backward, (x, draw(len(routes.order), DIM), *way)),
        ]
    return found


def samples(comm: Communicator, grad: bool) -> list[tuple[Any, tuple[Any, ...]]]:
    """Each registered operator with arguments, with and without its optional ones."""
    rows = shard_rows(TOKENS, comm.size, comm.rank)
    own, name = rows.stop - rows.start, comm.name
    x, weight = draw(own, DIM, grad=grad), draw(WIDTH, DIM, grad=grad)
    weights, biases = [weight, draw(4, DIM, grad=grad)], [draw(WIDTH, grad=grad), draw(4, grad=grad)]
    late, narrow, bias = draw(TOKENS, WIDTH, grad=grad), draw(DIM, WIDTH, grad=grad), draw(DIM, grad=grad)
    dys = [draw(TOKENS, WIDTH), draw(TOKENS, 4)]
    mask = DropoutStream(rate=0.5, seed=1, site="x", step=2, microbatch=3).numbers
    found: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.all_gather_matmul, (x, weights, biases, name, TOKENS, True)),
        (ops.all_gather_matmul, (x, [weight], [], name, TOKENS, False)),
        (ops.matmul_reduce_scatter, (late, narrow, bias, name)),
        (ops.matmul_reduce_scatter, (late, narrow, None, name)),
        (ops.matmul_all_reduce, (late, narrow, bias, name)),
        (ops.matmul_all_reduce, (late, narrow, None, name)),
        (ops.dropout, (x, *mask, rows.start, 2, 2 + DIM)),
    ]
    found += expert_samples(expert_routes(own, comm), x, comm, grad)
    if not grad:  # these are parts of a backward pass and have none of their own
        found += [
            (ops.all_gather_matmul_dgrad, (dys, weights, draw(TOKENS, DIM), name)),
            (ops.all_gather_matmul_dgrad, (dys[:1], weights[:1], None, name)),
            (ops.all_gather_matmul_dgrad_and_gather, (dys, weights, x, name, TOKENS)),
            (ops.all_gather, (x, name, TOKENS)),
            (ops.matmul_reduce_scatter_dgrad, (x, narrow, name, TOKENS, True)),
            (ops.matmul_reduce_scatter_dgrad, (x, narrow, name, TOKENS, False)),
            (ops.matmul_reduce_scatter_gather, (x, name, TOKENS)),
            (ops.wgrad_, (draw(WIDTH, DIM), draw(TOKENS, WIDTH), draw(TOKENS, DIM))),
        ]
    return found


def communicator(by_kernels: bool) -> Communicator:
    """Over an arena of the host's, or one of kernels."""
    if by_kernels:
        return kernel_communicator(dist.group.WORLD, "fused", 1 << 13)
    return hostile_communicator(dist.group.WORLD, 1 << 13)


def check_with_opcheck(grad: bool, by_kernels: bool = False, some: slice = slice(None)) -> None:
    comm = communicator(by_kernels)
    for op, arguments in samples(comm, grad)[some]:
        if by_kernels and op in (ops.dropout, ops.wgrad_, *OF_EXPERTS):  # no kernel exchanges for them
            continue
        torch.library.opcheck(op.default, arguments)


def check_bounded_with_opcheck(grad: bool) -> None:
    comm = communicator(True)
    routes = expert_routes(3, comm, most_tokens=4)  # fewer rows than fit
    assert isinstance(routes, BoundedRoutes)
    for op, arguments in expert_samples(routes, draw(3, DIM, grad=grad), comm, grad):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_where_kernels_move_rows(interpreters: RankPool, grad: bool) -> None:
    pytest.importorskip("triton")
    interpreters.run(check_bounded_with_opcheck, 2, grad)


# By default each operator that has a gradient once, those with a bias with it.
@pytest.mark.by_default("2-grad, some")
@pytest.mark.parametrize(
    ("grad", "some"),
    [(False, slice(None)), (True, slice(None)), (True, slice(0, None, 2))],
    ids=["no grad", "grad", "grad, some"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_opcheck(ranks: RankPool, world: int, grad: bool, some: slice) -> None:
    ranks.run(check_with_opcheck, world, grad, False, some)


# By default one operator: the test above has all, on the host's arena.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("grad", "some"),
    [
        pytest.param(True, slice(3, 4), id="grad, some"),
        pytest.param(True, slice(None), marks=pytest.mark.slow, id="grad"),
        pytest.param(False, slice(None), marks=pytest.mark.slow, id="no grad"),
    ],
)
def test_opcheck_where_kernels_exchange(interpreters: RankPool, grad: bool, some: slice) -> None:
    pytest.importorskip("triton")
    interpreters.run(check_with_opcheck, 2, grad, True, some)


def test_every_registered_operator_is_checked() -> None:
    listed = {op.default.name() for op, _ in samples(Communicator(None), grad=False)}
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tpkernels::")}
    missing = {
        name
        for name in registered
        if name.split("::")[1].startswith(("all_", "matmul_", "wgrad", "dropout", "dispatch", "combine"))
    } - listed
    # Of one rank: in test_matmul.py and ops/experts.
    missing -= {"tpkernels::matmul_swiglu", "tpkernels::combine_rows", "tpkernels::combine_rows_backward"}
    assert not missing and len(listed) == 14


def check_fake_shapes(by_kernels: bool = False) -> None:
    """Fake tensors have the shapes, dtypes and strides of the real ones, on every rank, and exchange nothing."""
    comm = communicator(by_kernels)
    arena = comm.device_arena if by_kernels else comm.arena
    assert arena is not None
    for op, arguments in samples(comm, grad=False):
        real = op.default(*arguments)
        epoch = int(arena.epoch)
        mode = FakeTensorMode()

        def faked(value: Any, mode: FakeTensorMode = mode) -> Any:
            if isinstance(value, list):
                return [faked(item) for item in value]
            return mode.from_tensor(value) if isinstance(value, Tensor) else value

        with mode:
            fake = op.default(*map(faked, arguments))
        assert int(arena.epoch) == epoch
        for a, b in zip(*(([y] if isinstance(y, Tensor) or y is None else y) for y in (real, fake)), strict=True):
            assert (a is None and b is None) or (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), op


@pytest.mark.parametrize("world", [3, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4))])
def test_fake_tensors_on_uneven_shards(ranks: RankPool, world: int) -> None:
    ranks.run(check_fake_shapes, world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_fake_tensors_where_kernels_exchange(interpreters: RankPool, world: int) -> None:
    pytest.importorskip("triton")
    interpreters.run(check_fake_shapes, world, True)


def layer(x: Tensor, up: Tensor, down: Tensor, comm: Communicator) -> Tensor:
    """A small feed-forward block: column-parallel, relu, row-parallel."""
    (hidden,) = all_gather_matmul(x, [up], comm, num_tokens=TOKENS)
    return matmul_reduce_scatter(torch.relu(hidden), down, comm)


def check_compiled(backend: str) -> None:
    comm = hostile_communicator(dist.group.WORLD, 1 << 13)
    rows = shard_rows(TOKENS, comm.size, comm.rank)
    leaves = [draw(rows.stop - rows.start, DIM, grad=True), draw(WIDTH, DIM, grad=True), draw(DIM, WIDTH, grad=True)]
    want = layer(*leaves, comm)
    wants = [want, *torch.autograd.grad(want.square().sum(), leaves)]
    # A rank whose shard has another length compiles for itself: the graph of each holds its own sizes.
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    for _ in range(2):
        got = compiled(*leaves, comm)
        gots = [got, *torch.autograd.grad(got.square().sum(), leaves)]
        for a, b in zip(gots, wants, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6) and a.shape == b.shape
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_as_eager(ranks: RankPool, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    ranks.run(check_compiled, 2, backend)


ALONE = Communicator(None)
PUBLIC: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": lambda x, w, v, b, c: all_gather_matmul(x, [w, v], ALONE, biases=[b, c], return_gathered=True),
    "all_gather_matmul, gathered again": lambda x, w, v, b, c: all_gather_matmul(
        x, [w, v], ALONE, biases=[b, c], keep_gathered=False
    ),
    "matmul_reduce_scatter": lambda x, w, v, b, c: matmul_reduce_scatter(x, w, ALONE, bias=b),
    "matmul_all_reduce": lambda x, w, v, b, c: matmul_all_reduce(x, w, ALONE, bias=b),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_gradcheck(name: str) -> None:
    shapes = ((TOKENS, DIM), (WIDTH, DIM), (4, DIM), (WIDTH,), (4,))
    leaves = [draw(*shape, grad=True, dtype=torch.float64) for shape in shapes]
    used = leaves if name.startswith("all_gather") else [leaves[0], leaves[1], leaves[3]]

    def call(*inputs: Tensor) -> Any:
        return PUBLIC[name](*inputs) if len(inputs) == 5 else PUBLIC[name](*inputs[:2], None, inputs[2], None)

    assert torch.autograd.gradcheck(call, used)


def test_wgrad_in_a_compiled_function() -> None:
    def step(buffer: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        return wgrad_(buffer, dy * 2, x) + 1

    dy, x = draw(TOKENS, WIDTH), draw(TOKENS, DIM)
    buffers = [torch.ones(WIDTH, DIM), torch.ones(WIDTH, DIM)]
    want = step(buffers[0], dy, x)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(buffers[1], dy, x)
    assert torch.equal(got, want) and torch.equal(buffers[0], buffers[1])
