"""What the rows of a layer's input are: sequences of one length, packed documents, or what follows on a cache.

Documents: where each begins, and each token's place in its own.

A cache: keys and values of the tokens that have been computed, so that a token that follows costs a token. Layers are
given a cache where they are otherwise given the length of sequences: their tokens then follow on what is in
it. Nothing else about a layer changes. Every tp rank has the rows of all tokens (collectives.WholeRows), so any number
may follow: T is B * num_new.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
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


class KeyValueCache:
    """Keys and values of B sequences, for each attention layer of a model that has been run with it.

    Sequences of different lengths end together: a shorter one begins with padding, which no token sees and which has no
    position. So the tokens that follow are at one place in all of them.

    Args:
        seq: N, the tokens of a sequence that there is room for.
        lengths: how many tokens of the prompt each sequence has; the longest has no padding.
        device: where places are.

    Attributes:
        seq: as given.
        num_held: places of each sequence that earlier passes have filled.
        num_new: places of each sequence that this pass fills.

    Memory: 2 * B * N * G/tp * E elements per layer (`cache_bytes`), as soon as a layer has run.
    """

    def __init__(self, seq: int, lengths: Sequence[int], device: torch.device | str | None = None) -> None:
        self.seq, self.num_held, self.num_new = seq, 0, 0
        self._padding = [max(lengths) - length for length in lengths]
        self._device = device
        self._of_layer: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._of_pass: dict[Hashable, Any] = {}

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self._padding)

    @property
    def is_padded(self) -> bool:
        """Whether a sequence begins with padding."""
        return any(self._padding)

    @property
    def places(self) -> Tensor:
        """The position of each row's token in its sequence, int64 [T]; 0 for padding."""

        def make() -> Tensor:
            places = torch.arange(self.num_held, self.num_held + self.num_new, device=self._device)
            each = places - torch.tensor(self._padding, device=self._device)[:, None]
            return each.clamp_min(0).flatten()

        places: Tensor = self.once("places", make)
        return places

    def follow(self, num_new: int) -> None:
        """Begin a pass over the next tokens of each sequence, batch first.

        Raises:
            ValueError: there is no room for them.
        """
        end = self.num_held + self.num_new + num_new
        if end > self.seq:
            raise ValueError(f"a cache has room for {self.seq} tokens: {end} are too many: make a larger one")
        self.num_held, self.num_new = end - num_new, num_new
        self._of_pass = {}

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` returns: made by the first layer that asks in this pass, and kept for the others."""
        if key not in self._of_pass:
            self._of_pass[key] = make()
        return self._of_pass[key]

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Write this pass's keys and values of a layer; return all that its queries may see.

        Args:
            layer: an attention layer, or that of one shard.
            k, v: [B, G, num_new, E].

        Returns:
            For parts of the batch, in order, k and v [b, G, S', E], views: the last of their keys is the last query's.
            One part, unless sequences begin with padding.
        """
        batch, heads, _, size = k.shape
        if layer not in self._of_layer:
            room = batch, heads, self.seq, size
            # Whatever the mode of the first pass, a later one may write here.
            with torch.inference_mode(False):
                self._of_layer[layer] = k.new_empty(room), k.new_empty(room)
        keys, values = (of[:, :, : self.num_held + self.num_new] for of in self._of_layer[layer])
        keys[:, :, self.num_held :] = k
        values[:, :, self.num_held :] = v
        if not self.is_padded:
            return [(keys, values)]
        return [(keys[i : i + 1, :, first:], values[i : i + 1, :, first:]) for i, first in enumerate(self._padding)]


Rows = int | Documents | KeyValueCache
"""What the rows of a layer's input are: sequences of so many tokens, documents, or what follows on a cache."""


def cache_bytes(num_layers: int, num_sequences: int, seq: int, num_kv_heads: int, head_size: int, item: int) -> int:
    """Return the bytes of a rank's cache: of its layers, and its heads."""
    return 2 * num_layers * num_sequences * seq * num_kv_heads * head_size * item


def length_of(rows: Rows) -> int:
    """Return the most tokens that a sequence can have."""
    return rows if isinstance(rows, int) else rows.seq
