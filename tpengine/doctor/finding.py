"""What an examination finds: one line of its table, and the verdict of all of them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["ok", "change", "unseen"]

# Columns of the widest `what` and `value`; longer ones are wrapped by the terminal, not cut.
_WHAT, _VALUE = 34, 46


@dataclass(frozen=True)
class MachineFinding:
    """One fact, and what it means for a run.

    Attributes:
        what: was looked at.
        value: what it is; of `unseen` why nothing was seen.
        unit: of the value; empty for words.
        verdict: ok, change (the run would fail, be wrong or be slow), or unseen.
        remedy: of `change` the command that helps, or what to ask whom; of `unseen` what would show it, if anything.
        where: whom it is about, as "host 1" or "ranks 0 to 3"; empty for all.
    """

    what: str
    value: str
    unit: str = ""
    verdict: Verdict = "ok"
    remedy: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        assert self.verdict != "change" or self.remedy, f"{self.what}: say what helps"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self)


def ok(what: str, value: str, unit: str = "", *, where: str = "") -> MachineFinding:
    """Return what is as it should be."""
    return MachineFinding(what, value, unit, where=where)


def change(what: str, value: str, unit: str = "", *, remedy: str, where: str = "") -> MachineFinding:
    """Return what has to be changed before a run, and how."""
    return MachineFinding(what, value, unit, "change", remedy, where)


def unseen(what: str, why: str, remedy: str = "", *, where: str = "") -> MachineFinding:
    """Return what could not be looked at, and why."""
    return MachineFinding(what, why, verdict="unseen", remedy=remedy, where=where)


def is_ready(findings: Sequence[MachineFinding]) -> bool:
    """Return whether nothing has to be changed; what was not seen does not count, and is said."""
    return all(finding.verdict != "change" for finding in findings)


def table(findings: Sequence[MachineFinding]) -> list[str]:
    """Return the lines of the table: verdict, what, value with its unit, where."""
    lines = []
    for finding in findings:
        value = f"{finding.value} {finding.unit}".rstrip()
        lines.append(
            f"{finding.verdict:<7} {finding.what:<{_WHAT}} {value:<{_VALUE}} {finding.where}".rstrip(),
        )
    return lines


def verdict_lines(findings: Sequence[MachineFinding]) -> list[str]:
    """Return how the examination ends: what was not seen, then "ready", or what to change with its commands."""
    hidden = [finding.what for finding in findings if finding.verdict == "unseen"]
    lines = [f"not looked at: {', '.join(dict.fromkeys(hidden))}"] if hidden else []
    if is_ready(findings):
        return [*lines, "ready"]
    wrong = [finding for finding in findings if finding.verdict == "change"]
    lines.append(f"not ready: {len(wrong)} to change")
    for number, finding in enumerate(wrong, 1):
        value = f"{finding.value} {finding.unit}".rstrip()
        where = f" ({finding.where})" if finding.where else ""
        lines += [f"{number}. {finding.what}{where}: {value}", f"       {finding.remedy}"]
    return lines


def places(numbers: Sequence[int], what: str = "rank") -> str:
    """Return numbers of ranks or hosts in words: "rank 3", "ranks 0 to 7", "hosts 0, 2"."""
    some = sorted(set(numbers))
    if len(some) == 1:
        return f"{what} {some[0]}"
    if len(some) > 2 and some == list(range(some[0], some[-1] + 1)):
        return f"{what}s {some[0]} to {some[-1]}"
    return f"{what}s {', '.join(map(str, some))}"
