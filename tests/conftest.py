"""Fixtures of the whole suite: the pool of ranks, and the count of mutations that the summary ends with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from rank_pool import RankPool
from rungs import Rung


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on several gloo ranks: `ranks.run(function, world, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def interpreters() -> Iterator[RankPool]:
    """Ranks whose Triton kernels are interpreted. Here they are not: an interpreted function cannot be compiled."""
    pool = RankPool({"TRITON_INTERPRET": "1"})
    yield pool
    pool.close()


@pytest.fixture
def rung(request: pytest.FixtureRequest, interpreters: RankPool) -> Rung:
    """Where a check of an operator runs; parametrized by `rungs.every_rung`."""
    if request.param == "interpreter":
        pytest.importorskip("triton")
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return Rung(request.param, interpreters)


MUTATIONS = pytest.StashKey[dict[str, tuple[int, int]]]()
CountMutations = Callable[[str, int, int], None]


@pytest.fixture
def count_mutations(request: pytest.FixtureRequest) -> CountMutations:
    """Record `count_mutations(what, killed, tried)` for the summary; the test itself asserts that none survived."""
    counts = request.config.stash.setdefault(MUTATIONS, {})

    def record(what: str, killed: int, tried: int) -> None:
        before = counts.get(what, (0, 0))
        counts[what] = before[0] + killed, before[1] + tried

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, (killed, tried) in sorted(config.stash.get(MUTATIONS, {}).items()):
        terminalreporter.write_line(f"mutations of {what}: killed {killed} / tried {tried}")
