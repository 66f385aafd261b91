"""Cases about what no CPU can show of the exchange: memory of several processes, flags behind a copy engine."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.device_arena import CONTROL_BYTES, DeviceArena
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.symmetric.signals_kernel import LINE_WORDS, RANK, STATE, WORLD

from benchmarks.gpu.cases.clock import device_here, settle, write
from tpengine.distributed.local_ranks import run_ranks

_MODULE = "benchmarks.gpu.cases.kernels.protocol"
_ARENA_BYTES = 32 << 20


def open_arena(rows: Path, ranks: int) -> None:
    """Open a device arena between processes that share a GPU, and look at its control area."""
    begin = time.monotonic()
    found = run_ranks(ranks, f"{_MODULE}:opened")
    write(rows, f"protocol/open_arena/ranks_{ranks}", {"open_us": 1e6 * (time.monotonic() - begin)}, found)
    assert found == "passed", found


def opened() -> str:
    """Open the arena on this rank; return what is wrong with the first rank's that has a fault."""
    device = device_here()
    group = dist.group.WORLD
    assert group is not None, "the ranks have a group"
    arena = DeviceArena.open(group, _ARENA_BYTES, device)
    control = arena.control.tolist()
    state = control[STATE * LINE_WORDS :]
    faults = []
    if (state[RANK], state[WORLD]) != (dist.get_rank(), dist.get_world_size()):
        faults.append(f"the control area says rank {state[RANK]} of {state[WORLD]}")
    flags = CONTROL_BYTES // 4 - len(state)
    if any(control[: min(flags, STATE * LINE_WORDS)]):
        faults.append("its flags are not zero")
    # What this rank writes into each peer's memory the peer finds.
    for owner in range(arena.world):
        arena.block(owner, 0, (arena.world,), torch.int32)[arena.rank] = 1 + arena.rank
    settle(device)
    dist.barrier()
    seen = arena.block(arena.rank, 0, (arena.world,), torch.int32).tolist()
    if seen != [1 + rank for rank in range(arena.world)]:
        faults.append(f"peers wrote {seen}")
    return _of_all("; ".join(faults))


def pulls(rows: Path, ranks: int, calls: int, late: bool) -> None:
    """Pull shards over and over into poisoned memory, a flag behind each row of tiles; all bits must be right.

    Copy engines and kernels fetch, two calls each in turn.

    Args:
        rows: where the row goes.
        ranks: processes that share the GPU.
        calls: number of pulls.
        late: whether the GPU sleeps before some calls, so that copies and kernels meet otherwise.
    """
    begin = time.monotonic()
    found = run_ranks(ranks, f"{_MODULE}:pulled", calls, late)
    per_call = 1e6 * (time.monotonic() - begin) / calls
    fields = {"num_calls": calls, "per_call_us": per_call}
    write(rows, f"protocol/pulls/ranks_{ranks}{'/late' if late else ''}", fields, found)
    assert found == "passed", found


def pulled(calls: int, late: bool) -> str:
    """Make the pulls of one rank; return the first fault of any rank."""
    device, rank, world = device_here(), dist.get_rank(), dist.get_world_size()
    comm = Communicator(dist.group.WORLD, arena_bytes=_ARENA_BYTES, device=device, strategy="fused")
    arena = comm.device_arena
    assert arena is not None, "no arena could be opened"
    arena.split_bytes = 1
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    tokens, depth = (2048, 256) if device.type == "cuda" else (6, 4)
    weight = torch.eye(depth, dtype=dtype, device=device)
    shards = torch.arange(tokens, device=device).remainder(128).to(dtype)[:, None].expand(tokens, depth)
    own = shards[rank * tokens // world : (rank + 1) * tokens // world].contiguous()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(calls):
        if late and device.type == "cuda" and (number + rank) % 7 == 0:
            torch.cuda._sleep(100_000)
        # Times the identity: y is what was gathered when the tile was computed. A freed block is poisoned first.
        torch.full((tokens, depth), torch.nan, dtype=dtype, device=device)
        factor = 1 - 2 * (number % 2)
        arena.engine_bytes = 0 if number // 2 % 2 else 1 << 60
        y = all_gather_matmul(factor * own, [weight], comm)[0]
        wrong += (y != factor * shards).sum()
        if number % 1000 == 0:
            settle(device)
            arena.check_all()
    settle(device)
    arena.check_all()
    count = int(wrong)
    return _of_all(f"{count} elements of {calls} pulls are wrong" if count else "")


def _of_all(fault: str) -> str:
    """Return the first rank's fault as a check, the same on all ranks; "passed" if there is none."""
    everyone = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, fault)
    return next((f"failed: rank {rank}: {text}" for rank, text in enumerate(everyone) if text), "passed")
