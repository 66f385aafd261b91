"""The mesh of ranks: axes pp, dp, tp (tp innermost), and every process group the engine uses.

Rank arithmetic is pure. Process groups are made in one function, `build_mesh`, in the same order on all ranks. A mesh
is passed as an argument to what needs it; it is never global.

The decision a reader will question: torch's DeviceMesh does not make the groups, because it has every rank call
new_group for every group of an axis, 3,300 times for 2,048 ranks. Here a rank makes its own groups only, at most seven.

Besides the three axes, gradients are summed over joined axes: dp x tp (norm weights, which every tp rank holds whole)
and dp x replica (K and V weights with fewer KV heads than tp, where tp is split into (kv, replica)). Each joined axis
is one group, so that one collective computes the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world
from tpkernels.symmetric.memory import device_for_numbers, exchange

from tpengine.config import ParallelConfig


@dataclass(frozen=True)
class Coordinates:
    """A rank's position on the axes."""

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
        """Return the shape of a resolved layout (tp, pp and dp all set)."""
        assert parallel.pp and parallel.dp and parallel.tp, "resolve the layout first: config.resolve_layout"
        return cls(parallel.pp, parallel.dp, parallel.tp)

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
    """Create this rank's process groups of a layout; collective, with the same arguments on all ranks.

    Args:
        shape: sizes of the axes; their product is the world size.
        device_type: "cuda" if the groups use NCCL, else "cpu".
        kv_replicas: consecutive tp ranks that share one KV head; divides tp.
        ends: the stages with the model's first and last chunk, if these share tied embeddings; with None no groups are
            made for them.

    Returns:
        This rank's mesh.

    Raises:
        ValueError: the shape does not have the number of processes, or the replicas do not divide tp.

    Cost: one all-gather, and at most seven rendezvous, each among the members of a group; call it once.
    """
    if shape.world_size != dist.get_world_size():
        raise ValueError(
            f"tp*pp*dp must equal the number of processes: {shape.tp}*{shape.pp}*{shape.dp} = "
            f"{shape.world_size}, processes {dist.get_world_size()}: start {shape.world_size} processes"
        )
    if shape.tp % kv_replicas:
        raise ValueError(f"KV replicas must divide tp: {kv_replicas} replicas, tp {shape.tp}: let kv heads divide tp")
    # [pp, dp, tp] and [pp, dp, kv, replica]; the rows of an axis's table are its groups and contain every rank once.
    axes = torch.arange(shape.world_size).view(shape.pp, shape.dp, shape.tp)
    replicas = axes.unflatten(2, (shape.tp // kv_replicas, kv_replicas))
    is_counted_alike = _has_made_groups_alike()

    def own_group(axis: str, groups: list[list[int]]) -> ProcessGroup:
        return _own_group(axis, groups, is_counted_alike)

    pp = own_group("pp", axes.flatten(1).T.tolist())
    dp = own_group("dp", axes.transpose(1, 2).flatten(0, 1).tolist())
    tp = own_group("tp", axes.flatten(0, 1).tolist())
    replica, dp_replica = None, dp
    if kv_replicas > 1:
        replica = own_group("replica", replicas.flatten(0, 2).tolist())
        dp_replica = own_group("dp_replica", replicas.transpose(1, 2).flatten(2).flatten(0, 1).tolist())
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
    )
    if ends is None or ends[0] == ends[1]:
        return mesh
    group = own_group("ends", _ends(shape, ends))
    return replace(mesh, ends=group if at.pp in ends else None)


def _ends(shape: Shape, ends: tuple[int, int]) -> list[list[int]]:
    """Return each pipeline's two ends as one group, and each stage between them as a group of its own.

    So all ranks make the same number of groups. torch names a group by its ranks and by the number of groups that the
    member has made before, so the members of a later group must agree on that number.
    """
    pipelines = [shape.pipeline_ranks(first) for first in range(shape.dp * shape.tp)]
    pairs = [[pipeline[stage] for stage in ends] for pipeline in pipelines]
    return pairs + [[pipeline[stage]] for pipeline in pipelines for stage in range(shape.pp) if stage not in ends]


def _own_group(axis: str, groups: list[list[int]], is_counted_alike: bool) -> ProcessGroup:
    """Make the group of `groups` that this rank is a member of."""
    if len(groups) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    own = next(members for members in groups if dist.get_rank() in members)
    if is_counted_alike:
        group = dist.new_group(own, use_local_synchronization=True, group_desc=f"mesh_{axis}")
    else:
        made = {tuple(members): dist.new_group(members, group_desc=f"mesh_{axis}") for members in groups}
        group = made[tuple(own)]
    assert isinstance(group, ProcessGroup), "this rank is a member"
    return group


def _has_made_groups_alike() -> bool:
    """Return whether all ranks are members of equally many groups, and so name a new group alike (see `_ends`).

    Collective. It is False if a program has made groups of its own for some ranks only. Then all ranks make all groups.
    """
    world = dist.group.WORLD
    assert world is not None
    counts = exchange(world, [len(_world.pg_names)], device_for_numbers(world))
    return all(count == counts[0] for count in counts)
