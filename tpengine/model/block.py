"""One block of a transformer: the parts that its architecture describes, put together in the architecture's order.

The last sum of a block is left to the norm that comes next, which adds and normalises in one pass:

    x, branch[T/tp, D] -> (norm(x + branch), x + branch)         instead of a kernel that adds, and one that normalises
    dx = dbranch = dtotal + the norm's gradient                  in the norm's kernel, not by autograd's addition

A sum is made where nobody takes it over: at the end of a chunk, whose neighbour gets one tensor; before what backward
computes again, which keeps one tensor; for an order or a module of somebody's own; and where a block or a norm
is_watched. Its value is the same in all places: x + branch, rounded to their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint
from tpkernels.again import same_choices
from tpkernels.launch import accumulation_dtype, by_triton

from tpengine.architectures import describe
from tpengine.architectures.description import Order, pre_norm, reordered_norm, sandwich_norm
from tpengine.layers.dropout import LayerDropouts
from tpengine.layers.rows import Rows
from tpengine.layers.scaled import scaled
from tpengine.model.parts import Parts

# Noted before anybody can put another in its place.
_CALL = nn.Module.__call__
Returned = TypeVar("Returned")


class Sum:
    """x + branch, not made yet.

    It is taken once. Then it holds nothing, so that no caller's variable keeps the two tensors alive for as long as the
    next block runs.
    """

    def __init__(self, x: Tensor, branch: Tensor) -> None:
        self._parts: tuple[Tensor, Tensor] | None = (x, branch)

    def taken(self) -> tuple[Tensor, Tensor]:
        """Return x and branch, and forget them."""
        assert self._parts is not None, "a sum is made once"
        (x, branch), self._parts = self._parts, None
        return x, branch


def whole(x: Tensor | Sum) -> Tensor:
    """Return a tensor as it is, a sum made."""
    if isinstance(x, Sum):
        x, branch = x.taken()
        return x + branch
    return x


def normed(norm: Any, x: Tensor | Sum) -> tuple[Tensor, Tensor]:
    """Return (norm(x), x) of x[T/tp, D] or of a sum; the gradient of the x returned is added in the norm's own pass.

    On a CPU gradients of 16 bits are added by autograd, each rounded before: there the pass saves nothing, and a run
    keeps the bits that it always had.

    Args:
        norm: a Norm, or exact mode's, which adds before. Any other module, and a norm that is_watched, is called.
    """
    if is_watched(norm):
        x = whole(x)
        return norm(x), x
    if isinstance(x, Sum):
        x, branch = x.taken()
        if _adds_inside(x):
            y, total = norm.add(branch, x)
            return y, total
        x = x + branch
    if _adds_inside(x) and x.requires_grad:
        y, kept = norm.beside(x)
        return y, kept
    return norm(x), x


def normed_sum(norm: Any, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """Return (norm(x + branch), x + branch) of x, branch[T/tp, D], in the norm's pass.

    Args:
        norm: as of `normed`.
    """
    if is_watched(norm):
        total = x + branch
        return norm(total), total
    y, total = norm.add(branch, x)
    return y, total


def is_watched(module: nn.Module) -> bool:
    """Return whether a call of the module does more than what may be done in its place: then it must be called.

    That is so with hooks, its own or all modules'; where it is compiled (`module.compile()`); and where `forward` or
    `__call__`, of the module or of its class, is not the one that its class names `plain_forward`: a subclass's, one
    that somebody has put in its place, or any of a class that names none.
    """
    return bool(
        (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
        or (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
        or (torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
        or module._compiled_call_impl is not None
        or "forward" in vars(module)
        or type(module).forward is not getattr(type(module), "plain_forward", None)
        or type(module).__call__ is not _CALL
    )


def _adds_inside(x: Tensor) -> bool:
    return by_triton(x) or accumulation_dtype(x.dtype) == x.dtype


class Block(nn.Module):
    """One transformer block, x[T/tp, D] -> y[T/tp, D].

    Its parts are modules under their names in the architecture. The orders that architectures of ours have are
    methods; one of somebody's own calls the parts, and what description.py lists besides.

    Args:
        parts: what makes its layers.
        described: the parts of this layer, by name.
        order: how they are put together.
        dropouts: where it drops; None drops nowhere.
        attention_again: backward computes norm, attention and its dropout again; only x and the output are kept.
    """

    # The norms of the orders below, as architectures name them.
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

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
        inside = {"attend": dropouts.attention, "feed": dropouts.mlp} if dropouts else {}
        # The parts that multiply by weights, and by what an order calls them as.
        self._products = [name for name, part in described.items() if part.role != "norm"]
        self._named = {described[name].role: name for name in self._products}
        self._scales = {described[name].role: described[name].residual_scale for name in self._products}
        for name, part in described.items():
            self.add_module(name, parts.layer(part, inside.get(part.role)))

    def forward(self, x: Tensor, seq: Rows) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]; `seq` says what the rows are: see layers.rows.cache.Rows."""
        return whole(self.in_order(x, seq))

    # What `hand_on` does without calling the module: see is_watched.
    plain_forward = forward

    def in_order(self, x: Tensor | Sum, seq: Rows, order: Order | None = None) -> Tensor | Sum:
        """Put the parts together, x[T/tp, D] -> y[T/tp, D].

        Args:
            x: a tensor, or a sum that the block before has left.
            seq: as of forward.
            order: default the block's.

        Returns: y, or if the block's order is one of those below its last sum, left to the next norm.
        """
        order = order or self.order
        if order is pre_norm:
            return self._pre_norm(x, seq)
        if order is sandwich_norm:
            return self._sandwich_norm(x, seq)
        if order is reordered_norm:
            return self._reordered_norm(x, seq)
        y: Tensor = order(self, whole(x), seq)
        return y

    def _pre_norm(self, x: Tensor | Sum, seq: Rows) -> Tensor | Sum:
        """x = x + attention(norm(x));  y = x + mlp(norm(x))."""
        attended, x = self.again(self._attended, x, seq)
        y, x = normed_sum(self.post_attention_layernorm, x, attended)
        return self.left(x, self.feed(y))

    def _sandwich_norm(self, x: Tensor | Sum, seq: Rows) -> Tensor | Sum:
        """x = x + norm(attention(norm(x)));  y = x + norm(mlp(norm(x)))."""
        attended, x = self.again(self._attended, x, seq, self.post_attention_layernorm)
        y, x = normed_sum(self.pre_feedforward_layernorm, x, attended)
        return self.left(x, self.post_feedforward_layernorm(self.feed(y)))

    def _reordered_norm(self, x: Tensor | Sum, seq: Rows) -> Tensor | Sum:
        """x = x + norm(attention(x));  y = x + norm(mlp(x))."""
        before = whole(x)
        middle = before + self.again(lambda x, seq: self.post_attention_layernorm(self.attend(x, seq)), before, seq)
        return self.left(middle, self.post_feedforward_layernorm(self.feed(middle)))

    def _attended(self, x: Tensor | Sum, seq: Rows, behind: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Return (attention(norm(x)), x), with the norm behind it, if there is one."""
        y, x = normed(self.input_layernorm, x)
        y = self.attend(y, seq)
        return y if behind is None else behind(y), x

    def attend(self, x: Tensor, seq: Rows) -> Tensor:
        """Return attention of x[T/tp, D], its scale and its dropout."""
        y = scaled(self.get_submodule(self._named["attend"])(x, seq), self._scales["attend"])
        return y if self.dropouts is None else self.dropouts.attention_residual(y, *self._place(y))

    def feed(self, x: Tensor) -> Tensor:
        """Return the feed-forward network of x[T/tp, D], its scale and its dropout."""
        y = scaled(self.get_submodule(self._named["feed"])(x), self._scales["feed"])
        return y if self.dropouts is None else self.dropouts.mlp_residual(y, *self._place(y))

    # For an order of somebody's own.
    normed = staticmethod(normed)
    normed_sum = staticmethod(normed_sum)

    def left(self, x: Tensor, branch: Tensor) -> Tensor | Sum:
        """Return x + branch, left to the next norm; at once if an order of somebody's own goes on with it."""
        return Sum(x, branch) if self.takes_sums else x + branch

    @property
    def takes_sums(self) -> bool:
        """Whether the order, as it is now, takes a sum that the block before has left, and leaves its own."""
        return self.order in (pre_norm, sandwich_norm, reordered_norm)

    def again(self, forward: Callable[..., Returned], *inputs: Any) -> Returned:
        """Return forward(*inputs); with `attention_again` backward computes it once more.

        Then a sum among the inputs is made before, so that one tensor is kept of it instead of two.
        """
        if not self.attention_again:
            return forward(*inputs)
        return computed_again(forward, *(whole(of) for of in inputs))

    def matmuls(self) -> dict[str, nn.Module]:
        """Return the parts that multiply by weights, by name."""
        return {name: self.get_submodule(name) for name in self._products}

    def _place(self, y: Tensor) -> tuple[int, int, int]:
        """Return where y lies in the global matrix, for dropout: its first row and column, and its row length."""
        return self.tp.rank * y.shape[0], 0, y.shape[1]


def hand_on(block: nn.Module, x: Tensor | Sum, seq: Rows) -> Tensor | Sum:
    """Return block(x, seq), the last sum of a Block left to the next norm, if its order allows it.

    Any other module, and a block that is_watched, is called: it gets and returns tensors.
    """
    if isinstance(block, Block) and not is_watched(block):
        return block.in_order(x, seq)
    y: Tensor = block(whole(x), seq)
    return y


def computed_again(forward: Callable[..., Returned], *inputs: Any) -> Returned:
    """Return forward(*inputs), of which only the inputs are kept: backward runs it once more, on every tp rank alike.

    Dropout is a function of the micro-batch, not of a generator's state, so there is no state to restore. Attention is
    computed again by whom it was computed the first time, and tokens go to the experts that they went to.
    """
    found: Returned = checkpoint(
        forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=same_choices
    )
    return found
