"""Progress: the plan finishes in either of two ways of executing its transfers.

Blocking rendezvous: a send or receive ends when its counterpart is posted. One in-order channel per pair of ranks:
posting returns at once, the transfers of a pair run in issue order on both sides, and waits block. A plan that passes
the first also finishes where all transfers of a rank run one after another, as over one communicator of NCCL.

One machine runs both, with two kinds of program: blocking means that every transfer is waited for where it is posted.
Ties and CLIP block each member until all members have arrived.

Gathers and reductions need no machine. Their members are data-parallel replicas of one pipeline rank (and its
tensor-parallel ranks), which all run the same list, as the plan's digest says. So all members post them in one order,
under both models, since no model changes the order of a list. They also finish. Consider an order of all actions in
which the machine has finished one replica, and let all replicas follow it. Take the first action in it that some
replica has not done. All replicas have done everything before it, hence posted the gather or reduction that it waits
for, and all those before that one. So that one has run, or runs now: over an in-order channel, and also if posting it
blocks until all members have posted it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpengine.plan.actions import SENDS, TRANSFERS, Action, Kind, peer_chunk
from tpengine.plan.plan import Plan
from tpengine.plan.verify.fault import fault

# A transfer under one name for both sides: kind, chunk and micro-batch of its send.
_Crossing = tuple[Kind, int, int]


class _Step(NamedTuple):
    """What one action of a list does to the machine.

    Attributes:
        posts: the transfer that is posted, with the peer.
        awaits: each transfer that must be complete, with the peer.
        meets: the ranks that must have arrived at the same action.
    """

    position: int
    action: Action
    posts: tuple[_Crossing, int] | None = None
    awaits: tuple[tuple[_Crossing, int], ...] = ()
    meets: tuple[int, ...] = ()


def check_blocking(plan: Plan) -> None:
    """Check that the plan finishes when every send and receive blocks."""
    _run(plan, "no deadlock under blocking rendezvous", blocking=True)


def check_channels(plan: Plan) -> None:
    """Check that the plan finishes over one in-order channel per pair of ranks."""
    _run(plan, "no deadlock under one in-order channel per pair", blocking=False)


def _run(plan: Plan, rule: str, blocking: bool) -> None:
    members = {Action(Kind.TIE_REDUCE, index=tie.index): plan.tie_ranks(tie) for tie in plan.ties}
    members[Action(Kind.CLIP)] = tuple(range(plan.num_ranks))
    machine = _Machine([_program(plan, actions, members, blocking) for actions in plan.actions])
    machine.run()
    stuck = machine.stuck_ranks()
    if stuck:
        rank = machine.origin(stuck[0])
        raise fault(plan, rule, machine.explain(rank), rank, machine.step(rank).position)


def _program(
    plan: Plan, actions: Sequence[Action], members: Mapping[Action, tuple[int, ...]], blocking: bool
) -> list[_Step]:
    steps = []
    for position, action in enumerate(actions):
        if action.kind in TRANSFERS:
            posted = _crossing(plan, action)
            steps.append(_Step(position, action, posts=posted, awaits=(posted,) if blocking else ()))
        elif action.kind is Kind.WAIT and not blocking:
            awaits = tuple(_crossing(plan, sub) for sub in action.subs if sub.kind in TRANSFERS)
            steps.append(_Step(position, action, awaits=awaits))
        elif action.kind in (Kind.TIE_REDUCE, Kind.CLIP):
            steps.append(_Step(position, action, meets=members[action]))
    return steps


def _crossing(plan: Plan, transfer: Action) -> tuple[_Crossing, int]:
    """Return the transfer's common name for both sides, and the rank on the other side."""
    chunk, microbatch = transfer.piece
    peer = peer_chunk(transfer)
    if transfer.kind in SENDS:
        return (transfer.kind, chunk, microbatch), plan.chunks[peer].rank
    send = Kind.SEND_F if transfer.kind is Kind.RECV_F else Kind.SEND_B
    return (send, peer, microbatch), plan.chunks[peer].rank


class _Machine:
    """Runs one program per rank until no rank can continue."""

    def __init__(self, programs: Sequence[Sequence[_Step]]) -> None:
        self.programs = programs
        self.cursor = [0] * len(programs)
        self.matched: set[_Crossing] = set()
        self.arrived: dict[Action, set[int]] = defaultdict(set)
        # By (rank, peer): the rank's transfers to and from the peer, oldest first.
        self.channels: dict[tuple[int, int], deque[_Crossing]] = defaultdict(deque)
        # Ranks that may be able to continue; a rank that is here without cause does no harm.
        self.woken: deque[int] = deque()

    def run(self) -> None:
        """Advance every rank, then each rank that is woken, until none is left: linear in the number of steps."""
        for rank in range(len(self.programs)):
            self._enter(rank)
        self.woken.extend(range(len(self.programs)))
        while self.woken:
            rank = self.woken.popleft()
            while not self._is_finished(rank) and not self._is_blocked(rank):
                self.cursor[rank] += 1
                self._enter(rank)

    def step(self, rank: int) -> _Step:
        return self.programs[rank][self.cursor[rank]]

    def stuck_ranks(self) -> list[int]:
        return [rank for rank in range(len(self.programs)) if not self._is_finished(rank)]

    def origin(self, rank: int) -> int:
        """Return the rank that causes this rank to be stuck: one in a cycle of waits, or one whose peer has ended."""
        seen: set[int] = set()
        while rank not in seen:
            seen.add(rank)
            peer = self._blocker(rank)
            if peer is None or self._is_finished(peer):
                break
            rank = peer
        return rank

    def explain(self, rank: int) -> str:
        """Return the chain of waits from this rank on, until a rank occurs again or has ended."""
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

    def _is_blocked(self, rank: int) -> bool:
        step = self.step(rank)
        if any(crossing not in self.matched for crossing, _ in step.awaits):
            return True
        return bool(step.meets) and len(self.arrived[step.action]) < len(step.meets)

    def _blocker(self, rank: int) -> int | None:
        """Return the first rank that the current step is still waiting for."""
        step = self.step(rank)
        for crossing, peer in step.awaits:
            if crossing not in self.matched:
                return peer
        return next((member for member in step.meets if member not in self.arrived[step.action]), None)

    def _enter(self, rank: int) -> None:
        if self._is_finished(rank):
            return
        step = self.step(rank)
        if step.meets:
            self.arrived[step.action].add(rank)
            if len(self.arrived[step.action]) == len(step.meets):
                self.woken.extend(step.meets)
        if step.posts is not None:
            crossing, peer = step.posts
            self.channels[rank, peer].append(crossing)
            self._drain(rank, peer)

    def _drain(self, rank: int, peer: int) -> None:
        """Match the transfers at the head of both sides of a channel."""
        own, other = self.channels[rank, peer], self.channels[peer, rank]
        while own and other and own[0] == other[0]:
            self.matched.add(own.popleft())
            other.popleft()
            self.woken.append(peer)
