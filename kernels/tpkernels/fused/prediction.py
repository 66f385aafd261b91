"""Predicted seconds of a matmul with its exchange, in every way that strategy.py may choose. No torch.

A call takes the GPU's time or the host's, whichever is longer: the host runs ahead, so calls are bound by the one that
is slower. In a replayed CUDA graph the host takes no part. `product` below is the time of the tiles with their last
round, as fused/configs.py estimates it; a plain matmul has no such round, since cuBLAS has tiles for every size.

What a GPU has not shown yet is marked (estimate), with its reason. A choice needs the order and not the third digit.
"""

from __future__ import annotations

from tpkernels.work import Rates, Work, link_seconds, matmul_seconds

# A fused matmul compared with the fastest one: Triton's attain 0.81 to 1.01 of cuBLAS's speed on an H100.
FUSED_FLOPS_SHARE = 0.95
# Stores and loads by a kernel compared with copy engines.
_KERNEL_LINK_SHARE = 0.8
# What a program of 4 warps moves: 8 kB, then it waits about 0.8 us for the other memory (estimate).
PROGRAM_BYTES_PER_S = 10e9
# Of the memory's rate in publish_kernel, whose programs draw every 8 kB from a counter: on an H100 8 MB in 15 us where
# 6 would suffice (estimate).
_PUBLISH_SHARE = 0.37
# After each copy, another copy raises its flag.
_COPIES_PER_SPLIT = 2

# The host's time. Fused calls: `python -m benchmarks.run host`, the rows of commit 3c38abe23f45 in
# benchmarks/results/host_time.jsonl, 8 ranks; engines 118, 167 and 256 us for 2, 4 and 8. The driver comes on top:
# 3 us a launch, 5 us a copy (estimate).
_DRIVER_LAUNCH, _DRIVER_COPY = 3e-6, 5e-6
_HOST_OF_PULL = 85e-6 + 3 * _DRIVER_LAUNCH
_HOST_OF_PUSH = 60e-6 + _DRIVER_LAUNCH
_HOST_OF_SCATTER = 57e-6 + _DRIVER_LAUNCH
_HOST_OF_ENGINE = 95e-6 + 2 * _DRIVER_LAUNCH
_HOST_OF_ENGINE_PER_PEER = 23e-6 + _DRIVER_LAUNCH + 2 * _DRIVER_COPY
# A second matrix is a launch more: a pull's three launches take 25 us more than a push's one.
_HOST_OF_PRODUCT = 13e-6 + _DRIVER_LAUNCH
# What matmul_then_gather by kernels takes beyond its scatter: 117 us in all, 3 launches.
_HOST_OF_GATHER = 60e-6 + 2 * _DRIVER_LAUNCH
# A collective and a product: the plain rows of the same command, commit 222ce3139ac0, 8 ranks, over a backend that does
# nothing: 63, 73 and with two collectives 106 us, of which a small product on a CPU is 4. On top the library's
# enqueueing and torch.mm's launch, 10 us each (estimate).
_HOST_OF_PLAIN = 65e-6 + 20e-6
_HOST_OF_COLLECTIVE = 33e-6 + 10e-6
_HOST_OF_SUM = 8e-6 + _DRIVER_LAUNCH


def slower(gpu_seconds: float, host_seconds: float, *, in_graph: bool) -> float:
    """Return the time of a call: the GPU's or the host's; in a CUDA graph the GPU's alone."""
    return gpu_seconds if in_graph else max(gpu_seconds, host_seconds)


def product_seconds(multiply_adds: float, matmul: Work, num_processors: int, rates: Rates) -> float:
    """Return the time of a fused matmul: of its busiest processor's tiles, or of its bytes in memory.

    Args:
        multiply_adds: that the busiest processor could do in the time of its tiles.
        matmul: for its bytes.
        num_processors: of the GPU.
    """
    per_processor = FUSED_FLOPS_SHARE * rates.flops_per_s / num_processors
    return max(2 * multiply_adds / per_processor, matmul.memory_bytes / rates.memory_bytes_per_s)


def plain_seconds(matmul: Work, exchange: Work, world: int, rates: Rates) -> float:
    """Return the GPU's time of a matmul before or after a collective of `world` ranks: nothing overlaps.

    2 launches + (world - 1) signals, one per step of the ring + links + matmul
    """
    return rates.launch_seconds + collective_seconds(exchange, world, rates) + matmul_seconds(matmul, rates)


def collective_seconds(exchange: Work, world: int, rates: Rates) -> float:
    """Return the GPU's time of a collective: a launch, world - 1 signals, links."""
    return rates.launch_seconds + (world - 1) * rates.signal_seconds + link_seconds(exchange, rates)


def plain_host_seconds() -> float:
    """Return the host's time of a product and a collective."""
    return _HOST_OF_PLAIN


def pull_gather_seconds(
    product: float, gather: Work, world: int, num_splits: int, rates: Rates, *, by_engine: bool
) -> float:
    """Return the GPU's time of a matmul that computes each split of other shards as soon as it has been fetched.

        2 launches + a signal + publishing + max(g, c + g * (world - 1) / world, n * c + g / world / num_splits)

    with g the product, n = (world - 1) * num_splits copies of c each: links / n, and by engines a launch for the copy
    and one for its flag. The parts are computed as they come, this rank's own first; then the time is the largest of:
    the matmul alone; the first copy, where the own shard does not hide it, and the rest of the matmul; all copies, and
    the matmul of the last one.

    Args:
        product: of all ranks' rows, `product_seconds`.
        gather: all_gather_work.
        num_splits: flags per shard.
        by_engine: whether copy engines fetch, or a kernel with a program for each split.
    """
    num_copies = (world - 1) * num_splits
    if by_engine:
        copy = link_seconds(gather, rates) / num_copies + _COPIES_PER_SPLIT * rates.launch_seconds
    else:
        copy = programs_seconds(gather.link_bytes, num_copies, rates) / num_copies
    # link_bytes counts this rank's shard world - 1 times.
    publishing = 2 * gather.link_bytes / (world - 1) / (_PUBLISH_SHARE * rates.memory_bytes_per_s)
    overlapped = max(product, copy + product * (world - 1) / world, num_copies * copy + product / (world * num_splits))
    return 2 * rates.launch_seconds + rates.signal_seconds + publishing + overlapped


def programs_seconds(num_bytes: int, num_programs: int, rates: Rates) -> float:
    """Return the time in which programs of a kernel move bytes over links, which bound all of them together."""
    return num_bytes / min(num_programs * PROGRAM_BYTES_PER_S, _KERNEL_LINK_SHARE * rates.link_bytes_per_s)


def pull_host_seconds(world: int, num_products: int, *, by_engine: bool, waits_apart: bool = False) -> float:
    """Return the host's time of a gather that is pulled; engines take two copies and a wait for each peer.

    Args:
        waits_apart: whether a launch of its own waits for the peers before a kernel fetches.
    """
    if by_engine:
        fetching = _HOST_OF_ENGINE + (world - 1) * _HOST_OF_ENGINE_PER_PEER
    else:
        fetching = _HOST_OF_PULL + waits_apart * _HOST_OF_PRODUCT
    return (num_products - 1) * _HOST_OF_PRODUCT + fetching


def push_gather_seconds(product: float, gather: Work, world: int, num_splits: int, rates: Rates) -> float:
    """Return the GPU's time of a matmul whose first programs store the shard into the other ranks' memory.

        a launch + a signal + links, a program for each peer and split + product

    Nothing overlaps, since all ranks push first. It saves launches, copies and steps of a ring, which matters for few
    bytes.
    """
    pushing = programs_seconds(gather.link_bytes, (world - 1) * num_splits, rates)
    return rates.launch_seconds + rates.signal_seconds + pushing + product


def push_host_seconds(num_products: int) -> float:
    """Return the host's time of a gather that is pushed."""
    return _HOST_OF_PUSH + (num_products - 1) * _HOST_OF_PRODUCT


def fused_scatter_seconds(product: float, scatter: Work, world: int, rates: Rates) -> float:
    """Return the GPU's time of a matmul whose tiles are sent to their owners as they are computed, and of the sum.

        a launch + a signal + max(g, g / world + links, g * (world - 1) / world + links / (world - 1)) + summing

    with g the product. An owner's rows are sent while the next owner's are computed. This rank's own rows, which are
    not sent, come last. Then the time is the largest of: the matmul alone; the first owner's rows, then all links; all
    rows that are sent, then the links of the last. Summing reads a partial result of every peer,
    and writes the sum. Nothing hides it: processors have few own tiles each, and end them together (estimate).

    Args:
        product: of all ranks' rows, `product_seconds`.
        scatter: reduce_scatter_work.
    """
    links = link_seconds(scatter, rates)
    overlapped = max(product, product / world + links, product * (world - 1) / world + links / (world - 1))
    summed_bytes = world * scatter.link_bytes / (world - 1)
    return rates.launch_seconds + rates.signal_seconds + overlapped + summed_bytes / rates.memory_bytes_per_s


def scatter_host_seconds() -> float:
    """Return the host's time of a fused scatter."""
    return _HOST_OF_SCATTER


def fused_all_reduce_seconds(scatter_seconds: float, gather: Work, world: int, rates: Rates) -> float:
    """Return the GPU's time of a fused scatter, then of its sums gathered by a kernel with 8 programs per peer."""
    publishing = 2 * gather.link_bytes / (world - 1) / (_PUBLISH_SHARE * rates.memory_bytes_per_s)
    fetching = programs_seconds(gather.link_bytes, 8 * (world - 1), rates)
    return scatter_seconds + 2 * rates.launch_seconds + rates.signal_seconds + publishing + fetching


def fused_all_reduce_host_seconds() -> float:
    """Return the host's time of a fused scatter and a gather."""
    return _HOST_OF_SCATTER + _HOST_OF_GATHER


def two_collectives_seconds(matmul: Work, scatter: Work, gather: Work, world: int, rates: Rates) -> float:
    """Return the GPU's time of a matmul, a reduce-scatter and an all-gather, one after the other."""
    return plain_seconds(matmul, scatter, world, rates) + collective_seconds(gather, world, rates)


def two_collectives_host_seconds() -> float:
    """Return the host's time of a matmul and two collectives."""
    return _HOST_OF_PLAIN + _HOST_OF_COLLECTIVE


def one_shot_seconds(matmul: Work, full_bytes: int, world: int, rates: Rates) -> float:
    """Return the GPU's time of a matmul whose whole result every rank sends to all, and of each rank's own sum.

        3 launches + (world - 1) signals + links + (world + 1) * full_bytes in memory + matmul

    One collective instead of two, for world / 2 times the bytes: (world - 1) * full_bytes.
    """
    gathered = Work(link_bytes=(world - 1) * full_bytes)
    summing = rates.launch_seconds + (world + 1) * full_bytes / rates.memory_bytes_per_s
    return plain_seconds(matmul, gathered, world, rates) + summing


def one_shot_host_seconds() -> float:
    """Return the host's time of a matmul, a collective and a sum."""
    return _HOST_OF_PLAIN + _HOST_OF_SUM
