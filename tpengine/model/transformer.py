"""The transformer: the chunks of layers that one pipeline rank holds.

What a block is comes from the architecture (tpengine/architectures), what it is built of from its parts (parts.py):
fast layers, or exact mode's. `initialise` fills the
weights from the table in parameters.py, each element a function of (seed, parameter name, global index), so that every
layout starts from the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.random import normal_block

from tpengine.architectures.registry import architecture_of
from tpengine.layers.dropout import LayerDropouts, Position
from tpengine.layers.placement import placements_of
from tpengine.layers.rows import Rows
from tpengine.layers.scaled import scaled
from tpengine.layers.whereabouts import Placed, Whereabouts
from tpengine.layout.parameters import Piece, pieces_of, stage_specs
from tpengine.model.block import Block, Sum, computed_again, hand_on, normed, whole
from tpengine.model.parts import Parts
from tpengine.plan import Recompute


class Transformer(nn.Module):
    """A transformer: the whole model, or the chunks of it that one pipeline rank holds.

        of layers [first, last):
        first == 0:            tokens[T] -> embedding, positions -> x[T/tp, D]
        blocks:                x[T/tp, D] -> x[T/tp, D]
        last == num_layers:    x[T/tp, D] -> norm -> logits[T, V/tp]; in exact mode [n, T, V/(n tp)]

    Args:
        parts: what makes its layers; holds the sizes and the tp ranks.
        chunks: half-open ranges of layers, in model order; default one of all.
        seed: of dropout.
        recompute: what backward computes again inside a chunk: BLOCK whole blocks, ATTENTION norm and attention.

    Attributes:
        pieces: what this rank holds of each parameter of the table, by the piece's name.
        held: the parameters themselves, by the piece's name.
        position: the micro-batch that comes next, for dropout, and the documents packed into it.
        ep: how many ranks share experts.
        keeps_hidden: whether the last chunk keeps what its head is given, for `take_hidden`; False costs nothing.

    The weights are uninitialised: call `initialise`.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        chunks: Sequence[tuple[int, int]] | None = None,
        seed: int = 0,
        recompute: Recompute = Recompute.NONE,
    ) -> None:
        super().__init__()
        self.parts, self.model, self.recompute = parts, parts.model, recompute
        model = self.model
        self.chunks = tuple(chunks or [(0, model.num_layers)])
        self.position = Position()
        self.keeps_hidden = False
        self._hidden: Tensor | None = None
        self.is_first, self.is_last = self.chunks[0][0] == 0, self.chunks[-1][1] == model.num_layers
        vocab = model.padded_vocab_size(parts.table_size)
        architecture = architecture_of(model)
        self.ends = architecture.ends(model)
        if self.is_first or (self.is_last and model.tie_embeddings):
            self.embed_tokens = parts.embedding(vocab)
        if self.is_first and self.ends.has_positions:
            self.embed_positions = parts.positions()
        drops = model.residual_dropout or model.attention_dropout or model.mlp_dropout
        again = recompute is Recompute.ATTENTION
        self.layers = nn.ModuleDict(
            {
                str(i): Block(
                    parts,
                    architecture.block(model, i),
                    architecture.order,
                    LayerDropouts.of(model, seed, i, self.position) if drops else None,
                    again,
                )
                for first, last in self.chunks
                for i in range(first, last)
            }
        )
        if self.is_last:
            self.norm = parts.layer(self.ends.norm)
            self.lm_head = parts.head(vocab, self.embed_tokens if model.tie_embeddings else None)
        experts = parts.experts_comm
        self.ep, ep_rank = (1, 0) if experts is None else (experts.size, experts.rank)
        specs = [
            spec
            for chunk in self.chunks
            for spec in stage_specs(model, parts.table_size, *chunk, self.ep, in_chunks=parts.is_exact)
        ]
        # A tied embedding of a rank that holds both ends comes up at both, and is one parameter.
        self.pieces: dict[str, Piece] = {
            piece.name: piece for spec in specs for piece in pieces_of(spec, parts.table_size, parts.held, ep_rank)
        }
        self.held = self._held_pieces()
        for number, block in self.layers.items():
            for part in block.modules():
                if isinstance(part, Placed):
                    part.whereabouts = Whereabouts(int(number), self.position, model.details.num_experts, experts)

    def forward(self, x: Tensor, seq: Rows, chunk: int = 0) -> Tensor:
        """Tokens [T] or x[T/tp, D] -> x[T/tp, D] or logits; T consists of sequences of `seq` tokens.

        Args:
            seq: or the cache that the tokens follow on.
            chunk: number in `chunks`.
        """
        first, last = self.chunks[chunk]
        rows = seq if self.position.documents is None else self.position.documents
        left: Tensor | Sum = self._embedded(x, rows) if first == 0 else x
        for i in range(first, last):
            block = self.layers[str(i)]
            # What is computed again keeps one tensor, its input: there a sum is made between blocks.
            again = self.recompute is Recompute.BLOCK
            left = computed_again(block, left, rows) if again else hand_on(block, left, rows)
        if last < self.model.num_layers:
            return whole(left)
        hidden = self._last_norm(left)
        if self.keeps_hidden:
            self._hidden = hidden
        # Before the product: no second tensor as large as the logits, and the same bits for powers of two.
        y: Tensor = self.lm_head(scaled(hidden, self.ends.logits_scale))
        return y

    def take_hidden(self) -> Tensor | None:
        """Return x[T/tp, D] in front of the head in the last pass, and keep it no longer; None if nobody asked."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def _last_norm(self, x: Tensor | Sum) -> Tensor:
        # A tensor has no other use after this norm, whose pass has no gradient to add.
        y: Tensor = normed(self.norm, x)[0] if isinstance(x, Sum) else self.norm(x)
        return y

    def _embedded(self, tokens: Tensor, rows: Rows) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        scale = self.ends.embedding_scale
        if self.ends.rounds_scale and scale != 1.0:
            # To float32 in every dtype, as transformers has it.
            scale = torch.tensor(scale, dtype=torch.float32, device="cpu").to(x.dtype).item()
        x = scaled(x, scale)
        if self.ends.has_positions:
            x = self.embed_positions(x, rows)
        return x

    @torch.no_grad()
    def initialise(
        self, seed: int, store: Callable[[str, Tensor], None] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Draw the initial values: normal_block(seed, name, ...) for matrices, zeros for padding rows and biases.

        Norms begin with the weight that scales by one.

        Args:
            store: called with each piece's name and values; default writes them into the weights.
            dtype: of the values; default the weights'.
        """
        for name, parameter in self.held.items():
            spec = self.pieces[name].spec
            offset, size = self.pieces[name].block
            if spec.init_std is None:
                values = torch.full(size, spec.init, dtype=dtype or parameter.dtype, device=parameter.device)
            else:
                values = normal_block(
                    seed,
                    spec.name,
                    spec.shape,
                    offset,
                    size,
                    std=spec.init_std,
                    dtype=dtype or parameter.dtype,
                    device=parameter.device,
                )
            if spec.valid_rows is not None:
                values[max(spec.valid_rows - offset[0], 0) :] = 0
            if store is None:
                parameter.copy_(values)
            else:
                store(name, values)

    def prepare(self, num_tokens: int) -> None:
        """Bring the weights into the layout their products read fastest; used until a weight changes.

        Args:
            num_tokens: of a micro-batch, all tp ranks'. Where each has all rows (WholeRows), 1 if most passes have one.

        Memory: on CPUs where it helps (tpkernels.ops.matmul.host), up to two more copies of the matrices: the second
            when a backward first asks for it.
        """
        for layer in self._matmuls():
            layer.prepare(num_tokens)

    def release(self) -> None:
        """Give the prepared copies' memory back."""
        for layer in self._matmuls():
            layer.release()

    def _matmuls(self) -> Iterator[Any]:
        for block in self.layers.values():
            assert isinstance(block, Block)
            yield from block.matmuls().values()
        if self.is_last:
            yield self.lm_head

    def _held_pieces(self) -> dict[str, Parameter]:
        """The parameters by piece; layers and table must agree on each one's name, shape and how it lies over tp."""
        modules, placed = dict(self.named_parameters()), placements_of(self)
        names = {name: self.parts.module_name(p) for name, p in self.pieces.items()}
        held = {module: (tuple(p.shape), placed[p].dim, placed[p].num_sharing) for module, p in modules.items()}
        table = {names[name]: (p.block[1], p.spec.shard_dim, p.spec.replicas) for name, p in self.pieces.items()}
        differing = sorted(map(str, held.items() ^ table.items()))
        assert held == table, f"modules and parameter table differ: {', '.join(differing)}"
        return {name: modules[module] for name, module in names.items()}
