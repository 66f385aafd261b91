"""Rung: pure for rank arithmetic, gloo ranks for the groups, fake ranks for the number of calls. NCCL needs GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks.fake_ranks import fake_rank
from support.ranks.rank_pool import RankError, RankPool
from torch.distributed import distributed_c10d

from tpengine.distributed.mesh import Coordinates, Shape, build_mesh

SIZES = st.integers(1, 6)


@settings(deadline=None, derandomize=True)
@given(SIZES, SIZES, SIZES)
def test_rank_and_coordinates_are_inverse(pp: int, dp: int, tp: int) -> None:
    shape = Shape(pp, dp, tp)
    seen = [shape.coordinates(rank) for rank in range(shape.world_size)]
    assert len(set(seen)) == shape.world_size
    assert [shape.rank(at) for at in seen] == list(range(shape.world_size))


def test_tp_is_innermost_and_pp_outermost() -> None:
    shape = Shape(pp=2, dp=3, tp=4)
    assert shape.rank(Coordinates(0, 0, 1)) == 1
    assert shape.rank(Coordinates(0, 1, 0)) == 4
    assert shape.rank(Coordinates(1, 0, 0)) == 12
    assert shape.pipeline_ranks(5) == (5, 17)
    assert shape.pipeline_ranks(17) == (5, 17)


Members = dict[str, list[int] | None]


def group_members(pp: int, dp: int, tp: int, kv_replicas: int, ends: tuple[int, int] | None = None) -> Members:
    mesh = build_mesh(Shape(pp, dp, tp), "cpu", kv_replicas, ends)
    names = ("pp", "dp", "tp", "replica", "dp_tp", "dp_replica", "ends")
    groups = {name: getattr(mesh, name) for name in names}
    assert [mesh.device_mesh.get_group(axis) for axis in ("pp", "dp", "tp")] == [mesh.pp, mesh.dp, mesh.tp]
    for group in groups.values():
        if group is not None:
            # Whose members do not meet in it would wait here.
            dist.barrier(group)
    return {
        name: None if group is None else sorted(dist.get_process_group_ranks(group)) for name, group in groups.items()
    }


def test_groups_of_every_axis(ranks: RankPool) -> None:
    shape = Shape(pp=2, dp=1, tp=4)
    for rank, groups in enumerate(ranks.run(group_members, 8, 2, 1, 4, 2, (0, 1))):
        at = shape.coordinates(rank)
        first = 4 * at.pp
        assert groups["tp"] == groups["dp_tp"] == [first, first + 1, first + 2, first + 3]
        assert groups["dp"] == [rank]
        assert groups["pp"] == groups["ends"] == [at.tp, at.tp + 4]
        pair = first + at.tp // 2 * 2
        assert groups["replica"] == groups["dp_replica"] == [pair, pair + 1]


def test_joined_axes(ranks: RankPool) -> None:
    for rank, groups in enumerate(ranks.run(group_members, 8, 1, 2, 4, 2, (0, 0))):
        kv = rank % 4 // 2 * 2
        assert groups["dp_tp"] == list(range(8))
        assert groups["dp_replica"] == [kv, kv + 1, kv + 4, kv + 5]
        assert groups["replica"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["ends"] is None


def expert_groups(pp: int, dp: int, tp: int, ep: int) -> tuple[list[int], list[int], bool]:
    mesh = build_mesh(Shape(pp, dp, tp, ep), "cpu")
    assert mesh.ep is not None and mesh.edp is not None
    dist.barrier(mesh.ep)
    dist.barrier(mesh.edp)
    own = [sorted(dist.get_process_group_ranks(group)) for group in (mesh.ep, mesh.edp)]
    return own[0], own[1], mesh.ep is mesh.tp and mesh.edp is mesh.dp


@pytest.mark.parametrize(("tp", "ep"), [(2, 4), (1, 2), (2, 2), (2, 8)])
def test_neighbours_share_experts_and_stages_have_their_own(ranks: RankPool, tp: int, ep: int) -> None:
    num_stage = 8 if ep == 8 else 4
    pp, dp = 8 // num_stage, num_stage // tp
    for rank, (sharing, alike, is_tp) in enumerate(ranks.run(expert_groups, 8, pp, dp, tp, ep)):
        first = rank // num_stage * num_stage
        assert sharing == list(range(rank // ep * ep, rank // ep * ep + ep))
        assert alike == list(range(first + rank % ep, first + num_stage, ep))
        assert is_tp == (ep == tp)


def test_ep_must_divide_the_ranks_of_a_stage(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"ep must divide the ranks of a stage: ep 2, dp 3 \* tp 1: use ep 1"):
        ranks.run(expert_groups, 3, 1, 3, 1, 2)


def members_of_two_meshes() -> tuple[Members, Members, Members]:
    """Return the members for two trainers one after the other, and for one without tied ends."""
    return group_members(3, 1, 1, 1, (0, 2)), group_members(3, 1, 1, 1, (2, 0)), group_members(3, 1, 1, 1)


def test_ends_skip_the_middle_stages_and_are_made_where_they_are_asked_for(ranks: RankPool) -> None:
    for rank, (first, second, untied) in enumerate(ranks.run(members_of_two_meshes, 3)):
        assert first["ends"] == second["ends"] == ([0, 2] if rank != 1 else None)
        assert untied["ends"] is None


def members_beside_a_group_of_two() -> Members:
    dist.new_group([0, 1])
    return group_members(3, 1, 1, 1, (0, 2))


def test_a_program_may_have_groups_of_some_ranks_of_its_own(ranks: RankPool) -> None:
    answers = ranks.run(members_beside_a_group_of_two, 3)
    assert [answer["ends"] for answer in answers] == [[0, 2], None, [0, 2]]
    assert [answer["dp"] for answer in answers] == [[0], [1], [2]]


def num_groups_made(pp: int, dp: int, tp: int, kv_replicas: int, ends: tuple[int, int] | None) -> list[int]:
    """How many groups some ranks of a large world are asked to make, their own and others'."""
    world, counts = pp * dp * tp, []
    for rank in (0, world // 2, world - 1):
        with fake_rank(rank, world), pytest.MonkeyPatch.context() as patch:
            make, made = distributed_c10d._new_group_with_tag, []

            def count(*args: Any, make: Any = make, made: list[Any] = made, **kwargs: Any) -> Any:
                made.append(args)
                return make(*args, **kwargs)

            patch.setattr(distributed_c10d, "_new_group_with_tag", count)
            build_mesh(Shape(pp, dp, tp), "cpu", kv_replicas, ends)
            counts.append(len(made))
    return counts


def test_a_rank_makes_its_own_groups_only(ranks: RankPool) -> None:
    assert ranks.run(num_groups_made, 1, 2, 128, 8, 1, (0, 1)) == [[5, 5, 5]]
    assert ranks.run(num_groups_made, 1, 2, 128, 8, 1, None) == [[4, 4, 4]]
    assert ranks.run(num_groups_made, 1, 16, 16, 8, 2, (0, 15)) == [[7, 7, 7]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 2, 1, 1), r"1\*2\*2 = 4, processes 3: start 4 processes"), ((1, 1, 3, 2), "KV replicas must divide tp")],
)
def test_impossible_meshes(ranks: RankPool, arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks.run(group_members, 3, *arguments)
