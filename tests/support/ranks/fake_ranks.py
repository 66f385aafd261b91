"""Ranks of a group that is not gloo's, one after the other in one process, over torch's "fake" backend.

A fake collective moves nothing: a gather returns copies of what this rank gave, a sum what it gave itself, and where a
receive lands there are zeros. So no number is right; what is recorded is which calls a rank makes. `check_legal` holds
the ranks' records against each other as NCCL would meet them.

With `splits` a rank takes the way of NCCL with a bound device: it splits groups, which are recorded as calls of all
ranks of the parent. torch's own split needs a GPU, so a fake group of the members stands for what it would return.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from tpkernels.exchange.arena import Arena
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.symmetric.host_memory import MemoryRefused

from tpengine.distributed import connect, groups, mesh

assert fake_pg, "registers the backend"

NCCL_DTYPES = {
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
}


_ALL_REDUCE = dist.all_reduce


@dataclass(frozen=True)
class Call:
    """One collective or message: which, of what tensors, in which group.

    detail: the operation of a sum, the root of a broadcast; the groups and the limit of a split. peer: of a message, by
    its number among all ranks.
    """

    operation: str
    group: str
    members: tuple[int, ...]
    tensors: tuple[tuple[int, torch.dtype], ...]
    detail: Any
    peer: int | None


@dataclass
class Recorder(TorchDispatchMode):
    """Notes every call of torch.distributed, whichever Python function made it."""

    calls: list[Call] = field(default_factory=list)
    reduction: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's compiler would be imported to keep out of here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._note(func.overloadpacket.__name__, args)
        return result

    def _note(self, operation: str, args: Sequence[Any]) -> None:
        tensors = list(_tensors(args))
        boxed = [argument for argument in args if isinstance(argument, torch.ScriptObject)]
        group = next(found for argument in boxed if (found := _group(argument)) is not None)
        members = tuple(dist.get_process_group_ranks(group))
        for tensor in tensors:
            assert tensor.is_contiguous(), f"{operation} of a tensor with gaps: {tensor.shape}, {tensor.stride()}"
            assert tensor.dtype in NCCL_DTYPES, f"{operation} of {tensor.dtype}"
        peer = None
        if operation in ("send", "recv_"):
            peer = members[args[2]]
            if operation == "recv_":
                tensors[0].zero_()
        detail = {"broadcast_": args[2], "allreduce_": self.reduction}.get(operation)
        # Texts are as long as the longest of all ranks, of which a fake rank does not hear.
        described = tuple((-1 if t.dtype == torch.uint8 else t.numel(), t.dtype) for t in tensors)
        self.calls.append(Call(operation, group.group_name, members, described, detail, peer))

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        """torch's; a recorded call does not show its operation."""
        self.reduction = str(op)
        work = _ALL_REDUCE(tensor, op, *args, **kwargs)
        if op == dist.ReduceOp.MAX:
            # The other ranks give zeros.
            tensor.clamp_(min=0)
        return work

    def split_group(
        self,
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] = (),
        timeout: timedelta | None = None,
        pg_options: int = 0,
        group_desc: str = "",
    ) -> Any:
        """torch's: every rank of the parent calls it, with the same groups; those of no group are given none."""
        assert parent_pg is None and timeout is not None
        whole, rank = dist.group.WORLD, dist.get_rank()
        assert whole is not None
        everyone = tuple(range(dist.get_world_size()))
        said = tuple(tuple(members) for members in split_ranks), group_desc, timeout.total_seconds(), pg_options
        self.calls.append(Call("split", whole.group_name, everyone, (), said, None))
        own = next((list(members) for members in split_ranks if rank in members), None)
        return None if own is None else dist.new_group(own, use_local_synchronization=True, group_desc=group_desc)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)


def _group(boxed: Any) -> Any:
    with contextlib.suppress(RuntimeError, TypeError):
        return dist.ProcessGroup.unbox(boxed)
    return None


@contextlib.contextmanager
def fake_rank(rank: int, world: int, recorder: Recorder | None = None, *, splits: bool = False) -> Iterator[Recorder]:
    """Be one rank of a fake default group, without any memory shared with others; the group before comes back.

    Use it in a worker of the pool: it takes the process's default group.

    Args:
        recorder: notes the calls; default a new one.
        splits: groups are split off the default group, as over NCCL, and have NCCL's limits.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        for memory in (Arena, Mailbox):
            patch.setattr(memory, "open", _refuse)
        # No other rank will ever say that it has connected, and a fake exchange not that it is complete.
        patch.setattr(connect._Meeting, "wait_for_all", lambda _: None)
        patch.setattr(connect._Meeting, "wait_for", lambda _, work: work.wait())
        if splits:
            patch.setattr(groups, "splits_groups", lambda: True)
            patch.setattr(groups, "nccl_options", lambda max_processors: max_processors)
            for user in (groups, mesh):
                patch.setattr(user, "is_nccl", lambda: True)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("fake", store=store, rank=rank, world_size=world)
        try:
            with recorder or Recorder() as noting:
                patch.setattr(dist, "all_reduce", noting.all_reduce)
                patch.setattr(dist, "split_group", noting.split_group)
                yield noting
        finally:
            dist.destroy_process_group()
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def _refuse(*_: Any, **__: Any) -> Any:
    raise MemoryRefused("fake ranks have no memory")


def check_legal(calls: Sequence[Sequence[Call]]) -> None:
    """Whether the calls of all ranks fit together.

    In each group all members make the same collectives in the same order, with as many elements of one dtype; of each
    pair of ranks, what one sends the other receives, in the same order.
    """
    collectives: defaultdict[tuple[str, tuple[int, ...]], dict[int, list[Call]]] = defaultdict(dict)
    sent: defaultdict[tuple[str, int, int], list[Any]] = defaultdict(list)
    received: defaultdict[tuple[str, int, int], list[Any]] = defaultdict(list)
    for rank, of_rank in enumerate(calls):
        for call in of_rank:
            assert rank in call.members
            if call.operation == "send":
                assert call.peer is not None
                sent[call.group, rank, call.peer].append(call.tensors)
            elif call.operation == "recv_":
                assert call.peer is not None
                received[call.group, call.peer, rank].append(call.tensors)
            else:
                collectives[call.group, call.members].setdefault(rank, []).append(call)
    assert sent == received
    for (_, members), by_rank in collectives.items():
        assert sorted(by_rank) == sorted(members), f"only {sorted(by_rank)} of {members} call {by_rank}"
        first = by_rank[members[0]]
        for rank in members:
            for number, (call, expected) in enumerate(zip_longest(by_rank[rank], first)):
                assert call == expected, f"call {number} of {members}: rank {rank} {call}, rank {members[0]} {expected}"
