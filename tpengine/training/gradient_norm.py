"""The norm of the global gradient: each rank's share of its squares, at places of their own, so that sums over ranks
add zeros to them, which is exact in whatever order.

    fast     a place for each piece: |g|^2 of what this rank owns of it
    exact    a place for each block of BLOCK elements of a piece; blocks add in a balanced tree

In exact mode every addition is one of two numbers of a tree that follows from the piece alone. So the norm has the same
bits whoever owns which blocks: slices of exact mode are cut at their borders (layout/slices.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.clip import square_sums

from tpengine.layout.parameters import EMBEDDING, Piece, all_pieces, stage_specs
from tpengine.layout.slices import BLOCK, SlicePart
from tpengine.model.transformer import Transformer


class GradientNorm:
    """The norm of one rank's and all other ranks' gradients.

    Args:
        model: this rank's.
        gradients: by piece, what the optimizer reads, of what this rank answers for among replicas: whole, or this
            replica's elements of it.
        parts: which elements those are, of those that are not whole; None where all are.
        exact: the bits do not depend on the layout.
        device: of the figures.

    Attributes:
        num_figures: numbers that `own` gives.
        num_places: pieces of the whole model.
        owned: what this rank answers for, each with the first of its figures.
    """

    def __init__(
        self,
        model: Transformer,
        gradients: Mapping[str, Tensor],
        parts: Mapping[str, SlicePart] | None,
        *,
        exact: bool,
        device: torch.device,
    ) -> None:
        self._device, self._exact = device, exact
        self._largest = torch.finfo(accumulation_dtype(next(iter(model.held.values())).dtype)).max
        table_size, held = model.parts.table_size, model.parts.held
        # Exact mode's blocks are those of whole shards, whoever has which experts of them.
        ep = 1 if exact else model.ep
        specs = stage_specs(model.model, table_size, 0, model.model.num_layers, ep)
        everyone = [all_pieces(spec, table_size) for spec in specs]
        most = max(table_size, ep)
        first_place = {spec.name: i * most for i, spec in enumerate(specs)}
        self.num_places = len(specs) * most

        def place_of(piece: Piece) -> int:
            return first_place[piece.spec.name] + piece.holder

        num_blocks = {place_of(piece): _num_blocks(piece) for pieces in everyone for piece in pieces}
        firsts = dict(zip(num_blocks, accumulate(num_blocks.values(), initial=0), strict=False))
        self.num_figures = sum(num_blocks.values()) if exact else self.num_places
        # What this rank answers for: each shard of the model once over all ranks.
        self.owned: list[tuple[int, Tensor]] = []
        for name, gradient in gradients.items():
            piece = model.pieces[name]
            is_first = bool(piece.spec.ep or piece.spec.apart) or piece.holder in held
            if not is_first or (piece.spec.name == EMBEDDING and not model.is_first):
                continue
            place = place_of(piece)
            first_block = parts[name].in_tensor.start // BLOCK if parts and name in parts else 0
            # Those of its experts begin where the ones before end: config/rules.py sees to whole blocks.
            first_block += piece.part * _num_blocks(piece)
            self.owned.append((firsts[place] + first_block if exact else place, gradient))
        self._trees = _trees(num_blocks, firsts, device) if exact else ()

    def own(self) -> Tensor:
        """Return the squares that this rank answers for, float64 [num_figures + 1]; the others are zero.

        The last place is no square's: who sums the figures over ranks may have another number summed with them.
        """
        if self.owned and not self._exact:
            # All at once: a launch for each would make a GPU wait for the host.
            places, gradients = zip(*self.owned, strict=True)
            return square_sums(gradients, places, self.num_figures + 1)
        figures = torch.zeros(self.num_figures + 1, dtype=torch.float64, device=self._device)
        for first, gradient in self.owned:
            blocks = squares_of_blocks(gradient)
            figures[first : first + len(blocks)] = blocks
        return figures

    def squares(self, figures: Tensor) -> Tensor:
        """Return the square of each piece's norm, float64 [num_places], from the sum of all ranks' figures."""
        if not self._exact:
            return figures
        squares = torch.zeros(self.num_places, dtype=torch.float64, device=self._device)
        for places, blocks in self._trees:
            squares[places] = _tree_of_columns(figures[blocks])
        # Summed in float64, but a moment that is kept in the gradients' dtype must hold the largest of them.
        return squares.masked_fill(squares > self._largest, torch.inf)


def squares_of_blocks(x: Tensor) -> Tensor:
    """Return the sum of squares of every BLOCK elements, each in a balanced tree, float64 [ceil(n / BLOCK)]."""
    flat = x.reshape(-1)
    num_blocks = -(-flat.numel() // BLOCK)
    if flat.numel() < num_blocks * BLOCK:
        flat = torch.cat((flat, flat.new_zeros(num_blocks * BLOCK - flat.numel())))
    # An own copy, as widening makes one unless x is as wide.
    blocks = flat.double() if flat.dtype != torch.float64 else flat.clone()
    return _tree_of_columns(blocks.square_().view(num_blocks, BLOCK))


def _num_blocks(piece: Piece) -> int:
    return -(-math.prod(piece.block[1]) // BLOCK)


def _trees(
    num_blocks: Mapping[int, int], firsts: Mapping[int, int], device: torch.device
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return (places [k], figures [k, blocks]) of the pieces that have equally many blocks, for each such number."""
    alike: dict[int, list[int]] = defaultdict(list)
    for place, number in num_blocks.items():
        alike[number].append(place)
    return tuple(
        (
            torch.tensor(places, device=device),
            torch.tensor([list(range(firsts[place], firsts[place] + number)) for place in places], device=device),
        )
        for number, places in alike.items()
    )


def _tree_of_columns(x: Tensor) -> Tensor:
    """Add each row x[k, :] in a balanced tree: the second half to the first; what has no partner is added to zero."""
    while (width := x.shape[1]) > 1:
        if width % 2:
            x = torch.cat((x, x.new_zeros(len(x), 1)), dim=1)
            width += 1
        x = x[:, : width // 2] + x[:, width // 2 :]
    return x[:, 0]
