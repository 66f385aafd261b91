"""Rung: pure. The file of a mixture: what it says, and one line for each mistake in it.

Shares of a mixture: exact after every block, without drift; every sample of a source occurs once.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.data import mixture as module
from tpengine.data.mixture import BLOCK, Mixture, SourceEntry, read_table

WEIGHTS = st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=12).map(tuple)
# Early blocks, and blocks after which a sum of rounding errors would show.
BLOCKS = st.integers(0, 3) | st.integers(10**6, 10**6 + 3) | st.integers(10**12, 10**12 + 3)


def table(tmp_path: Path, text: str) -> tuple[SourceEntry, ...]:
    (tmp_path / "mix.toml").write_text(text)
    return read_table(tmp_path / "mix.toml")


def test_a_table_of_sources(tmp_path: Path) -> None:
    text = """
    web = { path = "web/*.tokens", weight = 0.7 }
    [code-2]
    path = "code.tokens"
    weight = 1
    epochs = inf
    [seldom]
    path = "stdlib"
    weight = 0
    epochs = 2.5
    """
    assert table(tmp_path, text) == (
        SourceEntry("web", "web/*.tokens", 0.7, 1.0),
        SourceEntry("code-2", "code.tokens", 1.0, math.inf),
        SourceEntry("seldom", "stdlib", 0.0, 2.5),
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('web = { path = "a", wieght = 1 }', ["unknown key web.wieght: did you mean web.weight?"]),
        ('web = { path = "a", weight = -1 }', ["at least 0", "web.weight is -1"]),
        ('web = { path = "a", weight = nan }', ["web.weight is nan"]),
        ('web = { path = "a", weight = inf }', ["web.weight is inf"]),
        ('web = { path = "a", weight = "1" }', ["weight must be a number", "'1'"]),
        ('web = { path = "a", weight = true }', ["weight must be a number", "True"]),
        ('web = { path = "a" }', ["web.weight is None"]),
        ('a = { path = "a", weight = 0 }\nb = { path = "b", weight = 0.0 }', ["must not all be 0", "a, b"]),
        ('web = { path = "a", weight = 1, epochs = 0 }', ["web.epochs is 0", "inf", "weight = 0"]),
        ('web = { path = "a", weight = 1, epochs = -2 }', ["web.epochs is -2"]),
        ("web = { weight = 1 }", ["web.path is None", 'path = "web.tokens"']),
        ("web = { path = 3, weight = 1 }", ["web.path is 3"]),
        ("web = 3", ["web is 3", "must be a table"]),
        ("[[source]]\nweight = 1", ["source is [{'weight': 1}]", "must be a table"]),
        ('"a b" = { path = "a", weight = 1 }', ["'a b'", "rename"]),
        ("", ["got 0", "write a line for each"]),
        ("web = {", ["valid TOML"]),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        table(tmp_path, text)
    for part in [str(tmp_path / "mix.toml"), *parts]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data.mixture needs a readable file: .*absent.toml: No such file"):
        read_table(tmp_path / "absent.toml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="in UTF-8"):
        read_table(tmp_path / "bytes")
    many = "".join(f'a{number} = {{ path = "a", weight = 1 }}\n' for number in range(257))
    with pytest.raises(ValueError, match="1 to 256 sources: got 257"):
        table(tmp_path, many)


def assert_shares(mixture: Mixture, num_blocks: int) -> None:
    n, counts = num_blocks * mixture.block, mixture.counts_at(num_blocks)
    assert sum(counts) == n
    for count, share in zip(counts, mixture.shares, strict=True):
        assert abs(count - share * n) < 1


@settings(max_examples=300, deadline=None)
@given(weights=WEIGHTS, num_blocks=BLOCKS, seed=st.integers(0, 5))
def test_counts_keep_to_the_weights_after_every_block(weights: tuple[float, ...], num_blocks: int, seed: int) -> None:
    mixture = Mixture(weights, seed)
    assert mixture.shares[0] == Fraction(repr(weights[0])) / sum(Fraction(repr(weight)) for weight in weights)
    assert_shares(mixture, num_blocks)
    before, after = mixture.counts_at(num_blocks), mixture.counts_at(num_blocks + 1)
    assert all(last >= first for first, last in zip(before, after, strict=True))


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, block=BLOCKS, seed=st.integers(0, 5))
def test_a_block_has_each_of_its_samples_once(weights: tuple[float, ...], block: int, seed: int) -> None:
    mixture = Mixture(weights, seed)
    first = block * mixture.block
    sources, numbers = mixture.place(np.arange(first, first + mixture.block))
    before, after = mixture.counts_at(block), mixture.counts_at(block + 1)
    for source in range(len(weights)):
        assert numbers[sources == source].tolist() == list(range(before[source], after[source]))
    # Any part of it, asked for by itself, is the same: there is no state.
    some = np.array([5, 700, 6, mixture.block - 1]) + first
    again = mixture.place(some)
    assert (again[0] == sources[some - first]).all() and (again[1] == numbers[some - first]).all()
    until = mixture.counts(first + 700)
    expected = [n + int((sources[:700] == k).sum()) for k, n in enumerate(before)]
    assert list(until) == expected


def test_orders_of_blocks_and_seeds_differ() -> None:
    def sources(seed: int, block: int) -> list[int]:
        return Mixture((1.0, 2.0, 1.0), seed).place(np.arange(block * BLOCK, (block + 1) * BLOCK))[0].tolist()

    assert sources(0, 0) != sources(0, 1) != sources(1, 1)
    # A source of a quarter is a quarter of each half of a block, about: they are mixed, not one after the other.
    assert 90 < sources(0, 0)[:512].count(0) < 166


def test_blocks_are_larger_where_a_source_is_rarer_than_one_in_1024() -> None:
    mixture = Mixture((1.0, 1e-5, 2e-5, 1.1e-5, 0.0), 0)
    assert mixture.block == 65536
    for block in range(40):
        assert_shares(mixture, block)
        before, after = mixture.counts_at(block), mixture.counts_at(block + 1)
        assert all(last >= first for first, last in zip(before, after, strict=True))


def test_two_sources_may_be_as_rare_as_they_like() -> None:
    for weights in ((1e-5, 1.0, 2e-5, 0.3), (0.3, 1.0, 1e-9, 1e-5), (1.0, 1e-7)):
        mixture = Mixture(weights, 0)
        assert mixture.block == BLOCK
        before = mixture.counts_at(0)
        for block in [*range(1, 400), 10**6, 10**6 + 1, 10**9, 10**9 + 1]:
            assert_shares(mixture, block)
            counts = mixture.counts_at(block)
            assert all(last >= first for first, last in zip(before, counts, strict=True))
            before = counts


def test_weights_count_as_they_are_written() -> None:
    # As binary numbers 0.1 and 0.7 are not these.
    mixture = Mixture((0.1, 0.7, 0.2), 0)
    assert mixture.shares == (Fraction(1, 10), Fraction(7, 10), Fraction(1, 5))
    assert mixture.counts_at(10**12)[1] == 7 * 1024 * 10**11


@pytest.mark.parametrize("weights", [(), (0.0, 0.0), (1.0, -2.0), (float("nan"),), (float("inf"), 1.0)])
def test_weights_that_are_none_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="weights of sources must be finite, at least 0 and not all 0"):
        Mixture(weights, 0)


def test_a_source_without_weight_is_never_read() -> None:
    for weights in ((0.0, 1.0, 2.0), (1.0, 0.0, 2.0), (1.0, 2.0, 0.0)):
        sources, _ = Mixture(weights, 0).place(np.arange(4 * BLOCK))
        assert set(sources.tolist()) == {place for place, weight in enumerate(weights) if weight}
    with pytest.raises(ValueError, match=r"two must give at least one sample of 1048576: .* leave a third 3\.0e-07"):
        Mixture((1.0, 1e-7, 2e-7, 3e-7), 0)


def test_shares_that_drift_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def floats(self: Mixture, num_blocks: int) -> tuple[int, ...]:
        """Each block's counts rounded by themselves, and added up: wrong by a sample every few blocks."""
        of_block = [round(float(share) * self.block) for share in self.shares]
        of_block[-1] = self.block - sum(of_block[:-1])
        return tuple(count * num_blocks for count in of_block)

    mixture = Mixture((0.3, 0.7), 0)
    assert_shares(mixture, 1000)
    monkeypatch.setattr(module.Mixture, "counts_at", floats)
    with pytest.raises(AssertionError):
        assert_shares(mixture, 1000)
