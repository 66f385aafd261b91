"""The weights of any module where replicas own slices of them (ZeRO 1 to 3), and the masters that an optimizer updates.

    master[s] = this replica's slice, in promote_types(dtype, float32);   weights = all_gather(master.to(dtype))

In float32 and wider the masters are the slices themselves. A frozen weight has no master, but is sliced at zero 3.

Replicas that share the memory of a host have the buffers once (exchange/room.py): a weight is a view of memory that all
replicas read, and each replica writes its own slices there. Nothing is copied. Writing and reading take turns:

    finish, or an optimizer's step       a turn to write begins: all replicas have ended the passes before it
    refresh, before the next forward     a turn to read begins: all replicas have written

 1. A master is written in a turn to write: between `finish` and the next forward, or in an optimizer's step. A replica
    gets there only when all have sent their last gradients, so none of them needs the old weights any more.
 2. A forward, a backward, what a checkpoint computes again, and a copy for `whole` read in a turn to read.
 3. A turn to write that a step begins waits for the slowest replica's forward. One that `finish` begins costs nothing,
    since all replicas meet there anyway.
 4. A master written in a turn to read could be seen half old, half new. Its version counter tells, and the next turn
    to write does not begin.
 5. Whoever is to write whole weights is given a copy of its own: `whole`, and after `remove`.

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

from tpengine.config.settings import round_up
from tpengine.data_parallel.sliced_weights import SlicedWeights
from tpengine.layers.collectives import Communicator, Room, Work
from tpengine.layout.parameters import ALIGNMENT_BYTES, BucketLayout
from tpengine.layout.slices import slice_numel


class UnitWeights(SlicedWeights):
    """The weights of all buckets, and the masters of the trained ones.

    Args:
        layouts, held, comm: as SlicedWeights.
        kept: weights are always whole (zero 1 and 2).

    Attributes:
        masters: by name, the optimizer's parameters: the elements of a weight that this replica owns, one dim. It may
            own none of one.
        is_once: the replicas share the buffers.
    """

    def __init__(
        self, layouts: Mapping[int, BucketLayout], held: Mapping[str, Parameter], comm: Communicator, *, kept: bool
    ) -> None:
        self._room, once = _room_for(layouts, held, comm)
        self.is_once = self._room is not None
        super().__init__(layouts, held, comm, layouts.keys() if kept else (), once)
        self._layouts, self._held = layouts, held
        # Of weights that this process has for itself for a while.
        self._copies: dict[int, Tensor] = {}
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
        # Every replica has written the same values.
        self._may_write = True
        self._versions: dict[int, int] = {}
        self.begin_reading()

    def begin_writing(self) -> None:
        """Begin a turn in which masters may change, if it has not begun; collective where buffers exist once.

        Raises:
            RuntimeError: a master has been written in the turn before.
            PeerError: a replica has ended, or does not come.
        """
        if self._room is None or self._may_write:
            return
        touched = [index for index, version in self._versions.items() if self._flat_masters[index]._version != version]
        if touched:
            raise RuntimeError(
                "weights that replicas share change in turns: a master in the bucket of "
                f"'{self._layouts[touched[0]].names[0]}' was written after a forward, while other replicas may have "
                "read it: write masters between finish() and the next forward, or weights inside whole()"
            )
        self._room.meet(to_write=True)
        self._may_write = True

    def begin_reading(self) -> None:
        """Begin a turn in which weights are read, if it has not begun; collective where buffers exist once.

        Raises:
            PeerError: a replica has ended, or does not come.
        """
        if self._room is None or not self._may_write:
            return
        self._room.meet(to_write=False)
        self._may_write = False
        self._versions = {
            index: master._version for index, master in self._flat_masters.items() if master is self.own[index]
        }

    @torch.no_grad()
    def take_out(self) -> None:
        """Give this process whole weights of its own, with the values of now; nothing where it has them anyway."""
        if not self.is_once:
            return
        for index, layout in self._layouts.items():
            copy = self._copies[index] = self.flat[index].clone()
            for name, piece in zip(layout.names, copy[: layout.numel].split(list(layout.numels)), strict=True):
                whole = self._whole[name]
                self._held[name].data = piece.as_strided(whole.shape, whole.stride())

    def put_back(self) -> None:
        """Let the weights be those of all replicas again, after `take_out`."""
        for index in self._copies:
            for name in self._layouts[index].names:
                self._held[name].data = self._whole[name]
        self._copies = {}

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
        whole = self._copies.get(index, self.flat[index])
        return whole[self._comm.rank * size :][:size][self.parts[name].in_slice]

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
        if not self.is_once:
            super().free(index)
        self._leave(index)

    def _leave(self, index: int) -> None:
        for name in self._layouts[index].names:
            self._held[name].data = self._absent[name]


def _room_for(
    layouts: Mapping[int, BucketLayout], held: Mapping[str, Parameter], comm: Communicator
) -> tuple[Room | None, dict[int, Tensor] | None]:
    """Return memory that exists once for all replicas, and the buckets' buffers in it, if they can share any."""
    first = {index: held[layout.names[0]] for index, layout in layouts.items()}
    numels = {index: comm.size * slice_numel(layout, comm.size) for index, layout in layouts.items()}
    offsets, end = {}, 0
    for index, numel in numels.items():
        offsets[index] = end
        end += round_up(numel * first[index].itemsize, ALIGNMENT_BYTES)
    if not layouts or any(p.device.type != "cpu" for p in first.values()):
        return None, None
    room = comm.open_room(end)
    if room is None:
        return None, None
    return room, {index: room.view(offsets[index], numels[index], first[index].dtype) for index in layouts}


def _absent(parameter: Parameter) -> Tensor:
    value = math.nan if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
    return torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
