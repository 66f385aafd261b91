"""The machine of a row: the sheet of its GPU, with the network that its notes name."""

from __future__ import annotations

import re
from dataclasses import replace

from tpengine.advice.published.row import SCALING, Row
from tpengine.simulate.machine import MACHINES, Machine

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
_CARDS = re.compile(r"(\d+)\s*x\s*(\d+)\s*g", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(t|g)b?(?:it)?(?:/s|ps)?\b", re.IGNORECASE)
# A card of more bits per second did not exist: so much is a whole node's.
_FASTEST_CARD = 800e9
# Whose rate it is: then that is what the row says.
_WHOSE = re.compile(r"\bper (gpu|node|card|nic|rank|device)\b|/ *(gpu|node)\b")
# What a source says of its nodes' connections, in bits per second, where rows do not say whose rate they name. "Cross-
# node communication" of Hagemann et al.'s experiments is by "200Gb/s HDR Infiniband": read as one link of a node.
_CLUSTERS = ((SCALING, 200e9),)


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
    rate = _bits_per_s(row, machine.ranks_per_node)
    if not rate:
        return machine
    of_rank = rate / 8 * _NETWORK_SHARE
    return replace(machine, between=replace(machine.between, bytes_per_s=of_rank, ring_bytes_per_s=of_rank))


def _bits_per_s(row: Row, ranks_per_node: int) -> float:
    """Return each GPU's share of the network, in bits per second; 0 where neither row nor source say it."""
    text = row.text("net")
    of_node = next((rate for names, rate in _CLUSTERS if row.is_of(names)), 0.0)
    if not of_node or _CARDS.search(text) or _WHOSE.search(text):
        return network_bits_per_s(text, ranks_per_node)
    row.assumed.append(f"network {of_node / 1e9:.0f} Gb/s per node")
    return of_node / ranks_per_node


def network_bits_per_s(text: str, ranks_per_node: int) -> float:
    """Return each GPU's share of the network, in bits per second; 0 where the text does not say it.

    `8x200Gb/s` are a node's cards; `1600Gb/s` and whatever is said to be `per node` is a node's; less is one card's, of
    which there is one for each GPU.
    """
    # Links within a node are the sheet's.
    text = re.sub(r"nvlink[^,;+|]*", "", text)
    cards = _CARDS.search(text)
    if cards:
        return int(cards[1]) * int(cards[2]) * 1e9 / ranks_per_node
    found = _RATE.search(text)
    if not found:
        return 0.0
    rate = float(found[1]) * (1e12 if found[2].lower() == "t" else 1e9)
    is_of_node = "node" in text or rate > _FASTEST_CARD
    return rate / ranks_per_node if is_of_node and "per gpu" not in text else rate
