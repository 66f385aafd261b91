"""Documents packed into the tokens of a micro-batch: where each begins, and each token's place in its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tpkernels.ops.rope import document_positions


class Documents(NamedTuple):
    """The documents that lie one behind the other in the tokens of a micro-batch.

    A token attends to its own document alone, and positions begin anew with each: what a layer computes for a document
    is what it computes for the document by itself. Where a sequence ends, a document ends.

    Attributes:
        starts: int32 [documents + 1]: the first token of each, then T.
        places: int32 [T]: each token's position in its document.
        seq: S, the length of a sequence; no document is longer.
    """

    starts: Tensor
    places: Tensor
    seq: int

    @classmethod
    def of(cls, starts: Sequence[int], seq: int, device: torch.device | str | None = None) -> Documents:
        """Return documents from their first tokens, 0 first and T last.

        Raises:
            ValueError: starts do not ascend from 0, or a document is longer than a sequence.
        """
        on_host = torch.tensor(starts, dtype=torch.int32, device="cpu")
        lengths = on_host.diff()
        if len(on_host) < 2 or on_host[0] != 0 or (lengths < 1).any() or (lengths > seq).any():
            raise ValueError(
                f"documents begin at 0, ascend, and hold at most a sequence: got {list(starts)}, seq {seq}: "
                "cut longer ones, and leave empty ones out"
            )
        places = document_positions(on_host, int(on_host[-1]))
        return cls(on_host.to(device), places.to(device), seq)
