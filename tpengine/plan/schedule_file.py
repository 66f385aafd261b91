"""A schedule that a user wrote: a text file with the compute actions of every rank, checked completely when read.

    # two ranks, two micro-batches, chunk 0 on rank 0
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

There is one line per rank, in order; `#` begins a comment, and blank lines are skipped. Only F, B, I and W are allowed,
because lower.py adds communication to all schedules alike. The rank that computes a chunk holds it. The checks make
sure that the lists are a schedule: every action once, F before B or I before W, and no deadlock. The order of weight
gradients is the user's choice.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tpengine.plan.actions import COMPUTE, TRANSFERS, Action, Kind, format_actions
from tpengine.plan.clock import clock
from tpengine.plan.schedule import Schedule

# Far above real schedules: zbv with 64 ranks and 512 micro-batches has 1.4 MB.
_MAX_BYTES = 64_000_000
# The number of digits is bounded, so that every number can be converted.
_NUMBER = "(0|[1-9][0-9]{0,8})"
_RANK = re.compile(rf"\s*rank {_NUMBER}:(.*)", re.DOTALL)
_COMPUTE = re.compile(f"{_NUMBER}([{''.join(sorted(COMPUTE))}]){_NUMBER}")
_TRANSFER = re.compile("[0-9]+(" + "|".join(sorted(TRANSFERS)) + ")[0-9]+")


def read_schedule(path: str | Path, num_ranks: int, num_microbatches: int) -> Schedule:
    """Read the schedule in a file and check it against the run's sizes.

    Args:
        path: the file; UTF-8, 64 MB at most.
        num_ranks, num_microbatches: p and m of the run; the file must have the same.
    Returns: the schedule, named after the file.
    Raises: ValueError: the file cannot be read, or breaks a rule; one line with file, line, rule, values and remedy.
    """
    source = f"schedule file {str(path)!r}"
    lists = _parse(_read_text(path, source), source)
    # Checked first: if the wrong file was named, this is the error that tells so.
    for what, found, wanted in (
        ("pipeline ranks", len(lists.ranks), num_ranks),
        ("micro-batches", lists.num_microbatches, num_microbatches),
    ):
        if found != wanted:
            place = f"{source}, line {lists.ranks[-1].line}"
            raise ValueError(
                f"{place}: a schedule lists the run's {what}: the file has {found}, the run {wanted}: "
                f"run with {found} {what}, or write a file for {wanted}"
            )
    return _schedule(lists, re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).stem))


def parse_schedule(text: str, name: str = "file") -> Schedule:
    """Return the schedule that a text in the format of this file describes; the inverse of `format_schedule`.

    Args: text: the file's text. name: the schedule's name, which is not in the text.
    Raises: ValueError: one line with line, rule, values and remedy.
    """
    return _schedule(_parse(text, "schedule text"), name)


def format_schedule(schedule: Schedule) -> str:
    """Return the schedule as text that `parse_schedule` parses back, with a comment that names it and its sizes."""
    sizes = f"{schedule.num_ranks} ranks, {schedule.num_microbatches} micro-batches, {len(schedule.ranks)} chunks"
    lines = [f"rank {rank}: {format_actions(actions)}" for rank, actions in enumerate(schedule.compute)]
    return "\n".join([f"# {schedule.name}: {sizes}", *lines, ""])


@dataclass
class _RankLine:
    """A rank's actions, and the number of its line."""

    line: int
    actions: list[Action] = field(default_factory=list)


@dataclass
class _Lists:
    """All ranks' lines. Each action occurs once, and each chunk on one rank."""

    source: str
    ranks: list[_RankLine] = field(default_factory=list)
    rank_of_chunk: dict[int, int] = field(default_factory=dict)
    found: dict[tuple[int, int], set[Kind]] = field(default_factory=dict)

    @property
    def num_microbatches(self) -> int:
        return 1 + max(microbatch for _, microbatch in self.found)

    def fail(self, line: int, what: str) -> NoReturn:
        raise ValueError(f"{self.source}, line {line}: {what}")


def _read_text(path: str | Path, source: str) -> str:
    try:
        status = os.stat(path)
    # os.stat raises ValueError for a name that no file can have.
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} cannot be read: {_reason(error)}: name a text file that exists") from None
    # A directory cannot be read; a pipe or a device might never end.
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{source} must be a regular file: got {stat.filemode(status.st_mode)}: name a text file")
    if status.st_size > _MAX_BYTES:
        raise ValueError(
            f"{source} must have at most {_MAX_BYTES} bytes: got {status.st_size}: use fewer micro-batches, "
            "or the name of a generator"
        )
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {_reason(error)}: make it readable") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise ValueError(f"{source}, line {line}: must be UTF-8: byte {error.start} is not: save it as UTF-8") from None


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _parse(text: str, source: str) -> _Lists:
    lists = _Lists(source)
    for line, content in _lines(text):
        match = _RANK.fullmatch(content)
        if match is None:
            lists.fail(line, f"a line reads like `rank 0: 0F0 0B0`: got {_short(content)}: write one line per rank")
        if int(match[1]) != len(lists.ranks):
            expected = f"rank {len(lists.ranks)}"
            lists.fail(line, f"ranks are listed in order from 0: got rank {match[1]}: write {expected} here")
        lists.ranks.append(_RankLine(line))
        for word in match[2].split():
            _add(lists, word)
        if not lists.ranks[-1].actions:
            lists.fail(line, f"every rank computes: rank {match[1]} has no action: give it a chunk, or use fewer ranks")
    if not lists.ranks:
        lists.fail(1, "a schedule has one line like `rank 0: 0F0 0B0` per rank: got none: write one for each rank")
    return lists


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, with their numbers as an editor counts them."""
    for line, content in enumerate(text.split("\n"), start=1):
        content = content.partition("#")[0]
        if content.strip():
            yield line, content


def _add(lists: _Lists, word: str) -> None:
    rank, at = len(lists.ranks) - 1, lists.ranks[-1]
    match = _COMPUTE.fullmatch(word)
    if match is None:
        lists.fail(at.line, _wrong_word(word))
    action = Action(Kind(match[2]), int(match[1]), int(match[3]))
    chunk, _ = action.piece
    holder = lists.rank_of_chunk.setdefault(chunk, rank)
    if holder != rank:
        lists.fail(
            at.line, f"one rank computes a chunk: {word} on rank {rank}, but chunk {chunk} is on rank {holder}: move it"
        )
    kinds = lists.found.setdefault(action.piece, set())
    if action.kind in kinds:
        lists.fail(at.line, f"each kind of action occurs once per chunk and micro-batch: {word} twice: remove one")
    kinds.add(action.kind)
    at.actions.append(action)


def _wrong_word(word: str) -> str:
    got = f"got {_short(word)}"
    if "[" in word or "]" in word:
        return f"a schedule has no sub-actions, lowering adds them: {got}: remove the brackets and what is in them"
    if _TRANSFER.fullmatch(word):
        return f"a schedule has no sends and receives, lowering adds them: {got}: remove it"
    return f"an action is a chunk, F, B, I or W, and a micro-batch, like 2F0: {got}: write it like that, or remove it"


def _short(text: str) -> str:
    text = text.strip()
    return ascii(text if len(text) <= 40 else text[:40] + "...")


def _schedule(lists: _Lists, name: str) -> Schedule:
    _check_chunks(lists)
    _check_complete(lists)
    _check_order(lists)
    placement = tuple(lists.rank_of_chunk[chunk] for chunk in range(len(lists.rank_of_chunk)))
    schedule = Schedule(name, placement, tuple(tuple(rank.actions) for rank in lists.ranks))
    try:
        clock(schedule.compute)
    except ValueError as error:
        lines = f"lines {lists.ranks[0].line} to {lists.ranks[-1].line}"
        raise ValueError(f"{lists.source}, {lines}: {error}: list what it waits for earlier") from None
    return schedule


def _check_chunks(lists: _Lists) -> None:
    for expected, chunk in enumerate(sorted(lists.rank_of_chunk)):
        if chunk != expected:
            line = lists.ranks[lists.rank_of_chunk[chunk]].line
            lists.fail(line, f"chunks are numbered from 0: got chunk {chunk}, none is chunk {expected}: renumber them")


def _check_complete(lists: _Lists) -> None:
    last = lists.num_microbatches - 1
    for chunk, rank in sorted(lists.rank_of_chunk.items()):
        for microbatch in range(last + 1):
            kinds = lists.found.get((chunk, microbatch), set())
            if kinds not in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}):
                rule = f"every chunk and micro-batch from 0 to {last} has one F and one B, or F, I and W"
                got = f"chunk {chunk}, micro-batch {microbatch} has {', '.join(sorted(kinds)) or 'none'}"
                lists.fail(lists.ranks[rank].line, f"{rule}: {got}: {_remedy(kinds)}")


def _check_order(lists: _Lists) -> None:
    """Refuse an action listed before one on the same rank that it depends on; the clock checks other ranks."""
    rule = "of a chunk and micro-batch F is listed before B or I, and I before W"
    listed: dict[tuple[int, int], set[Kind]] = {}
    for at in lists.ranks:
        for action in at.actions:
            before = listed.setdefault(action.piece, set())
            needed = Kind.I if action.kind is Kind.W else Kind.F
            if action.kind is not Kind.F and needed not in before:
                first = Action(needed, *action.piece)
                lists.fail(at.line, f"{rule}: got {action} before {first}: list {first} first")
            before.add(action.kind)


def _remedy(kinds: set[Kind]) -> str:
    if Kind.B in kinds and kinds & {Kind.I, Kind.W}:
        return "keep B, or I and W"
    wanted = {Kind.F, Kind.I, Kind.W} if kinds & {Kind.I, Kind.W} else {Kind.F, Kind.B}
    return f"add {', '.join(sorted(wanted - kinds))}"
