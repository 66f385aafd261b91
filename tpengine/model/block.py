"""One block of a transformer: the parts that its architecture describes, put together in the architecture's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tpkernels.ops.attention.choice import same_choices

from tpengine.architectures import describe
from tpengine.layers.dropout import LayerDropouts
from tpengine.layers.rows.cache import Rows
from tpengine.model.parts import Parts

Order = Callable[["Block", Tensor, Rows], Tensor]


class Block(nn.Module):
    """One transformer block, x[T/tp, D] -> y[T/tp, D].

    Its parts are modules under their names in the architecture. What its order (architectures/describe/orders.py) calls
    besides them is `attend`, `feed` and `again`.

    Args:
        parts: what makes its layers.
        described: the parts of this layer, by name.
        order: how they are put together.
        dropouts: where it drops; None drops nowhere.
        attention_again: backward computes norm, attention and its dropout again; only x and the output are kept.
    """

    def __init__(
        self,
        parts: Parts,
        described: Mapping[str, describe.Part],
        order: Order,
        dropouts: LayerDropouts | None = None,
        attention_again: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.order, self.dropouts, self.attention_again = parts.tp, order, dropouts, attention_again
        self._attention, self._feed_forward = "", ""
        for name, part in described.items():
            if isinstance(part, describe.Norm):
                module: nn.Module = parts.norm(part)
            elif isinstance(part, describe.Attention):
                module, self._attention = parts.attention(part, dropouts.attention if dropouts else None), name
            else:
                module, self._feed_forward = parts.feed_forward(part, dropouts.mlp if dropouts else None), name
            self.add_module(name, module)

    def forward(self, x: Tensor, seq: Rows) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]; `seq` says what the rows are: see layers.rows.cache.Rows."""
        return self.order(self, x, seq)

    def attend(self, x: Tensor, seq: Rows) -> Tensor:
        """Return attention of x[T/tp, D], and its dropout."""
        y: Tensor = self.get_submodule(self._attention)(x, seq)
        return y if self.dropouts is None else self.dropouts.attention_residual(y, *self._place(y))

    def feed(self, x: Tensor) -> Tensor:
        """Return the feed-forward network of x[T/tp, D], and its dropout."""
        y: Tensor = self.get_submodule(self._feed_forward)(x)
        return y if self.dropouts is None else self.dropouts.mlp_residual(y, *self._place(y))

    def again(self, forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return forward(*inputs); with `attention_again` backward computes it once more."""
        return computed_again(forward, *inputs) if self.attention_again else forward(*inputs)

    def matmuls(self) -> dict[str, nn.Module]:
        """Return the parts that multiply by weights, by name."""
        return {name: self.get_submodule(name) for name in (self._attention, self._feed_forward) if name}

    def _place(self, y: Tensor) -> tuple[int, int, int]:
        """Return where y lies in the global matrix, for dropout: its first row and column, and its row length."""
        return self.tp.rank * y.shape[0], 0, y.shape[1]


def computed_again(forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return forward(*inputs), of which only the inputs are kept: backward runs it once more, on every tp rank alike.

    Dropout is a function of the micro-batch, not of a generator's state, so there is no state to restore. Attention is
    computed again by whom it was computed the first time.
    """
    y: Tensor = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=same_choices)
    return y
