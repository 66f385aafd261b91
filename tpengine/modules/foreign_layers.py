"""What takes the place of another model's nn.Linear, Conv1D, nn.Embedding and nn.PReLU.

Every rank has all tokens between these layers, since a forward that knows nothing of tensor parallelism does. So the
layers of tpengine.layers, which hand on T/tp tokens and fuse their exchange with the matmul, do not fit here.

What sees whole activations must have whole gradients. A module under `replicate` sees whole activations, and so its
gradient is the same on every rank. Between a column and a row it would see the features of this rank alone: nn.PReLU of
one weight, or a gate that multiplies them. Then no shape is wrong, each rank trains another module, and neither the
table nor a forward pass can know. Gradients can: they are others on each rank, those of the module itself and those
that it hands on to what lies before it.

So gradients are compared in the first backward passes: of all parameters that stay whole, and of the outputs of rows
and tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.derivatives import differentiable_once
from tpkernels.exchange.communicator import Communicator

from tpengine.layers.collectives import all_reduce, copy
from tpengine.layers.placement import Placement, SummedBy, cut, whole
from tpengine.layers.vocabulary import check_range
from tpengine.modules.rules import Cut

# Gradients of few elements may be alike by chance in 16 bits, not so often.
_NUM_PASSES = 3


class SameGradient:
    """A hook that refuses, in backward, a gradient that is not the same on every rank.

    It compares in the first passes that give it another gradient than zero. Rounding of the square root of the dtype's
    precision is let pass.

    Args:
        what: whose gradient it is, for the message.
        tp: the tensor-parallel ranks.

    Attributes:
        is_done: whether it compares no more.

    Raises:
        ValueError: when called, on every rank alike: gradients differ.

    Cost: in each of these passes a broadcast of the gradient and a gather of two numbers, for which the host waits.
    """

    def __init__(self, what: str, tp: Communicator) -> None:
        self._what, self._tp, self._left = what, tp, _NUM_PASSES

    @property
    def is_done(self) -> bool:
        """See above."""
        return self._left == 0

    @torch.no_grad()
    def __call__(self, gradient: Tensor) -> None:
        """Compare a gradient; it stays as it is."""
        if self.is_done:
            return
        mine = gradient.to_dense() if gradient.is_sparse else gradient
        first = self._tp.broadcast_(mine.clone(memory_format=torch.contiguous_format))
        wide = torch.promote_types(mine.dtype, torch.float32)
        sizes = [torch.linalg.vector_norm(of, dtype=wide) for of in (mine - first, first)]
        ranks = self._tp.all_gather(torch.stack(sizes).double()[None]).tolist()
        allowed = torch.finfo(mine.dtype).eps ** 0.5 * ranks[0][1]
        differing = [rank for rank, (difference, _) in enumerate(ranks) if difference > allowed]
        if differing:
            raise ValueError(
                f"what sees whole activations has the same gradient on every rank: {self._what} has another on ranks "
                f"{differing} than on rank 0, so a module under replicate sees this rank's features alone: write "
                "replicate(heads) for it, which sums its gradient over tp, or column for nn.PReLU with a weight for "
                "each feature"
            )
        # What is not finite does not differ, and zeros are alike wherever they come from: both say nothing.
        if 0 < ranks[0][1] < float("inf"):
            self._left -= 1


class CutLayer(nn.Module):
    """A layer of which each rank holds a part.

    Args:
        tp: the tensor-parallel ranks.
        cuts: how its parameters are cut, by name; of those left out every rank holds the whole.
        weight, bias: this rank's.
        is_transposed: the weight is stored as [in, out], as Conv1D does.
    """

    bias: Parameter | None

    def __init__(
        self,
        tp: Communicator,
        cuts: Mapping[str, Cut],
        weight: Parameter,
        bias: Parameter | None = None,
        *,
        is_transposed: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.cuts, self.is_transposed = tp, dict(cuts), is_transposed
        self.weight = weight
        self.register_parameter("bias", bias)

    def tp_placements(self) -> Mapping[str, Placement]:
        """See SaysPlacements: of what is whole every rank computes the whole gradient, since it has all tokens."""
        return {
            name: cut(self.tp, self.cuts[name].dim) if name in self.cuts else whole(self.tp, SummedBy.NOBODY)
            for name, _ in self.named_parameters(recurse=False)
        }

    @property
    def _matrix(self) -> Tensor:
        """Return the weight as [out, in]."""
        return self.weight.T if self.is_transposed else self.weight


class CutColumns(CutLayer):
    """Multiply by the rows of a weight that this rank holds.

    y[..., F/tp] = x[..., D] @ w[F/tp, D].T + b[F/tp]
    dx[..., D] = all_reduce_tp(dy @ w)
    """

    def forward(self, x: Tensor) -> Tensor:
        """x[..., D] -> y[..., F/tp]."""
        return nn.functional.linear(copy(x, self.tp), self._matrix, self.bias)


class _WholeOutput(CutLayer):
    """A layer that sums what the ranks computed: its output is whole, and so must be its output's gradient."""

    # Set by `parallelize`.
    same_gradient: SameGradient | None = None

    def _summed(self, y: Tensor) -> Tensor:
        whole_y = all_reduce(y, self.tp)
        if self.same_gradient is not None and whole_y.requires_grad and not self.same_gradient.is_done:
            whole_y.register_hook(self.same_gradient)
        return whole_y


class CutRows(_WholeOutput):
    """Multiply the features that this rank has by its columns of a weight.

    y[..., D] = all_reduce_tp(x[..., F/tp] @ w[D, F/tp].T) + b[D]
    dx[..., F/tp] = dy @ w
    """

    def forward(self, x: Tensor) -> Tensor:
        """x[..., F/tp] -> y[..., D]."""
        y = self._summed(nn.functional.linear(x, self._matrix))
        return y if self.bias is None else y + self.bias


class CutTable(_WholeOutput):
    """Look tokens up in a table whose rows are cut.

        y[..., D] = all_reduce_tp(w[V/tp, D]'s row for each token of this rank's range, zeros for the others)

    Raises:
        ValueError: on a CPU, a token outside the table.
    """

    def __init__(
        self, tp: Communicator, cuts: Mapping[str, Cut], weight: Parameter, padding_idx: int | None = None
    ) -> None:
        super().__init__(tp, cuts, weight)
        self.padding_idx = padding_idx

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens[...] -> y[..., D]."""
        check_range("tokens", tokens.flatten(), self.cuts["weight"].size)
        num_rows = len(self.weight)
        first = self.tp.rank * num_rows
        rows = tokens - first
        is_elsewhere = (rows < 0) | (rows >= num_rows)
        # As nn.Embedding does: the row of this token gets no gradient.
        padding = None if self.padding_idx is None else self.padding_idx - first
        here = padding if padding is not None and 0 <= padding < num_rows else None
        found = nn.functional.embedding(rows.masked_fill(is_elsewhere, 0), self.weight, here)
        return self._summed(found.masked_fill(is_elsewhere[..., None], 0.0))


class CutPReLU(CutLayer):
    """Apply nn.PReLU with a slope for each feature to the features that this rank has.

    y[T, F/tp] = max(x, 0) + w[F/tp] * min(x, 0)
    """

    def forward(self, x: Tensor) -> Tensor:
        """x[T, F/tp] -> y[T, F/tp]."""
        return nn.functional.prelu(x, self.weight)


class CutHead(CutColumns):
    """Compute logits with a table whose rows are cut, and gather them unless the loss takes them cut.

    z[..., V] = all_gather_tp(x[..., D] @ w[V/tp, D].T), without the padded columns
    dx[..., D] = all_reduce_tp(dz's own columns @ w)
    """

    # Set by `parallelize`.
    gathers = True

    def forward(self, x: Tensor) -> Tensor:
        """x[..., D] -> logits[..., V], or [..., V/tp] of the padded vocabulary."""
        logits = super().forward(x)
        if not self.gathers:
            return logits
        whole: Tensor = _GatherColumns.apply(logits, self.cuts["weight"].size, self.tp)
        return whole


class _GatherColumns(torch.autograd.Function):
    """z[..., V/tp] -> y[..., V];  dz = dy's own columns: every rank computes the whole of dy."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, size: int, tp: Communicator) -> Tensor:
        ctx.tp, ctx.num_columns = tp, z.shape[-1]
        full = tp.all_gather(z.movedim(-1, 0).contiguous())
        return full[:size].movedim(0, -1).contiguous()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        padded = nn.functional.pad(dy, (0, ctx.tp.size * ctx.num_columns - dy.shape[-1]))
        return padded.narrow(-1, ctx.tp.rank * ctx.num_columns, ctx.num_columns), None, None
