"""Rung: pure. What each way of a matmul with its exchange is predicted to take, by numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpkernels.fused import prediction
from tpkernels.fused.prediction import (
    collective_seconds,
    fused_all_reduce_seconds,
    fused_scatter_seconds,
    one_shot_seconds,
    plain_seconds,
    product_seconds,
    programs_seconds,
    pull_gather_seconds,
    pull_host_seconds,
    push_gather_seconds,
    push_host_seconds,
    slower,
    two_collectives_seconds,
)
from tpkernels.work import RATES, Rates, Work, link_seconds

# A launch takes 1000 s and a signal 100000; one operation, one byte in memory or on links 1 s.
SLOW = Rates(1.0, 1.0, 1.0, 1000.0, 100000.0)
# Launches and signals are as nothing, so that what is left is the overlap.
AT_ONCE = Rates(1.0, 1e30, 1.0, 0.0, 0.0)
amounts = st.integers(1, 10**6)
ranks = st.integers(2, 8)


def test_a_call_takes_the_slower_of_host_and_gpu_and_in_a_graph_the_gpus_time() -> None:
    assert (slower(2.0, 3.0, in_graph=False), slower(3.0, 2.0, in_graph=False)) == (3.0, 3.0)
    assert slower(2.0, 3.0, in_graph=True) == 2.0


def test_a_product_takes_its_busiest_processors_time_or_its_bytes() -> None:
    """38 multiply-adds on one of 4 processors, at 0.95 of 4 operations a second for all: 76 / 0.95."""
    rates = Rates(4.0, 2.0, 1.0, 0.0, 0.0)
    assert product_seconds(38, Work(memory_bytes=100), 4, rates) == pytest.approx(80)
    assert product_seconds(38, Work(memory_bytes=200), 4, rates) == pytest.approx(100)


def test_nothing_overlaps_where_collectives_exchange() -> None:
    matmul, scatter, gather = Work(flops=95), Work(link_bytes=80), Work(link_bytes=60)
    assert collective_seconds(scatter, 4, SLOW) == 1000 + 3 * 100000 + 80
    assert plain_seconds(matmul, scatter, 4, SLOW) == 2 * 1000 + 3 * 100000 + 80 + 95
    assert two_collectives_seconds(matmul, scatter, gather, 4, SLOW) == 3 * 1000 + 6 * 100000 + 80 + 60 + 95
    # 3 times 20 bytes over links; 4 partial results read and one sum written.
    assert one_shot_seconds(matmul, 20, 4, SLOW) == 3 * 1000 + 3 * 100000 + 60 + 100 + 95


def test_programs_are_slow_alone_and_bound_by_links_together() -> None:
    rates = Rates(1.0, 1.0, 370e9, 0.0, 0.0)
    assert programs_seconds(10**10, 7, rates) == pytest.approx(1 / 7)
    assert programs_seconds(10**10, 56, rates) == pytest.approx(1e10 / 296e9)


def test_a_push_comes_before_the_product() -> None:
    """7 peers of 10 MB by a program each: 1 ms."""
    rates = Rates(1.0, 1.0, 370e9, 0.25, 0.5)
    assert push_gather_seconds(2.0, Work(link_bytes=70_000_000), 8, 1, rates) == pytest.approx(2.751)


@given(amounts, amounts, ranks, st.integers(1, 8), st.sampled_from([0.0, 1e3]))
def test_a_pull_by_engines_computes_parts_as_they_come(
    product: int, link_bytes: int, world: int, num_splits: int, launch_seconds: float
) -> None:
    rates = Rates(1.0, 1e30, 1.0, launch_seconds, 0.0)
    num_copies = (world - 1) * num_splits
    copy_seconds = link_bytes / num_copies + 2 * launch_seconds
    now = product / world
    for i_copy in range(1, num_copies + 1):
        now = max(now, i_copy * copy_seconds) + product / world / num_splits
    seconds = pull_gather_seconds(product, Work(link_bytes=link_bytes), world, num_splits, rates, by_engine=True)
    assert seconds == pytest.approx(now + 2 * launch_seconds)


def test_a_pull_by_a_kernel_copies_with_a_program_for_each_split() -> None:
    """Between 2 ranks 4 programs move 80 GB in 2 s, 0.5 a split; a quarter of 8 s of product is left after the last."""
    rates = Rates(1.0, 1e30, 1e15, 0.25, 0.5)
    gather = Work(link_bytes=80 * 10**9)
    assert pull_gather_seconds(8.0, gather, 2, 4, rates, by_engine=False) == pytest.approx(1 + 8.0)
    assert pull_gather_seconds(1.0, gather, 2, 4, rates, by_engine=False) == pytest.approx(1 + 2 + 1 / 8)


def test_publishing_reads_and_writes_a_shard_at_its_real_speed() -> None:
    """Of an H100: 8 MB in 15 us, not in the 6 that its memory takes."""
    h100 = RATES["H100"]
    shard = Work(link_bytes=8_000_000)
    free = Rates(1e30, h100.memory_bytes_per_s, 1e30, 0.0, 0.0)
    copying = programs_seconds(8_000_000, 8, free)
    assert pull_gather_seconds(0.0, shard, 2, 8, free, by_engine=False) - copying == pytest.approx(15e-6, rel=0.02)


def test_the_host_waits_for_nothing_but_makes_every_launch_and_copy() -> None:
    """8 ranks; microseconds without the driver are those of benchmarks/results/host_time.jsonl."""
    assert pull_host_seconds(8, 1, by_engine=False) == pytest.approx(85e-6 + 3 * 3e-6)
    assert pull_host_seconds(8, 1, by_engine=True) == pytest.approx(256e-6 + 9 * 3e-6 + 14 * 5e-6, rel=0.01)
    assert pull_host_seconds(2, 1, by_engine=True) == pytest.approx(118e-6 + 3 * 3e-6 + 2 * 5e-6, rel=0.01)
    assert push_host_seconds(2) - push_host_seconds(1) == pytest.approx(16e-6)


@given(amounts, amounts, ranks)
def test_a_fused_scatter_sends_rows_while_it_computes_the_next(product: int, link_bytes: int, world: int) -> None:
    now = 0.0
    for i_owner in range(1, world):
        now = max(now, i_owner * product / world) + link_bytes / (world - 1)
    seconds = fused_scatter_seconds(product, Work(link_bytes=link_bytes), world, AT_ONCE)
    assert seconds == pytest.approx(max(now, product))


def test_a_fused_scatter_ends_with_a_sum_of_a_slot_per_peer() -> None:
    """A slot is an owner's rows: 3 were sent and are read, and 1 is written; own rows are in registers."""
    assert fused_scatter_seconds(0.0, Work(link_bytes=3), 4, Rates(1.0, 1.0, 1e30, 0.0, 0.0)) == pytest.approx(4)


def test_a_fused_all_reduce_publishes_and_fetches_the_sums() -> None:
    """7 peers of 10 MB by 8 programs each, at most 0.8 of the links."""
    rates = Rates(1.0, 1e30, 100e9, 0.25, 0.5)
    assert fused_all_reduce_seconds(2.0, Work(link_bytes=70_000_000), 8, rates) == pytest.approx(3 + 7e7 / 80e9)


def times_of(product: float, exchange: Work, world: int, rates: Rates) -> list[float]:
    pulled = [
        pull_gather_seconds(product, exchange, world, num_splits, rates, by_engine=by_engine)
        for num_splits in (1, 4)
        for by_engine in (False, True)
    ]
    pushed = push_gather_seconds(product, exchange, world, 1, rates)
    return [pushed, fused_scatter_seconds(product, exchange, world, rates), *pulled]


products, links = st.floats(0, 10), st.integers(0, 10**10)


@given(products, links, products, links, ranks, st.sampled_from(list(RATES.values())))
def test_more_work_never_takes_less_time(
    product: float, num_bytes: int, more_product: float, more_bytes: int, world: int, rates: Rates
) -> None:
    before = times_of(product, Work(link_bytes=num_bytes), world, rates)
    after = times_of(product + more_product, Work(link_bytes=num_bytes + more_bytes), world, rates)
    assert all(a >= b * (1 - 1e-9) for a, b in zip(after, before, strict=True))


@given(products, links, ranks, st.sampled_from(list(RATES.values())))
def test_nothing_is_faster_than_its_product_or_its_links(
    product: float, num_bytes: int, world: int, rates: Rates
) -> None:
    least = max(product, link_seconds(Work(link_bytes=num_bytes), rates))
    assert min(times_of(product, Work(link_bytes=num_bytes), world, rates)) > least


@pytest.mark.parametrize("name", ["_PUBLISH_SHARE", "_HOST_OF_PULL", "_HOST_OF_ENGINE_PER_PEER", "PROGRAM_BYTES_PER_S"])
def test_every_figure_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that is changed on purpose changes what is predicted."""

    def times() -> list[float]:
        gather = Work(link_bytes=10**7)
        gpu = [pull_gather_seconds(0.0, gather, 4, 2, RATES["H200"], by_engine=engine) for engine in (False, True)]
        return [*gpu, *(pull_host_seconds(4, 1, by_engine=engine) for engine in (False, True))]

    before = times()
    monkeypatch.setattr(prediction, name, getattr(prediction, name) / 2)
    assert times() != before
