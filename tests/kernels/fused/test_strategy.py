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
from tpkernels.fused.configs import _HOPPER, estimated, exchange_config
from tpkernels.fused.strategy import (
    Operation,
    _Call,
    _num_splits,
    _Room,
    decide,
    decided,
    decided_all_reduce,
    predicted,
)
from tpkernels.launch import Target
from tpkernels.work import RATES, Rates, rates_of

H200 = RATES["H200"]
OPERATIONS: tuple[Operation, ...] = ("gather", "scatter")

GENERATION_BYTES = 256 << 20


def room_of(world: int, rates: Rates | None = H200, **room: int) -> _Room:
    sizes = {"slot_bytes": GENERATION_BYTES // world, "generation_bytes": GENERATION_BYTES}
    return _Room(**{"world": world, "split_bytes": 8 << 20, "engine_bytes": 8 << 20, "rates": rates} | sizes | room)


def call_of(op: Operation, tokens: int, width: int, inner: int, *, in_graph: bool = False) -> _Call:
    return _Call(op, tokens, (width,), inner, torch.bfloat16, Target("cuda", 90), in_graph)


def chosen(op: Operation, tokens: int, width: int, inner: int, world: int, *, in_graph: bool = False) -> str:
    """What "auto" does with sizes, on H200s."""
    decision = decided("auto", call_of(op, tokens, width, inner, in_graph=in_graph), room_of(world))
    return "plain" if decision is None else "push" if decision.pushes else "fused"


operations = st.sampled_from(OPERATIONS)
gpus = st.sampled_from(list(RATES.values()))
worlds = st.integers(2, 8)
sizes = st.integers(1, 1 << 15)


@given(operations, sizes, sizes, sizes, gpus, st.booleans())
def test_one_rank_has_nothing_to_fuse(
    op: Operation, tokens: int, width: int, inner: int, rates: Rates, in_graph: bool
) -> None:
    assert list(predicted(call_of(op, tokens, width, inner, in_graph=in_graph), room_of(1, rates))) == ["plain"]


@given(sizes, sizes, sizes, worlds, gpus)
def test_only_a_gather_is_pushed(tokens: int, width: int, inner: int, world: int, rates: Rates) -> None:
    room = room_of(world, rates)
    assert list(predicted(call_of("scatter", tokens, width, inner), room)) == ["plain", "fused"]
    assert list(predicted(call_of("gather", tokens, width, inner), room)) == ["plain", "push", "fused"]


@given(operations, sizes, sizes, sizes, worlds)
def test_few_tokens_are_plain_until_fusing_them_has_been_measured(
    op: Operation, tokens: int, width: int, inner: int, world: int
) -> None:
    assert chosen(op, min(tokens, 2047), width, inner, world) == "plain"


@given(operations, sizes, sizes, sizes, worlds)
def test_a_captured_call_is_the_fastest_that_the_gpu_can_do(
    op: Operation, tokens: int, width: int, inner: int, world: int
) -> None:
    """In a graph the host takes no time: nothing is slower than in a call of its own, and the choice is the fastest."""
    room = room_of(world)
    by_host = predicted(call_of(op, tokens, width, inner), room)
    times = predicted(call_of(op, tokens, width, inner, in_graph=True), room)
    assert all(times[name] <= seconds for name, seconds in by_host.items())
    assert times[chosen(op, tokens, width, inner, world, in_graph=True)] == min(times.values())


@pytest.mark.parametrize(
    ("op", "tokens", "width", "inner", "in_graph", "strategy"),
    [
        ("gather", 8192, 28672 // 8, 4096, False, "fused"),
        ("scatter", 8192, 4096, 14336 // 8, False, "fused"),
        # 73 us of GPU and 85 of host: a pull is 117 us of GPU.
        ("gather", 2048, 6144 // 8, 4096, False, "plain"),
        ("scatter", 2048, 4096, 4096 // 8, False, "fused"),
        ("scatter", 2047, 4096, 4096 // 8, False, "plain"),
        ("scatter", 2047, 4096, 4096 // 8, True, "fused"),
        ("gather", 16, 6144 // 8, 4096, True, "plain"),
    ],
)
def test_llama_3_8b_between_8_ranks(
    op: Operation, tokens: int, width: int, inner: int, in_graph: bool, strategy: str
) -> None:
    assert chosen(op, tokens, width, inner, 8, in_graph=in_graph) == strategy


def test_engines_fetch_where_the_host_has_the_time() -> None:
    """At 8 ranks engines cost the host 353 us; the qkv of 8,192 tokens is 219, gate and up of 65,536 tokens 3,500."""
    qkv, gate_up = (
        decided("auto", call_of("gather", *sizes, 4096), room_of(8)) for sizes in ((8192, 768), (65536, 3584))
    )
    assert qkv is not None and not qkv.by_engine
    assert gate_up is not None and gate_up.by_engine


@given(operations, st.integers(0, 3), st.integers(4, 8), st.booleans())
def test_many_tokens_are_fused(op: Operation, size: int, world: int, in_graph: bool) -> None:
    """Shares of the features are small here: with a large share there is little to hide, and plain may be as good.

    So it is between few ranks, each of which publishes many rows.
    """
    tokens, share, hidden = (world << 13) << (size // 2), 1024, 4096 << (size % 2)
    columns, inner = (share, hidden) if op == "gather" else (hidden, share)
    assert decided("auto", call_of(op, tokens, columns, inner, in_graph=in_graph), room_of(world)) is not None


@given(sizes, sizes, sizes, worlds, st.sampled_from(["fused", "push"]))
def test_what_is_predicted_is_what_is_executed(tokens: int, width: int, inner: int, world: int, strategy: str) -> None:
    """A split has whole tiles, and no shard more splits than a piece of it has flags."""
    decision = decided(strategy, call_of("gather", tokens, width, inner), room_of(world))
    assert decision is not None
    config = exchange_config(
        -(-tokens // world), width, inner, world, torch.bfloat16, Target("cuda", 90), beside_copies=True
    )
    assert decision.split_rows % config.block_m == 0
    splits = [max(-(-rows // decision.split_rows), 1) for _, rows in decision.pieces]
    assert max(splits) <= 8 and _num_splits(decision) == sum(splits)


def test_splits_of_engines_are_of_8_mib_and_those_of_a_kernel_are_eighths() -> None:
    """Shards of 32 MiB: 4096 rows of 4096 columns, whose first 1024 are 8 MiB."""
    call = call_of("gather", 8 * 4096, 3584, 4096)
    engine, kernel = (decided("fused", call, room_of(8, engine_bytes=at)) for at in (0, 1 << 40))
    assert engine is not None and kernel is not None
    assert (engine.split_rows, _num_splits(engine)) == (1024, 4)
    assert (kernel.split_rows, _num_splits(kernel)) == (512, 8)


def all_reduce(tokens: int, *, strategy: str = "auto", in_graph: bool = False, **room: Any) -> str:
    """What is done with [tokens, 512] @ [512, 4096] between 8 ranks."""
    return decided_all_reduce(strategy, call_of("scatter", tokens, 4096, 512, in_graph=in_graph), room_of(8, **room))


def test_an_all_reduce_is_decided_as_a_whole() -> None:
    # The host has one collective less to make; the bytes of 1,024 tokens cost more than that.
    assert [all_reduce(tokens) for tokens in (1, 256, 1024)] == ["one_shot", "one_shot", "two_collectives"]
    # In a graph the scatter hides links, and the host's two kernels more do not count.
    assert [all_reduce(tokens, in_graph=True) for tokens in (1, 2048)] == ["one_shot", "kernels"]
    assert [all_reduce(tokens) for tokens in (2047, 2048, 8192)] == ["two_collectives", "kernels", "two_collectives"]
    assert all_reduce(2048, in_graph=True, slot_bytes=8191) == "two_collectives"


def test_an_all_reduce_is_by_kernels_where_they_are_named_and_never_where_they_are_not() -> None:
    assert all_reduce(1, strategy="fused") == all_reduce(1, strategy="push") == "kernels"
    assert all_reduce(2048, in_graph=True, strategy="plain") == "two_collectives"
    assert all_reduce(1, strategy="plain") == "one_shot"
    assert all_reduce(1, rates=None) == "two_collectives"


def chosen_by_a_rank(shapes: list[tuple[int, int, int]]) -> list[str]:
    return [chosen(op, *shape, 8) for shape in shapes for op in OPERATIONS]


def test_every_rank_chooses_alike(ranks: RankPool) -> None:
    shapes = [(tokens, columns, 4096) for tokens in (16, 2570, 4096, 8192) for columns in (512, 3584)]
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
    h100, a100, b200, b300, consumer = (
        exchange_config(4096, 4096, 4096, 8, torch.bfloat16, Target("cuda", arch)) for arch in (90, 80, 100, 103, 120)
    )
    assert h100.block_k == 64 and a100.block_k == 32
    assert b200 == b300 == h100
    assert consumer == a100


def test_a_last_round_counts_in_full() -> None:
    """132 tiles are one round of 132 processors, 133 are two; a program's products hide the overhead of another one.

    Tiles of 128 x 256 x 1000 have 32,768,000 multiply-adds, and cost 7,000,000 beside them.
    """
    large, half = (choice.config for choice in _HOPPER[:2])
    assert estimated(large, 1.0, 132, 1000, 132, 1) == 32_768_000 + 7_000_000
    assert estimated(large, 1.0, 133, 1000, 132, 1) == 2 * (32_768_000 + 7_000_000)
    assert estimated(half, 0.5, 3 * 132, 1000, 132, 2) == 3 * 32_768_000 + 7_000_000
    # A tile of a tenth of the depth hides part of it.
    assert estimated(half, 0.5, 3 * 132, 100, 132, 2) == 3 * 3_276_800 + 7_000_000 + (7_000_000 - 3_276_800)
    assert estimated(large, 1.0, 0, 1000, 132, 1) == estimated(half, 0.5, 0, 1000, 132, 2)


@pytest.mark.parametrize(
    ("tokens", "width", "inner", "world", "block_n"),
    [
        # Llama 3 8B's qkv, 8 ranks, 8,192 tokens: 192 tiles of 256 columns are two rounds, 73 % of them used; 384 tiles
        # of 128 are three.
        (8192, 768, 4096, 8, 128),
        # Half as many tokens: 96 tiles are one round.
        (4096, 768, 4096, 8, 256),
        # 70B's qkv: 160 tiles use 61 %.
        (4096, 1280, 8192, 8, 128),
        # 1,792 tiles are 14 rounds, 98 % of them used.
        (8192, 7168, 8192, 8, 256),
    ],
)
def test_tiles_are_narrower_where_that_fills_the_last_round(
    tokens: int, width: int, inner: int, world: int, block_n: int
) -> None:
    target = Target("cuda", 90)
    config = exchange_config(tokens // world, width, inner, world, torch.bfloat16, target, beside_copies=True)
    assert (config.block_m, config.block_n) == (128, block_n)


@pytest.mark.parametrize(("depth", "block_n", "together"), [(512, 128, 2), (1792, 256, 1)])
def test_few_products_per_tile_take_two_programs_per_processor(depth: int, block_n: int, together: int) -> None:
    """Llama 3 8B's out and down on 8 ranks, 8,192 tokens: what a tile costs beside its products counts for out."""
    for arch in (90, 100):
        target = Target("cuda", arch)
        config = exchange_config(1024, 4096, depth, 8, torch.bfloat16, target)
        assert config.block_n == block_n and config.programs_per_processor(2, target) == together


def test_only_strategies_that_exist_are_taken() -> None:
    for name in ("auto", "plain", "fused", "push"):
        assert checked(name) == name
    for name in ("", "Fused", "pull"):
        with pytest.raises(ValueError, match=f"strategy must be auto, plain, fused or push: got '{name}'"):
            checked(name)


def arena_of(**room: Any) -> Any:
    return SimpleNamespace(
        **{"world": 2, "slot_bytes": 256, "generation_bytes": 512, "split_bytes": 1, "engine_bytes": 0, "rates": H200}
        | {"reserved_processors": 0}
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
