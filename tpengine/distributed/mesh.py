"""The mesh of ranks: axes pp, dp, tp (tp innermost), and every process group the engine uses.

Rank arithmetic is pure. Process groups are made in one function, `build_mesh`, in the same order on all ranks. A mesh
is passed as an argument to what needs it; it is never global.

The decision a reader will question: torch's DeviceMesh does not make the groups, because it has every rank call
new_group for every group of an axis, 3,300 times for 2,048 ranks. Here a rank makes its own groups only, at most ten
(groups.py says how).

Besides the three axes, gradients are summed over joined axes: dp x tp (norm weights, which every tp rank holds whole)
and dp x replica (K and V weights with fewer KV heads than tp, where tp is split into (kv, replica)). Each joined axis
is one group, so that one collective computes the sum.

Attention and experts are two factorisations of the ranks of a stage: dp x tp, and edp x ep, each with neighbours as its
inner axis (parallel.ep). Rank j of an ep group holds the j-th part of the experts; those of edp hold the same ones.

`Communicators` are the mesh's groups as the engine uses them; some exchange through shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from tpkernels.exchange.arena import exchange_bytes
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.fused.bounded_rows import can_bound
from tpkernels.fused.kernels.counts_kernel import slots_bytes
from tpkernels.launch import accumulation_dtype

from tpengine.config import Config, ParallelConfig
from tpengine.distributed.connect import connect_all
from tpengine.distributed.facts import RankFacts, problem_of
from tpengine.distributed.groups import GLOO_SECONDS, GroupMaker, is_nccl
from tpengine.distributed.nccl_limits import (
    held_processors,
    processors_of_groups,
    reserved_processors,
    spans_hosts,
    users_limit,
    words_of_nccl,
)
from tpengine.distributed.process import grows_segments, hosts_of_ranks, max_over_ranks, nccl_version

# Sums of gradients are exchanged in pieces of a quarter of this (rows exchange/all_reduce/... of benchmarks/results).
SUM_ARENA_BYTES = 16_000_000


@dataclass(frozen=True)
class Coordinates:
    """A rank's position on the axes."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Shape:
    """Sizes of the axes, and the rank arithmetic: rank = (pp_index * dp + dp_index) * tp + tp_index.

    With ep that is (pp_index * edp + edp_index) * ep + ep_index too, where edp = dp * tp / ep.
    """

    pp: int
    dp: int
    tp: int
    ep: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Shape:
        """Return the shape of a resolved layout (tp, pp and dp all set)."""
        assert parallel.pp and parallel.dp and parallel.tp, "resolve the layout first: config.resolve_layout"
        return cls(parallel.pp, parallel.dp, parallel.tp, parallel.ep)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.pp * self.dp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of `rank` on the axes."""
        return Coordinates(rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp)

    def rank(self, at: Coordinates) -> int:
        """Return the rank at a position."""
        return (at.pp * self.dp + at.dp) * self.tp + at.tp

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the global ranks of the pipeline that `rank` belongs to, by stage."""
        at = self.coordinates(rank)
        return tuple(self.rank(Coordinates(pp, at.dp, at.tp)) for pp in range(self.pp))


@dataclass(frozen=True)
class Mesh:
    """The process groups of one rank.

    Attributes:
        shape, at: sizes of the axes and this rank's position.
        device_mesh: torch's DeviceMesh over (pp, dp, tp), for libraries that expect one.
        pp, dp, tp: the axes' groups.
        replica: tp ranks that hold the same KV heads; None if every rank holds its own.
        dp_tp, dp_replica: joined axes over which gradients are summed.
        ends: the stages of this rank's pipeline that share tied embeddings: those with the model's first and last
            chunk. None on other stages, if one stage holds both chunks, and if embeddings are not tied.
        ep: the ranks that share experts, and edp: those that hold the same ones; None with ep 1. With ep tp they are
            those of tp and dp.
        pp_backward: the pipeline's ranks again, for gradients, which over NCCL have a communicator of their own; None
            where they take `pp`.
        limits: how many of a GPU's processors NCCL may take, by group (nccl_limits.py); empty over gloo.
        held: how many it may hold at once beside kernels of ours; 0 over gloo.
    """

    shape: Shape
    at: Coordinates
    device_mesh: DeviceMesh
    pp: ProcessGroup
    dp: ProcessGroup
    tp: ProcessGroup
    replica: ProcessGroup | None
    dp_tp: ProcessGroup
    dp_replica: ProcessGroup
    ends: ProcessGroup | None
    ep: ProcessGroup | None = None
    edp: ProcessGroup | None = None
    pp_backward: ProcessGroup | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    held: int = 0


def build_mesh(
    shape: Shape,
    device_type: str,
    kv_replicas: int = 1,
    ends: tuple[int, int] | None = None,
    timeout_seconds: float = 0.0,
) -> Mesh:
    """Create this rank's process groups of a layout; collective, with the same arguments on all ranks.

    Args:
        shape: sizes of the axes; their product is the world size.
        device_type: "cuda" if the groups use NCCL, else "cpu".
        kv_replicas: consecutive tp ranks that share one KV head; divides tp.
        ends: the stages with the model's first and last chunk, if these share tied embeddings; with None no groups are
            made for them.
        timeout_seconds: train.timeout_seconds; 0 leaves it to the communication library.

    Returns:
        This rank's mesh.

    Raises:
        ValueError: the shape does not have the number of processes, the replicas do not divide tp, or ep does not
            divide the ranks of a stage.

    Cost: one all-gather, and at most nine rendezvous, each among the members of a group; over NCCL at most ten splits,
        each among all ranks. Call it once.
    """
    if shape.world_size != dist.get_world_size():
        raise ValueError(
            f"tp*pp*dp must equal the number of processes: {shape.tp}*{shape.pp}*{shape.dp} = "
            f"{shape.world_size}, processes {dist.get_world_size()}: start {shape.world_size} processes"
        )
    if shape.tp % kv_replicas:
        raise ValueError(f"KV replicas must divide tp: {kv_replicas} replicas, tp {shape.tp}: let kv heads divide tp")
    if shape.dp * shape.tp % shape.ep:
        raise ValueError(
            f"ep must divide the ranks of a stage: ep {shape.ep}, dp {shape.dp} * tp {shape.tp}: use ep {shape.tp}"
        )
    # [pp, dp, tp] and [pp, dp, kv, replica]; the rows of an axis's table are its groups and contain every rank once.
    axes = torch.arange(shape.world_size).view(shape.pp, shape.dp, shape.tp)
    replicas = axes.unflatten(2, (shape.tp // kv_replicas, kv_replicas))
    limits: Mapping[str, int] = {}
    held = 0
    if is_nccl():
        # Replicas that all lie on one host may take more.
        across = spans_hosts(shape, hosts_of_ranks(torch.device(device_type)))
        limits = processors_of_groups(shape, kv_replicas, spans_hosts=across, users_limit=users_limit(os.environ))
        held = held_processors(shape, kv_replicas, limits)
    own_group = GroupMaker(timeout_seconds, limits).own

    pipelines = axes.flatten(1).T.tolist()
    pp = own_group("pp", pipelines)
    # NCCL runs the transfers of a communicator one after another: a receive of gradients that is posted early would
    # hold up an activation that is sent.
    pp_backward = own_group("pp_backward", pipelines) if is_nccl() and shape.pp > 1 else None
    dp = own_group("dp", axes.transpose(1, 2).flatten(0, 1).tolist())
    tp = own_group("tp", axes.flatten(0, 1).tolist())
    replica, dp_replica = None, dp
    if kv_replicas > 1:
        replica = own_group("replica", replicas.flatten(0, 2).tolist())
        dp_replica = own_group("dp_replica", replicas.transpose(1, 2).flatten(2).flatten(0, 1).tolist())
    ep, edp = (None, None) if shape.ep == 1 else (tp, dp)
    if shape.ep not in (1, shape.tp):
        experts = axes.view(shape.pp, -1, shape.ep)
        ep = own_group("ep", experts.flatten(0, 1).tolist())
        edp = own_group("edp", experts.transpose(1, 2).flatten(0, 1).tolist())
    at = shape.coordinates(dist.get_rank())
    mesh = Mesh(
        shape=shape,
        at=at,
        device_mesh=DeviceMesh.from_group([pp, dp, tp], device_type, axes, mesh_dim_names=("pp", "dp", "tp")),
        pp=pp,
        dp=dp,
        tp=tp,
        replica=replica,
        dp_tp=dp if shape.tp == 1 else own_group("dp_tp", axes.flatten(1).tolist()),
        dp_replica=dp_replica,
        ends=None,
        ep=ep,
        edp=edp,
        pp_backward=pp_backward,
        limits=limits,
        held=held,
    )
    if ends is None or ends[0] == ends[1]:
        return mesh
    group = own_group("ends", _ends(shape, ends))
    return replace(mesh, ends=group if at.pp in ends else None)


def problem_of_ranks(facts: Sequence[RankFacts], shape: Shape, kv_replicas: int) -> str:
    """Return what of the ranks' hosts and GPUs cannot work in a layout, in one line; empty if nothing is wrong."""
    across = spans_hosts(shape, [of.host for of in facts])
    # Rank 0's environment, not this rank's: all must find the same.
    limits = processors_of_groups(shape, kv_replicas, spans_hosts=across, users_limit=facts[0].users_limit)
    return problem_of(facts, shape, limits, reserved_processors(limits))


def _ends(shape: Shape, ends: tuple[int, int]) -> list[list[int]]:
    """Return each pipeline's two ends as one group, and each stage between them as a group of its own.

    So all ranks make the same number of groups. torch names a group by its ranks and by the number of groups that the
    member has made before, so the members of a later group must agree on that number.
    """
    pipelines = [shape.pipeline_ranks(first) for first in range(shape.dp * shape.tp)]
    pairs = [[pipeline[stage] for stage in ends] for pipeline in pipelines]
    return pairs + [[pipeline[stage]] for pipeline in pipelines for stage in range(shape.pp) if stage not in ends]


@dataclass(frozen=True)
class Communicators:
    """A communicator for each group of the mesh; None where there is none.

    Attributes:
        rows_through_memory: whether rows of experts travel through ep's memory, if it has any: in fast mode.
        row_load: for how many times the mean a rank's experts have buffers that kernels bring rows to; 0: none.
        nccl: its version and how it is used, in words; empty over gloo.
    """

    tp: Communicator
    pp: Communicator
    dp: Communicator
    replica: Communicator | None
    dp_tp: Communicator
    dp_replica: Communicator
    ends: Communicator
    ep: Communicator | None = None
    edp: Communicator | None = None
    pp_backward: Communicator | None = None
    nccl: str = ""
    rows_through_memory: bool = True
    row_load: float = 0.0

    def over(self, axes: Sequence[str]) -> Communicator:
        """Return the ranks that one sum over these axes joins: ("dp", "tp") are those of `dp_tp`.

        Args:
            axes: names of axes, in the order in which the fields of this class name them.
        """
        comm: Communicator | None = getattr(self, "_".join(axes))
        assert comm is not None, f"no rank shares anything over {axes}"
        return comm

    @classmethod
    def of(
        cls, mesh: Mesh, config: Config, device: torch.device, row_load: float = 0.0, row_bytes: int = 0
    ) -> Communicators:
        """Return a communicator for each group of the mesh; collective.

        The tp ranks of a host exchange through an arena unless `parallel.tp_comm` is plain: on a CPU everything, on
        GPUs what fused matmuls exchange, and with a `row_load` rows of experts, for which they need `row_bytes`.
        """
        hosts = hosts_of_ranks(device)

        def through_memory(group: ProcessGroup, arena_bytes: int) -> Communicator:
            if device.type != "cpu":
                return Communicator(group)
            return Communicator(group, arena_bytes=arena_bytes, timeout_seconds=exchange_seconds(config))

        def for_sums(group: ProcessGroup | None) -> Communicator:
            """Return a communicator through memory if the ranks share a host; elsewhere plain, without a message."""
            if group is None or len({hosts[rank] for rank in dist.get_process_group_ranks(group)}) > 1:
                return Communicator(group)
            return through_memory(group, SUM_ARENA_BYTES)

        def members(group: ProcessGroup | None) -> list[int]:
            return [] if group is None else dist.get_process_group_ranks(group)

        def by_kernels(group: ProcessGroup, arena_bytes: int, strategy: str = "auto") -> Communicator:
            return Communicator(
                group,
                arena_bytes=arena_bytes,
                device=device,
                strategy=strategy,
                timeout_seconds=exchange_seconds(config),
                reserved_processors=mesh.held,
            )

        def for_matmuls(group: ProcessGroup) -> Communicator:
            # Where tp ranks share experts, their rows move through the same memory.
            arena_bytes = max(tp_arena_bytes(config), row_bytes if mesh.ep is mesh.tp else 0)
            if device.type == "cpu":
                return through_memory(group, arena_bytes)
            # Exact mode's matmuls use all tokens, and so are not fused.
            return by_kernels(group, arena_bytes if config.train.reduction == "fast" else 0)

        def for_rows(group: ProcessGroup) -> Communicator:
            if not rows_through_memory:
                # Exact mode's rows travel by all-to-all: of one memory no other use is made.
                return Communicator(group)
            if not row_load:
                return for_sums(group)
            # Nothing else moves between them: no matmul is fused.
            return by_kernels(group, row_bytes, "plain")

        row_bytes = _with_counts(row_bytes, config)
        rows_through_memory = config.train.reduction == "fast"
        tp, dp = for_matmuls(mesh.tp), for_sums(mesh.dp)
        ep, edp = (None, None) if mesh.ep is None else (tp, dp)
        if mesh.ep is not mesh.tp and mesh.ep is not None:
            ep, edp = for_rows(mesh.ep), for_sums(mesh.edp)
        if row_load:
            # One host may refuse the memory that another gives: all ranks do the same, or none would end a step alike.
            has_none = ep is None or not can_bound(ep, device, getattr(torch, config.train.dtype))
            row_load = 0.0 if max_over_ranks([float(has_none)], device)[0] else row_load
        return cls(
            tp=tp,
            pp=Communicator(mesh.pp),
            dp=dp,
            replica=None if mesh.replica is None else Communicator(mesh.replica),
            # One memory if two axes consist of the same ranks.
            dp_tp=dp if members(mesh.dp_tp) == members(mesh.dp) else for_sums(mesh.dp_tp),
            dp_replica=dp if mesh.dp_replica is mesh.dp else for_sums(mesh.dp_replica),
            ends=for_sums(mesh.ends),
            ep=ep,
            edp=edp,
            pp_backward=None if mesh.pp_backward is None else Communicator(mesh.pp_backward),
            nccl=_words_of_nccl(mesh) if is_nccl() else "",
            rows_through_memory=rows_through_memory,
            row_load=row_load,
        )

    def describe(self, mailbox: Mailbox | None) -> str:
        """Return how this rank exchanges per axis: "tp, dp through 20.2 MB of shared memory per rank; pp by gloo"."""
        sizes = {"tp": self.tp.size, "pp": self.pp.size, "dp": self.dp.size}
        through_memory = {"tp": self.tp.arena, "pp": mailbox, "dp": self.dp.arena}
        if self.ep is not None and self.ep is not self.tp:
            sizes["ep"], through_memory["ep"] = self.ep.size, self.ep.arena
        used = [axis for axis, found in through_memory.items() if found is not None]
        others = [axis for axis, size in sizes.items() if size > 1 and axis not in used]
        parts = []
        if used:
            size = f"{self._host_bytes(mailbox) / 1e6:.1f} MB"
            parts.append(f"{', '.join(used)} through {size} of shared memory per rank")
        if self.tp.may_use_kernels():
            size = f"{self._bytes_of_kernels(self.tp) / 1e6:.1f} MB"
            parts.append(f"tp's matmuls by kernels through {size} of symmetric memory per rank")
        if others:
            parts.append(f"{', '.join(others)} by {dist.get_backend()}")
        if self.ep is not None and self.row_load:
            size = f"{self._bytes_of_kernels(self.ep) / 1e6:.1f} MB"
            room = "room for all" if self.row_load >= self.ep.size else f"room for {self.row_load:g} times the mean"
            parts.append(
                f"rows of experts by kernels through {size} of symmetric memory per rank, into buffers with {room}"
            )
        elif self.ep is not None:
            is_in_memory = self.rows_through_memory and self.ep.arena is not None
            way = "through shared memory" if is_in_memory else f"all to all by {dist.get_backend()}"
            parts.append(f"rows of experts {way}, whose numbers the host waits for once a layer")
        if self.nccl:
            parts.append(self.nccl)
        return "; ".join(parts) or "none, one process"

    def check(self) -> None:
        """Raise if a kernel of a step has given up waiting, as far as this rank knows; call it after synchronising.

        Raises:
            PeerError, CallMismatch: as Communicator.check.
        """
        self.tp.check()
        if self.ep is not None:
            self.ep.check()

    def arena_bytes(self, mailbox: Mailbox | None) -> int:
        """Return the bytes that this rank has for exchanging tensors with others: arenas and mailbox."""
        ep = None if self.ep is self.tp else self.ep
        return self._host_bytes(mailbox) + self._bytes_of_kernels(self.tp) + self._bytes_of_kernels(ep)

    @staticmethod
    def _bytes_of_kernels(comm: Communicator | None) -> int:
        kernels = None if comm is None else comm.device_arena
        return 0 if kernels is None else kernels.memory.num_bytes

    def _host_bytes(self, mailbox: Mailbox | None) -> int:
        # Sums over two axes at once, of norm weights and tied embeddings, have memory of their own; and experts.
        comms = self.tp, self.dp, self.dp_tp, self.dp_replica, self.ends, self.ep, self.edp
        arenas = {comm.arena for comm in comms if comm is not None and comm.arena}
        return sum(arena.memory.num_bytes for arena in arenas) + (mailbox.memory.num_bytes if mailbox else 0)

    def connect(self, device: torch.device, begin: Callable[[str], None] | None = None) -> None:
        """Exchange one number over every group, in the same order on all ranks; collective.

        NCCL needs all members in a group's first call; a pipeline's first transfer does not have them all. And a group
        that cannot connect fails here, not in the middle of a step.

        Args:
            device: where the groups' tensors live.
            begin: told what is connected, with ranks and hosts, before each group: what the watch reports of a hang.

        Raises:
            GroupError: on all ranks alike: groups whose first exchange failed, with their ranks and hosts.
        """
        connect_all(self._named(), device, begin or (lambda _: None))

    def _named(self) -> dict[str, Communicator]:
        """Return the communicators by the names of their groups, in the order in which all ranks connect them."""
        names = "tp", "pp", "pp_backward", "dp", "replica", "dp_tp", "dp_replica", "ends", "ep", "edp"
        return {name: comm for name in names if (comm := getattr(self, name)) is not None}


def _with_counts(row_bytes: int, config: Config) -> int:
    """Return what rows of experts need, or their counts: of few tokens and many experts these need more; 0 of none."""
    # Two generations each.
    return row_bytes and max(row_bytes, 2 * slots_bytes(config.model.details.num_experts, config.parallel.ep))


def _words_of_nccl(mesh: Mesh) -> str:
    words = words_of_nccl(nccl_version(), os.environ, mesh.limits)
    if mesh.shape.pp > 1 and grows_segments(os.environ) is False:
        words += (
            "; expandable_segments is off: an allocation that must free memory first waits for receives that are "
            "posted, perhaps for ever"
        )
    return words


def exchange_seconds(config: Config) -> float:
    """Return how long an exchange through memory waits for a living peer."""
    return config.train.timeout_seconds or GLOO_SECONDS


def tp_arena_bytes(config: Config) -> int:
    """Return the bytes of arena per rank for exchanging a micro-batch's x[T, D]; 0 if collectives exchange it."""
    assert config.parallel.tp is not None, "resolve the layout first: config.resolve_layout"
    if config.parallel.tp_comm == "plain" or config.parallel.tp == 1:
        return 0
    tokens = config.train.micro_batch_size * config.train.seq_len
    dtype = getattr(torch, config.train.dtype)
    # Exact mode's partial sums are exchanged in the accumulation dtype.
    item_bytes = (accumulation_dtype(dtype) if config.train.reduction == "exact" else dtype).itemsize
    return exchange_bytes(tokens, config.model.hidden_size * item_bytes, config.parallel.tp)
