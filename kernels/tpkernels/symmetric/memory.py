"""Symmetric memory: the same number of bytes on every rank of a group, which all of them can address.

`SymmetricMemory` is the interface that fused operators use: blocks of any rank's memory as tensors, and the table of
addresses that a kernel receives instead of a process group. `HostMemory` is the backend for processes of one host:
memory without a name (host_memory.py), mapped by every rank. The backends for GPUs are in cuda_memory.py. What they
share is here too: blocks that are created once, and refusals that every rank raises.

The decision a reader will question: each block is a separate tensor over the mapping. Slices of one tensor would share
autograd's version counter, so writing one block would break the backward pass of another. For the same reason no
operator returns or keeps a block: autograd does not notice what a peer writes.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.symmetric.host_memory import MemoryRefused, allocate, available_bytes, map_shared, open_of_peer
from tpkernels.symmetric.processes import host_identity
from tpkernels.symmetric.signals import words_refused

# Data begins on its own cache lines, aligned for the widest vector loads.
ALIGNMENT_BYTES = 64
MOST_BLOCKS = 4096
_TOKEN_BYTES = 8
# More than any machine has, and the sum of several such numbers still fits into int64.
_MOST_BYTES = 1 << 60


class SymmetricMemory(Protocol):
    """Memory of a group's ranks, addressable by each of them.

    Attributes:
        rank, world: this rank's number in the group, and the number of ranks.
        num_bytes: of each rank's part.
        addresses: where each rank's part begins, in this process's address space.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def addresses(self) -> tuple[int, ...]: ...

    def block(self, owner: int, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """View part of a rank's memory as a contiguous tensor."""


class CachedBlocks:
    """What the backends share: a block is created once, by `_over`, and is the same tensor each time."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[object, ...], Tensor] = {}

    def block(self, owner: int, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """View part of a rank's memory as a contiguous tensor.

        Args:
            owner: the rank whose memory it is.
            offset_bytes: where it begins, a multiple of the element's size.
            shape, dtype: of the tensor; it must end within the memory.

        Returns:
            A tensor over the memory itself, the same one each time. Only the caller sees its changes until it signals.
        """
        key = (owner, offset_bytes, tuple(shape), dtype)
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= MOST_BLOCKS:  # lengths change with every call
                self._blocks.clear()
            # A block created in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                block = self._blocks[key] = self._over(owner, offset_bytes, shape, dtype)
        return block

    def _over(self, owner: int, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Create a block."""
        raise NotImplementedError


class HostMemory(CachedBlocks):
    """Symmetric memory between processes of one host.

    Args:
        mappings: every rank's memory as mapped here, by rank.
        rank: this rank.
        pids: the process id of every rank.

    Attributes:
        pids: as given.
        rank, world, num_bytes, addresses: as in SymmetricMemory.

    Use `HostMemory.allocate`. The mapping goes with the last tensor over it; the memory is freed with the last process
    that has it, however that process ends.
    """

    def __init__(self, mappings: Sequence[mmap.mmap], rank: int, pids: Sequence[int]) -> None:
        super().__init__()
        self.rank, self.world, self.pids = rank, len(mappings), tuple(pids)
        self.num_bytes = len(mappings[rank])
        self._views = [memoryview(mapping) for mapping in mappings]
        self.addresses = tuple(self.block(owner, 0, (1,), torch.uint8).data_ptr() for owner in range(self.world))

    def bytes_of(self, owner: int, offset_bytes: int, num_bytes: int) -> memoryview:
        """View part of a rank's memory as bytes."""
        return self._views[owner][offset_bytes : offset_bytes + num_bytes]

    def _over(self, owner: int, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        if not count:  # frombuffer refuses 0 elements
            return torch.empty(*shape, dtype=dtype)
        return torch.frombuffer(self._views[owner], dtype=dtype, count=count, offset=offset_bytes).view(*shape)

    @classmethod
    def allocate(cls, group: ProcessGroup, num_bytes: int) -> HostMemory:
        """Allocate on every rank and map all ranks' parts; collective.

        Args:
            group: the ranks; its backend must be able to exchange CPU tensors (gloo).
            num_bytes: of each rank's part, equal on all ranks.

        Raises:
            MemoryRefused: on all ranks alike: ranks on several hosts, memory that does not fit or is forbidden, a
                machine that cannot signal; the message says which.
            ValueError: the size is not a whole number of bytes; the ranks ask for different sizes.

        Cost: a few small all-gathers; per rank world * num_bytes of address space, num_bytes of memory, and a file
            descriptor for each rank until the memory is freed (Python's mmap keeps one).
        """
        check_num_bytes("the size of shared memory", num_bytes)
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        everyone = exchange(group, [host_identity(), available_bytes()])
        hosts = {host for host, _ in everyone}
        if len(hosts) > 1:
            raise MemoryRefused(f"the ranks are on {len(hosts)} hosts")
        # Measured before any rank allocates, so that all ranks decide alike, whichever allocates first.
        free_bytes = min(free for _, free in everyone)
        fd, problem = -1, words_refused()
        if not problem:
            try:
                fd = allocate(num_bytes, world, free_bytes)
            except MemoryRefused as error:
                problem = str(error)
        opened: list[int] = []
        try:
            mappings: list[mmap.mmap] = []
            token = secrets.randbits(62)
            if not problem:
                try:
                    own = map_shared(fd, num_bytes)
                    own[-_TOKEN_BYTES:] = token.to_bytes(_TOKEN_BYTES, "little")
                except (OSError, ValueError, OverflowError) as error:
                    problem = f"shared memory of {num_bytes} bytes cannot be mapped: {error}"
            entries = exchange(group, [os.getpid(), fd, token, num_bytes])
            raise_together(group, problem)
            if len({entry[3] for entry in entries}) > 1:
                raise ValueError(
                    f"every rank must ask for the same memory: got {[entry[3] for entry in entries]} bytes by rank: "
                    "use the same on all"
                )
            try:
                for pid, peer_fd, _, _ in entries:
                    opened.append(open_of_peer(pid, peer_fd))
                    mappings.append(map_shared(opened[-1], num_bytes))
                # If the ranks have different namespaces of process ids, a pid means another process here, or none.
                if any(
                    mapping[-_TOKEN_BYTES:] != entry[2].to_bytes(_TOKEN_BYTES, "little")
                    for mapping, entry in zip(mappings, entries, strict=True)
                ):
                    problem = "process numbers do not mean the same on all ranks"
            except (MemoryRefused, OSError, ValueError) as error:
                problem = str(error)
            # When all ranks have answered, each has opened what it needs, and the descriptors can be closed.
            raise_together(group, problem)
        finally:
            for descriptor in [*opened, *([fd] if fd >= 0 else [])]:
                os.close(descriptor)
        for mapping in mappings:
            mapping.madvise(mmap.MADV_DONTFORK)
        return cls(mappings, rank, [entry[0] for entry in entries])


def check_num_bytes(name: str, num_bytes: int) -> None:
    """Raise ValueError unless a size that a user gives is a whole number of bytes, from 1 on.

    Args:
        name: what it is, for the message.
        num_bytes: the size.
    """
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or not 1 <= num_bytes <= _MOST_BYTES:
        raise ValueError(
            f"{name} must be a whole number of bytes, 1 to 2**60: got {num_bytes!r}: pass what fits into the memory of "
            "the host or GPU, 1 << 28 for one"
        )


def device_for_numbers(group: ProcessGroup) -> torch.device:
    """Return where tensors must be for the group to exchange them: a CPU if it can, else this process's GPU."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def barrier(group: ProcessGroup) -> None:
    """Wait for all ranks of a group; over NCCL by this process's GPU, which torch would otherwise guess."""
    device = device_for_numbers(group)
    dist.barrier(group, device_ids=None if device.type == "cpu" else [device.index])


def exchange(group: ProcessGroup, values: Sequence[int], device: torch.device | str = "cpu") -> list[list[int]]:
    """Return some numbers of each rank on all ranks; collective.

    Args:
        values: int64, the same number of them on every rank.
        device: of a kind whose tensors the group can exchange.

    Returns:
        Every rank's numbers, by rank. No rank has them before all ranks have called.
    """
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [entry.tolist() for entry in everyone]


def raise_together(group: ProcessGroup, problem: str, device: torch.device | str = "cpu") -> None:
    """Raise MemoryRefused on all ranks if one of them has a problem, with the lowest rank's text; collective.

    Args:
        problem: what is wrong on this rank; empty if nothing is.
        device: as for `exchange`.
    """
    lengths = exchange(group, [len(problem.encode())], device)
    longest = max(length[0] for length in lengths)
    if not longest:
        return
    text = problem.encode().ljust(longest, b" ")
    problems = [bytes(entry).decode().strip() for entry in exchange(group, list(text), device)]
    rank = next(rank for rank, other in enumerate(problems) if other)
    raise MemoryRefused(f"rank {dist.get_global_rank(group, rank)}: {problems[rank]}")
