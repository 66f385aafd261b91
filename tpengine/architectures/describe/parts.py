"""The parts of a block, as data: which parameters each has, of which shapes. No torch: the plan counts bytes with it.

A part says what there is; model/parts.py makes the layer that computes it. Parameters stand in the order of their use
in forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tpengine.config import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Norm:
    """A norm of each token.

    rms:         y = x / sqrt(mean(x^2) + eps) * w
    rms_offset:  the same, times 1 + w (Gemma)
    layer:       y = (x - mean(x)) / sqrt(var(x) + eps) * w + b
    """

    kind: Literal["rms", "rms_offset", "layer"] = "rms"

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters by their names in the part: those of a norm of x[T/tp, D]."""
        return self.over(model.hidden_size)

    def over(self, size: int) -> Shapes:
        """Return the parameters of a norm over `size` elements."""
        return {"weight": (size,), "bias": (size,)} if self.kind == "layer" else {"weight": (size,)}

    @property
    def first_weight(self) -> float:
        """The initial weight, with which the norm scales by one."""
        return 0.0 if self.kind == "rms_offset" else 1.0


@dataclass(frozen=True)
class Attention:
    """Causal self-attention over H query and G key and value heads of size E.

    Attributes:
        qkv_bias, output_bias: whether the projections have biases.
        head_norm: a norm of each head's queries and keys, before they are rotated.
        rotates: whether queries and keys are rotated by their positions.
        window: how many tokens back a query sees, its own included; 0 for all.
        rope_theta: base of the rotary frequencies; 0 for the model's, with the model's scaling.
        scale: of the scores; 0 for E^(-1/2).
    """

    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: Norm | None = None
    rotates: bool = True
    window: int = 0
    rope_theta: float = 0.0
    scale: float = 0.0

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters by their names in the part."""
        d, size = model.hidden_size, model.head_size
        rows = {"q": model.num_heads * size, "k": model.num_kv_heads * size, "v": model.num_kv_heads * size}
        shapes: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": (n, d) for name, n in rows.items()}
        if self.qkv_bias:
            shapes |= {f"{name}_proj.bias": (n,) for name, n in rows.items()}
        if self.head_norm:
            shapes |= {f"{of}_norm.{name}": s for of in "qk" for name, s in self.head_norm.over(size).items()}
        shapes["o_proj.weight"] = (d, rows["q"])
        if self.output_bias:
            shapes["o_proj.bias"] = (d,)
        return shapes


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward network of width F.

    gated:  y = (act(x w_gate.T) * (x w_up.T)) w_down.T         otherwise:  y = act(x w_up.T + b_up) w_down.T + b_down
    """

    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    bias: bool = False

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters by their names in the part."""
        d, f = model.hidden_size, model.ffn_size
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (f, d) for name in names}
        if self.bias:
            shapes |= {f"{name}.bias": (f,) for name in names}
        shapes["down_proj.weight"] = (d, f)
        if self.bias:
            shapes["down_proj.bias"] = (d,)
        return shapes


Part = Norm | Attention | FeedForward


@dataclass(frozen=True)
class Ends:
    """What stands before the first block and behind the last.

    Attributes:
        embedding_scale: what the rows of the embedding are multiplied by.
        has_positions: whether a row of a learned table of positions is added to each token.
        norm: of the last block's output.
    """

    embedding_scale: float = 1.0
    has_positions: bool = False
    norm: Norm = Norm()
