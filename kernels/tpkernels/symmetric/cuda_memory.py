"""Symmetric memory of GPUs: between the GPUs of one host, and between co-located ranks in one process.

`CudaMemory` is torch's symmetric memory: every rank allocates on its GPU and maps the others' memory. Kernels and copy
engines then address that memory over the links. `VirtualMemory` is for several ranks in one process on one device: with
it, overlap is timed on a single GPU; on a CPU it is ordinary memory.

This is the only file that uses torch's interface for it. That interface is private; the code follows torch 2.11 to
2.13.

The decision a reader will question: memory comes directly from torch's allocator (`empty_strided_p2p`), not from its
`empty`, which draws from a pool. If the pool of one rank still has a freed segment, that rank does not take part in the
rendezvous that the other ranks then wait in. Also, addresses are those of segments, not of tensors within them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.symmetric.host_memory import MemoryRefused
from tpkernels.symmetric.memory import CachedBlocks, device_for_numbers, exchange, raise_together
from tpkernels.symmetric.processes import host_identity
from tpkernels.symmetric.signals_kernel import MAX_WORLD

RECORD_WORDS = 8
# The driver's CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED.
_NATIVE_ATOMICS = 3
# With this variable torch lets several ranks of a group share a GPU; it accepts "1" and "0".
_OVERLAPS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class CudaMemory(CachedBlocks):
    """Symmetric memory between GPUs of one host.

    Args:
        part: this rank's memory, [num_bytes] uint8.
        handle: torch's handle of a rendezvous over `part`; None for a group of one rank.
        rank: this rank.

    Attributes:
        device: this rank's GPU.
        rank, world, num_bytes, addresses: as in SymmetricMemory.
        num_rendezvous: how often this process has allocated with others.

    Use `CudaMemory.allocate`. Keep the object as long as a block is used: torch's blocks over mapped memory do not keep
    it alive.
    """

    # Torch numbers the messages of a rendezvous per process, whatever the group. Ranks that have made different numbers
    # of them would wait for each other's messages in vain. This counts them as torch does.
    num_rendezvous: ClassVar[int] = 0

    def __init__(self, part: Tensor, handle: Any | None, rank: int) -> None:
        super().__init__()
        self._part, self._handle = part, handle
        self.rank, self.num_bytes, self.device = rank, part.numel(), part.device
        self.addresses: tuple[int, ...] = (part.data_ptr(),) if handle is None else tuple(handle.buffer_ptrs)
        self.world = len(self.addresses)

    def _over(self, owner: int, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._handle is None:
            return _over(self._part, offset_bytes, shape, dtype)
        if 0 in shape:
            return torch.empty(*shape, dtype=dtype, device=self.device)
        assert offset_bytes % dtype.itemsize == 0, f"{dtype} cannot begin at byte {offset_bytes}"
        block: Tensor = self._handle.get_buffer(owner, tuple(shape), dtype, offset_bytes // dtype.itemsize)
        return block

    @classmethod
    def allocate(cls, group: ProcessGroup, num_bytes: int, device: torch.device) -> CudaMemory:
        """Allocate zeros on every rank's GPU, and map all ranks' parts; collective.

        Args:
            group: the ranks, at most 8, of one host. They may be co-located (several on one GPU) if
                TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 is set for all; then the group must be gloo's, since NCCL
                refuses two ranks on one GPU.
            num_bytes: of each rank's part, equal on all ranks.
            device: this rank's GPU.

        Raises:
            MemoryRefused: on all ranks alike: no GPU or a torch without CUDA, more than 8 ranks, several hosts, GPUs
                that cannot address each other, or not with atomic operations (over PCIe), or that the ranks number
                differently, a GPU shared without the variable, sizes that differ, not enough memory, a rank that has
                allocated in other groups more often than the rest. The message says which, and what helps.

        Cost: a few small all-gathers and torch's rendezvous over the group's store; num_bytes of this GPU's memory,
            rounded up to its pages (2 MiB), and world * num_bytes of address space.
        Order: when it returns on any rank, every rank's memory is zero.
        """
        numbers = device_for_numbers(group)
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        raise_together(group, problem_here(device), numbers)
        everyone = [Facts(*facts) for facts in exchange(group, facts_of(device, num_bytes), numbers)]
        problem = refusal(everyone)
        if problem:
            # All ranks have the same facts, so all raise here.
            raise MemoryRefused(problem)
        indices = [facts.device_index for facts in everyone]
        raise_together(group, peer_problem(indices[rank], indices), numbers)
        part = handle = None
        try:
            part = zeros_on(num_bytes, torch.device("cuda", indices[rank]), world)
        except RuntimeError as error:
            problem = f"a GPU's memory of {num_bytes} bytes was refused: {_first_line(error)}: ask for less"
        # No rank continues before every rank's memory exists and is zero.
        raise_together(group, problem, numbers)
        assert part is not None
        if world > 1:
            CudaMemory.num_rendezvous += 1
            try:
                handle = rendezvous(part, group)
                if handle.buffer_ptrs[rank] != part.data_ptr() or 0 in handle.buffer_ptrs:
                    problem = f"torch {torch.__version__} maps memory elsewhere than it says: use 2.11 to 2.13"
            except RuntimeError as error:
                problem = f"the peers' memory cannot be mapped: {_first_line(error)}: look at `nvidia-smi topo -p2p r`"
            raise_together(group, problem, numbers)
        return cls(part, handle, rank)


class VirtualMemory(CachedBlocks):
    """Symmetric memory between co-located ranks in one process, on one device.

    Args:
        parts: every rank's memory, [num_bytes] uint8 each.
        rank: this co-located rank.

    Attributes:
        device: the device of all parts.
        rank, world, num_bytes, addresses: as in SymmetricMemory.

    Use `VirtualMemory.allocate`.
    """

    def __init__(self, parts: Sequence[Tensor], rank: int) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self.rank, self.world = rank, len(self._parts)
        self.num_bytes, self.device = self._parts[rank].numel(), self._parts[rank].device
        self.addresses = tuple(part.data_ptr() for part in self._parts)

    def _over(self, owner: int, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return _over(self._parts[owner], offset_bytes, shape, dtype)

    @classmethod
    def allocate(cls, world: int, num_bytes: int, device: torch.device | str) -> list[VirtualMemory]:
        """Allocate zeros for co-located ranks, one ordinary allocation for each.

        Args:
            world: how many ranks, 1 to 8.
            num_bytes: of each rank's part.
            device: a GPU, or a CPU.

        Returns:
            The memory as each rank sees it, by rank. It lives as long as one of these objects or a block does.

        Raises:
            ValueError: `world` is not 1 to 8.
        """
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"symmetric memory is for 1 to {MAX_WORLD} ranks: got {world}: use fewer")
        parts = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(world)]
        if parts[0].is_cuda:
            # Co-located ranks work on streams of their own, so the zeros must be there.
            torch.cuda.synchronize(parts[0].device)
        return [cls(parts, rank) for rank in range(world)]


def host_record() -> Tensor:
    """Return a record that kernels write and the host reads without waiting for a device: [8] int32, zeros.

    Returns:
        Pinned memory if there is a GPU: its kernels write it at the address that `data_ptr()` gives (host and devices
        share one address space). Otherwise ordinary memory, for interpreted kernels.
    """
    return torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=torch.cuda.is_available())


class Facts(NamedTuple):
    """What each rank tells the others before anything is allocated; numbers only.

    Attributes:
        host: its host's number.
        device_index, gpu: its GPU's index in its process, and the GPU's own number.
        overlaps: whether GPUs may be shared.
        num_bytes: asked for.
        num_rendezvous: how often its process has allocated with others.
    """

    host: int
    device_index: int
    gpu: int
    overlaps: int
    num_bytes: int
    num_rendezvous: int


def refusal(everyone: Sequence[Facts]) -> str:
    """Return why a group cannot have symmetric memory, as far as all ranks can tell; empty if it can.

    Args:
        everyone: what each rank tells, by rank.
    """
    world, first = len(everyone), everyone[0]
    if world > MAX_WORLD:
        return f"symmetric memory is for at most {MAX_WORLD} ranks: the group has {world}: use a smaller group"
    hosts = len({facts.host for facts in everyone})
    if hosts > 1:
        return f"the ranks are on {hosts} hosts: use a group of one host's ranks"
    if any(facts.num_bytes != first.num_bytes for facts in everyone) or first.num_bytes < 1:
        return (
            f"every rank must ask for the same memory, at least 1 byte: got {[facts.num_bytes for facts in everyone]} "
            "bytes by rank: use the same on all"
        )
    if any(facts.overlaps != first.overlaps for facts in everyone):
        ranks = [rank for rank, facts in enumerate(everyone) if facts.overlaps]
        return f"{_OVERLAPS}=1 must be set for all ranks or for none: it is for {ranks} of {world}: set it for all"
    indices = [facts.device_index for facts in everyone]
    places = {(facts.device_index, facts.gpu) for facts in everyone}
    if not len(places) == len(set(indices)) == len({facts.gpu for facts in everyone}):
        return (
            f"the ranks number the GPUs differently: cuda:{indices} by rank are {len({f.gpu for f in everyone})} GPUs: "
            "set the same CUDA_VISIBLE_DEVICES for all ranks, and give each its own device"
        )
    if len(places) < world and not first.overlaps:
        return (
            f"several ranks are on one GPU: cuda:{indices} by rank: give each rank its own, or set {_OVERLAPS}=1 for "
            "all ranks and use a gloo group"
        )
    if world > 1 and any(facts.num_rendezvous != first.num_rendezvous for facts in everyone):
        return (
            "the ranks must have allocated equally often in other groups: they have "
            f"{[facts.num_rendezvous for facts in everyone]} times by rank: make the groups in an order in which they "
            "have, those of most ranks first"
        )
    return ""


def problem_here(device: torch.device) -> str:
    """Return why this rank cannot have memory that other GPUs address; empty if nothing is known."""
    if device.type != "cuda":
        return f"symmetric memory of GPUs needs a GPU: got device {device}: pass a cuda device"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA: install the build for your GPU"
    if not torch.cuda.is_available():
        return "torch finds no GPU: look at the driver and CUDA_VISIBLE_DEVICES"
    from torch.distributed import _symmetric_memory

    backend = _symmetric_memory.get_backend(device)
    if backend != "CUDA":
        return f"torch's symmetric memory must be its CUDA backend: it is {backend}: unset TORCH_SYMMMEM"
    return ""


def facts_of(device: torch.device, num_bytes: int) -> Facts:
    """Return what this rank tells the others before they allocate."""
    index = torch.cuda.current_device() if device.index is None else device.index
    name = str(torch.cuda.get_device_properties(index).uuid)
    gpu = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    return Facts(
        host_identity(), index, gpu, int(os.environ.get(_OVERLAPS) == "1"), num_bytes, CudaMemory.num_rendezvous
    )


def peer_problem(index: int, indices: Sequence[int]) -> str:
    """Return the first other rank's GPU that this one cannot address as kernels need it; empty if there is none.

    Args:
        index: this rank's GPU.
        indices: all ranks' GPUs, by rank.
    """
    visible = torch.cuda.device_count()
    for peer in sorted(set(indices) - {index}):
        if peer >= visible:
            return (
                f"cuda:{peer} is another rank's and not visible here: set the same CUDA_VISIBLE_DEVICES for all ranks"
            )
        if not torch.cuda.can_device_access_peer(index, peer):
            return f"cuda:{index} cannot address the memory of cuda:{peer}: use GPUs that a link or switch connects"
        has_atomics = _has_native_atomics(index, peer)
        if has_atomics is None and index == min(indices):
            _say_that_atomics_are_not_checked()
        if has_atomics is False:
            return (
                f"cuda:{index} has no atomic operations on the memory of cuda:{peer}, by which kernels signal: use "
                "GPUs that NVLink connects, not PCIe"
            )
    return ""


@functools.cache
def _say_that_atomics_are_not_checked() -> None:
    """Print, once per process, that atomic operations between GPUs are not checked."""
    print(
        "tpkernels: this torch cannot tell whether these GPUs have atomic operations on each other's memory, by which "
        "kernels signal: not checked: if exchanges end with PeerTimeout, use parallel.tp_comm plain, or no arena",
        file=sys.stderr,
    )


def _has_native_atomics(index: int, peer: int) -> bool | None:
    """Return whether the link between two GPUs supports atomic operations, as PCIe does not; None if unknown."""
    if torch.version.hip:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    devices = [ctypes.c_int(), ctypes.c_int()]
    for device, number in zip(devices, (index, peer), strict=True):
        if driver.cuDeviceGet(ctypes.byref(device), number):
            return None
    value = ctypes.c_int()
    if driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, *devices):
        return None
    return bool(value.value)


def zeros_on(num_bytes: int, device: torch.device, world: int) -> Tensor:
    """Return memory of this rank that others can map; it is zero when this returns."""
    if world == 1:
        part = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    else:
        from torch._C._distributed_c10d import _SymmetricMemory

        part = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    part.zero_()
    torch.cuda.synchronize(device)
    return part


def rendezvous(part: Tensor, group: ProcessGroup) -> Any:
    """Return torch's handle, by which all ranks of a group can address each other's parts; collective."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(part, group)


def _over(part: Tensor, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor over part of an allocation that shares its storage but not its version counter."""
    count = torch.Size(shape).numel()
    assert offset_bytes % dtype.itemsize == 0, f"{dtype} cannot begin at byte {offset_bytes}"
    # A view beyond the end would enlarge the storage, and so move it.
    end_bytes = offset_bytes + count * dtype.itemsize
    assert end_bytes <= part.numel(), f"{tuple(shape)} of {dtype} at byte {offset_bytes} ends after {part.numel()}"
    flat = torch.empty(0, dtype=dtype, device=part.device)
    flat.set_(part.untyped_storage(), offset_bytes // dtype.itemsize, (count,), (1,))
    return flat.view(*shape)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or repr(error)
