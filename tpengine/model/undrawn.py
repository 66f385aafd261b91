"""Build layers without drawing values that will be replaced, and without touching their memory.

Drawing 1 GB takes a core seconds, and so does joining what was drawn: layers that share a product lay their weights
behind each other.

The decision a reader will question: a mode, and not an argument of every layer. torch.nn.init asks modes first for
this purpose, and layers that users build by themselves draw as torch's do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Undrawn(TorchFunctionMode):
    """A context in which nn.init.normal_ leaves new memory as it is; whoever builds there must fill every weight.

    torch.cat of such tensors alone, along their rows and on the CPU, returns new memory. Memory that was never written
    takes no room, so that it is kept to the end: nobody else gets its address.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __exit__(self, *error: Any) -> None:
        """Let go of the memory."""
        super().__exit__(*error)
        self._storages.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch's, unless it draws, or joins what was not drawn."""
        given = dict(kwargs or {})
        if func is nn.init.normal_:
            return self._noted(args[0] if args else given["tensor"])
        if func is torch.cat and len(args) == 1 and not given and all(map(self._is_undrawn, args[0])):
            first: Tensor = args[0][0]
            return self._noted(first.new_empty(sum(len(tensor) for tensor in args[0]), *first.shape[1:]))
        return func(*args, **given)

    def _noted(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage
        return tensor

    def _is_undrawn(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._storages
