"""Rung: gloo ranks. What other ranks send is text, and is never unpickled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool

from tpengine.distributed.agreement import all_gather_json, broadcast_json, gather_bytes

VALUES = [None, {"paths": ["/a/\udcff", "é" * 70_000], "cut": (1, 2)}, [0.1, float("inf"), -(2**62), True, ""]]


def exchanged() -> dict[str, Any]:
    rank = dist.get_rank()
    # Every rank belongs to one pair at most; all make both groups.
    pairs = [dist.new_group(members) for members in ([0, 1], [2])]
    pair = pairs[rank // 2]
    return {
        "all": all_gather_json(VALUES[rank]),
        "of group": all_gather_json(rank, pair),
        "told": [broadcast_json(value if rank == 0 else None) for value in VALUES],
        "told in group": broadcast_json(rank, pair),
        "bytes": gather_bytes(bytes([rank]) * (1 + rank * 1000)),
        "bytes in group": gather_bytes(b"x" * (rank + 1), pair),
    }


def test_every_value_reaches_every_rank_as_json_gives_it_back(ranks: RankPool) -> None:
    first, second, third = ranks.run(exchanged, 3)
    as_json = [None, {**VALUES[1], "cut": [1, 2]}, VALUES[2]]  # type: ignore[dict-item]
    for answers in (first, second, third):
        assert answers["all"] == as_json
        assert answers["told"] == as_json
    assert first["of group"] == second["of group"] == [0, 1]
    assert third["of group"] == [2]
    # Rank 0 of a group, not rank 0 of all.
    assert [answers["told in group"] for answers in (first, second, third)] == [0, 0, 2]
    assert first["bytes"] == [b"\x00", b"\x01" * 1001, b"\x02" * 2001]
    assert second["bytes"] == third["bytes"] == second["bytes in group"] == []
    assert (first["bytes in group"], third["bytes in group"]) == ([b"x", b"xx"], [b"xxx"])


def with_a_pickle_of_rank_1() -> str:
    """What `all_gather_json` makes of a rank that sends a pickle, as torch's object collectives do."""
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="0x80") as caught:
            all_gather_json("honest")
        return str(caught.value)
    text = b"\x80\x04N.".ljust(len('"honest"'), b"\0")
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(lengths, torch.tensor([4]))
    texts = [torch.zeros(len(text), dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(texts, torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return ""


def test_a_pickle_from_another_rank_is_refused(ranks: RankPool) -> None:
    refusal, _ = ranks.run(with_a_pickle_of_rank_1, 2)
    assert refusal
