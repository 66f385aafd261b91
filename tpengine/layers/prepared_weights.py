"""A layer's weight in memory: who owns it, and the copies by which it is multiplied faster until it changes.

One owner each, and the owner is declared:

    the layer        by default. Layers that are packed lay their weights out behind each other when they are made, and
                     when the layers give them other memory: `module.to`, `load_state_dict(assign=True)`, a copy
    another layer    whose parameters a layer borrows
    flat buffers     of weights that come and go (ZeRO): `column.declare_places` tells the layers where each lies

Only the owner moves a weight. That weights lie behind each other, and fill their memory, does not say whose memory it
is: a bucket can hold exactly these. So the place of a weight decides how it is read, and never who may move it. A
weight that lies where no owner has declared it (`p.data = ...`) was put there by somebody, and stays there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from tpkernels.fused.gather import DTYPES
from tpkernels.ops.matmul.host import PreparedMatrix


def lies_at(weight: Tensor, place: Tensor) -> bool:
    """Whether a weight is where its owner has declared it: that memory, whether it is there just now or not."""
    if weight.dtype != place.dtype or weight.device != place.device:
        return False
    return place.is_meta or weight.is_set_to(place)


def as_one_matrix(weights: Sequence[Tensor]) -> Tensor | None:
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


class PreparedWeight:
    """The two forms in which a weight w[out, in] is multiplied, copied into the layout that a matmul reads fastest.

    forward:  m = w.T       dgrad:  m = w, copied when a backward first asks for it

    Args:
        weight: w, of which the forms are made.
        num_rows: of the products, approximately.
        parameters: those that w consists of.

    Attributes:
        matrix: w, as it lies.
    """

    def __init__(self, weight: Tensor, num_rows: int, parameters: Sequence[Tensor]) -> None:
        self.matrix, self._num_rows = weight, num_rows
        with torch.inference_mode(False), torch.no_grad():
            self.forward = PreparedMatrix(weight.T, num_rows)
        self._made_of = Contents(parameters)
        self._is_multiplied = weight.dtype in DTYPES

    @functools.cached_property
    def dgrad(self) -> PreparedMatrix:
        """The form that dgrad multiplies by; without a backward nobody pays for it."""
        return PreparedMatrix(self.matrix, self._num_rows)

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copied layer has another weight, which is not prepared."""
        return None

    def for_product(self, x: Tensor, parameters: Sequence[Tensor]) -> PreparedWeight | None:
        """Return self, or None: a parameter was written to or replaced since, or x[., in] does not fit.

        If it is self, nothing is left to check: a pass over one token has many products, and little time for each.
        """
        weight = self.matrix
        fits = x.ndim == 2 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype and x.device == weight.device
        return self if fits and self._is_multiplied and self._made_of.is_of(parameters) else None


class Contents:
    """What some tensors hold: their memory, and how often autograd has seen a write to each."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Memory that is held here is given to no other tensor, so that an address tells it.
        self._held = [tensor.detach() for tensor in tensors]
        self._versions = [version_of(tensor) for tensor in tensors]

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copied layer has other tensors."""
        return None

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors hold what they held then. Nobody counts writes to an inference tensor: it may not."""
        return all(
            version is not None and tensor.data_ptr() == held.data_ptr() and version_of(tensor) == version
            for tensor, held, version in zip(tensors, self._held, self._versions, strict=True)
        )


def version_of(tensor: Tensor) -> int | None:
    """Return how often autograd has seen a write to a tensor; None of an inference tensor, of which nobody counts."""
    return None if tensor.is_inference() else tensor._version
