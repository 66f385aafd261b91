"""The arena of a group whose exchanges are made by kernels: symmetric memory, control areas, generations, verdicts.

It is to kernels what arena.py is to processes. Data moves inside kernels (fused/kernels/gather_kernel.py,
fused/kernels/scatter_kernel.py) and by copy engines (copies.py). This file knows where everything lies, which
generation a call uses, and how to tell the user what a kernel gave up waiting for. A rank's memory is its control area
(signals_kernel.py), then two generations of data. It is a GPU's memory, or shared memory of this host if kernels are
interpreted.

The decision a reader will question: a verdict is looked for when a call begins, and by `check`, not after each call,
since then the host would have to wait for the device. Kernels never hang, since their waits are bounded. What they
write after a peer is lost is garbage; a later call, or the next `check`, raises.
"""

from __future__ import annotations

import ctypes
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
from tpkernels.exchange.stream_waits import StreamWaits, Waits, open_stream_waits
from tpkernels.launch import Launches, num_processors, signed
from tpkernels.processors import Budget
from tpkernels.symmetric.cuda_memory import CudaMemory, host_record
from tpkernels.symmetric.device_clock import NS_PER_SECOND
from tpkernels.symmetric.memory import (
    ALIGNMENT_BYTES,
    HostMemory,
    SymmetricMemory,
    barrier,
    check_num_bytes,
    device_for_numbers,
    exchange,
)
from tpkernels.symmetric.processes import close_to_children
from tpkernels.symmetric.signals import GroupPoisoned, PeerTimeout, wrapped
from tpkernels.symmetric.signals_kernel import (
    ARRIVED,
    EPOCH,
    EPOCH_OF,
    FETCHED,
    GENERATION,
    HELLO,
    LIMIT_NS,
    LINE_WORDS,
    MAX_SPLITS,
    MAX_WORLD,
    MISMATCH,
    NO_AND_YES,
    NUM_LINES,
    POISON,
    PUBLISHED,
    RANK,
    REFUSED,
    STATE,
    TABLE,
    VERDICT_WORDS,
    WORLD,
)
from tpkernels.work import RATES, Rates, rates_of

NUM_GENERATIONS = 2
CONTROL_BYTES = 4 * LINE_WORDS * NUM_LINES
# Smaller copies would not reach the speed of the links.
_SPLIT_BYTES = 8 << 20
# A gather by copy engines costs the host a launch and two copies per peer, a gather by a kernel one launch: what hides
# that at 8 ranks is shards of about this size. Not measured on a GPU yet.
_ENGINE_BYTES = 8 << 20
_MOST_CALLS = 4096
# 36 years. A wait for a copy takes MAX_WORLD times as long, which int64 still holds.
_MOST_NS = 2**63 // MAX_WORLD - 1
_WORD_BYTES = 4


class DeviceArena:
    """One rank's part in the exchanges of its group.

    Args:
        memory: the group's symmetric memory, zeros; at least CONTROL_BYTES and two generations.
        record: [8] int32 that this rank's kernels can write and its host can read.
        copies: this rank's copy engine.
        generation_bytes: size of a generation of data.
        name: the group's name, for messages.
        members: global ranks of the group's members, for messages.
        timeout_seconds: how long a kernel waits for a peer, by the GPU's clock; eight times as long for a copy.
        rates: the GPU's rates, by which strategies are chosen; the same on every rank, default the H100's. None if they
            are not known: "auto" then uses collectives.
        first_epoch: the epoch before that of the first call.
        reserved_processors: how many processors of the GPU other communication may hold at once; the same on all ranks.

    Attributes:
        rank, world: this rank's place in the group and the number of ranks.
        control: this rank's control area.
        address: address of the control area; every kernel is given it.
        device: where the control area lies.
        epoch: the word of the control area that holds the newest call's epoch.
        timeout_seconds: as given.
        clock: measures the waits of this host; a test may set a clock of its own.
        newest_call: number of the newest call.
        generation: that of the newest call; a test may set it.
        processors: how many processors of the GPU the arena's kernels use; None for all. Ranks that share a GPU divide
            them.
        split_bytes: the least that a copy engine fetches at a time; a flag is raised after each split.
        engine_bytes: the smallest shard that copy engines fetch where nothing is predicted ("auto" gathers of
            all_gather_matmul are); a kernel fetches smaller ones. Ranks may differ.
        calls_since_gather: how many calls have begun since a gather that is not finished; None if there is none.
        gather_call: number of that gather; 0 if there is none.
        launches: those of the fused kernels, to be made again.
        stream_waits: by which the copy stream waits; None if kernels wait. Set it before the first call.
        generation_bytes, memory, copies, name, rates, reserved_processors: as given.

    Make one with `DeviceArena.open`.
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
        reserved_processors: int = 0,
    ) -> None:
        self.rates, self.reserved_processors = rates, reserved_processors
        self.memory, self.copies, self.generation_bytes, self.name = memory, copies, generation_bytes, name
        self.rank, self.world = memory.rank, memory.world
        assert self.world <= MAX_WORLD, f"{self.world} ranks, lines for {MAX_WORLD}"
        self._record, self._members = record, members
        # What every call looks at; indexing the tensor takes as long as a launch.
        self._reason = ctypes.c_int32.from_address(record.data_ptr())
        self.generation = 0
        self.calls_since_gather: int | None = None
        self.gather_call = 0
        self._calls: dict[int, str] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self.launches = Launches()
        self.newest_call = 0
        self.processors: int | None = None
        self.split_bytes = _SPLIT_BYTES
        self.engine_bytes = _ENGINE_BYTES
        self.control = self.control_of(self.rank)
        self.device = self.control.device
        self._stream: torch.cuda.Stream | None = None
        self.stream_waits: StreamWaits | None = None
        # None once a call was captured: replays count without the host.
        self._epoch_by_host: int | None = wrapped(first_epoch)
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
        reserved_processors: int = 0,
        waits: Waits = "kernels",
    ) -> DeviceArena:
        """Make the arena of a group; collective, once, before anything is exchanged.

        Args:
            group: the ranks, at most 8, all of one host or with peer access.
            num_bytes: memory for data per rank; each of two generations gets half.
            device: where the exchanged tensors live; the CPU if kernels are interpreted.
            timeout_seconds: how long a kernel waits for a peer.
            first_epoch: for tests near the largest epoch.
            reserved_processors: what other communication may hold at once of each rank's GPU (processors.py).
            waits: how the copy stream waits for peers; "streams": by memory operations, if all devices have them
                (stream_waits.py). The first rank prints which, if it is asked for.

        Raises:
            MemoryRefused: on all ranks alike; see CudaMemory.allocate and HostMemory.allocate.
            ValueError: num_bytes is not a legal number of bytes. On all ranks alike: reserved_processors differ between
                ranks, are negative, or leave no processor of a rank's GPU; waits differ between ranks.
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
        budget = Budget(num_processors(torch.empty(0, device=device)), reserved_processors)
        asked = exchange(group, [*budget, waits == "streams"], device_for_numbers(group))
        check_budgets([Budget(*numbers[:2]) for numbers in asked])
        check_waits([bool(numbers[2]) for numbers in asked])
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
            reserved_processors,
        )
        arena.stream_waits = open_stream_waits(group, waits, arena, record, device)
        arena._settle(group)
        return arena

    @property
    def addresses(self) -> tuple[int, ...]:
        """Return where each rank's control area begins, as seen from here."""
        return self.memory.addresses

    def epoch_by_host(self) -> int | None:
        """Return the newest call's epoch as the host has counted it; None if it cannot: a call was captured."""
        return self._epoch_by_host

    def control_of(self, rank: int) -> Tensor:
        """Return a rank's control area, int32."""
        return self.memory.block(rank, 0, (CONTROL_BYTES // _WORD_BYTES,), torch.int32)

    def word(self, index: int) -> Tensor:
        """Return a word of this rank's control area, [1]."""
        return self.memory.block(self.rank, _WORD_BYTES * index, (1,), torch.int32)

    def epoch_of(self, generation: int) -> Tensor:
        """Return the word that holds the epoch of a generation's newest call."""
        return self.word(STATE * LINE_WORDS + EPOCH_OF + generation)

    def offset_of(self, generation: int) -> int:
        """Return the offset in bytes at which a generation's data begins in each rank's memory."""
        return round_to_pages(CONTROL_BYTES) + generation * self.generation_bytes

    def block(
        self, owner: int, generation: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        """Return a view of a part of a rank's data."""
        return self.memory.block(owner, self.offset_of(generation) + offset_bytes, shape, dtype)

    def budget(self, x: Tensor) -> Budget:
        """Return the processors that kernels on x share with other communication."""
        return Budget(self.processors or num_processors(x), self.reserved_processors)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a generation that hold the data of one sending rank."""
        return self.generation_bytes // self.world // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def begin(
        self, operation: str, kind: str, num_rows: int, columns: int, dtype: torch.dtype, first: int
    ) -> tuple[int, int]:
        """Begin a call; return its generation, and its number, which ranks compare.

        Args:
            operation: name of the operation.
            kind: how it exchanges: "pulls", "pushes" or "scatters".
            num_rows, columns, dtype: of the exchanged tensor.
            first: the row of each shard from which it is exchanged. All ranks must agree on all arguments.

        Raises:
            PeerTimeout, GroupPoisoned, CallMismatch: a kernel of an earlier call has given up waiting.
        """
        self.check()
        self.follow()
        if self.stream_waits is not None and self._epoch_by_host is not None:
            is_captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            self._epoch_by_host = None if is_captured else wrapped(self._epoch_by_host + 1)
        self.generation = (self.generation + 1) % NUM_GENERATIONS
        sizes = operation, kind, num_rows, columns, dtype, first
        number = self._numbers.get(sizes)
        if number is None:
            name = str(dtype).removeprefix("torch.")
            number = self.number(f"{operation} of {num_rows} x {columns} {name} from row {first}, which {kind}")
            self._numbers[sizes] = number
        self.newest_call = number
        return self.generation, number

    def follow(self) -> None:
        """Let what is launched next run after all earlier launches, also if the caller has changed the stream.

        Launches share counters. While a CUDA graph is captured this does nothing: a graph cannot wait for work outside
        of it, and its calls are on one stream.
        """
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream = stream

    def number(self, described: str) -> int:
        """Return the number of a call, not 0: calls of equal descriptions have equal numbers."""
        self.newest_call = number = signed(zlib.crc32(described.encode()), 32) or 1
        if len(self._calls) >= _MOST_CALLS:  # sizes that change with every call
            self._calls.clear()
            self._numbers.clear()
        self._calls[number] = described
        return number

    def refuse(self, message: str) -> NoReturn:
        """Raise ValueError; the other ranks, which wait for a call that this one cannot make, raise CallMismatch."""
        self.check()
        self.leave()
        raise ValueError(message)

    def leave(self) -> None:
        """Poison the group, since this rank cannot make the call that the others make."""
        give_up(self, REFUSED, self.rank, HELLO, int(self.epoch), int(self.epoch), 0)
        self._hear()

    def check_all(self) -> None:
        """Raise as `check` does, also for verdicts that are not in the host's record yet; call it after synchronising.

        Cost: reads a line of the device's memory.
        """
        self._hear()
        self.check()

    def _hear(self) -> None:
        """Copy the poison line to the record, as a kernel does that sees poison."""
        poison = self.control[POISON * LINE_WORDS : POISON * LINE_WORDS + VERDICT_WORDS].cpu()
        if int(poison[0]):
            self._record[:VERDICT_WORDS].copy_(poison)

    def check(self) -> None:
        """Raise if a kernel has given up waiting, as far as this rank's host knows; do not wait for the device.

        Raises:
            PeerTimeout: this rank waited in vain.
            GroupPoisoned: another rank waited in vain.
            CallMismatch: ranks made different calls.
        """
        if not self._reason.value:
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
            # Name this rank's own call; the verdict has the waiter's. If kernels are interpreted, this rank is still in
            # its newest call; the host of a GPU may be further ahead.
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
            theirs,
        )

    def reset(self, group: ProcessGroup) -> None:
        """Make a poisoned group usable again; collective. No rank may be in the middle of a call.

        Cost: two barriers of the process group; waits for the device.
        """
        # No rank's kernels or copies may still run; then clear, and let no rank begin before all have cleared.
        self.copies.reset()
        if self.stream_waits is not None:
            self.stream_waits.reset()
        self._epoch_by_host = None if self._epoch_by_host is None else 0
        self._settle(group)
        self.control.zero_()
        self._record.zero_()
        self.generation, self.calls_since_gather, self.gather_call = 0, None, 0
        self._write_state(0)
        self._settle(group)

    def _write_state(self, first_epoch: int) -> None:
        words = torch.zeros(LINE_WORDS, dtype=torch.int32)
        words[EPOCH], words[GENERATION] = signed(first_epoch & 0xFFFFFFFF, 32), self.generation
        words[RANK], words[WORLD] = self.rank, self.world
        words[EPOCH_OF : EPOCH_OF + NUM_GENERATIONS] = words[EPOCH]
        words[NO_AND_YES + 1] = 1
        limit_ns = min(self.timeout_seconds * NS_PER_SECOND, _MOST_NS)
        words[LIMIT_NS : LIMIT_NS + 2].view(torch.int64)[0] = int(limit_ns)
        self.control[STATE * LINE_WORDS : (STATE + 1) * LINE_WORDS].copy_(words)
        self.control[: POISON * LINE_WORDS : LINE_WORDS].fill_(int(words[EPOCH]))
        table = self.memory.block(self.rank, TABLE * LINE_WORDS * _WORD_BYTES, (MAX_WORLD + 1,), torch.int64)
        addresses = [*self.memory.addresses, *([0] * (MAX_WORLD - self.world)), self._record.data_ptr()]
        table.copy_(torch.tensor(addresses))

    def _settle(self, group: ProcessGroup) -> None:
        """Wait for this rank's device, then for every rank's."""
        if self.control.is_cuda:
            torch.cuda.synchronize(self.control.device)
        barrier(group)


def check_budgets(everyone: Sequence[Budget]) -> None:
    """Raise ValueError if a rank's kernels would have no processor, or if ranks reserve differently.

    Tiles follow from what is reserved, and a flag stands for whole tiles.

    Args:
        everyone: what each rank has, by rank.
    """
    reserved = [budget.reserved for budget in everyone]
    if len(set(reserved)) > 1:
        raise ValueError(
            f"all ranks of a group must reserve as many processors: got {reserved} by rank: pass the most on all"
        )
    for budget in everyone:
        if problem := budget.problem():
            raise ValueError(problem)


def check_waits(by_streams: Sequence[bool]) -> None:
    """Raise ValueError if some ranks ask for waits by streams and others do not."""
    if len(set(by_streams)) > 1:
        asked = ["streams" if one else "kernels" for one in by_streams]
        raise ValueError(f"all ranks of a group must wait alike: got waits {asked} by rank: pass the same on all")


def model_of(device: torch.device) -> str:
    """Return the GPU's name; for interpreted kernels that of an H100, whose rates then choose strategies."""
    return "H100" if device.type == "cpu" else torch.cuda.get_device_name(device)


def shard_pieces(num_tokens: int, world: int, rows_that_fit: int) -> list[tuple[int, int]]:
    """Return (first row, rows) of the pieces in which shards move; at least one, so that every rank takes part."""
    most = -(-num_tokens // world)
    return [(first, min(rows_that_fit, most - first)) for first in range(0, max(most, 1), rows_that_fit)]


def _named(line: int) -> str:
    if line < FETCHED:
        return f"split {(line - ARRIVED) % MAX_SPLITS} of what is sent"
    if line < PUBLISHED:
        return f"the copy of split {(line - FETCHED) % MAX_SPLITS}"
    return "the shard" if line < HELLO else "the begin"
