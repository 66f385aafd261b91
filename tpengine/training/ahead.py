"""One thread that reads the samples of coming steps while a step computes.

It is asked for samples by their numbers, and reads one request after the other. Whoever takes samples names them again,
so that what was read ahead is only ever a guess: where a run goes on elsewhere, as after a rollback or with another
phase, the guesses are thrown away. So no state of the thread belongs into a checkpoint: samples count when a step has
taken them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpengine.config import IGNORED_LABEL
from tpengine.training.samples import WEIGHTS, SampleReader, batch_digest

Numbers = NDArray[np.int64]
# A file system that does not answer must not keep a run from ending.
_LAST_READ_SECONDS = 5.0


@dataclass(frozen=True)
class StepSamples:
    """The samples of a rank and step.

    Attributes:
        tokens, labels: int64 [count, S]; None on a rank that needs neither, and with an error.
        starts: where documents begin in each sample; none where sequences are whole.
        weights: float32 [count, S], of each label; None where the text has none.
        columns: the text's other columns, by name: [count, S] or [count, S, width], row t that of label t.
        digest: of all of it (batch_digest); 0 without tokens.
        count: labels that count, or the sum of their weights.
        error: why it could not be read, in one line; empty if it could.
    """

    tokens: NDArray[np.int64] | None = None
    labels: NDArray[np.int64] | None = None
    starts: tuple[Numbers, ...] = ()
    weights: NDArray[np.float32] | None = None
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    digest: int = 0
    count: float = 0.0
    error: str = ""

    def of(self, which: Numbers) -> StepSamples:
        """Return some of the samples, without digest and count."""
        assert self.tokens is not None and self.labels is not None, "samples that were not read have no parts"
        return StepSamples(
            self.tokens[which],
            self.labels[which],
            tuple(self.starts[number] for number in which) if self.starts else (),
            None if self.weights is None else self.weights[which],
            {name: column[which] for name, column in self.columns.items()},
        )


def read_samples(samples: SampleReader, numbers: Numbers, needs_tokens: bool) -> StepSamples:
    """Read samples, or say why they cannot be read.

    Args:
        needs_tokens: whether tokens and labels are needed; a rank without them still needs documents' starts.
    """
    try:
        if not needs_tokens:
            return StepSamples(starts=tuple(samples.document_starts(numbers)) if samples.packs else ())
        tokens, labels, starts = samples.read_with_starts(numbers)
        columns = samples.read_columns(numbers, labels) if samples.columns else {}
    except ValueError as problem:
        return StepSamples(error=str(problem))
    digest = batch_digest(tokens, labels, starts, columns)
    stored = columns.pop(WEIGHTS, None)
    weights = None if stored is None else stored.astype(np.float32, copy=False)
    # Weights are zero where a label is ignored; in float64, in which layouts agree on the sum.
    count = float((labels != IGNORED_LABEL).sum() if weights is None else weights.sum(dtype=np.float64))
    return StepSamples(tokens, labels, tuple(starts), weights, columns, digest, count)


@dataclass
class _Request:
    """Samples that the thread was asked for; `found`, or `failure`, is there when `done` is set."""

    numbers: Numbers
    done: threading.Event = field(default_factory=threading.Event)
    is_wanted: bool = True
    found: StepSamples | None = None
    failure: BaseException | None = None


class ReadAhead:
    """Reads samples in a thread, in the order in which they are asked for.

    Args:
        samples: of the text.
        needs_tokens: as read_samples.

    The thread ends with `close`, and with this object. It starts when it is first asked, also after `close`.

    Memory: the samples that are asked for and not taken.
    """

    def __init__(self, samples: SampleReader, needs_tokens: bool) -> None:
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._asked: deque[_Request] = deque()
        self._read = partial(read_samples, samples, needs_tokens=needs_tokens)
        self._thread: threading.Thread | None = None
        # The thread holds no reference to this object: an owner that lets it go ends the thread.
        weakref.finalize(self, self._requests.put, None)

    @property
    def num_asked(self) -> int:
        """How many requests have not been taken."""
        return len(self._asked)

    def ask(self, numbers: Numbers) -> None:
        """Have the thread read samples."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._requests, self._read), name="tpengine-read-ahead", daemon=True
            )
            self._thread.start()
        request = _Request(numbers)
        self._asked.append(request)
        self._requests.put(request)

    def is_there(self, numbers: Numbers) -> bool:
        """Return whether taking these samples would not wait."""
        return bool(self._asked) and np.array_equal(self._asked[0].numbers, numbers) and self._asked[0].done.is_set()

    def peek(self, numbers: Numbers) -> StepSamples | None:
        """Return these samples without taking them; None if they are not there, or reading them has failed."""
        return self._asked[0].found if self.is_there(numbers) else None

    def take(self, numbers: Numbers) -> StepSamples:
        """Wait for samples and return them; what was asked for before them is thrown away.

        Raises: whatever reading raised but ValueError, which is the samples' `error`.
        """
        while self._asked and not np.array_equal(self._asked[0].numbers, numbers):
            self._asked.popleft().is_wanted = False
        if not self._asked:
            self.ask(numbers)
        request = self._asked.popleft()
        # A signal is handled meanwhile: in Python an Event's wait goes on after it.
        request.done.wait()
        if request.failure is not None:
            raise request.failure
        assert request.found is not None, "a request that is done has an answer"
        return request.found

    def close(self) -> None:
        """End the thread; what it reads at the moment is thrown away."""
        while self._asked:
            self._asked.popleft().is_wanted = False
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join(_LAST_READ_SECONDS)
            # One that a disk still holds up has requests of its own.
            self._thread, self._requests = None, SimpleQueue()
            weakref.finalize(self, self._requests.put, None)


def _serve(requests: SimpleQueue[_Request | None], read: Callable[[Numbers], StepSamples]) -> None:
    """Answer requests until None comes."""
    while (request := requests.get()) is not None:
        if request.is_wanted:
            try:
                request.found = read(request.numbers)
            except BaseException as failure:
                request.failure = failure
        request.done.set()
        # Hold nothing that was taken.
        del request
