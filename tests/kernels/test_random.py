"""Rung: pure. The counter-based generator: known answers, cuts, statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tpkernels.random import normal, normal_block, philox_4x32, random_words, uniform

# Known answers published with Random123 (kat_vectors, philox4x32 with 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], answer: str) -> None:
    words = philox_4x32([torch.tensor([word]) for word in counter], key)
    assert " ".join(f"{int(word):08x}" for word in words) == answer


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_a_block_is_cut_from_the_global_tensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, 70)) for _ in range(data.draw(st.integers(1, 2))))
    shape += tuple(data.draw(st.sets(st.integers(1, 7), max_size=1))) if len(shape) == 2 else ()
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    whole = normal_block(3, "w", shape, (0,) * len(shape), shape, std=0.02)
    block = normal_block(3, "w", shape, offset, size, std=0.02)
    cut = whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
    assert torch.equal(block, cut)


def test_large_blocks_are_drawn_piecewise_without_seams() -> None:
    whole = normal_block(0, "w", (300, 257), (0, 0), (300, 257), dtype=torch.float64)
    index = torch.arange(300 * 257).view(300, 257)
    assert torch.equal(whole, normal(0, "w", index))


def test_indices_beyond_32_bits_differ() -> None:
    low = random_words(0, "w", torch.tensor([5]))
    high = random_words(0, "w", torch.tensor([5 + 2**32]))
    assert not any(torch.equal(a, b) for a, b in zip(low, high, strict=True))


def test_streams_are_independent() -> None:
    index = torch.arange(20000)
    streams = [normal(seed, name, index) for seed, name in ((0, "a"), (0, "b"), (1, "a"))]
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(3)
    assert correlation.abs().max() < 5 / math.sqrt(20000)


def test_normal_has_the_moments_it_states() -> None:
    n = 1_000_000
    z = normal(7, "moments", torch.arange(n))
    # five standard errors of each moment
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((z**4).mean() - (3 - 0.15)) < 5 * math.sqrt(96 / n)
    assert z.abs().max() <= 8 * 32767.5 / math.sqrt(8 * (65536**2 - 1) / 12)


def test_uniform_is_open_and_flat() -> None:
    u = uniform(1, "u", torch.arange(200_000))
    assert u.min() > 0 and u.max() < 1
    counts = torch.histc(u, bins=20, min=0, max=1)
    chi_square = ((counts - 10_000).square() / 10_000).sum()
    assert chi_square < 50  # 19 degrees of freedom: exceeded with probability 1e-4


@pytest.mark.parametrize(
    ("shape", "offset", "size"), [((4,), (3,), (2,)), ((4, 4), (0, -1), (1, 1)), ((2,) * 4, (0,) * 4, (1,) * 4)]
)
def test_a_block_outside_its_tensor_is_refused(
    shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="must lie inside its tensor"):
        normal_block(0, "w", shape, offset, size)
