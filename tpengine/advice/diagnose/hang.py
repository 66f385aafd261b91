"""How a run ended that could not go on: the chain of ranks that waited for each other, from their last words."""

from __future__ import annotations

from collections.abc import Mapping

from tpengine.last_words import LastWords


def chain(words: Mapping[int, LastWords]) -> str:
    """Return in one line who waited for whom, from the rank that waits longest to the one that explains it.

    A rank explains it that waits for nobody, has left no words, or has occurred before: then they wait in a circle.

    Args: words: by rank, at least one.
    """
    rank = _first(words)
    seen: list[int] = []
    text = (
        f"the run ended in step {words[rank].step}: rank {rank}" if words[rank].step else f"the run ended: rank {rank}"
    )
    while True:
        seen.append(rank)
        of_rank = words[rank]
        link = ", which" if len(seen) > 1 else ""
        text += f"{link} was in {of_rank.doing} for {of_rank.seconds:.1f} s"
        following = _next(of_rank, words, seen)
        if following is None:
            return f"{text}, waiting for nobody: {of_rank.reason}"
        axis, rank = following
        text += f", waiting for rank {rank} ({axis})"
        if rank in seen:
            return f"{text}: they wait in a circle"
        if rank not in words:
            fate = "whose process had ended" if rank in of_rank.gone else "which left no last words"
            return f"{text}, {fate}: look at its output"


def _first(words: Mapping[int, LastWords]) -> int:
    """Return the rank to begin with: one that nobody else waited for, if there is one; the one that waited longest."""
    awaited = {rank for of_rank in words.values() for ranks in of_rank.waits.values() for rank in ranks}
    free = [rank for rank in words if rank not in awaited and words[rank].waits] or list(words)
    return max(free, key=lambda rank: words[rank].seconds)


def _next(of_rank: LastWords, words: Mapping[int, LastWords], seen: list[int]) -> tuple[str, int] | None:
    """Return the rank that explains a wait: one that has gone, else one without words, else one that waits least."""
    waits = [(axis, rank) for axis, ranks in of_rank.waits.items() for rank in ranks]
    if not waits:
        return None

    def rule(wait: tuple[str, int]) -> tuple[bool, bool, bool, int]:
        _, rank = wait
        has_words = rank in words
        return (
            rank not in of_rank.gone or has_words,
            has_words,
            rank in seen,
            sum(map(len, words[rank].waits.values())) if has_words else 0,
        )

    return min(waits, key=rule)
