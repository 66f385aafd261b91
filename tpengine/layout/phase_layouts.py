"""The layout of each phase of a run: one, as far as the same model and gradient buffers serve them all. No torch."""

from __future__ import annotations

from tpengine.config import Config, Phase, Phases, num_shards_of
from tpengine.layout.step_plan import Layout, layout_of
from tpengine.plan import Residency


def phase_layouts(
    phases: Phases, residency: Residency | None = None, packs_gradients: bool | None = None
) -> tuple[Layout, ...]:
    """Return the layout of each phase.

    Layers are split for the sequences of the phase with the most tokens, so that each rank keeps its layers. In exact
    mode phases whose models are cut into other numbers of shards have other buckets.

    Args:
        phases: of the run.
        residency, packs_gradients: as layout_of.
    """
    longest = longest_of(phases)
    found: dict[int, Layout] = {}
    for phase in (longest, *phases):
        if cut_of(phase.config) not in found:
            found[cut_of(phase.config)] = layout_of(
                phase.config, residency, longest.config.train.seq_len, packs_gradients
            )
    return tuple(found[cut_of(phase.config)] for phase in phases)


def longest_of(phases: Phases) -> Phase:
    """Return the phase with the most tokens: layers are split for its sequences."""
    return max(phases, key=lambda phase: (phase.end_step - phase.first_step) * phase.tokens_per_step)


def cut_of(config: Config) -> int:
    """Return into how many shards exact mode cuts the model: phases with another number have another model."""
    return num_shards_of(config) if config.train.reduction == "exact" else 1
