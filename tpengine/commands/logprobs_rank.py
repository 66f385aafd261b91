"""A rank of `tpengine logprobs`: what scoring needs of a rank, with weights as hugging_face reads them."""

from __future__ import annotations

from tpengine.config import Config
from tpengine.generation.scoring import ScoringRank
from tpengine.hugging_face.beginning import fill_model


def scoring_rank(config: Config, num_threads: int) -> ScoringRank:
    """Return what a started rank holds; see ScoringRank."""
    return ScoringRank(config, num_threads, fill_model)
