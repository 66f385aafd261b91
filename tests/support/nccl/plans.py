"""A plan as programs: what each rank of a pipeline launches, with given durations; no torch.

Communication takes no processors here: times are those that tpengine/planner/simulator.py must agree with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.nccl.program import Program, Word
from tpengine.plan import Action, Kind, Plan
from tpengine.plan.actions import COMPUTE, RECEIVES, SENDS, TRANSFERS, counterpart
from tpengine.planner import Costs
from tpengine.planner.costs import Channels, transfer_bytes

BUCKETS, MEETING = "buckets", "meeting"
Lists = Sequence[Sequence[Action]]


def programs_of(plan: Plan, costs: Costs, lists: Lists | None = None) -> list[list[Word]]:
    """The words of each rank.

    Args:
        costs: durations and channels.
        lists: actions of each rank; default the plan's.
    """
    return [_Played(plan, costs, rank).of(actions) for rank, actions in enumerate(lists or plan.actions)]


def late(plan: Plan) -> list[list[Action]]:
    """The lists of a plan with each receive posted right before the wait for it."""
    lists: list[list[Action]] = []
    for actions in plan.actions:
        moved: list[Action] = []
        for action in actions:
            if action.kind is Kind.WAIT:
                moved += [sub for sub in action.subs if sub.kind in RECEIVES]
            if action.kind not in RECEIVES:
                moved.append(action)
        lists.append(moved)
    return lists


class _Played:
    """Writes the program of one rank."""

    def __init__(self, plan: Plan, costs: Costs, rank: int) -> None:
        self._plan, self._costs, self._rank = plan, costs, rank
        self._program = Program(rank)
        self._posted: dict[Action, int] = {}

    def of(self, actions: Sequence[Action]) -> list[Word]:
        for action in actions:
            self._play(action)
        return self._program.words

    def _play(self, action: Action) -> None:
        if action.kind in COMPUTE or action.kind is Kind.STEP:
            self._compute(action)
        elif action.kind in TRANSFERS:
            self._post(action)
        elif action.kind is Kind.WAIT:
            for sub in action.subs:
                self._program.wait(str(action), self._posted[sub])
        elif action.kind in (Kind.TIE_REDUCE, Kind.CLIP):
            self._meet(action)
        elif action.kind is not Kind.FREE:
            self._bucket(action)

    def _compute(self, action: Action) -> None:
        for gather in action.gathers:
            self._bucket(gather)
        # The k-th of n reductions begins when (k+1)/n of the action are computed.
        parts = max(1, len(action.reduces))
        for part in range(parts):
            self._program.compute(str(action), self._costs.duration(action) / parts)
            if action.reduces:
                self._bucket(action.reduces[part])

    def _bucket(self, action: Action) -> None:
        assert action.index is not None
        of = self._costs.reductions if action.kind is Kind.REDUCE else self._costs.gathers
        # Replicas do the same at the same time: this one is the group.
        seconds = of.get(action.index, 0.0)
        self._posted[action] = self._program.collective(str(action), "sum", BUCKETS, (self._rank,), seconds)

    def _meet(self, action: Action) -> None:
        members: Sequence[int] = range(self._plan.num_ranks)
        if action.kind is Kind.TIE_REDUCE:
            members = sorted(set(self._plan.tie_ranks(self._plan.ties[action.index or 0])))
        met = self._program.collective(str(action), "sum", MEETING, members, 0.0)
        self._program.wait(str(action), met)
        self._program.compute(str(action), self._costs.duration(action))

    def _post(self, action: Action) -> None:
        peer, sends = self._plan.peer(action), action.kind in SENDS
        ends = (self._rank, peer) if sends else (peer, self._rank)
        latency, bytes_per_time = self._costs.link(*ends)
        seconds = latency + transfer_bytes(self._plan, action) / bytes_per_time
        group = GROUPS[self._costs.channels](action, ends)
        self._posted[action] = self._program.messages(
            str(action),
            group,
            range(self._plan.num_ranks),
            [(sends, peer)],
            seconds,
            content=str(counterpart(action)) if sends else "",
            expects="" if sends else str(action),
        )


GROUPS: dict[Channels, Callable[[Action, tuple[int, int]], str]] = {
    Channels.PAIR: lambda action, ends: f"pair {ends[0]} {ends[1]}",
    Channels.DIRECTION: lambda action, ends: "activations" if action.kind.name.endswith("F") else "gradients",
    Channels.ONE: lambda action, ends: "pp",
}
