"""Weights that lie in flat buckets, gathered from the slices that the replicas own (ZeRO 1 to 3).

    flat[d * s] = all_gather(own[s])

Parameters are views of the flat buffers. The optimizer updates slices. At stages 1 and 2 (Weights.UPDATED) a slice is a
part of the buffer, and a gather brings the other replicas' new values. At stage 3 (Weights.SLICED) it is a tensor of
its own, and the buffer has memory from a gather to the `free` that follows. The plan says when (plan/lower/residency).

The decision a reader will question: memory is taken away from under the tensors, by resizing their storage, instead of
making the parameters anew. So whatever holds a parameter, autograd's graph above all, finds it where it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Work

from tpengine.data_parallel.buckets import dense_strides
from tpengine.data_parallel.owned_weights import OwnedWeights
from tpengine.data_parallel.sliced_buckets import set_memory
from tpengine.layout.parameters import BucketLayout
from tpengine.layout.slices import Part, parts_of, slice_numel


class SlicedWeights:
    """The weights of one rank.

    Args:
        layouts: which parameters lie in each bucket, in the order of their use in forward, by bucket index.
        held: the parameters, by name; from now on they are views of `flat`, and dense. All of a bucket are of one dtype
            and device.
        comm: the replicas.
        kept: buckets that are always whole (Weights.UPDATED); the others are SLICED.

    Attributes:
        flat: by bucket index, the whole buffers.
        own: by bucket index, this replica's slices, which decide: a gather overwrites the rest.
        of: by name, the elements of a parameter that lie in this replica's slices, one dim; views of `own`. Parameters
            of which it owns none are left out.
        parts: which elements those are, by name.
        owned: the parameters, whose memory these buffers own.

    Memory: one element per weight; with SLICED 1/d of that, and what is gathered.
    """

    def __init__(
        self,
        layouts: Mapping[int, BucketLayout],
        held: Mapping[str, Parameter],
        comm: Communicator,
        kept: Collection[int],
    ) -> None:
        self._comm, self._kept = comm, kept
        self.flat: dict[int, Tensor] = {}
        self.own: dict[int, Tensor] = {}
        self.of: dict[str, Tensor] = {}
        self.parts: dict[str, Part] = {}
        self.owned = OwnedWeights()
        self._names = {index: layout.names for index, layout in layouts.items()}
        self._pending: dict[int, Work] = {}
        for index, layout in layouts.items():
            size = slice_numel(layout, comm.size)
            members = [held[name] for name in layout.names]
            flat = members[0].detach().new_zeros(comm.size * size)
            pieces = flat[: layout.numel].split(list(layout.numels))
            for name, member, piece in zip(layout.names, members, pieces, strict=True):
                self.owned.take(name, member, piece.as_strided(member.shape, dense_strides(member)))
            own = flat[comm.rank * size :][:size]
            self.flat[index] = flat
            self.own[index] = own if index in self._kept else own.clone()
            for part in parts_of(layout, comm.size, comm.rank):
                self.of[part.name] = self.own[index][part.in_slice]
                self.parts[part.name] = part
            if index not in self._kept:
                set_memory(flat, False)

    def check_owned(self, index: int) -> None:
        """Assert that a gather of this bucket reaches its parameters."""
        self.owned.check(self._names[index])

    def gather(self, index: int) -> None:
        """Begin gathering a bucket."""
        assert index not in self._pending, f"bucket {index} is being gathered"
        if index not in self._kept:
            set_memory(self.flat[index], True)
        self._pending[index] = self._comm.start_all_gather(self.own[index], self.flat[index])

    @torch.no_grad()
    def wait(self, index: int) -> Work:
        """Wait until a bucket is whole; return the gather, for who asks when it ended."""
        work = self._pending.pop(index)
        work.wait()
        return work

    def is_complete(self, index: int) -> bool:
        """Return whether `wait` would return at once."""
        return self._pending[index].is_complete()

    def is_kept(self, index: int) -> bool:
        """Return whether a bucket is always whole, and never freed."""
        return index in self._kept

    def free(self, index: int) -> None:
        """Take a bucket's memory away; its slice stays."""
        assert index not in self._pending and index not in self._kept, f"bucket {index} cannot be freed"
        set_memory(self.flat[index], False)
