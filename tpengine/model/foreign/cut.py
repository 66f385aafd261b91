"""The part of a tensor that a tensor-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Cut:
    """A dim of a tensor, cut over the ranks.

    Attributes:
        dim: the dim.
        parts: elements of the tensors that lie behind each other in that dim, such as queries, keys and values. Each is
            cut; one that does not divide, such as a vocabulary, has zeros behind its last element.
    """

    dim: int
    parts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the whole tensor in that dim."""
        return sum(self.parts)

    def take(self, whole: Tensor, rank: int, num_ranks: int) -> Tensor:
        """Return a copy of the part of a rank."""
        pieces = []
        for part in whole.split(list(self.parts), self.dim):
            behind = [0, 0] * (whole.dim() - 1 - self.dim) + [0, -part.shape[self.dim] % num_ranks]
            padded = nn.functional.pad(part, behind) if behind[-1] else part
            pieces.append(padded.chunk(num_ranks, self.dim)[rank])
        return torch.cat(pieces, self.dim)

    def join(self, shards: Tensor) -> Tensor:
        """Return the whole tensor of shards[rank, ...], without what was padded."""
        num_ranks = len(shards)
        per_rank = [-(-part // num_ranks) for part in self.parts]
        pieces = []
        for part, piece in zip(self.parts, shards.split(per_rank, self.dim + 1), strict=True):
            behind_each_other = piece.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
            pieces.append(behind_each_other.narrow(self.dim, 0, part))
        return torch.cat(pieces, self.dim)
