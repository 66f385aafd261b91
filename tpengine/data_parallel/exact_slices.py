"""Exact mode's slices (ZeRO): each tensor is cut over the replicas by itself, at borders of its blocks.

    packed[d, S]: row i holds the parts that replica i owns, one tensor behind the other

Gradients are packed when they are summed, weights are unpacked when they are gathered: one copy of a bucket more than
in fast mode, whose buckets are cut as they lie.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Work

from tpengine.data_parallel.buckets import GradientBuckets, Layout
from tpengine.data_parallel.owned_weights import OwnedWeights
from tpengine.data_parallel.sliced_buckets import set_memory
from tpengine.layout.slices import BlockCut, Part


class Packing:
    """Where the parts of several tensors lie in the slices of a bucket.

    Args:
        cuts: by tensor's name, in the order in which they are packed.

    Attributes:
        size: S, elements of a slice.
        offsets: by name, where a tensor's part begins in every slice.
    """

    def __init__(self, cuts: Mapping[str, BlockCut]) -> None:
        self._cuts = cuts
        places = list(accumulate((cut.size for cut in cuts.values()), initial=0))
        self.size = places[-1]
        self.offsets = dict(zip(cuts, places, strict=False))

    def part(self, name: str, replica: int) -> Part:
        """Return where the elements of a tensor lie that a replica owns, which may be none."""
        owned, offset = self._cuts[name].owned_by(replica), self.offsets[name]
        return Part(name, slice(offset, offset + owned.stop - owned.start), owned)

    def pack(self, tensors: Mapping[str, Tensor], num_replicas: int) -> Tensor:
        """Return packed[d * S] of flat tensors; what is between the parts is zero."""
        first = next(iter(tensors.values()))
        packed = first.new_zeros(num_replicas, self.size)
        for name, tensor in tensors.items():
            for replica, row in enumerate(packed):
                part = self.part(name, replica)
                row[part.in_slice] = tensor[part.in_tensor]
        return packed.view(-1)

    def unpack(self, packed: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write packed[d * S] into the flat tensors."""
        for replica, row in enumerate(packed.view(-1, self.size)):
            for name, tensor in tensors.items():
                part = self.part(name, replica)
                tensor[part.in_tensor] = row[part.in_slice]


class PackedBuckets(GradientBuckets):
    """Gradient buckets of exact mode of whose sums each replica keeps what it owns.

    Args:
        layouts, shaped, contributions, comms, options: as GradientBuckets; all buckets over the same replicas.
        cuts: of each gradient, by name.

    Attributes:
        parts: by name, this replica's elements of a gradient's sum, one dim; some are empty.

    Memory: besides the buffers 1/d of them, and while a bucket is summed once more that bucket.
    """

    def __init__(
        self,
        layouts: Mapping[int, Layout],
        shaped: Mapping[str, Tensor],
        contributions: Mapping[str, int],
        comms: Mapping[int, Communicator],
        *,
        cuts: Mapping[str, BlockCut],
        **options: Any,
    ) -> None:
        super().__init__(layouts, shaped, contributions, comms, **options)
        self._packings = {
            index: Packing({name: cuts[name] for name in layout.names}) for index, layout in layouts.items()
        }
        self._slices = {index: self.flat[index].new_zeros(packing.size) for index, packing in self._packings.items()}
        self._under_way: dict[int, Tensor] = {}
        self._names = {index: layout.names for index, layout in layouts.items()}
        self.parts = {
            name: self._slices[index][packing.part(name, comms[index].rank).in_slice]
            for index, packing in self._packings.items()
            for name in self._names[index]
        }

    def wait(self, index: int) -> Work:
        """See GradientBuckets; the sums are in `parts`."""
        work = super().wait(index)
        del self._under_way[index]
        return work

    def _start_sum(self, index: int, flat: Tensor) -> Work:
        comm = self._comms[index]
        flats = {name: self.gradients[name].reshape(-1) for name in self._names[index]}
        packed = self._under_way[index] = self._packings[index].pack(flats, comm.size)
        return comm.start_reduce_scatter(packed, self._slices[index], in_tree=True)


class PackedWeights:
    """Exact mode's weights in flat buffers, gathered from what the replicas own; otherwise as SlicedWeights.

    Args:
        buckets: names of the parameters of each bucket, by its index, in the order in which they lie behind each other.
        cuts: of each parameter, by name.
        held: the parameters, by name, dense; from now on they are views of `flat`.
        comm: the replicas.
        kept: buckets that are always whole (Weights.UPDATED); the others are SLICED.

    Attributes:
        flat, own, of, parts, owned: as SlicedWeights.
    """

    def __init__(
        self,
        buckets: Mapping[int, Sequence[str]],
        cuts: Mapping[str, BlockCut],
        held: Mapping[str, Parameter],
        comm: Communicator,
        kept: Collection[int],
    ) -> None:
        self._comm, self._kept = comm, kept
        self.flat: dict[int, Tensor] = {}
        self.own: dict[int, Tensor] = {}
        self.of: dict[str, Tensor] = {}
        self.parts: dict[str, Part] = {}
        self._packings: dict[int, Packing] = {}
        self._members: dict[int, dict[str, Tensor]] = {}
        self.owned = OwnedWeights()
        self._pending: dict[int, tuple[Work, Tensor]] = {}
        for index, names in buckets.items():
            packing = self._packings[index] = Packing({name: cuts[name] for name in names})
            members = [held[name] for name in names]
            numels = [member.numel() for member in members]
            flat = self.flat[index] = members[0].detach().new_zeros(sum(numels))
            self.own[index] = flat.new_zeros(packing.size)
            self._members[index] = dict(zip(names, flat.split(numels), strict=True))
            for name, member in zip(names, members, strict=True):
                self.owned.take(name, member, self._members[index][name].view(member.shape))
                part = packing.part(name, comm.rank)
                if part.in_tensor.start < part.in_tensor.stop:
                    self.parts[name], self.of[name] = part, self.own[index][part.in_slice]
            if index not in kept:
                set_memory(flat, False)

    def check_owned(self, index: int) -> None:
        """See SlicedWeights."""
        self.owned.check(self._members[index])

    def gather(self, index: int) -> None:
        """See SlicedWeights."""
        assert index not in self._pending, f"bucket {index} is being gathered"
        packed = self.own[index].new_empty(self._comm.size * self._packings[index].size)
        self._pending[index] = self._comm.start_all_gather(self.own[index], packed), packed

    @torch.no_grad()
    def wait(self, index: int) -> Work:
        """See SlicedWeights."""
        work, packed = self._pending.pop(index)
        work.wait()
        set_memory(self.flat[index], True)
        self._packings[index].unpack(packed, self._members[index])
        return work

    def is_complete(self, index: int) -> bool:
        """See SlicedWeights."""
        return self._pending[index][0].is_complete()

    def is_kept(self, index: int) -> bool:
        """See SlicedWeights."""
        return index in self._kept

    def free(self, index: int) -> None:
        """See SlicedWeights."""
        assert index not in self._pending and index not in self._kept, f"bucket {index} cannot be freed"
        set_memory(self.flat[index], False)
