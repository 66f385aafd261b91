"""Rung: host. The tables of rotary position embedding, and what scales their frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from tpkernels.ops.rope_tables import Llama3Scaling, rope_tables


def transformers_frequencies(theta: float, head_size: int, scaling: Llama3Scaling) -> Tensor:
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = transformers.LlamaConfig(
        head_dim=head_size,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        },
    )
    frequencies, attention_factor = utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert attention_factor == 1
    return frequencies


@pytest.mark.parametrize("scaling", [Llama3Scaling(), Llama3Scaling(32.0, 2.0, 3.0, 4096)])
def test_llama_3_scaling_is_transformers(scaling: Llama3Scaling) -> None:
    theirs = transformers_frequencies(500000.0, 128, scaling)
    plain = 500000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    ours = scaling(plain)
    # Theirs is in float32: rounding the exponent, below 1, turns the power by log(theta) roundings, and a handful of
    # operations follow; between the two bounds their difference makes the roundings of `turns` larger.
    between = scaling.high_frequency_factor - scaling.low_frequency_factor
    roundings = (math.log(500000.0) + 8) * max(1, scaling.high_frequency_factor / between)
    torch.testing.assert_close(theirs.double(), ours, rtol=roundings * 2**-24, atol=0)
    # All three kinds of pair are there: kept, divided, between.
    ratio = ours / plain
    assert ratio[0] == 1 and ratio[-1] == 1 / scaling.factor and ((ratio < 1) & (ratio > 1 / scaling.factor)).any()


def test_tables() -> None:
    cos, sin = rope_tables(50, 6, 100.0)
    assert cos.shape == sin.shape == (50, 3) and cos.dtype == sin.dtype == torch.float32
    for position, i in ((0, 0), (49, 0), (49, 2), (7, 1)):
        angle = position * 100.0 ** (-2 * i / 6)
        expected = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        assert torch.equal(torch.stack([cos[position, i], sin[position, i]]), expected.float())
    wide = rope_tables(50, 6, 100.0, dtype=torch.float64)
    assert torch.equal(wide[0].float(), cos) and torch.equal(wide[1].float(), sin)
    scaled = rope_tables(9, 64, scaling=Llama3Scaling(2.0, 1.0, 4.0, 64))
    assert torch.equal(scaled[0][:, 0], rope_tables(9, 64)[0][:, 0])  # ten turns in 64 tokens: kept
    assert torch.equal(scaled[1][2::2, -1], rope_tables(9, 64)[1][1:5, -1])  # far less than one: half as fast
    with torch.device("meta"):
        assert rope_tables(3, 4)[0].device.type == "meta"
    assert rope_tables(3, 4, device="cpu")[0].device.type == "cpu"


def test_numbers_that_make_no_table_are_refused() -> None:
    for arguments in ((0, 8), (3, 7), (3, 0), (3, 8, -1.0)):
        with pytest.raises(ValueError, match=r"even head size .* got .*: pad the heads"):
            rope_tables(*arguments)
    for numbers in ((8.0, 4.0, 4.0), (0.5,), (8.0, 1.0, 4.0, 0), (8.0, 0.0)):
        with pytest.raises(ValueError, match="0 < low_frequency_factor < high_frequency_factor"):
            Llama3Scaling(*numbers)
