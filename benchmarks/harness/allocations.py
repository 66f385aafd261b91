"""What torch allocates while something runs, counted: every tensor of this thread, however short its life. CPU."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile, record_function

_COUNTED = "what is counted"


class Allocations:
    """Counts what is allocated from the moment it is entered.

        with Allocations() as counted:
            trainer.step.run(0)
            with counted.here():
                trainer.step.run(1)
        counted.peak_bytes()

    Not counted, because torch's allocator does not make it: memory that ranks share, and what a matrix library takes
    inside a product. Not counted either: what other threads allocate.
    """

    def __init__(self) -> None:
        self._recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Allocations:
        self._recorded.__enter__()
        return self

    def __exit__(self, *of_error: object) -> None:
        self._recorded.__exit__(*of_error)

    def here(self) -> record_function:
        """Return the context whose peak is asked for; enter it once."""
        return record_function(_COUNTED)

    def peak_bytes(self) -> int:
        """Return the most that was held at once in that context, of all that was allocated since the beginning."""
        profiler = self._recorded.profiler
        assert profiler is not None and profiler.kineto_results is not None, "it was entered and left"
        events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
        (context,) = (event for event in events if event.name() == _COUNTED)
        held, most = 0, 0
        for event in events:
            if event.name() == "[memory]":
                held += event.nbytes()  # type: ignore[attr-defined]
                if context.start_ns() <= event.start_ns() <= context.start_ns() + context.duration_ns():
                    most = max(most, held)
        return most
