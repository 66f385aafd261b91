"""What one forward of a model runs, and what its backward has to expect (ZeRO 2 and 3).

A model runs all its units, and one backward may go through several of its forwards. The stage of a pipeline runs a
chunk of its modules, and each of its forwards has a backward of its own, however many are under way. So a pass gathers
and sums what the chunk holds, and a unit is done when this backward is done with it.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tpengine.data_parallel.any_module.units import Unit


class StageModules(nn.Sequential):
    """The modules of a pipeline's rank, called a chunk at a time.

        y = stage(x, chunk)     through the modules of a chunk
        y = stage(x)            through all, as nn.Sequential

    Args:
        modules: by name.
        chunks: number -> its modules, in the order of their use.
        num_ranks: of the pipeline.
    """

    def __init__(
        self,
        modules: OrderedDict[str, nn.Module],
        chunks: Mapping[int, Sequence[nn.Module]] | None = None,
        num_ranks: int = 1,
    ) -> None:
        super().__init__(modules)
        self.num_ranks = num_ranks
        self.chunks = {chunk: list(held) for chunk, held in (chunks or {}).items()}

    def forward(self, input: Any, chunk: int | None = None) -> Any:
        """Return what the modules of a chunk make of x, or those of the whole stage."""
        for module in self if chunk is None else self.chunks[chunk]:
            input = module(input)
        return input


@dataclass
class Forward:
    """A forward, or several whose backward may be one.

    Attributes:
        part: of the model, by number: see parts_of.
        expected: how often each unit will be heard of in backward.
    """

    part: int
    expected: list[int]


def parts_of(model: nn.Module, units: Sequence[Unit]) -> list[tuple[int, ...]]:
    """Return the units that each part of a model holds, without the model itself: those of chunks, then all."""
    parts = []
    for modules in model.chunks.values() if isinstance(model, StageModules) else ():
        held = {part for module in modules for part in module.modules()}
        parts.append(tuple(i for i, unit in enumerate(units[:-1]) if unit.module in held))
    return [*parts, tuple(range(len(units) - 1))]


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors that a module returns, also in dataclasses.

    Raises:
        ValueError: there is something else that may hold tensors.
    """
    tensors = []
    for leaf in tree_flatten(output)[0]:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf):
            tensors += tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif not isinstance(leaf, str | bytes | int | float | complex | bool | torch.Size | torch.dtype | None):
            kind = type(leaf).__name__
            # Models of transformers return one by default, in training too.
            cache = "call the model with use_cache=False" if kind.endswith("Cache") else ""
            raise ValueError(
                f"backward begins at tensors that a module returns: got a {kind}: "
                f"{cache or 'return tensors, or tuples, lists, dicts or dataclasses of them'}"
            )
    return tensors
