"""What `benchmarks.run kernels` measures: an operator, its rivals, its inputs, and its work.

Functions in operators.py, attention.py and matmul.py make an operator's cases for a model's per-rank shapes and a
sequence. They import the operator, so that a missing one does not affect the others. They import nothing else from
tpkernels until they are asked for the work: the tpkernels of another revision may be older than its formulas.
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
    """The sizes for which an operator's cases are made.

    Attributes:
        model: one rank's shapes.
        seq: tokens of the sequence; activations between sharded layers have seq / tp rows.
        dtype: of activations and weights.
        device: "cpu" or "cuda".
        batch: sequences, of attention; other operators have the tokens of one.
    """

    model: Model
    seq: int
    dtype: torch.dtype
    device: str
    batch: int = 1

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize


class Draw:
    """Random inputs on the shape's device from one seed; floating-point ones get gradients unless told otherwise."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape, self._generator = shape, torch.Generator(shape.device).manual_seed(seed)

    def normal(
        self, *sizes: int, scale: float = 1.0, requires_grad: bool = True, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return normal numbers, of ordinary size: other operands run at another speed."""
        t = torch.randn(sizes, generator=self._generator, device=self._shape.device).mul_(scale)
        return t.to(dtype or self._shape.dtype).requires_grad_(requires_grad)

    def tokens(self, high: int, num_tokens: int) -> Tensor:
        """Return tokens 0 to high - 1, the lower the more frequent: of 16000, token 0 is 9 %, as in natural text."""
        uniform = torch.rand(num_tokens, generator=self._generator, device=self._shape.device)
        return (uniform**4 * high).long().clamp_(max=high - 1)

    def experts(self, num_experts: int, top_k: int, num_tokens: int) -> Tensor:
        """Return the experts of tokens, int32 [T, k]: of each token different ones, all equally likely."""
        scores = torch.rand(num_tokens, num_experts, generator=self._generator, device=self._shape.device)
        return scores.topk(top_k).indices.int()


@dataclass(frozen=True)
class Contestant:
    """One implementation.

    Attributes:
        function: called with the inputs by name; returns one output or several.
        overwrites: inputs that a call, or its backward, changes: they are restored before the next call.
        overwrites_slopes: the same for the gradients given to its backward.
        is_checked: False if the reference cannot check its results, such as a mask of other random numbers.
        context: entered around forward and backward alike, outside the measured time.
        directions: the directions in which it is measured.
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
        inputs: returns the inputs by name.
        contestants: by name; `tpkernels` and others of RIVALS.
        work: of one direction, the operator's forward or backward.
        ceiling: what limits its speed: the speed is reported relative to that of a large copy or a large matmul.
        sizes: the fields of the row about the shape.
        reference: plain torch: in float64 it gives the right result, in the inputs' dtype the allowed error.
        directions: what is measured.
        also_torch: another way of torch to compute it, whose error is allowed too.
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
        """Return the work of a direction; for both it is the sum."""
        if direction != "both":
            return self.work(direction)
        return self.work("forward") + self.work("backward")


class MissingOperator(ValueError):
    """A requested operator does not exist, or cannot be measured in this way."""


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
        "experts": "benchmarks.kernels.cases.experts:experts",
    }
)


def cases_of(op: str, shape: Shape) -> Sequence[Case]:
    """Return an operator's cases for a shape; nothing is allocated yet.

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
    """Return `function` compiled by torch.compile for the shapes of its calls; nothing is imported before the first."""
    found: list[Callable[..., Any]] = []

    def call(**inputs: Tensor) -> Any:
        if not found:
            found.append(torch.compile(function, dynamic=False, fullgraph=True))
        return found[0](**inputs)

    return call


def against_torch(
    ours: Callable[..., Any], plain: Callable[..., Any], liger: Contestant | None = None, **how: Any
) -> dict[str, Contestant]:
    """Return the contestants ours, plain torch eager and compiled, and Liger's if it can run; `how` is for ours."""
    found = {OURS: Contestant(ours, **how), TORCH: Contestant(plain), COMPILED: Contestant(compiled(plain))}
    return found if liger is None else found | {LIGER: liger}


def by_liger(shape: Shape, module: str, name: str, call: Callable[..., Any], **how: Any) -> Contestant | None:
    """Return a contestant of Liger-Kernel; None if its kernels cannot run, or Liger is not installed or lacks it.

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
