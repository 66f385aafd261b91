"""A machine as the planner sees it: what one rank computes, reads and sends in a second, and what it holds."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from types import MappingProxyType
from typing import NamedTuple

from tpkernels.work import Work, matmul_work

from tpengine.planner.costs import Channels
from tpengine.planner.machine.measured import Curve, Measured

# Tiles of libraries' matmuls, and their rates beside the largest one's. A smaller tile reads more from shared memory
# per operation: 1/height + 1/width elements. The shares are assumed, none is measured.
_TILES = MappingProxyType(
    {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.93, (256, 64): 0.88, (128, 64): 0.8, (64, 64): 0.6}
)
_LARGEST_TILE = 256 * 128
# Into how many parts the inner dim may be cut, so that few tiles occupy all processors.
_PARTS = (1, 2, 4, 8)
# Until the first operands of a tile have come from memory, and until its results have gone: a latency of half a
# microsecond each.
_TILE_S = 1e-6


@dataclass(frozen=True)
class Link:
    """What connects ranks: those of one node, or those of several.

    Attributes:
        bytes_per_s: from one rank to one other, each direction, of long messages.
        latency_s: until a message's first byte has arrived, or of one step of a ring.
        ring_bytes_per_s: bus bandwidth of a ring of many bytes: what each rank sends per second.
        measured: bus bandwidth by bytes of the whole tensor, by number of ranks; of a number between two measured ones
            the next larger. It includes latencies. Without an entry a ring takes its steps' latencies and its bytes
            over `ring_bytes_per_s`.
        fused: bytes per second by bytes of the whole tensor, by number of ranks: what a fused matmul takes longer than
            the same matmul without its exchange. Without an entry an exchange takes `exchange_seconds`, and hides.
    """

    bytes_per_s: float
    latency_s: float
    ring_bytes_per_s: float
    measured: Mapping[int, Curve] = field(default_factory=dict)
    fused: Mapping[int, Curve] = field(default_factory=dict)

    def limited(self, bytes_per_s: float) -> Link:
        """Return the link as ranks find it that have processors for so many bytes per second."""
        measured = {
            num_ranks: Curve(tuple((size, min(rate, bytes_per_s)) for size, rate in curve.points))
            for num_ranks, curve in self.measured.items()
        }
        slower = {name: min(getattr(self, name), bytes_per_s) for name in ("bytes_per_s", "ring_bytes_per_s")}
        return replace(self, measured=measured, **slower)

    def message_seconds(self, num_bytes: float) -> float:
        """Return how long one message takes."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def exchange_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return how long ranks take that copy their shares straight to each other, as fused matmuls do.

        Args:
            num_bytes: of the whole tensor.
            num_ranks: n.
        """
        if num_ranks == 1 or not num_bytes:
            return 0.0
        return (num_ranks - 1) * (num_bytes / num_ranks / self.bytes_per_s + self.latency_s)

    def gather_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return how long an all-gather or a reduce-scatter takes; zero for one rank.

            (n-1)/n * bytes / bandwidth + (n-1) * latency          n-1 steps, each with 1/n of the bytes

        Args:
            num_bytes: of the whole tensor.
            num_ranks: n.
        """
        if num_ranks == 1 or not num_bytes:
            return 0.0
        sent = (num_ranks - 1) / num_ranks * num_bytes
        curve = _of_ranks(self.measured, num_ranks)
        if curve is not None:
            return sent / curve.at(num_bytes)
        return sent / self.ring_bytes_per_s + (num_ranks - 1) * self.latency_s

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return how long an all-reduce takes: a reduce-scatter, then an all-gather."""
        return 2 * self.gather_seconds(num_bytes, num_ranks)

    def fused_seconds(self, num_bytes: float, num_ranks: int) -> float | None:
        """Return what a fused matmul takes longer than without its exchange; None if it was not measured."""
        curve = _of_ranks(self.fused, num_ranks)
        return None if curve is None or num_ranks == 1 else num_bytes / curve.at(num_bytes)


def _of_ranks(curves: Mapping[int, Curve], num_ranks: int) -> Curve | None:
    known = [measured for measured in sorted(curves) if measured >= num_ranks]
    return curves[known[0]] if known else None


class _Product(NamedTuple):
    """Matmuls [rows, inner] @ [inner, columns] of elements of so many bytes, in one kernel."""

    rows: int
    columns: int
    inner: int
    item_bytes: int
    batch: int


# A search asks for the same products thousands of times.
@functools.lru_cache(maxsize=1 << 16)
def _tiled_seconds(
    product: _Product,
    num_processors: int,
    flops_per_s: float,
    bytes_per_s: float,
    written_per_s: float,
    *,
    hides_tiles: bool,
) -> float:
    """Return the time of a product by its tiles, of the size that is fastest.

    Args:
        product: its sizes.
        num_processors: that compute a tile at a time each.
        flops_per_s: of one processor, within the largest tiles.
        bytes_per_s, written_per_s: of all: at which sums in parts are read and written, and results are written.
        hides_tiles: a processor computes a tile while it writes the one before.
    """
    rows, columns, inner, item_bytes, batch = product
    seconds = []
    for (height, width), share in _TILES.items():
        tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
        # All processors write at the same time. Of small tiles a processor has two, which take turns.
        written = height * width * item_bytes * num_processors / written_per_s
        hidden = 1.0 if hides_tiles else 0.0 if height * width == _LARGEST_TILE else 0.5
        for parts in _PARTS:
            rounds = math.ceil(tiles * parts / num_processors)
            inside = 2 * height * width * math.ceil(inner / parts) / (flops_per_s * share)
            # Parts of a sum are written in float32, and read to be added.
            added = (parts > 1) * 2 * parts * 4 * batch * rows * columns / bytes_per_s
            seconds.append(rounds * (inside + _TILE_S + written * (1 - hidden)) + added)
    return min(seconds)


@dataclass(frozen=True)
class Machine:
    """Rates of one rank (a GPU, or a CPU core), and the links of all.

    Peaks are a data sheet's; curves say which share of them is attained. So a machine of which only the data sheet is
    known differs from a measured one by its curves alone.

    Attributes:
        name: as the user writes it.
        source: where the numbers come from, in words.
        is_asynchronous: kernels run behind the host (a GPU); else the host's time is added to theirs.
        flops_per_s: peak of matmuls by dtype.
        matmul, attention: shares of that peak by the floating-point operations of one call.
        attention_gradient: of the share that attention attains with as many operations, what its gradient does.
        memory_bytes_per_s: peak, read and written.
        memory: share of that peak by the bytes of one call.
        kernel_s: what each operator takes besides: launch, first and last wave.
        host_s_per_operator, host_s_per_action: the host's time to start an operator, and an action of the plan.
        ranks_per_node: how many ranks `within` connects; ranks of several nodes are connected by `between`, of which
            each rank has its own, and which all ranks of a node may use at once.
        within, between: links.
        memory_bytes: of one rank; 0 where that is not limited.
        num_nodes: nodes that there are; 0 where that is not said.
        num_processors: that compute a matmul's tiles; 0 where `matmul` says all.
        tile_share: of the peak, that processors attain within the largest tiles.
        hides_tiles: a processor computes a tile while it writes the one before.
        measured: what the engine's own operators attain, by dtype; what is there takes the place of the shares. What
            they read comes from memory.
        cached: the same where it comes from caches; nothing where that was not measured.
        cold_share: of what memory costs more than caches, the share that is left, by the bytes that a rank touches
            between two uses of a tensor.
        chip_spread: standard deviation of what chips of this kind take for the same products, as a share.
        reduce_share: of a gather or a reduction over replicas, what the rank cannot compute meanwhile: 1 where one core
            does both.
        nccl_bytes_per_s_per_processor: what one processor moves for NCCL, where few are all that a group may have
            (distributed/nccl_limits.py); 0 where that limits nothing.
        recorded: what the actions of a recorded run took, over what these rates say, by their kind (plan.Kind, as
            text); 1 where it is not said.
    """

    name: str
    source: str
    is_asynchronous: bool
    flops_per_s: Mapping[str, float]
    matmul: Curve
    attention: Curve
    memory_bytes_per_s: float
    memory: Curve
    kernel_s: float
    host_s_per_operator: float
    host_s_per_action: float
    ranks_per_node: int
    within: Link
    between: Link
    memory_bytes: int = 0
    num_nodes: int = 0
    num_processors: int = 0
    tile_share: float = 1.0
    hides_tiles: bool = False
    measured: Mapping[str, Measured] = field(default_factory=dict)
    cached: Mapping[str, Measured] = field(default_factory=dict)
    cold_share: Curve = field(default_factory=lambda: Curve.flat(1.0))
    chip_spread: float = 0.0
    attention_gradient: float = 1.0
    reduce_share: float = 0.0
    nccl_bytes_per_s_per_processor: float = 0.0
    recorded: Mapping[str, float] = field(default_factory=dict)

    @property
    def channels(self) -> Channels:
        """Return which messages of a pipeline run one after another: on GPUs NCCL carries them, by direction."""
        return Channels.DIRECTION if self.is_asynchronous else Channels.PAIR

    def touching(self, num_bytes: float) -> Machine:
        """Return the machine as a rank finds it that touches so many bytes between two uses of a tensor.

        The less there are, the more of them are still in its caches. Rates that are known from memory alone stay.
        """
        if not self.cached:
            return self
        share = self.cold_share.at(num_bytes)
        measured = {
            dtype: of.partly(self.cached[dtype], share) if dtype in self.cached else of
            for dtype, of in self.measured.items()
        }
        return replace(self, measured=measured, cached={})

    def at_best(self) -> Machine:
        """Return the machine on which it does not matter whether weights are converted for products, for bounds."""
        return replace(self, measured={dtype: of.at_best() for dtype, of in self.measured.items()})

    def slowest_of(self, num_ranks: int) -> Machine:
        """Return the machine at the pace of the slowest of so many chips, for which all others wait in each step.

        Chips of one kind hold different clocks within the same power. What the slowest of n normally distributed times
        is expected to be is the quantile (n - 3/8) / (n + 1/4) (Blom, 1958). What memory limits is as fast on all.
        """
        if not self.chip_spread:
            return self
        slower = 1.0 + self.chip_spread * NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
        flops_per_s = {dtype: rate / slower for dtype, rate in self.flops_per_s.items()}
        measured, cached = (
            {dtype: of.slower(slower) for dtype, of in rates.items()} for rates in (self.measured, self.cached)
        )
        return replace(self, flops_per_s=flops_per_s, measured=measured, cached=cached, chip_spread=0.0)

    def matmul_seconds(self, work: Work, dtype: str) -> float:
        """Return the time of a matmul: of its operations or of its bytes, whichever is longer."""
        return self._longer(work, self.peak(dtype) * self.matmul.at(max(1, work.flops)))

    def product_seconds(
        self, rows: int, columns: int, inner: int, item_bytes: int, dtype: str, *, batch: int = 1, kind: str = ""
    ) -> float:
        """Return the time of matmuls [rows, inner] @ [inner, columns], one kernel, by their tiles where they are known.

        Each processor computes a tile at a time, in rounds; the last round takes as long as the others. Of several
        sizes of tiles the fastest is taken, as a library's heuristics do.

        Args:
            rows, columns, inner: sizes.
            item_bytes, dtype: of the elements.
            batch: number of products.
            kind: which product of a layer it is (measured.PRODUCTS), for machines that have measured them.
        """
        one = matmul_work(rows, columns, inner, item_bytes)
        known = self.measured[dtype].flops_per_s(kind, rows, columns * inner) if dtype in self.measured else None
        work = Work(batch * one.flops, batch * one.memory_bytes)
        if known is not None:
            # A matrix is read for few rows as for many.
            is_read = not self.measured[dtype].reaches(kind, rows)
            return max(work.flops / known, self._memory_seconds(work) if is_read else 0.0)
        if not self.num_processors:
            return self.matmul_seconds(work, dtype)
        rate = self.peak(dtype) * self.tile_share / self.num_processors
        bandwidth = self._bandwidth(work)
        product = _Product(rows, columns, inner, item_bytes, batch)
        tiled = _tiled_seconds(
            product, self.num_processors, rate, bandwidth, self.memory_bytes_per_s, hides_tiles=self.hides_tiles
        )
        return max(tiled, work.memory_bytes / bandwidth) + self.kernel_s

    def attention_seconds(self, work: Work, dtype: str, *, seq: int = 0, name: str = "") -> float:
        """Return the time of attention, forward or backward.

        Args:
            work, dtype: as said.
            seq, name: length of a sequence, for machines that have measured it; attention or attention_backward.
        """
        known = self._curve(dtype, name)
        if known is not None:
            return work.flops / known.at(seq)
        times = self.attention_gradient if name == "attention_backward" else 1.0
        return self._longer(work, self.peak(dtype) * (times * self.attention.at(max(1, work.flops))))

    def other_seconds(self, work: Work, dtype: str, name: str = "") -> float:
        """Return the time of an operator that reads and writes more than it computes; `name`: measured.OPERATORS."""
        known = self._curve(dtype, name)
        if known is not None:
            return work.memory_bytes / known.at(max(1, work.memory_bytes))
        return self._longer(work, self.peak(dtype))

    def peak(self, dtype: str) -> float:
        """Return the operations per second of a dtype.

        Raises:
            ValueError: the machine does not say it.
        """
        if dtype not in self.flops_per_s:
            known = ", ".join(self.flops_per_s)
            raise ValueError(
                f"a machine must have a rate for the run's dtype: {self.name} has {known}: got {dtype}: use "
                f"--dtype {next(iter(self.flops_per_s))}, or add the rate to the machine's file"
            )
        return self.flops_per_s[dtype]

    def fits_a_node(self, num_ranks: int, stride: int) -> bool:
        """Return whether one node can hold `num_ranks` ranks whose numbers are `stride` apart."""
        return (num_ranks - 1) * stride < self.ranks_per_node

    def link(self, num_ranks: int, stride: int, firsts: range = range(1)) -> Link:
        """Return what connects `num_ranks` ranks whose numbers are `stride` apart.

        If they are on several nodes, the node's members of such a group share its way out: with g of them on a node, a
        ring has g ranks' links to the next node. A group that one node could hold may lie on two, with one on one.

        Args:
            num_ranks, stride: as said.
            firsts: the first ranks of all such groups, of which the slowest counts.
        """
        if self.fits_a_node(num_ranks, stride):
            distance = (num_ranks - 1) * stride
            nodes = ((first // self.ranks_per_node, (first + distance) // self.ranks_per_node) for first in firsts)
            return self.within if all(one == other for one, other in nodes) else self.between
        members = max(1, self.ranks_per_node // stride)
        if members == 1:
            return self.between
        ring = min(self.within.ring_bytes_per_s, members * self.between.ring_bytes_per_s)
        # One of the steps past a node's members leads out of it.
        latency = self.within.latency_s + max(0.0, self.between.latency_s - self.within.latency_s) / members
        return replace(self.between, ring_bytes_per_s=ring, latency_s=latency)

    def by_processors(self, link: Link, processors: int) -> Link:
        """Return a link as a group finds it for which NCCL may take so many processors; 0 for as many as it wants."""
        limit = processors * self.nccl_bytes_per_s_per_processor
        return link.limited(limit) if limit else link

    def _curve(self, dtype: str, name: str) -> Curve | None:
        return self.measured[dtype].operators.get(name) if dtype in self.measured else None

    def _longer(self, work: Work, flops_per_s: float) -> float:
        return max(work.flops / flops_per_s, self._memory_seconds(work)) + self.kernel_s

    def _memory_seconds(self, work: Work) -> float:
        return work.memory_bytes / self._bandwidth(work)

    def _bandwidth(self, work: Work) -> float:
        return self.memory_bytes_per_s * self.memory.at(max(1, work.memory_bytes))
