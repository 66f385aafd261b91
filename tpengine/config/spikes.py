"""`train.spike`: what is done about a step whose loss or gradient norm leaps, and what counts as a leap.

    skip | rollback | stop, then how many spreads above the median are a leap, then the steps that median and spread are
    of: "skip", "rollback 20", "stop 10 64"

How steps are judged is in training/update/spikes.py.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, cast, get_args

from tpengine.spelling import meant

Action = Literal["skip", "rollback", "stop"]
_ACTIONS: tuple[str, ...] = get_args(Action)
_FORM = re.compile(r"([a-z]+)(?: +([0-9]{1,6}(?:\.[0-9]{1,6})?))?(?: +([0-9]{1,6}))?")
# Fewer steps have no spread to speak of; the window is in every checkpoint.
_FEWEST_STEPS, _MOST_STEPS = 4, 10_000


class SpikeRule(NamedTuple):
    """What train.spike says.

    Attributes:
        action: what is done about a step that leaps.
        spreads: a loss or norm that is more than this many spreads above the median is a leap.
        window: median and spread are of so many steps before. Half of them must be there, or nothing is judged.
    """

    action: Action
    spreads: float = 10.0
    window: int = 128


def spike_rule_of(text: str) -> SpikeRule | None:
    """Read a value of train.spike; None for the empty one, which judges nothing.

    Raises:
        ValueError: anything else, in one line.
    """
    if not text:
        return None
    match = _FORM.fullmatch(text.strip())
    action = match.group(1) if match else text.split(" ")[0]
    if match is None or action not in _ACTIONS:
        near = meant(action, _ACTIONS) or "skip"
        raise ValueError(
            f"train.spike must be skip, rollback or stop, then maybe a number of spreads and of steps: got {text!r}: "
            f'use {near}, or "{near} {SpikeRule("skip").spreads:g} {SpikeRule("skip").window}"'
        )
    rule = SpikeRule(cast(Action, action))
    if match.group(2):
        rule = rule._replace(spreads=float(match.group(2)))
    if match.group(3):
        rule = rule._replace(window=int(match.group(3)))
    if rule.spreads < 1:
        raise ValueError(
            f"train.spike must allow at least one spread: got {text!r}: use {action} {SpikeRule('skip').spreads:g}"
        )
    if not _FEWEST_STEPS <= rule.window <= _MOST_STEPS:
        raise ValueError(
            f"train.spike takes the median of {_FEWEST_STEPS} to {_MOST_STEPS} steps: got {text!r}: use {action} "
            f"{rule.spreads:g} {min(max(rule.window, _FEWEST_STEPS), _MOST_STEPS)}"
        )
    return rule
