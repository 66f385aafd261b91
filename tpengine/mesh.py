"""The mesh of ranks: axes pp, dp, tp (tp innermost), and every process group the engine uses.

Rank arithmetic is pure; process groups are made in one function, `build_mesh`, in the same order on all ranks. A
mesh is passed to whoever needs it and never global.

Besides the three axes, gradients are summed over joined axes: dp x tp (norm weights, whole on every tp rank) and
dp x replica (K and V weights when kv heads < tp, where tp unflattens to (kv, replica)). Each joined axis is one
group, so that one collective does the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tpengine.config import ParallelConfig


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on the axes."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Shape:
    """Sizes of the axes, and the rank arithmetic: rank = (pp_index * dp + dp_index) * tp + tp_index."""

    pp: int
    dp: int
    tp: int

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Shape:
        """The shape of a resolved layout (tp, pp and dp all set)."""
        assert parallel.pp and parallel.dp and parallel.tp, "resolve the layout first: config.resolve_layout"
        return cls(parallel.pp, parallel.dp, parallel.tp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` lies."""
        return Coordinates(rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp)

    def rank(self, at: Coordinates) -> int:
        """Which rank lies at `at`."""
        return (at.pp * self.dp + at.dp) * self.tp + at.tp

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """Global ranks of the pipeline that `rank` belongs to, by stage."""
        at = self.coordinates(rank)
        return tuple(self.rank(Coordinates(pp, at.dp, at.tp)) for pp in range(self.pp))


@dataclass(frozen=True)
class Mesh:
    """The process groups of one rank.

    Attributes:
        shape, at: sizes of the axes and this rank's place.
        device_mesh: torch's DeviceMesh over (pp, dp, tp), for whatever understands it.
        pp, dp, tp: the axes' groups.
        replica: tp ranks that hold the same KV shard; None if every rank holds its own.
        dp_tp, dp_replica: joined axes over which gradients are summed.
        ends: the stages of this rank's pipeline that hold the model's first chunk and its last, which share tied
            embeddings; None elsewhere, and where one stage holds both.
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


def build_mesh(shape: Shape, device_type: str, kv_replicas: int = 1, ends: tuple[int, int] | None = None) -> Mesh:
    """Create every process group of the layout; collective, the same call on all ranks.

    Args:
        shape: sizes of the axes; their product is the world size.
        device_type: "cuda" if the groups are NCCL's, else "cpu".
        kv_replicas: consecutive tp ranks that share one KV head; divides tp.
        ends: the stages that hold the model's first chunk and its last; default the first and the last.

    Returns:
        This rank's mesh.

    Raises:
        ValueError: the shape does not fill the world, or the replicas do not divide tp.

    Cost: a handful of rendezvous; call it once.
    """
    if shape.world_size != dist.get_world_size():
        raise ValueError(
            f"tp*pp*dp must equal the number of processes: {shape.tp}*{shape.pp}*{shape.dp} = "
            f"{shape.world_size}, processes {dist.get_world_size()}: start {shape.world_size} processes"
        )
    if shape.tp % kv_replicas:
        raise ValueError(f"KV replicas must divide tp: {kv_replicas} replicas, tp {shape.tp}: let kv heads divide tp")
    ranks = torch.arange(shape.world_size)
    axes = ranks.view(shape.pp, shape.dp, shape.tp)
    replicas = ranks.view(shape.pp, shape.dp, shape.tp // kv_replicas, kv_replicas)

    def mesh_of(layout: torch.Tensor, *names: str) -> DeviceMesh:
        return DeviceMesh(device_type, layout, mesh_dim_names=names)

    main = mesh_of(axes, "pp", "dp", "tp")
    joined = mesh_of(axes.flatten(1), "pp", "dp_tp")
    if kv_replicas > 1:
        unflattened = mesh_of(replicas, "pp", "dp", "kv", "replica")
        dp_replicas = mesh_of(replicas.transpose(1, 2).flatten(2), "pp", "kv", "dp_replica")
        replica, dp_replica = unflattened.get_group("replica"), dp_replicas.get_group("dp_replica")
    else:
        replica, dp_replica = None, main.get_group("dp")
    return Mesh(
        shape=shape,
        at=shape.coordinates(dist.get_rank()),
        device_mesh=main,
        pp=main.get_group("pp"),
        dp=main.get_group("dp"),
        tp=main.get_group("tp"),
        replica=replica,
        dp_tp=joined.get_group("dp_tp"),
        dp_replica=dp_replica,
        ends=_ends_group(shape, *(ends or (0, shape.pp - 1))),
    )


def _ends_group(shape: Shape, first_stage: int, last_stage: int) -> ProcessGroup | None:
    """Join two stages of each pipeline; every rank takes part in creating every pair."""
    if first_stage == last_stage:
        return None
    mine = None
    for first in range(shape.dp * shape.tp):
        pipeline = shape.pipeline_ranks(first)
        members = [pipeline[first_stage], pipeline[last_stage]]
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    return mine
