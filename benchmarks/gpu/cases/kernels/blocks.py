"""The case that times three block sizes of each kernel that only moves memory, and whose blocks no GPU has chosen.

Each kernel's file chooses its block by a function of sizes; here that function's answer is changed. The shares are of a
large copy's speed in the same run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from tpkernels.ops.cross_entropy import kernel as cross_entropy

from benchmarks.gpu.cases.clock import agreement, device_here, medians, write
from benchmarks.gpu.cases.kernels.tiles import MODELS_BY_NAME
from benchmarks.harness.shapes import Model
from benchmarks.harness.timing import PASSED
from benchmarks.kernels.timing import measure_ceilings

Block = Mapping[str, int]


class Operator(NamedTuple):
    """What is timed with several blocks.

    Attributes:
        name: in rows.
        blocks: keywords of a launch, which take the place of the present ones.
        changed: makes calls take a block while its context is open.
        call: launches, and returns what it has written.
        num_bytes: that the call must move at least.
        restore: undoes what a call has overwritten, before a result is compared.
    """

    name: str
    blocks: Sequence[Block]
    changed: Callable[[Block], AbstractContextManager[None]]
    call: Callable[[], Sequence[Tensor]]
    num_bytes: int
    restore: Callable[[], object]


def measure(rows: Path, model: str, tokens: int, rounds: int = 10) -> int:
    """Time every block of every operator; return 1 if a result is another one.

    Args:
        rows: a row for each operator, with the time and the share of a copy's speed of each block.
        model: sizes.
        tokens: of a micro-batch.
        rounds: samples.
    """
    device, is_wrong = device_here(), False
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copy = measure_ceilings(device.type, dtype)["copy"]
    for one in operators(MODELS_BY_NAME[model], tokens, device, dtype):
        calls: dict[str, Callable[[], Sequence[Tensor]]] = {"present": one.call}
        for block in one.blocks:
            name = "_".join(f"{key}_{value}".lower() for key, value in block.items())
            calls[name] = functools.partial(_with, one, block)
        checks = [agreement(_results(one, one.call), _results(one, call)) for call in calls.values()]
        check = next((check for check in checks if check != PASSED), PASSED)
        fields: dict[str, Any] = {"num_samples": rounds}
        if check == PASSED:
            for name, spread in medians(calls, device, rounds).items():
                fields[f"{name}_us"] = 1e6 * spread.median
                fields[f"{name}_of_copy_percent"] = 100 * one.num_bytes / spread.median / copy
        write(rows, f"blocks/{one.name}", fields, check)
        is_wrong |= check != PASSED
    return int(is_wrong)


def _results(one: Operator, call: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    one.restore()
    return [t.clone() for t in call()]


def _with(one: Operator, block: Block) -> Sequence[Tensor]:
    with one.changed(block):
        return one.call()


def operators(model: Model, tokens: int, device: torch.device, dtype: torch.dtype) -> Iterator[Operator]:
    """Yield the operators at the sizes of a micro-batch."""
    generator = torch.Generator(device).manual_seed(0)
    # As many tokens as the loss takes at a time.
    sizes = max(1, tokens // 8), model.vocabulary
    yield from _cross_entropy(torch.randn(sizes, generator=generator, device=device).to(dtype))


def _cross_entropy(logits: Tensor) -> Iterator[Operator]:
    tokens, vocabulary = logits.shape
    original, labels = logits.clone(), torch.zeros(tokens, dtype=torch.int64, device=logits.device)
    blocks = [
        {"BLOCK_ROWS": 1, "BLOCK_COLUMNS": columns, "num_warps": warps}
        for columns, warps in ((2048, 4), (4096, 16), (8192, 16))
    ]
    slopes = torch.full((tokens,), 1 / tokens, device=logits.device)

    def partials() -> list[Tensor]:
        return [cross_entropy.launch_cross_entropy_partials(logits, labels, 0, vocabulary)]

    (found,) = partials()

    def gradient() -> list[Tensor]:
        cross_entropy.launch_cross_entropy_gradient_(
            logits, labels, found[0], found[1], slopes, vocabulary, 0, vocabulary, 0.0, 0.0
        )
        return [logits]

    num_bytes, restore = logits.element_size() * logits.numel(), functools.partial(logits.copy_, original)
    changed = functools.partial(_chosen_by, cross_entropy, "_block")
    yield Operator("cross_entropy", blocks, changed, partials, num_bytes, restore)
    yield Operator("cross_entropy_gradient", blocks, changed, gradient, 2 * num_bytes, restore)


@contextmanager
def _chosen_by(module: ModuleType, name: str, block: Block) -> Iterator[None]:
    """Change the answer of the module's function that returns a block; somebody must have asked it."""
    present, asked = getattr(module, name), []

    def chosen(*sizes: Any) -> dict[str, int]:
        asked.append(sizes)
        return {**present(*sizes), **block}

    with patch.object(module, name, chosen):
        yield
    assert asked, f"nobody has asked {module.__name__} for a block"
