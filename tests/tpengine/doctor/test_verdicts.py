"""Rung: pure. What measurements mean: wrong bytes, slow links, clocks apart, a directory that others do not see."""

from __future__ import annotations

from typing import Any

import pytest

from tpengine.doctor import verdicts
from tpengine.doctor.finding import MachineFinding

HOST_OF = {0: 0, 1: 0, 2: 1, 3: 1}
ROOM = 10**12


def the_change(found: list[MachineFinding]) -> MachineFinding:
    (finding,) = [finding for finding in found if finding.verdict == "change"]
    return finding


def is_fine(found: list[MachineFinding]) -> bool:
    return bool(found) and all(finding.verdict == "ok" for finding in found)


def test_a_directory_that_a_host_does_not_see_is_not_shared() -> None:
    assert is_fine(verdicts.judge_directory("runs", {0: [0, 2], 2: [0, 2]}, [0, 2], ROOM, HOST_OF))
    finding = the_change(verdicts.judge_directory("runs", {0: [0], 2: [2]}, [0, 2], ROOM, HOST_OF))
    assert finding.where == "hosts 0, 1" and "--run-dir" in finding.remedy
    assert the_change(verdicts.judge_directory("runs", {0: [0, 2], 2: [2]}, [0, 2], ROOM, HOST_OF)).where == "host 1"


def test_a_directory_of_one_host_needs_nobody_else_but_room() -> None:
    assert is_fine(verdicts.judge_directory("runs", {0: [0]}, [0], ROOM, HOST_OF))
    assert the_change(verdicts.judge_directory("runs", {0: [0]}, [0], 10**9, HOST_OF)).what == "room in it"


@pytest.mark.parametrize(("seconds", "within", "is_apart"), [(0.9, 0.0, False), (-1.5, 0.1, True), (1.5, 0.6, False)])
def test_clocks_are_apart_only_if_the_way_there_does_not_explain_it(
    seconds: float, within: float, is_apart: bool
) -> None:
    (finding,) = verdicts.judge_clocks([{"rank": 2, "seconds": seconds, "within": within}], HOST_OF)
    assert finding.where == "host 1" and (finding.verdict == "change") == is_apart


def pair(ranks: tuple[int, int], rate: float = 3e11, **others: Any) -> dict[str, Any]:
    return {"ranks": ranks, "how": "copy engine", "rate": rate, "latency_s": 2e-6, "wrong": "", **others}


def test_a_slow_pair_and_wrong_bytes_are_named() -> None:
    pairs = [pair((0, 1)), pair((1, 0)), pair((2, 3)), pair((3, 2))]
    assert is_fine(verdicts.judge_pairs(pairs))
    slow = the_change(verdicts.judge_pairs([*pairs, pair((0, 2), 2e10)]))
    assert slow.where == "ranks 0 and 2" and "nvlink" in slow.remedy
    wrong = the_change(verdicts.judge_pairs([*pairs, pair((0, 2), wrong="number 7 as 8")]))
    assert (wrong.value, wrong.where) == ("number 7 as 8", "ranks 0 and 2") and "NCCL_P2P_DISABLE" in wrong.remedy
    # Each way is judged among its own: NCCL may be slower than copies.
    assert is_fine(verdicts.judge_pairs([*pairs, pair((0, 1), 2e10, how="NCCL")]))


def test_a_network_below_ten_gigabits_is_said() -> None:
    fast = {"hosts": [0, 1], "how": "NCCL", "messages": [(4096.0, 1e-5), (1.6e7, 1e-3)], "wrong": []}
    slow = {**fast, "messages": [(4096.0, 1e-4), (1.6e7, 1e-1)]}
    assert is_fine(verdicts.judge_network([fast], True))
    assert "NCCL_IB_HCA" in the_change(verdicts.judge_network([slow], True)).remedy
    assert "NCCL_SOCKET_IFNAME" in the_change(verdicts.judge_network([slow], False)).remedy


def test_wrong_bytes_between_hosts_are_said_before_how_fast_they_came() -> None:
    pair = {"hosts": [0, 1], "how": "gloo", "messages": [(4096.0, 1e-5), (1.6e7, 1e-3)], "wrong": ["rank 2 got 7 as 8"]}
    finding = the_change(verdicts.judge_network([pair], False))
    assert finding.value == "rank 2 got 7 as 8" and finding.where == "hosts 0, 1" and "ethtool" in finding.remedy
    assert "NCCL_NET_GDR_LEVEL" in the_change(verdicts.judge_network([{**pair, "how": "NCCL"}], False)).remedy


def test_a_wrong_product_is_named_by_rank() -> None:
    assert is_fine(verdicts.judge_products({0: [], 1: []}, "through shared memory"))
    finding = the_change(verdicts.judge_products({0: [], 1: ["all_gather_matmul: 3 of 9 elements of y"]}, ""))
    assert finding.where == "rank 1" and "tp-comm plain" in finding.remedy


def test_the_largest_fused_product_decides_whether_it_is_worth_it() -> None:
    good = {"bytes": 1e6, "fused": 1e-3, "apart": 2e-3, "alone": 5e-4}
    bad = {**good, "fused": 3e-3}
    assert is_fine(verdicts.judge_gains([bad, good]))
    assert "tp-comm plain" in the_change(verdicts.judge_gains([good, bad])).remedy


def test_clocks_far_below_their_highest_are_held_back() -> None:
    def clocks(*at_work: int | None) -> dict[int, dict[str, Any]]:
        return {rank: {"at_work_mhz": mhz, "most_mhz": 1980} for rank, mhz in enumerate(at_work)}

    assert is_fine(verdicts.judge_gpu_clocks(clocks(1900, 1700)))
    assert the_change(verdicts.judge_gpu_clocks(clocks(1900, 600))).where == "rank 1"
    assert [finding.verdict for finding in verdicts.judge_gpu_clocks(clocks(None, None))] == ["unseen"]
