"""A rank of `tpengine generate`: what generation needs of a rank, with weights as hugging_face reads them."""

from __future__ import annotations

from tpengine.config import Config
from tpengine.generation.rank import GeneratingRank
from tpengine.generation.text import Drawing
from tpengine.hugging_face.beginning import fill_model


def generating_rank(
    config: Config, prompts: list[list[int]], room: int, drawing: Drawing, num_threads: int
) -> GeneratingRank:
    """Return what a started rank holds; see GeneratingRank."""
    return GeneratingRank(config, prompts, room, drawing, num_threads, fill_model)
