"""By which of its addresses other hosts reach this one, and which interface has it. No torch.

By default gloo listens at the address of the host's name. In containers that name often has none, and Debian gives it
127.0.1.1: gloo then listens on loopback, and no other host gets through. A host that has met the others knows a better
address: the one from which it reaches the store.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpengine.distributed.launch import GLOO_INTERFACE

# Linux: all interfaces that have an IPv4 address. An entry is a name, then a sockaddr whose address is at 4 to 8.
_SIOCGIFCONF, _ENTRY_BYTES, _NAME_BYTES, _MOST_INTERFACES = 0x8912, 40, 16, 256
_IPV6_INTERFACES = Path("/proc/net/if_inet6")
_CONNECT_SECONDS = 5.0
# A datagram socket that is connected sends nothing; any port does.
_ANY_PORT = 9


def address_towards(address: str, port: int = 0) -> str:
    """Return the address of this host from which it reaches another; empty if there is no way.

    Args:
        address: a name, or a number.
        port: with one a connection is made to it; without one only the routes are asked.
    """
    try:
        if port:
            with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
                return _plain(connection.getsockname()[0])
        family, kind, _, _, place = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return _plain(probe.getsockname()[0])
    except OSError:
        return ""


def address_of_name() -> str:
    """Return the address that gloo takes by itself: the first of this host's name that this host has; or empty."""
    with contextlib.suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.bind(place)
                return _plain(str(place[0]))
    return ""


def is_loopback(address: str) -> bool:
    """Return whether no other host reaches an address: it is a loopback's, or none."""
    return not address or ipaddress.ip_address(address).is_loopback


def addresses_by_interface(ipv6: Path = _IPV6_INTERFACES) -> list[tuple[str, str]]:
    """Return (interface, address) of each interface that is up; empty where the system is not Linux.

    An interface's addresses stand in the order in which gloo finds them: those of IPv4, then those of IPv6 by their
    scope, global ones first. Linux's list of the latter has another order.

    Args:
        ipv6: where Linux lists addresses of IPv6.
    """
    found: list[tuple[str, str]] = []
    with contextlib.suppress(OSError):
        for line in ipv6.read_text().splitlines():
            number, *_, name = line.split()
            found.append((name, str(ipaddress.IPv6Address(bytes.fromhex(number)))))
    return [*_ipv4_addresses(), *sorted(found, key=lambda pair: is_of_link(pair[1]))]


def is_of_link(address: str) -> bool:
    """Return whether an address of IPv6 is its link's alone (fe80::): without an interface of ours it means nobody."""
    number = ipaddress.ip_address(address) if address else None
    return isinstance(number, ipaddress.IPv6Address) and number.is_link_local


def _ipv4_addresses() -> Iterator[tuple[str, str]]:
    try:
        import array
        import fcntl

        entries = array.array("B", bytes(_ENTRY_BYTES * _MOST_INTERFACES))
        place, _ = entries.buffer_info()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            told = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iL", len(entries), place))
    except (ImportError, OSError):
        return
    content = entries.tobytes()[: struct.unpack("iL", told)[0]]
    for begin in range(0, len(content), _ENTRY_BYTES):
        name = content[begin : begin + _NAME_BYTES].split(b"\0", 1)[0].decode()
        number = content[begin + _NAME_BYTES + 4 : begin + _NAME_BYTES + 8]
        yield name.partition(":")[0], socket.inet_ntoa(number)  # eth0:1 is another address of eth0


def interface_of(address: str) -> str:
    """Return the interface that has an address; empty if none is known."""
    return next((name for name, has in addresses_by_interface() if has == address), "")


def listening_address(environ: Mapping[str, str], own_way: str, other_ways: list[str]) -> tuple[str, str]:
    """Return where gloo is to listen so that other hosts get through: (address, interface that must be named for it).

    The interface is empty where gloo finds the address by itself, or the user has named an interface.

    Args:
        environ: of this process.
        own_way: the address from which this host reaches the store.
        other_ways: those of the other hosts.

    Raises:
        ValueError: the user has named an interface that this host does not have; or the only address is its link's.
    """
    # The first address of each, as gloo takes it.
    has = dict(reversed(addresses_by_interface()))
    if given := environ.get(GLOO_INTERFACE):
        first = given.split(",")[0]
        if has and first not in has:
            raise ValueError(
                f"{GLOO_INTERFACE} must name an interface of each host that is up: {socket.gethostname()} has no "
                f"{first}: it has {', '.join(has)}"
            )
        return _reachable(has.get(first, ""), first), ""
    by_name = address_of_name()
    if not (is_loopback(by_name) or is_of_link(by_name)):
        return by_name, ""
    ways = [own_way, *(address_towards(other) for other in other_ways if not is_loopback(other))]
    address = min((way for way in ways if not is_loopback(way)), key=is_of_link, default="")
    interface = interface_of(address) if address else ""
    return _reachable(has.get(interface, address), interface), interface


def _reachable(address: str, interface: str) -> str:
    """Return an address, unless it is one that other hosts cannot name."""
    if is_of_link(address):
        raise ValueError(
            f"gloo must listen at an address that other hosts can name: {interface or 'the interface'} of "
            f"{socket.gethostname()} has {address} alone, which is its link's: give it a global address of IPv6 or one "
            f"of IPv4, or name another interface by {GLOO_INTERFACE}"
        )
    return address


def _plain(address: str) -> str:
    """Return an address without its zone, and an IPv4 address within IPv6 as itself."""
    number = ipaddress.ip_address(address.partition("%")[0])
    inner = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return str(inner or number)
