"""How far a search has come: one line on a terminal's standard error, once it takes longer than a moment. No torch."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from tpengine.observe.safe_console import SafeConsole

# Sooner there is nothing to wait for.
MOMENT_SECONDS = 1.0


@contextlib.contextmanager
def shown(words: str, moment_seconds: float = MOMENT_SECONDS) -> Iterator[Callable[[str], None]]:
    """Show what is done, and for how long; yield what says it in other words. The line is removed at the end.

    Args: words: at the beginning. moment_seconds: after which the line appears.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    # Only a search that is waited for needs it.
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    progress = Progress(*columns, console=SafeConsole(stderr=True), transient=True)
    task = progress.add_task(words, total=None)
    begins = threading.Timer(moment_seconds, progress.start)
    begins.daemon = True
    begins.start()
    try:
        yield lambda other: progress.update(task, description=other)
    finally:
        begins.cancel()
        begins.join()
        progress.stop()
