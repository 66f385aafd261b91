"""Records broken on purpose, one rank of them or all, as programs of people are: the machine must say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.nccl.record import Began, Called, Entry, Record, Section, Waited


def late(record: Record) -> Record:
    """Post each receive of the plan right before the wait for it."""
    moved: Record = []
    posted: dict[int, Record] = {}
    for block in blocks(record):
        calls = [entry for entry in block if isinstance(entry, Called)]
        if isinstance(block[0], Began) and block[0].expects and len(calls) == 1:
            posted[calls[0].key] = block
            continue
        for entry in block:
            if isinstance(entry, Waited) and entry.key in posted:
                moved += [*posted.pop(entry.key), block[0]]
            moved.append(entry)
    return moved


def swapped(record: Record) -> Record:
    """Exchange the first message that a rank sends in a step with the receive before it."""
    found = blocks(record)
    first = next(place for place, block in enumerate(found) if block[0] == Section("step 0"))
    send = next(place for place in range(first, len(found)) if _is(found[place], "content"))
    receive = max(place for place in range(send) if _is(found[place], "expects"))
    found[send], found[receive] = found[receive], found[send]
    return [entry for block in found for entry in block]


def misnumbered(record: Record) -> Record:
    """Exchange the first two receives of a rank's step."""
    found = blocks(record)
    first = next(place for place, block in enumerate(found) if block[0] == Section("step 0"))
    one, other = [place for place in range(first, len(found)) if _is(found[place], "expects")][:2]
    found[one], found[other] = found[other], found[one]
    return [entry for block in found for entry in block]


def sums_first(record: Record) -> Record:
    """Issue a step's first sum over replicas before its first message is sent."""
    # The first step's list runs once before it, without messages.
    start = record.index(Section("step 1"))
    place = next(
        place
        for place in range(start, len(record))
        if isinstance(entry := record[place], Called) and entry.name == "dp" and "reduce" in entry.calls[0].operation
    )
    send = next(
        place for place in range(start, len(record)) if isinstance(entry := record[place], Began) and entry.content
    )
    assert send < place, "the sum is first already"
    return [*record[:send], record[place], *record[send:place], *record[place + 1 :]]


def unconnected(group: str) -> Callable[[Record], Record]:
    """Leave out a group where groups are connected."""

    def broken(record: Record) -> Record:
        end = record.index(Section("step 0"))
        left_out = {entry.key for entry in record[:end] if isinstance(entry, Called) and entry.name == group}
        assert left_out, f"{group} is connected by nobody"
        return [
            entry
            for place, entry in enumerate(record)
            if place >= end or not isinstance(entry, (Called, Waited)) or entry.key not in left_out
        ]

    return broken


def early_evaluation(record: Record) -> Record:
    """Evaluate after the first step before the first step."""
    parts = sections(record)
    connect, step, evaluate = parts[:3]
    assert evaluate[0] == Section("evaluate")
    return [entry for part in (connect, evaluate, step, *parts[3:]) for entry in part]


def of_one(records: Sequence[Record], rank: int, broken: Callable[[Record], Record]) -> list[Record]:
    """Break the record of one rank."""
    return [broken(record) if number == rank else record for number, record in enumerate(records)]


def sections(record: Record) -> list[Record]:
    """Cut a record where a section begins."""
    return _cut(record, (Section,))


def blocks(record: Record) -> list[Record]:
    """Cut a record where an action begins, or a section."""
    return _cut(record, (Section, Began))


def _cut(record: Record, kinds: tuple[type[Entry], ...]) -> list[Record]:
    found: list[Record] = []
    for entry in record:
        if isinstance(entry, kinds) or not found:
            found.append([])
        found[-1].append(entry)
    return found


def _is(block: Record, what: str) -> bool:
    return isinstance(block[0], Began) and bool(getattr(block[0], what))
