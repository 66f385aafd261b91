"""Gradients of a step in fast mode where every replica owns slices (ZeRO); gradients.py has whole ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator

from tpengine.data_parallel.gradients import attach
from tpengine.data_parallel.sliced_buckets import SlicedBuckets
from tpengine.distributed.groups import Communicators
from tpengine.layers.gradient_sink import BufferSink
from tpengine.layout.parameters import EMBEDDING, BucketLayout, Piece
from tpengine.layout.slices import parts_of


class SlicedGradients:
    """The gradients of one rank, as data_parallel.gradients.StepGradients; the optimizer reads slices.

    A slice is summed over the replicas while backward runs. What other ranks of the replica have a share of, norms on
    all tp ranks and KV heads on several, is added when all micro-batches are in: of the slices alone.

    Args:
        layouts: buckets by index.
        pieces, held: what this rank holds, and the parameters, by piece.
        tied_ends: as FastGradients.
        comms: the ranks.
        dtype, device: of the buffers.
        sink: what the model's layers add to.
        each: sum every micro-batch's contribution on its own (Reduced.MICROBATCH).

    Attributes:
        buckets: the flat buffers.
        of: by piece, the elements that lie in this replica's slices, one dim; pieces of which it owns none are left
            out.
        summed: the slices.
    """

    def __init__(
        self,
        layouts: Mapping[int, BucketLayout],
        pieces: Mapping[str, Piece],
        held: Mapping[str, Parameter],
        tied_ends: bool,
        comms: Communicators,
        dtype: torch.dtype,
        device: torch.device,
        sink: BufferSink,
        *,
        each: bool,
    ) -> None:
        self.buckets = SlicedBuckets(
            layouts,
            held,
            {name: 2 if tied_ends and name == EMBEDDING else 1 for name in held},
            comms.dp,
            dtype,
            device,
            each=each,
        )
        slices = self.buckets.slices
        self.of: Mapping[str, Tensor] = {
            part.name: slices[index][part.in_slice]
            for index, layout in layouts.items()
            for part in parts_of(layout, comms.dp.size, comms.dp.rank)
        }
        self.summed: Collection[Tensor] = slices.values()
        self._shared_by: dict[Communicator, list[Tensor]] = {}
        if comms.tp.size > 1:
            whole = [slices[index] for index, layout in layouts.items() if layout.reduce_over == "dp_tp"]
            self._shared_by[comms.tp] = whole
        if comms.replica is not None:
            of_heads = [own for name, own in self.of.items() if pieces[name].spec.replicas > 1]
            self._shared_by[comms.replica] = of_heads
        attach(sink, held, self.buckets)

    def begin(self) -> None:
        """See StepGradients."""
        self.buckets.zero()

    def after_backward(self, chunk: int, microbatch: int, reduced: Collection[int]) -> None:
        """Nothing: the plan says what is summed."""

    def finish(self) -> None:
        """Add what other ranks of this replica have of the same gradients."""
        for comm, shared in self._shared_by.items():
            if shared:
                flat = torch.cat(shared)
                comm.all_reduce_(flat)
                for own, total in zip(shared, flat.split([own.numel() for own in shared]), strict=True):
                    own.copy_(total)
