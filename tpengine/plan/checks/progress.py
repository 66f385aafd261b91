"""Progress: the plan finishes, whatever of two ways the transfers are executed.

Blocking rendezvous: a send or receive ends when its counterpart is posted; an exchange posts all its
transfers together and ends when all are matched. One in-order channel per pair of ranks, as NCCL: posts
return at once, the transfers of a pair execute in issue order on both sides (those of one exchange in any
order), waits block.

Both are one machine that runs two programs: blocking means that every transfer is waited for where it is
posted. Ties and CLIP hold each member until all have come.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tpengine.plan.actions import TRANSFERS, Action, Kind, counterpart
from tpengine.plan.checks.fault import fault
from tpengine.plan.plan import Plan


@dataclass(frozen=True)
class _Step:
    """What one action of a list does to the machine."""

    position: int
    action: Action
    posts: tuple[Action, ...] = ()
    awaits: tuple[Action, ...] = ()
    meets: tuple[int, ...] = ()


def check_blocking(plan: Plan) -> None:
    """Check that the plan finishes when every send and receive blocks."""
    _run(plan, "no deadlock under blocking rendezvous", blocking=True)


def check_channels(plan: Plan) -> None:
    """Check that the plan finishes over one in-order channel per pair of ranks."""
    _run(plan, "no deadlock under one in-order channel per pair", blocking=False)


def _run(plan: Plan, rule: str, blocking: bool) -> None:
    machine = _Machine(plan, [_program(plan, actions, blocking) for actions in plan.actions])
    machine.run()
    stuck = machine.stuck_ranks()
    if stuck:
        rank = machine.origin(stuck[0])
        raise fault(plan, rule, machine.explain(rank), rank, machine.step(rank).position)


def _program(plan: Plan, actions: Sequence[Action], blocking: bool) -> list[_Step]:
    steps = []
    for position, action in enumerate(actions):
        if action.transfers:
            awaits = action.transfers if blocking else ()
            steps.append(_Step(position, action, posts=action.transfers, awaits=awaits))
        elif action.kind is Kind.WAIT and not blocking:
            awaits = tuple(sub for sub in action.subs if sub.kind in TRANSFERS)
            steps.append(_Step(position, action, awaits=awaits))
        elif action.kind is Kind.CLIP:
            steps.append(_Step(position, action, meets=tuple(range(plan.num_ranks))))
        elif action.kind is Kind.TIE_REDUCE:
            members = next(plan.tie_ranks(tie) for tie in plan.ties if tie.index == action.index)
            steps.append(_Step(position, action, meets=members))
    return steps


class _Machine:
    """Plays one program per rank until nothing moves."""

    def __init__(self, plan: Plan, programs: Sequence[Sequence[_Step]]) -> None:
        self.plan = plan
        self.programs = programs
        self.cursor = [0] * len(programs)
        self.matched: set[tuple[int, Action]] = set()
        self.arrived: dict[Action, set[int]] = defaultdict(set)
        # By (rank, peer): the rank's groups of transfers to and from the peer, oldest first.
        self.channels: dict[tuple[int, int], deque[list[Action]]] = defaultdict(deque)

    def run(self) -> None:
        for rank in range(len(self.programs)):
            self._enter(rank)
        progress = True
        while progress:
            progress = False
            for rank in range(len(self.programs)):
                while not self._is_finished(rank) and self._blocker(rank) is None:
                    self.cursor[rank] += 1
                    self._enter(rank)
                    progress = True

    def step(self, rank: int) -> _Step:
        return self.programs[rank][self.cursor[rank]]

    def stuck_ranks(self) -> list[int]:
        return [rank for rank in range(len(self.programs)) if not self._is_finished(rank)]

    def origin(self, rank: int) -> int:
        """Return where a stuck rank's waits lead: to a rank of a circle, or one whose peer has ended."""
        seen: set[int] = set()
        while rank not in seen:
            seen.add(rank)
            peer = self._blocker(rank)
            if peer is None or self._is_finished(peer):
                break
            rank = peer
        return rank

    def explain(self, rank: int) -> str:
        """Return who waits for whom, from this rank on, until a rank comes up again or has ended."""
        text = f"rank {rank}"
        seen: set[int] = set()
        while rank not in seen and not self._is_finished(rank):
            seen.add(rank)
            peer = self._blocker(rank)
            assert peer is not None, "a stuck rank waits for somebody"
            text += f"{', which' if len(seen) > 1 else ''} waits in {self.step(rank).action} for rank {peer}"
            rank = peer
        return text if rank in seen else f"{text}, which has ended"

    def _is_finished(self, rank: int) -> bool:
        return self.cursor[rank] == len(self.programs[rank])

    def _blocker(self, rank: int) -> int | None:
        """Return the first rank that the current step still waits for."""
        step = self.step(rank)
        for transfer in step.awaits:
            if (rank, transfer) not in self.matched:
                return self.plan.peer(transfer)
        return next((member for member in step.meets if member not in self.arrived[step.action]), None)

    def _enter(self, rank: int) -> None:
        if self._is_finished(rank):
            return
        step = self.step(rank)
        if step.meets:
            self.arrived[step.action].add(rank)
        groups: dict[int, list[Action]] = defaultdict(list)
        for transfer in step.posts:
            groups[self.plan.peer(transfer)].append(transfer)
        for peer, group in groups.items():
            self.channels[rank, peer].append(group)
            self._drain(rank, peer)

    def _drain(self, rank: int, peer: int) -> None:
        """Match what stands at the head of both sides of a channel."""
        own, other = self.channels[rank, peer], self.channels[peer, rank]
        while own and other:
            matches = [transfer for transfer in own[0] if counterpart(transfer) in other[0]]
            if not matches:
                return
            self._complete(rank, own, matches)
            self._complete(peer, other, [counterpart(transfer) for transfer in matches])

    def _complete(self, rank: int, channel: deque[list[Action]], transfers: Iterable[Action]) -> None:
        for transfer in transfers:
            channel[0].remove(transfer)
            self.matched.add((rank, transfer))
        if not channel[0]:
            channel.popleft()
