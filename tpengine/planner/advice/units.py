"""Durations and bytes in few digits, with their unit."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Return a duration in s or ms, three digits."""
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.0f} s" if abs(seconds) >= 100 else f"{seconds:.3g} s"


def days_text(seconds: float) -> str:
    """Return how long a run takes: in days, hours or minutes, three digits."""
    for unit, length in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= length:
            number = seconds / length
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return seconds_text(seconds)


def gigabytes(num_bytes: float) -> str:
    """Return bytes in GB, or in MB, kB or bytes where they are few."""
    if num_bytes >= 10e9:
        return f"{num_bytes / 1e9:.0f} GB"
    if num_bytes >= 1e6:
        return f"{num_bytes / 1e6:,.0f} MB"
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes >= 1e3 else f"{num_bytes:.0f} B"
