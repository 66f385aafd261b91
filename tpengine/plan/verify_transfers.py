"""Checks of what crosses ranks: sends and receives pair up, posts are waited for, slots are free, the plan finishes.

Matching: the k-th send from a to b is the k-th receive at b from a, of the same tensor.

Posting: a tensor exists before it is sent, and what is posted is waited for before its use and before the end. A
transfer is posted once. A bucket's gather or reduction may be posted again after it has been waited for.

Receives: no slot is written while the tensor in it is still needed. Live ranges are found by replaying the list, not by
looking ahead as the assignment does (slots.py), so that both cannot share a mistake.

Progress: the plan finishes in either of two ways of executing its transfers.

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
from itertools import zip_longest
from typing import NamedTuple

from tpengine.plan.actions import (
    COMPUTE,
    INPUT_GRADIENT,
    RECEIVES,
    SENDS,
    TRANSFERS,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    counterpart,
    peer_chunk,
)
from tpengine.plan.plan import Plan, TensorSpec, fault
from tpengine.plan.slots import ReceiveSlots, receive_slots

_RULE = "the k-th send is the k-th receive at the peer"
# Position and transfer, in issue order, by (sender, receiver).
_Streams = dict[tuple[int, int], list[tuple[int, Action]]]
_Piece = tuple[int, int]
_Place = tuple[Kind, int]
# A transfer under one name for both sides: kind, chunk and micro-batch of its send.
_Crossing = tuple[Kind, int, int]


def check_matching(plan: Plan) -> None:
    """Check that sends and receives pair up in order, shape and dtype."""
    sends: _Streams = defaultdict(list)
    receives: _Streams = defaultdict(list)
    for rank, actions in enumerate(plan.actions):
        for position, action in enumerate(actions):
            if action.kind not in TRANSFERS:
                continue
            peer = _peer(plan, rank, position, action)
            if action.kind in SENDS:
                sends[rank, peer].append((position, action))
            else:
                receives[peer, rank].append((position, action))
    for pair in sorted(sends.keys() | receives.keys()):
        for k, (send, receive) in enumerate(zip_longest(sends[pair], receives[pair])):
            _check_pair(plan, k, pair, send, receive)


def _peer(plan: Plan, rank: int, position: int, transfer: Action) -> int:
    chunk, microbatch = transfer.piece
    if chunk >= len(plan.chunks) or microbatch >= plan.num_microbatches:
        raise fault(plan, "a transfer names an existing chunk and micro-batch", f"{transfer}", rank, position)
    if plan.chunks[chunk].rank != rank:
        values = f"{transfer} on rank {rank}, chunk {chunk} is on rank {plan.chunks[chunk].rank}"
        raise fault(plan, "a rank transfers for its own chunks", values, rank, position)
    try:
        peer = plan.peer(transfer)
    except ValueError as error:
        raise fault(plan, "a transfer has a peer", str(error), rank, position) from None
    if peer == rank:
        raise fault(plan, "chunks on one rank need no transfer", f"{transfer}", rank, position)
    if transfer.kind is Kind.SEND_B and not plan.gives_gradient(chunk):
        raise fault(plan, "a gradient is sent to a chunk that has a backward", f"{transfer}", rank, position)
    return peer


def _check_pair(
    plan: Plan,
    k: int,
    pair: tuple[int, int],
    send: tuple[int, Action] | None,
    receive: tuple[int, Action] | None,
) -> None:
    sender, receiver = pair
    where = f"number {k} from rank {sender} to rank {receiver}"
    if send is None or receive is None:
        rank, present = (receiver, receive) if send is None else (sender, send)
        assert present is not None, "a pair has at least one side"
        raise fault(plan, _RULE, f"{where} is {present[1]} without counterpart", rank, present[0])
    if counterpart(send[1]) != receive[1]:
        raise fault(plan, _RULE, f"{where} is {send[1]} against {receive[1]}", receiver, receive[0])
    sent, received = _spec(plan, send[1]), _spec(plan, receive[1])
    if sent != received:
        values = f"{where}, {send[1]}, is {sent} against {received}"
        raise fault(plan, "sender and receiver agree on shape and dtype", values, receiver, receive[0])


def _spec(plan: Plan, transfer: Action) -> TensorSpec | None:
    """Return what the chunk declares at the boundary that the transfer crosses."""
    chunk = plan.chunks[transfer.piece[0]]
    return chunk.output if transfer.kind in (Kind.SEND_F, Kind.RECV_B) else chunk.input


def check_posting(plan: Plan) -> None:
    """Check each rank's list alone: compute before send; receive, wait, then compute; nothing left under way."""
    for rank in range(plan.num_ranks):
        _Posting(plan, rank).check()


class _Posting:
    """Walks one rank's list; keeps the compute actions that are done and the state of each posted action."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.computed: set[tuple[Kind, int, int]] = set()
        self.posted_at: dict[Action, int] = {}
        self.complete: set[Action] = set()
        # The reductions of the buckets that a chunk's backwards fill.
        self.reductions: dict[int, list[Action]] = defaultdict(list)
        for bucket in plan.buckets:
            for chunk in bucket.chunks:
                self.reductions[chunk].append(Action(Kind.REDUCE, index=bucket.index))

    def check(self) -> None:
        for position, action in enumerate(self.plan.actions[self.rank]):
            if action.kind is Kind.WAIT:
                self._wait(position, action)
            if action.kind in COMPUTE:
                self._check_inputs(position, action)
                self._check_buffers(position, action)
                self.computed.add((action.kind, *action.piece))
            for posted in action.posts:
                self._post(position, posted)
        for posted, position in self.posted_at.items():
            if posted not in self.complete:
                self._fail("everything posted is waited for", f"{posted} is not", position)

    def _wait(self, position: int, wait: Action) -> None:
        for awaited in wait.subs:
            if awaited not in self.posted_at:
                self._fail("a wait names what was posted before", f"{awaited} was not", position)
            if awaited in self.complete:
                self._fail("each posted action is waited for once", f"{awaited} twice", position)
            self.complete.add(awaited)

    def _post(self, position: int, posted: Action) -> None:
        if posted in self.posted_at:
            if posted.kind in TRANSFERS:
                self._fail("each action is posted once", f"{posted} twice", position)
            if posted not in self.complete:
                self._fail("an action is not posted again before it was waited for", f"{posted} is", position)
            self.complete.discard(posted)
        if posted.kind in SENDS:
            kinds = {Kind.F} if posted.kind is Kind.SEND_F else INPUT_GRADIENT
            if not any((kind, *posted.piece) in self.computed for kind in kinds):
                self._fail("a tensor is sent after it is computed", f"{posted} is early", position)
        self.posted_at[posted] = position

    def _check_inputs(self, position: int, action: Action) -> None:
        if action.kind is Kind.F:
            self._check_received(position, action, Action(Kind.RECV_F, *action.piece))
        if action.kind in INPUT_GRADIENT:
            self._check_received(position, action, Action(Kind.RECV_B, *action.piece))
            send = Action(Kind.SEND_F, *action.piece)
            if self._is_remote(send) and send not in self.complete:
                rule = "an activation is sent and waited for before its backward lets go of it"
                self._fail(rule, f"{send} is not when {action} starts", position)

    def _check_buffers(self, position: int, action: Action) -> None:
        """Check that nothing is added to a gradient buffer while it is being reduced."""
        for reduction in self.reductions[action.piece[0]] if action.kind in WEIGHT_GRADIENT else ():
            if reduction in self.posted_at and reduction not in self.complete:
                rule = "a reduction has ended before the bucket is filled again"
                self._fail(rule, f"{reduction} is not waited for when {action} starts", position)

    def _check_received(self, position: int, action: Action, receive: Action) -> None:
        if self._is_remote(receive) and receive not in self.complete:
            state = "posted but not waited for" if receive in self.posted_at else "not posted"
            values = f"{action} needs {receive}: {state}"
            self._fail("a remote input is received and waited for", values, position)

    def _is_remote(self, transfer: Action) -> bool:
        chunk = peer_chunk(transfer)
        return 0 <= chunk < len(self.plan.chunks) and self.plan.chunks[chunk].rank != self.rank

    def _fail(self, rule: str, values: str, position: int) -> None:
        raise fault(self.plan, rule, values, self.rank, position)


def check_receives(plan: Plan) -> None:
    """Check the slots that `receive_slots` assigns on every rank."""
    for rank, actions in enumerate(plan.actions):
        check_slots(plan, rank, receive_slots(actions))


def check_slots(plan: Plan, rank: int, slots: ReceiveSlots) -> None:
    """Replay one rank's list over its slots."""
    # The micro-batch that each slot holds, and the slots of each micro-batch.
    holder: dict[_Place, _Piece] = {}
    places: dict[_Piece, list[_Place]] = defaultdict(list)
    done: dict[_Piece, set[Kind]] = defaultdict(set)
    for position, action in enumerate(plan.actions[rank]):
        if action.kind in RECEIVES:
            slot = slots.slot(action)
            if (action.kind, slot) in holder:
                chunk, microbatch = holder[action.kind, slot]
                values = f"{action} writes slot {slot} of chunk {chunk}, micro-batch {microbatch}"
                raise fault(plan, "a receive slot is free when written", values, rank, position)
            holder[action.kind, slot] = action.piece
            places[action.piece].append((action.kind, slot))
        if action.kind in COMPUTE:
            done[action.piece].add(action.kind)
            if _is_finished(done[action.piece], plan.training and plan.chunks[action.piece[0]].has_backward):
                for place in places.pop(action.piece, ()):
                    del holder[place]


def _is_finished(done: set[Kind], has_backward: bool) -> bool:
    return Kind.F in done if not has_backward else Kind.B in done or {Kind.I, Kind.W} <= done


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
