"""What is decided once, where a computation is computed again for its backward: it must be decided alike.

torch.utils.checkpoint runs a forward a second time. Whose attention it takes, and which experts a token goes to, must
be what it was: else backward would have been promised something that is not there, or be that of other weights.

    with recorded:  y = forward(x)          once(decide) decides, and what comes of it is kept
    with again:     y = forward(x)          once(decide) returns what was kept, in the same order

The decision a reader will question: what is kept belongs to the thread's innermost context, not to a layer, because a
layer has many micro-batches under way, and does not know which of them is computed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

Decided = TypeVar("Decided")


def once(decide: Callable[[], Decided]) -> Decided:
    """Return decide(); in a computation that is computed again what it returned the first time.

    Args:
        decide: the same calls in the same order each time; what it returns is kept as it is: tensors detached.
    """
    again: list[_Repeating] = _of_this_thread("again")
    decided: Decided = again[-1].next() if again else decide()
    for kept in _of_this_thread("kept"):
        kept.append(decided)
    return decided


def same_choices() -> tuple[_Recording, _Repeating]:
    """Return contexts for a computation, and for its being computed again (torch.utils.checkpoint's context_fn)."""
    kept: list[Any] = []
    return _Recording(kept), _Repeating(kept)


_threads = threading.local()


def _of_this_thread(name: str) -> list[Any]:
    found: list[Any] | None = getattr(_threads, name, None)
    if found is None:
        found = []
        setattr(_threads, name, found)
    return found


class _Recording:
    """Keeps what is decided inside of it."""

    def __init__(self, kept: list[Any]) -> None:
        self._kept = kept

    def __enter__(self) -> None:
        _of_this_thread("kept").append(self._kept)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _of_this_thread("kept").pop()


class _Repeating:
    """Has what was kept decided again, in the same order; entered once more it begins anew."""

    def __init__(self, kept: list[Any]) -> None:
        self._kept, self._place = kept, 0

    def __enter__(self) -> None:
        self._place = 0
        _of_this_thread("again").append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _of_this_thread("again").pop()

    def next(self) -> Any:
        """Return the next decision."""
        assert self._place < len(self._kept), "what is computed again decides more often than before"
        self._place += 1
        return self._kept[self._place - 1]
