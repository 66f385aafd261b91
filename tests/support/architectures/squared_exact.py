"""The exact form of squared.py: its layer over each shard, their outputs added in a tree."""

from __future__ import annotations

from support.architectures.squared import Squared
from tpengine.layers.dropout import Dropout
from tpengine.model.exact import ExactMatmuls, collect
from tpengine.model.parts import ExactParts


def exact_squared(part: Squared, parts: ExactParts, dropout: Dropout | None) -> ExactMatmuls:
    """Make the layer: what Squared.exact_layer names."""
    return ExactMatmuls(parts.shards, [each.layer(part, dropout) for each in parts.each], collect)
