"""Runs the programs of all ranks: an event-driven simulation of hosts, streams, flags and processors.

A host issues its words in no time, until it must wait. A stream runs its launches one after another. Time passes only
in launches. When nothing moves and a rank is not done, `NoProgress` says of every such rank what it waits for.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.nccl.processors import Processors
from support.nccl.program import COMPUTE, Connect, Flag, HostWait, Launch, Wait, Word

PROCESSORS = 132


class NoProgress(AssertionError):
    """Nothing moves any more: a line for each rank that is not done, with its action."""


class WrongMessage(AssertionError):
    """A receive gets another tensor than the plan says."""


@dataclass(eq=False)
class _Run:
    """A launch of a rank, or a wait, on its stream.

    Attributes:
        after: what else must have ended before it begins.
        missing: the flags that it awaits and that are not raised.
        begun, ended: times; None before.
    """

    rank: int
    place: int
    launch: Launch
    after: list[_Run]
    missing: set[Flag] = field(default_factory=set)
    begun: float | None = None
    ended: float | None = None

    @property
    def may_begin(self) -> bool:
        return self.begun is None and all(run.ended is not None for run in self.after)


@dataclass
class _Rank:
    """A rank's host and device: its next word, and what is on each stream, the oldest first."""

    rank: int
    words: Sequence[Word]
    processors: Processors
    cursor: int = 0
    streams: defaultdict[str, deque[_Run]] = field(default_factory=lambda: defaultdict(deque))
    launched: dict[int, _Run] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        return not any(self.streams.values())

    @property
    def is_done(self) -> bool:
        return self.cursor == len(self.words) and self.is_idle


class Machine:
    """Some ranks with a GPU each.

    Args:
        programs: the words of each rank.
        seed: chooses who gets processors first (processors.py).
        processors: of each GPU.

    Attributes:
        ended: by (rank, place of the word), when each launch has begun and ended.
    """

    def __init__(self, programs: Sequence[Sequence[Word]], seed: int = 0, processors: int = PROCESSORS) -> None:
        self.ranks = [_Rank(rank, words, Processors(processors, seed)) for rank, words in enumerate(programs)]
        self.now = 0.0
        self.ended: dict[tuple[int, int], tuple[float, float]] = {}
        self._raised: dict[Flag, str] = {}
        self._awaiting: defaultdict[Flag, list[_Run]] = defaultdict(list)
        self._met: defaultdict[Flag, set[int]] = defaultdict(set)
        self._ends: list[tuple[float, int, _Run]] = []
        self._order = itertools.count()
        self._movable = deque(range(len(self.ranks)))

    def run(self) -> float:
        """Run all programs; return when the last launch has ended.

        Raises:
            NoProgress, WrongMessage: see there.
        """
        while True:
            while self._movable:
                self._move(self.ranks[self._movable.popleft()])
            if not self._ends:
                break
            self.now, _, run = heapq.heappop(self._ends)
            self._end(run)
        stuck = [rank for rank in self.ranks if not rank.is_done]
        if stuck:
            raise NoProgress("no progress:\n" + "\n".join(self._explain(rank) for rank in stuck))
        return self.now

    def _move(self, rank: _Rank) -> None:
        """Issue what the host can issue, then begin what can begin on the streams."""
        while rank.cursor < len(rank.words) and self._issue(rank, rank.words[rank.cursor]):
            rank.cursor += 1
        asking = [name for name, stream in rank.streams.items() if stream and stream[0].may_begin]
        for name in rank.processors.in_some_order(asking):
            run = rank.streams[name][0]
            if rank.processors.take(run, run.launch.processors, run.launch.least):
                self._begin(run)

    def _issue(self, rank: _Rank, word: Word) -> bool:
        """Issue a word; return False if the host must wait."""
        compute = rank.streams[COMPUTE]
        if isinstance(word, Launch):
            after = list(compute)[-1:] if word.stream != COMPUTE else []
            self._put(rank, word, after)
        elif isinstance(word, Wait):
            awaited = rank.launched[word.launch]
            self._put(rank, Launch(word.action, f"waits for {awaited.launch.what}", COMPUTE, 0.0), [awaited])
        elif isinstance(word, HostWait):
            return not compute
        else:
            return rank.is_idle and self._meet(rank.rank, word)
        return True

    def _meet(self, rank: int, word: Connect) -> bool:
        """Be at the meetings of a word; return whether all others are."""
        for meeting, members in word.meetings.items():
            if rank not in self._met[meeting]:
                self._met[meeting].add(rank)
                self._movable.extend(self._met[meeting].intersection(members))
        return all(self._met[meeting].issuperset(members) for meeting, members in word.meetings.items())

    def _put(self, rank: _Rank, launch: Launch, after: list[_Run]) -> None:
        run = _Run(rank.rank, rank.cursor, launch, after)
        rank.streams[launch.stream].append(run)
        rank.launched[rank.cursor] = run

    def _begin(self, run: _Run) -> None:
        run.begun = self.now
        run.missing = {flag for flag in run.launch.awaits if flag not in self._raised}
        for flag in run.launch.awaits:
            if flag in self._raised:
                self._check(run, self._raised[flag])
            else:
                self._awaiting[flag].append(run)
        self._raise(run, run.launch.begins)
        if not run.missing:
            self._end_later(run)

    def _raise(self, run: _Run, flags: tuple[Flag, ...]) -> None:
        for flag in flags:
            self._raised[flag] = run.launch.content
            for waiting in self._awaiting.pop(flag, ()):
                self._check(waiting, run.launch.content)
                waiting.missing.remove(flag)
                if not waiting.missing:
                    self._end_later(waiting)

    def _check(self, run: _Run, content: str) -> None:
        if content and run.launch.expects and content != run.launch.expects:
            raise WrongMessage(f"rank {run.rank}: {run.launch.action}, {run.launch.what}, gets {content}")

    def _end_later(self, run: _Run) -> None:
        seconds, processors = run.launch.seconds, run.launch.processors
        if processors:
            # With fewer processors its programs come in several rounds.
            seconds *= -(-processors // self.ranks[run.rank].processors.held[run])
        heapq.heappush(self._ends, (self.now + seconds, next(self._order), run))

    def _end(self, run: _Run) -> None:
        rank = self.ranks[run.rank]
        assert run.begun is not None and rank.streams[run.launch.stream][0] is run
        run.ended = self.now
        self.ended[run.rank, run.place] = run.begun, run.ended
        rank.streams[run.launch.stream].popleft()
        rank.processors.give(run)
        self._raise(run, run.launch.ends)
        self._movable.append(run.rank)

    def _explain(self, rank: _Rank) -> str:
        """Return what a rank waits for: its host, and the next of each stream."""
        found = []
        if rank.cursor < len(rank.words):
            found.append(self._blocked(rank.words[rank.cursor]))
        for stream in rank.streams.values():
            if stream:
                found.append(self._stuck(rank, stream[0]))
        return f"rank {rank.rank}: {'; '.join(found)}"

    def _blocked(self, word: Word) -> str:
        if not isinstance(word, Connect):
            return f"{word.action}: its host waits for its device"
        absent: set[int] = set()
        for meeting, members in word.meetings.items():
            absent.update(member for member in members if member not in self._met[meeting])
        others = f", without rank {', '.join(map(str, sorted(absent)))}" if absent else " and for its device"
        return f"{word.action}: its host {word.what}{others}"

    def _stuck(self, rank: _Rank, run: _Run) -> str:
        launch, held = run.launch, rank.processors.held.get(run, 0)
        named = f"{launch.action}: {launch.what}"
        if run.begun is not None:
            return f"{named} has begun{f' on {held} processors' if held else ''}, the others have not"
        if not run.may_begin:
            return f"{named}, behind {next(one.launch.what for one in run.after if one.ended is None)}"
        return f"{named} has {held} of {launch.least} processors, {rank.processors.free} are free"
