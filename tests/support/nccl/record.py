"""What a record of one rank consists of: what its host did, in order.

A record is what recording.py writes, mutants.py breaks and operations.py reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from support.ranks.fake_ranks import Call


@dataclass(frozen=True)
class Began:
    """An action of the plan, or words for what happens between plans; what follows belongs to it.

    Attributes:
        content, expects: of a send which tensor it sends, of a receive which it waits for; "" of all else.
    """

    action: str
    content: str = ""
    expects: str = ""


@dataclass(frozen=True)
class Computed:
    """Something was computed; `by_product` if a matmul was among it, whose kernel is persistent."""

    by_product: bool


@dataclass(frozen=True)
class Called:
    """A collective, or messages that are one operation.

    Attributes:
        key: what `Waited` says.
        name: of the group, for readers.
    """

    key: int
    name: str
    calls: tuple[Call, ...]

    @property
    def group(self) -> str:
        return self.calls[0].group

    @property
    def members(self) -> tuple[int, ...]:
        return self.calls[0].members

    @property
    def is_message(self) -> bool:
        return self.calls[0].peer is not None

    @property
    def sends(self) -> bool:
        return self.is_message and all(call.operation == "send" for call in self.calls)

    @property
    def receives(self) -> bool:
        return self.is_message and all(call.operation != "send" for call in self.calls)


@dataclass(frozen=True)
class Waited:
    """The compute stream waits for a call."""

    key: int


@dataclass(frozen=True)
class HostWaited:
    """The host reads numbers from the device."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a fused matmul, or one that moves rows of experts, of ranks that address each other's memory.

    Attributes:
        name: the kernel's. how: as it is told.
        members: the ranks.
        by_copies: whether it is on the copy engine's stream.
    """

    name: str
    how: str
    members: tuple[int, ...]
    by_copies: bool


@dataclass(frozen=True)
class Joined:
    """The compute stream waits for the copy engine's."""


@dataclass(frozen=True)
class Section:
    """A part of a run begins: connect, step, evaluate, sample."""

    name: str


Entry = Began | Computed | Called | Waited | HostWaited | Kernel | Joined | Section
Record = list[Entry]
