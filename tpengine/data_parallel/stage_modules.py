"""The modules of a pipeline's rank, which know how many ranks there are: a norm must be taken over all of them."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class StageModules(nn.Sequential):
    """One stage of a pipeline, under the names that its modules have in the model.

    Args:
        modules: by name.
        num_ranks: of the pipeline.
    """

    def __init__(self, modules: OrderedDict[str, nn.Module], num_ranks: int) -> None:
        super().__init__(modules)
        self.num_ranks = num_ranks
