"""Modules that are whole on every tensor-parallel rank: how they are made right, and a guard for those that are not.

Activations are x[T/tp, D]: a rank's part of the tokens. The gradient of a parameter that every rank holds whole, as
nn.LayerNorm's weight beside tensor-parallel layers, is then a sum over the ranks, of which autograd computes each
rank's own term alone. Nothing fails: the loss is right, and the ranks drift apart.

The layers of this package take those sums by themselves. `replicate` does it for any other module; `summed` and
`sharded` say of a module of one's own that it is right already; `check_replicated` names what nobody sums. DataParallel
and Pipeline ask it of every model that holds tensor-parallel layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tpengine.layers.collectives import Communicator, ShardCommunicator
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpengine.layers.norm import RMSNorm

_Module = TypeVar("_Module", bound=nn.Module)

# On a parameter, beside the hook that sums: both are gone together where a copy or another parameter takes its place.
_SUMMED = "_tpengine_summed_over"
# On a module: the ranks over which it sums the gradients of its own parameters by itself.
_SUMS = "_tpengine_sums_over"
# On a module: each rank holds its own part of its own parameters.
_SHARDED = "_tpengine_sharded_over"
_MOST_NAMES = 8


def replicate(module: _Module, tp: Communicator) -> _Module:
    """Make a module right whose parameters are whole on every tensor-parallel rank; collective.

        gradient = sum over the tp ranks of the gradient of each one's tokens

        self.norm = replicate(nn.LayerNorm(dim), tp)

    Its parameters and buffers are overwritten with those of the communicator's rank 0. A copy of the module (an EMA)
    has no hooks: to train one, call this for it too.

    Args:
        module: sees x[T/tp, ...], this rank's tokens, alone. Frozen parameters get no hook, nor do those of this
            package's tensor-parallel layers in it. On the meta device parameters are only marked, and `Pipeline` makes
            their values equal once they are there.
        tp: the tensor-parallel ranks.

    Returns:
        The module itself.

    Raises:
        ValueError: a layer of this package in it was made over other ranks.
        RuntimeError: from backward, with create_graph: the sum is differentiable once.

    Cost: one all-reduce a parameter and backward pass, of its gradient's size, in the order of backward.
    """
    if tp.size == 1:
        return module
    over = _of_layers(module)
    for name, parameter in module.named_parameters():
        if over.get(parameter, tp.size) != tp.size:
            raise ValueError(
                f"a layer of tpengine.layers gives its gradients to a sink, past any hook: {name} is over "
                f"{over[parameter]} ranks, tp {tp.size}: make the layer with tp"
            )
    for parameter in dict.fromkeys(_unsummed(module, over).values()):
        _sum_over(parameter, tp)
    for tensor in (*module.parameters(), *module.buffers()):
        if over.get(tensor) is None:
            _equalise(tensor, tp)
    return module


def sharded(module: _Module, tp: Communicator) -> _Module:
    """Say that each rank holds its own part of a module's parameters: this changes nothing, and the guard is silent.

        self.bias = sharded(Bias(4 * dim // tp.size), tp)

    `clip_grad_norm_` counts the part of each rank. A module that is whole on every rank and sums by itself is `summed`.

    Args:
        module: with all modules in it.
        tp: the tensor-parallel ranks.

    Returns:
        The module itself.
    """
    for part in module.modules():
        setattr(part, _SHARDED, tp.size)
    return module


def summed(module: _Module, tp: Communicator) -> _Module:
    """Say that a module is whole on every tp rank and sums its parameters' gradients by itself; collective.

        self.bias = summed(Bias(dim), tp)  # whose forward uses collectives.copy(self.bias, tp)

    So the guard is silent, and `clip_grad_norm_` counts the parameters once. Parameters and buffers are overwritten
    with those of the communicator's rank 0, as by `replicate`. A copy of the module is summed as well.

    Args:
        module: with all modules in it, but for this package's layers and those that are `sharded`.
        tp: the tensor-parallel ranks.

    Returns:
        The module itself.
    """
    if tp.size == 1:
        return module
    over = _of_layers(module)
    for part in module.modules():
        if hasattr(part, _SHARDED) or any(parameter in over for parameter in part.parameters(recurse=False)):
            continue
        setattr(part, _SUMS, tp)
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            _equalise(tensor, tp)
    return module


def check_replicated(model: nn.Module, tp: Communicator) -> None:
    """Refuse a model with trained parameters whose gradients nothing sums over the tensor-parallel ranks.

    Parameters pass that are frozen, lie in this package's tensor-parallel layers, or went through `replicate`, `summed`
    or `sharded`. Nothing is exchanged: ranks that have built the same model raise alike.

    Args:
        model: any module; before its first step.
        tp: the tensor-parallel ranks.

    Raises:
        ValueError: there are others; they are named.
    """
    if tp.size > 1:
        _refuse(_unsummed(model, _of_layers(model)), tp.size)


def check_beside_parallel_layers(model: nn.Module) -> None:
    """`check_replicated` for who knows no tp: over the largest communicator of the model's tensor-parallel layers.

    Raises:
        ValueError: as check_replicated; a model without such layers has nothing to sum.
    """
    over = _of_layers(model)
    marked = [vars(parameter)[_SUMMED].size for parameter in model.parameters() if hasattr(parameter, _SUMMED)]
    marked += [vars(part)[_SUMS].size for part in model.modules() if hasattr(part, _SUMS)]
    size = max([1, *over.values(), *marked])
    if size > 1:
        _refuse(_unsummed(model, over), size)


def carry_over(module: nn.Module, made: Mapping[Tensor, Tensor]) -> None:
    """Make right what was marked on the meta device and has values by now; collective.

    Args:
        module: holds the successors.
        made: tensor on the meta device -> its successor.
    """
    new = set(made.values())
    for parameter, ranks in _held_alike(module).items():
        if parameter in new:
            if hasattr(parameter, _SUMMED):
                _sum_over(parameter, ranks)
            _equalise(parameter, ranks)


def ranks_that_hold(model: nn.Module) -> dict[Parameter, int]:
    """How many tensor-parallel ranks hold the same parameter, of those of which several do."""
    return {parameter: ranks.size for parameter, ranks in _held_alike(model).items()}


def _held_alike(model: nn.Module) -> dict[Parameter, Communicator]:
    """The ranks that hold the same parameter and sum its gradient."""
    alike: dict[Parameter, Communicator] = {}
    for part in model.modules():
        if isinstance(part, RMSNorm):
            alike[part.weight] = _real(part.comm)
        elif isinstance(part, ColumnParallelLinear) and part.replicas is not None:
            alike[part.weight] = _real(part.replicas)
        for parameter in part.parameters(recurse=False):
            if hasattr(part, _SUMS):
                alike[parameter] = getattr(part, _SUMS)
            if hasattr(parameter, _SUMMED):
                alike[parameter] = getattr(parameter, _SUMMED)
    return alike


def _of_layers(model: nn.Module) -> dict[Tensor, int]:
    """Parameters of this package's layers, and over how many ranks each is cut or summed."""
    over: dict[Tensor, int] = {}
    for part in model.modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding | RMSNorm):
            over[part.weight] = _real(part.comm).size
    return over


def _real(ranks: Communicator) -> Communicator:
    """The processes that a layer is over; exact mode's layers are over shards, of which a process holds several."""
    return ranks.holders if isinstance(ranks, ShardCommunicator) else ranks


def _unsummed(model: nn.Module, over: Mapping[Tensor, int]) -> dict[str, Parameter]:
    """Trained parameters that nothing sums, by name."""
    right = [part for part in model.modules() if hasattr(part, _SHARDED) or hasattr(part, _SUMS)]
    owned = {parameter for part in right for parameter in part.parameters(recurse=False)}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and over.get(parameter, 1) == 1
        and not hasattr(parameter, _SUMMED)
        and parameter not in owned
    }


def _refuse(names: Iterable[str], size: int) -> None:
    unsummed = list(names)
    if not unsummed:
        return
    more = f" and {len(unsummed) - _MOST_NAMES} more" if len(unsummed) > _MOST_NAMES else ""
    raise ValueError(
        f"a parameter that is whole on every tp rank needs its gradient summed over them: tp {size}, nothing sums "
        f"{', '.join(unsummed[:_MOST_NAMES])}{more}: wrap the modules in tpengine.layers.replicate(module, tp), make "
        "tpengine's own with tp, or say by tpengine.layers.sharded(module, tp) that each rank holds its own part, by "
        "summed(module, tp) that the module sums by itself"
    )


def _sum_over(parameter: Parameter, tp: Communicator) -> None:
    def summed(gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a replicated parameter's gradient is summed over tp, which is differentiable once: leave create_graph "
                "out"
            )
        return tp.all_reduce_(gradient.clone(memory_format=torch.contiguous_format))

    setattr(parameter, _SUMMED, tp)
    parameter.register_hook(summed)


@torch.no_grad()
def _equalise(tensor: Tensor, tp: Communicator) -> None:
    if not tensor.is_meta and tensor.numel() > 0:
        tensor.copy_(tp.broadcast_(tensor.detach().contiguous()))
