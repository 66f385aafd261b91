"""An independent judge of plans: plays a plan with symbolic tensors and looks whether every gradient comes out right.

The verifier (tpengine.plan.verify) reads rules off the lists. This plays them: each rank runs its list, tensors are
names like ("x", 1, 0) for the output of chunk 1 and micro-batch 0, buffers are overwritten when a receive is posted,
and messages carry no tags: what arrives is what the peer sent at that place. weights.py plays weights and gradients.
It is slow and has no message worth reading; it is there to tell a mutation that gives another legal plan from one that
the verifier has missed.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial

from support.plans.weights import Illegal, Replica, demand
from tpengine.plan import Action, Kind, Plan, receive_slots
from tpengine.plan.actions import BUCKET, COMPUTE, SENDS, TRANSFERS

_Tensor = tuple[str, int, int]
_Condition = Callable[[], bool]


def why_illegal(plan: Plan) -> str | None:
    """Play a plan under both transport models; return what goes wrong, None if nothing does."""
    for blocking in (True, False):
        try:
            _World(plan, blocking).play()
        except Illegal as reason:
            return f"{'blocking' if blocking else 'channels'}: {reason}"
    return None


class _World:
    """All ranks and the messages between them."""

    def __init__(self, plan: Plan, blocking: bool) -> None:
        self.plan = plan
        self.blocking = blocking
        self.ranks = [_Rank(self, number) for number in range(plan.num_ranks)]
        # By (rank, peer): transfers not yet executed, oldest first.
        self.queues: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
        self.contents: dict[tuple[int, Action], _Tensor | None] = {}
        self.executed: dict[tuple[int, Action], _Tensor | None] = {}
        self.met: Counter[Action] = Counter()

    def play(self) -> None:
        programs = {number: rank.run() for number, rank in enumerate(self.ranks)}
        conditions: dict[int, _Condition] = dict.fromkeys(programs, lambda: True)
        moved = True
        while moved:
            moved = False
            for number in list(programs):
                while number in programs and conditions[number]():
                    moved = True
                    following = next(programs[number], None)
                    if following is None:
                        del programs[number]
                    else:
                        conditions[number] = following
        demand(not programs, f"ranks {list(programs)} wait for ever")

    def post(self, rank: int, transfer: Action) -> None:
        peer = self.plan.peer(transfer)
        demand(peer != rank, "a message to itself")
        self.queues[rank, peer].append(transfer)
        self._deliver(rank, peer)

    def _deliver(self, one: int, other: int) -> None:
        """Pair what stands first on both sides, a send with a receive, whatever they are called."""
        mine, theirs = self.queues[one, other], self.queues[other, one]
        while mine and theirs and (mine[0].kind in SENDS) != (theirs[0].kind in SENDS):
            sides = (one, mine.popleft()), (other, theirs.popleft())
            (sender, send), receive = sides if sides[0][1].kind in SENDS else sides[::-1]
            self.executed[sender, send] = None
            self.executed[receive] = self.contents[sender, send]


class _Rank:
    """One rank: what it holds, and its list as a generator of conditions to go on."""

    def __init__(self, world: _World, number: int) -> None:
        self.world, self.plan, self.number = world, world.plan, number
        self.actions = world.plan.actions[number]
        self.slots = receive_slots(self.actions)
        self.buffers: dict[tuple[Kind, int], _Tensor | None] = {}
        self.own: set[_Tensor] = set()
        self.ran: set[tuple[Kind, int, int]] = set()
        self.contributions: dict[int, Counter[int]] = defaultdict(Counter)
        self.under_way: set[Action] = set()
        self.replica = Replica(world.plan, number)
        self.tied: list[int | None] = []
        self.ended: list[Kind] = []

    def run(self) -> Iterator[_Condition]:
        for action in self.actions:
            demand(Kind.STEP not in self.ended, "something after STEP")
            if action.kind in COMPUTE:
                self._compute(action)
            elif action.kind in TRANSFERS:
                self._post(action)
                if self.world.blocking:
                    yield partial(self._is_executed, action)
            elif action.kind is Kind.GATHER:
                self._start(action)
            elif action.kind is Kind.REDUCE:
                demand(action not in self.under_way, f"{action} is under way")
                demand(not self.tied and not self.ended, f"{action} behind the sums that follow it")
                self.replica.reduce_counts(action)
                self.under_way.add(action)
            elif action.kind is Kind.WAIT:
                for sub in action.subs:
                    demand(sub in self.under_way, f"{sub} is not under way")
                    if sub.kind not in BUCKET:
                        yield partial(self._is_executed, sub)
                    self._finish(sub)
            else:
                yield from self._update(action)
        self._check_end()

    def _is_executed(self, transfer: Action) -> bool:
        return (self.number, transfer) in self.world.executed

    def _post(self, transfer: Action) -> None:
        chunk, microbatch = transfer.piece
        demand(self.plan.chunks[chunk].rank == self.number, "a transfer of another rank's chunk")
        demand((self.number, transfer) not in self.world.contents, "a transfer posted twice")
        content = None
        if transfer.kind in SENDS:
            content = ("x" if transfer.kind is Kind.SEND_F else "dx", chunk, microbatch)
            demand(content in self.own, f"{transfer} sends what is not there")
        else:
            self.buffers[transfer.kind, self.slots.slot(transfer)] = None
        self.world.contents[self.number, transfer] = content
        self.under_way.add(transfer)
        self.world.post(self.number, transfer)

    def _finish(self, sub: Action) -> None:
        self.under_way.remove(sub)
        if sub.kind in BUCKET:
            self.replica.finish(sub)
        if sub.kind in (Kind.RECV_F, Kind.RECV_B):
            self.buffers[sub.kind, self.slots.slot(sub)] = self.world.executed[self.number, sub]

    def _compute(self, action: Action) -> None:
        chunk, microbatch = action.piece
        demand(self.plan.chunks[chunk].rank == self.number, "a chunk on another rank")
        demand((action.kind, chunk, microbatch) not in self.ran, "computed twice")
        self.ran.add((action.kind, chunk, microbatch))
        self._read_input(chunk, microbatch)
        last = len(self.plan.chunks) - 1
        if action.kind is Kind.F:
            if chunk < last:
                self.own.add(("x", chunk, microbatch))
        else:
            demand((Kind.F, chunk, microbatch) in self.ran, "a backward before its forward")
            self._read_gradient(chunk, microbatch)
        if action.kind in (Kind.B, Kind.I):
            demand(not {Kind.B, Kind.I} <= self._kinds(chunk, microbatch), "two backwards")
            demand(Action(Kind.SEND_F, chunk, microbatch) not in self.under_way, "let go of while it is sent")
            self.own.discard(("x", chunk, microbatch))
            if self.plan.gives_gradient(chunk):
                self.own.add(("dx", chunk, microbatch))
        if action.kind is Kind.W:
            demand((Kind.I, chunk, microbatch) in self.ran, "a weight half before its input half")
        if action.kind in (Kind.B, Kind.W):
            self.contributions[chunk][microbatch] += 1
        self.replica.compute(action, self.under_way)
        for sub in action.subs:
            if sub.kind is Kind.FREE:
                self.replica.free(sub)
            else:
                self._start(sub, action)

    def _kinds(self, chunk: int, microbatch: int) -> set[Kind]:
        return {kind for kind in COMPUTE if (kind, chunk, microbatch) in self.ran}

    def _read_input(self, chunk: int, microbatch: int) -> None:
        if chunk > 0:
            self._read(Action(Kind.RECV_F, chunk, microbatch), chunk - 1, ("x", chunk - 1, microbatch))

    def _read_gradient(self, chunk: int, microbatch: int) -> None:
        if chunk < len(self.plan.chunks) - 1:
            self._read(Action(Kind.RECV_B, chunk, microbatch), chunk + 1, ("dx", chunk + 1, microbatch))

    def _read(self, receive: Action, source: int, tensor: _Tensor) -> None:
        if self.plan.chunks[source].rank == self.number:
            # A backward may have let go of its output since: the chunk behind it holds on to its own input.
            kind, was_made = tensor[0], (Kind.F, source, tensor[2]) in self.ran
            demand(was_made if kind == "x" else tensor in self.own, f"{tensor} is not there")
            return
        demand((self.number, receive) in self.world.contents, f"{receive} was not posted")
        found = self.buffers[receive.kind, self.slots.slot(receive)]
        demand(found == tensor, f"{receive} holds {found}")

    def _is_complete(self, chunk: int) -> bool:
        has_backward = self.plan.chunks[chunk].has_backward
        return self.contributions[chunk] == Counter(range(self.plan.num_microbatches if has_backward else 0))

    def _start(self, sub: Action, inside: Action | None = None) -> None:
        """Start a gather or reduction, inside a compute action or alone."""
        demand(sub not in self.under_way, f"{sub} is under way")
        if sub.kind is Kind.GATHER:
            self.replica.gather(sub)
        else:
            assert inside is not None, "a reduction is no action of its own"
            self.replica.reduce(sub, inside)
        self.under_way.add(sub)

    def _update(self, action: Action) -> Iterator[_Condition]:
        demand(self.plan.training and action.kind in (Kind.TIE_REDUCE, Kind.CLIP, Kind.STEP), f"{action} alone")
        self.replica.end()
        if action.kind is not Kind.STEP:
            demand(not any(sub.kind is Kind.REDUCE for sub in self.under_way), "a reduction under way")
        if action.kind is Kind.TIE_REDUCE:
            tie = next(tie for tie in self.plan.ties if tie.index == action.index)
            members = self.plan.tie_ranks(tie)
            demand(self.number in members, "not a member")
            own = [chunk for chunk in tie.chunks if self.plan.chunks[chunk].rank == self.number]
            demand(all(self._is_complete(chunk) for chunk in own), "an incomplete tie")
            demand(Kind.CLIP not in self.ended, "a tie after CLIP")
            self.tied.append(action.index)
            yield from self._meet(action, len(members))
            return
        demand(action.kind not in self.ended, "twice")
        self.ended.append(action.kind)
        if action.kind is Kind.CLIP:
            demand(all(map(self._is_complete, self.plan.chunks_of(self.number))), "gradients are missing")
            yield from self._meet(action, self.plan.num_ranks)

    def _meet(self, action: Action, num_members: int) -> Iterator[_Condition]:
        self.world.met[action] += 1
        yield lambda: self.world.met[action] == num_members

    def _check_end(self) -> None:
        demand(not self.under_way, f"{self.under_way} is left under way")
        self.replica.end()
        chunks = self.plan.chunks_of(self.number)
        if not self.plan.training:
            wanted = {(Kind.F, chunk, i) for chunk in chunks for i in range(self.plan.num_microbatches)}
            demand(self.ran == wanted, "not forward alone")
            return
        for chunk in chunks:
            for microbatch in range(self.plan.num_microbatches):
                kinds = self._kinds(chunk, microbatch)
                demand(kinds in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}), "not once each way")
        ties = [t.index for t in self.plan.ties if self.number in self.plan.tie_ranks(t)]
        self.replica.check_owner()
        demand(Counter(self.tied) == Counter(ties), "each tie once")
        demand(self.ended == [Kind.CLIP, Kind.STEP], "CLIP, then STEP")
