"""How many processors of a GPU a kernel may take, so that whatever else waits for other ranks finds room beside it.

Kernels that wait for another rank hold their processors meanwhile, and a GPU does not take a block off a processor
before it ends. If they held all, an operation that the other rank waits for would never begin: ranks would wait in a
circle. So everything that may wait is counted, in one sum. On one GPU, at any time:

    waits for other ranks while it holds processors          one at a time of each          holds at most
    publish_kernel (in a barrier), gather_matmul_kernel,     the stream that computes       num - reserved - 1
        matmul_scatter_kernel, take_kernel, return_kernel,
        counts_kernel, a kernel of one's own
    wait_kernel (stream_waits.py has waits without it), or   the stream that copies         1
        fetch_kernel where reserved is 0
    an operation of the communication library                each communicator's stream     its blocks (NCCL: max_ctas),
                                                                                            all together `reserved`

Proof that ranks cannot wait in a circle for room:

1.  A block of NCCL takes most of a processor's registers, and the hardware spreads programs over processors before it
    puts two on one. So a program is counted as a whole processor, also where two of them would fit onto one.
2.  The sum is at most `num`. All other kernels (products, norms, the copies of fetch_kernel behind a wait_kernel) wait
    for nobody and end in finite time. What is left then leaves room for whatever stands first on its stream, so that
    begins. This holds on each GPU by itself, whatever other ranks do.
3.  So a rank waits for the order of operations alone, never for room. A program of ours waits for other ranks' earlier
    operations, or for programs that have started (signals_kernel.py, pattern 6). That all ranks issue their operations
    in orders that fit together is the caller's part.

Where `reserved` is 0, fused kernels alone wait, of one group. Then one program per rank suffices (pattern 6 again), and
room for one small program beside them: of two programs on a processor each leaves room for a program of fetch_kernel.
So there a processor is filled, and none is left where nothing is copied beside.

What is `reserved`: the sum over all communicators that may have an operation under way while a fused call runs, of the
most blocks that one operation may have. A second device arena on the same GPU counts 1, for its copies.

Products that wait for nobody need no budget, but time: with a program for each processor, and tiles at fixed strides,
those whose processor is held begin when the others have ended, and a product takes up to twice as long. Where something
may be held they have a program for each tile: the hardware then gives the next tile to whichever processor is free. A
counter in memory does the same, but must be cleared for each launch, and costs every tile an atomic operation that all
its threads wait for, 1 to 2 us; the start of a program costs less, since in these kernels nothing of a tile overlaps
with the next (about 1 % of a tile of 128x256x4096, 50 us; estimate). Where nothing is held, strides stay: so they were
measured. A tile's arithmetic is the same for every grid, so bits do not depend on it. Nor do the tiles: they are chosen
as if all processors were free.
"""

from __future__ import annotations

from typing import NamedTuple

# For kernels on the stream that copies: wait_kernel, or what fetch_kernel needs to go on.
FOR_COPIES = 1


def left_free(reserved: int, *, beside_copies: bool) -> int:
    """Return how many processors a kernel that waits leaves to others.

    Args:
        reserved: what other communication may hold.
        beside_copies: whether something is copied beside the kernel, for which it may wait.
    """
    return reserved + FOR_COPIES if reserved or beside_copies else 0


def programs_together(reserved: int, fitting: int) -> int:
    """Return how many programs of a kernel that waits are counted on a processor, where `fitting` fit together."""
    return 1 if reserved else fitting


class Budget(NamedTuple):
    """The processors of a GPU that a rank's kernels share with other communication.

    Attributes:
        num_processors: of the GPU; of ranks that share a GPU, each has its part.
        reserved: how many other communication may hold at once.
    """

    num_processors: int
    reserved: int = 0

    def problem(self) -> str:
        """Return why no kernel of ours could run, in one line; empty if one can."""
        if self.reserved < 0:
            return f"reserved_processors must not be negative: got {self.reserved}: pass 0 if nothing else communicates"
        taken = left_free(self.reserved, beside_copies=True)
        if self.reserved and self.num_processors - taken < 1:
            return (
                f"fused kernels need a processor: of {self.num_processors} other communication may hold "
                f"{self.reserved} and copies {FOR_COPIES}: reserve at most {self.num_processors - FOR_COPIES - 1}, by "
                "less max_ctas per group, or use plain collectives"
            )
        return ""

    def programs(self, num_items: int, fitting: int = 1, *, beside_copies: bool = False) -> int:
        """Return the grid of a kernel that waits for other ranks and whose programs draw items until there are none.

        Args:
            num_items: what the programs share.
            fitting: programs that fit onto a processor together.
            beside_copies: as in `left_free`.

        Returns:
            At least 1: every peer must be notified, and one program suffices.
        """
        free = self.num_processors - left_free(self.reserved, beside_copies=beside_copies)
        return max(min(free * programs_together(self.reserved, fitting), num_items), 1)


# By a GPU's index. A fact of the process, as which groups it has made: what may run beside its products.
_MAY_BE_HELD: dict[int, int] = {}


def hold(device_index: int, num: int) -> None:
    """Note that other communication of this process may hold processors of a device; the most that was said counts."""
    _MAY_BE_HELD[device_index] = max(num, may_be_held(device_index))


def may_be_held(device_index: int) -> int:
    """Return how many processors of a device other communication of this process may hold."""
    return _MAY_BE_HELD.get(device_index, 0)


def programs_of_tiles(num_tiles: int, num_programs: int, *, may_wait: bool) -> int:
    """Return the grid of a product, whose programs each take every num-programs-th tile; see the head of this file.

    Args:
        num_tiles: of the product, or the most that there may be.
        num_programs: how many fit onto the GPU together.
        may_wait: whether some of these may have to wait until others have ended.
    """
    return num_tiles if may_wait else min(num_tiles, num_programs)
