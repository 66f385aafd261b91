"""Why there is no answer: no layout divides, or none fits, and what would help. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tpengine.commands.planning.fixed import flag_of, listed
from tpengine.config.lengths import MOST_MICRO_BATCHES
from tpengine.planner.advice.changes import what_fits
from tpengine.planner.advice.question import Question, shapes
from tpengine.planner.advice.search import Found
from tpengine.planner.advice.units import gigabytes
from tpengine.planner.advice.words import change_text, too_large_text

# The place of a size among those of a shape.
_PLACES = {"tp": 0, "pp": 1, "dp": 2, "micro_batch_size": 3}
# So many smaller numbers of ranks are tried.
_MOST_TRIED = 64


def nothing_divides(question: Question) -> str:
    """Return why there is no layout at all, and the nearest that there is."""
    model, fixed = question.base.model, question.fixed
    dp = fixed.get("dp")
    if isinstance(dp, int) and question.global_batch % dp:
        near = max(dp, round(question.global_batch / dp) * dp)
        return (
            f"the global batch must be divisible by dp: {question.global_batch} sequences, dp {dp}: use "
            f"--global-batch {near}"
        )
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in fixed.items()}
    given = " ".join(f"{name} {listed(of)}" for name, of in values.items()) or "no setting fixed"
    return (
        f"no layout divides: {question.num_ranks} ranks, {question.global_batch} sequences, at most "
        f"{MOST_MICRO_BATCHES:,} micro-batches, {model.num_heads} heads, {model.num_kv_heads} KV heads, "
        f"{model.num_layers} layers, {given}: use {' or '.join(_that_divide(question)) or 'fewer ranks'}"
    )


def _that_divide(question: Question) -> Iterator[str]:
    """Yield options of which each alone gives layouts."""
    for name in (name for name in _PLACES if name in question.fixed):
        free = replace(question, fixed={key: value for key, value in question.fixed.items() if key != name})
        found = tuple(sorted({shape[_PLACES[name]] for shape in shapes(free)}))
        if found:
            yield f"{flag_of(name)} of {listed(found)}"
    # More ranks than sequences, heads and layers have no work.
    most = question.global_batch * question.base.model.num_heads * question.base.model.num_layers
    first, per_node = min(question.num_ranks - 1, most), question.machine.ranks_per_node
    for num_ranks in range(first, max(0, first - _MOST_TRIED), -1):
        is_even = num_ranks <= per_node or num_ranks % per_node == 0
        if is_even and next(shapes(replace(question, num_ranks=num_ranks)), None) is not None:
            yield f"--ranks {num_ranks}"
            return


def nothing_fits(question: Question, found: Found, limit_seconds: float) -> str:
    """Return why no layout fits: the nearest, and the changes after which one does."""
    limit = gigabytes(question.memory_limit)
    if not found.num_layouts:
        given = " ".join(f"{flag_of(name)} {value}" for name, value in question.fixed.items())
        return (
            f"no layout has all of these: {given}: pp times chunks are at most the {question.base.model.num_layers} "
            "layers, and the interleaved schedule alone, with a pipeline, takes any number of chunks: leave one out"
        )
    if found.too_large is None:
        if found.gap is not None:
            more = 10 * max(1, math.ceil(found.seconds))
            return (
                f"no layout was found in {found.seconds:.0f} s, {found.num_simulated} simulated: use --seconds {more}"
            )
        if found.refused:
            return f"no layout can run: {found.refused[0]}"
        return (
            f"no layout fits: a rank may hold {limit}, and all {found.num_layouts:,} layouts hold more: use more "
            "ranks, a shorter sequence, or GPUs with more memory"
        )
    seen = "no layout fits" if found.gap is None else f"no layout fits of {found.num_simulated} simulated in time"
    fits = [change_text(change) for change in what_fits(question, limit_seconds)]
    needed, has = found.too_large.num_bytes, question.machine.memory_bytes
    if question.base.parallel.memory_limit and not 0 < has < needed:
        fits.append(f"--memory-limit {needed:.0f}")
    return (
        f"{seen}: a rank may hold {limit}; nearest: {too_large_text(question, found.too_large)}: "
        f"{'it fits with ' + ', or '.join(fits) if fits else _without_a_change(found)}"
    )


def _without_a_change(found: Found) -> str:
    """Return what may help where no change was found: a shorter sequence only against what grows with it."""
    assert found.too_large is not None
    _, memory = found.too_large.memory
    grows = memory.activations + memory.slots > memory.peak / 2
    return "use a shorter sequence, or GPUs with more memory" if grows else "use more ranks, or GPUs with more memory"
