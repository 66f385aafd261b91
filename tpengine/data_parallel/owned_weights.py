"""Parameters whose memory is a part of flat buffers: where each lies, and whether it still does.

Buffers own the memory of the weights in them (layers/linear/weights.py). A parameter that lies elsewhere would be
trained by nobody: what is gathered and updated in the buffers would no longer reach the model.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

from tpengine.layers.linear.weights import lies_at


class OwnedWeights:
    """The parameters of some flat buffers.

    Attributes:
        places: by name, the part of a buffer in which a parameter lies, in the parameter's shape.
    """

    def __init__(self) -> None:
        self.places: dict[str, Tensor] = {}
        self._held: dict[str, Parameter] = {}

    def take(self, name: str, parameter: Parameter, place: Tensor) -> None:
        """Own a parameter: its values go to `place`, and it lies there from now on."""
        place.copy_(parameter.detach())
        # Without a common count of writes: a gather is none that autograd should see.
        parameter.data = place
        self.places[name], self._held[name] = place, parameter

    def moved(self) -> list[str]:
        """Return the names of parameters that somebody else has moved."""
        return [name for name in self.places if not self._is_here(name)]

    def check(self, names: Iterable[str]) -> None:
        """Assert that these parameters lie where what is gathered arrives."""
        for name in names:
            assert self._is_here(name), f"one owner per weight: {name} has left the buffer that it is gathered into"

    def _is_here(self, name: str) -> bool:
        return lies_at(self._held[name], self.places[name])
