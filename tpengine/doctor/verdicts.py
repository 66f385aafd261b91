"""What measurements mean: findings over what ranks have found together. Pure; no torch.

The decision a reader will question: few measured figures have a verdict. How fast a link must be nobody can say without
the machine's data sheet; `advise` and `diagnose` say what it costs. Wrong bytes, clocks that are far apart, a directory
that others do not see, and links far below the rest of their kind do have one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tpengine.doctor.finding import MachineFinding, change, ok, places, unseen

# Rows of metrics and last words of several hosts are put in order by their clocks.
_MOST_APART_SECONDS = 1.0
# A link that carries less than this share of the usual one of its kind is broken, or leads another way.
_LEAST_SHARE = 0.6
# Below 10 Gbit/s a step over several hosts waits for its gradients, whatever the model.
_LEAST_NETWORK_BYTES_PER_S = 1.25e9
# A fused product that takes so much longer than apart is not noise.
_MOST_RATIO = 1.25
# Of its highest clock what a GPU holds at work: power costs a tenth to a fifth, heat more.
_LEAST_CLOCK = 0.6
_LEAST_ROOM_BYTES = 10e9

Points = Sequence[Sequence[float]]


def judge_directory(
    path: str, seen: Mapping[int, Sequence[int]], wrote: Sequence[int], free_bytes: int, host_of: Mapping[int, int]
) -> list[MachineFinding]:
    """Say whether all hosts see the run directory.

    Args:
        path: as it was given.
        seen: by rank, whose files that rank found.
        wrote: ranks that wrote one, the first of each host.
        free_bytes: room in it.
        host_of: each rank's host.
    """
    blind = sorted({host_of[rank] for rank, found in seen.items() if set(wrote) - set(found)})
    found = []
    if blind:
        remedy = "--run-dir DIR   # on a file system that all hosts mount: df -T DIR"
        found.append(change("run directory", f"{path} is not shared", remedy=remedy, where=places(blind, "host")))
    elif len(wrote) > 1:
        found.append(ok("run directory", f"{path} is shared by {len(wrote)} hosts"))
    else:
        found.append(ok("run directory", f"{path} can be written"))
    if free_bytes < _LEAST_ROOM_BYTES:
        remedy = f"df -h {path}   # a checkpoint of llama_1b takes 15 GB, of 8B 100"
        found.append(change("room in it", f"{free_bytes / 1e9:.1f}", "GB", remedy=remedy))
    else:
        found.append(ok("room in it", f"{free_bytes / 1e9:.0f}", "GB"))
    return found


def judge_clocks(apart: Sequence[Mapping[str, float]], host_of: Mapping[int, int]) -> list[MachineFinding]:
    """Say how far the clocks of hosts are apart; `apart` is what hosts.clocks_apart returns."""
    found = []
    for of in apart:
        where = places([host_of[int(of["rank"])]], "host")
        text = f"{of['seconds']:+.3f} (known to {of['within'] * 1e3:.1f} ms)"
        if abs(of["seconds"]) - of["within"] > _MOST_APART_SECONDS:
            remedy = "timedatectl set-ntp true; chronyc tracking"
            found.append(change("clock beside host 0's", text, "s", remedy=remedy, where=where))
        else:
            found.append(ok("clock beside host 0's", text, "s", where=where))
    return found


def judge_network(pairs: Sequence[Mapping[str, Any]], has_infiniband: bool) -> list[MachineFinding]:
    """Say latency and rate of messages between hosts, and whether they came right.

    Args:
        pairs: each with "hosts", "how", "messages", and "wrong", what came wrong, in words.
        has_infiniband: whether any host has it.
    """
    found = []
    for pair in pairs:
        name = f"host to host, {pair['how']}"
        where = places(pair["hosts"], "host")
        rate, text = _told(pair["messages"])
        if pair["wrong"]:
            remedy = "ethtool -S INTERFACE; ibstat; dmesg | grep -iE 'mce|edac'   # a card, or memory, that is broken"
            if pair["how"] == "NCCL":
                remedy = f"export NCCL_NET_GDR_LEVEL=LOC   # until ACS is off or iommu=pt is on; else {remedy}"
            found.append(change(name, "; ".join(pair["wrong"]), remedy=remedy, where=where))
        elif rate < _LEAST_NETWORK_BYTES_PER_S:
            remedy = "export NCCL_SOCKET_IFNAME=... GLOO_SOCKET_IFNAME=...   # of `ip -br link` the fast one"
            if has_infiniband and pair["how"] == "NCCL":
                remedy = "NCCL_DEBUG=INFO torchrun ...   # NET/Socket beside InfiniBand: look at ibstat, NCCL_IB_HCA"
            found.append(change(name, text, remedy=remedy, where=where))
        else:
            found.append(ok(name, text, where=where))
    return found


def judge_pairs(pairs: Sequence[Mapping[str, Any]]) -> list[MachineFinding]:
    """Say what GPUs of a host carry between each other.

    Args:
        pairs: each with "ranks", "how" (copy engine, kernel, NCCL), "rate" in bytes per second, "latency_s" or None,
            and "wrong", what came wrong in words, empty if nothing did.
    """
    found = []
    for how in dict.fromkeys(pair["how"] for pair in pairs):
        of = [pair for pair in pairs if pair["how"] == how]
        rates = [pair["rate"] for pair in of]
        usual = statistics.median(rates)
        text = f"{usual / 1e9:.1f}, the slowest of {len(of)} pairs {min(rates) / 1e9:.1f}"
        wrong = [pair for pair in of if pair["wrong"]]
        slow = [pair["ranks"] for pair in of if pair["rate"] < _LEAST_SHARE * usual]
        name = f"GPU to GPU, {how}"
        if wrong:
            remedy = "export NCCL_P2P_DISABLE=1 and --parallel.tp-comm plain   # until ACS is off or iommu=pt is on"
            found.append(change(name, wrong[0]["wrong"], remedy=remedy, where=_pairs([of["ranks"] for of in wrong])))
        elif slow:
            remedy = "nvidia-smi topo -m; nvidia-smi nvlink --status   # a link is down, or leads another way"
            found.append(change(name, text, "GB/s", remedy=remedy, where=_pairs(slow)))
        else:
            found.append(ok(name, text, "GB/s"))
        latencies = [pair["latency_s"] for pair in of if pair["latency_s"] is not None]
        if latencies:
            found.append(ok(f"{name}, small", f"{statistics.median(latencies) * 1e6:.1f}", "us"))
    return found


def judge_host_exchange(found: Mapping[str, Points], num_ranks: int) -> list[MachineFinding]:
    """Say what ranks of a host carry through shared memory: messages and sums, as measure/exchanges.py has them."""
    _, text = _told(found["messages"])
    return [
        ok("rank to rank, shared memory", text),
        ok(f"sum over {num_ranks} ranks", f"{found['sums'][-1][1] / 1e9:.2f}", "GB/s"),
    ]


def judge_sums(rates: Mapping[int, Points]) -> list[MachineFinding]:
    """Say the bus bandwidth of NCCL's sums by number of ranks."""
    return [ok(f"NCCL's sum over {num} GPUs", f"{points[-1][1] / 1e9:.0f}", "GB/s") for num, points in rates.items()]


def judge_products(wrong: Mapping[int, Sequence[str]], how: str) -> list[MachineFinding]:
    """Say whether fused products are right; `wrong` has by rank what is not."""
    bad = {rank: what for rank, what in wrong.items() if what}
    if not bad:
        return [ok("fused products", f"exact on {len(wrong)} ranks, {how}")]
    first = min(bad)
    remedy = "--parallel.tp-comm plain   # and send the archive: a link or a kernel is wrong"
    return [change("fused products", bad[first][0], remedy=remedy, where=places(list(bad)))]


def judge_gains(gains: Sequence[Mapping[str, float]]) -> list[MachineFinding]:
    """Say what fused products gain over products and their collectives, by size."""
    found = []
    for of in gains:
        name = f"fused products of {of['bytes'] / 1e6:.1f} MB"
        text = (
            f"{of['fused'] * 1e3:.2f} ms, apart {of['apart'] * 1e3:.2f}, the product alone {of['alone'] * 1e3:.2f}"
            f": {of['apart'] / of['fused']:.2f}x as fast"
        )
        if of is gains[-1] and of["fused"] > _MOST_RATIO * of["apart"]:
            found.append(change(name, text, remedy="--parallel.tp-comm plain   # apart is faster here"))
        else:
            found.append(ok(name, text))
    return found


def judge_gpu_clocks(clocks: Mapping[int, Mapping[str, Any]]) -> list[MachineFinding]:
    """Say what clocks GPUs hold at work; `clocks` has by rank "at_work_mhz" and "most_mhz", None where nobody tells."""
    known = {rank: of for rank, of in clocks.items() if of["at_work_mhz"] and of["most_mhz"]}
    if not known:
        return [unseen("GPU clocks", "the driver does not tell them", "nvidia-smi -q -d CLOCK")]
    shares = {rank: of["at_work_mhz"] / of["most_mhz"] for rank, of in known.items()}
    slowest = min(shares, key=lambda rank: shares[rank])
    text = f"{known[slowest]['at_work_mhz']} of {known[slowest]['most_mhz']} at work"
    low = [rank for rank, share in shares.items() if share < _LEAST_CLOCK]
    if low:
        remedy = "nvidia-smi -q -d PERFORMANCE   # what holds it back: power, heat, or a limit that was set"
        return [change("GPU clocks", text, "MHz", remedy=remedy, where=places(low))]
    return [ok("GPU clocks", text, "MHz")]


def judge_rates(found: Mapping[str, Any], dtype: str, *, is_gpu: bool) -> list[MachineFinding]:
    """Say what a rank computes and copies while all others do."""
    by_kind = found["rates"][dtype]["products"].values()
    products = [rate for by_rows in by_kind for points in by_rows.values() for _, rate in points]
    per_operator, _, launch = found["host"]
    copies = max(rate for _, rate in found["copies"])
    return [
        ok(f"products, {dtype}", f"{max(products) / 1e12:.3g}", "TFLOP/s a rank"),
        ok("memory", f"{copies / 1e9:.3g}", "GB/s a rank"),
        ok("host, an operator", f"{per_operator * 1e6:.1f}", "us"),
        *([ok("launch of a kernel", f"{launch * 1e6:.1f}", "us")] if is_gpu else []),
    ]


def _told(messages: Points) -> tuple[float, str]:
    """Return the rate of messages in bytes per second, and in words with the smallest one's time."""
    (_, latency), *_, (large, longest) = messages
    rate = large / longest
    return rate, f"{rate / 1e9:.2f} GB/s, a small message {latency * 1e6:.0f} us"


def _pairs(pairs: Sequence[Sequence[int]]) -> str:
    some = ", ".join(f"{one} and {other}" for one, other in pairs[:4])
    return f"ranks {some}" + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else "")
