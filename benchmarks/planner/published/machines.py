"""The machine of a row: the sheet of its GPU, with the network that its notes name."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.planner.published.row import SCALING, Row
from tpengine.planner.machine import MACHINES, Machine

# Parts of a GPU's name without blanks and marks, all of which it must have, and its sheet; the more particular first.
_SHEETS = (
    (("tpu",), ""),
    (("gb300",), "gb300"),
    (("gb200",), "gb200"),
    (("b300",), "b300"),
    (("b200",), "b200"),
    (("gh200",), "gh200"),
    (("h200",), "h200"),
    (("h100", "nvl"), "h100-nvl"),
    (("h100", "94gb"), "h100-nvl"),
    (("h100", "pcie"), "h100-pcie"),
    (("h100", "96"), "h100-500w"),
    (("h100", "500w"), "h100-500w"),
    (("h100",), "h100"),
    (("h800",), "h800"),
    (("a800",), "a800"),
    (("a100", "pcie", "40"), "a100-pcie-40"),
    (("a100", "pcie"), "a100-pcie"),
    (("a100", "40gb"), "a100-40"),
    (("a10040",), "a100-40"),
    (("a100", "sxm40"), "a100-40"),
    (("a100", "40g"), "a100-40"),
    (("a100",), "a100"),
    (("v100", "16"), "v100-16"),
    (("v100",), "v100-32"),
    (("mi250",), "mi250x"),
    (("mi300",), "mi300x"),
    (("mi325",), "mi325x"),
    (("mi355",), "mi355x"),
)
# Of the network's bit rate, what rings attain: as in the sheets.
_NETWORK_SHARE = 0.85
_CARDS = re.compile(r"(\d+)\s*x\s*(?:(?:[enhx]dr|ib|infiniband|roce)\s*)?(\d+)\s*g", re.IGNORECASE)
# Links within a node are the sheet's.
_INSIDE = re.compile(r"nvlink[^,;+|]*", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(t|g)b?(?:it)?(?:/s|ps)?\b", re.IGNORECASE)
# A card of more bits per second did not exist: so much is a whole node's.
_FASTEST_CARD = 800e9
# What a source says of its nodes' connections, in bits per second, and of which GPU, where a row says no rate, or that
# one without saying whose it is. "Cross-node communication" of Hagemann et al.'s experiments is by "200Gb/s HDR
# Infiniband": read as one link of a node.
_CLUSTERS = ((SCALING, "a100", 200e9),)
_OF_CARD = re.compile(r"(\bper[ -]|/ *)(gpu|card|nic|hca|rank|device)\b|\beach\b")
_WHOSE = re.compile(r"\b(per|each|every)\b|/ *(gpu|node|card|host|hca|nic)\b")


def machine_of(row: Row) -> Machine:
    """Return the machine that a row ran on.

    Raises:
        ValueError: a GPU without a sheet; one line.
    """
    name = re.sub("[^a-z0-9]", "", row.text("gpu"))
    sheet = next((sheet for parts, sheet in _SHEETS if all(part in name for part in parts)), "")
    if not sheet:
        known = ", ".join(dict.fromkeys(of for _, of in _SHEETS if of))
        raise ValueError(f"gpu must be one whose data sheet is known: {known}: got {row.columns.get('gpu', '')!r}")
    machine = MACHINES[sheet]
    rate = _bits_per_s(row, machine)
    if not rate:
        return machine
    of_rank = rate / 8 * _NETWORK_SHARE
    return replace(machine, between=replace(machine.between, bytes_per_s=of_rank, ring_bytes_per_s=of_rank))


def _bits_per_s(row: Row, machine: Machine) -> float:
    """Return each GPU's share of the network, in bits per second; 0 where neither row nor source say it."""
    text, per_node = row.text("net"), machine.ranks_per_node
    of_node = next((rate for names, kind, rate in _CLUSTERS if row.is_of(names) and machine.name.startswith(kind)), 0.0)
    outside = _INSIDE.sub("", text)
    says_whose = _CARDS.search(outside) or _WHOSE.search(outside)
    if not of_node or says_whose or _rate(outside) not in (0.0, of_node):
        return network_bits_per_s(text, per_node)
    row.assumed.append(f"network {of_node / 1e9:.0f} Gb/s per node")
    return of_node / per_node


def network_bits_per_s(text: str, ranks_per_node: int) -> float:
    """Return each GPU's share of the network, in bits per second; 0 where the text does not say it.

    `8x200Gb/s` are a node's cards; `1600Gb/s` and whatever is said to be `per node` is a node's; less is one card's, of
    which there is one for each GPU.
    """
    text = _INSIDE.sub("", text)
    cards = _CARDS.search(text)
    if cards:
        return int(cards[1]) * int(cards[2]) * 1e9 / ranks_per_node
    rate = _rate(text)
    if _OF_CARD.search(text):
        return rate
    is_of_node = re.search(r"node|\bper (host|server)\b", text) is not None or rate > _FASTEST_CARD
    return rate / ranks_per_node if is_of_node else rate


def _rate(text: str) -> float:
    """Return the bits per second that a text names; 0 if none."""
    found = _RATE.search(text)
    return float(found[1]) * (1e12 if found[2].lower() == "t" else 1e9) if found else 0.0
