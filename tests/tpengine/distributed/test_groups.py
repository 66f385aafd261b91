"""Rung: fake ranks that take NCCL's way, pure for timeouts. That NCCL splits, only GPUs check."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.engine.parity import config_of
from support.ranks.fake_ranks import Call, check_legal, fake_rank
from support.ranks.rank_pool import RankPool

from tpengine.distributed import mesh
from tpengine.distributed.groups import library_timeout
from tpengine.distributed.mesh import Shape, build_mesh


def splits_of(shape: Shape, kv_replicas: int, ends: tuple[int, int] | None) -> list[list[Call]]:
    """The splits of every rank in turn; each rank's groups must be there, and be named alike by their members."""
    calls, names = [], {}
    for rank in range(shape.world_size):
        with fake_rank(rank, shape.world_size, splits=True) as recorder:
            made = build_mesh(shape, "cpu", kv_replicas, ends, timeout_seconds=1000.0)
            calls.append([call for call in recorder.calls if call.operation == "split"])
            for axis in ("pp", "pp_backward", "dp", "tp", "replica", "dp_tp", "dp_replica", "ends", "ep", "edp"):
                group = getattr(made, axis)
                if group is not None and dist.get_world_size(group) > 1:
                    members = tuple(dist.get_process_group_ranks(group))
                    assert names.setdefault((axis, members), group.group_name) == group.group_name
                    assert group is not dist.group.WORLD
    return calls


@pytest.mark.parametrize(
    ("shape", "kv_replicas", "ends"),
    [
        (Shape(2, 2, 2), 2, (0, 1)),
        (Shape(3, 1, 1), 1, (0, 2)),
        (Shape(1, 1, 4), 1, None),
        (Shape(1, 4, 2, ep=4), 1, None),
    ],
    ids=str,
)
def test_all_ranks_split_in_one_order(
    ranks: RankPool, shape: Shape, kv_replicas: int, ends: tuple[int, int] | None
) -> None:
    (calls,) = ranks.run(splits_of, 1, shape, kv_replicas, ends)
    check_legal(calls)
    for _, description, seconds, _ in (call.detail for call in calls[0]):
        assert description.startswith("mesh_") and seconds == 2000.0
    limits = {description: processors for _, description, _, processors in (call.detail for call in calls[0])}
    if shape.pp == 2:
        assert limits == {
            "mesh_pp": 2,
            "mesh_pp_backward": 2,
            "mesh_dp": 8,
            "mesh_tp": 0,
            "mesh_replica": 0,
            "mesh_dp_replica": 2,
            "mesh_dp_tp": 2,
            "mesh_ends": 0,
        }


def test_a_rank_that_splits_in_another_order_is_noticed(ranks: RankPool, count_mutations: CountMutations) -> None:
    (calls,) = ranks.run(splits_of, 1, Shape(2, 2, 2), 2, (0, 1))
    swapped = [list(of_rank) for of_rank in calls]
    swapped[5][1], swapped[5][2] = swapped[5][2], swapped[5][1]
    missing = [list(of_rank) for of_rank in calls]
    del missing[3][-1]
    other = [list(of_rank) for of_rank in calls]
    groups, *said = other[2][0].detail
    other[2][0] = replace(other[2][0], detail=(groups, *said[:-1], 32))
    mutants = swapped, missing, other
    for mutant in mutants:
        with pytest.raises(AssertionError):
            check_legal(mutant)
    count_mutations("splits of groups", len(mutants), len(mutants))


def test_the_library_waits_longer_than_the_watch() -> None:
    assert library_timeout(0.0, nccl=True) == library_timeout(300.0, nccl=True) == timedelta(seconds=600)
    assert library_timeout(1000.0, nccl=True) == timedelta(seconds=2000)
    assert library_timeout(300.0, nccl=False) == timedelta(seconds=1800)


def told_to_matmuls(shape: Shape) -> list[int]:
    """What the communicator of fused matmuls on a GPU is told to leave free, on every rank."""
    told = []
    for rank in range(shape.world_size):
        with fake_rank(rank, shape.world_size, splits=True), pytest.MonkeyPatch.context() as patch:
            made: list[dict[str, Any]] = []
            patch.setattr(mesh, "Communicator", lambda group, made=made, **given: made.append(given))
            config = config_of(shape.dp, shape.tp, shape.pp, tied=False, kv_heads=2)
            # The mesh is of fake ranks; only the layout of communicators is a GPU's.
            patch.setattr(mesh, "hosts_of_ranks", lambda device: [0] * shape.world_size)
            patch.setattr(mesh, "nccl_version", lambda: (2, 29, 3))
            mesh.Communicators.of(mesh.build_mesh(shape, "cpu"), config, torch.device("cuda"))
            told += [given["reserved_processors"] for given in made if given]
    return told


def test_fused_matmuls_leave_free_what_nccl_may_hold(ranks: RankPool) -> None:
    assert ranks.run(told_to_matmuls, 1, Shape(2, 2, 2)) == [[2 + 2 + 8 + 2] * 8]
