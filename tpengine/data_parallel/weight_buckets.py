"""Weights that lie in flat buckets, gathered from the slices that the replicas own (ZeRO 1 to 3).

    flat[R * S] = all_gather(own[S])

Parameters are views of the buckets. The optimizer updates slices. At stages 1 and 2 (Weights.UPDATED) a bucket is
always whole, and a gather brings the other replicas' new values. At stage 3 (Weights.SLICED) it is transient: it has
memory from a gather to the `free` that follows. The plan says when (plan/residency.py).

Buckets own the memory of the weights in them (layers/prepared_weights.py). A parameter that lies elsewhere would be
trained by nobody: what is gathered and updated in the buckets would no longer reach the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Work

from tpengine.architectures.part import Axis
from tpengine.data_parallel.bucket import FlatBucket
from tpengine.layers.prepared_weights import lies_at
from tpengine.layout.slices import BucketCut, SlicePart


class WeightBuckets:
    """The weights of one rank.

    Args:
        cuts: which parameters lie in each bucket, and how it is cut, by bucket index.
        held: the parameters, by name; from now on they are views of the buckets, and dense. All of a bucket are of one
            dtype and device.
        comms: the replicas that own slices, by bucket index.
        kept: indices of buckets that are always whole (Weights.UPDATED); the others are SLICED.

    Attributes:
        flat: by bucket index, the whole buffers.
        own: by bucket index, this replica's slices, which decide: a gather overwrites the rest.
        of: by name, the elements of a parameter that lie in this replica's slices, one dim; views of `own`. Parameters
            of which it owns none are left out.
        parts: which elements those are, by name.
        places: by name, the part of a buffer in which a parameter lies, in the parameter's shape.

    Memory: one element per weight; with SLICED 1/R of that, and what is gathered. A bucket cut in blocks has 1/R more.
    """

    def __init__(
        self,
        cuts: Mapping[int, BucketCut],
        held: Mapping[str, Parameter],
        comms: Mapping[int, Communicator],
        kept: Collection[int],
    ) -> None:
        self._held = held
        self._buckets: dict[int, FlatBucket] = {}
        self._pending: dict[int, Work] = {}
        self.flat: dict[int, Tensor] = {}
        self.own: dict[int, Tensor] = {}
        self.of: dict[str, Tensor] = {}
        self.parts: dict[str, SlicePart] = {}
        self.places: dict[str, Tensor] = {}
        for index, cut in cuts.items():
            bucket = FlatBucket(cut.layout, held, comms[index], cut=cut, is_transient=index not in kept)
            for name, place in bucket.views.items():
                place.copy_(held[name].detach())
                # Without a common count of writes: a gather is none that autograd should see.
                held[name].data = place
            bucket.fill_own()
            if bucket.is_transient:
                bucket.free()
            self._buckets[index], self.flat[index], self.own[index] = bucket, bucket.flat, bucket.own
            self.of |= bucket.own_views
            self.parts |= bucket.parts
            self.places |= bucket.views

    def axes(self, index: int) -> tuple[Axis, ...]:
        """Return the axes of the ranks that a bucket is gathered from."""
        return self._buckets[index].axes

    def moved(self, names: Iterable[str] | None = None) -> list[str]:
        """Return which of the parameters `names`, or of all, somebody else has moved."""
        return [name for name in names or self.places if not lies_at(self._held[name], self.places[name])]

    def check_owned(self, index: int) -> None:
        """Assert that a gather of this bucket reaches its parameters."""
        for name in self.moved(self._buckets[index].views):
            raise AssertionError(f"one owner per weight: {name} has left the buffer that it is gathered into")

    def gather(self, index: int) -> None:
        """Begin gathering a bucket."""
        assert index not in self._pending, f"bucket {index} is being gathered"
        self._pending[index] = self._buckets[index].start_gather()

    @torch.no_grad()
    def wait(self, index: int) -> Work:
        """Wait until a bucket is whole; return the gather, for who asks when it ended."""
        work = self._pending.pop(index)
        work.wait()
        self._buckets[index].end_gather()
        return work

    def is_complete(self, index: int) -> bool:
        """Return whether `wait` would return at once."""
        return self._pending[index].is_complete()

    def free(self, index: int) -> None:
        """Take a bucket's memory away; its slice stays."""
        assert index not in self._pending, f"bucket {index} is being gathered"
        self._buckets[index].free()
