"""Rung: gloo ranks. What a communicator is to its copies: one and the same; to pickle and forked children: an error."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import nn
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter

ROOMY = 1 << 18


class Holder(nn.Module):
    """A module that speaks to other ranks."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(torch.ones(3))


def errors_of_pickles(arena_bytes: int) -> list[str]:
    comm = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    holder = Holder(comm)
    for copied in (copy.deepcopy(holder), copy.copy(holder), copy.deepcopy({"a": [holder]})["a"][0]):
        assert copied.comm is comm
        assert copied.comm.all_gather(torch.ones(1)).tolist() == [1] * comm.size
    messages = []
    for save in (pickle.dumps, lambda what: torch.save(what, io.BytesIO())):
        for what in (holder, comm):
            with pytest.raises(TypeError) as error:
                save(what)
            messages.append(str(error.value))
    torch.save(holder.state_dict(), io.BytesIO())
    return messages


@pytest.mark.parametrize("arena_bytes", [0, ROOMY])
def test_copies_share_it_and_pickles_say_what_to_save(ranks: RankPool, arena_bytes: int) -> None:
    for messages in ranks.run(errors_of_pickles, 2, arena_bytes):
        for message in messages:
            assert "\n" not in message and "cannot be saved" in message and "save model.state_dict()" in message


def test_one_of_a_single_rank_is_saved_as_it_is() -> None:
    loaded = pickle.loads(pickle.dumps(Communicator(None)))
    assert loaded.size == 1 and loaded.all_gather(torch.ones(2)).tolist() == [1, 1]


def said_by_a_child(call: Callable[[], Any]) -> str:
    """What `call` raises in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            call()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return said


def errors_of_children(arena_bytes: int) -> list[str]:
    group = dist.group.WORLD
    comm = Communicator(group, arena_bytes=arena_bytes)
    comm.all_reduce_in_tree_(torch.ones(4))  # starts its thread
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_gather(torch.ones(2)),
        lambda: comm.reduce_scatter(torch.ones(2)),
        lambda: comm.all_reduce_(torch.ones(2)),
        lambda: comm.all_reduce_in_tree_(torch.ones(2)),
        lambda: comm.start_all_reduce(torch.ones(2)).wait(),
        lambda: comm.all_reduce_max_(torch.ones(2)),
        lambda: comm.broadcast_(torch.ones(2)),
        lambda: matmul_reduce_scatter(torch.ones(2, 3), torch.ones(4, 3), comm),
        lambda: matmul_reduce_scatter(torch.ones(2, 3), torch.ones(4, 4), comm),
    ]
    if arena_bytes:
        arena, mailbox = comm.arena, Mailbox.open(group, 64, 2)
        of_kernels = DeviceArena.open(group, arena_bytes, torch.device("cpu"))
        assert arena is not None
        calls += [
            lambda: arena.refuse(""),
            lambda: mailbox.send(1 - comm.rank, torch.ones(2)),
            lambda: mailbox.receive(1 - comm.rank, torch.ones(2)),
            of_kernels.check_all,
            lambda: of_kernels.begin("all_gather_matmul", "pulls", 1, 1, torch.float32, 0),
        ]
    messages = [said_by_a_child(call) for call in calls]
    # Who only inherits is not disturbed, nor is the parent.
    assert said_by_a_child(gc.collect) == "nothing"
    assert comm.all_gather(torch.ones(1)).tolist() == [1] * comm.size
    return messages


@pytest.mark.by_default("0")
@pytest.mark.parametrize("arena_bytes", [0, ROOMY])
def test_a_forked_child_is_told_not_to_use_it(ranks: RankPool, arena_bytes: int) -> None:
    for messages in ranks.run(errors_of_children, 2, arena_bytes):
        assert len(messages) == (14 if arena_bytes else 9)
        for message in messages:
            assert message.startswith("RuntimeError: the ") and "belongs to the process that made it" in message, (
                message
            )
            assert "\n" not in message
