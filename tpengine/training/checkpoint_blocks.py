"""A run's state as blocks of global tensors, as checkpoints hold it, under Hugging Face's Llama names.

    model.layers.0.self_attn.q_proj.weight             in the training dtype, vocabulary padding left out
    optimizer.exp_avg.model.layers.0...                what the optimizer keeps (config/optimizers.py), here AdamW's
    optimizer.exp_avg_sq.model.layers.0...             moments, in the accumulation dtype or in bfloat16
    optimizer.master.model.layers.0...                 only where the training dtype is narrower than float32

Of frozen parameters there are weights alone. A run that trains them again begins with moments of zeros, and with
masters that are the weights.

A checkpoint of step 0 has weights alone, in any dtype: `tpengine import` writes it.

No name or shape depends on the layout, so that any layout can read what any other has written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from tpengine.architectures.experts import ROUTER_BIAS
from tpengine.checkpoint.index import Index
from tpengine.checkpoint.load import load
from tpengine.checkpoint.resume import Checkpoint
from tpengine.checkpoint.rollbacks import rollback_of
from tpengine.checkpoint.storage import Blocks, SavedBlock, parts_of
from tpengine.layout.parameters import EMBEDDING, Piece, hf_name
from tpengine.layout.slices import boxes_of
from tpengine.model.transformer import Transformer
from tpengine.training.train_state import TrainState

# What the name of a weight's wider copy begins with.
MASTER = "optimizer.master."


def blocks_of(state: TrainState) -> dict[str, SavedBlock | Blocks]:
    """Return every block that this rank holds, by the name it is saved under; the tensors are the state's own."""
    parts: dict[str, list[SavedBlock]] = defaultdict(list)
    for name, block in _blocks(state):
        parts[name].append(block)
    return {name: found[0] if len(found) == 1 else Blocks(tuple(found)) for name, found in parts.items()}


def masters_of(state: TrainState) -> Iterator[tuple[str, SavedBlock]]:
    """Yield what this rank holds, as boxes of parameters without padding, by the parameter's name.

    The tensors are the optimizer's own, or frozen weights. After they have been filled, `state.optimizer.round_masters`
    must be called.
    """
    for name, held in state.held.items():
        piece = state.model.pieces[name]
        for block in _boxes(piece, state.optimizer.masters.get(name, held.detach()), state.elements_of(name), False):
            yield piece.spec.name, block


def weights_of_model(model: Transformer) -> Iterator[tuple[str, SavedBlock]]:
    """Yield what this rank holds of each parameter, without padding, by the parameter's name."""
    for name, piece in model.pieces.items():
        yield piece.spec.name, _block(piece, model.held[name].detach(), piece.block[0], False)


def restore(state: TrainState, checkpoint: Checkpoint) -> int:
    """Load a checkpoint into a state of any layout; collective.

    Returns:
        The step to continue with.

    Raises:
        DamagedCheckpoint: on all ranks alike: a file is damaged; the state must then load another checkpoint.
        CheckpointError: on all ranks alike: the checkpoint is of another model.
    """
    if checkpoint.index.step == 0:
        load_weights(state, checkpoint.directory, checkpoint.index)
        # A damaged checkpoint may have filled them before.
        state.optimizer.clear()
    else:
        thawed = _thawed(state, checkpoint.index)
        missing = {hf_name(state.model.pieces[name].spec.name) for name in thawed}
        blocks = {name: block for name, block in blocks_of(state).items() if _of_weight(name) not in missing}
        load(checkpoint.directory, checkpoint.index, blocks)
        for name in thawed:
            state.begin_anew(name)
    # An old checkpoint has no number of updates: its version could not skip steps.
    state.num_updates = checkpoint.index.state.get("updates", checkpoint.index.step)
    state.loss_scale.restore(checkpoint.index.state.get("loss_scale"))
    state.spikes.restore(checkpoint.index.state.get("spikes"))
    state.rollbacks = tuple(rollback_of(value) for value in checkpoint.index.state.get("rollbacks", []))
    return checkpoint.index.step


def _thawed(state: TrainState, index: Index) -> list[str]:
    """Return the pieces that are trained now, and that the checkpoint has nothing of but weights: they were frozen."""
    updated = {_of_weight(name) for name in index.tensors} - {""}
    return [name for name in state.weights if hf_name(state.model.pieces[name].spec.name) not in updated]


def _of_weight(name: str) -> str:
    """Return the weight that a tensor of the optimizer belongs to, by their names in checkpoints; empty for weights."""
    return name.split(".", 2)[2] if name.startswith("optimizer.") else ""


def load_weights(state: TrainState, directory: Path, index: Index) -> None:
    """Load the weights of a checkpoint, of any dtype; moments stay as they are; collective.

    Where the checkpoint has wider copies (a run of 16 bits), these are read, into our weights and our wider copies.

    Raises:
        DamagedCheckpoint: on all ranks alike: a file is damaged.
        CheckpointError: on all ranks alike: the checkpoint is of another model.
    """
    blocks = [(name.removeprefix(MASTER), part) for name, of in blocks_of(state).items() for part in parts_of(of)]
    load_blocks(((name, block) for name, block in blocks if not name.startswith("optimizer.")), directory, index)


def load_blocks(blocks: Iterable[tuple[str, SavedBlock]], directory: Path, index: Index) -> None:
    """Fill blocks of weights, each by its name in checkpoints, as load_weights does; collective.

    Routers' biases that the checkpoint's run had not begin at 0.
    """
    wanted: dict[str, tuple[SavedBlock, ...]] = defaultdict(tuple)
    for name, block in blocks:
        if name.endswith(ROUTER_BIAS) and name not in index.tensors:
            block.tensor.zero_()
            continue
        wanted[MASTER + name if MASTER + name in index.tensors else name] += (block,)
    # One call, since every call hashes every file.
    load(directory, index, {name: Blocks(parts) for name, parts in wanted.items()}, converts=True)


def _blocks(state: TrainState) -> Iterator[tuple[str, SavedBlock]]:
    for place, (name, piece) in enumerate(state.model.pieces.items()):
        if name not in state.held:
            continue
        part, stored = state.elements_of(name), _stores(state, name, piece, place)
        saved = hf_name(piece.spec.name)
        for block in _boxes(piece, state.held[name].detach(), part, stored):
            yield saved, block
        # Of frozen weights there is no more.
        for kind, tensor in state.optimizer.state_of(name).items() if name in state.weights else ():
            for block in _boxes(piece, tensor, part, stored):
                yield f"optimizer.{kind}.{saved}", block


def _boxes(piece: Piece, tensor: Tensor, part: slice | None, stored: bool) -> Iterator[SavedBlock]:
    """Yield the blocks of a piece: itself, or the boxes of the part of its elements that `tensor` holds."""
    offset, size = piece.block
    if part is None:
        yield _block(piece, tensor, offset, stored)
        return
    for box in boxes_of(size, part):
        at = tuple(first + further for first, further in zip(offset, box.offset, strict=True))
        yield _block(piece, tensor[box.within].view(box.size), at, stored)


def _block(piece: Piece, tensor: Tensor, offset: tuple[int, ...], stored: bool) -> SavedBlock:
    spec = piece.spec
    if spec.valid_rows is None:
        return SavedBlock(tensor, offset, spec.shape, stored)
    # Where all rows are padding the block is empty.
    num_rows = min(max(spec.valid_rows - offset[0], 0), tensor.shape[0])
    offset = (min(offset[0], spec.valid_rows), *offset[1:])
    return SavedBlock(tensor[:num_rows], offset, spec.stored_shape, stored and num_rows > 0)


def _stores(state: TrainState, name: str, piece: Piece, place: int) -> bool:
    """Return whether this rank stores the block; the ranks that hold the same block take turns by parameter."""
    at, tp = state.rank.mesh.at, state.rank.mesh.shape.tp
    if piece.spec.name == EMBEDDING and not state.model.is_first:  # the tied copy of the last stage
        return False
    num_tp = max(1, piece.num_holders * tp // piece.tp)
    copy, num_copies = state.copy_of(name)
    holder = copy * num_tp + at.tp % num_tp
    return place % (num_copies * num_tp) == holder
