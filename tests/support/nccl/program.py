"""What the host of one rank issues, as words: launch, wait for a launch, wait for the device, connect.

Everything that ranks do together is made of flags. A launch raises flags when it begins or ends, and ends after the
flags that it awaits have been raised by others. So a sum is a launch on every member, each of which raises a flag when
it begins, and awaits those of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

COMPUTE, COPIES = "compute", "copies"

Flag = tuple[Hashable, ...]


@dataclass(frozen=True)
class Launch:
    """Something that runs on the device, behind what was launched on the same stream before.

    Attributes:
        action: of the plan, for reports.
        what: for reports.
        stream: its name. On another than COMPUTE it also begins behind what was launched on COMPUTE before.
        seconds: from the moment when it has begun and all it awaits is there to its end.
        processors: as many as it has use for, while it runs. With fewer it runs longer.
        least: without as many it does nothing; if it has only some it keeps them, and waits.
        begins, ends: flags that it raises then.
        awaits: without these it does not end.
        content, expects: of a message, which tensor it sends, or writes; "" where that is not known.
    """

    action: str
    what: str
    stream: str
    seconds: float
    processors: int = 0
    least: int = 0
    begins: tuple[Flag, ...] = ()
    ends: tuple[Flag, ...] = ()
    awaits: tuple[Flag, ...] = ()
    content: str = ""
    expects: str = ""


@dataclass(frozen=True)
class Wait:
    """What is launched on COMPUTE later begins when a launch has ended: the place of its word in the program."""

    action: str
    launch: int


@dataclass(frozen=True)
class HostWait:
    """The host issues nothing until its compute stream is empty."""

    action: str


@dataclass(frozen=True)
class Connect:
    """The host issues nothing until its device is idle and all members of each meeting are there.

    Attributes:
        meetings: members by what they meet for.
    """

    action: str
    what: str
    meetings: Mapping[Flag, tuple[int, ...]]


Word = Launch | Wait | HostWait | Connect


@dataclass
class Program:
    """The words of one rank, as they are added.

    Args:
        rank: this rank.
        connected: whether communicators and connections exist before; else first calls make them.
    """

    rank: int
    connected: bool = True
    words: list[Word] = field(default_factory=list)
    _numbers: Counter[Hashable] = field(default_factory=Counter)

    def add(self, word: Word) -> int:
        """Return the place of the word."""
        self.words.append(word)
        return len(self.words) - 1

    def compute(self, action: str, seconds: float, processors: int = 0) -> int:
        """Launch a kernel that waits for nobody; with any of its processors it gets on."""
        least = min(1, processors)
        return self.add(Launch(action, "a kernel", COMPUTE, seconds, processors, least))

    def collective(
        self, action: str, what: str, group: str, members: Sequence[int], seconds: float, processors: int = 0
    ) -> int:
        """Launch what all members of a group do together.

        Args:
            group: its name; what follows a space in it reports do not show.
        """
        self._connect(action, group, {("communicator", group, *members): tuple(members)})
        number = self.number(group, *members)
        flags = {member: (group, *members, number, member) for member in members}
        return self.add(
            Launch(
                action,
                f"{what} of {group.split()[0]}",
                group,
                seconds,
                processors,
                least=processors,
                begins=(flags.pop(self.rank),),
                awaits=tuple(flags.values()),
            )
        )

    def messages(
        self,
        action: str,
        group: str,
        members: Sequence[int],
        messages: Sequence[tuple[bool, int]],
        seconds: float,
        processors: int = 0,
        content: str = "",
        expects: str = "",
    ) -> int:
        """Launch messages to and from other ranks as one operation.

        Args:
            messages: whether this rank sends, and its peer.
        """
        self._connect(action, group, {("communicator", group, *members): tuple(members)})
        pairs = [(self.rank, peer) if sends else (peer, self.rank) for sends, peer in messages]
        self._connect(action, group, {("connection", group, *pair): pair for pair in pairs})
        begins, awaits, names = [], [], []
        for (sends, peer), pair in zip(messages, pairs, strict=True):
            message = (group, *pair, self.number(group, *pair))
            begins.append((*message, self.rank))
            awaits.append((*message, peer))
            names.append(f"{'send to' if sends else 'receive from'} rank {peer}")
        return self.add(
            Launch(
                action,
                f"{', '.join(names)} over {group.split()[0]}",
                group,
                seconds,
                processors,
                least=processors,
                begins=tuple(begins),
                awaits=tuple(awaits),
                content=content,
                expects=expects,
            )
        )

    def wait(self, action: str, launch: int) -> None:
        """Let what is computed later wait for a launch."""
        self.add(Wait(action, launch))

    def number(self, *key: Hashable) -> int:
        """Return how often this was asked with the key before."""
        self._numbers[key] += 1
        return self._numbers[key] - 1

    def _connect(self, action: str, what: str, meetings: Mapping[Flag, tuple[int, ...]]) -> None:
        """Meet for what this rank has not met for before."""
        if self.connected:
            return
        new = {flag: members for flag, members in meetings.items() if len(members) > 1 and not self.number(*flag)}
        if new:
            kind = next(iter(new))[0]
            self.add(Connect(action, f"waits for the {kind} of {what.split()[0]}", new))
