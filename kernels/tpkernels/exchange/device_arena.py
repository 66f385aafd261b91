"""The arena of a group whose exchanges are made by kernels: symmetric memory, control areas, generations, verdicts.

What arena.py is for processes. Here data moves inside kernels (fused/gather_kernel.py, fused/scatter_kernel.py) and by
copy engines (copies.py); this file knows where everything lies, which generation a call uses, and how to tell the user
what a kernel gave up on. A rank's memory is its control area (signals_kernel.py), then two generations of data.

The memory is a GPU's, or shared memory of this host where kernels are interpreted.

The decision a reader will question: a verdict is looked for when a call begins, and by `check`, instead of after each
call, for which the host would have to wait for the device. Kernels never hang (their waits are bounded), so that what
they write after a peer is lost is garbage that a later call, or the next `check`, raises about.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.exchange.arena import CallMismatch, round_to_pages
from tpkernels.exchange.copies import Copies, HostCopies, StreamCopies, give_up
from tpkernels.launch import INTERPRETED, signed
from tpkernels.symmetric.cuda_memory import CudaMemory, host_record
from tpkernels.symmetric.memory import (
    ALIGNMENT_BYTES,
    HostMemory,
    SymmetricMemory,
    check_num_bytes,
    device_for_numbers,
    exchange,
)
from tpkernels.symmetric.processes import close_to_children
from tpkernels.symmetric.signals import GroupPoisoned, PeerTimeout
from tpkernels.symmetric.signals_kernel import (
    ARRIVED,
    EPOCH,
    EPOCH_OF,
    FETCHED,
    GENERATION,
    HELLO,
    LIMIT,
    LINE_WORDS,
    MAX_SPLITS,
    MAX_WORLD,
    MISMATCH,
    NUM_LINES,
    POISON,
    PUBLISHED,
    RANK,
    REFUSED,
    STATE,
    TABLE,
    TICKS_PER_SECOND,
    VERDICT_WORDS,
    WORLD,
)
from tpkernels.work import RATES, Rates, rates_of

NUM_GENERATIONS = 2
CONTROL_BYTES = 4 * LINE_WORDS * NUM_LINES
# A poll is three loads from the GPU's own memory, one after the other, and six barriers: about 2.9 us, estimated from
# the code for sm_90. No clock is asked: threads of a program would read different times, and part where one gives up.
# Interpreted, limits are in ticks of the host's clock.
_POLLS_PER_SECOND = TICKS_PER_SECOND if INTERPRETED else 350_000
# A copy engine wants so much at once to be as fast as the links.
_SPLIT_BYTES = 8 << 20
_MOST_CALLS = 4096
_MOST_POLLS = 2**31 - 1
_WORD_BYTES = 4


class DeviceArena:
    """One rank's part in the exchanges of its group.

    Args:
        memory: the group's symmetric memory, zeros; at least CONTROL_BYTES and two generations.
        record: [8] int32 that this rank's kernels can write and its host can read.
        copies: this rank's copy engine.
        generation_bytes: of data.
        name: the group, for messages.
        members: numbers of the ranks among all processes, for messages.
        timeout_seconds: about how long a kernel waits for a peer, at most about 6,000; eight times as long for a copy.
        rates: by which strategies are chosen, the same on every rank; default the H100's. None where nobody knows them:
            "auto" then takes collectives.
        first_epoch: the number before that of the first call.

    Attributes:
        rank, world: this rank's place in the group and the number of ranks.
        control: this rank's control area.
        address: of the control area, what every kernel is given.
        epoch: its word of the newest call's epoch.
        timeout_seconds: as given.
        clock: what the waits of this host are measured by; a test may let time pass by a clock of its own.
        newest_call: number of the newest call.
        processors: of the GPU, for the arena's kernels; None for all. Ranks that share a GPU share them.
        split_bytes: what a copy engine fetches at a time, at least; a flag is raised behind each.
        calls_since_gather: how many calls have begun since a gather that is not finished; None if there is none.
        generation_bytes, memory, copies, name, rates: as given.

    Use `DeviceArena.open`.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        record: Tensor,
        copies: Copies,
        generation_bytes: int,
        name: str,
        members: Sequence[int],
        timeout_seconds: float,
        rates: Rates | None = RATES["H100"],
        first_epoch: int = 0,
    ) -> None:
        self.rates = rates
        self.memory, self.copies, self.generation_bytes, self.name = memory, copies, generation_bytes, name
        self.rank, self.world = memory.rank, memory.world
        assert self.world <= MAX_WORLD, f"{self.world} ranks, lines for {MAX_WORLD}"
        self._record, self._members = record, members
        self._generation = 0
        self.calls_since_gather: int | None = None
        self._calls: dict[int, str] = {}
        self.newest_call = 0
        self.processors: int | None = None
        self.split_bytes = _SPLIT_BYTES
        self.control = self.control_of(self.rank)
        self._device = self.control.device
        self._stream: torch.cuda.Stream | None = None
        self.address = memory.addresses[self.rank]
        self.epoch = self.word(STATE * LINE_WORDS + EPOCH)
        self.timeout_seconds = timeout_seconds
        self.clock: Callable[[], float] = time.monotonic
        self._write_state(first_epoch)
        close_to_children(self, f"the arena of group {name}", "check", "control", "epoch", "memory")

    @classmethod
    def open(
        cls,
        group: ProcessGroup,
        num_bytes: int,
        device: torch.device,
        *,
        timeout_seconds: float = 300.0,
        first_epoch: int = 0,
    ) -> DeviceArena:
        """Make the arena of a group; collective, once, before anything is exchanged.

        Args:
            group: the ranks, at most 8, all of one host or with peer access.
            num_bytes: for data, a rank: two generations of half of it.
            device: where the exchanged tensors live; a CPU where kernels are interpreted.
            timeout_seconds: about how long a kernel waits for a peer.
            first_epoch: for tests of what happens near the largest epoch.

        Raises:
            MemoryRefused: on all ranks alike; see CudaMemory.allocate and HostMemory.allocate.
            ValueError: num_bytes is no number of bytes.
        """
        check_num_bytes("an arena's size", num_bytes)
        generation_bytes = round_to_pages(-(-num_bytes // NUM_GENERATIONS))
        total = round_to_pages(CONTROL_BYTES) + NUM_GENERATIONS * generation_bytes
        memory: SymmetricMemory
        copies: Copies
        if device.type == "cpu":
            memory, copies = HostMemory.allocate(group, total), HostCopies()
            record = torch.zeros(LINE_WORDS, dtype=torch.int32)
        else:
            memory, record = CudaMemory.allocate(group, total, device), host_record()
            copies = StreamCopies(memory.device)
        members = dist.get_process_group_ranks(group)
        models = list(RATES.values())
        rates = rates_of(model_of(device))
        mine = -1 if rates is None else models.index(rates)
        first = exchange(group, [mine], device_for_numbers(group))[0][0]
        arena = cls(
            memory,
            record,
            copies,
            generation_bytes,
            group.group_name,
            members,
            timeout_seconds,
            None if first < 0 else models[first],
            first_epoch,
        )
        arena._settle(group)
        return arena

    def control_of(self, rank: int) -> Tensor:
        """A rank's control area, int32."""
        return self.memory.block(rank, 0, (CONTROL_BYTES // _WORD_BYTES,), torch.int32)

    def word(self, index: int) -> Tensor:
        """A word of this rank's control area, [1]."""
        return self.memory.block(self.rank, _WORD_BYTES * index, (1,), torch.int32)

    def epoch_of(self, generation: int) -> Tensor:
        """The word of the epoch of a generation's newest call."""
        return self.word(STATE * LINE_WORDS + EPOCH_OF + generation)

    @property
    def generation(self) -> int:
        """The newest call's."""
        return self._generation

    def offset_of(self, generation: int) -> int:
        """Where a generation's data begins in each rank's memory, in bytes."""
        return round_to_pages(CONTROL_BYTES) + generation * self.generation_bytes

    def block(
        self, owner: int, generation: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        """View part of a rank's data."""
        return self.memory.block(owner, self.offset_of(generation) + offset_bytes, shape, dtype)

    @property
    def slot_bytes(self) -> int:
        """The room of a generation for what one of the ranks sends."""
        return self.generation_bytes // self.world // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def begin(
        self, operation: str, kind: str, num_rows: int, columns: int, dtype: torch.dtype, first: int
    ) -> tuple[int, int]:
        """The generation of the next call and the number that ranks compare.

        Args:
            operation: its name.
            kind: how it exchanges: "pulls", "pushes" or "scatters".
            num_rows, columns, dtype, first: what, from which row of each shard; all ranks must agree on all of it.

        Raises:
            PeerTimeout, GroupPoisoned, CallMismatch: a kernel of an earlier call has given up.
        """
        self.check()
        self.follow()
        self._generation = (self._generation + 1) % NUM_GENERATIONS
        name = str(dtype).removeprefix("torch.")
        what = f"{operation} of {num_rows} x {columns} {name} from row {first}, which {kind}"
        return self._generation, self.number(what)

    def follow(self) -> None:
        """Have what is launched next come after all that was: launches share counters, and a caller may change streams.

        Not while a CUDA graph is captured, which cannot wait for what is outside of it: its calls are on one stream.
        """
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream = stream

    def number(self, described: str) -> int:
        """The number of a call: equal where its description is."""
        self.newest_call = number = signed(zlib.crc32(described.encode()), 32)
        if len(self._calls) >= _MOST_CALLS:  # lengths that change with every call
            self._calls.clear()
        self._calls[number] = described
        return number

    def refuse(self, message: str) -> NoReturn:
        """Raise ValueError, and CallMismatch on the other ranks: they wait for a call that this one cannot make."""
        self.check()
        self.leave()
        raise ValueError(message)

    def leave(self) -> None:
        """Poison the group, since this rank cannot make the call that the others make."""
        give_up(self, REFUSED, self.rank, HELLO, int(self.epoch), int(self.epoch), 0)
        self._hear()

    def check_all(self) -> None:
        """As `check`, of everything that the device has been waited for.

        Cost: reads a word of the device's memory.
        """
        self._hear()
        self.check()

    def _hear(self) -> None:
        """Copy the poison line to the record, as whoever sees poison in a kernel does."""
        poison = self.control[POISON * LINE_WORDS : POISON * LINE_WORDS + VERDICT_WORDS].cpu()
        if int(poison[0]):
            self._record[:VERDICT_WORDS].copy_(poison)

    def check(self) -> None:
        """Raise if a kernel has given up, as far as this rank's host has heard; it does not wait for the device.

        Raises:
            PeerTimeout: this rank waited in vain.
            GroupPoisoned: another did.
            CallMismatch: ranks called different things.
        """
        if not int(self._record[0]):
            return
        reason, waiter, awaited, line, expected, seen, call = self._record[:VERDICT_WORDS].tolist()
        mine, theirs = self._members[waiter], self._members[awaited]
        if reason == REFUSED:
            raise CallMismatch(
                f"every rank of group {self.name} must make the same call: rank {mine} refused its own, or left it: "
                "see its error, then reset the group on every rank"
            )
        called = self._calls.get(call, "a call that this rank has not made")
        if reason == MISMATCH:
            # What a rank knows is its own call; a GPU's host is further.
            is_newest = waiter != self.rank and not self.control.is_cuda
            called = self._calls.get(self.newest_call, called) if is_newest else called
            raise CallMismatch(
                f"every rank of group {self.name} must make the same call: rank {mine} and rank {theirs} do not, rank "
                f"{self._members[self.rank]} calls {called}: make all the same"
            )
        what = (
            f"rank {mine} waited in {called}, epoch {expected} (seen {seen}), for {_named(line)} of rank {theirs}, "
            f"which gave no signal for about {self.timeout_seconds:g} s"
        )
        kind = PeerTimeout if waiter == self.rank else GroupPoisoned
        raise kind(
            f"rank {self._members[self.rank]}: group {self.name} is poisoned: {what}: reset it on every rank, or start "
            "the ranks again",
            what,
        )

    def reset(self, group: ProcessGroup) -> None:
        """Make a poisoned group usable again; collective. No rank may be in the middle of a call.

        Cost: two barriers of the process group; the device is waited for.
        """
        self.copies.reset()
        self._settle(group)
        self.control.zero_()
        self._record.zero_()
        self._generation, self.calls_since_gather = 0, None
        self._write_state(0)
        self._settle(group)

    def _write_state(self, first_epoch: int) -> None:
        words = torch.zeros(LINE_WORDS, dtype=torch.int32)
        words[EPOCH], words[GENERATION] = signed(first_epoch & 0xFFFFFFFF, 32), self._generation
        words[RANK], words[WORLD] = self.rank, self.world
        words[EPOCH_OF : EPOCH_OF + NUM_GENERATIONS] = words[EPOCH]
        words[LIMIT] = min(max(int(self.timeout_seconds * _POLLS_PER_SECOND), 1), _MOST_POLLS)
        self.control[STATE * LINE_WORDS : (STATE + 1) * LINE_WORDS].copy_(words)
        self.control[: POISON * LINE_WORDS : LINE_WORDS].fill_(int(words[EPOCH]))
        table = self.memory.block(self.rank, TABLE * LINE_WORDS * _WORD_BYTES, (MAX_WORLD + 1,), torch.int64)
        addresses = [*self.memory.addresses, *([0] * (MAX_WORLD - self.world)), self._record.data_ptr()]
        table.copy_(torch.tensor(addresses))

    def _settle(self, group: ProcessGroup) -> None:
        """Wait for this rank's device, then for every rank's."""
        if self.control.is_cuda:
            torch.cuda.synchronize(self.control.device)
        dist.barrier(group)


def model_of(device: torch.device) -> str:
    """The GPU's name; interpreted kernels are chosen as those of an H100."""
    return "H100" if device.type == "cpu" else torch.cuda.get_device_name(device)


def shard_pieces(num_tokens: int, world: int, rows_that_fit: int) -> list[tuple[int, int]]:
    """(first row, rows) of the pieces in which every shard of num_tokens moves: at least one, so that all are heard."""
    most = -(-num_tokens // world)
    return [(first, min(rows_that_fit, most - first)) for first in range(0, max(most, 1), rows_that_fit)]


def _named(line: int) -> str:
    if line < FETCHED:
        return f"split {(line - ARRIVED) % MAX_SPLITS} of what is sent"
    if line < PUBLISHED:
        return f"the copy of split {(line - FETCHED) % MAX_SPLITS}"
    return "the shard" if line < HELLO else "the begin"
