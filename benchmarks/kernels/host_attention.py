"""`python -m benchmarks.run attention`: causal attention on the CPU, forward and backward, ours against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from tpkernels.ops.attention.host import causal_attention

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.tables import speed_table
from benchmarks.harness.timing import compare
from tpengine.distributed.local_ranks import THREADS_PER_RANK, run_ranks

_OURS, _TORCH = "tpkernels", "torch"


@dataclass(frozen=True)
class Options:
    """Shapes of a micro-batch; all lengths of sequences have the same total number of tokens."""

    seqs: tuple[int, ...] = (128, 256, 512, 1024)
    """Tokens per sequence, S."""
    tokens: int = 1024
    """Tokens per micro-batch, B*S."""
    heads: int = 8
    """H."""
    head_size: int = 64
    """E."""
    rounds: int = 20
    """Samples of each variant."""
    out: Path | None = None
    """Append one JSON line per case to this file."""


def main(options: Options) -> int:
    """Run all lengths; return 1 if a check was red."""
    if any(options.tokens % seq for seq in options.seqs):
        raise ValueError(f"tokens must be whole sequences: {options.tokens} tokens, seqs {options.seqs}: use divisors")
    rows: list[dict[str, Any]] = run_ranks(1, "benchmarks.kernels.host_attention:measure", options)
    labels = {"case": [row["case"] for row in rows]}
    table = speed_table("float32, one thread; medians in ms", labels, rows, _OURS, _TORCH)
    Console(width=max(Console().width, 100)).print(table)
    return stored(rows, options.out)


def measure(options: Options) -> list[dict[str, Any]]:
    """Measure every length, forward with backward and backward alone, in this process."""
    rows = []
    for seq in options.seqs:
        shape = (options.tokens // seq, options.heads, seq, options.head_size)
        functions = {_OURS: causal_attention, _TORCH: _by_torch}
        # q and k as the rotation returns them; v and dy as parts of packed tensors, token by token.
        q, k, v, dy = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
        v, dy = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (v, dy))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        outputs = {name: function(*leaves) for name, function in functions.items()}

        def whole(
            function: Callable[..., Tensor], leaves: list[Tensor] = leaves, dy: Tensor = dy
        ) -> tuple[Tensor, ...]:
            y = function(*leaves)
            return (y, *torch.autograd.grad(y, leaves, dy))

        def backward(y: Tensor, leaves: list[Tensor] = leaves, dy: Tensor = dy) -> tuple[Tensor, ...]:
            return torch.autograd.grad(y, leaves, dy, retain_graph=True)

        def check(whole: Callable[[Callable[..., Tensor]], tuple[Tensor, ...]] = whole) -> None:
            for got, want in zip(whole(causal_attention), whole(_by_torch), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

        cases: dict[str, dict[str, Callable[[], object]]] = {
            "backward": {name: lambda y=y: backward(y) for name, y in outputs.items()},  # type: ignore[misc]
            "forward_and_backward": {name: lambda f=f: whole(f) for name, f in functions.items()},  # type: ignore[misc]
        }
        for name, variants in cases.items():
            comparison = compare(variants, check=check, rounds=options.rounds)
            sizes = {"seq": seq, "batch": shape[0], "heads": options.heads, "head_size": options.head_size}
            fields = sizes | comparison.fields(baseline=_TORCH)
            rows.append(make_row(f"attention/seq_{seq}/{name}", threads_per_rank=THREADS_PER_RANK, fields=fields))
    return rows


def _by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
