"""Rung: pure, with this machine's interfaces. Where gloo is to listen; two hosts do so in test_two_hosts.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tpengine.distributed import network
from tpengine.distributed.launch import GLOO_INTERFACE, loopback_interface
from tpengine.distributed.network import (
    address_of_name,
    address_towards,
    addresses_by_interface,
    interface_of,
    is_loopback,
    listening_address,
)

INTERFACES = [("lo", "127.0.0.1"), ("eth0", "10.1.0.7"), ("eth0", "fd00::7"), ("ib0", "10.2.0.7")]


def test_the_loopback_of_this_machine_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == loopback_interface()
    assert interface_of("192.0.2.77") == ""


def test_a_way_has_the_address_of_this_side() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert address_towards("localhost", port) == "127.0.0.1"
    assert address_towards("127.0.0.1", port) == "", "nobody listens any more"
    assert address_towards("127.0.0.1") == "127.0.0.1", "the routes know it all the same"
    assert address_towards("no.such.host.invalid") == ""


def test_addresses_of_ipv6_are_listed_too(tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text("fe80000000000000282f74fffe28e01e 02 40 20 80     eth7\n")
    assert addresses_by_interface(table)[-1] == ("eth7", "fe80::282f:74ff:fe28:e01e")
    assert addresses_by_interface(tmp_path / "absent") == addresses_by_interface(table)[:-1]


def test_an_interface_with_ipv6_alone_is_known_by_its_global_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux may list that of the link first."""
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe80000000000000282f74fffe28e01e 02 40 20 80     eth7\n"
        "fd000000000000000000000000000007 02 40 00 80     eth7\n"
        "fe80000000000000282f74fffe28e01f 03 40 20 80     ib7\n"
    )
    listed = addresses_by_interface(table)
    assert [address for name, address in listed if name == "eth7"] == ["fd00::7", "fe80::282f:74ff:fe28:e01e"]
    monkeypatch.setattr(network, "addresses_by_interface", lambda: listed)
    assert listening_address({GLOO_INTERFACE: "eth7"}, "", []) == ("fd00::7", "")
    monkeypatch.setattr(network, "address_of_name", lambda: "fe80::282f:74ff:fe28:e01e")
    monkeypatch.setattr(network, "address_towards", lambda _: "fd00::7")
    assert listening_address({}, "fe80::282f:74ff:fe28:e01e", []) == ("fd00::7", "eth7")
    assert listening_address({}, "fe80::282f:74ff:fe28:e01f", ["fd00::8"]) == ("fd00::7", "eth7")
    for environ in ({GLOO_INTERFACE: "ib7"}, {}):
        with pytest.raises(ValueError, match=r"ib7 of .* has fe80::282f:74ff:fe28:e01f alone.*give it a global") as of:
            listening_address(environ, "fe80::282f:74ff:fe28:e01f", [])
        assert "\n" not in str(of.value)


@pytest.mark.parametrize(
    ("address", "is_own"),
    [("", True), ("127.0.1.1", True), ("::1", True), ("10.1.0.7", False), ("fd00::7", False)],
)
def test_no_other_host_reaches_a_loopback(address: str, is_own: bool) -> None:
    assert is_loopback(address) == is_own


@pytest.mark.parametrize(
    ("by_name", "own_way", "others", "wanted"),
    [
        ("10.1.0.7", "10.2.0.7", [], ("10.1.0.7", "")),  # gloo finds it, as ever
        ("127.0.1.1", "10.2.0.7", [], ("10.2.0.7", "ib0")),  # Debian's list of names
        ("", "10.1.0.7", [], ("10.1.0.7", "eth0")),  # a container's name
        ("", "fd00::7", [], ("10.1.0.7", "eth0")),  # gloo takes the first of an interface
        ("127.0.1.1", "127.0.1.1", ["127.0.0.1", "10.2.0.8"], ("10.2.0.7", "ib0")),  # the store's host
        ("", "127.0.0.1", [], ("", "")),
    ],
)
def test_gloo_listens_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch, by_name: str, own_way: str, others: list[str], wanted: tuple[str, str]
) -> None:
    monkeypatch.setattr(network, "addresses_by_interface", lambda: INTERFACES)
    monkeypatch.setattr(network, "address_of_name", lambda: by_name)
    monkeypatch.setattr(network, "address_towards", {"10.2.0.8": "10.2.0.7"}.__getitem__)
    assert listening_address({}, own_way, others) == wanted


def test_the_interface_that_a_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "addresses_by_interface", lambda: INTERFACES)
    assert listening_address({GLOO_INTERFACE: "ib0,eth0"}, "10.1.0.7", []) == ("10.2.0.7", "")
    with pytest.raises(ValueError, match=r"has no ib1: it has .*eth0") as refusal:
        listening_address({GLOO_INTERFACE: "ib1"}, "10.1.0.7", [])
    assert "\n" not in str(refusal.value)
    monkeypatch.setattr(network, "addresses_by_interface", list)
    assert listening_address({GLOO_INTERFACE: "en5"}, "", []) == ("", ""), "this system does not list them"


def test_the_address_of_a_name_is_one_that_this_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.socket, "gethostname", lambda: "localhost")
    assert is_loopback(address_of_name())
    monkeypatch.setattr(network.socket, "gethostname", lambda: "192.0.2.77")
    assert address_of_name() == "", "nobody can bind it"
    monkeypatch.setattr(network.socket, "gethostname", lambda: "no.such.host.invalid")
    assert address_of_name() == ""
