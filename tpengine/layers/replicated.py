"""Modules that every tensor-parallel rank holds whole: sum their gradients, and refuse a model in which nothing does.

Activations are x[T/tp, D]: a rank's part of the tokens. Take a parameter that every rank holds whole, such as the
weight of nn.LayerNorm beside tensor-parallel layers. Its gradient is a sum over the ranks, and autograd computes only
the term of this rank. Without the sum nothing fails: the loss looks right, and the ranks' parameters drift apart.

The layers of this package take those sums themselves, and say so (placement.py). `replicate` makes any other module
take them. `summed` and `sharded` declare that a module of your own needs nothing more. `check_replicated` names the
parameters that nothing sums; DataParallel and Pipeline call it for every model that has tensor-parallel layers.
`clip_grad_norm_` clips by a norm that counts everything once, in a model of your own over tensor-parallel ranks and
pipeline stages. The engine's own clipping works on flat buffers (training/clipping.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator

from tpengine.layers.placement import (
    Placement,
    SummedBy,
    cut,
    is_noted,
    parametrizations_parameters,
    placements_of,
    real,
    say_of_module,
    say_of_parameter,
    speaks_of_itself,
    whole,
)

_Module = TypeVar("_Module", bound=nn.Module)
# Set on a frozen parameter of which nothing says how it lies.
_WATCHED = "_tpengine_watched"
_MOST_NAMES = 8


def replicate(module: _Module, tp: Communicator) -> _Module:
    """Sum the gradients of a module that every tensor-parallel rank holds whole, from now on; collective.

        gradient = sum over the tp ranks of the gradient of each one's tokens

        self.norm = replicate(nn.LayerNorm(dim), tp)

    Its parameters and buffers are overwritten with those of the communicator's rank 0. Frozen parameters too get the
    hook that sums, so that they may be thawed later; what `load_state_dict(assign=True)` puts in their place, in the
    module or in one around it, is summed too. A copy of the module (an EMA) has no hooks: to train the copy, call this
    for it too.

    Args:
        module: its input is x[T/tp, ...], this rank's tokens only. What already says how it lies stays as it is: this
            package's tensor-parallel layers inside it, and what is `summed` or `sharded`. On the meta device parameters
            are only marked: `Pipeline` makes them equal when it gives them values.
        tp: the tensor-parallel ranks.

    Returns:
        The module itself.

    Raises:
        ValueError: a layer of this package inside the module was made over other ranks, or has a parametrization with
            parameters of which nothing says how they lie.
        RuntimeError: from backward, with create_graph: the sum is differentiable once.

    Cost: one all-reduce per parameter and backward pass, of the gradient's size, in the order of backward.
    """
    if tp.size == 1:
        return module
    placed = placements_of(module)
    _refuse_untold(module, placed, tp.size)
    for name, parameter in module.named_parameters():
        if parameter in placed and placed[parameter].num_ranks != tp.size:
            raise ValueError(
                f"a layer of tpengine.layers gives its gradients to a sink, past any hook: {name} is over "
                f"{placed[parameter].num_ranks} ranks, tp {tp.size}: make the layer with tp"
            )
    for parameter in module.parameters():
        if parameter not in placed:
            _sum_over(parameter, tp)
        if parameter not in placed or placed[parameter].summed_by is SummedBy.HOOK:
            _equalise(parameter, tp)
    _equalise_buffers(module, tp)
    for part in module.modules():
        if any(map(is_noted, part.parameters(recurse=False))):
            part.register_load_state_dict_post_hook(_SumLoaded(part, tp))
    return module


def sharded(module: _Module, tp: Communicator) -> _Module:
    """Declare that each rank holds its own part of a module's parameters, so that `check_replicated` accepts them.

        self.bias = sharded(Bias(4 * dim // tp.size), tp)

    This changes nothing in the module. `clip_grad_norm_` counts the part of each rank. For a module that every rank
    holds whole, and that sums its gradients itself, call `summed`.

    Args:
        module: the module, with all modules inside it except those that already say how they lie: this package's
            layers, and what is `replicate`d or `summed`.
        tp: the tensor-parallel ranks.

    Returns:
        The module itself.
    """
    for part in module.modules():
        say_of_module(part, cut(tp))
    return module


def summed(module: _Module, tp: Communicator) -> _Module:
    """Declare that every tp rank holds a module whole and that it sums its gradients itself; collective.

        self.bias = summed(Bias(dim), tp)  # whose forward uses collectives.copy(self.bias, tp)

    Then `check_replicated` accepts its parameters, and `clip_grad_norm_` counts them once. Parameters and buffers are
    overwritten with those of the communicator's rank 0, as by `replicate`. The declaration holds for copies too.

    Args:
        module: the module, with all modules inside it except those that already say how they lie: this package's
            layers, and what is `replicate`d or `sharded`.
        tp: the tensor-parallel ranks.

    Returns:
        The module itself.
    """
    if tp.size == 1:
        return module
    placed = placements_of(module)
    for parameter in module.parameters():
        if parameter not in placed:
            _equalise(parameter, tp)
    _equalise_buffers(module, tp)
    for part in module.modules():
        say_of_module(part, whole(tp))
    return module


def check_replicated(model: nn.Module, tp: Communicator) -> None:
    """Refuse a model with trained parameters whose gradients nothing sums over the tensor-parallel ranks.

    Accepted are parameters that are frozen, that belong to this package's tensor-parallel layers, or that went through
    `replicate`, `summed` or `sharded`. A frozen one that is thawed later, without one of these, is refused in the
    backward that gives it a gradient. Nothing is exchanged: ranks that have built the same model raise alike.

    Args:
        model: any module; call this before its first step.
        tp: the tensor-parallel ranks.

    Raises:
        ValueError: names the parameters that nothing sums; or one that two layers share and hold differently.
    """
    refuse_unsummed(model, placements_of(model), tp.size)


def check_beside_parallel_layers(model: nn.Module) -> None:
    """Call `check_replicated` with the tp size that the model's own tensor-parallel layers have.

    Raises:
        ValueError: as check_replicated. A model without such layers is accepted.
    """
    placed = placements_of(model)
    refuse_unsummed(model, placed, num_ranks_of(placed))


def refuse_unsummed(model: nn.Module, placed: Mapping[Parameter, Placement], num_ranks: int) -> None:
    """Raise ValueError if several ranks train a parameter of a model that lies over one alone, or of which none says.

    A frozen one is watched: the backward in which it gets a gradient raises the same.

    Args:
        model: the model.
        placed: its `placements_of`.
        num_ranks: the size of tp.
    """
    if num_ranks == 1:
        return
    _refuse_untold(model, placed, num_ranks)
    unsummed = []
    for name, parameter in model.named_parameters():
        if parameter in placed and placed[parameter].num_ranks > 1:
            continue
        if parameter.requires_grad:
            unsummed.append(name)
        else:
            _watch(parameter, model, num_ranks)
    if not unsummed:
        return
    more = f" and {len(unsummed) - _MOST_NAMES} more" if len(unsummed) > _MOST_NAMES else ""
    raise ValueError(
        f"a parameter that every tp rank holds whole needs its gradient summed over them: tp {num_ranks}, nothing sums "
        f"{', '.join(unsummed[:_MOST_NAMES])}{more}: wrap the modules in tpengine.layers.replicate(module, tp), make "
        "tpengine's own with tp, or say by tpengine.layers.sharded(module, tp) that each rank holds its own part, by "
        "summed(module, tp) that the module sums by itself"
    )


def _refuse_untold(model: nn.Module, placed: Mapping[Parameter, Placement], num_ranks: int) -> None:
    """Refuse what a parametrization of a parallel layer trains, if nobody can tell whether it is cut or whole."""
    computing = parametrizations_parameters(model)
    untold = [
        name
        for name, parameter in model.named_parameters()
        if parameter in computing and parameter not in placed and parameter.requires_grad
    ]
    if untold:
        raise ValueError(
            f"a parametrization of a tensor-parallel layer must say how its parameters lie: tp {num_ranks}, nothing "
            f"says it of {', '.join(untold[:_MOST_NAMES])}: its gradient is the layer's already: say by "
            "tpengine.layers.sharded(layer, tp) that each rank holds its own part"
        )


def _watch(parameter: Parameter, model: nn.Module, num_ranks: int) -> None:
    """Check the model again when a frozen parameter gets a gradient after all."""
    # By identity: a parameter that takes the place of one on the meta device is given its attributes, but no hooks.
    if vars(parameter).get(_WATCHED) == id(parameter):
        return
    setattr(parameter, _WATCHED, id(parameter))
    of_model = weakref.ref(model)

    def check_again(_: Tensor) -> None:
        if (looked_at := of_model()) is not None:
            refuse_unsummed(looked_at, placements_of(looked_at), num_ranks)

    hook_gradient(parameter, check_again)


def num_parallel(model: nn.Module) -> int:
    """Return over how many tensor-parallel ranks a model is cut, or sums gradients; 1 without them."""
    return num_ranks_of(placements_of(model))


def num_ranks_of(placed: Mapping[Parameter, Placement]) -> int:
    """Return over how many ranks the parameters lie; 1 where none lies over several."""
    return max((placement.num_ranks for placement in placed.values()), default=1)


def carry_over(module: nn.Module, made: Mapping[Tensor, Tensor]) -> None:
    """Hook and equalise the parameters that were marked on the meta device and have values now; collective.

    Args:
        module: holds the new parameters.
        made: tensor on the meta device -> the tensor that replaces it.
    """
    new, placed = set(made.values()), placements_of(module)
    for parameter, placement in placed.items():
        if parameter in new and placement.holders is not None:
            if placement.summed_by is SummedBy.HOOK:
                _sum_over(parameter, placement.over)
            _equalise(parameter, real(placement.holders))
    refuse_unsummed(module, placed, num_ranks_of(placed))


def _sum_over(parameter: Parameter, tp: Communicator) -> None:
    def summed(gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a replicated parameter's gradient is summed over tp, which is differentiable once: leave create_graph "
                "out"
            )
        return tp.all_reduce_(gradient.clone(memory_format=torch.contiguous_format))

    say_of_parameter(parameter, whole(tp, SummedBy.HOOK))
    hook_gradient(parameter, summed)


class _SumLoaded:
    """Sum the gradients of parameters that load_state_dict(assign=True) has put in the places of summed ones.

    Args:
        module: whose own parameters are summed; a copy of it is not.
        tp: the tensor-parallel ranks.
    """

    def __init__(self, module: nn.Module, tp: Communicator) -> None:
        self._of, self._tp = weakref.ref(module), tp

    def __deepcopy__(self, memo: object) -> _SumLoaded:
        return self

    def __call__(self, module: nn.Module, _: object) -> None:
        if module is not self._of():
            return
        placed = placements_of(module)
        for parameter in module.parameters(recurse=False):
            if parameter not in placed:
                _sum_over(parameter, self._tp)


def hook_gradient(parameter: Parameter, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Register a hook on a parameter's gradient, also if the parameter is frozen: it acts once that is thawed."""
    if parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex()):
        return
    # torch refuses a hook on what needs no gradient, but keeps those that are there.
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_hook(hook)
    parameter.requires_grad_(is_trained)


def _equalise_buffers(module: nn.Module, tp: Communicator) -> None:
    """Equalise the buffers of parts of which nothing says that each rank may have its own."""
    for part in module.modules():
        if not speaks_of_itself(part):
            for buffer in part.buffers(recurse=False):
                _equalise(buffer, tp)


@torch.no_grad()
def _equalise(tensor: Tensor, tp: Communicator) -> None:
    if not tensor.is_meta and tensor.numel() > 0:
        tensor.copy_(tp.broadcast_(tensor.detach().contiguous()))


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, tp: Communicator, pp: Communicator | None = None) -> Tensor:
    """Scale the gradients so that their norm over all parameters of the model is at most `max_norm`; collective.

        norm = (sum over pp, tp and parameters of |gradient|^2, each counted once)^(1/2)
        gradient *= min(1, max_norm / norm)

    What several tp ranks hold counts once: norms, the bias behind a row-parallel product, KV heads that ranks share,
    what went through `replicate` or `summed`. Of a parameter that is cut the part of each rank counts.

    Args:
        model: this rank's part; call this after the gradients have been summed over replicas.
        max_norm: the largest norm that is left as it is; above zero.
        tp: the tensor-parallel ranks.
        pp: the pipeline's ranks; None without a pipeline.

    Returns:
        The norm before clipping, a float64 scalar, the same on all these ranks; not finite if a gradient is not.

    Raises:
        ValueError: `max_norm` is not above zero; `tp` is one rank, and the model lies over several; nothing
            sums the gradient of a parameter over tp, as check_replicated says.

    Cost: an all-reduce of one number over tp and one over pp. The host does not wait for the device.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above zero: got {max_norm}: use 1.0")
    placed = placements_of(model)
    if tp.size == 1 < (size := num_ranks_of(placed)):
        raise ValueError(
            f"a norm is taken over all ranks that hold a part of the model: it is over {size} tensor-parallel ranks, "
            "got tp 1: pass the communicator of its layers"
        )
    # Here is seen what was frozen when the model was checked, and is not any more.
    refuse_unsummed(model, placed, tp.size)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    counted = [
        (parameter.grad, placed[parameter].num_holders if parameter in placed else 1)
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    # The squares of this rank's gradients; what several ranks hold is divided among them.
    square = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient, num_holders in counted:
        norm_here = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        square += norm_here.double().square() / num_holders
    # Sum over the ranks, then scale every gradient by the same factor.
    for ranks in (tp, pp):
        if ranks is not None:
            ranks.all_reduce_(square)
    norm = square.sqrt()[0]
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient, _ in counted:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
