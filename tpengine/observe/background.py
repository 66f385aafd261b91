"""What a step reports, written by a thread: training does not wait for the run's directory, however slow it is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from tpengine.observe.metrics import MetricsWriter


class BackgroundWriter:
    """Hands rows on to a writer of metrics, in their order.

    What a killed process has not yet written is lost: on a directory that keeps up, nothing; on one that is behind, the
    last rows, of steps that the run repeats when it is resumed.

    Args:
        writer: only this object uses it from now on.

    Attributes:
        exit_code: what the run ends with, as far as it is known.
    """

    def __init__(self, writer: MetricsWriter) -> None:
        self._writer, self.exit_code = writer, 0
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="tpengine-metrics", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """As MetricsWriter.write, soon."""
        self._put(partial(self._writer.write, record))

    def complete(self, step: int, found: dict[str, float]) -> None:
        """As MetricsWriter.complete, once the rows before are written."""
        self._put(partial(self._writer.complete, step, found))

    def go_back(self, num_steps: int) -> None:
        """As MetricsWriter.go_back, once the rows before are written."""
        self._put(partial(self._writer.go_back, num_steps))

    def flush(self) -> None:
        """Wait until everything so far is written."""
        written = threading.Event()
        self._put(written.set)
        written.wait()

    def close(self) -> None:
        """Write what is left, and close the writer; a second call does nothing."""
        if not self._thread.is_alive():
            return
        self._tasks.put(None)
        self._thread.join()
        self._writer.close(self.exit_code)

    def _put(self, task: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # a row that is no row: the main thread raises it
                self._error = self._error or error
