"""Weights that come and go while a plan runs (ZeRO): the handlers of its gathers and frees, wherever they stand.

A compute action starts its gathers before it computes, and frees behind it (plan/residency.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpkernels.exchange.pending import Work

from tpengine.data_parallel.weight_buckets import WeightBuckets
from tpengine.pipeline.executor import Handler
from tpengine.plan import Action, Kind
from tpengine.plan.actions import COMPUTE


class WeightMoves:
    """Gathers and frees of one rank.

    Args:
        sliced: the weights; None where every replica holds all of them, and plans neither gather nor free.
        on_start: called with each gather inside a compute action at the moment it starts (for the trace).
        on_change: called when weights have been gathered or freed: what was made of them before is of no use.
    """

    def __init__(
        self,
        sliced: WeightBuckets | None,
        on_start: Callable[[Action], None],
        on_change: Callable[[], None],
    ) -> None:
        self._sliced, self._on_start, self._on_change = sliced, on_start, on_change

    def around(self, handlers: Mapping[Kind, Handler]) -> dict[Kind, Handler]:
        """Return a plan's handlers, with gathers and frees as the plan has them."""
        if self._sliced is None:
            return dict(handlers)
        computing = {kind: self._moving(handler) for kind, handler in handlers.items() if kind in COMPUTE}
        return {**handlers, **computing, Kind.GATHER: self._gather, Kind.FREE: self._free}

    def waiting(self, wait_for_transfer: Callable[[Action], None]) -> Handler:
        """Return the handler of a WAIT that lists transfers and gathers."""

        def wait(action: Action) -> None:
            for started in action.subs:
                if started.kind is Kind.GATHER:
                    self.wait(self._bucket(started))
                else:
                    wait_for_transfer(started)

        return wait

    def wait(self, bucket: int) -> Work:
        """Wait until a bucket's weights are whole; return the gather."""
        work = self.weights.wait(bucket)
        self._on_change()
        return work

    def is_complete(self, bucket: int) -> bool:
        """Return whether `wait` would return at once."""
        return self.weights.is_complete(bucket)

    @property
    def weights(self) -> WeightBuckets:
        """The weights of a plan that gathers."""
        assert self._sliced is not None, "a plan whose weights are whole gathers none"
        return self._sliced

    def _moving(self, handler: Handler) -> Handler:
        def handle(action: Action) -> None:
            for sub in action.subs:
                if sub.kind is Kind.GATHER:
                    self._on_start(sub)
                    self._gather(sub)
            handler(action)
            for sub in action.subs:
                if sub.kind is Kind.FREE:
                    self._free(sub)

        return handle

    def _gather(self, action: Action) -> None:
        bucket = self._bucket(action)
        self.weights.check_owned(bucket)
        self.weights.gather(bucket)

    def _free(self, action: Action) -> None:
        self.weights.free(self._bucket(action))
        self._on_change()

    def _bucket(self, action: Action) -> int:
        assert action.index is not None
        return action.index
