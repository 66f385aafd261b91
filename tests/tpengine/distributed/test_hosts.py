"""Rung: pure, threads as ranks over a store in memory. What hosts tell each other, and what of it cannot go on.

Real hosts, with names and networks of their own, are in test_two_hosts.py.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tpengine.distributed import hosts as module
from tpengine.distributed.hosts import Hosts, meet_hosts
from tpengine.distributed.launch import STARTED, Launch
from tpengine.distributed.meeting import Meeting

# Ranks 0 and 3 are on one host, as srun's cyclic distribution has them.
TWO = Hosts(("n6", "n7"), (0, 1, 1, 0), ("10.0.0.6", "10.0.0.7"), "eth0")


class Ranks:
    """Threads as the ranks of a run; what they know of their hosts is by rank.

    Attributes:
        found: the hosts and the mistake of each.
        said: the lines for the user.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, networks: str) -> None:
        self.found: dict[int, tuple[Hosts, str]] = {}
        self.said: list[str] = []
        self._networks, self._patch, self._store = networks, monkeypatch, dist.HashStore()
        self._per_rank("network_identity", list(networks))
        monkeypatch.setattr(module, "address_towards", lambda *_: "127.0.0.1")
        monkeypatch.setattr(module, "listening_address", lambda *_: ("127.0.0.1", ""))

    def _per_rank(self, name: str, values: list[Any]) -> None:
        self._patch.setattr(module, name, lambda *_: values[int(threading.current_thread().name)])

    def know(self, name: str, values: list[Any]) -> None:
        """Have each rank be answered differently by a function."""
        self._per_rank(name, values)

    def run(self, local: Callable[[int], tuple[int, int]]) -> None:
        """Have all of them meet; `local` returns a rank's LOCAL_RANK and LOCAL_WORLD_SIZE."""
        world = len(self._networks)

        def meet(rank: int) -> None:
            launch = Launch(rank, world, *local(rank), "nowhere", 1)
            meeting = Meeting(launch, {})
            meeting.store = self._store
            self.found[rank] = meet_hosts(meeting, launch, {}, self.said.append)

        threads = [threading.Thread(target=meet, args=(rank,), name=str(rank)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(self.found) == world


def one_each(rank: int) -> tuple[int, int]:
    return 0, 1


def by_hand(rank: int) -> tuple[int, int]:
    """Without LOCAL_RANK all seem to be on one host."""
    return rank, 3


def test_ranks_find_their_hosts_however_they_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for local in (one_each, by_hand):
        ranks = Ranks(monkeypatch, "xyx")
        ranks.run(local)
        for hosts, mistake in ranks.found.values():
            assert hosts.of_rank == (0, 1, 0) and not mistake
            assert hosts.names == (socket.gethostname(),) * 2
        assert ranks.said == []


def test_one_host_is_not_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, "xxx")
    monkeypatch.setattr(module, "versions", lambda: pytest.fail("there is nobody to compare with"))
    ranks.run(by_hand)
    assert set(ranks.found.values()) == {(Hosts(), "")}
    launch = Launch(0, 2, 0, 2, "nowhere", 1)
    for started in ({"TORCHELASTIC_RUN_ID": "x"}, {STARTED: "7"}):
        assert meet_hosts(Meeting(launch, {}), launch, started, print) == (Hosts(), ""), "nobody is asked at all"


def test_another_version_is_the_same_mistake_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, "xyz")
    old, new = {"torch": "2.12.0", "tpengine": "1"}, {"torch": "2.13.0", "tpengine": "1"}
    ranks.know("versions", [new, new, old])
    ranks.run(one_each)
    name = socket.gethostname()
    wanted = (
        f"all hosts must run the same software: torch is 2.12.0 on {name} (rank 2) and 2.13.0 on {name} (rank 0): "
        "install the same on all"
    )
    assert {mistake for _, mistake in ranks.found.values()} == {wanted}


def test_a_host_that_cannot_be_reached_is_named_by_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, "xyz")
    connect = socket.create_connection

    def refuse(place: tuple[str, int], timeout: float) -> socket.socket:
        if place[0] == "127.0.0.2" and threading.current_thread().name == "0":
            raise TimeoutError("timed out")
        return connect(place, timeout)

    monkeypatch.setattr(module.socket, "create_connection", refuse)
    ranks.know("listening_address", [("127.0.0.1", ""), ("127.0.0.2", ""), ("", "")])
    ranks.run(one_each)
    mistakes = [ranks.found[rank][1] for rank in range(3)]
    assert mistakes[1:] == ["", ""]
    name = socket.gethostname()
    assert mistakes[0].startswith(
        f"every host must reach every other at any port: {name} does not reach {name} (rank 1) at 127.0.0.2, timed out"
    )


@pytest.mark.parametrize(("ahead", "words"), [(90.0, "90 s or more ahead of"), (-90.0, "9\\d s or more behind")])
def test_clocks_that_are_apart_are_said_once(monkeypatch: pytest.MonkeyPatch, ahead: float, words: str) -> None:
    """What is said is a bound: how long a message was under way does not count as a difference."""
    ranks = Ranks(monkeypatch, "xyz")
    now = time.time

    class Clock:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def time() -> float:
            return now() + (ahead if threading.current_thread().name == "1" else 0.0)

    monkeypatch.setattr(module, "time", Clock)
    ranks.run(one_each)
    (line,) = ranks.said
    seconds = re.search(r"is (\d+) s or more (ahead of|behind)", line)
    assert seconds and seconds[2] == ("ahead of" if ahead > 0 else "behind"), line
    assert 2 < int(seconds[1]) <= 90 and "NTP" in line and "\n" not in line
    assert not any(mistake for _, mistake in ranks.found.values())


def test_sources_that_differ_have_another_digest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "x.py").write_text("x = 1\n")
    first, second = (module._digest([tmp_path / name]) for name in ("a", "b"))
    assert first == second and re.fullmatch(r"\w{12}", first)
    (tmp_path / "b" / "inner" / "x.py").write_text("x = 2\n")
    assert module._digest([tmp_path / "b"]) != first
    (tmp_path / "b" / "inner" / "x.py").rename(tmp_path / "b" / "inner" / "y.py")
    (tmp_path / "b" / "inner" / "y.py").write_text("x = 1\n")
    assert module._digest([tmp_path / "b"]) != first, "a file of another name"


def test_a_lost_host_is_known_by_its_address() -> None:
    cause = RuntimeError("Connection closed by peer [10.0.0.7]:17326. This is typically caused by a crash")
    error = RuntimeError("action 0B1[r0] failed")
    error.__cause__ = cause
    assert TWO.lost(error, 0) == "n7 (ranks 1, 2)"
    assert TWO.lost(error, 1) == "", "a host does not lose itself"
    refused = RuntimeError("local=[10.0.0.7]:42189, remote=[10.0.0.6]:55217$0, error=SO_ERROR: Connection refused")
    assert TWO.lost(refused, 2) == "n6 (ranks 0, 3)"
    assert TWO.lost(RuntimeError("[/x/pair.cc:80] writev [10.0.0.7]:1: Broken pipe"), 3) == "n7 (ranks 1, 2)"
    assert TWO.lost(RuntimeError("Connection closed by peer [10.0.0.9]:1"), 0) == "" == Hosts().lost(cause, 0)


def test_the_words_of_hosts() -> None:
    assert TWO.words() == "2 hosts over eth0: n6 (ranks 0, 3), n7 (ranks 1, 2)"
    assert Hosts().words() == ""
    assert TWO.where([1, 3], 0) == " on n7" and TWO.where([3], 0) == "" == Hosts().where([1], 0)


def test_a_host_that_cannot_listen_says_so_and_the_others_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of the link alone, say, which without its zone is nobody's: all take part to the end."""
    ranks = Ranks(monkeypatch, "xy")
    ranks.know("listening_address", [("127.0.0.1", ""), ("192.0.2.77", "")])
    ranks.run(one_each)
    (_, first), (_, second) = ranks.found[0], ranks.found[1]
    assert not first
    assert second.startswith(
        f"every host must listen where others reach it: {socket.gethostname()} cannot at 192.0.2.77, "
    )
