"""One block of a transformer: the parts that its architecture describes, put together in the architecture's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tpkernels.ops.attention.choice import same_choices

from tpengine.architectures import describe
from tpengine.architectures.describe.orders import TAKE_SUMS
from tpengine.layers.dropout import LayerDropouts
from tpengine.layers.rows.cache import Rows
from tpengine.model.parts import Parts
from tpengine.model.residual import Sum, is_watched, normed, normed_sum, whole

Order = Callable[["Block", Any, Rows], Any]


class Block(nn.Module):
    """One transformer block, x[T/tp, D] -> y[T/tp, D].

    Its parts are modules under their names in the architecture. What its order (architectures/describe/orders.py) calls
    besides them is `normed`, `normed_sum`, `attend`, `feed`, `left` and `again`.

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
        return whole(self.order(self, x, seq))

    # What `hand_on` does without calling the module: see is_watched.
    plain_forward = forward

    @property
    def takes_sums(self) -> bool:
        """Whether the order, as it is now, takes a sum that the block before has left, and leaves its own."""
        return any(self.order is known for known in TAKE_SUMS)

    def normed(self, norm: nn.Module, x: Tensor | Sum) -> tuple[Tensor, Tensor]:
        """Return (norm(x), x)[T/tp, D]."""
        return normed(norm, x)

    def normed_sum(self, norm: nn.Module, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + branch), x + branch)[T/tp, D]."""
        return normed_sum(norm, x, branch)

    def left(self, x: Tensor, branch: Tensor) -> Tensor | Sum:
        """Return x + branch, left to the next norm; at once if an order of somebody's own goes on with it."""
        return Sum(x, branch) if self.takes_sums else x + branch

    def attend(self, x: Tensor, seq: Rows) -> Tensor:
        """Return attention of x[T/tp, D], and its dropout."""
        y: Tensor = self.get_submodule(self._attention)(x, seq)
        return y if self.dropouts is None else self.dropouts.attention_residual(y, *self._place(y))

    def feed(self, x: Tensor) -> Tensor:
        """Return the feed-forward network of x[T/tp, D], and its dropout."""
        y: Tensor = self.get_submodule(self._feed_forward)(x)
        return y if self.dropouts is None else self.dropouts.mlp_residual(y, *self._place(y))

    def again(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        """Return forward(*inputs); with `attention_again` backward computes it once more.

        Then a sum among the inputs is made before, so that one tensor is kept of it instead of two.
        """
        if not self.attention_again:
            return forward(*inputs)
        return computed_again(forward, *(whole(of) for of in inputs))

    def matmuls(self) -> dict[str, nn.Module]:
        """Return the parts that multiply by weights, by name."""
        return {name: self.get_submodule(name) for name in (self._attention, self._feed_forward) if name}

    def _place(self, y: Tensor) -> tuple[int, int, int]:
        """Return where y lies in the global matrix, for dropout: its first row and column, and its row length."""
        return self.tp.rank * y.shape[0], 0, y.shape[1]


def hand_on(block: nn.Module, x: Tensor | Sum, seq: Rows) -> Tensor | Sum:
    """Return block(x, seq), the last sum of a Block left to the next norm (residual.py), if its order allows it.

    Any other module, and a block that is_watched, is called: it gets and returns tensors.
    """
    if isinstance(block, Block) and block.takes_sums and not is_watched(block):
        left: Tensor | Sum = block.order(block, x, seq)
        return left
    y: Tensor = block(whole(x), seq)
    return y


def computed_again(forward: Callable[..., Any], *inputs: Any) -> Any:
    """Return forward(*inputs), of which only the inputs are kept: backward runs it once more, on every tp rank alike.

    Dropout is a function of the micro-batch, not of a generator's state, so there is no state to restore. Attention is
    computed again by whom it was computed the first time.
    """
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=same_choices)
