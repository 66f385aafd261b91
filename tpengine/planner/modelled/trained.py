"""Which products of a block get weight gradients where weights are frozen. No torch.

Which blocks backward comes to is in layout/groups.py. Of the lowest all of the input half is counted.
"""

from __future__ import annotations

from tpengine.architectures.description import Half
from tpengine.architectures.part import Sizes


def trained_products(half: Half, s: Sizes, layer: int, frozen: frozenset[str]) -> tuple[bool, ...]:
    """Return for each product of a half whether one of its weights is trained; empty where nothing is frozen.

    What one product reads as one matrix are the weights that lie behind each other (Part.behind).
    """
    if not frozen:
        return ()
    behind = half.part.behind()
    trained: list[bool] = []
    before = ""
    for name, shape in half.part.shapes(s.model).items():
        if len(shape) == 1:
            continue
        is_trained = f"layers.{layer}.{half.name}.{name}" not in frozen
        if trained and behind.get(name) == before:
            trained[-1] |= is_trained
        else:
            trained.append(is_trained)
        before = name
    num = len(half.part.products(s))
    # A part whose products are not its matrices, one by one, says not which are which.
    return tuple(trained) if len(trained) == num else (any(trained),) * num
