"""Rung: pure, threads as ranks over a store in memory. Ranks that cannot go on, and what rank 0 says of them.

Processes, a real store and a rank that never comes are in test_start.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tpengine.distributed.launch import Launch
from tpengine.distributed.meeting import Meeting, prefix_of_attempt


class Ranks:
    """Threads that meet: what each has said and whether it goes on."""

    def __init__(self, world_size: int) -> None:
        self._store = dist.HashStore()
        self._world_size = world_size
        self.said: dict[int, list[str]] = {rank: [] for rank in range(world_size)}
        self.goes_on: dict[int, bool] = {}
        self.refused: list[str] = []
        self._threads: list[threading.Thread] = []

    def come(
        self,
        rank: int,
        mistake: str,
        clock: Callable[[], float] = time.monotonic,
        world_size: int | None = None,
        run: str = "",
    ) -> None:
        size = world_size or self._world_size
        meeting = Meeting(Launch(rank, size, rank, size, "nowhere", 1, run), {}, clock)
        meeting.store = self._store

        def meet() -> None:
            try:
                goes_on = meeting.agree(mistake, self.said.setdefault(rank, []).append)
            except ValueError as error:
                self.refused.append(str(error))
            else:
                self.goes_on[rank] = goes_on

        self._threads.append(threading.Thread(target=meet, daemon=True))
        self._threads[-1].start()

    def end(self) -> None:
        for thread in self._threads:
            thread.join()


def test_all_go_on_if_nobody_has_a_mistake() -> None:
    ranks = Ranks(3)
    for rank in range(3):
        ranks.come(rank, "")
    ranks.end()
    assert ranks.goes_on == {0: True, 1: True, 2: True} and not any(ranks.said.values())


def test_a_rank_of_another_run_leaves_and_disturbs_nobody() -> None:
    """Its own rank 0 has been refused the port, so it has come to the store of the run that was there before."""
    ranks = Ranks(2)
    for rank in range(2):
        ranks.come(rank, "")
    ranks.end()
    ranks.come(1, "")
    ranks.come(2, "", world_size=4)
    ranks.end()
    assert ranks.goes_on == {0: True, 1: True}
    for said, why in zip(
        sorted(ranks.refused), ("it has 2 ranks, this one 4", "its rank 1 was here first"), strict=True
    ):
        assert said.startswith("the port at which the ranks meet must be for this run only: nowhere:1 is another run's")
        assert why in said and "\n" not in said


@pytest.mark.parametrize(
    ("world_size", "run", "why"),
    [
        (4, "", "it has 2 ranks, this one 4"),
        (2, "SLURM's step 7.1", "it is SLURM's step 7.0, this one SLURM's step 7.1"),
    ],
)
def test_a_rank_of_another_run_that_comes_before_the_verdict_leaves_no_trace(
    world_size: int, run: str, why: str
) -> None:
    """Its mistake would end the run, its place would be taken for that of the rank that is still to come."""
    ranks = Ranks(2)
    ranks.come(1, "its own mistake", world_size=world_size, run=run)
    ranks.come(0, "", run="SLURM's step 7.0")
    while not ranks.refused and not ranks.goes_on:
        time.sleep(0.01)
    ranks.come(1, "", run="SLURM's step 7.0")
    ranks.end()
    assert ranks.goes_on == {0: True, 1: True} and not any(ranks.said.values())
    assert len(ranks.refused) == 1 and why in ranks.refused[0] and "\n" not in ranks.refused[0]


@pytest.mark.parametrize("runs", [("", "SLURM's step 7.0"), ("SLURM's step 7.0", "")])
def test_who_knows_no_run_is_of_any(runs: tuple[str, str]) -> None:
    ranks = Ranks(2)
    for rank, run in enumerate(runs):
        ranks.come(rank, "", run=run)
    ranks.end()
    assert ranks.goes_on == {0: True, 1: True}


def test_rank_0_says_every_mistake_of_the_others_once() -> None:
    ranks = Ranks(5)
    for rank, mistake in enumerate(("", "no file", "", "no file", "no\nGPU")):
        ranks.come(rank, mistake, clock=lambda: 0.0)  # so that nobody's patience ends
    ranks.end()
    assert not any(ranks.goes_on.values())
    assert ranks.said == {0: ["ranks 1, 3: no file; rank 4: no GPU"], 1: [], 2: [], 3: [], 4: []}


def test_a_mistake_of_rank_0s_own_is_known_before() -> None:
    ranks = Ranks(2)
    ranks.come(0, "a directory is taken")
    ranks.come(1, "")
    ranks.end()
    assert ranks.goes_on == {0: False, 1: False} and not any(ranks.said.values())


def test_who_comes_after_the_end_hears_of_it() -> None:
    ranks = Ranks(3)
    ranks.come(0, "")
    ranks.come(1, "no file")
    while not ranks.said[0]:
        time.sleep(0.01)
    ranks.come(2, "")
    ranks.end()
    assert ranks.goes_on == {0: False, 1: False, 2: False} and ranks.said[0] == ["rank 1: no file"]


def test_a_rank_that_hears_nothing_says_its_own_mistake_once() -> None:
    ranks, now = Ranks(2), [0.0]
    ranks.come(1, "no file", clock=lambda: now[0])
    time.sleep(0.2)
    assert not ranks.said[1]
    now[0] = 11.0
    while not ranks.said[1]:
        time.sleep(0.01)
    ranks.come(0, "")
    ranks.end()
    assert ranks.said[1] == ["no file"] and ranks.goes_on == {0: False, 1: False}


def test_nodes_of_different_restart_counts_meet_where_each_attempt_has_a_store_of_its_own() -> None:
    """torchrun counts on each node: a node that joins a run that has been restarted is behind the others."""
    counts = [{"TORCHELASTIC_RESTART_COUNT": count} for count in ("0", "2")]
    own, shared = ([{"TORCHELASTIC_USE_AGENT_STORE": use, **each} for each in counts] for use in ("False", "True"))
    assert prefix_of_attempt(own[0]) == prefix_of_attempt(own[1])
    assert prefix_of_attempt(shared[0]) != prefix_of_attempt(shared[1]), "words of the attempt before are heard"


def test_what_ranks_tell_is_known_to_all_and_who_is_awaited_is_named() -> None:
    store, told = dist.HashStore(), {}
    meetings = [Meeting(Launch(rank, 3, rank, 3, "nowhere", 1), {}) for rank in range(3)]
    values = [{"gpu": "NVIDIA H100", "processors": 132}, None, ["n7", 0.25]]
    threads = []

    def come(rank: int) -> None:
        meetings[rank].store = store

        def tell() -> None:
            told[rank] = meetings[rank].tell("facts", values[rank], clock=lambda: 7.0)

        threads.append(threading.Thread(target=tell, daemon=True))
        threads[-1].start()

    come(0)
    come(2)
    while meetings[0].explain(None) != ", waiting for rank 1" or meetings[2].explain(None) != ", waiting for rank 0":
        time.sleep(0.01)
    come(1)
    for thread in threads:
        thread.join()
    assert told == dict.fromkeys(range(3), values)
    assert {meeting.told_at for meeting in meetings} == {7.0} and not any(of.explain(None) for of in meetings)
