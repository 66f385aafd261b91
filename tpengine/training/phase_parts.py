"""What a trainer has for each phase of a run, and how it goes from one to the next.

All phases are planned and verified before the first step. A phase has its own plan, batch, transfers and executor. The
groups, arenas and mailbox are made once, for the largest phase, and so are model, gradient buffers and optimizer. In
exact mode a phase whose micro-batches have another number of tokens may cut the model into another number of shards.
Then the model is built again at the border, and filled from a copy on the host of what this rank held.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from tpengine.config import Config, Phase, Phases, num_blocks
from tpengine.data import Corpus, for_phase
from tpengine.distributed.process import differing_ranks
from tpengine.layout.parameters import Piece
from tpengine.layout.phase_layouts import cut_of, phase_layouts
from tpengine.layout.slices import boxes_of
from tpengine.layout.step_plan import Layout, training_plan
from tpengine.plan import Plan, Residency

if TYPE_CHECKING:
    from tpengine.training.trainer import Trainer


@dataclass(frozen=True)
class PhasePart:
    """A phase, ready to be run.

    Attributes:
        phase, layout, plan: the phase, and its verified plan.
        corpus: its text.
    """

    phase: Phase
    layout: Layout
    plan: Plan
    corpus: Corpus

    @property
    def config(self) -> Config:
        """Of the phase."""
        return self.phase.config


def planned(
    phases: Phases,
    corpus: Corpus,
    corpora: Sequence[Corpus] | None,
    residency: Residency | None,
    packs_gradients: bool,
) -> tuple[PhasePart, ...]:
    """Plan and verify every phase.

    Args:
        phases: of the run.
        corpus: its text.
        corpora: of each phase; None takes `corpus`.
        residency, packs_gradients: as layout_of.
    """
    if corpora is None:
        corpora = [for_phase(corpus, phase) if len(phases) > 1 else corpus for phase in phases]
    layouts = phase_layouts(phases, residency, packs_gradients)
    return tuple(
        PhasePart(phase, layout, training_plan(phase.config, layout), text)
        for phase, layout, text in zip(phases, layouts, corpora, strict=True)
    )


def difference_of_ranks(parts: Sequence[PhasePart], device: torch.device) -> str:
    """Compare plan, configuration and text over all ranks: nodes may differ in version, flags or files; collective.

    Returns:
        What differs, in one line, the same on all ranks; empty if nothing does.
    """
    plans = " ".join(part.plan.digest() for part in parts)
    settings = json.dumps([asdict(_anywhere(part.config)) for part in parts])
    mine = (plans, settings, " ".join(part.corpus.fingerprint() for part in parts))
    for name, value in zip(("plan", "configuration", "text"), mine, strict=True):
        if differing := differing_ranks(value, device):
            return (
                f"all ranks must have the same {name}: ranks {differing} differ from rank 0: start every rank with "
                "the same version, command line and data"
            )
    return ""


def _anywhere(config: Config) -> Config:
    """Return a configuration without the places of files whose content is compared otherwise."""
    return replace(config, run_dir="", phases="", data=replace(config.data, mixture=""))


def largest(phases: Phases) -> Config:
    """Return the configuration of the phase whose micro-batches have the most tokens: arenas are made for it."""
    return max(phases, key=lambda phase: phase.config.train.micro_batch_size * phase.config.train.seq_len).config


def enter_phase_of(trainer: Trainer, step: int) -> bool:
    """Enter the phase of a step, if it is another; collective.

    Returns:
        Whether it is another.
    """
    phase = trainer.phases.at(step)
    if phase.number == trainer.phase.number:
        return False
    trainer.activity.begin("entering the next phase")
    is_cut_alike = cut_of(phase.config) == cut_of(trainer.config)
    held = {} if is_cut_alike else _copy_of(trainer)
    trainer.enter(phase.number)
    if not is_cut_alike:
        trainer.build()
        _fill(trainer, held)
    elif trainer.config.train.reduction == "exact":
        config = trainer.config
        blocks = num_blocks(config) // trainer.mesh.shape.dp
        trainer.gradients.set_blocks(config.train.num_micro_batches, blocks)
    trainer.run_phase()
    return True


_Held = dict[tuple[str, str], list[tuple[tuple[int, ...], Tensor]]]


def _copy_of(trainer: Trainer) -> _Held:
    """Return weights, masters and moments of this rank on the host: by kind and parameter, (offset, block); collective.

    Where replicas own slices, each gets the whole blocks from all: sums of bits to which the others add zeros.
    """
    found: _Held = {}
    for name, piece in trainer.model.pieces.items():
        offset, size = piece.block
        for kind, like, own in _tensors(trainer, name):
            whole = own
            if trainer.sliced is not None:
                bits = torch.int16 if like.itemsize == 2 else torch.int32
                flat = torch.zeros(piece_numel(piece), dtype=like.dtype, device=trainer.device)
                if own is not None:
                    flat[trainer.sliced.parts[name].in_tensor] = own.detach()
                # Between replicas, in words that add exactly; 16-bit words are widened, as not every library adds them.
                words = flat.view(bits).to(torch.int32)
                if trainer.mesh.shape.dp > 1:
                    dist.all_reduce(words, group=trainer.mesh.dp)
                whole = words.to(bits).view(like.dtype).view(size)
            assert whole is not None
            found.setdefault((kind, piece.spec.name), []).append((offset, whole.detach().cpu().clone()))
    return found


def piece_numel(piece: Piece) -> int:
    """Return the elements of a piece."""
    number = 1
    for size in piece.block[1]:
        number *= size
    return number


def _tensors(trainer: Trainer, name: str) -> list[tuple[str, Tensor, Tensor | None]]:
    """Return (kind, a tensor of its dtype, what this rank owns of it or None) of a piece."""
    gradient_dtype = next(iter(trainer.gradients.of.values())).dtype if trainer.gradients.of else torch.float32
    weight = trainer.model.held[name]
    kinds = ["", "exp_avg", "exp_avg_sq", *(["master"] if weight.dtype != gradient_dtype else [])]
    if name not in trainer.weights:
        of: Mapping[str, Tensor | None] = dict.fromkeys(kinds)
    else:
        of = {"": trainer.weights[name], **trainer.optimizer.state_of(name)}
    like = torch.empty(0, dtype=gradient_dtype)
    return [(kind, weight if kind == "" else like, of[kind]) for kind in kinds]


def _fill(trainer: Trainer, held: _Held) -> None:
    """Fill a model that was built again with what this rank held."""
    with torch.no_grad():
        for name, piece in trainer.model.pieces.items():
            if name not in trainer.weights:
                continue
            offset, size = piece.block
            part = None if trainer.sliced is None else trainer.sliced.parts[name].in_tensor
            for kind, _, own in _tensors(trainer, name):
                assert own is not None
                source = _region(held[kind, piece.spec.name], offset, size)
                if part is None:
                    own.copy_(source)
                    continue
                for box in boxes_of(size, part):
                    chosen = tuple(slice(f, f + n) for f, n in zip(box.offset, box.size, strict=True))
                    own[box.within].view(box.size).copy_(source[chosen])


def _region(blocks: Sequence[tuple[tuple[int, ...], Tensor]], offset: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return a region of a tensor, put together from blocks that cover it."""
    result = torch.empty(tuple(size), dtype=blocks[0][1].dtype)
    for first, block in blocks:
        low = [max(a, b) for a, b in zip(first, offset, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(first, block.shape, offset, size, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            to = tuple(slice(a - b, c - b) for a, b, c in zip(low, offset, high, strict=True))
            of = tuple(slice(a - b, c - b) for a, b, c in zip(low, first, high, strict=True))
            result[to] = block[of]
    return result
