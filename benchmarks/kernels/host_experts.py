"""`python -m benchmarks.run moe`: a layer of experts on the CPU, forward and backward, against transformers' own.

One thread, as a rank has in training. transformers' Qwen3MoeSparseMoeBlock is measured twice, by its eager loop over
experts and by its grouped products (`experts_implementation` "eager" and "grouped_mm"); all three have the same weights
and so the same routing (drawn_experts.py).

Gradients of weights are new tensors of autograd ("new"), or are added to what earlier micro-batches left ("added"): in
ours to the engine's buffers, in transformers' to `.grad`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.tables import speed_table
from benchmarks.harness.timing import Comparison, compare
from benchmarks.kernels.drawn_experts import ExpertsSizes, Routing, details_of, drawn
from tpengine.architectures.describe import Experts
from tpengine.config import ModelConfig
from tpengine.distributed.local_ranks import THREADS_PER_RANK, run_ranks
from tpengine.layers.gradient_sink import GradientSink
from tpengine.model.parts import FastParts

_OURS, _EAGER, _GROUPED = "tpengine", "eager", "grouped_mm"
# Ours beside transformers' where nothing is rounded to fewer bits: sums in another order.
_TOLERANCE = 1e-4

Gradients = Literal["new", "added"]


@dataclass(frozen=True)
class Options(ExpertsSizes):
    """Sizes of the layer and of a micro-batch, and what is measured."""

    routing: tuple[Routing, ...] = ("uniform", "zipf")
    """How tokens are spread over experts."""
    gradients: tuple[Gradients, ...] = ("new", "added")
    """Whether weights' gradients are new tensors, or added to those of earlier micro-batches."""


def main(options: Options) -> int:
    """Measure every routing; return 1 if a check was red."""
    options.check()
    try:
        import transformers  # noqa: F401  # the rival
    except ImportError as error:
        raise ValueError(
            "benchmark moe needs transformers, which is not installed: pip install transformers"
        ) from error
    rows: list[dict[str, Any]] = run_ranks(1, "benchmarks.kernels.host_experts:measure", options)
    console = Console(width=max(Console().width, 100))
    for rival in (_EAGER, _GROUPED):
        labels = {
            "case": [row["case"] for row in rows],
            "hottest": [f"{row['largest_over_mean_ratio']:.1f}" for row in rows],
        }
        console.print(speed_table("float32, one thread; medians in ms", labels, rows, _OURS, rival))
    return stored(rows, options.out)


def measure(options: Options) -> list[dict[str, Any]]:
    """Measure every case in this process."""
    rows = []
    for routing in options.routing:
        x, dy, weights = drawn(options, routing)
        sides: dict[str, _Side] = {_OURS: _Ours(options, weights)}
        sides |= {name: _Theirs(options, weights, name) for name in (_EAGER, _GROUPED)}
        counts = _counts(options, x, weights["gate.weight"])
        for gradients in options.gradients:
            comparison = _compared(sides, x, dy, gradients, options.rounds)
            fields = {
                **options.sizes(),
                "routing": routing,
                "gradients": gradients,
                "largest_over_mean_ratio": float(counts.max() / counts.float().mean()),
                "empty_experts": int((counts == 0).sum()),
                **comparison.fields(baseline=_GROUPED),
                **comparison.fields(baseline=_EAGER),
            }
            rows.append(make_row(f"moe/{routing}/{gradients}", threads_per_rank=THREADS_PER_RANK, fields=fields))
    return rows


class _Side:
    """A layer with its weights, by the names of ours.

    Attributes:
        layer: x[T, D] -> y[T, D].
        parameters: in the order in which gradients are compared.
    """

    layer: Callable[[Tensor], Tensor]
    parameters: list[Parameter]

    def new(self, x: Tensor, dy: Tensor) -> list[Tensor]:
        """Return y, dx and the gradients of the weights, each a new tensor."""
        y = self.layer(x)
        return [y, *torch.autograd.grad(y, [x, *self.parameters], dy)]

    def added(self, x: Tensor, dy: Tensor) -> list[Tensor]:
        """Return y and dx; add the gradients of the weights to what is there."""
        y = self.layer(x)
        y.backward(dy)
        dx, x.grad = x.grad, None
        assert dx is not None, "x has a gradient"
        return [y, dx]

    def sums(self) -> list[Tensor]:
        """Return what `added` has added to, by parameter."""
        raise NotImplementedError

    def named(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """Return gradients of the parameters by names of ours."""
        raise NotImplementedError


class _Counted:
    """Counts contributions for nobody."""

    def contributed(self, index: int) -> None:
        """Count one."""


class _Ours(_Side):
    def __init__(self, options: Options, weights: Mapping[str, Tensor]) -> None:
        model = ModelConfig(hidden_size=options.hidden, num_heads=1, num_kv_heads=1, details=details_of(options))
        self._sink = GradientSink()
        parts = FastParts(model, Communicator(None), sink=self._sink, dtype=torch.float32)
        module: nn.Module = parts.layer(Experts.of(model))
        self.layer, self._names = module, [name for name, _ in module.named_parameters()]
        self.parameters = [parameter for _, parameter in module.named_parameters()]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(weights[name])
        self._buffers = [torch.zeros_like(parameter) for parameter in self.parameters]

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Let the sink add to buffers, as in a run."""
        places = {parameter: (buffer, 0) for parameter, buffer in zip(self.parameters, self._buffers, strict=True)}
        self._sink.attach(places, _Counted())
        try:
            yield
        finally:
            self._sink.__init__()  # type: ignore[misc]  # attached to nothing again

    def sums(self) -> list[Tensor]:
        return self._buffers

    def named(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._names, tensors, strict=True))


class _Theirs(_Side):
    def __init__(self, options: Options, weights: Mapping[str, Tensor], implementation: str) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(
            hidden_size=options.hidden,
            moe_intermediate_size=options.ffn,
            num_experts=options.experts,
            num_experts_per_tok=options.top_k,
            norm_topk_prob=True,
        )
        config._experts_implementation = implementation
        block = Qwen3MoeSparseMoeBlock(config)
        gate_up = torch.cat((weights["experts.gate_proj.weight"], weights["experts.up_proj.weight"]), 1)
        with torch.no_grad():
            block.gate.weight.copy_(weights["gate.weight"])
            block.experts.gate_up_proj.copy_(gate_up)
            block.experts.down_proj.copy_(weights["experts.down_proj.weight"])
        self._ffn = options.ffn
        self.parameters = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
        self.layer = lambda x: block(x[None])[0]

    def sums(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def named(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        gate, gate_up, down = tensors
        return {
            "gate.weight": gate,
            "experts.gate_proj.weight": gate_up[:, : self._ffn],
            "experts.up_proj.weight": gate_up[:, self._ffn :],
            "experts.down_proj.weight": down,
        }


def _compared(sides: Mapping[str, _Side], x: Tensor, dy: Tensor, gradients: Gradients, rounds: int) -> Comparison:
    """Check one way of gradients against transformers' eager loop, then time it."""
    ours = sides[_OURS]
    assert isinstance(ours, _Ours), "ours stands first"

    def results(side: _Side) -> dict[str, Tensor]:
        if gradients == "new":
            y, dx, *of_weights = side.new(x, dy)
            return {"y": y, "dx": dx, **side.named(of_weights)}
        before = [total.clone() for total in side.sums()]
        y, dx = side.added(x, dy)
        after = side.sums()
        more = [total - old for total, old in zip(after, before, strict=True)] if before else after
        return {"y": y, "dx": dx, **side.named([total.clone() for total in more])}

    def check() -> None:
        want = results(sides[_EAGER])
        for name in (_OURS, _GROUPED):
            got = results(sides[name])
            for what, right in want.items():
                error, size = (got[what] - right).abs().max().item(), right.abs().max().item()
                assert error <= _TOLERANCE * size, f"{name}: {what} is off by {error:.2g} of at most {size:.2g}"

    with ours.attached() if gradients == "added" else contextlib.nullcontext():
        calls: dict[str, Callable[[], object]] = {
            name: (lambda side=side: getattr(side, gradients)(x, dy))  # type: ignore[misc]
            for name, side in sides.items()
        }
        return compare(calls, check=check, rounds=rounds)


def _counts(options: Options, x: Tensor, gate: Tensor) -> Tensor:
    """Return the tokens of each expert."""
    chosen = (x.detach() @ gate.T).topk(options.top_k).indices
    return torch.bincount(chosen.flatten(), minlength=options.experts)
