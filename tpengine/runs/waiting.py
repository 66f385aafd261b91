"""Find the ranks that a rank waits for, from its current action, the plan and the mesh, and which of them are gone.

It ends a stuck rank's report. Gone is what this host can tell: whether a process of it is still alive.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from tpkernels.symmetric.processes import host_identity, lives

from tpengine.distributed.hosts import Hosts
from tpengine.distributed.process import link_device
from tpengine.last_words import LastWords
from tpengine.observe.activity import Doing, OtherRanks
from tpengine.plan import Action, Kind
from tpengine.plan.actions import COMPUTE, TRANSFERS, peer_chunk
from tpengine.training.step_batch import READING
from tpengine.training.train_state import TrainState


class Peers:
    """The processes of all ranks; the constructor is collective.

    Args:
        device: where this rank computes.

    Attributes:
        local: process ids of the ranks on this host, by rank.
    """

    def __init__(self, device: torch.device) -> None:
        host = host_identity()
        mine = torch.tensor([host, os.getpid()], dtype=torch.int64, device=link_device(device))
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        # Process ids of other hosts mean nothing here.
        self.local = {rank: int(place[1]) for rank, place in enumerate(everyone) if int(place[0]) == host}

    def gone(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` whose process on this host has ended; never a rank of another host."""
        return [rank for rank in ranks if rank in self.local and not lives(self.local[rank])]


class AwaitedRanks(OtherRanks):
    """The ranks of a run, as the plan lets this one wait for them.

    Args:
        state: has the plan, in its phase, and the mesh.
        peers: the processes of all ranks.
        run_dir: the directory that takes a rank's last words; None where this host does not see it.
        hosts: which rank is on which host; those of other hosts are named with them.
    """

    def __init__(self, state: TrainState, peers: Peers, run_dir: Path | None, hosts: Hosts | None = None) -> None:
        self._state, self._peers, self._run_dir, self._hosts = state, peers, run_dir, hosts or Hosts()

    def waits(self, what: object) -> bool:
        """See OtherRanks."""
        return bool(awaited(self._state, what))

    def explain(self, what: object) -> str:
        """Return which ranks this rank waits for, and which of them are gone, as the end of a sentence.

        Args:
            what: the current action of a plan; or a text for work between plans, in which all ranks meet.

        Returns:
            For example ", waiting for rank 3 (pp); rank 3 is gone"; in a computation without peers ", waiting for
            nobody".
        """
        by_axis = awaited(self._state, what)
        if not by_axis:
            return ", waiting for nobody"
        axes_of: dict[tuple[int, ...], list[str]] = {}
        for axis, ranks in by_axis.items():
            axes_of.setdefault(tuple(ranks), []).append(axis)
        own = dist.get_rank()
        parts = [
            f"{_ranks(ranks)} ({', '.join(axes)}){self._hosts.where(ranks, own)}" for ranks, axes in axes_of.items()
        ]
        gone = self._gone(by_axis)
        ending = f"; {_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone" if gone else ""
        return f", waiting for {' and '.join(parts)}{ending}"

    def keep(self, reason: str, doing: Doing, polls_no_peer: bool) -> None:
        """Write to the run's directory why this rank leaves, what it does, and which ranks it waits for.

        Args:
            reason, doing: as OtherRanks.
            polls_no_peer: whether it is known not to wait for a peer's memory. Then a rank whose tensor-parallel ranks
                exchange through memory, and that computes, waits for none of them.

        Raises:
            OSError: they cannot be written.
        """
        if self._run_dir is None:
            return
        by_axis = awaited(self._state, doing.what)
        computes = isinstance(doing.what, Action) and doing.what.kind in COMPUTE
        if computes and polls_no_peer:
            comms = self._state.rank.comms
            for axis, comm in (("tp", comms.tp), ("ep", comms.ep)):
                if comm is not None and comm.arena is not None:
                    by_axis.pop(axis, None)
        step = self._state.rank.activity.step
        LastWords(
            rank=dist.get_rank(),
            reason=reason,
            step=None if step is None else step + 1,
            doing=str(doing.what),
            seconds=time.monotonic() - doing.began_at,
            waits={axis: tuple(ranks) for axis, ranks in by_axis.items()},
            gone=tuple(self._gone(by_axis)),
            time=time.time(),
        ).write(self._run_dir)

    def _gone(self, by_axis: Mapping[str, Iterable[int]]) -> list[int]:
        return self._peers.gone(sorted({rank for ranks in by_axis.values() for rank in ranks}))


def awaited(state: TrainState, what: object) -> dict[str, list[int]]:
    """Return the other ranks that must act before `what` can end, by the mesh axis that connects them."""
    mesh = state.rank.mesh
    if what == READING:
        return {}
    if not isinstance(what, Action):
        return _others({"all": range(mesh.shape.world_size)})
    if what.kind in COMPUTE:
        sharing = {} if mesh.ep is None else {"ep": _members(mesh.ep)}
        return _others({"tp": _members(mesh.tp), **sharing, **_summed_within(state, what)})
    if what.kind is Kind.CLIP:
        # The last stage also sums the losses over the replicas; where these own slices, or hold other experts, all sum
        # their squares.
        meets = state.model.is_last or state.sliced is not None or mesh.shape.ep > mesh.shape.tp
        replicas = {"dp": _members(mesh.dp)} if meets else {}
        return _others({"tp": _members(mesh.tp), "pp": _members(mesh.pp), **replicas})
    if what.kind is Kind.TIE_REDUCE and mesh.ends is not None:
        return _others({"pp": _members(mesh.ends)})
    # Where tp ranks route tokens of their own, they sum what they count before replicas do.
    counts_apart = mesh.ep is not None and not state.model.parts.is_exact and _sums_counts(state, what)
    ranks = {"tp": _members(mesh.tp)} if counts_apart else {}
    for sub in what.subs or (what,):
        for axis, members in _of_started(state, sub).items():
            ranks.setdefault(axis, []).extend(members)
    return _others(ranks)


def _summed_within(state: TrainState, what: Action) -> dict[str, list[int]]:
    """Return the ranks of sums that a computation starts and ends: exact mode's, where no memory is shared."""
    if state.part.config.train.reduction != "exact":
        return {}
    summed = [sub for sub in what.posts if sub.kind is Kind.REDUCE and state.buckets[sub.index or 0].comm.arena is None]
    return {axis: members for sub in summed for axis, members in _of_started(state, sub).items()}


def _sums_counts(state: TrainState, started: Action) -> bool:
    counts = state.part.plan.counts_of(state.rank.mesh.at.pp)
    return started.kind is Kind.REDUCE and counts is not None and counts.index == started.index


def _of_started(state: TrainState, started: Action) -> dict[str, list[int]]:
    """Return the ranks on the other side of a transfer, a reduction or a gather, by mesh axis."""
    mesh = state.rank.mesh
    if started.kind in TRANSFERS:
        pipeline = mesh.shape.pipeline_ranks(dist.get_rank())
        return {"pp": [pipeline[state.part.plan.chunks[peer_chunk(started)].rank]]}
    if started.index is None or started.kind not in (Kind.GATHER, Kind.REDUCE):
        return {}
    if started.kind is Kind.GATHER:
        assert state.sliced is not None
        axes = "_".join(state.sliced.axes(started.index))
    elif _sums_counts(state, started):
        axes = "dp"
    else:
        axes = "_".join(state.buckets[started.index].axes)
    return {axes: _members(getattr(mesh, axes))}


def _members(group: ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _others(by_axis: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    own = dist.get_rank()
    others = {axis: sorted(set(ranks) - {own}) for axis, ranks in by_axis.items()}
    return {axis: ranks for axis, ranks in others.items() if ranks}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
