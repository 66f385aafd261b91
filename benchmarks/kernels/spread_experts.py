"""`python -m benchmarks.run moe_exchange`: what the exchange of experts' rows costs a layer, and a hot rank.

N ranks on this host, one thread each, share the experts of a layer, forward and backward; each has T/N tokens. Timed in
turns, each the slowest rank's:

    layer     the whole layer
    alone     the same layer as if every rank had all rows at hand: its exchanges do what a layer on one rank does in
              their place (take rows by expert, weigh gradients), and return what they returned in the layer
    products  the products of the experts alone

    exchange share = 1 - alone / layer
    bound          = (alone - products, even) + share * (products, even)      share: hottest_share of work_experts.py
    over the bound = layer, skewed / bound

No exchange can be faster than that bound, since all wait for the rank whose experts get most. What the even run has
beside its products does not grow with the share. Zipf's probabilities fall with the expert's number, so that the first
rank is the hot one: the worst case of these probabilities.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.experts import Routes
from tpkernels.ops.experts.rows import combine_backward, combine_forward, take_backward, take_forward
from tpkernels.work_experts import hottest_share

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import Comparison, Spread, compare, paired_ratios, spread_fields
from benchmarks.kernels.drawn_experts import ExpertsSizes, Routing, details_of, drawn
from tpengine.architectures.describe import Experts
from tpengine.config import ModelConfig
from tpengine.distributed.local_ranks import THREADS_PER_RANK, run_ranks
from tpengine.distributed.mesh import SUM_ARENA_BYTES
from tpengine.layers import spread_experts
from tpengine.layers.spread_experts import SpreadExperts
from tpengine.model.parts import FastParts

_LAYER, _ALONE, _PRODUCTS = "layer", "alone", "products"
_ROUTINGS: tuple[Routing, ...] = ("uniform", "zipf")
# What the layer calls to exchange something, by its name in the layer's module.
_EXCHANGES = ("exchange_counts", "rows_to_experts", "rows_to_sums", "combine_gradients")


@dataclass(frozen=True)
class Options(ExpertsSizes):
    """Sizes of the layer and of a micro-batch, and the ranks that share them."""

    ranks: int = 2
    """N, which divides tokens and experts."""


def main(options: Options) -> int:
    """Measure even and skewed routing; return 1 if a check was red."""
    options.check()
    if options.ranks < 2 or options.tokens % options.ranks or options.experts % options.ranks:
        raise ValueError(
            f"2 or more ranks divide tokens and experts: ranks {options.ranks}, tokens {options.tokens}, experts "
            f"{options.experts}: use the defaults"
        )
    rows: list[dict[str, Any]] = run_ranks(options.ranks, "benchmarks.kernels.spread_experts:measure", options)
    table = Table("case", "hottest rank", "layer ms", "alone ms", "exchange share", "over the bound", box=None)
    for row in rows:
        found = row.get("layer_median_seconds")
        table.add_row(
            row["case"],
            f"{row['hottest_rank_ratio']:.2f}",
            *([row["check"]] if found is None else [f"{found * 1e3:.1f}", f"{row['alone_median_seconds'] * 1e3:.1f}"]),
            *(f"{row[name]:.3f}" for name in ("exchange_share_median_ratio", "over_bound_median_ratio") if name in row),
        )
    Console(width=max(Console().width, 100)).print(table)
    return stored(rows, options.out)


def measure(options: Options) -> list[dict[str, Any]]:
    """Measure on this rank; collective. Returns the rows, equal on all ranks."""
    layers = {routing: _Layer(options, routing) for routing in _ROUTINGS}
    comparison = compare(
        {f"{routing}/{name}": call for routing, layer in layers.items() for name, call in layer.calls().items()},
        check={routing: layer.check for routing, layer in layers.items()},
        rounds=options.rounds,
    )
    sizes = {"ranks": options.ranks, **options.sizes()}
    rows = []
    for routing, layer in layers.items():
        fields = {**sizes, "routing": routing, "hottest_rank_ratio": layer.share, "check": comparison.check}
        if comparison.passed:
            for name in layer.calls():
                fields |= spread_fields(name, "seconds", comparison.seconds(f"{routing}/{name}"))
            fields |= _ratios(comparison, routing, layer.share) | {"num_samples": options.rounds}
        rows.append(make_row(f"moe_exchange/{routing}", threads_per_rank=THREADS_PER_RANK, fields=fields))
    return rows


def _ratios(comparison: Comparison, routing: Routing, share: float) -> dict[str, float]:
    """Return the exchange's share of the layer's time, and that time over the bound of the hottest rank, by round."""

    def samples(routing: Routing, name: str) -> Sequence[float]:
        return comparison.samples[f"{routing}/{name}"]

    layer, alone = samples(routing, _LAYER), samples(routing, _ALONE)
    shares = Spread.of([1 - ratio for ratio in paired_ratios(alone, layer)])
    even = zip(samples("uniform", _ALONE), samples("uniform", _PRODUCTS), strict=True)
    bounds = [alone + (share - 1) * products for alone, products in even]
    over = Spread.of(paired_ratios(layer, bounds))
    return spread_fields("exchange_share", "ratio", shares) | spread_fields("over_bound", "ratio", over)


class _Layer:
    """The layer on this rank, and its calls.

    Attributes:
        share: rows of the hottest rank over the mean.
    """

    def __init__(self, options: Options, routing: Routing) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        x, dy, weights = drawn(options, routing, falling=True)
        own = slice(rank * options.tokens // world, (rank + 1) * options.tokens // world)
        self.x, self.dy = x.detach()[own].clone().requires_grad_(), dy[own]
        comm = Communicator(dist.group.WORLD, arena_bytes=SUM_ARENA_BYTES)
        model = ModelConfig(hidden_size=options.hidden, num_heads=1, num_kv_heads=1, details=details_of(options))
        # Alone in tp: each rank has tokens of its own, as replicas that share experts have.
        parts = FastParts(model, Communicator(None), experts_comm=comm, dtype=torch.float32)
        layer = parts.layer(Experts.of(model))
        assert isinstance(layer, SpreadExperts)
        self.layer, self._comm = layer, comm
        held = slice(rank * options.experts // world, (rank + 1) * options.experts // world)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(weights[name] if name == "gate.weight" else weights[name][held])
        self.parameters: list[Parameter] = list(layer.parameters())
        # What the exchanges returned, in the order of their calls.
        with _recorded() as self._returned:
            self._results = self.whole()
        routes = self._returned[0]
        self._rows, self._offsets = self._returned[1].detach().requires_grad_(), routes.offsets
        self.share = hottest_share(routes.counts.sum(0).tolist(), world)

    def calls(self) -> dict[str, Callable[[], list[Tensor]]]:
        """Return what is timed, by name."""
        return {_LAYER: self.whole, _ALONE: self.alone, _PRODUCTS: self.products}

    def whole(self) -> list[Tensor]:
        """Return y, dx and the gradients of the weights."""
        y = self.layer(self.x)
        return [y, *torch.autograd.grad(y, [self.x, *self.parameters], self.dy)]

    def alone(self) -> list[Tensor]:
        """Return the same, without exchanging anything."""
        with _replayed(self._returned):
            return self.whole()

    def products(self) -> list[Tensor]:
        """Compute the experts' products alone, forward and backward."""
        ys = self.layer.networks(self._rows, self._offsets)
        return list(torch.autograd.grad(ys, [self._rows, *self.layer.networks.parameters()], ys.detach()))

    def check(self) -> None:
        """Raise unless the layer repeats its bits, and has those without the exchange."""
        for got in (self.whole(), self.alone()):
            for ours, before in zip(got, self._results, strict=True):
                assert torch.equal(ours, before), "the layer does not repeat its bits"


@contextlib.contextmanager
def _recorded() -> Iterator[list[Any]]:
    """Let the layer's exchanges note what they return."""
    returned: list[Any] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            returned.append(call(*args, **options))
            return returned[-1]

        return noted

    with _instead({name: noting(getattr(spread_experts, name)) for name in _EXCHANGES}):
        yield returned


@contextlib.contextmanager
def _replayed(returned: list[Any]) -> Iterator[None]:
    """Let the layer's exchanges do a single rank's work in their place, and return what they returned before."""
    coming = iter(returned)
    # The sums in forward, behind counts and rows, return the experts' rows for this rank's tokens too.
    _, ys = returned[2]

    def taken(x: Tensor, routes: Routes, _: Communicator) -> Any:
        take_forward(x, routes.order, routes.num_choices)
        return next(coming)

    def summed(_: Tensor, routes: Routes, *__: Any, weighted: bool, **___: Any) -> Any:
        if weighted:
            combine_forward(ys, routes.places, routes.weights)
        else:
            take_backward(ys, routes.places, routes.num_choices)
        return next(coming)

    def weighed(dy: Tensor, ys: Tensor, routes: Routes, *_: Any, **__: Any) -> Any:
        combine_backward(dy, ys, routes.order, routes.places, routes.weights)
        return next(coming)

    calls: dict[str, Callable[..., Any]] = {
        "rows_to_experts": taken,
        "rows_to_sums": summed,
        "combine_gradients": weighed,
    }
    with _instead({"exchange_counts": lambda *_: next(coming), **calls}):
        yield


@contextlib.contextmanager
def _instead(calls: dict[str, Callable[..., Any]]) -> Iterator[None]:
    before = {name: getattr(spread_experts, name) for name in calls}
    for name, call in calls.items():
        setattr(spread_experts, name, call)
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(spread_experts, name, call)
