"""Lowering: passes that turn compute lists into the complete plan. Each adds one thing to each rank's list.

    transfers.py     tensors are sent to the next rank as soon as they exist; receives are posted at the same time
    reductions.py    gradient buckets start inside the last backward that fills them, or inside each
    residency.py     weights that a replica holds in part are gathered before their use, and freed after it
    waits.py         each asynchronous action is waited for as late as its use allows
    ending.py        ties, clipping, the optimizer's step

The caller chooses the buckets; slack.py tells how much time each chunk leaves for reducing them. slots.py derives from
the finished list which buffer each receive writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpengine.plan.lower.ending import add_ending
from tpengine.plan.lower.reductions import add_reductions
from tpengine.plan.lower.residency import add_residency
from tpengine.plan.lower.transfers import add_transfers
from tpengine.plan.lower.waits import add_waits
from tpengine.plan.plan import Bucket, Chunk, Plan, Residency, Tie
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
    residency: Residency = Residency.STEP,
) -> Plan:
    """Complete compute lists to a plan. It is not verified here: pass it to `verify`.

    Args:
        schedule: compute actions, from a generator.
        chunks: the model's pieces in model order, on the ranks that the schedule gives them.
        buckets: what to gather and reduce. Those that the same backward completes are listed in the order in which it
            does.
        ties: parameters shared between ranks, in the order in which every member sums them.
        num_microbatches: micro-batches of one data-parallel replica.
        num_layers: layers of the whole model.
        training: False leaves out reductions, ties, clipping and the step.
        residency: how long the gathered weights of SLICED buckets are kept.
    Returns: the plan.
    Raises: ValueError: the compute lists cannot finish, or schedule and chunks do not agree.
    Cost: O(n log n) in the number n of actions, sub-actions included.
    """
    _check_chunks(schedule, chunks)
    lists = add_transfers(schedule)
    own = _buckets_by_rank(schedule.ranks, buckets)
    if training:
        lists = tuple(add_reductions(actions, own[rank]) for rank, actions in enumerate(lists))
    lists = tuple(add_residency(actions, own[rank], residency) for rank, actions in enumerate(lists))
    lists = tuple(add_waits(actions, own[rank]) for rank, actions in enumerate(lists))
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
