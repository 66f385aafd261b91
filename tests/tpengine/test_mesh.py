"""Rung: pure for rank arithmetic, gloo ranks for the groups. NCCL groups need GPUs and are not checked here."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankError, RankPool

from tpengine.mesh import Coordinates, Shape, build_mesh

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


def group_members(pp: int, dp: int, tp: int, kv_replicas: int) -> dict[str, list[int] | None]:
    mesh = build_mesh(Shape(pp, dp, tp), "cpu", kv_replicas)
    names = ("pp", "dp", "tp", "replica", "dp_tp", "dp_replica", "ends")
    groups = {name: getattr(mesh, name) for name in names}
    return {
        name: None if group is None else sorted(dist.get_process_group_ranks(group)) for name, group in groups.items()
    }


def test_groups_of_every_axis(ranks: RankPool) -> None:
    shape = Shape(pp=2, dp=1, tp=4)
    for rank, groups in enumerate(ranks.run(group_members, 8, 2, 1, 4, 2)):
        at = shape.coordinates(rank)
        first = 4 * at.pp
        assert groups["tp"] == groups["dp_tp"] == [first, first + 1, first + 2, first + 3]
        assert groups["dp"] == [rank]
        assert groups["pp"] == groups["ends"] == [at.tp, at.tp + 4]
        pair = first + at.tp // 2 * 2
        assert groups["replica"] == groups["dp_replica"] == [pair, pair + 1]


def test_joined_axes(ranks: RankPool) -> None:
    for rank, groups in enumerate(ranks.run(group_members, 8, 1, 2, 4, 2)):
        kv = rank % 4 // 2 * 2
        assert groups["dp_tp"] == list(range(8))
        assert groups["dp_replica"] == [kv, kv + 1, kv + 4, kv + 5]
        assert groups["replica"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["ends"] is None


def test_ends_skip_the_middle_stages(ranks: RankPool) -> None:
    found = [groups["ends"] for groups in ranks.run(group_members, 3, 3, 1, 1, 1)]
    assert found == [[0, 2], None, [0, 2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 2, 1, 1), r"1\*2\*2 = 4, processes 3: start 4 processes"), ((1, 1, 3, 2), "KV replicas must divide tp")],
)
def test_impossible_meshes(ranks: RankPool, arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks.run(group_members, 3, *arguments)
