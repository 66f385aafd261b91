"""Rung: gloo ranks. Ranks that one process starts: their answers, every way in which they end, and that none stays.

The parent's tests run in processes of their own, so that it can be killed and cannot import torch. There, and where a
rank's start is looked at, ranks are spawned, as they are for users; else they are forked (support/ranks/forked.py).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks.progress import finish

from tpengine.distributed.local_ranks import Ranks, RanksFailed, run_ranks

MEMBER = f"{__name__}:Member"


class Member:
    """What the ranks of these tests hold."""

    def __init__(self, start: int) -> None:
        self._sum = start + dist.get_rank()

    def add(self, number: int) -> int:
        self._sum += number
        return self._sum

    def process(self) -> tuple[int, int, str, str]:
        return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]

    def fail_on_last(self, how: str) -> None:
        """The last rank fails; the others wait for it."""
        if dist.get_rank() < dist.get_world_size() - 1:
            dist.barrier()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        # What the end of a pipe raises too, and this is not the parent's.
        raise EOFError("a file is too short")

    def unpicklable(self) -> object:
        return lambda: None


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_keep_their_object_and_answer_by_rank() -> None:
    with Ranks(3, MEMBER, 10) as ranks:
        assert ranks.call("add", 5) == [15, 16, 17]
        assert ranks.call("add", 1) == [16, 17, 18]
        processes = ranks.call("process")
    assert len({pid for pid, *_ in processes} | {os.getpid()}) == 4
    for pid, *_ in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_rank_has_one_thread_and_the_parent_keeps_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    with Ranks(1, MEMBER, 10) as ranks:
        assert os.environ["OMP_NUM_THREADS"] == "7" and "OMP_WAIT_POLICY" not in os.environ
        ((_, threads, variable, waiting),) = ranks.call("process")
    assert (threads, variable, waiting) == (1, "1", "PASSIVE")


@pytest.mark.usefixtures("forked_ranks")
def test_leaving_by_an_exception_ends_the_ranks_and_removes_their_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt), Ranks(1, MEMBER, 0) as ranks:
        ((pid, *_),) = ranks.call("process")
        assert [path.name[:15] for path in tmp_path.iterdir()] == ["tpengine-ranks-"]
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("how", "message"),
    [("raised", r"rank 1: Traceback(.|\n)*EOFError: a file is too short"), ("killed", "rank 1: the process died")],
)
def test_one_ranks_failure_ends_all_though_the_other_waits_for_it(how: str, message: str) -> None:
    with Ranks(2, MEMBER, 0) as ranks:
        ((pid, *_), _) = ranks.call("process")
        with pytest.raises(RanksFailed, match=message):
            ranks.call("fail_on_last", how)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.usefixtures("forked_ranks")
def test_an_answer_that_cannot_be_sent_is_said() -> None:
    with Ranks(1, MEMBER, 0) as ranks, pytest.raises(RanksFailed, match=r"rank 0: Traceback(.|\n)*[Pp]ickle"):
        ranks.call("unpicklable")


@pytest.mark.usefixtures("forked_ranks")
def test_no_answer_in_time() -> None:
    with pytest.raises(RanksFailed, match=r"^ranks 0, 1: no answer in 0\.5 s$"):
        Ranks(2, "time:sleep", 3600, seconds=0.5)


@pytest.mark.usefixtures("forked_ranks")
def test_a_function_runs_on_every_rank_and_a_failure_ends_all_with_its_traceback() -> None:
    assert run_ranks(2, "torch.distributed:get_world_size") == 2
    with pytest.raises(RanksFailed, match=r"^ranks? [01](.|\n)*: Traceback(.|\n)*ZeroDivisionError"):
        run_ranks(2, "operator:floordiv", 1, 0)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("nosuch.module:Member", "there is no module nosuch"),
        ("tpengine.nosuch:Member", "there is no module tpengine.nosuch"),
        ("tpengine.distributed.launch:nosuch", "tpengine.distributed.launch defines no nosuch"),
        ("tpengine.distributed.launch", "name a module and what it defines"),
    ],
)
def test_a_factory_that_is_not_there_is_said_in_one_line(factory: str, reason: str) -> None:
    line = f"rank 0: what a rank runs must be importable as package.module:name: got '{factory}': {reason}"
    with pytest.raises(RanksFailed, match=f"^{re.escape(line)}$"):
        Ranks(1, factory)


@pytest.mark.usefixtures("forked_ranks")
def test_all_ranks_say_one_mistake_once() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, "tpengine.distributed.launch:nosuch")
    assert len(str(failed.value).splitlines()) == 1


@pytest.mark.usefixtures("forked_ranks")
def test_a_module_that_cannot_be_imported_shows_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_factory.py").write_text("import nosuch_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RanksFailed, match=r"Traceback(.|\n)*broken_factory.py(.|\n)*No module named 'nosuch_at_all'"):
        Ranks(1, "broken_factory:Member")


def parent_of(world: int, body: str, directory: Path) -> subprocess.Popen[str]:
    """Start a process without torch that holds ranks. One that is killed leaves its store in the directory."""
    head = f"""
        import sys
        sys.modules["torch"] = sys.modules["triton"] = None
        from tpengine.distributed.local_ranks import Ranks
        with Ranks({world}, "tpengine.distributed.rank_process:Function", "torch.distributed:get_rank") as ranks:
    """
    program = textwrap.dedent(head) + textwrap.indent(body, "    ")
    command, pipe, environ = [sys.executable, "-c", program], subprocess.PIPE, {**os.environ, "TMPDIR": str(directory)}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environ)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """One whose rank waits for a call."""
    process = parent_of(1, "import time; print('ready', flush=True); time.sleep(3600)", tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()


# The parents of the tests below have no torch either.
@pytest.mark.slow
def test_the_parent_needs_no_torch(tmp_path: Path) -> None:
    output, errors = finish(parent_of(1, "print(ranks.call('run'))", tmp_path))
    assert output == "[0]\n", errors


def test_ranks_end_by_themselves_when_their_parent_is_killed(parent: subprocess.Popen[str]) -> None:
    parent.kill()
    # The ranks hold the other end of its output too: it ends with the last of them.
    finish(parent)
    assert parent.returncode == -signal.SIGKILL


def test_ctrl_c_ends_the_ranks_and_only_the_parent_speaks(parent: subprocess.Popen[str]) -> None:
    os.killpg(parent.pid, signal.SIGINT)
    _, errors = finish(parent)
    assert errors.count("Traceback") == 1 and errors.endswith("KeyboardInterrupt\n")
