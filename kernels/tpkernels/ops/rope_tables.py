"""Rotary position embedding's tables, and what scales their frequencies for sequences longer than those trained on.

    angle[p, i] = p * frequency_i;   frequency_i = theta^(-2i / E), changed by a scaling

`rope` (rope.py) reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class RopeScaling(Protocol):
    """Changes rotary frequencies, for sequences longer than those that a model was first trained on."""

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per token, of those without scaling."""

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: frequency /= factor.

    Source: Chen et al., "Extending context window of large language models", arXiv 2306.15595.
    """

    factor: float
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"a linear scaling needs factor >= 1: got {self.factor}: take it from the checkpoint")

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per token."""
        return frequencies / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: low frequencies are divided by the factor, high ones kept, between two numbers of turns by a ramp.

        place(turns) = E ln(original_length / (2 pi turns)) / (2 ln theta)
        ramp_i = (i - place(fast)) / (place(slow) - place(fast)), cut to 0 ... 1
        frequency_i *= 1 - ramp_i + ramp_i / factor;   cos and sin *= amplitude

    Args:
        theta: the base of the frequencies.
        factor: how many times as long sequences become.
        original_length: tokens of the sequences that the model was first trained on.
        beta_fast, beta_slow: numbers of turns over original_length.
        attention_factor: the amplitude; default 0.1 ln(factor) + 1.
        truncate: the places are rounded outwards to whole numbers.

    Raises:
        ValueError: numbers that do not make a scaling.

    Source: Peng et al., "YaRN", arXiv 2309.00071.
    """

    theta: float
    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_length < 1 or not 0 < self.beta_slow < self.beta_fast or self.theta <= 1:
            raise ValueError(
                "a YaRN scaling needs theta > 1, factor >= 1, original_length >= 1 and 0 < beta_slow < beta_fast: "
                f"got {self}: take them from the checkpoint's configuration"
            )

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per token."""
        num = len(frequencies)
        low, high = (self._place(turns, 2 * num) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num - 1)
        # Equal places: a step behind them.
        width = high - low or 0.001
        ramp = ((torch.arange(num, dtype=frequencies.dtype) - low) / width).clamp(0, 1)
        return frequencies * (1 - ramp + ramp / self.factor)

    def _place(self, turns: float, head_size: int) -> float:
        return head_size * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequencies for sequences longer than those that the model was first trained on.

        turns = original_length * frequency / (2 pi);   kept = (turns - low) / (high - low), cut to 0 ... 1
        frequency *= kept + (1 - kept) / factor

    Args:
        factor: low frequencies are divided by it.
        low_frequency_factor: pairs with at most this many turns over original_length are low.
        high_frequency_factor: pairs with at least this many turns do not change.
        original_length: tokens of the sequences that the model was first trained on.

    Raises:
        ValueError: numbers that do not make a scaling.

    Source: Dubey et al., "The Llama 3 herd of models", arXiv 2407.21783; the equation is that of Meta's llama-models.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        ordered = 0 < self.low_frequency_factor < self.high_frequency_factor
        if not ordered or self.factor < 1 or self.original_length < 1:
            raise ValueError(
                "a Llama 3 scaling needs 0 < low_frequency_factor < high_frequency_factor, factor >= 1 and "
                f"original_length >= 1: got {self}: take them from the checkpoint's configuration"
            )

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per token."""
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: each frequency is divided by a factor of its own.

        frequency_i /= factors[i];   cos and sin *= amplitude

    Args:
        factors: one of each pair of elements.
        amplitude: of cos and sin.

    Raises:
        ValueError: a factor that is not positive, or another number of pairs.

    Source: Ding et al., "LongRoPE", arXiv 2402.13753; the amplitude is that of Microsoft's Phi-3.
    """

    factors: tuple[float, ...]
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        if min(self.factors, default=0.0) <= 0:
            raise ValueError(f"a LongRoPE scaling needs positive factors: got {self}: take them from the checkpoint")

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per token."""
        if len(frequencies) != len(self.factors):
            raise ValueError(
                f"a LongRoPE scaling has a factor for each pair: {len(self.factors)} factors, {len(frequencies)} "
                "pairs: take those of this head size"
            )
        return frequencies / torch.tensor(self.factors, dtype=frequencies.dtype, device=frequencies.device)


def rope_tables(
    num_positions: int,
    head_size: int,
    theta: float = 10000.0,
    *,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the tables of `rope`.

        angle[p, i] = p * theta^(-2i / E);   cos[P, E/2], sin[P, E/2] of it, times the scaling's amplitude

    Args:
        num_positions: P, at least 1.
        head_size: E, even.
        theta: the base; 500000 for Llama 3.
        scaling: changes the frequencies.
        dtype: float32, or float64 for float64 x.
        device: where the tables are returned; by default torch's.

    Returns:
        (cos, sin), each [P, E/2], contiguous.

    Raises:
        ValueError: numbers that do not make a table.

    Cost: computed on the CPU, 3 * 8 * P * E/2 bytes there.
    Numerics: in float64 and rounded once, so equal on every device. Angles in float32, as in Hugging Face's code, would
    be wrong by 0.004 at position 10**5.
    Source: Su et al., arXiv 2104.09864, section 3.4.3.
    """
    if num_positions < 1 or head_size < 2 or head_size % 2 or theta <= 0:
        raise ValueError(
            "rope's tables need at least 1 position, an even head size of at least 2, and theta above 0: "
            f"got {num_positions} positions, head size {head_size}, theta {theta}: pad the heads or correct the number"
        )
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device="cpu") / head_size
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = scaling(frequencies)
    angles = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None] * frequencies
    device = torch.get_default_device() if device is None else device
    amplitude = 1.0 if scaling is None else scaling.amplitude
    cos, sin = (table.mul_(amplitude).to(dtype).to(device) for table in (angles.cos(), angles.sin()))
    return cos, sin
