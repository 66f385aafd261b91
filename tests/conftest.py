"""Fixtures of the whole suite: the pools of ranks; and what the summary ends with: mutations, CPU seconds.

With pytest-xdist each of its workers is a session of its own, with its own pools; it hands its counts over at its end.
A file is one worker's. The dearest files come first, so that at the end no worker waits long for the other.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported: threads that share the cores with other work wait for each other, and burn ten times the CPU
# time. Processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import torch
from support import CountMutations
from support.budget import cpu_seconds
from support.kernels.compiled import CACHE_VARIABLE
from support.kernels.rungs import Rung
from support.ranks.forked import fork_local_ranks
from support.ranks.preloaded import ROOTS_VARIABLE, Roots, pids_of_servers
from support.ranks.rank_pool import RankPool
from support.slices import Slice

from tpengine import trust

# Collection makes millions of objects, and all of them stay: looking for garbage among them takes a fifth of its time.
gc.disable()

# A shell that starts the tests in the background ignores interrupts, and so would all programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.fixture(autouse=True)
def permissions() -> Iterator[None]:
    """What a test permits to be executed is not permitted in the next."""
    with trust.scope():
        yield


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that tpengine/distributed/local_ranks.py starts are forked: see forked.py."""
    fork_local_ranks(monkeypatch)


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels are kept: see compiled.py."""
    kept, own = os.environ.get("TPENGINE_TEST_CACHE"), tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist have directories of their own in one.
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    path = Path(kept).absolute() if kept else shared / "compiled"
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def compilers(compile_cache: Path) -> Iterator[RankPool]:
    """Ranks that compile, and never launch: see compiled.py."""
    pytest.importorskip("triton")
    pool = RankPool(late={CACHE_VARIABLE: str(compile_cache)})
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
# CPU seconds by test, and of everything, imports and pools with it.
COSTS = pytest.StashKey[dict[str, float]]()
ROOTS = pytest.StashKey[Roots]()
ALL = "everything"
NUM_DEAREST = 10
# Files that take minutes; the others follow in their own order.
DEAREST = (
    "tests/tpengine/training/test_drills.py",
    "tests/kernels/fused/test_kernel",
    "tests/kernels/fused/test_protocol_mutations.py",
    "tests/tpengine/commands/test_certify",
    "tests/tpengine/model/test_exact.py",
    "tests/tpengine/training/state",
    "tests/tpengine/test_train.py",
    "tests/kernels/fused/test_ptx.py",
    "tests/tpengine/training/layouts",
    "tests/kernels/ops/attention",
    "tests/tpengine/examples",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tpengine")
    group.addoption("--slice", metavar="k/N", type=Slice.of, help="run one N-th of the chosen tests, the k-th")
    group.addoption("--budget", metavar="SECONDS", type=float, help="say in red when the run takes more CPU seconds")
    group.addoption("--costs", metavar="FILE", type=Path, help="write the CPU seconds of every test, dearest first")


def _place(item: pytest.Item) -> int:
    return next((i for i, name in enumerate(DEAREST) if item.nodeid.startswith(name)), len(DEAREST))


def pytest_itemcollected(item: pytest.Item) -> None:
    marker = item.get_closest_marker("by_default")
    if marker is not None and _member(item) not in marker.args:
        item.add_marker(pytest.mark.slow)


def _check_defaults(items: list[pytest.Item]) -> None:
    """Refuse what runs by default and is no member: a grid whose names change would be slow as a whole."""
    asked: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("by_default")
        if marker is not None:
            name = item.nodeid.partition("[")[0]
            asked.setdefault(name, set(marker.args)).discard(_member(item))
    unknown = [f"{name}[{member}]" for name, members in asked.items() for member in sorted(members)]
    if unknown:
        raise pytest.UsageError(f"by_default must name members of its test: got {', '.join(unknown)}")


def _member(item: pytest.Item) -> str:
    """What stands between the brackets of a parametrized test's name."""
    return item.name.partition("[")[2].removesuffix("]")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    if not any("::" in argument for argument in config.args):
        _check_defaults(items)
    yield  # -m and -k choose
    items.sort(key=_place)
    if config.option.slice is not None:
        items[:], others = config.option.slice.cut(items)
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = _seconds_so_far()
    try:
        return (yield)
    finally:
        item.config.stash.setdefault(COSTS, {})[item.nodeid] = _seconds_so_far() - before


def _seconds_so_far() -> float:
    return cpu_seconds(os.getpid(), *pids_of_servers())


@pytest.fixture
def count_mutations(request: pytest.FixtureRequest) -> CountMutations:
    """Record `count_mutations(what, killed, tried)` for the summary; the test itself asserts that none survived."""
    return lambda what, killed, tried: _add_mutations(request.config, {what: (killed, tried)})


def _add_mutations(config: pytest.Config, more: MutationCounts) -> None:
    counts = config.stash.setdefault(MUTATIONS, {})
    for what, (killed, tried) in more.items():
        before = counts.get(what, (0, 0))
        counts[what] = before[0] + killed, before[1] + tried


def _add_costs(config: pytest.Config, more: dict[str, float]) -> None:
    costs = config.stash.setdefault(COSTS, {})
    for name, seconds in more.items():
        costs[name] = costs.get(name, 0.0) + seconds


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["mutations"] = config.stash.get(MUTATIONS, {})
        config.workeroutput["costs"] = config.stash.get(COSTS, {}) | {ALL: cpu_seconds()}
        return
    roots = config.stash.get(ROOTS, None)
    _add_costs(config, {ALL: cpu_seconds(*(roots.pids if roots else ()))})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    _add_mutations(node.config, output.get("mutations", {}))
    _add_costs(node.config, output.get("costs", {}))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Workers share what their ranks are forked from: see preloaded.py."""
    config.stash[ROOTS] = Roots()
    os.environ[ROOTS_VARIABLE] = os.pathsep.join(config.stash[ROOTS].paths)


def pytest_report_header(config: pytest.Config) -> str | None:
    part = config.option.slice
    return None if part is None else f"slice: {part.number + 1}/{part.num_parts}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for what, (killed, tried) in sorted(config.stash.get(MUTATIONS, {}).items()):
        terminalreporter.write_line(f"mutations of {what}: killed {killed} / tried {tried}")
    costs = dict(config.stash.get(COSTS, {}))
    seconds, budget = costs.pop(ALL, 0.0), config.option.budget
    dearest = [f"{cost:6.1f} CPU s  {name}" for name, cost in sorted(costs.items(), key=lambda cost: -cost[1])]
    for line in dearest[:NUM_DEAREST]:
        terminalreporter.write_line(line)
    if config.option.costs is not None:
        config.option.costs.write_text("\n".join(dearest) + "\n")
    limit = "" if budget is None else f" of {budget:.0f} that the run may take"
    terminalreporter.write_line(f"{seconds:6.0f} CPU s in all{limit}", red=budget is not None and seconds > budget)
