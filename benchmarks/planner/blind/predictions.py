"""The layouts that the blind proof compares, and what is predicted of each."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tpengine.config import Config, ModelConfig, validate
from tpengine.files import write_beside
from tpengine.planner.advice.question import Candidate, Question, candidates, shapes
from tpengine.planner.advice.sheets import Sheet
from tpengine.planner.machine import Machine
from tpengine.planner.modelled.memory import ALLOCATOR_SHARE


@dataclass(frozen=True)
class Prediction:
    """A layout of a model, and what was predicted before it ran.

    Attributes:
        model, config, words: whose, and the layout in words.
        seconds: of a step.
        peak_bytes: the most that each pipeline rank holds.
    """

    model: str
    config: Config
    words: str
    seconds: float
    peak_bytes: tuple[float, ...]

    @property
    def name(self) -> str:
        """The name of the layout within the proof."""
        return f"{self.model}: {self.words}"


def predicted(
    machine: Machine, models: Mapping[str, Config], num_ranks: int, global_batch: int, most: int | None = None
) -> Iterator[Prediction]:
    """Yield every layout that is compared, with its prediction.

    Args:
        machine: predicts.
        models: by name, with the length of a sequence and the device.
        num_ranks, global_batch: of each.
        most: so many layouts of each model; default all.
    """
    for name, config in models.items():
        question = Question(config, machine, num_ranks, global_batch)
        for layout in chosen(question, most):
            sheet = Sheet.of(layout.config(question), machine)
            peaks = tuple(rank.peak_bytes for rank in sheet.timeline.ranks)
            yield Prediction(name, sheet.config, layout.words(), sheet.seconds, peaks)


def fits(of: Prediction, machine: Machine) -> bool:
    """Return whether a layout fits the machine's memory, where that is known, beside what the allocator needs."""
    return not machine.memory_bytes or max(of.peak_bytes) <= (1 - ALLOCATOR_SHARE) * machine.memory_bytes


def drawn_model(seed: int) -> ModelConfig:
    """Return a model that nobody has chosen."""
    drawn = random.Random(seed)
    heads = drawn.choice((4, 6))
    return ModelConfig(
        hidden_size=64 * heads,
        num_layers=drawn.choice((4, 6)),
        num_heads=heads,
        num_kv_heads=heads,
        ffn_size=32 * drawn.randint(16, 40),
    )


def chosen(question: Question, most: int | None = None) -> list[Candidate]:
    """Return the layouts that are compared: each axis by itself, over numbers of micro-batches and settings.

    Raises:
        ValueError: none of these is a layout of the question.
    """
    every = [layout for shape in shapes(question) for layout in candidates(question, shape)]
    found = [layout for layout in every if _is_compared(layout) and _is_legal(layout, question)]
    if not found:
        raise ValueError(
            f"a proof needs layouts: none of {question.num_ranks} ranks and a global batch of {question.global_batch} "
            "has 2 to 16 micro-batches: use --ranks 2 --global-batch 16"
        )
    if most is None or most >= len(found):
        return found
    return [found[number * len(found) // most] for number in range(most)]


def _is_compared(layout: Candidate) -> bool:
    number, again = layout.num_micro_batches, layout.recompute
    if not 2 <= number <= 16 or layout.gathered != "keep" or layout.tp_comm != "fused" or layout.chunks_per_rank > 2:
        return False
    if layout.tp * layout.pp * layout.dp == 1:
        return again != "full"
    if again != "none":
        # Recomputation once for each axis.
        return number == 4 and layout.zero == 0 and layout.schedule in ("1f1b", "gpipe")[: 1 + (layout.pp == 1)]
    if layout.dp > 1 and layout.residency == "use":
        return number == 4
    return layout.pp == 1 or number >= 4


def _is_legal(layout: Candidate, question: Question) -> bool:
    config = layout.config(question)
    try:
        validate(config, question.num_ranks)
    except ValueError:
        return False
    return True


def written(path: Path, predictions: Sequence[Prediction], seed: int) -> str:
    """Write the predictions, and return the file's hash; a file that is there must say the same."""
    rows = [
        {"model": of.model, "layout": of.words, "seconds": of.seconds, "peak_bytes": of.peak_bytes}
        | {"sizes": asdict(of.config.model)}
        for of in predictions
    ]
    text = json.dumps({"seed": seed, "predictions": rows}, indent=1).encode()
    if path.exists() and path.read_bytes() != text:
        raise ValueError(f"--dir has other predictions: {path}: name a new directory, or use the same options")
    write_beside(path, text)
    return hashlib.sha256(text).hexdigest()
