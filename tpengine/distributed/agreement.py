"""Whether all ranks have built the same model: compared by hash; if they differ, the first difference is named.

Only a hash is exchanged unless there is a difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator


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
