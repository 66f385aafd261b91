"""Experts that are a plain loop over all tokens (looped_layer.py), and configurations of them: layouts, not speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from tpengine.architectures.describe import Experts
from tpengine.config import Config, validate
from tpengine.config.settings import ModelDetails
from tpengine.trust import permit_file

ARCHITECTURE_FILE = Path(__file__).with_name("looped_architecture.py")


@dataclass(frozen=True)
class LoopedExperts(Experts):
    """Experts as they are described, of another layer."""

    layer: ClassVar[str] = "support.architectures.looped_layer:looped"


def permit_looped() -> None:
    """Permit their architecture in this process."""
    permit_file(ARCHITECTURE_FILE)


def with_experts(config: Config, ep: int = 1, num_experts: int = 8) -> Config:
    """Return a configuration whose layers but the first have experts of which a token chooses 2, shared by ep ranks."""
    permit_looped()
    details = ModelDetails(
        num_experts=num_experts,
        experts_per_token=2,
        expert_ffn_size=24,
        has_experts=tuple(layer > 0 for layer in range(config.model.num_layers)),
        normalizes_scores=True,
    )
    model = replace(config.model, architecture=str(ARCHITECTURE_FILE), details=details)
    parallel = replace(config.parallel, ep=ep)
    assert parallel.tp and parallel.pp and parallel.dp, "resolve the layout first: config.validate"
    return validate(replace(config, model=model, parallel=parallel), parallel.tp * parallel.pp * parallel.dp)
