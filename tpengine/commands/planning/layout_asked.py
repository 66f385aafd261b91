"""The one layout that `tpengine plan` and `tpengine schedule` are asked for. No torch."""

from __future__ import annotations

import math

from tpengine.config.ranges import divisors, nearest_of
from tpengine.config.rules import ZERO_OF_SLICED_WEIGHTS
from tpengine.plan import SCHEDULES
from tpengine.planner.advice.question import Candidate, Question


def layout_asked(question: Question) -> Candidate:
    """Return the layout that is asked for; what is not said is as the command that is printed would run it.

    Raises:
        ValueError: sizes that do not divide, a setting that says nothing of this layout.
    """
    fixed, kept = question.fixed, question.kept
    tp, pp, dp = _axes(question)
    size = fixed.get("micro_batch_size") or _micro_batch_size(question, dp)
    number, rest = divmod(question.global_batch, dp * size)
    if rest or not number:
        near = max(1, round(question.global_batch / (dp * size))) * dp * size
        raise ValueError(
            f"the global batch must be divisible by dp and the sequences of a micro-batch: {question.global_batch}, "
            f"dp {dp}, {size} per micro-batch: use --global-batch {near}"
        )
    schedule = fixed.get("schedule", kept.schedule)
    zero = fixed.get("zero", kept.zero)
    form = SCHEDULES.get(schedule)
    chunks = (form.num_chunks if form else 1) or fixed.get("chunks_per_rank", kept.chunks_per_rank)
    if fixed.get("chunks_per_rank", chunks) != chunks:
        raise ValueError(
            f"chunks per rank are of the interleaved schedule: got {fixed['chunks_per_rank']} of {schedule}, which has "
            f"{chunks}: use --schedule interleaved, or leave --chunks out"
        )
    if "residency" in fixed and zero != ZERO_OF_SLICED_WEIGHTS:
        raise ValueError(
            f"a residency is of weights at zero {ZERO_OF_SLICED_WEIGHTS}: got {fixed['residency']} at zero {zero}: use "
            f"--zero {ZERO_OF_SLICED_WEIGHTS}, or leave --residency out"
        )
    return Candidate(
        tp=tp,
        pp=pp,
        dp=dp,
        schedule=schedule,
        chunks_per_rank=chunks,
        micro_batch_size=size,
        num_micro_batches=number,
        zero=zero,
        residency=fixed.get("residency", "step" if kept.residency == "auto" else kept.residency),
        recompute=fixed.get("recompute", kept.recompute),
        gathered=fixed.get("gathered", kept.gathered),
        tp_comm=fixed.get("tp_comm", kept.tp_comm),
        bucket_bytes=fixed.get("bucket_bytes", 0),
    )


def _axes(question: Question) -> tuple[int, int, int]:
    """Return tp, pp and dp: those of the run that goes on, if it has as many ranks and none is asked for."""
    fixed, kept, heads = question.fixed, question.kept, question.base.model.num_heads
    sizes = kept.tp or 1, kept.pp or 1, kept.dp or 1
    if not {"tp", "pp", "dp"} & fixed.keys() and math.prod(sizes) == question.num_ranks:
        return sizes
    tp, pp = fixed.get("tp", 1), fixed.get("pp", 1)
    if heads % tp:
        raise ValueError(
            f"the model's heads must be divisible by tp: {heads} heads, tp {tp}: use "
            f"{nearest_of('--tp', tp, divisors(heads))}"
        )
    dp = fixed.get("dp", max(1, question.num_ranks // (tp * pp)))
    if tp * pp * dp != question.num_ranks:
        raise ValueError(
            f"tp*pp*dp must equal the number of ranks: tp {tp} pp {pp} dp {dp}, ranks {question.num_ranks}: use "
            f"--ranks {tp * pp * dp}, or axes that divide {question.num_ranks}"
        )
    return tp, pp, dp


def _micro_batch_size(question: Question, dp: int) -> int:
    """Return the run's or preset's micro-batch, or the next smaller one that divides a replica's sequences."""
    per_replica = max(1, question.global_batch // dp)
    most = min(question.base.train.micro_batch_size, per_replica)
    return next(size for size in range(most, 0, -1) if per_replica % size == 0)
