"""Norms of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from tpkernels.work import Work, norm_backward_work, norm_work

from tpengine.architectures.part import BackwardWalk, Kept, Kernel, Part, Shapes, Sizes
from tpengine.config import ModelConfig


@dataclass(frozen=True)
class Norm(Part):
    """A norm of each token.

    rms:         y = x / sqrt(mean(x^2) + eps) * w
    rms_offset:  the same, times 1 + w (Gemma)
    layer:       y = (x - mean(x)) / sqrt(var(x) + eps) * w + b

    Class attributes:
        keeps_input: whether backward needs its input.
    """

    role: ClassVar[Literal["norm", "attend", "feed"]] = "norm"
    title: ClassVar[str] = "norm"
    layer: ClassVar[str] = "tpengine.model.parts:norm"
    exact_layer: ClassVar[str] = "tpengine.model.parts:exact_norm"

    keeps_input: ClassVar[bool] = True

    kind: Literal["rms", "rms_offset", "layer"] = "rms"

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters of a norm of x[T/tp, D]."""
        return self.over(model.hidden_size)

    def over(self, size: int) -> Shapes:
        """Return the parameters of a norm over `size` elements."""
        return {"weight": (size,), "bias": (size,)} if self.kind == "layer" else {"weight": (size,)}

    def first_value(self, name: str) -> float:
        """Return the weight with which the norm scales by one, or a bias of zero."""
        return 1.0 if name.endswith("weight") and self.kind != "rms_offset" else 0.0

    def flops(self, model: ModelConfig, sequences: int, seq: int, *, causal_half: bool, windowed: bool = True) -> int:
        """Return none: only products are counted."""
        return 0

    def kernel(self, s: Sizes, *, residual: bool = False, backward: bool = False) -> Kernel:
        """Return the norm of this rank's tokens, or its gradients; with `residual` of x and what it is added to.

        The mean that some norms subtract takes no time here.
        """
        work_of = norm_backward_work if backward else norm_work
        work = work_of(s.own_tokens, s.hidden, s.item, residual=residual)
        return Kernel("norm_backward" if backward else "norm", work)

    def kept(self, s: Sizes) -> tuple[Kept, ...]:
        """Return rstd[t], the mean and 1 + w, if it has them; its input is counted as the tensor it is."""
        each, t, d, a = 1 + (self.kind == "layer"), s.own_tokens, s.hidden, s.wide
        if self.kind == "rms_offset":
            return (Kept("norm", f"({each} t + D) a = ({each} x {t} + {d}) x {a}", (each * t + d) * a),)
        return (Kept("norm", f"t {each} a = {t} x {each} x {a}", each * t * a),)

    def backward(self, walk: BackwardWalk) -> None:
        """Walk from the gradient of its output to that of its input, which takes its place; free the statistics."""
        s, ledger = walk.s, walk.ledger
        ledger.briefly(s.x, 3 * s.widened(s.own_tokens * s.hidden))
        ledger.free(*(of.num_bytes for of in self.kept(s)))
        if walk.defers:
            ledger.make(self.num_vectors(s) * s.wide)

    def num_vectors(self, s: Sizes) -> int:
        """Return the elements of its weight, and bias."""
        return sum(math.prod(shape) for shape in self.shapes(s.model).values())


@dataclass(frozen=True)
class NoNorm(Norm):
    """No norm before a part, which reads x itself; where x is a sum, the sum is a pass of its own."""

    keeps_input: ClassVar[bool] = False

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return none."""
        return {}

    def kernel(self, s: Sizes, *, residual: bool = False, backward: bool = False) -> Kernel:
        """Return the sum with what was added, or of two gradients; else nothing."""
        elements = residual * s.own_tokens * s.hidden
        return Kernel("", Work(elements, 3 * elements * s.item))

    def kept(self, s: Sizes) -> tuple[Kept, ...]:
        """Return nothing."""
        return ()

    def backward(self, walk: BackwardWalk) -> None:
        """Leave the gradient as it is."""
