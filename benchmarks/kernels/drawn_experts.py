"""A layer of experts as the benchmarks on a CPU draw it: its sizes, its weights, and which experts its tokens choose.

Uniform routing comes from a router of random weights. For Zipf's the router reads the logarithm of each expert's
probability, 1/1 to 1/E, from a constant column of x, beside its random logits: so experts are drawn by those
probabilities, without a word to any layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tpengine.config.settings import ModelDetails

# Of the random logits, in the scale of Zipf's logarithms.
_SPREAD = 1.0

Routing = Literal["uniform", "zipf"]


@dataclass(frozen=True)
class ExpertsSizes:
    """What both benchmarks of such a layer are told."""

    tokens: int = 2048
    """Tokens of a micro-batch, of all ranks together, T."""
    experts: int = 64
    """E."""
    top_k: int = 8
    """Experts of a token, k."""
    hidden: int = 512
    """D."""
    ffn: int = 256
    """Width of an expert, F."""
    rounds: int = 20
    """Samples of each variant."""
    out: Path | None = None
    """Append one JSON line per case to this file."""

    def check(self) -> None:
        """Raise ValueError if a token has more experts than there are."""
        if self.top_k > self.experts:
            raise ValueError(
                f"a token's experts are among all of them: top-k {self.top_k}, experts {self.experts}: use --top-k "
                f"{self.experts}"
            )

    def sizes(self) -> dict[str, int]:
        """Return the layer's sizes, as a row of results names them."""
        return {name: getattr(self, name) for name in ("tokens", "experts", "top_k", "hidden", "ffn")}


def details_of(sizes: ExpertsSizes) -> ModelDetails:
    """Return the layer as a model's details say it."""
    return ModelDetails(
        num_experts=sizes.experts,
        experts_per_token=sizes.top_k,
        expert_ffn_size=sizes.ffn,
        normalizes_scores=True,
    )


def drawn(sizes: ExpertsSizes, routing: Routing, *, falling: bool = False) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return x[T, D], the gradient of y, and the weights by the names of ours.

    Args:
        falling: whether Zipf's probabilities fall with the expert's number, instead of being spread at random.
    """
    draw, num, d, f = torch.Generator().manual_seed(0), sizes.experts, sizes.hidden, sizes.ffn

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(sizes, generator=draw)

    x, dy = normal(sizes.tokens, d), normal(sizes.tokens, d)
    weights = {
        "gate.weight": normal(num, d, scale=_SPREAD * d**-0.5),
        "experts.gate_proj.weight": normal(num, f, d, scale=d**-0.5),
        "experts.up_proj.weight": normal(num, f, d, scale=d**-0.5),
        "experts.down_proj.weight": normal(num, d, f, scale=f**-0.5),
    }
    if routing == "zipf":
        x[:, 0] = 1.0
        order = torch.randperm(num, generator=draw)
        places = torch.arange(1, num + 1) if falling else order + 1
        weights["gate.weight"][:, 0] = -places.float().log()
    return x.requires_grad_(), dy, weights
