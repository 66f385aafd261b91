"""The weights of any module where replicas own slices of them (ZeRO 1 to 3), and the masters that an optimizer updates.

    master[s] = this replica's slice, in promote_types(dtype, float32);   weights = all_gather(master.to(dtype))

In float32 and wider the masters are the slices themselves. A frozen weight has no master, but is sliced at zero 3.

The decision a reader will question: a weight that is not whole keeps its shape, and every element of it is NaN: one
element, expanded. Whoever reads it outside of its module's forward sees NaN, where memory taken away under a tensor
would end the process. What autograd saved are the weights themselves or views of the flat buffer, and both are whole
again when the buffer is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from tpengine.data_parallel.sliced_weights import SlicedWeights
from tpengine.layers.collectives import Communicator, Work
from tpengine.layout.parameters import BucketLayout


class UnitWeights(SlicedWeights):
    """The weights of all buckets, and the masters of the trained ones.

    Args:
        layouts, held, comm: as SlicedWeights.
        kept: weights are always whole (zero 1 and 2).

    Attributes:
        masters: by name, the optimizer's parameters: the elements of a weight that this replica owns, one dim. It may
            own none of one.
    """

    def __init__(
        self, layouts: Mapping[int, BucketLayout], held: Mapping[str, Parameter], comm: Communicator, *, kept: bool
    ) -> None:
        super().__init__(layouts, held, comm, layouts.keys() if kept else ())
        self._layouts, self._held = layouts, held
        self._index = {name: index for index, layout in layouts.items() for name in layout.names}
        self._whole = {name: held[name].data for layout in layouts.values() for name in layout.names}
        self._absent: dict[str, Tensor] = {}
        self._flat_masters: dict[int, Tensor] = {}
        self.masters: dict[str, Parameter] = {}
        for index, layout in layouts.items():
            own = self.own[index]
            if held[layout.names[0]].requires_grad:
                wide = own.to(torch.promote_types(own.dtype, torch.float32))
                self._flat_masters[index] = wide
                for name in layout.names:
                    elements = self.parts[name].in_slice if name in self.parts else slice(0, 0)
                    self.masters[name] = Parameter(wide[elements])
            if not kept:
                self._absent |= {name: _absent(held[name]) for name in layout.names}
                self._leave(index)

    @torch.no_grad()
    def take_masters(self) -> None:
        """Write the masters into the slices that are gathered."""
        for index, master in self._flat_masters.items():
            if master is not self.own[index]:
                self.own[index].copy_(master)

    def differs(self, name: str) -> bool:
        """Return whether this replica's part of a whole weight is no longer that of its slice."""
        return name in self.parts and not torch.equal(self.of[name], self._part_of_whole(name))

    @torch.no_grad()
    def read_back(self, names: Collection[str]) -> None:
        """Take slices and masters from the whole weights."""
        for name in names:
            if name in self.parts:
                self.of[name].copy_(self._part_of_whole(name))
                if name in self.masters:
                    self.masters[name].copy_(self.of[name])

    def _part_of_whole(self, name: str) -> Tensor:
        index = self._index[name]
        size = len(self.own[index])
        return self.flat[index][self._comm.rank * size :][:size][self.parts[name].in_slice]

    @torch.no_grad()
    def wait(self, index: int) -> Work:
        """See SlicedWeights; the weights have their values from here on."""
        work = super().wait(index)
        if self._absent:
            for name in self._layouts[index].names:
                self._held[name].data = self._whole[name]
        return work

    def free(self, index: int) -> None:
        """See SlicedWeights; the weights are NaN from here on."""
        super().free(index)
        self._leave(index)

    def _leave(self, index: int) -> None:
        for name in self._layouts[index].names:
            self._held[name].data = self._absent[name]


def _absent(parameter: Parameter) -> Tensor:
    value = math.nan if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
    return torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
