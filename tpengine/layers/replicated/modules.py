"""Modules that every tensor-parallel rank holds whole: sum their gradients, and refuse a model in which nothing does.

Activations are x[T/tp, D]: a rank's part of the tokens. Take a parameter that every rank holds whole, such as the
weight of nn.LayerNorm beside tensor-parallel layers. Its gradient is a sum over the ranks, and autograd computes only
the term of this rank. Without the sum nothing fails: the loss looks right, and the ranks' parameters drift apart.

The layers of this package take those sums themselves. `replicate` makes any other module take them. `summed` and
`sharded` declare that a module of your own needs nothing more. `check_replicated` names the parameters that nothing
sums; DataParallel and Pipeline call it for every model that has tensor-parallel layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tpengine.layers.collectives import Communicator, ShardCommunicator
from tpengine.layers.linear.layers import ColumnParallelLinear, RowParallelLinear
from tpengine.layers.norm import RMSNorm
from tpengine.layers.vocabulary.embedding import VocabParallelEmbedding

_Module = TypeVar("_Module", bound=nn.Module)

# Set on a parameter together with the hook that sums, or by `whole`. A copy, or a parameter that replaces it, has
# neither.
_SUMMED = "_tpengine_summed_over"
# Set on a module: the ranks over which it sums the gradients of its direct parameters itself.
_SUMS = "_tpengine_sums_over"
# Set on a module: each rank holds a different part of its direct parameters.
_SHARDED = "_tpengine_sharded_over"
_MOST_NAMES = 8


def replicate(module: _Module, tp: Communicator) -> _Module:
    """Sum the gradients of a module that every tensor-parallel rank holds whole, from now on; collective.

        gradient = sum over the tp ranks of the gradient of each one's tokens

        self.norm = replicate(nn.LayerNorm(dim), tp)

    Its parameters and buffers are overwritten with those of the communicator's rank 0. A copy of the module (an EMA)
    has no hooks: to train the copy, call this for it too.

    Args:
        module: its input is x[T/tp, ...], this rank's tokens only. Frozen parameters get no hook, nor do the parameters
            of this package's tensor-parallel layers inside it. On the meta device parameters are only marked:
            `Pipeline` makes them equal when it gives them values.
        tp: the tensor-parallel ranks.

    Returns:
        The module itself.

    Raises:
        ValueError: a layer of this package inside the module was made over other ranks.
        RuntimeError: from backward, with create_graph: the sum is differentiable once.

    Cost: one all-reduce per parameter and backward pass, of the gradient's size, in the order of backward.
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
    """Declare that each rank holds its own part of a module's parameters, so that `check_replicated` accepts them.

        self.bias = sharded(Bias(4 * dim // tp.size), tp)

    This changes nothing in the module. `clip_grad_norm_` counts the part of each rank. For a module that every rank
    holds whole, and that sums its gradients itself, call `summed`.

    Args:
        module: the module, with all modules inside it.
        tp: the tensor-parallel ranks.

    Returns:
        The module itself.
    """
    for part in module.modules():
        setattr(part, _SHARDED, tp.size)
    return module


def summed(module: _Module, tp: Communicator) -> _Module:
    """Declare that every tp rank holds a module whole and that it sums its gradients itself; collective.

        self.bias = summed(Bias(dim), tp)  # whose forward uses collectives.copy(self.bias, tp)

    Then `check_replicated` accepts its parameters, and `clip_grad_norm_` counts them once. Parameters and buffers are
    overwritten with those of the communicator's rank 0, as by `replicate`. The declaration holds for copies too.

    Args:
        module: the module, with all modules inside it except this package's layers and those that are `sharded`.
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


def whole(parameter: Parameter, tp: Communicator) -> None:
    """Declare that every tp rank holds a parameter and computes its whole gradient, though its module is `sharded`.

    `clip_grad_norm_` counts it once then. Such is the bias that is added after a sum over tp, of activations that are
    whole on every rank.

    Args:
        parameter: has the same values on every rank.
        tp: the tensor-parallel ranks.
    """
    if tp.size > 1:
        setattr(parameter, _SUMMED, tp)


def check_replicated(model: nn.Module, tp: Communicator) -> None:
    """Refuse a model with trained parameters whose gradients nothing sums over the tensor-parallel ranks.

    Accepted are parameters that are frozen, that belong to this package's tensor-parallel layers, or that went through
    `replicate`, `summed` or `sharded`. Nothing is exchanged: ranks that have built the same model raise alike.

    Args:
        model: any module; call this before its first step.
        tp: the tensor-parallel ranks.

    Raises:
        ValueError: names the parameters that nothing sums.
    """
    if tp.size > 1:
        _refuse(_unsummed(model, _of_layers(model)), tp.size)


def check_beside_parallel_layers(model: nn.Module) -> None:
    """Call `check_replicated` with the tp size that the model's own tensor-parallel layers have.

    Raises:
        ValueError: as check_replicated. A model without such layers is accepted.
    """
    size = _num_summing(model)
    if size > 1:
        _refuse(_unsummed(model, _of_layers(model)), size)


def num_parallel(model: nn.Module) -> int:
    """Return over how many tensor-parallel ranks a model is cut, or sums gradients; 1 without them."""
    return max([_num_summing(model), *(vars(part)[_SHARDED] for part in model.modules() if hasattr(part, _SHARDED))])


def _num_summing(model: nn.Module) -> int:
    marked = [vars(parameter)[_SUMMED].size for parameter in model.parameters() if hasattr(parameter, _SUMMED)]
    marked += [vars(part)[_SUMS].size for part in model.modules() if hasattr(part, _SUMS)]
    return max([1, *_of_layers(model).values(), *marked])


def carry_over(module: nn.Module, made: Mapping[Tensor, Tensor]) -> None:
    """Hook and equalise the parameters that were marked on the meta device and have values now; collective.

    Args:
        module: holds the new parameters.
        made: tensor on the meta device -> the tensor that replaces it.
    """
    new = set(made.values())
    for parameter, ranks in _held_alike(module).items():
        if parameter in new:
            if hasattr(parameter, _SUMMED):
                _sum_over(parameter, ranks)
            _equalise(parameter, ranks)


def ranks_that_hold(model: nn.Module) -> dict[Parameter, int]:
    """Return how many tensor-parallel ranks hold each parameter, for parameters that several ranks hold."""
    return {parameter: ranks.size for parameter, ranks in _held_alike(model).items()}


def _held_alike(model: nn.Module) -> dict[Parameter, Communicator]:
    """Return, for each such parameter, the ranks that hold it and sum its gradient."""
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
    """Return the number of ranks over which each parameter of this package's layers is cut or summed."""
    over: dict[Tensor, int] = {}
    for part in model.modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding | RMSNorm):
            over[part.weight] = _real(part.comm).size
    return over


def _real(ranks: Communicator) -> Communicator:
    """Return the processes that a layer is made over; for a layer of exact mode, those that hold its shards."""
    return ranks.holders if isinstance(ranks, ShardCommunicator) else ranks


def _unsummed(model: nn.Module, over: Mapping[Tensor, int]) -> dict[str, Parameter]:
    """Return the trained parameters that nothing sums, by name."""
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
        f"a parameter that every tp rank holds whole needs its gradient summed over them: tp {size}, nothing sums "
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
