"""Optimizers that are a function of one element: a rule, run over blocks of every slice; moments in bfloat16.

    w', s' = rule(w, g, s)                          for elements of any cut of any weight; s: what is kept of each
    w, s = w', s'  unless the step is skipped       the device decides it, and the host does not wait

A rule sees blocks, flat, in the accumulation dtype, and returns new ones. So it knows nothing of layouts, masters,
skipped steps and dtypes, and its numbers are those of one process. In exact mode blocks begin at multiples of BLOCK
elements of a tensor in every layout (layout/slices.py), as vectorised loops need it.

bfloat16 has 8 bits of mantissa: a second moment that decays by 0.999 would never change. So what is kept is rounded up
with the probability of the part that is cut off:

    bits(s) + r >> 16,   r uniform in [0, 2^16)     hence the mean of what is kept is s

r is a word of Philox (tpkernels.random) under (seed, the weight's name, the update), at the element's index in the
global tensor. So moments, and what follows from them, do not depend on the layout, and replicas stay equal. The k-th
thing that is kept takes the k-th half of the four words.

Cost: a pass of torch for each operation of a rule; in bfloat16 some 120 passes in int64 more for the random words, in
blocks that stay in a CPU's cache. Memory while a step runs: a few blocks.
Source: Gupta et al., "Deep learning with limited numerical precision", ICML 2015, section 3.2, for the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from tpkernels.random import counters_at_a_time, global_indices, random_words

from tpengine.config import OptimConfig
from tpengine.layout.parameters import Piece
from tpengine.training.optimizer import Optimizer, Updates

# Elements of a block, where no random words are drawn: a multiple of those that exact mode's cuts keep together.
_CPU_BLOCK, _GPU_BLOCK = 1 << 20, 1 << 24
# Half words that an element has: 8 of 16 bits.
MOST_STATES = 8


@dataclass(frozen=True)
class UpdateNumbers:
    """The numbers of one update of a weight.

    Attributes:
        update: the first is 1.
        lr: learning rate, with the weight's own factor.
        weight_decay: of the weight.
        beta1, beta2, eps: as the settings of optim.
    """

    update: int
    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float


class UpdateRule(Protocol):
    """An optimizer, as a function of elements; a user's own is one too.

    Attributes:
        name: under which runs and checkpoints know it.
        states: names of what it keeps of each weight: tensors of the weight's shape, zeros before the first update.
        operations: passes over its elements that an update makes, for the planner.
    """

    @property
    def name(self) -> str:
        """As above."""

    @property
    def states(self) -> Sequence[str]:
        """As above."""

    @property
    def operations(self) -> int:
        """As above."""

    def update(
        self, weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], numbers: UpdateNumbers
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return a weight and what is kept of it, after an update.

        Args:
            weight, gradient: [elements], any of a weight's, float32, or float64 in a run in float64; gradient clipped.
            states: by name, [elements], in the same dtype.

        Returns: new tensors of the same shape and dtype; what is given must stay as it is.

        Element by element: an element's result must not depend on the others.
        """


@dataclass(frozen=True)
class Place:
    """Where the elements of a slice lie in a global tensor.

    Attributes:
        piece: the rank's shard of the tensor.
        first: the first element of the slice in the shard, row by row.
    """

    piece: Piece
    first: int = 0

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the global index, row by row, of elements [start, stop) of the slice: int64 [stop - start]."""
        place = torch.arange(self.first + start, self.first + stop, device=device)
        offset, size = self.piece.block
        return global_indices(place, self.piece.spec.shape, offset, size)


def round_at_random(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down: the mean over all 2^16 values of `bits` is x.

    Args:
        x: float32 or float64, any shape; float64 is rounded to float32 first.
        bits: int64, of x's shape, each in [0, 2**16).

    Returns: bfloat16 of x's shape. What is not finite stays so.
    """
    narrow = x.float()
    rounded = (narrow.view(torch.int32) + bits.to(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(narrow.isfinite(), rounded, narrow).bfloat16()


class ElementwiseOptimizer(Optimizer):
    """Updates weights by a rule.

    Args:
        rule: the optimizer.
        parameters, gradients, updates, config: as Optimizer; dense, row by row.
        places: where each parameter's elements lie in its global tensor.
        seed: of the run, for moments in bfloat16.
    """

    def __init__(
        self,
        rule: UpdateRule,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        updates: Updates,
        config: OptimConfig,
        places: Mapping[str, Place],
        seed: int,
    ) -> None:
        super().__init__(parameters, gradients, updates, config)
        self._rule, self._places, self._seed = rule, places, seed

    @torch.no_grad()
    def step(self, lr: float, update: int, skip: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Update every parameter with the current gradients, as Optimizer.step."""
        assert factor is None, "gradients are clipped in place"
        config = self._config
        for name, master in self.masters.items():
            lr_factor, weight_decay = self._updates[name]
            numbers = UpdateNumbers(update, lr * lr_factor, weight_decay, config.beta1, config.beta2, config.eps)
            for block in self._blocks(master):
                self._update(name, block, numbers, skip)
        self._round(self.masters)

    def _blocks(self, master: Tensor) -> Iterator[slice]:
        size = _CPU_BLOCK if master.device.type == "cpu" else _GPU_BLOCK
        if self._rounds:
            size = counters_at_a_time(master.device)
        for start in range(0, master.numel(), size):
            yield slice(start, min(start + size, master.numel()))

    @property
    def _rounds(self) -> bool:
        return any(dtype is not None for dtype in self.state_dtypes.values())

    def _update(self, name: str, block: slice, numbers: UpdateNumbers, skip: Tensor | None) -> None:
        # Read: the block's elements, in the accumulation dtype.
        weight, gradient = (of[name].detach().view(-1)[block] for of in (self.masters, self._gradients))
        kept = {kind: tensor.view(-1)[block] for kind, tensor in self._states[name].items()}
        wide = {kind: tensor.to(weight.dtype) for kind, tensor in kept.items()}
        # Compute, and round what is kept in fewer bits.
        new_weight, new = self._rule.update(weight, gradient, wide, numbers)
        if self._rounds:
            new = self._rounded(name, block, new, numbers.update)
        # Write, unless the step is skipped.
        for old, result in ((weight, new_weight), *((kept[kind], new[kind]) for kind in kept)):
            old.copy_(result if skip is None else torch.where(skip.bool(), old, result))

    def _rounded(self, name: str, block: slice, new: Mapping[str, Tensor], update: int) -> dict[str, Tensor]:
        place = self._places[name]
        index = place.indices(block.start, block.stop, self.masters[name].device)
        words = random_words(self._seed, f"{place.piece.spec.name}/moments/{update}", index)
        halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
        return {kind: round_at_random(new[kind], bits) for kind, bits in zip(self.state_dtypes, halves, strict=False)}
