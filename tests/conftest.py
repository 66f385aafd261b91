"""Fixtures of the whole suite: the pool of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on several gloo ranks: `ranks.run(function, world, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()
