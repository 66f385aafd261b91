"""Rung: pure; interpreter, several processes; GPU for the last. Waits of the copy stream by memory operations.

Threads stand for streams (support/ranks/queued_streams.py). That the driver takes what it is passed, that a GPU's wait
lets the rest of the GPU go on, and that a flag can be raised beside it, only the tests on a GPU show.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.ranks.arena_ranks import Case, cases, expected, inputs_of, results
from support.ranks.gpu_ranks import ROOMY, Run, agreements, hostile, needs_gpu, settle
from support.ranks.gpu_ranks import wrong_results as wrong_on_gpu
from support.ranks.kernel_ranks import kernel_communicator, wrong_results
from support.ranks.queued_streams import QueuedStreams, queued_streams, wait_by_streams
from support.ranks.rank_pool import RankPool

pytest.importorskip("triton")

from tpkernels.exchange import stream_waits
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.copies import HostCopies
from tpkernels.exchange.device_arena import CONTROL_BYTES, DeviceArena
from tpkernels.exchange.stream_waits import StreamWaits
from tpkernels.fused import gather
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.symmetric.cuda_memory import VirtualMemory
from tpkernels.symmetric.signals import GroupPoisoned, PeerTimeout
from tpkernels.symmetric.signals_kernel import LINE_WORDS, MAX_WORLD, POISON, PUBLISHED
from tpkernels.symmetric.stream_memory import DriverMemory, driver_of

LIMIT_SECONDS = 10.0


def check_by_streams(strategy: str) -> None:
    """Over epochs that wrap around; a kernel fetches where the copy engine does not."""
    comm = kernel_communicator(dist.group.WORLD, strategy, 1 << 18, first_epoch=2**31 - 2)
    arena = comm.device_arena
    assert arena is not None
    streams, words = wait_by_streams(arena)
    with queued_streams():
        wrong = wrong_results(comm, 3 * [Case("all_gather_matmul", 7, 5, (4,), return_gathered=True)])
        streams.settle()
    assert not wrong, "\n".join(wrong)
    begun, passed = words.view(2, MAX_WORLD)[:, : comm.size].tolist()
    # The epochs have wrapped around.
    assert begun == passed, words
    assert [epoch < 0 for epoch in begun] == [peer != comm.rank for peer in range(comm.size)], words


@pytest.mark.parametrize("strategy", ["fused", pytest.param("fetch", marks=pytest.mark.slow)])
def test_gathers_whose_copies_wait_by_memory_operations(interpreters: RankPool, strategy: str) -> None:
    interpreters.run(check_by_streams, 3 if strategy == "fetch" else 2, strategy)


def wrong_without_waiting(directory: str) -> bool:
    """Whether rank 1's result is wrong if its stream waits for nothing, and rank 0 publishes when it has copied."""
    comm = kernel_communicator(dist.group.WORLD, "fused", 1 << 18)
    arena = comm.device_arena
    assert arena is not None
    streams, _ = wait_by_streams(arena)
    copied, publish, start = Path(directory, "copied"), gather.launch_publish, arena.copies.start

    def publish_late(*args: Any) -> None:
        while not copied.exists():
            time.sleep(1e-3)
        publish(*args)

    def start_and_tell(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            # What compares the calls' numbers would wait for rank 0 too.
            inner.setattr("tpkernels.exchange.copies.launch_wait", lambda *_: None)
            start(*args)
        streams.settle()
        copied.touch()

    case = Case("all_gather_matmul", 8, 5, (4,))
    with queued_streams(), pytest.MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(gather, "launch_publish", publish_late)
        else:
            patch.setattr(streams, "wait", lambda *_: None)
            patch.setattr(arena.copies, "start", start_and_tell)
        inputs = inputs_of(case, comm.rank, comm.size)
        y = all_gather_matmul(inputs.x, inputs.weights, comm)[0]
        streams.settle()
    dist.barrier()
    return not torch.equal(y, expected(case, comm.rank, comm.size)[0])


def test_copies_that_do_not_wait_are_wrong(
    interpreters: RankPool, count_mutations: CountMutations, tmp_path: Path
) -> None:
    found = interpreters.run(wrong_without_waiting, 2, str(tmp_path))
    count_mutations("waits by memory operations", int(found == [False, True]), 1)
    assert found == [False, True]


class Waiting:
    """Rank 0 of two in one process, whose stream waits for rank 1; a clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0
        memories = VirtualMemory.allocate(2, CONTROL_BYTES + 4096, "cpu")
        self.arenas = [
            DeviceArena(
                memory, torch.zeros(8, dtype=torch.int32), HostCopies(), 1024, "of two", range(2), LIMIT_SECONDS
            )
            for memory in memories
        ]
        arena = self.arenas[0]
        arena.clock = lambda: self.now
        self.streams, self.words = wait_by_streams(arena)
        assert arena.stream_waits is not None
        self.waits: StreamWaits = arena.stream_waits
        self.copied: list[int] = []

    def call(self) -> int:
        """Begin a call, and let the stream wait, then copy."""
        arena = self.arenas[0]
        _, number = arena.begin("all_gather_matmul", "pulls", 6, 5, torch.float32, 0)
        epoch = arena.epoch_by_host()
        assert epoch is not None
        self.waits.wait(0, [1], epoch, number)
        self.streams.submit(0, lambda: self.copied.append(epoch))
        while int(self.words[1]) != epoch:
            time.sleep(1e-4)
        return epoch

    def look_at(self, now: float) -> None:
        self.now = now
        self.waits.look()


def test_who_waits_too_long_for_whom_is_told_to_all() -> None:
    """Poisoned first, then raised: what runs behind the wait finds the poison."""
    one = Waiting()
    one.call()
    for now in (3.0, 3.0 + LIMIT_SECONDS - 1):
        one.look_at(now)
    assert one.copied == []
    one.look_at(3.0 + LIMIT_SECONDS)
    one.streams.settle()
    assert one.copied == [1]
    what = (
        "rank 0 waited in all_gather_matmul of 6 x 5 float32 from row 0, which pulls, epoch 1 (seen 0), for the shard "
    )
    what += "of rank 1, which gave no signal for about 10 s"
    with pytest.raises(PeerTimeout) as mine:
        one.arenas[0].check()
    one.arenas[1]._calls = one.arenas[0]._calls
    with pytest.raises(GroupPoisoned) as theirs:
        one.arenas[1].check_all()
    assert what in str(mine.value) and what in str(theirs.value)
    reasons = [arena.address + 4 * POISON * LINE_WORDS for arena in one.arenas]
    flag = one.arenas[0].address + 4 * (PUBLISHED + 1) * LINE_WORDS
    order = [address for address, _ in one.streams.written if address in (*reasons, flag)]
    assert order == [*reasons, flag]


def test_each_wait_has_the_whole_time() -> None:
    one = Waiting()
    arena = one.arenas[0]
    for nth in range(1, 4):
        epoch = one.call()
        one.look_at(nth * (LIMIT_SECONDS - 1))
        arena.word((PUBLISHED + 1) * LINE_WORDS).fill_(epoch)
        one.streams.settle()
        if nth % 2:  # also where nobody has looked in between
            one.look_at(nth * (LIMIT_SECONDS - 1))
    assert one.copied == [1, 2, 3]
    arena.check()


def test_of_a_poisoned_group_no_stream_waits() -> None:
    one = Waiting()
    one.arenas[0]._record[0] = 1
    one.arenas[0]._record[3] = PUBLISHED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.arenas[0], "check", lambda: None)  # a host that is ahead has called before
        one.call()
    one.look_at(0.0)
    one.streams.settle()
    assert one.copied == [1]
    poison = [arena.control[POISON * LINE_WORDS] for arena in one.arenas]
    assert not any(map(int, poison)), "who poisoned it has said so"
    one.waits.reset()
    assert not one.words.any()


def test_an_error_of_the_driver_that_ends_the_thread_is_raised_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one = Waiting()
    epoch = one.call()
    one.look_at(0.0)
    one.now = LIMIT_SECONDS + 1
    with monkeypatch.context() as patch:
        patch.setattr(one.waits, "_memory", DriverMemory(Driver(719)))
        one.waits.watch(torch.device("cpu"))
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "tpkernels-waits"]
        thread.join()
    said = "the thread has ended by RuntimeError: cuStreamWriteValue32 failed: 719"
    with pytest.raises(RuntimeError, match=said) as caught:
        one.waits.wait(0, [1], epoch + 1, 2)
    assert "rank 0: waits of the copy stream must be watched" in str(caught.value) and caught.value.__cause__
    assert said in capfd.readouterr().err, "a host that waits for its device hears of it too"
    one.waits.reset()
    with pytest.raises(RuntimeError, match=said):
        one.waits.wait(0, [1], epoch + 1, 2)
    one.arenas[0].word((PUBLISHED + 1) * LINE_WORDS).fill_(epoch)
    one.streams.settle()


def test_a_host_that_has_captured_a_call_does_not_know_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Waiting()
    arena = one.arenas[0]
    monkeypatch.setattr(arena, "follow", lambda: None)
    monkeypatch.setattr(arena, "device", torch.device("cuda", 0))
    epochs: list[int | None] = []
    for captures in (False, False, True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        arena.begin("all_gather_matmul", "pulls", 6, 5, torch.float32, 0)
        epochs.append(arena.epoch_by_host())
    assert epochs == [1, 2, None, None]


class Driver:
    """What is called of cuda.bindings.driver, in the words of its documentation; it notes what it is passed."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ="at least")
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT="behind a fence")
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1=92)

    def __init__(self, result: int = 0, can: int = 1) -> None:
        self.result, self.can, self.passed = result, can, list[tuple[Any, ...]]()

    def cuStreamWaitValue32(self, *arguments: Any) -> tuple[int]:
        self.passed.append(("wait", *arguments))
        return (self.result,)

    def cuStreamWriteValue32(self, *arguments: Any) -> tuple[int]:
        self.passed.append(("write", *arguments))
        return (self.result,)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        self.passed.append((attribute, device))
        return self.result, self.can


def test_what_the_driver_is_passed() -> None:
    """Values are unsigned there: epochs that have wrapped around too."""
    driver = Driver()
    memory = DriverMemory(driver)
    memory.wait(7, 0x7F00, -2)
    memory.write(7, 0x7F40, 5)
    assert driver.passed == [("wait", 7, 0x7F00, 0xFFFFFFFE, "at least"), ("write", 7, 0x7F40, 5, "behind a fence")]
    with pytest.raises(RuntimeError, match=r"cuStreamWaitValue32 failed: 801: wait by kernels instead"):
        DriverMemory(Driver(801)).wait(7, 0x7F00, 1)


def test_why_streams_cannot_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_of(torch.device("cpu"))[1] == "only NVIDIA's GPUs have streams that wait for memory"
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert driver_of(gpu)[1] == "cuda.bindings is not installed: pip install cuda-bindings"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for able in (1, 0):
        driver = Driver(can=able)
        bindings = SimpleNamespace(driver=driver)
        for name, module in (("cuda", SimpleNamespace(bindings=bindings)), ("cuda.bindings", bindings)):
            monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
        assert driver_of(gpu) == ((driver, "") if able else (None, "the streams of cuda:1 cannot wait for memory"))
        assert driver.passed == [(92, 1)]


def what_is_said() -> tuple[str, str]:
    """Where no GPU is: streams are asked for by all, then by one alone."""
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(sys, "stderr", SimpleNamespace(write=said.append, flush=lambda: None))
        comm = Communicator(dist.group.WORLD, arena_bytes=1 << 14, waits="streams")
    assert comm.device_arena is not None and comm.device_arena.stream_waits is None
    try:
        Communicator(dist.group.WORLD, arena_bytes=1 << 14, waits=("kernels", "streams")[dist.get_rank()])  # type: ignore[arg-type]
    except ValueError as error:
        return "".join(said), str(error)
    return "".join(said), ""


def test_kernels_wait_where_streams_cannot_and_it_is_said_once(interpreters: RankPool) -> None:
    (first, differs), (other, also) = interpreters.run(what_is_said, 2)
    assert first.startswith("tpkernels: the copy streams of group ") and first.count("\n") == 1 and other == ""
    assert first.endswith("wait by kernels: of ranks [0, 1]: only NVIDIA's GPUs have streams that wait for memory\n")
    assert (
        differs
        == also
        == ("all ranks of a group must wait alike: got waits ['kernels', 'streams'] by rank: pass the same on all")
    )
    with pytest.raises(ValueError, match="waits must be kernels or streams: got 'stream': use kernels"):
        Communicator(None, waits="stream")  # type: ignore[arg-type]


def test_the_thread_that_looks_ends_with_what_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    looks: list[int] = []
    area = SimpleNamespace(rank=0, addresses=(0,), timeout_seconds=1e-3, clock=time.monotonic)
    words, record = torch.zeros(2 * MAX_WORLD, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    waits = StreamWaits(QueuedStreams(), area, record, words, SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(StreamWaits, "look", lambda self: looks.append(1))
    waits.watch(torch.device("cpu"))
    while not looks:
        time.sleep(1e-3)
    threads = [thread for thread in stream_waits.threading.enumerate() if thread.name == "tpkernels-waits"]
    assert threads
    del waits
    gc.collect()
    for thread in threads:
        thread.join()


def check_on_gpu(device: str) -> None:
    """Results, then a rank that stays away."""
    comm = hostile(device, "fused", ROOMY, waits="streams", first_epoch=2**31 - 3)
    assert comm.device_arena is not None and comm.device_arena.stream_waits is not None
    assert not wrong_on_gpu(device, comm, cases((7, 40))[::5])
    late = hostile(device, "fused", ROOMY, waits="streams", timeout_seconds=3.0)
    assert late.device_arena is not None
    if late.rank != 1:
        with pytest.raises((PeerTimeout, GroupPoisoned), match="of rank 1, which gave no signal for about 3 s"):
            all_gather_matmul(torch.ones(3, 5, device=device), [torch.ones(4, 5, device=device)], late)
            settle(late)
    dist.barrier()
    late.device_arena.reset(dist.group.WORLD)
    case = cases((7,))[3]
    inputs = inputs_of(case, late.rank, late.size)
    moved = type(inputs)(inputs.x.to(device), *([t.to(device) for t in many] for many in inputs[1:]))
    assert all(agreements(results(case, late, moved), expected(case, late.rank, late.size)))


@needs_gpu
@pytest.mark.parametrize("world", [2, 4])
def test_streams_wait_on_a_gpu(run: Run, world: int) -> None:
    run("cuda", world, check_on_gpu)
