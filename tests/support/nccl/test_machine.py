"""Rung: pure. The machine's rules, each by programs of two ranks or three that are written by hand."""

from __future__ import annotations

import pytest

from support.nccl.machine import Machine, NoProgress
from support.nccl.orders import order_cycle
from support.nccl.processors import NUM_SEEDS
from support.nccl.program import COMPUTE, COPIES, HostWait, Launch, Program, Word

BOTH = (0, 1)


def two(connected: bool = True) -> tuple[Program, Program]:
    return Program(0, connected), Program(1, connected)


def run(*programs: Program, seed: int = 0, processors: int = 132) -> float:
    return Machine([program.words for program in programs], seed, processors).run()


def test_a_sum_begins_when_all_members_are_there_and_a_wait_holds_what_is_later() -> None:
    first, second = two()
    second.compute("slow", 5.0)
    for program in (first, second):
        total = program.collective("sum", "sum", "dp", BOTH, 2.0)
        program.compute("beside", 1.0)
        program.wait("sum", total)
        program.compute("behind", 1.0)
    machine = Machine([first.words, second.words])
    assert machine.run() == 8.0
    # Rank 0 computes beside it, and holds what is behind the wait back.
    assert [machine.ended[0, place] for place in (1, 3)] == [(0.0, 1.0), (7.0, 8.0)]


def test_operations_of_a_communicator_run_one_after_another() -> None:
    first, second = two()
    for program in (first, second):
        for name in ("dp", "dp", "tp"):
            program.collective(name, "sum", name, BOTH, 2.0)
    assert run(first, second) == 4.0


def messages(first: Program, second: Program, first_sends: bool, second_sends: bool, group: str = "pp") -> None:
    first.messages("a", group, BOTH, [(first_sends, 1)], 1.0)
    second.messages("b", group, BOTH, [(second_sends, 0)], 1.0)


def test_nothing_is_sent_before_it_is_received() -> None:
    first, second = two()
    messages(first, second, True, True)
    messages(first, second, False, False)
    with pytest.raises(NoProgress, match="rank 0: a: send to rank 1 over pp has begun, the others have not"):
        run(first, second)
    assert "rank 0's a" in order_cycle([first.words, second.words])


def test_communicators_of_their_own_do_not_wait_for_each_other() -> None:
    first, second = two()
    for program, groups in ((first, "FB"), (second, "BF")):
        for group in groups:
            program.collective(group, "sum", group, BOTH, 1.0)
    assert run(first, second) == 1.0
    # But only if both fit onto the GPU.
    cycle = order_cycle([first.words, second.words])
    assert cycle.count("before") == 2 and "rank 0's F (sum of F) = rank 1's F (sum of F)" in cycle


def test_two_sums_the_other_way_round_need_processors_for_both() -> None:
    first, second = two()
    for program, groups in ((first, "FB"), (second, "BF")):
        for group in groups:
            program.collective(group, "sum", group, BOTH, 1.0, processors=70)
    assert run(first, second, processors=140) == 1.0
    # Whoever comes second keeps the processors that he could get.
    with pytest.raises(NoProgress, match="has 62 of 70 processors, 0 are free"):
        for seed in range(NUM_SEEDS):
            run(first, second, seed=seed)


def test_a_kernel_with_fewer_processors_runs_longer() -> None:
    first, second = two()
    second.compute("slow", 10.0)
    for program in (first, second):
        program.collective("sum", "sum", "dp", BOTH, 1.0, processors=32)
    first.compute("product", 4.0, processors=132)
    machine = Machine([first.words, second.words], seed=2)
    machine.run()
    # Two rounds of programs, since a hundred processors are left.
    assert machine.ended[0, 1] in ((0.0, 8.0), (0.0, 4.0))


def fused(product: int) -> list[Word]:
    """A product that waits for copies, which need one processor."""
    there = (("there",),)
    return [
        Launch("F", "the copies", COPIES, 1.0, 1, 1, ends=there),
        Launch("F", "the product", COMPUTE, 1.0, product, 1, awaits=there),
    ]


def test_a_product_that_takes_every_processor_waits_for_copies_that_get_none() -> None:
    assert {Machine([fused(131)], seed).run() for seed in range(NUM_SEEDS)} == {2.0}
    with pytest.raises(NoProgress, match="the copies has 0 of 1 processors, 0 are free"):
        Machine([fused(132)], seed=0).run()


def test_a_communicator_is_made_by_all_its_members() -> None:
    first, second, third = (Program(rank, connected=False) for rank in range(3))
    first.messages("send", "pp", (0, 1, 2), [(True, 1)], 1.0)
    second.messages("receive", "pp", (0, 1, 2), [(False, 0)], 1.0)
    with pytest.raises(NoProgress, match="rank 0: send: its host waits for the communicator of pp, without rank 2"):
        run(first, second, third)
    third.messages("receive", "pp", (0, 1, 2), [(False, 0)], 1.0)
    # Its own connection waits for rank 0, but the others have theirs.
    with pytest.raises(NoProgress, match="rank 2: receive: its host waits for the connection of pp, without rank 0"):
        run(first, second, third)


def test_the_host_waits_for_its_device() -> None:
    first, second = two()
    first.wait("wait", first.messages("a", "pp", BOTH, [(False, 1)], 1.0))
    first.add(HostWait("read"))
    first.messages("later", "F", BOTH, [(True, 1)], 1.0)
    second.wait("wait", second.messages("first", "F", BOTH, [(False, 0)], 1.0))
    second.messages("b", "pp", BOTH, [(True, 0)], 1.0)
    with pytest.raises(NoProgress, match="rank 0: read: its host waits for its device"):
        run(first, second)
