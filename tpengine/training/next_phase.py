"""Bring a run's state into another phase: weights and moments stay.

A phase that freezes other parameters has other buffers. In exact mode one whose micro-batches have another number of
tokens may cut the model into another number of shards. Then the model is built again at the border, and filled from a
copy on the host of what this rank held. What is trained from here on begins with moments of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from tpkernels.launch import accumulation_dtype

from tpengine.config import num_blocks
from tpengine.layout.parameters import Piece
from tpengine.layout.slices import boxes_of
from tpengine.layout.step_plan import cut_of
from tpengine.training.planned_run import PlannedPhase
from tpengine.training.train_state import TrainState


def enter_phase(state: TrainState, part: PlannedPhase) -> None:
    """Make another phase the state's own; collective where the phases cut the model differently."""
    config = part.config
    is_cut_alike = cut_of(config) == cut_of(state.part.config)
    held = {} if is_cut_alike else _copy_of(state)
    state.model.release()
    state.part = part
    if not is_cut_alike:
        state.build()
        _fill(state, held)
        return
    # A router's bias may be moved in one phase and stay in another, in the same buffers: note anew what stays.
    state.frozen_hashes = {}
    state.optimizer.use(config.optim, state.updates)
    if config.train.reduction == "exact":
        state.gradients.set_blocks(config.train.num_micro_batches, num_blocks(config) // state.rank.mesh.shape.dp)


_Held = dict[tuple[str, str], list[tuple[tuple[int, ...], Tensor]]]


def _copy_of(state: TrainState) -> _Held:
    """Return weights, masters and moments of this rank on the host: by kind and parameter, (offset, block); collective.

    Where replicas own slices, each gets the whole blocks from all: sums of bits to which the others add zeros.
    """
    found: _Held = {}
    for name, piece in state.model.pieces.items():
        offset, size = piece.block
        for kind, like, own in _tensors(state, name):
            whole = own
            if state.is_cut(name):
                bits = torch.int16 if like.itemsize == 2 else torch.int32
                flat = torch.zeros(piece_numel(piece), dtype=like.dtype, device=state.rank.device)
                if own is not None:
                    flat[state.elements_of(name)] = own.detach()
                # Between replicas, in words that add exactly; 16-bit words are widened, as not every library adds them.
                words = flat.view(bits).to(torch.int32)
                if (replicas := state.replicas_of(name)).size > 1:
                    dist.all_reduce(words, group=replicas.group)
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


def _tensors(state: TrainState, name: str) -> list[tuple[str, Tensor, Tensor | None]]:
    """Return (kind, a tensor of its dtype, what this rank owns of it or None) of a piece."""
    weight = state.model.held[name]
    gradient_dtype = accumulation_dtype(weight.dtype)
    if not weight.requires_grad:
        return [("", weight, state.frozen.get(name))]
    dtypes = {"": weight.dtype, **{kind: kept or gradient_dtype for kind, kept in state.optimizer.state_dtypes.items()}}
    if weight.dtype != gradient_dtype:
        dtypes["master"] = gradient_dtype
    if name not in state.weights:
        of: Mapping[str, Tensor | None] = dict.fromkeys(dtypes)
    else:
        of = {"": state.weights[name], **state.optimizer.state_of(name)}
    return [(kind, torch.empty(0, dtype=dtype), of[kind]) for kind, dtype in dtypes.items()]


def _fill(state: TrainState, held: _Held) -> None:
    """Fill a model that was built again with what this rank held."""
    updated = {parameter for kind, parameter in held if kind}
    with torch.no_grad():
        for name, piece in state.model.pieces.items():
            if name not in state.held:
                continue
            offset, size = piece.block
            part, is_thawed = state.elements_of(name), piece.spec.name not in updated
            for kind, _, own in _tensors(state, name):
                assert own is not None
                if kind and is_thawed:
                    continue
                source = _region(held[kind, piece.spec.name], offset, size)
                if part is None:
                    own.copy_(source)
                    continue
                for box in boxes_of(size, part):
                    chosen = tuple(slice(f, f + n) for f, n in zip(box.offset, box.size, strict=True))
                    own[box.within].view(box.size).copy_(source[chosen])
            if name in state.weights and is_thawed:
                state.begin_anew(name)


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
