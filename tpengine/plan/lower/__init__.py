"""Lowering: from compute lists to the complete plan, in passes that each add one thing to each rank's list.

    transfers.py     boundary tensors cross to the next rank the moment they exist; receives are posted then
    reductions.py    gradient buckets start inside the last backward that fills them
    waits.py         what was started is waited for as late as its use allows
    ending.py        ties, clipping, the optimizer's step

Which buckets there are is the caller's choice; slack.py tells how much time each chunk leaves them. Which buffer a
receive writes follows from the finished list (slots.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpengine.plan.lower.ending import add_ending
from tpengine.plan.lower.reductions import add_reductions
from tpengine.plan.lower.transfers import add_transfers
from tpengine.plan.lower.waits import add_waits
from tpengine.plan.plan import Bucket, Chunk, Plan, Tie
from tpengine.plan.schedules import Schedule

__all__ = ["lower"]


def lower(
    schedule: Schedule,
    chunks: Sequence[Chunk],
    buckets: Sequence[Bucket],
    ties: Sequence[Tie],
    num_microbatches: int,
    num_layers: int,
    training: bool,
) -> Plan:
    """Complete compute lists to a plan. It is not verified here: pass it to `verify`.

    Args:
        schedule: compute actions, from a generator.
        chunks: the model's pieces in model order, on the ranks that the schedule gives them.
        buckets: reductions; those that are complete in the same backward in the order in which it completes them.
        ties: parameters shared between ranks, in the order in which every member sums them.
        num_microbatches: micro-batches of one data-parallel replica.
        num_layers: layers of the whole model.
        training: False leaves out reductions, ties, clipping and the step.
    Returns: the plan.
    Raises: ValueError: the compute lists cannot finish, or schedule and chunks do not agree.
    Cost: linear in the number of actions, times the logarithm of a rank's.
    """
    _check_chunks(schedule, chunks)
    lists = add_transfers(schedule)
    if training:
        own = _buckets_by_rank(schedule.ranks, buckets)
        lists = tuple(add_reductions(actions, own[rank]) for rank, actions in enumerate(lists))
    lists = tuple(add_waits(actions) for actions in lists)
    if training:
        lists = tuple(add_ending(actions, rank, schedule.ranks, ties) for rank, actions in enumerate(lists))
    return Plan(
        schedule=schedule.name,
        num_microbatches=num_microbatches,
        num_layers=num_layers,
        chunks=tuple(chunks),
        buckets=tuple(buckets),
        ties=tuple(ties),
        actions=lists,
        training=training,
    )


def _check_chunks(schedule: Schedule, chunks: Sequence[Chunk]) -> None:
    ranks = tuple(chunk.rank for chunk in chunks)
    used = {action.piece[0] for actions in schedule.compute for action in actions}
    if ranks != schedule.ranks or used != set(range(len(ranks))):
        raise ValueError(
            f"schedule and chunks must agree: the lists use chunks {sorted(used)} on ranks {list(schedule.ranks)}, the "
            f"chunks are on ranks {list(ranks)}: give one chunk for each of the schedule's"
        )


def _buckets_by_rank(ranks: Sequence[int], buckets: Sequence[Bucket]) -> Mapping[int, Sequence[Bucket]]:
    """Return each rank's buckets; what is wrong with a bucket is for `verify` to say."""
    found: dict[int, list[Bucket]] = {rank: [] for rank in ranks}
    for bucket in buckets:
        for rank in {ranks[chunk] for chunk in bucket.chunks if 0 <= chunk < len(ranks)}:
            found[rank].append(bucket)
    return found
