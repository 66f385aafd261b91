"""The learning rate of a step: warm-up, and the shape after it. No torch.

    warm-up    step < w:   b + (lr - b) (step + 1) / w            b: the rate before, 0 at the start of a run
    after it               lr (r + (1 - r) f(p))                  r: min_lr_ratio, p: share of the decay that is over

    cosine     f(p) = (1 + cos(pi p)) / 2        linear   f(p) = 1 - p
    wsd        f(p) = 1 - sqrt(p)                constant f(p) = 1

With n steps the decay is p = (step - d) / (n - 1 - d), so that the last step has p = 1; with D tokens it is p = (tokens
before the step - d) / (D - d), whatever the size of a step, so that a step that becomes larger makes no jump. d is
decay_from, or the end of the warm-up; with wsd n - n/5. Before d p is 0, behind the end 1.

Sources: cosine, Loshchilov and Hutter, arXiv 1608.03983; warm-up-stable-decay, Hu et al. (MiniCPM), arXiv 2404.06395;
its 1 - sqrt, Haegele et al., arXiv 2405.18392, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tpengine.config import OptimConfig, Phases, decay_steps_of
from tpengine.config.lengths import Amount, amount_of

_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    "linear": lambda p: 1 - p,
    "wsd": lambda p: 1 - math.sqrt(p),
}
# Share of a wsd schedule that it decays in, unless decay_from says it: 1 / this.
_WSD_SHARE = 5


def learning_rate(
    config: OptimConfig,
    step: int,
    horizon: int | str,
    tokens_before: Callable[[int], int] = lambda step: step,
    rate_before: float = 0.0,
) -> float:
    """Return the rate of a step; see the module's head.

    Args:
        step: 0-based, since the schedule began.
        horizon: length of the schedule (config.decay_steps_of).
        tokens_before: step -> tokens of all steps before it, since the schedule began.
        rate_before: that a warm-up begins at.
    """
    warmup, end = amount_of(config.warmup_steps, "optim.warmup_steps"), amount_of(horizon, "optim.decay_steps")
    after = step + 1
    if warmup.unit == "tokens":
        step_done, after = tokens_before(step), min(tokens_before(step + 1), warmup.number)
    else:
        step_done = step
    if step_done < warmup.number:
        return rate_before + (config.lr - rate_before) * after / warmup.number
    if config.schedule == "constant":
        return config.lr
    begin = _decay_begin(config, warmup, end, tokens_before)
    now, span = (step, end.number - 1 - begin) if end.unit == "steps" else (tokens_before(step), end.number - begin)
    progress = min(1.0, max(0, now - begin) / max(1, span))
    shape = _SHAPES[config.schedule](progress)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def rate_of_step(phases: Phases, step: int) -> float:
    """Return the rate of a step of a run, by the schedule of its phase.

    Args: phases: of the run. step: 0-based.
    """
    return _rate(phases, phases.at(step).schedule, step)


def _rate(phases: Phases, number: int, step: int) -> float:
    """Return the rate of a step by the schedule that phase `number` began."""
    begun = phases[number]
    first, tokens = begun.first_step, begun.tokens_before
    optim = begun.config.optim
    # What the schedule before would have had for this phase's first step.
    before = _rate(phases, phases[number - 1].schedule, first) if number else 0.0
    if begun.keeps_rate:
        optim = replace(optim, lr=before)
    return learning_rate(
        optim, step - first, decay_steps_of(begun.config), lambda n: phases.tokens_before(first + n) - tokens, before
    )


def _decay_begin(config: OptimConfig, warmup: Amount, end: Amount, tokens_before: Callable[[int], int]) -> int:
    """Return where the decay begins, in the unit of its end."""
    begin = amount_of(config.decay_from, "optim.decay_from")
    if begin.number:
        return _in_unit(end.unit, begin, tokens_before)
    after_warmup = _in_unit(end.unit, warmup, tokens_before)
    return max(after_warmup, end.number - end.number // _WSD_SHARE) if config.schedule == "wsd" else after_warmup


def _in_unit(unit: str, amount: Amount, tokens_before: Callable[[int], int]) -> int:
    """Return a length in another unit: tokens before a step, or the first step before which there were so many."""
    if amount.unit == unit:
        return amount.number
    if unit == "tokens":
        return tokens_before(amount.number)
    low, high = 0, 1
    while tokens_before(high) < amount.number:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if tokens_before(middle) < amount.number else (low, middle)
    return low
