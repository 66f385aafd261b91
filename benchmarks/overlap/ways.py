"""The ways in which co-located ranks compute products with gathers and scatters, for co_located.py.

    kernel           all operands present, nothing sent: our matmul kernel, with as many programs as a rank's part of
                     the processors holds
    own              the fused kernels, all operands present: the gathering one does not wait; the scattering one stores
                     into the slots, which are neither waited for nor added
    fused            the operator
    push             the operator, with shards pushed by the kernel; if few tokens are gathered

A scattered product's own rows go through no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tpkernels.exchange.arena import shard_rows
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.fused.configs import exchange_config
from tpkernels.fused.gather import finish_gather, gather_by_kernels, start_gather
from tpkernels.fused.kernels.gather_kernel import launch_gather_matmul
from tpkernels.fused.kernels.scatter_kernel import launch_matmul_scatter
from tpkernels.fused.scatter import scatter_by_kernels
from tpkernels.fused.strategy import decide
from tpkernels.launch import cdiv, target_of

from benchmarks.overlap.ranks import VirtualRanks, matmul_on

PUSH = "push"
# With more tokens the strategy never pushes.
MOST_PUSHED_TOKENS = 1024

Product = Callable[[Tensor, Tensor], Tensor]
# One tensor per rank.
Each = Sequence[Tensor]


class Rows:
    """What is gathered: each rank's shard, and all rows in each rank's memory for ways that send nothing."""

    def __init__(self, full: Each) -> None:
        self.full = full
        num_tokens, world = full[0].shape[0], len(full)
        self.shards = [x[shard_rows(num_tokens, world, rank)].clone() for rank, x in enumerate(full)]

    def refresh(self) -> None:
        """Set the shards from `full`, which is the same on all ranks."""
        for rank, (shard, full) in enumerate(zip(self.shards, self.full, strict=True)):
            full.copy_(self.full[0])
            shard.copy_(full[shard_rows(len(full), len(self.full), rank)])


class Way:
    """A way to compute: this one has all operands present and sends nothing; subclasses that send override `exchanges`.

    Args:
        ranks: the ranks that compute.
        product: multiplies two matrices.

    Attributes:
        exchanges: whether scattered products are summed over the ranks; else a rank's product of all rows is returned,
            one block for each owner.
    """

    exchanges = False

    def __init__(self, ranks: VirtualRanks, product: Product) -> None:
        self.ranks, self.product = ranks, product

    def gather(self, rows: Rows, matrices: Each, operation: str, keep: bool) -> tuple[list[Tensor], Each | None]:
        """Return each rank's products of all rows, and the gathered rows if they are kept."""
        return self.ranks.each(lambda rank: self.product(rows.full[rank], matrices[rank])), rows.full

    def scatter(self, lefts: Each, matrices: Each, operation: str) -> list[Tensor]:
        """Return each rank's rows of the summed products, or the blocks of the products."""
        return self._blocks(self.ranks.each(lambda rank: self.product(lefts[rank], matrices[rank])))

    def scatter_and_gather(self, lefts: Each, matrices: Each, rows: Rows, operation: str) -> tuple[list[Tensor], Each]:
        """Do `scatter`, and gather other rows."""
        return self.scatter(lefts, matrices, operation), rows.full

    def wgrad(self, buffers: Each, slopes: Each, rows: Each) -> None:
        """Accumulate each rank's weight gradient: with the same kernel in every way."""
        self.ranks.each(lambda rank: matmul_on(self.ranks.processors, slopes[rank].T, rows[rank], buffers[rank]))

    def _blocks(self, products: Each) -> list[Tensor]:
        world = self.ranks.world
        return [y[shard_rows(len(y), world, owner)] for y in products for owner in range(world)]


class Reference(Way):
    """The right results: sums in float32, rounded as the kernels round: partial results before they are summed.

    Args:
        exchanges: as `Way.exchanges`.
    """

    def __init__(self, ranks: VirtualRanks, exchanges: bool) -> None:
        super().__init__(ranks, lambda a, b: (a.float() @ b.float()).to(a.dtype))
        self.exchanges = exchanges

    def scatter(self, lefts: Each, matrices: Each, operation: str) -> list[Tensor]:
        if not self.exchanges:
            return super().scatter(lefts, matrices, operation)
        total = torch.zeros(len(lefts[0]), matrices[0].shape[1], device=lefts[0].device)
        for left, matrix in zip(lefts, matrices, strict=True):
            total += self.product(left, matrix)
        world = self.ranks.world
        return [total[shard_rows(len(total), world, owner)].to(lefts[0].dtype) for owner in range(world)]

    def wgrad(self, buffers: Each, slopes: Each, rows: Each) -> None:
        for buffer, dy, x in zip(buffers, slopes, rows, strict=True):
            buffer += dy.T.float() @ x.float()


class Own(Way):
    """The fused kernels, with all data present.

    Args:
        arenas: by rank. Slots are written without waiting: between two calls every rank must have ended.
    """

    def __init__(self, ranks: VirtualRanks, arenas: Sequence[DeviceArena]) -> None:
        super().__init__(ranks, torch.mm)
        self._arenas = arenas

    def gather(self, rows: Rows, matrices: Each, operation: str, keep: bool) -> tuple[list[Tensor], Each | None]:
        def multiply(rank: int) -> Tensor:
            x, full, matrix, arena = rows.shards[rank], rows.full[rank], matrices[rank], self._arenas[rank]
            num_tokens, depth = full.shape
            most = cdiv(num_tokens, arena.world)
            y = x.new_empty(num_tokens, matrix.shape[1])
            # Rows under one flag, whole tiles; flags are not read here.
            columns, target = matrix.shape[1], target_of(x)
            config = exchange_config(most, columns, depth, arena.world, x.dtype, target, beside_copies=True)
            rows_per_flag = config.block_m * most
            generation, call = arena.begin(operation, "multiplies", num_tokens, depth, x.dtype, 0)
            launch_gather_matmul(
                y,
                x,
                full,
                most * depth,
                matrix,
                None,
                arena,
                num_tokens,
                0,
                most,
                rows_per_flag,
                generation,
                call,
                "there",
            )
            return y

        return self.ranks.each(multiply), rows.full

    def scatter(self, lefts: Each, matrices: Each, operation: str) -> list[Tensor]:
        def multiply(rank: int) -> list[Tensor]:
            x, matrix, arena = lefts[rank], matrices[rank], self._arenas[rank]
            num_tokens, columns = len(x), matrix.shape[1]
            most, slot_elements = cdiv(num_tokens, arena.world), arena.slot_bytes // x.element_size()
            generation, call = arena.begin(operation, "scatters", num_tokens, columns, x.dtype, 0)
            launch_matmul_scatter(
                None, [(x, matrix)], None, None, arena, num_tokens, 0, most, slot_elements, generation, call
            )
            owners = range(arena.world)
            return [slot_of(arena, owner, rank, generation, num_tokens, columns, x.dtype) for owner in owners]

        return [block for blocks in self.ranks.each(multiply) for block in blocks]


class Fused(Way):
    """The operators.

    Args:
        arenas: by rank.
        push: whether gathered rows are pushed.
    """

    exchanges = True

    def __init__(self, ranks: VirtualRanks, arenas: Sequence[DeviceArena], *, push: bool) -> None:
        super().__init__(ranks, torch.mm)
        self._arenas, self._push = arenas, push

    def gather(self, rows: Rows, matrices: Each, operation: str, keep: bool) -> tuple[list[Tensor], Each | None]:
        def multiply(rank: int) -> tuple[list[Tensor], Tensor | None]:
            shard, matrix, arena, tokens = rows.shards[rank], matrices[rank], self._arenas[rank], len(rows.full[rank])
            strategy = "push" if self._push else "fused"
            decision = decide(arena, strategy, "gather", shard, tokens, [matrix.shape[1]], matrix.shape[0])
            assert decision is not None, "no collective is asked for"
            return gather_by_kernels(shard, [matrix], [None], arena, tokens, operation, decision, keep=keep)

        results = self.ranks.each(multiply)
        kept = [full for _, full in results if full is not None]
        return [y for (y,), _ in results], kept or None

    def scatter(self, lefts: Each, matrices: Each, operation: str) -> list[Tensor]:
        def multiply(rank: int) -> Tensor:
            left, matrix, arena = lefts[rank], matrices[rank], self._arenas[rank]
            decision = decide(arena, "fused", "scatter", left, len(left), [matrix.shape[1]], matrix.shape[0])
            assert decision is not None, "no collective is asked for"
            return scatter_by_kernels([(left, matrix)], None, None, arena, operation, decision)

        return self.ranks.each(multiply)

    def scatter_and_gather(self, lefts: Each, matrices: Each, rows: Rows, operation: str) -> tuple[list[Tensor], Each]:
        full = self.ranks.each(
            lambda rank: start_gather(rows.shards[rank], self._arenas[rank], len(rows.full[rank]), operation)
        )
        y = self.scatter(lefts, matrices, operation)
        self.ranks.each(lambda rank: finish_gather(self._arenas[rank]))
        return y, full


def slot_of(
    arena: DeviceArena, owner: int, source: int, generation: int, num_tokens: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return where `source` stores the owner's rows."""
    rows = shard_rows(num_tokens, arena.world, owner)
    shape = (rows.stop - rows.start, columns)
    return arena.block(owner, generation, shape, dtype, source * arena.slot_bytes)
