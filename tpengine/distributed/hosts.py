"""The hosts of a run: they tell each other who they are, and all find the same mistake before ranks connect.

Ranks may be on several hosts, and what differs there shows late and badly: another version of torch fails in the first
exchange or not at all, a port that a firewall closes is a wait. So when the ranks have met, and before there is a
process group, the hosts compare versions and clocks, and each connects to the others where gloo will listen.

What is deliberately elsewhere: whether hosts share memory (tpkernels, host_identity), and whether they share the run
directory (runs/checkpoints.py, which asks once it knows the directory).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import ipaddress
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tpkernels

from tpengine.distributed.launch import GLOO_INTERFACE, STARTED, Launch, network_identity
from tpengine.distributed.meeting import Meeting, named
from tpengine.distributed.network import address_towards, listening_address

# Clocks that are nearer to each other are not worth a line.
_APART_SECONDS = 2.0
# The kernel of a host that is up answers by itself, however busy it is; its first answer may be lost.
_REACH_SECONDS = 15.0
_DIGEST_LETTERS = 12
# Addresses in what gloo says of a connection: "Connection closed by peer [10.0.0.7]:17326", "writev [::1]:80: ...".
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d")


@dataclass(frozen=True)
class Hosts:
    """Which rank is on which host. Those that share a loopback count as one.

    Attributes:
        names: of hosts, in the order of their first ranks; empty if all ranks are on one.
        of_rank: the host of each rank, as an index.
        addresses: where each host's ranks listen; empty where that is not known.
        interface: the one that gloo uses on rank 0's host; empty if it is not known.
    """

    names: tuple[str, ...] = ()
    of_rank: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    interface: str = ""

    def ranks_of(self, host: int) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, on in enumerate(self.of_rank) if on == host]

    def called(self, host: int) -> str:
        """Return a host's name and its ranks: "n7 (ranks 8, 9)"."""
        return f"{self.names[host]} ({named(self.ranks_of(host))})"

    def words(self) -> str:
        """Return which hosts there are: "2 hosts over eth0: n6 (ranks 0, 1), n7 (ranks 2, 3)"; empty for one."""
        if not self.names:
            return ""
        over = f" over {self.interface}" if self.interface else ""
        return f"{len(self.names)} hosts{over}: {', '.join(self.called(host) for host in range(len(self.names)))}"

    def where(self, ranks: Sequence[int], own: int) -> str:
        """Return " on n7" if these ranks are on hosts other than that of rank `own`; else nothing."""
        others = sorted({self.of_rank[rank] for rank in ranks} - {self.of_rank[own]}) if self.names else []
        return f" on {', '.join(self.names[host] for host in others)}" if others else ""

    def lost(self, error: BaseException | None, own: int) -> str:
        """Return which host an error of a connection says is on its other side: "n7 (ranks 2, 3)"; or nothing.

        Args:
            error: its text has the address; or that of what caused it.
            own: the rank that has it.
        """
        while error is not None:
            for address in _ADDRESS.findall(str(error)):
                if address in self.addresses and (host := self.addresses.index(address)) != self.of_rank[own]:
                    return self.called(host)
            error = error.__cause__ or error.__context__
        return ""


@dataclass
class _Told:
    """What each rank has told, by the host that it is on.

    Attributes:
        ways: by host, the address from which it reaches the store.
        apart: by how many seconds, at least, this host's clock is ahead of rank 0's; behind where it is negative.
    """

    names: list[str] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    of_rank: list[int] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)
    apart: float = 0.0


def meet_hosts(
    meeting: Meeting, launch: Launch, environ: dict[str, str] | os._Environ[str], say: Callable[[str], None]
) -> tuple[Hosts, str]:
    """Tell the other hosts of this one, and learn of theirs; collective over all ranks, which have met.

    Where gloo would listen on loopback although there are other hosts, `environ` gets the interface to listen on.

    Args:
        meeting: of the ranks.
        launch: this rank's.
        environ: of this process; may be changed.
        say: takes a line for the user.

    Returns:
        The hosts, and why this rank cannot go on: one line, empty if it can. A mistake that all can see is the same on
        all.

    Cost: one message per rank; between hosts another, reading the sources once per host, and a connection from each
        host to each other one.
    """
    if launch.world_size == launch.local_world_size and (launch.world_size == 1 or _is_one_host(environ)):
        return Hosts(), ""
    told = _introduced(meeting, launch)
    if len(told.names) == 1:
        return Hosts(), ""
    own = told.of_rank[launch.rank]
    mistake, address, interface = "", "", ""
    try:
        address, interface = listening_address(environ, told.ways[own], [way for way in told.ways if way])
    except ValueError as error:
        mistake = str(error)
    is_first = told.first[own] == launch.rank
    with contextlib.ExitStack() as stack:
        listener = None
        if is_first and not mistake:
            try:
                listener = stack.enter_context(_listener(address))
            except OSError as error:
                mistake = (
                    f"every host must listen where others reach it: {told.names[own]} cannot at {address}, "
                    f"{error.strerror or error}: name another interface by {GLOO_INTERFACE}"
                )
        place = (address, listener.getsockname()[1] if listener else 0)
        facts = (*place, versions(), told.apart) if is_first else None
        of_hosts = [_Facts(*of_rank) for of_rank in meeting.tell("hosts", facts) if of_rank is not None]
        mistake = mistake or _differing(told, [host.versions for host in of_hosts])
        if is_first and not mistake:
            mistake = _unreached(told, own, of_hosts)
        meeting.tell("tried", None)  # nobody closes its listener before
    if launch.rank == 0 and not mistake:
        for line in _of_clocks(told, [host.apart for host in of_hosts]):
            say(line)
    if interface:
        environ[GLOO_INTERFACE] = interface
        if launch.rank == 0:
            say(
                f"the name of this host, {told.names[own]}, leads to no address that other hosts reach: gloo listens "
                f"on {interface}, {address}; {GLOO_INTERFACE} names another"
            )
    addresses = tuple(host.address for host in of_hosts)
    over = interface or environ.get(GLOO_INTERFACE, "")
    return Hosts(tuple(told.names), tuple(told.of_rank), addresses, over), mistake


def _is_one_host(environ: Mapping[str, str]) -> bool:
    """Whether who started the ranks knows that all are on this host; without LOCAL_RANK it would be a guess."""
    return bool(environ.keys() & {"TORCHELASTIC_RUN_ID", STARTED})


def _introduced(meeting: Meeting, launch: Launch) -> _Told:
    """Exchange names and networks; find which ranks share a host, and how far this host's clock is from rank 0's."""
    way = address_towards(launch.address, launch.port)
    began_at = time.time()
    own = socket.gethostname(), network_identity(), way
    everyone = meeting.tell("rank", own, clock=time.time)
    ended_at, at_rank_0 = time.time(), meeting.told_at
    # Rank 0's clock said so at some moment between this rank's two.
    least, most = began_at - at_rank_0, ended_at - at_rank_0
    told = _Told(apart=least if least > 0 else min(most, 0.0))
    networks: list[str] = []
    for rank, (name, network, way_of_rank) in enumerate(everyone):
        if network not in networks:
            networks.append(network)
            told.names.append(name)
            told.first.append(rank)
            told.ways.append(way_of_rank)
        told.of_rank.append(networks.index(network))
    return told


@dataclass(frozen=True)
class _Facts:
    """What the first rank of a host tells of it."""

    address: str
    port: int
    versions: Mapping[str, str]
    apart: float


def versions() -> dict[str, str]:
    """Return what must be equal on all hosts: versions of Python, torch and tpengine, and a hash of our sources.

    A checkout that one host has not pulled has the same version as the others.
    """
    found = {"Python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    for name in ("torch", "tpengine"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    packages = [Path(__file__).parents[1], *(Path(place) for place in tpkernels.__path__)]
    found["the sources of tpengine"] = _digest(packages)
    return found


def _digest(packages: Sequence[Path]) -> str:
    """Hash the Python files below some directories, with their names."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path.relative_to(package)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_DIGEST_LETTERS]


def _differing(told: _Told, of_hosts: Sequence[Mapping[str, Any]]) -> str:
    """Return in which version a host differs from rank 0's, in one line; empty if all agree."""
    for what in of_hosts[0]:
        found = [str(host.get(what, "none")) for host in of_hosts]
        others = [host for host, version in enumerate(found) if version != found[0]]
        if others:
            hosts = Hosts(tuple(told.names), tuple(told.of_rank))
            return (
                f"all hosts must run the same software: {what} is {found[others[0]]} on {hosts.called(others[0])} and "
                f"{found[0]} on {hosts.called(0)}: install the same on all"
            )
    return ""


@contextlib.contextmanager
def _listener(address: str) -> Iterator[socket.socket | None]:
    """Listen where gloo will, at any port; None if there is no such address."""
    if not address:
        yield None
        return
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
        yield listener


def _unreached(told: _Told, own: int, of_hosts: Sequence[_Facts]) -> str:
    """Connect to the other hosts; return in one line which one cannot be reached, empty if all can."""
    end = time.monotonic() + _REACH_SECONDS
    hosts = Hosts(tuple(told.names), tuple(told.of_rank))
    for host, facts in enumerate(of_hosts):
        if host == own or not facts.port:
            continue
        try:
            seconds = max(end - time.monotonic(), _REACH_SECONDS / 10)
            socket.create_connection((facts.address, facts.port), timeout=seconds).close()
        except OSError as error:
            return (
                f"every host must reach every other at any port: {told.names[own]} does not reach "
                f"{hosts.called(host)} at {facts.address}, {error.strerror or error}: open the ports between the "
                f"hosts, or name an interface that all reach by {GLOO_INTERFACE}"
            )
    return ""


def _of_clocks(told: _Told, apart: Sequence[float]) -> Iterator[str]:
    """Yield a line for each host whose clock is far from that of rank 0's host."""
    for name, seconds in zip(told.names, apart, strict=True):
        if abs(seconds) > _APART_SECONDS:
            yield (
                f"the clock of {name} is {abs(seconds):.0f} s or more {'ahead of' if seconds > 0 else 'behind'} that "
                f"of {told.names[0]}: times in the run's files will not fit together: set it by NTP"
            )
