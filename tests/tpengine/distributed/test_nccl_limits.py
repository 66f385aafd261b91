"""Rung: pure. What NCCL may hold of a GPU, by layout. That NCCL keeps to it, and what it costs, only GPUs check."""

from __future__ import annotations

import pytest

from tpengine.distributed.mesh import Shape
from tpengine.distributed.nccl_limits import (
    CONNECTION_BYTES,
    MOST,
    buffer_bytes,
    held_processors,
    nccl_variables,
    processors_of_groups,
    reserved_processors,
    sizes_of_groups,
    spans_hosts,
    users_limit,
    words_of_nccl,
)


@pytest.mark.parametrize(
    ("shape", "replicas", "expected"),
    [
        (Shape(1, 1, 1), 1, {}),
        # Nothing of ours waits for another rank: NCCL takes what it wants for sums.
        (Shape(2, 4, 1), 1, {"pp": 2, "pp_backward": 2}),
        (Shape(1, 1, 8), 1, {"dp_tp": 2}),
        (Shape(1, 2, 4), 1, {"dp": 8, "dp_tp": 2}),
        (Shape(2, 2, 2), 2, {"pp": 2, "pp_backward": 2, "dp": 8, "dp_tp": 2, "dp_replica": 2}),
        (Shape(1, 2, 2, ep=4), 1, {"dp": 8, "dp_tp": 2}),
        (Shape(1, 4, 2, ep=4), 1, {"dp": 8, "dp_tp": 2, "edp": 8}),
        (Shape(1, 4, 2, ep=2), 1, {"dp": 8, "dp_tp": 2}),
        # Kernels that bring rows to experts wait for other ranks, also where no matmul is fused.
        (Shape(1, 8, 1, ep=8), 1, {"dp": 8}),
        (Shape(2, 4, 1, ep=2), 1, {"pp": 2, "pp_backward": 2, "dp": 8, "edp": 8}),
    ],
)
def test_groups_have_limits(shape: Shape, replicas: int, expected: dict[str, int]) -> None:
    limits = processors_of_groups(shape, replicas)
    assert limits == expected
    assert reserved_processors(limits) == sum(expected.values())
    # What our kernels are told: where no limit is needed, NCCL's own choice.
    unlimited = MOST if shape.tp == shape.ep == 1 < shape.dp else 0
    assert held_processors(shape, replicas, limits) == sum(expected.values()) + unlimited


def test_replicas_across_hosts_need_fewer_processors() -> None:
    near, far = (processors_of_groups(Shape(2, 2, 2), spans_hosts=across) for across in (False, True))
    assert near["dp"] == 2 * far["dp"] == 8
    assert reserved_processors(near) - reserved_processors(far) == 4


def test_what_the_user_allows_counts_for_all_groups() -> None:
    assert users_limit({"NCCL_MAX_CTAS": "16", "NCCL_MAX_NCHANNELS": "4"}) == 4
    assert users_limit({"NCCL_MAX_CTAS": "many"}) == users_limit({}) == 0
    assert set(processors_of_groups(Shape(2, 2, 2), 2, users_limit=1).values()) == {1}
    assert reserved_processors(processors_of_groups(Shape(2, 2, 2), 2, users_limit=16)) == 5 * 16


@pytest.mark.parametrize(
    ("shape", "per_host", "spans"),
    [
        (Shape(1, 2, 4), 8, False),
        (Shape(1, 4, 4), 8, True),
        (Shape(2, 2, 4), 8, False),
        (Shape(2, 1, 8), 8, False),
        (Shape(2, 4, 1), 4, False),
        (Shape(1, 8, 1), 4, True),
        (Shape(1, 3, 4), 8, True),
        # Replicas lie on one host where ranks of a tp group do not.
        (Shape(1, 1, 8), 4, False),
        (Shape(1, 4, 2, ep=8), 4, True),
    ],
)
def test_whether_replicas_span_hosts(shape: Shape, per_host: int, spans: bool) -> None:
    assert spans_hosts(shape, [rank // per_host for rank in range(shape.world_size)]) is spans


def test_groups_of_one_rank_have_no_communicator() -> None:
    assert sizes_of_groups(Shape(1, 1, 1)) == {}
    assert sizes_of_groups(Shape(4, 1, 1), ends=True) == {"pp": 4, "pp_backward": 4, "ends": 2}
    assert sizes_of_groups(Shape(1, 2, 4), 2) == {"dp": 2, "tp": 4, "dp_tp": 8, "replica": 2, "dp_replica": 4}


def test_variables_are_set_unless_the_user_has() -> None:
    assert nccl_variables({}, (2, 25, 1)) == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    both = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    assert nccl_variables({}, (2, 26, 0)) == nccl_variables({}, (3, 0, 0)) == both
    users = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    assert nccl_variables(users, (2, 29, 3)) == {}


def test_the_first_lines_say_how_nccl_is_used() -> None:
    limits = processors_of_groups(Shape(2, 1, 2))
    words = words_of_nccl((2, 29, 3), nccl_variables({}, (2, 29, 3)), limits)
    assert words == (
        "NCCL 2.29.3, NCCL_LAUNCH_ORDER_IMPLICIT 1, CUDA_DEVICE_MAX_CONNECTIONS 32, processors of groups at most pp 2, "
        "pp_backward 2, dp_tp 2, kernels of ours leave 6 free"
    )
    assert "not there before 2.26" in words_of_nccl((2, 25, 1), {}, {})


def test_buffers_grow_with_groups_and_their_processors() -> None:
    assert buffer_bytes(Shape(1, 1, 1)) == 0
    # Of the default group, and of each direction of the pipeline: one neighbour and two processors.
    assert buffer_bytes(Shape(2, 1, 1)) == 3 * 2 * CONNECTION_BYTES
    assert CONNECTION_BYTES == 9_633_792
    one, two = buffer_bytes(Shape(1, 2, 2)), buffer_bytes(Shape(1, 2, 2), spans_hosts=True)
    assert one - two == 4 * CONNECTION_BYTES
