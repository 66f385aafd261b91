"""Reading, computing and writing an architecture, broken on purpose: each a function that patches one place.

`broken(name)` holds for its block. Each mutation is one that a project has shipped, or nearly.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from tpkernels.ops.norm import operator

from tpengine.architectures.describe import ConfigJson
from tpengine.config.settings import RopeScaling
from tpengine.hugging_face.write import TensorToWrite
from tpengine.layers import attention, bias, norm, width_norm
from tpengine.layers.query_scaling import QueryScaling
from tpengine.layers.scores import Rotation, rope, tables_of
from tpengine.layout.parameters import EMBEDDING, HEAD, ParameterSpec
from tpengine.layout.stored import FileBox, Stored
from tpengine.model import block

# The package names a function of the same name.
export = importlib.import_module("tpengine.commands.weights")


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Break what the function of that name here breaks, until the block ends; `control` breaks nothing."""
    with globals()[name]():
        yield


def control() -> Any:
    """Break nothing."""
    return patch.object(attention, "rope", rope)


def rotated_in_the_other_convention() -> Any:
    """Pairs are (2i, 2i + 1) instead of (i, i + E/2), of queries and keys alike."""

    def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)

    return patch.object(attention, "rope", interleaved)


def default_theta_taken() -> Any:
    """The base is 10000, whatever config.json says."""
    read = ConfigJson.rope
    return patch.object(ConfigJson, "rope", lambda *of, **named: (10000.0, read(*of, **named)[1]))


def rope_scaling_dropped() -> Any:
    """Frequencies are not scaled, whatever config.json says."""
    read = ConfigJson.rope
    return patch.object(ConfigJson, "rope", lambda *of, **named: (read(*of, **named)[0], RopeScaling()))


def attention_factor_dropped() -> Any:
    """Yarn's frequencies without the factor of its tables, 0.1 ln(factor) + 1."""
    read = ConfigJson.rope

    def without_factor(*of: Any, **named: Any) -> tuple[float, RopeScaling]:
        theta, scaling = read(*of, **named)
        return theta, replace(scaling, attention_factor=1.0)

    return patch.object(ConfigJson, "rope", without_factor)


def queries_rotated_one_position_late() -> Any:
    """Only the distance of a query from a key counts: a shift of both would change nothing."""
    rotate, seen = rope, []

    def late(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        seen.append(x)
        # Queries come first, then keys.
        is_query = len(seen) % 2 == 1
        return rotate(x, cos.roll(1, 0), sin.roll(1, 0)) if is_query else rotate(x, cos, sin)

    return patch.object(attention, "rope", late)


@contextmanager
def long_factors_dropped() -> Iterator[None]:
    """Of longrope the short factors are taken, however long a sequence is."""
    tables_of.cache_clear()
    with patch.object(Rotation, "scaling_of", lambda rotation, seq: rotation.scaling):
        yield
    tables_of.cache_clear()


def queries_do_not_grow() -> Any:
    """Queries far from the beginning are as those near it."""
    return patch.object(QueryScaling, "factors", lambda scaling, seq, like: None)


def multipliers_dropped() -> Any:
    """What halves add is added as it is."""
    return patch.object(block, "scaled", lambda x, factor: x)


def squares_of_own_heads() -> Any:
    """A norm over all heads is one over the rank's own, as if there were no others."""
    return patch.object(width_norm, "of_all_ranks", lambda x, comm: x.repeat(comm.size, 1, 1))


def learned_positions_shifted_by_one() -> Any:
    """A token gets the row behind its own."""
    apply = bias._AddPositions.apply
    moved = {"apply": staticmethod(lambda x, w, at, *rest: apply(x, w, (at + 1) % len(w), *rest))}
    shifted = type("Shifted", (), moved)
    return patch.object(bias, "_AddPositions", shifted)


def layer_norm_bias_missing() -> Any:
    """LayerNorm scales, and does not shift; its bias still has a gradient."""
    forward = operator.norm_forward

    def without(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        return forward(x, weight, None if bias is None else torch.zeros_like(bias), *rest)

    return patch.object(norm, "norm_forward", without)


def q_norm_not_summed_over_tp() -> Any:
    """Each rank keeps the gradient of its own heads."""
    of: Any = vars(ParameterSpec)["reduce_over"]
    own = property(lambda spec: ("dp",) if spec.name.endswith("q_norm.weight") else of.fget(spec))
    return patch.object(ParameterSpec, "reduce_over", own)


def packed_cut_as_one_block() -> Any:
    """A rank reads one block of the packed tensor, as if q, k and v were not parts of it that are cut each."""
    box_of = Stored.file_box

    def one_block(stored: Stored, offset: tuple[int, ...], size: tuple[int, ...]) -> FileBox:
        begin, end = stored.row_range
        if (begin, end) == (0, stored.num_file_rows):
            return box_of(stored, offset, size)
        rank, num_ranks, number = offset[0] // size[0], (end - begin) // size[0], begin // (end - begin)
        first = rank * (stored.num_file_rows // num_ranks) + number * size[0]
        return box_of(replace(stored, rows=None), (first, *offset[1:]), size)

    return patch.object(Stored, "file_box", one_block)


def padding_exported() -> Any:
    """Tables by vocabulary are written with the rows that were added to divide them."""
    written = export.tensors_to_write

    def padded(parts: Any, dtypes: Any) -> list[TensorToWrite]:
        found = []
        for tensor in written(parts, dtypes):
            if tensor.name.endswith(("embed_tokens.weight", "lm_head.weight")):
                rows = -(-tensor.shape[0] // 8) * 8
                more = torch.zeros(rows - tensor.shape[0], *tensor.shape[1:])
                blocks = tensor.blocks
                tensor = replace(
                    tensor,
                    shape=(rows, *tensor.shape[1:]),
                    blocks=lambda blocks=blocks, more=more: [*blocks(), more],
                )
            found.append(tensor)
        return found

    return patch.object(export, "tensors_to_write", padded)


def head_exported_from_the_first_stage() -> Any:
    """The head is read from the table of the first stage, which it is not tied to."""
    name_of = export.hf_name
    return patch.object(export, "hf_name", lambda name: name_of(EMBEDDING if name == HEAD else name))
