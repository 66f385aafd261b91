"""The part of a tensor that a tensor-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Cut:
    """A dim of a tensor, cut over the ranks.

    Attributes:
        dim: the dim.
        size: its elements in the whole tensor.
        num_parts: tensors that lie behind each other in that dim, such as queries, keys and values. Each is cut.
    """

    dim: int
    size: int
    num_parts: int = 1

    def take(self, whole: Tensor, rank: int, num_ranks: int) -> Tensor:
        """Return a copy of the part of a rank; where the dim does not divide, the last ranks have zeros behind."""
        missing = -self.size % (self.num_parts * num_ranks)
        # Only a vocabulary is padded, and it is one part: the zeros lie behind its last row.
        behind = [0, 0] * (whole.dim() - 1 - self.dim) + [0, missing]
        padded = nn.functional.pad(whole, behind) if missing else whole
        parts = padded.unflatten(self.dim, (self.num_parts, num_ranks, -1))
        return parts.select(self.dim + 1, rank).flatten(self.dim, self.dim + 1).clone()

    def join(self, shards: Tensor) -> Tensor:
        """Return the whole tensor of shards[rank, ...], without what was padded."""
        parts = shards.unflatten(self.dim + 1, (self.num_parts, -1)).movedim(0, self.dim + 1)
        return parts.flatten(self.dim, self.dim + 2).narrow(self.dim, 0, self.size).contiguous()
