"""Rung: pure, and gloo ranks for one test. Which strategy is chosen; whether it was the fastest, only GPUs show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.strategies import checked
from tpkernels.fused.configs import exchange_config
from tpkernels.fused.strategy import Operation, choose, decide, decided, predicted, splits_of
from tpkernels.launch import Target
from tpkernels.work import RATES, Rates, rates_of

H200 = RATES["H200"]
OPERATIONS: tuple[Operation, ...] = ("gather", "scatter")

operations = st.sampled_from(OPERATIONS)
gpus = st.sampled_from(list(RATES.values()))
worlds = st.integers(2, 8)
sizes = st.integers(1, 1 << 15)


@given(operations, sizes, sizes, sizes, gpus)
def test_one_rank_has_nothing_to_fuse(op: Operation, rows: int, columns: int, inner: int, rates: Rates) -> None:
    assert choose(op, rows, columns, inner, 1, 2, rates) == "plain"
    assert splits_of(rows, columns, inner, 1, 2, rates) == 1


@given(sizes, sizes, sizes, worlds, gpus)
def test_only_a_gather_is_pushed(rows: int, columns: int, inner: int, world: int, rates: Rates) -> None:
    assert list(predicted("scatter", rows, columns, inner, world, 2, rates)) == ["plain", "fused"]
    assert sorted(predicted("gather", rows, columns, inner, world, 2, rates)) == ["fused", "plain", "push"]


@given(operations, sizes, sizes, sizes, worlds, gpus)
def test_the_choice_is_the_fastest(
    op: Operation, rows: int, columns: int, inner: int, world: int, rates: Rates
) -> None:
    times = predicted(op, rows, columns, inner, world, 2, rates)
    assert times[choose(op, rows, columns, inner, world, 2, rates)] == min(times.values())


@pytest.mark.parametrize("world", [2, 4, 8])
def test_few_tokens_are_pushed_or_plain(world: int) -> None:
    """Sizes of Llama 3 8B's feed-forward, gate and up together."""
    for rows in (1, 7, 16, 32):
        assert choose("gather", rows, 28672 // world, 4096, world, 2, H200) in ("plain", "push")
        assert choose("scatter", rows, 4096, 14336 // world, world, 2, H200) == "plain"


def test_a_push_pays_between_few_tokens_and_many() -> None:
    """8 ranks, 1024 columns of 4096."""
    chosen = [choose("gather", rows, 1024, 4096, 8, 2, H200) for rows in (64, 256, 512, 1 << 14)]
    assert chosen == ["push", "push", "push", "fused"]


big = st.integers(1024, 8192)


@given(operations, st.integers(1 << 15, 1 << 18), st.integers(2048, 8192), st.integers(1024, 2048), worlds, gpus)
def test_many_tokens_are_fused(op: Operation, rows: int, hidden: int, share: int, world: int, rates: Rates) -> None:
    """Shares of the features are small here. With a large share there is little to hide, and plain may be as good."""
    columns, inner = (share, hidden) if op == "gather" else (hidden, share)
    assert choose(op, rows, columns, inner, world, 2, rates) == "fused"


@given(operations, sizes, sizes, sizes, st.integers(1, 8), gpus, st.integers(0, 2), st.integers(1, 4096))
def test_larger_sizes_never_take_less_time(
    op: Operation, rows: int, columns: int, inner: int, world: int, rates: Rates, which: int, more: int
) -> None:
    larger = [rows, columns, inner]
    larger[which] += more
    before = predicted(op, rows, columns, inner, world, 2, rates)
    after = predicted(op, larger[0], larger[1], larger[2], world, 2, rates)
    assert all(after[name] >= seconds * (1 - 1e-9) for name, seconds in before.items())


@given(operations, st.integers(1, 64), st.integers(1, 64), big, big, worlds, gpus)
def test_what_is_worth_fusing_stays_so_with_more_tokens(
    op: Operation, tiles: int, more: int, columns: int, inner: int, world: int, rates: Rates
) -> None:
    """Shards are whole tiles: one more row would begin another tile, which costs a fused matmul one on each rank."""
    rows = 1024 + 64 * world * tiles
    rows -= rows % (64 * world)
    if choose(op, rows, columns, inner, world, 2, rates) == "fused":
        assert choose(op, rows + 64 * world * more, columns, inner, world, 2, rates) != "plain"


@given(sizes, sizes, sizes, worlds, gpus)
def test_a_split_has_a_tile_of_rows(rows: int, columns: int, inner: int, world: int, rates: Rates) -> None:
    num_splits = splits_of(rows, columns, inner, world, 2, rates)
    assert num_splits in (1, 2, 4, 8)
    assert num_splits == 1 or rows / world / num_splits >= 64


def test_two_ranks_split_what_the_own_shard_does_not_hide() -> None:
    """The one copy of a gather between two ranks would all come before half of the matmul."""
    assert splits_of(1 << 16, 1024, 8192, 2, 2, H200) > 1
    assert splits_of(1 << 14, 8192, 8192, 8, 2, H200) == 1


def chosen_by_a_rank(shapes: list[tuple[int, int, int]]) -> list[str]:
    return [choose(op, *shape, 8, 2, H200) for shape in shapes for op in OPERATIONS]


def test_every_rank_chooses_alike(ranks: RankPool) -> None:
    shapes = [(rows, columns, 4096) for rows in (16, 257, 1000, 4096) for columns in (512, 3584)]
    first, *others = ranks.run(chosen_by_a_rank, 3, shapes)
    assert others == [first] * 2
    assert len(set(first)) > 1


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H20", None),
        ("NVIDIA L40S", None),
        ("NVIDIA B300 SXM6 AC", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("", None),
    ],
)
def test_a_gpu_is_known_by_a_word_of_its_name(name: str, model: str | None) -> None:
    assert rates_of(name) is (RATES[model] if model else None)


def test_tiles_of_every_hopper_and_blackwell_of_a_data_centre_are_the_same() -> None:
    h100, a100 = (exchange_config(4096, 4096, 8, torch.bfloat16, Target("cuda", arch)) for arch in (90, 80))
    assert h100.block_k == 64 and a100.block_k == 32
    for arch in (100, 103):
        assert exchange_config(4096, 4096, 8, torch.bfloat16, Target("cuda", arch)) == h100
    assert exchange_config(4096, 4096, 8, torch.bfloat16, Target("cuda", 120)) == a100


def test_only_strategies_that_exist_are_taken() -> None:
    for name in ("auto", "plain", "fused", "push"):
        assert checked(name) == name
    for name in ("", "Fused", "pull"):
        with pytest.raises(ValueError, match=f"strategy must be auto, plain, fused or push: got '{name}'"):
            checked(name)


def arena_of(**room: Any) -> Any:
    return SimpleNamespace(
        **{"world": 2, "slot_bytes": 256, "generation_bytes": 512, "split_bytes": 1, "engine_bytes": 0, "rates": H200}
        | room
    )


def test_a_decision_is_made_once_for_a_shape_a_dtype_and_a_group() -> None:
    decided.cache_clear()
    x, wider = torch.ones(9, 16), torch.ones(9, 16, dtype=torch.float64)
    for operand, num_tokens, room in (
        (x, 18, {}),
        (x, 18, {}),
        (wider, 18, {}),
        (x, 20, {}),
        (x, 18, {"slot_bytes": 128}),
    ):
        assert decide(arena_of(**room), "fused", "gather", operand, num_tokens, [8], 16) is not None
    assert (decided.cache_info().misses, decided.cache_info().hits) == (4, 1)


@pytest.mark.parametrize(
    ("strategy", "operation", "pushes", "rows"),
    [
        ("fused", "gather", False, 8),
        ("push", "gather", True, 4),
        ("fused", "scatter", False, 8),
        ("push", "scatter", False, 8),
    ],
)
def test_pieces_fill_the_room_that_their_way_has(strategy: str, operation: Operation, pushes: bool, rows: int) -> None:
    """Rows of 64 bytes to gather, of 32 to scatter; pulled from 512 bytes, pushed or scattered into slots of 256."""
    decision = decide(arena_of(), strategy, operation, torch.ones(9, 16), 18, [8], 16)
    assert decision is not None and decision.pushes == pushes
    assert decision.pieces == tuple((first, min(rows, 9 - first)) for first in range(0, 9, rows))


def test_no_kernels_where_none_are_asked_for_or_none_can_be_chosen() -> None:
    x = torch.ones(9, 16)
    assert decide(arena_of(), "plain", "gather", x, 18, [8], 16) is None
    assert decide(arena_of(rates=None), "auto", "gather", x, 18, [8], 16) is None
    assert decide(arena_of(slot_bytes=32), "auto", "gather", x, 18, [8], 16) is None
    with pytest.raises(ValueError, match="rows of 64 bytes, room for 32"):
        decide(arena_of(slot_bytes=32), "fused", "gather", x, 18, [8], 16)
