"""Weights of several column-parallel layers in one storage.

They remain separate parameters: a fused [q; k; v] shard, loaded at another tp, would have the right shape and permuted
rows, and nothing would fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.autocast import lowered
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.ops.matmul.tuned import tuned_gate

from tpengine.layers.collectives import ShardCommunicator
from tpengine.layers.linear.layers import ColumnParallelLinear, with_biases
from tpengine.layers.linear.memory import lies_at
from tpengine.layers.linear.prepared import PreparedWeight
from tpengine.layers.linear.products import check_gather, column_product, gated_product, is_traceable


class PackedWeights:
    """Keeps the weights of several column-parallel layers in one contiguous storage, read by one GEMM.

    The layers' parameters are views of the storage and stay separate parameters. They are laid out when this is made,
    and when the layers give them other memory (`module.to`, `load_state_dict(assign=True)`); a copy of this lays out
    the copied layers. At no other time is a weight moved, and never one that another layer or a buffer owns: see
    memory.py. Weights that do not lie behind each other are copied, anew for each product. If their owner has declared
    their places, one copy serves until `release`.

    Args:
        layers: column-parallel layers of one input size, over equal communicators and with equal sinks.
    """

    def __init__(self, *layers: ColumnParallelLinear) -> None:
        self.layers = layers
        self._copy: Tensor | None = None
        self._prepared: PreparedWeight | None = None
        for layer in layers:
            layer.pack_with(self)
        self.lay_out()

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeights, self.layers

    @torch.no_grad()
    def lay_out(self) -> None:
        """Lay the weights out that are the layers' own, once all of these have new memory of one dtype and device."""
        own = [layer for layer in self.layers if not layer.borrows and layer.place is None]
        weights = [layer.weight for layer in own]
        are_alike = len({(weight.dtype, weight.device) for weight in weights}) == 1
        if not are_alike or not all(layer.is_fresh and isinstance(layer.weight, Parameter) for layer in own):
            return
        # A model that was made or moved under inference_mode keeps weights that a backward can read.
        with torch.inference_mode(False):
            pieces = torch.cat([weight.detach() for weight in weights]).split([len(weight) for weight in weights])
            for layer, piece in zip(own, pieces, strict=True):
                layer.weight.data, layer.is_fresh = piece, False

    def prepare(self, num_tokens: int) -> None:
        """Prepare the packed weights as one matrix: see ColumnParallelLinear.prepare."""
        weights = [layer.weight for layer in self.layers]
        packed = self._packed(weights)
        self._prepared = PreparedWeight(packed, num_tokens // self.layers[0].comm.num_row_parts, weights)

    def release(self) -> None:
        """Free the prepared copies, and the copy of weights that their owner keeps apart. It may change them then."""
        self._prepared = self._copy = None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map x[T/tp, D] to (y_0[T, F_0/tp], y_1[T, F_1/tp], ...) with one gather and one GEMM."""
        if is_traceable(self.layers) and self.layers[0].bias is None:
            return all_gather_matmul(x, [layer.weight for layer in self.layers], self.layers[0].comm)
        return self.forward_packed(x).split([layer.rows for layer in self.layers], dim=1)

    def forward_packed(self, x: Tensor, members: Sequence[nn.Module] = ()) -> Tensor:
        """Map x[T/tp, D] to (y_0, y_1, ...)[T, F/tp], side by side in one tensor.

        Args:
            x: this rank's tokens.
            members: what stands in the places of the layers now. If a layer has been replaced, or has hooks, each is
                called by itself, with a gather of its own: a packed product calls none of them.
        """
        if _are_called_alone(members or self.layers, self.layers):
            return torch.cat([member(x) for member in members or self.layers], dim=1)
        return with_biases(self._product(x), self.layers)

    def forward_gated(self, x: Tensor, members: Sequence[nn.Module], kind: str) -> Tensor | None:
        """Return h[T, F] = act(g) * u of the packed product (g, u), by one kernel; None where it is to be made apart.

        It is one kernel where a file of this kind of GPU says that this was timed to be faster (tpkernels' tuned.py),
        on one rank, without biases. Not for exact mode's shards: what is tuned depends on sizes.

        Args:
            x: all tokens.
            members: as forward_packed.
            kind: act: silu, gelu or gelu_tanh.
        """
        first = self.layers[0]
        is_one_rank = first.comm.size == 1 and not isinstance(first.comm, ShardCommunicator)
        if not is_one_rank or first.bias is not None or torch.compiler.is_compiling():
            return None
        weights: list[Tensor] = [layer.weight for layer in self.layers]
        x, *operands = lowered(x, *weights)
        tuned = tuned_gate(x, len(weights[0]), kind)
        if tuned is None or tuned.apart_us <= tuned.us or _are_called_alone(members, self.layers):
            return None
        check_gather(x, operands, first.comm)
        return gated_product(x, self._packed(operands), kind, tuned.config, self.layers, weights)

    def _product(self, x: Tensor) -> Tensor:
        weights: list[Tensor] = [layer.weight for layer in self.layers]
        if is_traceable(self.layers):
            return torch.cat(all_gather_matmul(x, weights, self.layers[0].comm), dim=1)
        x, *operands = lowered(x, *weights)
        prepared = self._prepared and self._prepared.for_product(x, weights)
        if prepared is not None:
            return column_product(x, prepared.matrix, prepared, self.layers, weights)
        check_gather(x, operands, self.layers[0].comm)
        return column_product(x, self._packed(operands), None, self.layers, weights)

    def _packed(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the weights behind each other, as they are now."""
        if (matrix := _as_one(weights)) is not None:
            return matrix
        places = [layer.place for layer in self.layers]
        is_told = all(place is not None and lies_at(w, place) for place, w in zip(places, weights, strict=True))
        if is_told and self._copy is not None:
            return self._copy
        # Not an inference tensor, whatever the mode: a backward may read the copy later.
        with torch.inference_mode(False), torch.no_grad():
            copy = torch.cat([weight.detach() for weight in weights])
        if is_told:
            self._copy = copy
        return copy


def _are_called_alone(members: Sequence[nn.Module], layers: Sequence[nn.Module]) -> bool:
    for member, layer in zip(members, layers, strict=True):
        hooks = member._forward_hooks or member._forward_pre_hooks or member._backward_hooks
        if member is not layer or hooks or member._backward_pre_hooks:
            return True
    return False


def _as_one(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the weights as one matrix, a view, if they lie behind each other in one memory; whose it is, is no matter.

    A write to the memory is no write to the matrix: a gather of weights is none that autograd should see.
    """
    first = weights[0]
    memory, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for weight in weights:
        is_next = weight.untyped_storage().data_ptr() == memory and weight.storage_offset() == place
        if not is_next or not weight.is_contiguous() or weight.dtype != first.dtype or weight.device != first.device:
            return None
        place += weight.numel()
    num_rows, width = sum(len(weight) for weight in weights), first.shape[1]
    return first.data.as_strided((num_rows, width), (width, 1))


def declare_places(model: nn.Module, places: Mapping[Tensor, Tensor]) -> None:
    """Tell a model's column-parallel layers that somebody else owns the memory of their weights from now on.

    The owner calls `release` when it has changed weights that it does not keep behind each other.

    Args:
        model: its layers may share weights.
        places: the part of the owner's memory in which each of its weights lies.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear) and module.weight in places:
            module.place = places[module.weight]
