"""Rung: pure. Readiness counting and the order of reductions, with reductions that only record their start."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tpengine.data_parallel.bucket import FlatBucket
from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.layout.parameters import BucketLayout


class Recorder:
    """Stands where a collective would: records which buckets were started and waited for."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.waited: list[int] = []

    def of(self, *indices: int) -> dict[int, Any]:
        """Return communicators, one per bucket."""
        return {index: SimpleNamespace(start_all_reduce=partial(self._start, index)) for index in indices}

    def _start(self, index: int, flat: Tensor) -> SimpleNamespace:
        self.started.append(index)
        return SimpleNamespace(wait=lambda: self.waited.append(index))


def build(recorder: Recorder) -> GradientBuckets:
    """Bucket 5 holds c and b, bucket 6 holds a, which contributes twice (tied)."""
    parameters = {name: Parameter(torch.zeros(2, 3)) for name in "abc"}
    layouts = {5: BucketLayout(("dp",), ("c", "b"), (6, 6)), 6: BucketLayout(("dp",), ("a",), (6,))}
    return GradientBuckets(made(layouts, parameters, recorder), {"a": 2})


def made(
    layouts: dict[int, BucketLayout], parameters: dict[str, Parameter], recorder: Recorder, **options: Any
) -> dict[int, FlatBucket]:
    comms = recorder.of(*layouts)
    return {index: FlatBucket(layout, parameters, comms[index], **options) for index, layout in layouts.items()}


def test_gradients_are_views_of_the_flat_buffers() -> None:
    buckets = build(Recorder())
    buckets.gradients["b"].fill_(2)
    assert buckets.flat[5].tolist() == [0] * 6 + [2] * 6
    buckets.zero()
    assert not buckets.flat[5].any()


def packed(*names: str, shapes: dict[str, tuple[int, ...]] | None = None) -> GradientBuckets:
    """One bucket of a, b and c, [2, 3] each or of other shapes, some of them declared one matrix."""
    sizes = {name: (2, 3) for name in "abc"} | (shapes or {})
    parameters = {name: Parameter(torch.zeros(size)) for name, size in sizes.items()}
    numels = tuple(parameter.numel() for parameter in parameters.values())
    layout = BucketLayout(("dp",), tuple("abc"), numels, packs=(names,))
    return GradientBuckets(made({5: layout}, parameters, Recorder()))


def test_gradients_that_are_declared_one_matrix_are_its_rows() -> None:
    buckets = packed("b", "c", shapes={"c": (5, 3)})
    (matrix,) = buckets.packs.values()
    matrix += torch.arange(7).float()[:, None]
    assert not buckets.gradients["a"].any()
    assert buckets.gradients["b"][:, 0].tolist() == [0, 1]
    assert buckets.gradients["c"][:, 2].tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("names", "shapes"),
    [("ac", {}), ("ba", {}), ("bc", {"c": (3, 2)}), ("ab", {"b": (6,)})],
    ids=["not_adjacent", "other_order", "other_width", "a_vector"],
)
def test_a_wrong_declaration_is_found_when_buckets_are_made(names: str, shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(AssertionError, match="declared one matrix lie behind each other"):
        packed(*names, shapes=shapes)


def test_nothing_starts_unless_armed() -> None:
    recorder = Recorder()
    buckets = build(recorder)
    for name in "cba":
        buckets.contributed(buckets.place(name)[1])
    assert recorder.started == []


def test_a_bucket_starts_with_its_last_contribution() -> None:
    recorder = Recorder()
    buckets = build(recorder)
    marks: list[int] = []
    buckets.arm([5, 6], marks.append)
    buckets.contributed(5)
    assert recorder.started == []
    buckets.contributed(5)
    assert recorder.started == [5]
    buckets.contributed(6)
    assert recorder.started == [5]
    buckets.contributed(6)
    assert recorder.started == marks == [5, 6]
    buckets.disarm()
    buckets.wait(6)
    buckets.wait(5)
    assert recorder.waited == [6, 5]


def test_an_early_bucket_waits_its_turn() -> None:
    recorder = Recorder()
    buckets = build(recorder)
    buckets.arm([5, 6])
    buckets.contributed(6)
    buckets.contributed(6)
    buckets.contributed(5)
    assert recorder.started == []
    buckets.contributed(5)
    assert recorder.started == [5, 6]
    buckets.disarm()


def test_what_comes_before_a_sum_sees_all_contributions() -> None:
    recorder, order = Recorder(), []
    layouts = {0: BucketLayout(("dp",), ("a",), (2,))}
    buckets = GradientBuckets(made(layouts, {"a": Parameter(torch.zeros(2))}, recorder))
    gradient, index = buckets.place("a")
    assert gradient is buckets.gradients["a"] and index == 0
    buckets.arm([0], lambda i: order.append((i, *recorder.started)))
    buckets.contributed(index)
    assert order == [(0,)] and recorder.started == [0]


def test_a_missing_contribution_is_an_error() -> None:
    buckets = build(Recorder())
    buckets.arm([5, 6])
    buckets.contributed(6)
    with pytest.raises(RuntimeError, match=r"missing by bucket \{5: 2, 6: 1\}"):
        buckets.disarm()


def test_a_step_cannot_begin_before_reductions_were_waited_for() -> None:
    buckets = build(Recorder())
    buckets.arm([6])
    buckets.contributed(6)
    buckets.contributed(6)
    buckets.disarm()
    with pytest.raises(AssertionError, match="not waited for"):
        buckets.zero()


def test_flush_starts_what_is_left_in_order() -> None:
    recorder = Recorder()
    buckets = build(recorder)
    buckets.arm([5, 6])
    buckets.contributed(5)
    buckets.contributed(5)
    buckets.flush()
    assert recorder.started == [5, 6]
    buckets.contributed(6)
    buckets.flush()
    assert recorder.started == [5, 6]
    buckets.arm([5])
    assert recorder.started == [5, 6]


def test_a_bucket_takes_dtype_device_and_strides_from_its_parameters() -> None:
    a = Parameter(torch.zeros(2, 3, 2, 2, dtype=torch.bfloat16).to(memory_format=torch.channels_last))
    parameters = {"a": a, "b": Parameter(torch.zeros(3)), "c": Parameter(torch.zeros(5, 4).T)}
    layouts = {
        0: BucketLayout(("dp",), ("c", "b"), (20, 3)),
        1: BucketLayout(("dp",), ("a",), (24,)),
    }
    buckets = GradientBuckets(made(layouts, parameters, Recorder()))
    assert [flat.dtype for flat in buckets.flat.values()] == [torch.float32, torch.bfloat16]
    for name, parameter in parameters.items():
        assert buckets.gradients[name].shape == parameter.shape
        assert buckets.gradients[name].stride() == parameter.stride()
        buckets.gradients[name].fill_(1)
    assert all(bool((flat == 1).all()) for flat in buckets.flat.values())  # each element belongs to one view


def test_counts_of_users_travel_with_the_gradients() -> None:
    parameters = {name: Parameter(torch.zeros(2, 3)) for name in "ab"}
    layouts = {0: BucketLayout(("dp",), ("b", "a"), (6, 6))}
    buckets = GradientBuckets(made(layouts, parameters, Recorder(), counts_usage=True))
    buckets[0].usage.copy_(torch.tensor([True, False]))
    buckets[0].sums.fill_(2)
    assert buckets.flat[0].tolist() == [2] * 12 + [1, 0]
    assert buckets.gradients["a"].tolist() == [[2] * 3] * 2


def test_a_bucket_of_two_dtypes_is_a_mistake() -> None:
    parameters = {"a": Parameter(torch.zeros(2)), "b": Parameter(torch.zeros(2, dtype=torch.float64))}
    layouts = {0: BucketLayout(("dp",), ("b", "a"), (2, 2))}
    with pytest.raises(AssertionError, match="one dtype and one device"):
        made(layouts, parameters, Recorder())
