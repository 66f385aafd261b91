"""What `benchmarks.run kernels` measures: an operator, its rivals, what they are given, and the work it is.

An operator's cases are made by a function of operators.py, attention.py or matmul.py
for a model's per-rank shapes and a sequence. They import the operator, so that one that is missing costs the others
nothing, and take from tpkernels nothing else before they are asked for the work: the tpkernels of another revision may
be older than its formulas.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from benchmarks.harness.shapes import Model

if TYPE_CHECKING:
    from tpkernels.work import Work

Direction = Literal["forward", "backward", "both"]
Ceiling = Literal["copy", "matmul"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")

OURS, TORCH, COMPILED, LIGER, FLEX = "tpkernels", "torch", "torch_compile", "liger", "flex_attention"
SDPA = ("sdpa", "sdpa_flash", "sdpa_flash_deterministic", "sdpa_efficient", "sdpa_cudnn", "sdpa_math")
RIVALS = (TORCH, COMPILED, LIGER, *SDPA, FLEX)


@dataclass(frozen=True)
class Shape:
    """What an operator's cases are made for.

    Attributes:
        model: one rank's shapes.
        seq: tokens of the sequence; activations between sharded layers have seq / tp rows.
        dtype: of activations and weights.
        device: "cpu" or "cuda".
    """

    model: Model
    seq: int
    dtype: torch.dtype
    device: str

    @property
    def item_bytes(self) -> int:
        """Of an element."""
        return self.dtype.itemsize


class Draw:
    """Random inputs on the shape's device from one seed; floating-point ones get gradients unless told otherwise."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape, self._generator = shape, torch.Generator(shape.device).manual_seed(seed)

    def normal(
        self, *sizes: int, scale: float = 1.0, requires_grad: bool = True, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Normal numbers, of ordinary size: other operands run at another speed."""
        t = torch.randn(sizes, generator=self._generator, device=self._shape.device).mul_(scale)
        return t.to(dtype or self._shape.dtype).requires_grad_(requires_grad)

    def tokens(self, high: int, num_tokens: int) -> Tensor:
        """Tokens 0 to high - 1, the first the most frequent: of 16000, it is 9 % of all, as in natural text."""
        uniform = torch.rand(num_tokens, generator=self._generator, device=self._shape.device)
        return (uniform**4 * high).long().clamp_(max=high - 1)


@dataclass(frozen=True)
class Contestant:
    """One implementation.

    Attributes:
        function: called with the inputs by name; returns one output or several.
        overwrites: inputs that a call, or its backward, leaves changed: given back their values before the next.
        overwrites_slopes: the same of the gradients that its backward is given.
        is_checked: False where the reference cannot tell its results, as a mask of other random numbers.
        context: entered around forward and backward alike, outside the measured time.
        directions: what it is measured in.
    """

    function: Callable[..., Any]
    overwrites: tuple[str, ...] = ()
    overwrites_slopes: bool = False
    is_checked: bool = True
    context: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    directions: tuple[Direction, ...] = DIRECTIONS


@dataclass(frozen=True)
class Case:
    """One operator at one shape.

    Attributes:
        name: the public function, and what distinguishes the case: "attention_window".
        inputs: makes the inputs by name.
        contestants: by name; `tpkernels` and others of RIVALS.
        work: of one direction, the operator's forward or backward.
        ceiling: what bounds it, and so what its speed is a part of: a large copy's or a large matmul's.
        sizes: what the row says of the shape.
        reference: plain torch, in float64 the right result, and in the inputs' dtype the yardstick of errors.
        directions: what is measured.
        also_torch: torch's own other way to compute it, whose errors are as good a yardstick.
    """

    name: str
    inputs: Callable[[Draw], Mapping[str, Tensor]]
    contestants: Mapping[str, Contestant]
    work: Callable[[Direction], Work]
    ceiling: Ceiling
    sizes: Mapping[str, int]
    reference: Callable[..., Any]
    directions: tuple[Direction, ...] = DIRECTIONS
    also_torch: Callable[..., Any] | None = None

    def total_work(self, direction: Direction) -> Work:
        """Work of a direction; of both it is the sum."""
        if direction != "both":
            return self.work(direction)
        return self.work("forward") + self.work("backward")


class MissingOperator(ValueError):
    """An operator that was asked for is not there, or not to be measured so."""


Cases = Callable[[Shape], Sequence[Case]]

_OPERATORS = "benchmarks.kernels.cases.operators"
CASES: Mapping[str, str] = MappingProxyType(
    {
        "norm": f"{_OPERATORS}:norm",
        "rope": f"{_OPERATORS}:rope",
        "activation": f"{_OPERATORS}:activation",
        "dropout": f"{_OPERATORS}:dropout",
        "embedding": f"{_OPERATORS}:embedding",
        "cross_entropy": f"{_OPERATORS}:cross_entropy",
        "linear_cross_entropy": f"{_OPERATORS}:linear_cross_entropy",
        "attention": "benchmarks.kernels.cases.attention:attention",
        "adamw": f"{_OPERATORS}:adamw",
        "matmul": "benchmarks.kernels.cases.matmul:matmul",
    }
)


def cases_of(op: str, shape: Shape) -> Sequence[Case]:
    """Make an operator's cases for a shape; nothing is allocated yet.

    Raises:
        MissingOperator: the operator, or a function of its module, is not in this tpkernels.
    """
    module, _, name = CASES[op].partition(":")
    make: Cases = getattr(importlib.import_module(module), name)
    try:
        return make(shape)
    except ImportError as error:
        raise MissingOperator(f"tpkernels has no operator {op}: {error}: leave it out of --op") from error


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` by torch.compile for the shapes it is called with; nothing is imported before its first call."""
    found: list[Callable[..., Any]] = []

    def call(**inputs: Tensor) -> Any:
        if not found:
            found.append(torch.compile(function, dynamic=False, fullgraph=True))
        return found[0](**inputs)

    return call


def against_torch(
    ours: Callable[..., Any], plain: Callable[..., Any], liger: Contestant | None = None, **how: Any
) -> dict[str, Contestant]:
    """Contestants: ours, plain torch as it is and compiled, and Liger's where it can run; `how` is ours."""
    found = {OURS: Contestant(ours, **how), TORCH: Contestant(plain), COMPILED: Contestant(compiled(plain))}
    return found if liger is None else found | {LIGER: liger}


def by_liger(shape: Shape, module: str, name: str, call: Callable[..., Any], **how: Any) -> Contestant | None:
    """A contestant of Liger-Kernel; None where its kernels cannot run, or where Liger is not installed or lacks it.

    Args:
        module, name: of an autograd function of liger_kernel.ops.
        call: called with that function's `apply`, then the inputs by name.
        how: fields of the contestant.
    """
    if shape.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    try:
        function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
    except (ImportError, AttributeError):
        return None
    return Contestant(functools.partial(call, function.apply), **how)
