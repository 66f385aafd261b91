"""Weights of several column-parallel layers in one storage.

They remain separate parameters: a fused [q; k; v] shard, loaded at another tp, would have the right shape and permuted
rows, and nothing would fail.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from tpkernels.autocast import lowered
from tpkernels.fused.all_gather_matmul import all_gather_matmul

from tpengine.layers.linear.layers import ColumnParallelLinear, with_biases
from tpengine.layers.linear.prepared import PreparedWeight, contents_of
from tpengine.layers.linear.products import check_gather, column_product, is_traceable


class PackedWeights:
    """Keeps the weights of several column-parallel layers in one contiguous storage, read by one GEMM.

    The layers' parameters are views of the storage and stay separate parameters. `module.to`,
    `load_state_dict(assign=True)` and `copy.deepcopy` give a parameter other memory: the next forward notices that by
    the address, and packs again. A weight that is borrowed, or a part of somebody's larger memory, stays where it is:
    the storage holds a copy of it, which is renewed when the weight has changed. If such weights lie behind each other,
    they are the storage.

    Args:
        layers: column-parallel layers of one input size, over equal communicators and with equal sinks.
    """

    def __init__(self, *layers: ColumnParallelLinear) -> None:
        self.layers = layers
        # Those of whose weights the storage has copies.
        self._copies: list[ColumnParallelLinear] = []
        self._storage = self._pack()
        self._copied: list[tuple[int, int]] = []
        self._prepared: PreparedWeight | None = None

    def prepare(self, num_tokens: int) -> None:
        """Prepare the packed weights as one matrix: see ColumnParallelLinear.prepare."""
        weights = [layer.weight for layer in self.layers]
        self._update(weights)
        self._prepared = PreparedWeight(self._storage, num_tokens // self.layers[0].comm.num_row_parts, weights)

    def release(self) -> None:
        """Free the prepared copies. The next forward copies weights again that are copied, even if autograd saw no
        write.
        """
        self._prepared, self._copied = None, []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map x[T/tp, D] to (y_0[T, F_0/tp], y_1[T, F_1/tp], ...) with one gather and one GEMM."""
        if is_traceable(self.layers) and self.layers[0].bias is None:
            return all_gather_matmul(x, [layer.weight for layer in self.layers], self.layers[0].comm)
        return self.forward_packed(x).split([layer.weight.shape[0] for layer in self.layers], dim=1)

    def forward_packed(self, x: Tensor) -> Tensor:
        """Map x[T/tp, D] to (y_0, y_1, ...)[T, F/tp], side by side in one tensor."""
        return with_biases(self._product(x), self.layers)

    def _product(self, x: Tensor) -> Tensor:
        weights: list[Tensor] = [layer.weight for layer in self.layers]
        if is_traceable(self.layers):
            return torch.cat(all_gather_matmul(x, weights, self.layers[0].comm), dim=1)
        x, *converted = lowered(x, *weights)
        prepared = self._prepared and self._prepared.for_product(x, weights)
        if prepared is None:
            check_gather(x, converted, self.layers[0].comm)
            if any(weight.dtype != x.dtype for weight in weights):
                # Autocast's, for this call.
                return column_product(x, torch.cat(converted).detach(), None, self.layers)
            self._update(weights)
        return column_product(x, self._storage, prepared, self.layers)

    def _update(self, weights: Sequence[Tensor]) -> None:
        """Make the storage hold the weights as they are now."""
        if not self._is_packed(weights):
            self._storage = self._found_packed()
        copied = contents_of([layer.weight for layer in self._copies])
        if copied != self._copied:
            self._copy()
        self._copied = copied

    def adopt(self) -> None:
        """Let go of the storage if somebody has laid the weights out behind each other; they are the next one."""
        if _lie_side_by_side(self.layers):
            # They may have no memory yet.
            self._storage, self._copies = self._storage.new_empty(0), []

    def _found_packed(self) -> Tensor:
        """Return the weights as one tensor where they lie behind each other; else pack them."""
        if not _lie_side_by_side(self.layers):
            return self._pack()
        self._copies = []
        first, width = self.layers[0].weight, self.layers[0].weight.shape[1]
        # `data`: what writes to that memory, as a gather of weights, does not count as a write to this tensor.
        return first.data.as_strided((sum(len(layer.weight) for layer in self.layers), width), (width, 1))

    def _is_packed(self, weights: Sequence[Tensor]) -> bool:
        address = self._storage.data_ptr()
        for layer, weight in zip(self.layers, weights, strict=True):
            if (weight.data_ptr() != address and layer not in self._copies) or weight.dtype != self._storage.dtype:
                return False
            address += weight.numel() * weight.element_size()
        return True

    @torch.no_grad()
    def _pack(self) -> Tensor:
        storage = torch.cat([layer.weight.detach() for layer in self.layers])
        self._copies = [layer for layer in self.layers if layer.borrows or _is_part_of_more(layer, self.layers)]
        pieces = storage.split([layer.weight.shape[0] for layer in self.layers])
        for layer, piece in zip(self.layers, pieces, strict=True):
            if layer not in self._copies:
                layer.weight.data = piece
        return storage

    @torch.no_grad()
    def _copy(self) -> None:
        pieces = self._storage.split([layer.weight.shape[0] for layer in self.layers])
        # What backward still needs of the storage it needs with these values: within a step they stay the same.
        with _unsafe_preserve_version_counter(self._storage):
            for layer, piece in zip(self.layers, pieces, strict=True):
                if layer in self._copies:
                    piece.copy_(layer.weight)


def _is_part_of_more(layer: ColumnParallelLinear, packed: Sequence[ColumnParallelLinear]) -> bool:
    """Whether a layer's weight lies in memory that holds more than the weights that are packed with it."""
    memory = layer.weight.untyped_storage()
    neighbours = [other.weight for other in packed if other.weight.untyped_storage().data_ptr() == memory.data_ptr()]
    return memory.nbytes() > sum(weight.numel() * weight.element_size() for weight in neighbours)


def adopt_moved_weights(model: nn.Module) -> None:
    """Let the packed layers of a model take their weights where they lie now: see PackedWeights.adopt."""
    for module in model.modules():
        for part in vars(module).values():
            if isinstance(part, PackedWeights):
                part.adopt()


def _lie_side_by_side(layers: Sequence[ColumnParallelLinear]) -> bool:
    """Whether somebody has laid the layers' weights out behind each other in one memory."""
    first = layers[0].weight
    place = first.storage_offset()
    for layer in layers:
        weight = layer.weight
        # By identity: memory that has been taken away has no address.
        is_next = weight.untyped_storage()._cdata == first.untyped_storage()._cdata
        if layer.borrows or not is_next or weight.storage_offset() != place or weight.dtype != first.dtype:
            return False
        place += weight.numel()
    return True
