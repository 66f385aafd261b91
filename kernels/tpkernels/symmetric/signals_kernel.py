"""Signals between ranks inside kernels: flags that only grow, bounded waits, poison, claims of tiles. Device functions.

This is signals.py for programs of a kernel instead of processes. A rank's control area is the beginning of its
symmetric memory. A kernel only gets a pointer to its own control area, and finds rank, addresses of the peers' memory
and limits there. Its lines, of 16 int32 words each:

    ARRIVED + 8*s + j   flag: split j of what rank s sends in a call has arrived at this rank
    FETCHED + 8*s + j   flag: this rank's copy engine has fetched split j of rank s's block
    PUBLISHED + s       flag: rank s lets this rank read its block
    HELLO + s           flag: rank s has begun a call, and so has ended those before
    POISON              reason, waiter, awaited, line waited at, epoch expected, epoch seen, call, lock
    STATE               epoch of the newest call, its generation, rank, world; for each generation the epoch of its
                        newest call; int64: how many ns a wait may take; the numbers 0 and 1
    CLAIMS, DONE + d    counters of a launch: of tiles claimed, and of tiles sent to rank d, a word for each split; 0
                        between launches
    TABLE               int64: where each rank's memory begins, as seen from here; then where the host's record is

A flag is an epoch and, by the epoch's parity, the number of the call (a hash of operation, sizes and dtype). Every use
is one of these patterns:

 1. Publish. `notify` puts a barrier of the program's threads before the release: triton does not, so other threads'
    stores could become visible after the flag. A peer whose `wait` has returned reads what was written before. Data
    under a flag is written by `tl.store`: the flag may overtake an asynchronous store.
 2. Many programs, one flag. Each program counts its tile in `count_done` after its stores; the program that counts the
    last tile notifies. Count and flag are both acquire and release, so the flag comes after every program's stores.
 3. Reuse own memory. A call of generation g overwrites what an earlier call of that generation wrote. If another call
    came in between, every peer has begun that one and so has ended the earlier one. If not (a CUDA graph with an odd
    number of calls, replayed), `begin` is a barrier of the group. It also is one after a call that ran beside a gather
    (`end_launch`), because a peer may begin that one while it still copies.
 4. Claims. Programs draw numbers of tiles from a counter until there are none. The program that draws the very last
    number, when all others have drawn theirs, resets the counters and advances the epoch: `is_last_claim`. A program
    that draws before it has ended its tile saves time, but then the last one must not rely on the others' tiles.
 5. Give up together. A wait that takes too long writes what it waited for into every rank's poison line, and all waits
    end. A program that sees poison copies it to the record, from which the host raises. Kernels then end with garbage.
    Each thread reads another time, so one decides for all: it reads a word that says yes or no (`_is_late`).
 6. Progress. A program waits for other ranks, or for programs that have drawn a lower number; those have started. So
    one resident program per rank suffices, whatever else runs on the device.

All launches of a group run one after another, except the copy engine's, because they share counters. If a caller
changes streams between calls, DeviceArena.follow orders them; the caller must order replays of a CUDA graph.

Epochs are int32, compared by (seen - expected) >= 0, and may wrap around.
"""

from __future__ import annotations

import time
from typing import Any

from tpkernels.launch import INTERPRETED, jit, tl
from tpkernels.symmetric.device_clock import now_ns

MAX_WORLD = 8
MAX_SPLITS = 8
LINE_WORDS = 16

ARRIVED = 0
FETCHED = ARRIVED + MAX_WORLD * MAX_SPLITS
PUBLISHED = FETCHED + MAX_WORLD * MAX_SPLITS
HELLO = PUBLISHED + MAX_WORLD
POISON = HELLO + MAX_WORLD
STATE = POISON + 1
CLAIMS = STATE + 1
DONE = CLAIMS + 1
TABLE = DONE + MAX_WORLD
# An int64 address takes two words.
NUM_LINES = TABLE + -(-2 * (MAX_WORLD + 1) // LINE_WORDS)

# Words of POISON and of the host's record.
VERDICT_WORDS = 7
TIMED_OUT, MISMATCH, REFUSED = 1, 2, 3
# Words of STATE.
EPOCH, GENERATION, RANK, WORLD, EPOCH_OF = range(5)
LIMIT_NS, NO_AND_YES = 6, 8
# A poll is three loads from the GPU's own memory, one after the other, and six barriers: about 2.9 us, estimated from
# the code for sm_90. A look at the clock costs about one load more. So waits look seldom, and end at most 0.2 ms late.
# The interpreter's polls take as long as the host is busy: there each one looks.
POLLS_PER_LOOK = 1 if INTERPRETED else 64

if tl is not None:
    _LINE, _MAX_WORLD, _MAX_SPLITS = tl.constexpr(LINE_WORDS), tl.constexpr(MAX_WORLD), tl.constexpr(MAX_SPLITS)
    _ARRIVED, _FETCHED = tl.constexpr(ARRIVED), tl.constexpr(FETCHED)
    _PUBLISHED, _HELLO = tl.constexpr(PUBLISHED), tl.constexpr(HELLO)
    _POISON, _CLAIMS, _DONE = tl.constexpr(POISON), tl.constexpr(CLAIMS), tl.constexpr(DONE)
    _TABLE, _TIMED_OUT, _MISMATCH = tl.constexpr(TABLE), tl.constexpr(TIMED_OUT), tl.constexpr(MISMATCH)
    _EPOCH_WORD = tl.constexpr(STATE * LINE_WORDS + EPOCH)
    _GENERATION_WORD = tl.constexpr(STATE * LINE_WORDS + GENERATION)
    _EPOCH_OF_WORD = tl.constexpr(STATE * LINE_WORDS + EPOCH_OF)
    _RANK_WORD = tl.constexpr(STATE * LINE_WORDS + RANK)
    _WORLD_WORD = tl.constexpr(STATE * LINE_WORDS + WORLD)
    _LIMIT_WORD = tl.constexpr(STATE * LINE_WORDS + LIMIT_NS)
    _NO_AND_YES_WORD = tl.constexpr(STATE * LINE_WORDS + NO_AND_YES)
    _POLLS_PER_LOOK = tl.constexpr(POLLS_PER_LOOK)
    _LOCK = tl.constexpr(POISON * LINE_WORDS + VERDICT_WORDS)
    _VERDICT_WORDS = tl.constexpr(VERDICT_WORDS)


@jit
def _nothing() -> None:
    """Do nothing: a GPU has no scheduler to which a polling program could yield."""


def _yield_core() -> None:
    """Yield the core to the peer that this rank waits for."""
    time.sleep(0)


_rest: Any = _yield_core if INTERPRETED else _nothing
# A name of this module, which a test may give another clock.
_now_ns: Any = now_ns


@jit
def _is_late(p_control: tl.tensor, start: tl.tensor, limit_ns: tl.tensor) -> tl.tensor:
    """Return whether a wait that began at `start` has taken limit_ns or longer; the same for all threads.

    Each thread chooses one of two words by its own clock. But a scalar is read by one thread, which tells the others.
    """
    is_over = _now_ns() - start >= limit_ns
    p_answer = p_control + _NO_AND_YES_WORD + is_over.to(tl.int32)
    return tl.atomic_add(p_answer, 0, sem="acquire", scope="sys") == 1


@jit
def control_at(address: tl.tensor) -> tl.tensor:
    """Return a pointer to the control area at an address.

    Kernels get an address instead of a tensor. After a launch the interpreter copies the whole memory of every tensor
    argument back onto itself, which would undo what peers have written meanwhile.
    """
    return address.to(tl.pointer_type(tl.int32))


@jit
def block_of(p_control: tl.tensor, rank: tl.tensor, offset_bytes: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return a pointer to the elements of a rank's memory from offset_bytes on, a multiple of 16."""
    p_block = (memory_of(p_control, rank) + offset_bytes).to(tl.pointer_type(DTYPE))
    # Without this the compiler moves one element at a time.
    return tl.multiple_of(p_block, 16)


@jit
def rank_of(p_control: tl.tensor) -> tl.tensor:
    """Return this rank's number in the group."""
    return tl.load(p_control + _RANK_WORD)


@jit
def newest_epoch(p_control: tl.tensor) -> tl.tensor:
    """Return the epoch of the newest call that has begun, which means that its first launch has ended."""
    return tl.load(p_control + _EPOCH_WORD)


@jit
def epoch_of(p_control: tl.tensor, generation: tl.tensor) -> tl.tensor:
    """Return the epoch of a generation's newest call.

    The group's newest call may be of the other generation, because a gather may run beside one other call.
    """
    return tl.load(p_control + _EPOCH_OF_WORD + generation)


@jit
def limit_of(p_control: tl.tensor) -> tl.tensor:
    """Return how many nanoseconds a wait for a peer may take, int64."""
    return tl.load((p_control + _LIMIT_WORD).to(tl.pointer_type(tl.int64)))


@jit
def memory_of(p_control: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """Return the address of a rank's symmetric memory, int64."""
    p_table = (p_control + _TABLE * _LINE).to(tl.pointer_type(tl.int64))
    return tl.load(p_table + rank)


@jit
def control_of(p_control: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """Return a pointer to a rank's control area."""
    return memory_of(p_control, rank).to(tl.pointer_type(tl.int32))


# The sums below begin with the tensor: in the interpreter constexpr + tensor is a constexpr, which no store accepts.
@jit
def arrived_line(source: tl.tensor, split: tl.tensor) -> tl.tensor:
    """Return the line of the flag for a split of what `source` sends to this rank."""
    return source * _MAX_SPLITS + split + _ARRIVED


@jit
def fetched_line(source: tl.tensor, split: tl.tensor) -> tl.tensor:
    """Return the line of the flag that this rank's copy engine raises after it has fetched a split of `source`'s block.

    It is not arrived_line: `source` may be one call ahead and have raised that flag, which the copy would set back.
    """
    return source * _MAX_SPLITS + split + _FETCHED


@jit
def split_columns(num_columns: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Return how many columns each split has of what is sent by columns: a multiple of UNIT."""
    return tl.cdiv(tl.cdiv(max(num_columns, 1), UNIT), _MAX_SPLITS) * UNIT


@jit
def published_line(source: tl.tensor) -> tl.tensor:
    """Return the line of the flag that lets this rank read `source`'s block."""
    return source + _PUBLISHED


@jit
def notify(p_control: tl.tensor, peer: tl.tensor, line: tl.tensor, epoch: tl.tensor, call: tl.tensor) -> None:
    """Raise the flag at `line` of `peer`, after everything that this program's threads wrote before (pattern 1)."""
    p_flag = control_of(p_control, peer) + line * _LINE
    tl.store(p_flag + 1 + (epoch & 1), call)
    # The barrier also follows the store of the call's number: one thread stores it, and another may raise the flag.
    tl.debug_barrier()
    tl.atomic_xchg(p_flag, epoch, sem="release", scope="sys")


@jit
def wait(p_control: tl.tensor, peer: tl.tensor, line: tl.tensor, epoch: tl.tensor, call: tl.tensor) -> None:
    """Wait until `peer` has raised this rank's flag at `line` to `epoch` or later, or until the group is poisoned.

    The wait ends after a limited time, and then poisons the group. It also poisons the group if the peer's call of this
    epoch has another number.
    """
    seen = wait_for_epoch(p_control, peer, line, epoch, call)
    # A peer may be one call ahead, so each parity of the epoch has a number of its own.
    p_number = p_control + line * _LINE + 1 + (epoch & 1)
    # This is not a plain load, in which each thread reads for itself. A peer that runs on after poison may change the
    # number meanwhile, so threads could read different numbers and take different branches below.
    number = tl.atomic_add(p_number, 0, sem="acquire", scope="sys")
    if (seen - epoch >= 0) & (number != call):
        give_up(p_control, _MISMATCH, peer, line, epoch, seen, call)


@jit
def wait_for_epoch(
    p_control: tl.tensor, peer: tl.tensor, line: tl.tensor, epoch: tl.tensor, call: tl.tensor
) -> tl.tensor:
    """Wait as `wait` does, but without comparing the call's number; return the epoch seen.

    This is for flags that this rank's copy engine raises after it has fetched from `peer`: it copies the epoch, without
    a number. And it is for flags whose number the same call compares elsewhere.
    """
    p_flag = p_control + line * _LINE
    seen = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")
    if seen - epoch < 0:
        # In one call a peer either publishes or sends. If this rank waits for one of the two and the peer did the other
        # in this epoch, the peer's call is a different one.
        other_line = peer + _PUBLISHED if line < _FETCHED else peer * _MAX_SPLITS + _ARRIVED
        is_exchange = (line < _FETCHED) | ((line >= _PUBLISHED) & (line < _HELLO))
        limit_ns = limit_of(p_control)
        # The copy engine waits for peers one after another, so a wait for its flag gets a longer limit. The wait for
        # the peer itself then gives up first, and names the right peer.
        limit_ns = limit_ns * _MAX_WORLD if (line >= _FETCHED) & (line < _PUBLISHED) else limit_ns
        start = _now_ns()
        polls = 0
        poison = 0
        differs = False
        is_late = False
        while (seen - epoch < 0) & (poison == 0) & (not differs) & (not is_late):
            _rest()
            seen = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys")
            other = tl.atomic_add(p_control + other_line * _LINE, 0, sem="acquire", scope="sys")
            differs = is_exchange & (other == epoch) & (seen - epoch < 0)
            poison = tl.atomic_add(p_control + _POISON * _LINE, 0, sem="acquire", scope="sys")
            polls = polls + 1
            if polls % _POLLS_PER_LOOK == 0:
                is_late = _is_late(p_control, start, limit_ns)
        if poison != 0:
            # Report only. This wait's own words could reach a rank before those of the wait that gave up first.
            report(p_control)
        elif differs:
            give_up(p_control, _MISMATCH, peer, line, epoch, seen, call)
        elif seen - epoch < 0:
            give_up(p_control, _TIMED_OUT, peer, line, epoch, seen, call)
    return seen


@jit
def give_up(
    p_control: tl.tensor,
    reason: tl.tensor,
    awaited: tl.tensor,
    line: tl.tensor,
    expected: tl.tensor,
    seen: tl.tensor,
    call: tl.tensor,
) -> None:
    """Poison the control area of every rank that is not yet poisoned, and tell this rank's host (pattern 5)."""
    waiter = rank_of(p_control)
    for rank in range(tl.load(p_control + _WORLD_WORD)):
        p_peer = control_of(p_control, rank)
        p_poison = p_peer + _POISON * _LINE
        if tl.atomic_cas(p_peer + _LOCK, 0, 1, sem="acq_rel", scope="sys") == 0:
            tl.store(p_poison + 1, waiter)
            tl.store(p_poison + 2, awaited)
            tl.store(p_poison + 3, line)
            tl.store(p_poison + 4, expected)
            tl.store(p_poison + 5, seen)
            tl.store(p_poison + 6, call)
            tl.debug_barrier()
            tl.atomic_xchg(p_poison, reason, sem="release", scope="sys")
    # Another rank may hold this rank's lock. Wait until it has written its words. It may also have died while it held
    # the lock: after the limit write the reason alone, because the host must learn of the poison in any case.
    p_own = p_control + _POISON * _LINE
    limit_ns = limit_of(p_control)
    start = _now_ns()
    polls = 0
    is_late = False
    while (tl.atomic_add(p_own, 0, sem="acquire", scope="sys") == 0) & (not is_late):
        _rest()
        polls = polls + 1
        if polls % _POLLS_PER_LOOK == 0:
            is_late = _is_late(p_control, start, limit_ns)
    tl.atomic_cas(p_own, 0, reason, sem="acq_rel", scope="sys")
    report(p_control)


@jit
def report(p_control: tl.tensor) -> None:
    """Copy the poison line, if the group is poisoned, to the record that this rank's host reads."""
    p_poison = p_control + _POISON * _LINE
    reason = tl.atomic_add(p_poison, 0, sem="acquire", scope="sys")
    if reason != 0:
        p_table = (p_control + _TABLE * _LINE).to(tl.pointer_type(tl.int64))
        p_record = tl.load(p_table + _MAX_WORLD).to(tl.pointer_type(tl.int32))
        for word in range(1, _VERDICT_WORDS):
            tl.store(p_record + word, tl.load(p_poison + word, volatile=True))
        tl.debug_barrier()
        tl.atomic_xchg(p_record, reason, sem="release", scope="sys")


@jit
def barrier(p_control: tl.tensor, epoch: tl.tensor, call: tl.tensor, is_first: tl.tensor) -> None:
    """Wait until every rank has reached this barrier in call `epoch`; only a rank's first program notifies."""
    rank = rank_of(p_control)
    world = tl.load(p_control + _WORLD_WORD)
    if is_first:
        for i in range(1, world):
            notify(p_control, (rank + i) % world, rank + _HELLO, epoch, call)
    for i in range(1, world):
        peer = (rank + i) % world
        wait(p_control, peer, peer + _HELLO, epoch, call)


@jit
def begin(p_control: tl.tensor, generation: tl.tensor, call: tl.tensor) -> tl.tensor:
    """Begin a call, and return its epoch; afterwards no rank reads this generation any more (pattern 3).

    Every program of a call's first launch calls it, and one of them must call `end_launch`. It also tells the host, in
    case this rank learns only here that the group is poisoned.
    """
    report(p_control)
    epoch = newest_epoch(p_control) + 1
    last = tl.load(p_control + _GENERATION_WORD)
    if (last == generation) | (last < 0):
        barrier(p_control, epoch, call, tl.program_id(0) == 0)
    return epoch


@jit
def claim(p_control: tl.tensor) -> tl.tensor:
    """Draw the next number of this launch: 0, 1, 2, ...; a program that draws later sees what this one stored before.

    A kernel must call it in one place only. If it is called before a loop and again at the loop's end, AMD's compiler
    builds a loop with two entries. The other threads of a wave then run round it without the thread that draws, and
    read the previous number.
    """
    tl.debug_barrier()
    return tl.atomic_add(p_control + _CLAIMS * _LINE, 1, sem="acq_rel", scope="gpu")


@jit
def is_last_claim(item: tl.tensor, num_items: tl.tensor) -> tl.tensor:
    """Return whether a program drew the last number of its launch.

    All other programs have drawn theirs, and have ended what they did before they drew.
    """
    return item == num_items + tl.num_programs(0) - 1


@jit
def end_launch(p_control: tl.tensor, epoch: tl.tensor, generation: tl.tensor, next_meets: tl.tensor = False) -> None:
    """Record that call `epoch` has begun, and reset the claims; called by the program that drew the last number.

    If next_meets, the next call begins with a barrier of the group, whatever generation it uses.

    It tells the host of poison first. A peer may have given up, run on and raised flags that this launch has seen, but
    it poisoned the group before it raised them.
    """
    report(p_control)
    tl.store(p_control + _EPOCH_WORD, epoch)
    if next_meets:
        tl.store(p_control + _GENERATION_WORD, -1)
    else:
        tl.store(p_control + _GENERATION_WORD, generation)
    tl.store(p_control + _EPOCH_OF_WORD + generation, epoch)
    tl.store(p_control + _CLAIMS * _LINE, 0)


@jit
def count_done(p_control: tl.tensor, peer: tl.tensor, num_tiles: tl.tensor, split: tl.tensor = 0) -> tl.tensor:
    """Count one more tile that was stored at `peer`, and return whether it was the last of `num_tiles` (pattern 2).

    Each split of what is sent to a peer has a counter of its own.
    """
    p_done = p_control + (peer + _DONE) * _LINE + split
    tl.debug_barrier()
    is_last = tl.atomic_add(p_done, 1, sem="acq_rel", scope="sys") == num_tiles - 1
    if is_last:
        tl.store(p_done, 0)
    return is_last
