"""PlanError: which rule a plan breaks, where, and a picture of the place."""

from __future__ import annotations

from tpengine.plan.plan import Plan

_CONTEXT = 3


class PlanError(ValueError):
    """A plan breaks a rule.

    The message is one line: the rule, then the values. `rank` and `position` locate the fault in `plan.actions`:
    position len(list) means that something is missing at the end, None that the fault is not in a list. `picture` shows
    the list around the place with an arrow; it is empty where there is no place.
    """

    def __init__(self, message: str, rank: int | None = None, position: int | None = None, picture: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.position = position
        self.picture = picture


def fault(plan: Plan, rule: str, values: str, rank: int | None = None, position: int | None = None) -> PlanError:
    """Build the error for a broken rule.

    Args: plan: for the picture. rule: always the same words for the same rule. values: what was found.
        rank, position: where, if it is in a list.
    """
    if rank is None or position is None:
        return PlanError(f"{rule}: {values}", rank, position)
    place = f"rank {rank}, action {position}"
    return PlanError(f"{rule}: {values} ({place})", rank, position, _picture(plan, rank, position))


def _picture(plan: Plan, rank: int, position: int) -> str:
    words = [*map(str, plan.actions[rank]), "<end>"]
    start, end = max(position - _CONTEXT, 0), min(position + _CONTEXT + 1, len(words))
    before = " ".join([f"rank {rank}: {'... ' if start else ''}".rstrip(), *words[start:position]])
    after = " ".join(words[position:end]) + (" ..." if end < len(words) else "")
    return f"{before} {after}\n{' ' * (len(before) + 1)}^ action {position} of {len(words) - 1}"
