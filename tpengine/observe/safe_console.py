"""The console of all commands: what it prints cannot control the terminal (terminal.py). No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tpengine.terminal import escaped, raw

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


class SafeConsole(Console):
    """rich's console, whose texts cannot control the terminal; by default they are no markup either."""

    def __init__(self, *, markup: bool = False, emoji: bool = False, highlight: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, emoji=emoji, highlight=highlight, **options)

    @property
    def file(self) -> IO[str]:
        """The stream below: rich's own sequences pass."""
        return raw(super().file)

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Give the segments of what is printed, their texts as `escaped` has them; rich renders all through this."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)

    def progress(self, *columns: ProgressColumn) -> Progress:
        """Return a line that shows on a terminal how far something is, and is removed at its end."""
        # Only what is waited for needs it.
        from rich.progress import Progress

        return Progress(*columns, console=self, transient=True, disable=not self.is_terminal)
