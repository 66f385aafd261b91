"""What the links between the GPUs of a host carry, by pair and size: copy engines, a kernel's loads, and NCCL.

Only a machine with two GPUs runs this; none has yet. Bytes are compared: over a link through a host whose IOMMU stands
in between, copies between GPUs can arrive wrong, and nobody says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from tpkernels.symmetric.cuda_memory import CudaMemory
from tpkernels.symmetric.host_memory import MemoryRefused

from tpengine.doctor.hosts import messages_between
from tpengine.doctor.measure.clock import usual

COPIED_BYTES = (1 << 16, 1 << 20, 1 << 26)
SUM_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 27)
_ROUNDS, _WARM_UP = 8, 2

Points = list[tuple[float, float]]


def pair_rates(ranks: list[int], group: ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Return what this rank reads from each peer's memory; collective over the host's ranks.

    Args:
        ranks: global ranks of this host.
        group: they, over gloo.
        device: this rank's GPU.

    Returns:
        "refused", why the GPUs cannot address each other, empty if they can; "pairs", a list of dictionaries: "owner"
        (a global rank), "engine" and "kernel" (points [bytes, bytes per second]), "wrong" (which of both read wrong).
    """
    try:
        memory = CudaMemory.allocate(group, max(COPIED_BYTES), device)
    except MemoryRefused as error:
        return {"refused": str(error), "pairs": []}
    own = ranks.index(dist.get_rank())
    count = max(COPIED_BYTES) // 4
    memory.block(own, 0, (count,), torch.int32).copy_(_pattern(own, count, device))
    torch.cuda.synchronize(device)
    pairs = []
    for reader in range(len(ranks)):
        for owner in range(len(ranks)):
            dist.barrier(group)
            if reader == own and owner != own:
                pairs.append({"owner": ranks[owner], **_read(memory, owner, device)})
    dist.barrier(group)
    return {"refused": "", "pairs": pairs}


def _read(memory: CudaMemory, owner: int, device: torch.device) -> dict[str, Any]:
    """Read a peer's memory by the copy engine and by a kernel."""
    found: dict[str, Any] = {"engine": [], "kernel": [], "wrong": []}
    for num_bytes in COPIED_BYTES:
        count = num_bytes // 4
        theirs, expected = memory.block(owner, 0, (count,), torch.int32), _pattern(owner, count, device)
        mine = torch.empty_like(expected)
        ways: dict[str, Callable[[Tensor, Tensor], object]] = {
            # Between tensors that torch takes for its own device's this is a copy that the driver gives to an engine.
            "engine": lambda to, of: to.copy_(of),
            "kernel": lambda to, of: torch.bitwise_or(of, 0, out=to),
        }
        for name, way in ways.items():
            mine.zero_()
            seconds = _timed(lambda way=way, to=mine, of=theirs: way(to, of))  # type: ignore[misc]
            found[name].append((float(num_bytes), num_bytes / seconds))
            if not torch.equal(mine, expected) and name not in found["wrong"]:
                found["wrong"].append(name)
    return found


def _pattern(owner: int, count: int, device: torch.device) -> Tensor:
    """Return numbers of which no two owners have one in the same place."""
    return torch.arange(count, dtype=torch.int32, device=device) * 8 + owner


def _timed(call: Callable[[], object]) -> float:
    """Return the GPU's time of a call."""
    taken = []
    for _ in range(_WARM_UP + _ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return usual(taken[_WARM_UP:])


def nccl_pairs(ranks: list[int], group: ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """Return NCCL's messages between this rank and each later one of its host: "one", "other", "messages", "wrong".

    Args:
        ranks: global ranks of this host; all ranks of the world make as many calls.
        group: all ranks, over NCCL.
        device: this rank's GPU.
    """
    found = []
    for place, one in enumerate(ranks):
        for other in ranks[place + 1 :]:
            messages, wrong = messages_between(one, other, COPIED_BYTES, group=group, device=device)
            if messages and dist.get_rank() == one:
                # What came wrong to the other has come back.
                found.append({"one": one, "other": other, "messages": messages, "wrong": wrong})
    return found


def sum_rates(group: ProcessGroup, device: torch.device) -> Points:
    """Return the bus bandwidth of half an all-reduce over NCCL, by bytes.

    Raises:
        ValueError: a sum of integers is wrong; when all have been made, so that no rank waits for this one.
    """
    world, found, wrong = dist.get_world_size(group), [], []
    for num_bytes in SUM_BYTES:
        x = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
        dist.all_reduce(x, group=group)
        if not bool((x == world).all()):
            wrong.append(f"{num_bytes} bytes: {int((x != world).sum())} sums of ones are not {world}")
        seconds = _timed(lambda x=x: dist.all_reduce(x, group=group))  # type: ignore[misc]
        found.append((float(num_bytes), (world - 1) / world * num_bytes / (seconds / 2)))
    if wrong:
        raise ValueError(f"NCCL summed wrong over {world} ranks, {wrong[0]}")
    return found
