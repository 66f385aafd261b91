"""Modules without values yet: on the meta device, or of memory that nothing has written to.

A rank of a pipeline materialises its own stage alone. A module's values follow from a seed and its place in the whole
model, or come from a state dict, so that they are the same for every cut and every number of ranks. `Uninitialized`
builds layers without drawing values that will be replaced, and without touching their memory: drawing 1 GB takes a core
seconds, and so does joining what was drawn, as layers that share a product lay their weights behind each other.

The decision a reader will question: a mode, and not an argument of every layer. torch.nn.init asks modes first for
this purpose, and layers that users build by themselves draw as torch's do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

Init = Callable[[nn.Module, int], object] | Mapping[str, Tensor]


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def materialise(
    module: nn.Module, device: torch.device, fill: float | None = None, made: dict[Tensor, Tensor] | None = None
) -> None:
    """Give the module's parameters and buffers that are on the meta device memory, in place.

    Args:
        module: its other tensors stay as they are.
        device: where.
        fill: their values; default a mark by which `fill_modules` notices what gets no value: NaN, the least integer,
            or zero where all values are in use (bool and integers of up to 16 bits).
        made: tensor on the meta device -> its successor; what is in it is used again, what is new is added, so that
            tensors shared between modules stay shared.
    """
    made = {} if made is None else made
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        made[tensor] = make(tensor, device, fill)
                    tensors[name] = made[tensor]  # type: ignore[assignment]


@torch.no_grad()
def fill_modules(
    modules: Iterable[tuple[int, str, nn.Module]],
    init: Init,
    seed: int,
    device: torch.device,
    made: Mapping[Tensor, Tensor],
) -> None:
    """Give modules that have been materialised their values.

    Args:
        modules: (place in the whole model, name in it, module), in the model's order.
        init: called with each module and its place; torch's generators are seeded with what follows from `seed` and
            the place. Or the whole model's state dict, of which only these modules' names are read.
        seed: of the whole model.
        device: its generator is seeded beside the CPU's. Afterwards both are as they were.
        made: what `materialise` has put in it: only these tensors must get a value, others have always had one.

    Raises:
        ValueError: a tensor that was on the meta device has got no value, or the state dict's has another shape. Of
            bool and integers of up to 16 bits only a tensor is noticed that nothing has written to.
    """
    modules = list(modules)
    versions = {tensor: tensor._version for tensor in made.values()}
    for place, prefix, module in modules:
        if isinstance(init, Mapping):
            _load(module, prefix, init)
        else:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                digest = hashlib.sha256(f"{seed} {place}".encode()).digest()
                torch.manual_seed(int.from_bytes(digest[:7], "little"))
                init(module, place)
        unfilled = [f"{prefix}.{name}" for name, tensor in _named_tensors(module) if _is_unfilled(tensor, versions)]
        if unfilled:
            raise ValueError(
                f"init must fill every parameter and buffer on the meta device: {', '.join(unfilled)} got no value "
                f"{'from the state dict' if isinstance(init, Mapping) else f'from init(module, {place})'}: give "
                "those values too"
            )


def make(tensor: Tensor, device: torch.device, fill: float | None) -> Tensor:
    """Return a meta tensor with memory on a device, full of `fill`, or of a mark that `init` must overwrite."""
    value = _mark(tensor.dtype) if fill is None else fill
    memory = torch.full_like(tensor.detach(), value, device=device)
    if not isinstance(tensor, Parameter):
        return memory
    parameter = Parameter(memory, tensor.requires_grad)
    # What others have written on the parameter, such as its share of an optimizer's groups.
    vars(parameter).update(vars(tensor))
    return parameter


def _mark(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min if dtype in (torch.int32, torch.int64) else 0


def _is_unfilled(tensor: Tensor, versions: Mapping[Tensor, int]) -> bool:
    """Whether a tensor still has the mark; `versions` of those that were given one, when they had nothing else."""
    if tensor not in versions:
        return tensor.is_meta
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    mark = _mark(tensor.dtype)
    if mark != 0:
        return bool((tensor == mark).any())
    # Zero may be its value: then something has written it. What is written past autograd's count is not zero.
    return tensor.numel() > 0 and versions[tensor] == tensor._version and not bool(tensor.any())


def _load(module: nn.Module, prefix: str, state: Mapping[str, Tensor]) -> None:
    for name, tensor in _named_tensors(module):
        key = f"{prefix}.{name}"
        if key not in state:
            continue
        value = state[key]
        if value.shape != tensor.shape:
            raise ValueError(
                f"a state dict must hold the model's shapes: {key} is {list(value.shape)}, the module's is "
                f"{list(tensor.shape)}: take that of this model"
            )
        tensor.copy_(value)


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers under all their names: a state dict may hold a shared one under any of them."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


class Uninitialized(TorchFunctionMode):
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
        if func is torch.cat and len(args) == 1 and not given and all(map(self._is_uninitialized, args[0])):
            first: Tensor = args[0][0]
            return self._noted(first.new_empty(sum(len(tensor) for tensor in args[0]), *first.shape[1:]))
        return func(*args, **given)

    def _noted(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage
        return tensor

    def _is_uninitialized(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._storages
