"""Posting: a tensor exists before it is sent, and what is posted is waited for before its use and before the end.

A transfer is posted once. A bucket's gather or reduction may be posted again after it has been waited for.
"""

from __future__ import annotations

from collections import defaultdict

from tpengine.plan.actions import (
    COMPUTE,
    INPUT_GRADIENT,
    SENDS,
    TRANSFERS,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    peer_chunk,
)
from tpengine.plan.plan import Plan
from tpengine.plan.verify.fault import fault


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
