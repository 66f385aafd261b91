"""Rung: pure. Sums over blocks of micro-batches have the bits of a recursive tree, in the buffers that were counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpengine.config.exact_sizes import num_gradient_buffers
from tpengine.data_parallel.buckets import BlockSums


def gradient(step: int, microbatch: int, numel: int) -> Tensor:
    """Return elements of very different sizes, so that every order of additions gives other bits."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-4, 5, (numel,), generator=generator)


def tree(terms: list[Tensor]) -> Tensor:
    """Halve, add each half by itself, then both."""
    half = len(terms) // 2
    return terms[0] if not half else tree(terms[:half]) + tree(terms[half:])


def in_order(terms: list[Tensor]) -> Tensor:
    total = torch.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


@pytest.mark.parametrize("per_block", [1, 3])
@pytest.mark.parametrize("num_blocks", [1, 2, 4, 8])
def test_the_total_has_the_bits_of_a_recursive_tree(num_blocks: int, per_block: int) -> None:
    """Two buckets over two steps."""
    flat = {3: torch.zeros(65), 7: torch.zeros(1)}
    sums = BlockSums(flat, num_blocks)
    num_micro_batches = num_blocks * per_block
    for step in range(2):
        sums.begin()
        for index, buffer in flat.items():
            buffer.zero_()
            for microbatch in range(num_micro_batches):
                buffer += gradient(step, microbatch, buffer.numel())
                if (microbatch + 1) % per_block == 0:
                    sums.end_block(index)
                    assert microbatch + 1 == num_micro_batches or not buffer.any(), "the next block starts at zero"
        for buffer in flat.values():
            terms = [gradient(step, microbatch, buffer.numel()) for microbatch in range(num_micro_batches)]
            blocks = [in_order(terms[i : i + per_block]) for i in range(0, len(terms), per_block)]
            assert torch.equal(buffer, tree(blocks))
            if num_blocks > 2 and buffer.numel() > 1:
                assert not torch.equal(buffer, in_order(terms)), "the case tells orders apart"


def test_buckets_may_end_their_blocks_at_different_times() -> None:
    """The one whose reduction is started inside the last backward pass ends its last block before the other does."""
    flat = {0: torch.zeros(9), 1: torch.zeros(9)}
    sums = BlockSums(flat, 4)
    for microbatch in range(4):
        for index in (0, 1) if microbatch % 2 else (1, 0):
            flat[index] += gradient(index, microbatch, 9)
            sums.end_block(index)
    for index, buffer in flat.items():
        assert torch.equal(buffer, tree([gradient(index, microbatch, 9) for microbatch in range(4)]))


@pytest.mark.parametrize("num_blocks", [1, 2, 4, 8])
def test_as_many_buffers_as_the_memory_account_says(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    flat = {0: torch.zeros(10), 1: torch.zeros(6)}
    made: list[int] = []
    new_empty = Tensor.new_empty

    def counted(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        tensor = new_empty(self, *args, **kwargs)  # type: ignore[call-overload]
        made.append(tensor.numel())
        return tensor

    monkeypatch.setattr(Tensor, "new_empty", counted)
    sums = BlockSums(flat, num_blocks)
    assert 16 + sum(made) == 16 * num_gradient_buffers(num_blocks)
    for _ in range(num_blocks):
        sums.end_block(0)
    assert 16 + sum(made) == 16 * num_gradient_buffers(num_blocks), "none is made during a step"


def test_a_block_too_many_is_a_bug_and_said_so() -> None:
    sums = BlockSums({4: torch.zeros(1), 5: torch.zeros(1)}, 2)
    for _ in range(2):
        sums.end_block(4)
    with pytest.raises(AssertionError, match="bucket 4 has had all its 2 blocks"):
        sums.end_block(4)
    sums.end_block(5)
    sums.begin()
    sums.end_block(4)


@pytest.mark.parametrize("num_blocks", [3, 6, 12])
def test_blocks_are_a_power_of_two(num_blocks: int) -> None:
    with pytest.raises(AssertionError, match=f"{num_blocks} blocks are no power of two"):
        BlockSums({0: torch.zeros(1)}, num_blocks)
