"""Rung: gloo ranks. Where the ranks of one host listen, as the kernel says it: /proc/net of Linux."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks.forked import fork_local_ranks
from support.ranks.rank_pool import RankPool

from tpengine.distributed import launch
from tpengine.distributed.launch import GLOO_INTERFACE, Launch, loopback_interface, loopback_variables
from tpengine.distributed.local_ranks import Ranks
from tpengine.distributed.meeting import Meeting
from tpengine.distributed.process import start

_LISTENS = "0A"


def listening_at(excepted_port: int = 0) -> list[str]:
    """The addresses at which this process accepts connections, as hexadecimal numbers."""
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            address, port = local.split(":")
            if state == _LISTENS and f"socket:[{fields[9]}]" in opened and int(port, 16) != excepted_port:
                found.append(address)
    return found


def is_loopback(address: str) -> bool:
    """Whether the kernel's number is 127.x.y.z, as such or within IPv6, or ::1."""
    return (address[-2:] == "7F" and len(address.lstrip("0F")) <= 8) or address == "00000000000000000000000001000000"


def test_loopback_is_told_from_other_addresses() -> None:
    assert all(map(is_loopback, ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")))
    assert not any(map(is_loopback, ("00000000", "0A00020F", "0" * 32, "0000000000000000FFFF00000F02000A")))


class Listener:
    """A rank that makes another group, as the mesh does."""

    def __init__(self) -> None:
        self._group = dist.new_group()

    def look(self) -> tuple[str, list[str]]:
        return os.environ.get(GLOO_INTERFACE, ""), listening_at()


def test_ranks_that_one_command_starts_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    fork_local_ranks(monkeypatch)
    with Ranks(2, f"{__name__}:Listener") as ranks:
        for name, addresses in ranks.call("look"):
            assert name == loopback_interface()
            assert len(addresses) == 2 and all(map(is_loopback, addresses))
    assert GLOO_INTERFACE not in os.environ


def started(world: int, port: int, networks: list[str]) -> tuple[str, list[str]]:
    """Start as torchrun's ranks of one host do; `networks`: what each rank takes for its network, its own if empty."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(GLOO_INTERFACE, raising=False)
        if networks:
            patch.setattr("tpengine.distributed.process.network_identity", lambda: networks[rank])
        launch = Launch(rank, world, rank, world, "127.0.0.1", port)
        meeting = Meeting(launch, {})
        meeting.connect()
        start(torch.device("cpu"), launch, meeting)
        dist.barrier()
        # The store of a run without torchrun's agent is torch's, and listens everywhere.
        answer = os.environ.pop(GLOO_INTERFACE, ""), listening_at(port)
        dist.barrier()
    return answer


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_on_one_host_listens_on_loopback_alone(ranks: RankPool, free_port: int, world: int) -> None:
    for name, addresses in ranks.run(started, world, world, free_port, []):
        assert name == loopback_interface()
        assert addresses and all(map(is_loopback, addresses))


def test_ranks_without_a_common_loopback_do_not_meet_there(ranks: RankPool, free_port: int) -> None:
    assert [name for name, _ in ranks.run(started, 2, 2, free_port, ["host a", "host b"])] == ["", ""]


def test_a_users_interface_stays() -> None:
    assert loopback_variables({GLOO_INTERFACE: "eth7"}) == {}
    assert loopback_variables({GLOO_INTERFACE: ""}) == {}
    assert loopback_variables({}) == {GLOO_INTERFACE: loopback_interface()}


def interfaces(*names: str) -> Callable[[], list[tuple[int, str]]]:
    return lambda: list(enumerate(names, 1))


def test_the_interface_is_found_by_name_where_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for names, found in (
        (("eth0", "lo"), "lo"),
        (("en0", "lo0"), "lo0"),
        (("eth0", "log0", "wlo1"), ""),
    ):
        monkeypatch.setattr(launch.socket, "if_nameindex", interfaces(*names))
        assert loopback_interface() == found

    def down(*_: object) -> None:
        raise OSError("cannot assign requested address")

    monkeypatch.setattr(launch.socket, "if_nameindex", interfaces("lo"))
    monkeypatch.setattr(launch.socket.socket, "bind", down)
    assert loopback_variables({}) == {}
