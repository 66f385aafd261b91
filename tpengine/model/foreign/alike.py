"""Hold a foreign model to what its table promises: what sees whole activations has whole gradients, on every rank.

A module under `replicate` sees whole activations, and so its gradient is the same on every rank. Between a column and a
row it would see the features of this rank alone: nn.PReLU of one weight, or a gate that multiplies them. Then no shape
is wrong, each rank trains another module, and neither the table nor a forward pass can know. Gradients can: they are
others on each rank, those of the module itself and those that it hands on to what lies before it.

So gradients are compared in the first backward passes: of all parameters that stay whole, and of the outputs of rows
and tables.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

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
