"""Rung: pure. Slices of buckets and boxes of tensors: every element lies in exactly one."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tpengine.layout.parameters import ALIGNMENT_BYTES, BucketLayout
from tpengine.layout.slices import boxes_of, parts_of, slice_numel

NUMELS = st.lists(st.integers(1, 200), min_size=1, max_size=6)


@given(NUMELS, st.integers(1, 9))
def test_each_element_of_a_tensor_is_owned_once(numels: list[int], num_slices: int) -> None:
    layout = BucketLayout(("dp",), tuple(f"w{i}" for i in range(len(numels))), tuple(numels))
    size = slice_numel(layout, num_slices)
    flat = [(name, i) for name, numel in zip(layout.names, numels, strict=True) for i in range(numel)]
    found: list[tuple[str, int]] = []
    for owner in range(num_slices):
        for part in parts_of(layout, num_slices, owner):
            elements = [(part.name, i) for i in range(part.in_tensor.start, part.in_tensor.stop)]
            assert 0 <= part.in_slice.start < part.in_slice.stop <= size
            assert flat[owner * size :][part.in_slice] == elements
            found += elements
    assert found == flat


@given(NUMELS, st.integers(1, 9))
def test_slices_begin_at_cache_lines_and_no_line_is_lost(numels: list[int], num_slices: int) -> None:
    layout = BucketLayout(("dp",), tuple(f"w{i}" for i in range(len(numels))), tuple(numels))
    size, line = slice_numel(layout, num_slices), ALIGNMENT_BYTES // 4
    assert size % line == 0
    assert layout.numel <= num_slices * size < layout.numel + num_slices * line


@given(st.tuples(*[st.integers(1, 9)] * 3), st.data())
def test_boxes_of_stacked_matrices_are_the_run_of_elements(shape: tuple[int, int, int], data: st.DataObject) -> None:
    """At most five: the parts of a matrix in front and behind are two each, and whole matrices one."""
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel - 1))
    end = data.draw(st.integers(begin + 1, numel))
    whole = torch.arange(numel).view(shape)
    boxes = list(boxes_of(shape, slice(begin, end)))
    assert len(boxes) <= 5
    place = 0
    for box in boxes:
        cut = whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))]
        assert tuple(cut.shape) == box.size and box.within.start == place
        assert torch.equal(cut.flatten(), whole.view(-1)[begin:end][box.within])
        place = box.within.stop
    assert place == end - begin


@given(st.tuples(st.integers(1, 9), st.integers(1, 9)) | st.tuples(st.integers(1, 50)), st.data())
def test_a_run_of_elements_is_at_most_three_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel - 1))
    end = data.draw(st.integers(begin + 1, numel))
    boxes = list(boxes_of(shape, slice(begin, end)))
    assert len(boxes) <= 3
    width = shape[-1] if len(shape) == 2 else 1
    place = begin
    for box in boxes:
        assert box.within == slice(place - begin, place - begin + math.prod(box.size))
        assert box.offset == (divmod(place, width) if len(shape) == 2 else (place,))
        assert all(o + s <= n for o, s, n in zip(box.offset, box.size, shape, strict=True))
        # Of several rows only whole ones are neighbours.
        assert len(shape) == 1 or box.size[0] == 1 or box.size[1] == width
        place += math.prod(box.size)
    assert place == end
