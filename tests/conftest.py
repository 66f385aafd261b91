"""Fixtures of the whole suite: the pool of ranks, and the count of mutations that the summary ends with.

With pytest-xdist each of its workers is a session of its own, with its own pools; it hands its counts over at its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported: threads that share the cores with other work wait for each other, and burn ten times the CPU
# time. Processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import torch
from support import CountMutations
from support.kernels.compiled import CACHE_VARIABLE
from support.kernels.rungs import Rung
from support.ranks.rank_pool import RankPool

# A stalled core is no failure, and a failure is the same on every run.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")


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


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels are kept: see compiled.py."""
    kept = os.environ.get("TPENGINE_TEST_CACHE")
    path = Path(kept).absolute() if kept else tmp_path_factory.getbasetemp() / "compiled"
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def compilers(compile_cache: Path) -> Iterator[RankPool]:
    """Ranks that compile, and never launch: see compiled.py."""
    pytest.importorskip("triton")
    pool = RankPool({CACHE_VARIABLE: str(compile_cache)})
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


MutationCounts = dict[str, tuple[int, int]]
MUTATIONS = pytest.StashKey[MutationCounts]()


@pytest.fixture
def count_mutations(request: pytest.FixtureRequest) -> CountMutations:
    """Record `count_mutations(what, killed, tried)` for the summary; the test itself asserts that none survived."""
    return lambda what, killed, tried: _add_mutations(request.config, {what: (killed, tried)})


def _add_mutations(config: pytest.Config, more: MutationCounts) -> None:
    counts = config.stash.setdefault(MUTATIONS, {})
    for what, (killed, tried) in more.items():
        before = counts.get(what, (0, 0))
        counts[what] = before[0] + killed, before[1] + tried


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["mutations"] = session.config.stash.get(MUTATIONS, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _add_mutations(node.config, getattr(node, "workeroutput", {}).get("mutations", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, (killed, tried) in sorted(config.stash.get(MUTATIONS, {}).items()):
        terminalreporter.write_line(f"mutations of {what}: killed {killed} / tried {tried}")
