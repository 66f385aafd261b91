"""Matching: the k-th send from a to b is the k-th receive at b from a, of the same tensor."""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

from tpengine.plan.actions import SENDS, TRANSFERS, Action, Kind, counterpart
from tpengine.plan.plan import Plan, TensorSpec
from tpengine.plan.verify.fault import fault

_RULE = "the k-th send is the k-th receive at the peer"

# Position and transfer, in issue order, by (sender, receiver).
_Streams = dict[tuple[int, int], list[tuple[int, Action]]]


def check_matching(plan: Plan) -> None:
    """Check that sends and receives pair up in order, shape and dtype."""
    sends: _Streams = defaultdict(list)
    receives: _Streams = defaultdict(list)
    for rank, actions in enumerate(plan.actions):
        for position, action in enumerate(actions):
            if action.kind not in TRANSFERS:
                continue
            peer = _peer(plan, rank, position, action)
            if action.kind in SENDS:
                sends[rank, peer].append((position, action))
            else:
                receives[peer, rank].append((position, action))
    for pair in sorted(sends.keys() | receives.keys()):
        for k, (send, receive) in enumerate(zip_longest(sends[pair], receives[pair])):
            _check_pair(plan, k, pair, send, receive)


def _peer(plan: Plan, rank: int, position: int, transfer: Action) -> int:
    chunk, microbatch = transfer.piece
    if chunk >= len(plan.chunks) or microbatch >= plan.num_microbatches:
        raise fault(plan, "a transfer names an existing chunk and micro-batch", f"{transfer}", rank, position)
    if plan.chunks[chunk].rank != rank:
        values = f"{transfer} on rank {rank}, chunk {chunk} is on rank {plan.chunks[chunk].rank}"
        raise fault(plan, "a rank transfers for its own chunks", values, rank, position)
    try:
        peer = plan.peer(transfer)
    except ValueError as error:
        raise fault(plan, "a transfer has a peer", str(error), rank, position) from None
    if peer == rank:
        raise fault(plan, "chunks on one rank need no transfer", f"{transfer}", rank, position)
    return peer


def _check_pair(
    plan: Plan,
    k: int,
    pair: tuple[int, int],
    send: tuple[int, Action] | None,
    receive: tuple[int, Action] | None,
) -> None:
    sender, receiver = pair
    where = f"number {k} from rank {sender} to rank {receiver}"
    if send is None or receive is None:
        rank, present = (receiver, receive) if send is None else (sender, send)
        assert present is not None, "a pair has at least one side"
        raise fault(plan, _RULE, f"{where} is {present[1]} without counterpart", rank, present[0])
    if counterpart(send[1]) != receive[1]:
        raise fault(plan, _RULE, f"{where} is {send[1]} against {receive[1]}", receiver, receive[0])
    sent, received = _spec(plan, send[1]), _spec(plan, receive[1])
    if sent != received:
        values = f"{where}, {send[1]}, is {sent} against {received}"
        raise fault(plan, "sender and receiver agree on shape and dtype", values, receiver, receive[0])


def _spec(plan: Plan, transfer: Action) -> TensorSpec | None:
    """Return what the chunk declares at the boundary that the transfer crosses."""
    chunk = plan.chunks[transfer.piece[0]]
    return chunk.output if transfer.kind in (Kind.SEND_F, Kind.RECV_B) else chunk.input
