"""Rung: pure. Readiness counting and the order of reductions, with reductions that only record their start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tpengine.data_parallel import GradientBuckets


class Recorder:
    """Stands where a collective would: records which buckets were started and waited for."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.waited: list[int] = []

    def __call__(self, index: int, flat: Tensor) -> SimpleNamespace:
        self.started.append(index)
        return SimpleNamespace(wait=lambda: self.waited.append(index))


def build(recorder: Recorder) -> tuple[GradientBuckets, dict[str, Parameter]]:
    """Bucket 5 holds c and b, bucket 6 holds a, which contributes twice (tied)."""
    parameters = {name: Parameter(torch.zeros(2, 3)) for name in "abc"}
    layouts = {
        5: SimpleNamespace(names=("c", "b"), numels=(6, 6)),
        6: SimpleNamespace(names=("a",), numels=(6,)),
    }
    buckets = GradientBuckets(
        layouts, parameters, {"a": 2, "b": 1, "c": 1}, recorder, torch.float32, torch.device("cpu")
    )
    return buckets, parameters


def test_gradients_are_views_of_the_flat_buffers() -> None:
    buckets, _ = build(Recorder())
    buckets.gradients["b"].fill_(2)
    assert buckets.flat[5].tolist() == [0] * 6 + [2] * 6
    buckets.zero()
    assert not buckets.flat[5].any()


def test_nothing_starts_unless_armed() -> None:
    recorder = Recorder()
    buckets, parameters = build(recorder)
    for name in "cba":
        buckets.contributed(parameters[name])
    assert recorder.started == []


def test_a_bucket_starts_with_its_last_contribution() -> None:
    recorder = Recorder()
    buckets, parameters = build(recorder)
    marks: list[int] = []
    buckets.arm([5, 6], marks.append)
    buckets.contributed(parameters["c"])
    assert recorder.started == []
    buckets.contributed(parameters["b"])
    assert recorder.started == [5]
    buckets.contributed(parameters["a"])
    assert recorder.started == [5]
    buckets.contributed(parameters["a"])
    assert recorder.started == marks == [5, 6]
    buckets.disarm()
    buckets.wait(6)
    buckets.wait(5)
    assert recorder.waited == [6, 5]


def test_an_early_bucket_waits_its_turn() -> None:
    recorder = Recorder()
    buckets, parameters = build(recorder)
    buckets.arm([5, 6])
    buckets.contributed(parameters["a"])
    buckets.contributed(parameters["a"])
    buckets.contributed(parameters["b"])
    assert recorder.started == []
    buckets.contributed(parameters["c"])
    assert recorder.started == [5, 6]
    buckets.disarm()


def test_a_missing_contribution_is_an_error() -> None:
    buckets, parameters = build(Recorder())
    buckets.arm([5, 6])
    buckets.contributed(parameters["a"])
    with pytest.raises(RuntimeError, match=r"missing by bucket \{5: 2, 6: 1\}"):
        buckets.disarm()


def test_a_step_cannot_begin_before_reductions_were_waited_for() -> None:
    buckets, parameters = build(Recorder())
    buckets.arm([6])
    buckets.contributed(parameters["a"])
    buckets.contributed(parameters["a"])
    buckets.disarm()
    with pytest.raises(AssertionError, match="not waited for"):
        buckets.zero()
