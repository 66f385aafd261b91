"""Who owns the memory of a column-parallel weight: one owner each, and the owner is declared.

    the layer        by default. Layers that are packed lay their weights out behind each other when they are made, and
                     when the layers give them other memory: `module.to`, `load_state_dict(assign=True)`, a copy
    another layer    whose parameters a layer borrows
    flat buffers     of weights that come and go (ZeRO): `packed.declare_places` tells the layers where each lies

Only the owner moves a weight. That weights lie behind each other, and fill their memory, does not say whose memory it
is: a bucket can hold exactly these. So the place of a weight decides how it is read, and never who may move it. A
weight that lies where no owner has declared it (`p.data = ...`) was put there by somebody, and stays there.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Packing(Protocol):
    """What keeps the weights of several layers together: packed.PackedWeights."""

    def lay_out(self) -> None:
        """Lay the layers' weights out: a layer has given its weight other memory."""


def lies_at(weight: Tensor, place: Tensor) -> bool:
    """Whether a weight is where its owner has declared it: that memory, whether it is there just now or not."""
    if weight.dtype != place.dtype or weight.device != place.device:
        return False
    return place.is_meta or weight.is_set_to(place)
