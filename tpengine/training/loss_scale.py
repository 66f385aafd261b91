"""The loss scale of 16-bit training: what the loss is multiplied by, so that small gradients do not become zero.

float16 has 5 bits of exponent: gradients below 6e-8 are zero. So backward starts from scale * loss, and the gradients,
which are added up in float32, are divided by the scale before they are clipped. A gradient that overflows makes the
step's norm infinite or NaN on all ranks alike: the step is skipped, and the scale halves. After GROWTH_STEPS updates in
a row it doubles. All scales are powers of two, so that they change no bit of what neither overflows nor vanishes.

bfloat16 has float32's exponent and needs none: there the scale is 1 and stays 1.
Source: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
# Below 1 a scale would take away what it is there to keep.
FLOOR, CEILING = 1.0, 2.0**32


class LossScale:
    """The scale of one run, equal on all ranks: it follows from which steps were skipped.

    Args:
        dtype: of weights and activations, by name.

    Attributes:
        value: what the next step's loss is multiplied by.
    """

    def __init__(self, dtype: str) -> None:
        self._moves = dtype == "float16"
        self.value = FIRST_SCALE if self._moves else 1.0
        self._num_updates = 0

    @property
    def can_fall(self) -> bool:
        """Whether a gradient that overflows may fit after the scale has halved."""
        return self._moves and self.value > FLOOR

    @property
    def is_at_floor(self) -> bool:
        """Whether the scale has halved as often as it may."""
        return self._moves and self.value <= FLOOR

    def after_update(self) -> None:
        """Count a step that was applied."""
        if not self._moves:
            return
        self._num_updates += 1
        if self._num_updates == GROWTH_STEPS:
            self._num_updates = 0
            self.value = min(2 * self.value, CEILING)

    def after_overflow(self) -> None:
        """Halve the scale: a step's gradient was not finite."""
        self._num_updates = 0
        if self.can_fall:
            self.value /= 2

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"value": self.value, "updates": self._num_updates}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on with what a checkpoint holds; one of a run without a scale holds None, and changes nothing."""
        if state is not None and self._moves:
            self.value, self._num_updates = float(state["value"]), int(state["updates"])
