"""Waits of the copy stream for peers, by memory operations instead of wait_kernel: no processor polls meanwhile.

    write(begun[peer], epoch);  wait(PUBLISHED + peer, epoch);  write(passed[peer], epoch)

`begun` and `passed` lie in the host's memory. What differs from wait_kernel, and why it is right all the same:

- **The epoch is the host's count of calls**, since the operation holds its value. A replayed CUDA graph counts without
  the host. So calls that are captured, and all calls of an arena after the first of these, wait by kernels.
- **The number of the call is not compared.** The copies' last launch is one wait_kernel for all peers, which finds all
  flags up and compares; or fetch_kernel does, which follows the waits.
- **The driver's wait has no limit.** A thread of this process reads begun and passed. It sees a wait begin, and after
  timeout_seconds gives up as a kernel does: it poisons all ranks' control areas, with who waits for whom, tells this
  rank's host, and only then raises the flag that is waited for. Once the group is poisoned it raises flags at once, as
  poison ends waits of kernels. It polls: a wait ends up to an eighth late. Of two ranks that give up at the same time,
  whose words arrive mixed is not excluded, as it is by kernels; the error then names one of them.
- **Streams share hardware queues**, and a wait holds up its queue. So nothing that the peers need to publish may be
  launched behind it by this host: calls must be made in an order that would also do if the host waited here, as on a
  CPU it does. What raises the flag has a stream of a priority that no other has, and so a queue (not shown on a GPU
  yet). If it hung, the process group's timeout would end the process, as it does when a peer of NCCL is lost.

Kernels wait unless the caller asks for this: it has not run on a GPU yet.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.symmetric.memory import device_for_numbers, exchange
from tpkernels.symmetric.signals import reached, wrapped
from tpkernels.symmetric.signals_kernel import LINE_WORDS, MAX_WORLD, POISON, PUBLISHED, TIMED_OUT, VERDICT_WORDS
from tpkernels.symmetric.stream_memory import DriverMemory, StreamMemory, driver_of

Waits = Literal["kernels", "streams"]
_WORD_BYTES = 4
# Of a wait's limit; and the longest and the shortest time between two looks.
_LOOKS_PER_LIMIT, _MOST_SECONDS, _LEAST_SECONDS = 8, 0.25, 1e-3
# More calls than a host is ahead of its device.
_MOST_CALLS = 4096
# No other stream of this process has it: -1 is the copy stream's, -3 of NCCL's where they are asked to be urgent.
_PRIORITY = -2


class Watched(Protocol):
    """What waits need of their rank's arena."""

    @property
    def rank(self) -> int: ...

    @property
    def addresses(self) -> Sequence[int]:
        """Where each rank's control area begins, as seen from here."""

    @property
    def timeout_seconds(self) -> float: ...

    @property
    def clock(self) -> Callable[[], float]: ...


class Stream(Protocol):
    """A stream, of torch's for one."""

    @property
    def cuda_stream(self) -> int: ...


class StreamWaits:
    """One rank's waits by memory operations.

    Args:
        memory: the operations.
        area: this rank's arena.
        record: what kernels tell this rank's host, as the arena's.
        words: [2 * MAX_WORLD] int32 zeros that streams write and the host reads: begun and passed.
        aside: the stream by which flags are raised, when a wait is given up; no wait is ever on it.
    """

    def __init__(self, memory: StreamMemory, area: Watched, record: Tensor, words: Tensor, aside: Stream) -> None:
        self._memory, self._area, self._record, self._words = memory, area, record, words
        self._aside = aside
        # Of each peer's newest wait: its epoch, and when it was first seen to wait.
        self._since: dict[int, tuple[int, float]] = {}
        self._calls: dict[int, int] = {}
        self._unwatched_by: Exception | None = None

    def wait(self, stream: int, peers: Sequence[int], epoch: int, call: int) -> None:
        """Let a stream wait until each of these ranks has published in call `epoch`, of the number `call`.

        Raises:
            RuntimeError: nobody gives up waits any more, which would have no limit.
        """
        if self._unwatched_by is not None:
            raise RuntimeError(self._unwatched()) from self._unwatched_by
        # Who gives up names the call.
        self._calls[epoch] = call
        if len(self._calls) > _MOST_CALLS:
            del self._calls[next(iter(self._calls))]
        for peer in peers:
            self._memory.write(stream, self._word(peer), epoch)
            self._memory.wait(stream, self._flag(peer), epoch)
            self._memory.write(stream, self._word(MAX_WORLD + peer), epoch)

    def watch(self, device: torch.device) -> None:
        """Start the thread that gives up waits; it ends with this object."""
        seconds = min(max(self._area.timeout_seconds / _LOOKS_PER_LIMIT, _LEAST_SECONDS), _MOST_SECONDS)
        arguments = weakref.ref(self), seconds, device
        threading.Thread(target=_look_now_and_then, args=arguments, name="tpkernels-waits", daemon=True).start()

    def look(self) -> None:
        """Give up waits that take too long; of a poisoned group, all."""
        words, now = self._words.tolist(), self._area.clock()
        for peer in range(len(self._area.addresses)):
            begun, passed = words[peer], words[MAX_WORLD + peer]
            if reached(passed, begun):
                self._since.pop(peer, None)
                continue
            epoch, start = self._since.get(peer, (begun + 1, now))
            if epoch != begun:
                start = now
                self._since[peer] = begun, now
            is_poisoned = bool(self._record[0])
            if not is_poisoned and now - start < self._area.timeout_seconds:
                continue
            stream = self._aside.cuda_stream
            if not is_poisoned:
                self._poison(stream, peer, begun, passed)
            # The flag last: what runs behind it must find the poison.
            self._memory.write(stream, self._flag(peer), begun)

    def leave_unwatched(self, error: Exception) -> None:
        """Say that the thread ends by an error, and why; the next wait raises it.

        It is printed too: a host that already waits for its device makes no call any more.
        """
        self._unwatched_by = error
        print(f"tpkernels: {self._unwatched()}", file=sys.stderr, flush=True)

    def _unwatched(self) -> str:
        return (
            f"rank {self._area.rank}: waits of the copy stream must be watched, since the driver's have no limit: the "
            f"thread has ended by {type(self._unwatched_by).__name__}: {self._unwatched_by}: start the ranks again, "
            'with waits="kernels" if it happens again'
        )

    def reset(self) -> None:
        """Forget all waits; none may be under way."""
        self._words.zero_()
        self._since.clear()
        self._calls.clear()

    def _poison(self, stream: int, peer: int, epoch: int, seen: int) -> None:
        """Tell all ranks, and this rank's host, who waited for whom; as signals_kernel.give_up does."""
        call = self._calls.get(epoch, 0)
        verdict = (TIMED_OUT, self._area.rank, peer, PUBLISHED + peer, wrapped(epoch), seen, call)
        for address in self._area.addresses:
            poison = address + _WORD_BYTES * POISON * LINE_WORDS
            self._memory.write(stream, poison + _WORD_BYTES * VERDICT_WORDS, 1)
            for word in range(VERDICT_WORDS - 1, -1, -1):
                self._memory.write(stream, poison + _WORD_BYTES * word, verdict[word])
        # The reason last: the host reads it first.
        for word in range(VERDICT_WORDS - 1, -1, -1):
            self._record[word] = verdict[word]

    def _flag(self, peer: int) -> int:
        return self._area.addresses[self._area.rank] + _WORD_BYTES * (PUBLISHED + peer) * LINE_WORDS

    def _word(self, index: int) -> int:
        return self._words.data_ptr() + _WORD_BYTES * index


def _look_now_and_then(waits: weakref.ref[StreamWaits], seconds: float, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while True:
        time.sleep(seconds)
        strong = waits()
        if strong is None:
            return
        try:
            strong.look()
        except Exception as error:  # the driver's; what it is nobody else would hear
            strong.leave_unwatched(error)
            return
        del strong


def open_stream_waits(
    group: ProcessGroup, waits: Waits, area: Watched, record: Tensor, device: torch.device
) -> StreamWaits | None:
    """Return waits by memory operations, if they are asked for and all ranks' devices have them; collective then.

    The group's first rank prints that streams wait, or why kernels do.

    Args:
        waits: what is asked for; the same on all ranks.
        area, record: as StreamWaits.
        device: this rank's.
    """
    if waits == "kernels":
        return None
    driver, problem = driver_of(device)
    able = exchange(group, [not problem], device_for_numbers(group))
    unable = [rank for rank, (is_able,) in enumerate(able) if not is_able]
    if dist.get_rank(group) == 0:
        why = f"by kernels: of ranks {unable}: {problem or 'see their devices'}" if unable else "by memory operations"
        print(f"tpkernels: the copy streams of group {group.group_name} wait {why}", file=sys.stderr)
    if unable:
        return None
    words = torch.zeros(2 * MAX_WORLD, dtype=torch.int32, pin_memory=True)
    made = StreamWaits(DriverMemory(driver), area, record, words, torch.cuda.Stream(device, priority=_PRIORITY))
    made.watch(device)
    return made
