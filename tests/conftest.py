"""Fixtures of the whole suite: the pool of ranks, and the count of mutations that the summary ends with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on several gloo ranks: `ranks.run(function, world, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()


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
