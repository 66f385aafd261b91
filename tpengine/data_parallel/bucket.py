"""A bucket: one flat tensor whose views are gradients or weights, and how it is cut over the replicas.

    whole   every rank holds all of it                              flat = sum over ranks of flat
    slice   cut as it lies, padded to R * S (ZeRO, fast mode)       own[S] = part i of (sum over replicas of flat)
    block   each tensor cut by itself at borders of blocks          own[S] = part i of (sum over replicas of packed)
            (ZeRO, exact mode)

Sums and gathers are one collective of the flat tensor. Only a cut in blocks copies: gradients are packed when they are
summed, weights are unpacked when they are gathered.

A transient bucket has memory only while it is used: a gradient's from the backward that fills it to the end of its
sum, a weight's from a gather to the `free` that follows. Its slice is all that is held in between.

The decision a reader will question: memory is taken away from under the views, by resizing their storage, instead of
making them anew. So whatever holds a view, autograd's graph above all, finds it where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Work
from tpkernels.exchange.tree import tree_sum

from tpengine.architectures.part import Axis
from tpengine.layout.parameters import BucketLayout
from tpengine.layout.slices import BucketCut, SlicePart

_Value = TypeVar("_Value", torch.dtype, torch.device)


class FlatBucket:
    """One flat tensor of a rank.

    Args:
        layout: names and sizes of its tensors, and the axes over which ranks hold parts of their sums.
        shaped: by name, a tensor of each one's shape and strides: its parameter.
        comm: the ranks of `axes`.
        dtype, device: of the flat tensor; None takes them from `shaped`, whose members must agree.
        cut: how the replicas cut it; None leaves it whole.
        is_transient: has memory only while it is used; it needs a cut.
        counts_usage: ends in one more element per tensor. There a rank says whether it used the parameter, and the
            count is summed along with the gradients.
        num_lanes: how many sums are kept apart until `join_lanes`, a power of two: those of replicas whose tokens one
            rank's experts multiply (exact mode).

    Attributes:
        axes: the axes of the mesh over which it is reduced: all of its layout's, or if it is cut the first alone, of
            the replicas. What a slice lacks then is summed over the other axes by its user, of the slice alone.
        flat: [n], the whole; with several lanes the first.
        lanes: [num_lanes, n], or `flat` of one.
        sums: the part of `flat` that holds tensors.
        usage: the counts behind it; empty without `counts_usage`.
        views: name -> its part of `flat`, of the parameter's shape and strides.
        packs: the names of tensors that the layout declares to be rows of one matrix -> that matrix, a view of them.
        own: [S], this replica's slice; `flat` where there is no cut. A part of `flat`, unless the bucket is transient
            or cut in blocks: then memory of its own.
        parts: by name, which elements of a tensor lie in `own`; tensors of which it has none are left out.
        own_views: by name, these elements, one dim.

    Memory: n elements a lane; a transient bucket, or one that is cut in blocks, S more. One cut in blocks has R * S
        more while it is summed or gathered.
    """

    def __init__(
        self,
        layout: BucketLayout,
        shaped: Mapping[str, Tensor],
        comm: Communicator,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        *,
        cut: BucketCut | None = None,
        is_transient: bool = False,
        counts_usage: bool = False,
        num_lanes: int = 1,
    ) -> None:
        assert cut is not None or not is_transient, "what is not cut keeps its memory"
        self.layout, self.comm, self.cut, self.is_transient = layout, comm, cut, is_transient
        self.axes: tuple[Axis, ...] = layout.reduce_over if cut is None else layout.reduce_over[:1]
        members = [shaped[name] for name in layout.names]
        num_counts = len(members) if counts_usage else 0
        numel = layout.numel + num_counts if cut is None else cut.numel
        self.lanes = torch.zeros(
            numel if num_lanes == 1 else (num_lanes, numel),
            dtype=dtype or _the_one({member.dtype for member in members}),
            device=device or _the_one({member.device for member in members}),
        )
        self.flat = self.lanes if num_lanes == 1 else self.lanes[0]
        self.sums, self.usage = self.flat[: layout.numel + num_counts].split([layout.numel, num_counts])
        self.views: dict[str, Tensor] = {
            name: piece.as_strided(member.shape, _dense_strides(member))
            for name, member, piece in zip(layout.names, members, self.sums.split(list(layout.numels)), strict=True)
        }
        self.packs = {
            names: _one_matrix(self.flat, {name: self.views[name] for name in names}) for names in layout.packs
        }
        # `own` is where a slice is kept, `_arrival` where its sum arrives.
        self.own = self._arrival = self.flat
        self.parts: dict[str, SlicePart] = {}
        if cut is not None:
            if self._is_cut_as_it_lies:
                self.own = self._arrival = self.flat.view(comm.size, cut.size)[comm.rank]
            if is_transient or not self._is_cut_as_it_lies:
                self.own = self.flat.new_zeros(cut.size)
            if not self._is_cut_as_it_lies:
                self._arrival = self.own
            self.parts = {part.name: part for part in cut.parts(comm.rank)}
        self.own_views = {name: self.own[part.in_slice] for name, part in self.parts.items()}
        # What a collective that has not ended reads or writes.
        self._packed: Tensor | None = None

    @property
    def _is_cut_as_it_lies(self) -> bool:
        return self.cut is not None and self.cut.blocks is None

    @property
    def has_memory(self) -> bool:
        """Whether the flat tensor can be read."""
        return self.flat.untyped_storage().nbytes() > 0

    @property
    def num_lanes(self) -> int:
        """How many sums are kept apart until `join_lanes`."""
        return 1 if self.lanes.dim() == 1 else len(self.lanes)

    def view_of(self, name: str, lane: int) -> Tensor:
        """Return a tensor's part of a lane, of the parameter's shape and strides."""
        view = self.views[name]
        begin = view.storage_offset() + lane * self.flat.numel()
        return self.lanes.as_strided(view.shape, view.stride(), begin)

    def join_lanes(self) -> None:
        """Add up the lanes into the first, in a balanced tree, as ranks that had one each would."""
        if self.num_lanes > 1:
            tree_sum(self.lanes.unbind(), out=self.flat)

    def allocate(self) -> None:
        """Give the flat tensor its memory, with any content; views of it follow."""
        if not self.has_memory:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())

    def free(self) -> None:
        """Take the flat tensor's memory away; the slice stays."""
        assert self.is_transient, "a bucket that is always whole cannot be freed"
        self.flat.untyped_storage().resize_(0)

    def start_sum(self, *, in_tree: bool) -> Work:
        """Start summing over the ranks of `axes`: all of it, or of a cut bucket this replica's slice.

        Args:
            in_tree: add in a balanced tree of ranks, whatever the transport.
        """
        if self.cut is None:
            return self.comm.start_all_reduce_in_tree(self.flat) if in_tree else self.comm.start_all_reduce(self.flat)
        self._packed = self._pack()
        return self.comm.start_reduce_scatter(self._packed, self._arrival, in_tree=in_tree)

    def end_sum(self) -> None:
        """Take a sum that has ended; a transient bucket adds it to its slice, and is freed."""
        self._packed = None
        if self.is_transient:
            assert self._is_cut_as_it_lies, "the sum of a bucket in blocks arrives in its slice already"
            self.own.add_(self._arrival)
            self.free()

    def start_gather(self) -> Work:
        """Start gathering the slices of all replicas."""
        assert self.cut is not None and self._packed is None, "a cut bucket is gathered once at a time"
        if self._is_cut_as_it_lies:
            self.allocate()
        self._packed = self.flat if self._is_cut_as_it_lies else self.own.new_empty(self.comm.size * self.cut.size)
        return self.comm.start_all_gather(self.own, self._packed)

    def end_gather(self) -> None:
        """Take what has been gathered; the bucket is whole."""
        assert self.cut is not None and self._packed is not None, "nothing is being gathered"
        if not self._is_cut_as_it_lies:
            self.allocate()
            for replica, row in enumerate(self._packed.view(self.comm.size, self.cut.size)):
                for part in self.cut.parts(replica):
                    self.views[part.name].view(-1)[part.in_tensor] = row[part.in_slice]
        self._packed = None

    def fill_own(self) -> None:
        """Take this replica's slice from the flat tensor."""
        assert self.cut is not None, "what is not cut has no slices"
        self.own.copy_(self._pack().view(self.comm.size, self.cut.size)[self.comm.rank])

    def _pack(self) -> Tensor:
        """Return packed[R * S]: the flat tensor, or a copy of it; what is between the parts of a copy is zero."""
        assert self.cut is not None, "what is not cut is summed as it lies"
        if self._is_cut_as_it_lies:
            return self.flat
        packed = self.flat.new_zeros(self.comm.size, self.cut.size)
        for replica, row in enumerate(packed):
            for part in self.cut.parts(replica):
                row[part.in_slice] = self.views[part.name].view(-1)[part.in_tensor]
        return packed.view(-1)


def _one_matrix(flat: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix whose rows are some gradients of a flat buffer, as its layout declares them to be."""
    first = next(iter(rows.values()))
    width, place = first.shape[1], first.storage_offset()
    for name, gradient in rows.items():
        is_next = gradient.storage_offset() == place and gradient.shape[1:] == (width,) and gradient.is_contiguous()
        assert is_next, f"gradients that are declared one matrix lie behind each other: {list(rows)}: {name} does not"
        place += gradient.numel()
    return flat.as_strided((sum(map(len, rows.values())), width), (width, 1), first.storage_offset())


def _dense_strides(member: Tensor) -> tuple[int, ...]:
    """Return those of a dense tensor laid out like the parameter: optimizers take their fast path where they agree."""
    return torch.empty_like(member, device="meta").stride()


def _the_one(values: set[_Value]) -> _Value:
    assert len(values) == 1, f"a bucket holds one dtype and one device: got {values}"
    return next(iter(values))
