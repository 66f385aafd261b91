"""What an architecture adds to the sizes of a model: numbers out of its config.json, which are no settings.

They stand in config.toml under [model.details], so that a run continues without the directory it began from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for sequences longer than those of the first training.

    The names are those of config.json; each kind reads its own.

    Attributes:
        rope_type: default changes nothing.
        factor: how many times as long sequences become.
        original_max_position_embeddings: tokens of the sequences of the first training.
        low_freq_factor, high_freq_factor: of llama3: turns over such a sequence below and above which a frequency is
            divided by the factor, and kept.
        beta_fast, beta_slow: the same of yarn, high and low.
        attention_factor: of yarn: multiplies cos and sin; 0 for 0.1 ln(factor) + 1.
        truncate: of yarn: the borders between frequencies are whole numbers.
    """

    rope_type: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelDetails:
    """Numbers of an architecture beside the sizes.

    Attributes:
        head_size: E; 0 for hidden_size / num_heads.
        rope: scaling of the rotary frequencies.
        windows: of each layer, how many tokens back a query sees, its own included; 0 for all. Empty for all layers 0.
        local_rope_theta: base of the frequencies, unscaled, of layers with a window; 0 for that of the others.
        max_positions: rows of a table of learned positions; 0 without one.
        attention_bias, mlp_bias: whether the projections of attention, or of the feed-forward network, have biases,
            where an architecture leaves that open.
        attention_scale: of the scores; 0 for E^(-1/2).
    """

    head_size: int = 0
    rope: RopeScaling = RopeScaling()
    windows: tuple[int, ...] = ()
    local_rope_theta: float = 0.0
    max_positions: int = 0
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float = 0.0
