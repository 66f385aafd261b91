"""What ranks tell each other that is not tensors, and whether all of them have built the same model.

Messages are JSON, as the bytes of a tensor. torch's object collectives would pickle them, and unpickling runs what the
sender wrote. JSON runs nothing: if a rank sends something malformed, the others raise ValueError.

Models are compared by hash; if they differ, the first difference is named. Only a hash is exchanged unless there is a
difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator
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


def describe_model(model: nn.Module) -> list[str]:
    """Return as lines of text what must be equal on all ranks: parameters, which are shared or frozen, buffers."""
    lines = []
    first_name: dict[Parameter, str] = {}
    devices: dict[torch.device, int] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if first_name.setdefault(p, name) != name:
            lines.append(f"parameter {name} shared with {first_name[p]}")
            continue
        kind = "trained" if p.requires_grad else "frozen"
        device = devices.setdefault(p.device, len(devices))
        lines.append(f"parameter {name} {list(p.shape)} strides {list(p.stride())} {p.dtype} {kind} device {device}")
    lines.extend(f"buffer {name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers())
    return lines


def differing_members(text: bytes, device: torch.device, comm: Communicator) -> list[int]:
    """Return the ranks of a communicator whose text has another hash than its rank 0's; empty if all agree."""
    mine = torch.tensor([list(hashlib.sha256(text).digest())], dtype=torch.uint8, device=device)
    digests = comm.all_gather(mine).tolist()
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


def check_same(
    lines: Sequence[str],
    device: torch.device,
    comm: Communicator,
    *,
    rule: str = "all ranks must build the same model",
    remedy: str = "build it alike on every rank",
) -> None:
    """Raise unless the lines are equal on all ranks; collective.

    Args:
        lines: what must be equal.
        device: where the compared tensors are, as the group needs.
        comm: the ranks.
        rule, remedy: what the error says before and after the difference.

    Raises:
        ValueError: on every rank, with the same message, which names the first line that differs.
    """
    text = "\n".join(lines).encode()
    differing = differing_members(text, device, comm)
    if not differing:
        return
    size = int(comm.all_reduce_max_(torch.tensor(len(text), device=device)))
    padded = torch.tensor([list(text.ljust(size, b"\n"))], dtype=torch.uint8, device=device)
    texts = [bytes(row).decode().rstrip("\n").split("\n") for row in comm.all_gather(padded).tolist()]
    theirs, rank_0 = next(
        pair for pair in zip_longest(texts[differing[0]], texts[0], fillvalue="nothing") if pair[0] != pair[1]
    )
    raise ValueError(
        f"{rule}: ranks {differing} differ from rank 0, rank {differing[0]} has '{theirs}' where rank 0 has "
        f"'{rank_0}': {remedy}"
    )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter or buffer, or the CPU."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def broadcast_model(model: nn.Module, comm: Communicator) -> None:
    """Overwrite parameters and buffers with those of the communicator's rank 0, whatever their strides.

    Those on the meta device have no values and are skipped.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel() > 0 and not tensor.is_meta:
            tensor.detach().copy_(comm.broadcast_(tensor.detach().contiguous()))
