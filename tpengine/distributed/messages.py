"""Messages between ranks that are not tensors: JSON, as the bytes of a tensor.

torch's object collectives would pickle them, and unpickling runs what the sender wrote. JSON runs nothing: if a rank
sends something malformed, the others raise ValueError.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from tpkernels.symmetric.memory import device_for_numbers


def all_gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return each rank's value on all ranks; collective.

    Args:
        value: anything that JSON can hold.
        group: the ranks; None for the default group.

    Returns:
        Every rank's value, by rank in the group; tuples become lists.

    Cost: two collectives; each rank receives the longest text once from every rank.
    """
    texts, lengths = _padded(json.dumps(value).encode(), group)
    everyone = [torch.empty_like(texts) for _ in lengths]
    dist.all_gather(everyone, texts, group=group)
    return [json.loads(_bytes(text, length)) for text, length in zip(everyone, lengths, strict=True)]


def broadcast_json(value: Any = None, group: ProcessGroup | None = None) -> Any:
    """Return the value of the group's rank 0 on all ranks; collective.

    Args:
        value: anything that JSON can hold; ignored on other ranks.
        group: the ranks; None for the default group.

    Returns:
        Rank 0's value; on rank 0, too, as JSON returns it: tuples become lists.

    Cost: two collectives.
    """
    device = device_for_numbers(_group(group))
    text = _tensor(json.dumps(value).encode() if dist.get_rank(group) == 0 else b"", device)
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=0)
    if dist.get_rank(group) != 0:
        text = torch.zeros(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(text, group=group, group_src=0)
    return json.loads(_bytes(text, len(text)))


def gather_bytes(mine: bytes, group: ProcessGroup | None = None) -> list[bytes]:
    """Return every rank's bytes, at least one each, on the group's rank 0, and an empty list elsewhere; collective.

    Cost: two collectives; rank 0 receives the longest bytes once from every rank.
    """
    texts, lengths = _padded(mine, group)
    everyone = [torch.empty_like(texts) for _ in lengths] if dist.get_rank(group) == 0 else None
    dist.gather(texts, everyone, group=group, group_dst=0)
    return [_bytes(text, length) for text, length in zip(everyone or [], lengths if everyone else [], strict=True)]


def _padded(mine: bytes, group: ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Return this rank's bytes, padded to the longest of all ranks, and each rank's length."""
    device = device_for_numbers(_group(group))
    length = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    counts = [int(of_rank) for of_rank in lengths]
    return _tensor(mine.ljust(max(counts), b"\0"), device), counts


def _group(group: ProcessGroup | None) -> ProcessGroup:
    default = dist.group.WORLD if group is None else group
    assert default is not None, "make the default process group first"
    return default


def _tensor(content: bytes, device: torch.device) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _bytes(text: Tensor, length: int) -> bytes:
    return bytes(text[:length].cpu().numpy())
