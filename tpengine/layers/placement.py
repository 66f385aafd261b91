"""How the parameters of a module lie over tensor-parallel ranks: each module says so of its own, and here it is read.

    cut      each rank holds another part along a dim, and computes that part's whole gradient
    shared   cut, but several ranks hold the same part (fewer KV heads than ranks), each with a part of its gradient
    whole    every rank holds all of it

The gradient of what several ranks hold is a sum over them. Who takes that sum is a part of the placement: the layer in
its backward, a hook of `replicate`, or nobody, where each rank computes all of it.

A layer says it by the method `tp_placements`, and so may a module of your own. Of other modules `replicate`, `summed`
and `sharded` say it (replicated.py). What checks, sums, clips, fills and compares parameters reads
`placements_of`, and has no list of layers of its own. What a planner must know without torch, the table of
layout/parameters.py says: a model refuses to be built if its layers say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from torch import nn
from torch.nn import Parameter
from torch.nn.utils import parametrize
from tpkernels.exchange.communicator import Communicator

from tpengine.layers.collectives import ShardCommunicator

# Set on a parameter by `replicate`, together with its hook. A copy, or a parameter that replaces it, has neither.
_ON_PARAMETER = "_tpengine_placement"
# Set on a module by `summed` and `sharded`, for those of its own parameters of which it does not speak itself.
_ON_MODULE = "_tpengine_placements"


class SummedBy(Enum):
    """Who adds the gradients of the ranks that hold the same values."""

    LAYER = "its layer"
    HOOK = "replicate"
    NOBODY = "nobody"


@dataclass(frozen=True)
class Placement:
    """How one parameter lies over tensor-parallel ranks. Make one by `cut` or `whole`.

    Attributes:
        over: the ranks over which it is cut, or that hold it whole.
        dim: the dim that is cut; None if it is whole, or if only the module's forward knows.
        holders: the ranks that hold the same values as this one; None if no other does.
        summed_by: who adds their gradients; NOBODY where each rank computes all of it.
    """

    over: Communicator
    dim: int | None = None
    holders: Communicator | None = None
    summed_by: SummedBy = SummedBy.NOBODY

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of it."""
        return self.holders is self.over

    @property
    def num_ranks(self) -> int:
        """How many processes it lies over."""
        return real(self.over).size

    @property
    def num_holders(self) -> int:
        """How many processes hold the same values."""
        return 1 if self.holders is None else real(self.holders).size

    @property
    def num_sharing(self) -> int:
        """How many ranks of `over` hold the same part of what is cut; in exact mode how many shards."""
        return 1 if self.is_whole or self.holders is None else self.holders.size

    @property
    def kind(self) -> str:
        """In words, for messages."""
        if self.is_whole:
            return f"whole on {self.num_ranks} ranks"
        along = "" if self.dim is None else f" along dim {self.dim}"
        return f"cut over {self.num_ranks} ranks{along}"


def check_tokens(num_tokens: int, num_ranks: int, kind: str = "tp") -> None:
    """Raise ValueError unless the number of tokens is divisible by the number of ranks."""
    if num_tokens % num_ranks:
        raise ValueError(
            f"the number of tokens must be divisible by {kind}: {num_tokens} tokens, {kind} {num_ranks}: "
            f"pad to {-(-num_tokens // num_ranks) * num_ranks}"
        )


def check_divides(what: str, size: int, shards: int) -> int:
    """Return size / shards; raise ValueError unless it is whole."""
    if size % shards:
        down, up = size // shards * shards, (size // shards + 1) * shards
        nearest = f"{down} or {up}" if down else str(up)
        raise ValueError(f"{what} {size} is not divisible by {shards} shards: use {nearest}")
    return size // shards


def cut(over: Communicator, dim: int | None = None, shared_by: Communicator | None = None) -> Placement:
    """Return the placement of a parameter that is cut.

    Args:
        over: the ranks.
        dim: along which dim; None if only the module's forward knows.
        shared_by: the ranks that hold the same part, each with a part of its gradient, which the layer sums.
    """
    return Placement(over, dim, shared_by, SummedBy.NOBODY if shared_by is None else SummedBy.LAYER)


def whole(over: Communicator, summed_by: SummedBy = SummedBy.LAYER) -> Placement:
    """Return the placement of a parameter that every rank holds whole."""
    return Placement(over, None, over, summed_by)


@runtime_checkable
class SaysPlacements(Protocol):
    """A module that says how its own parameters lie over tp."""

    def tp_placements(self) -> Mapping[str, Placement]:
        """Return the placement of each of its direct parameters, by name; names of absent ones are passed over."""


def say_of_parameter(parameter: Parameter, placement: Placement) -> None:
    """Note how a parameter lies, as long as it is this tensor: where a hook on it sums."""
    setattr(parameter, _ON_PARAMETER, placement)


def is_noted(parameter: Parameter) -> bool:
    """Return whether `say_of_parameter` has noted how a parameter lies."""
    return _ON_PARAMETER in vars(parameter)


def say_of_module(module: nn.Module, placement: Placement) -> None:
    """Note how the direct parameters of a module lie; what it has said before, or been noted of it, stays."""
    if not hasattr(module, _ON_MODULE):
        setattr(module, _ON_MODULE, placement)


def speaks_of_itself(module: nn.Module) -> bool:
    """Return whether something says how a module's own tensors lie: it does itself, or `summed` or `sharded` did."""
    return isinstance(module, SaysPlacements) or hasattr(module, _ON_MODULE)


def placements_of(model: nn.Module) -> dict[Parameter, Placement]:
    """Return how each parameter of a model lies, of those of which something says so.

    What a layer says itself counts first, then what is noted on the parameter, then on its module.

    Raises:
        ValueError: two modules share a parameter and say different things of it.
    """
    found: dict[Parameter, tuple[str, Placement]] = {}
    originals = _of_originals(model)
    for prefix, module in model.named_modules():
        said = module.tp_placements() if isinstance(module, SaysPlacements) else {}
        for name, parameter in module.named_parameters(recurse=False):
            told = said.get(name) or originals.get(parameter)
            placement = told or vars(parameter).get(_ON_PARAMETER) or vars(module).get(_ON_MODULE)
            if placement is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            first, other = found.setdefault(parameter, (full, placement))
            if other.kind != placement.kind:
                raise ValueError(
                    f"a parameter lies in one way over tp: {first} is {other.kind}, and as {full} {placement.kind}: "
                    "share it between layers that hold it alike"
                )
    return {parameter: placement for parameter, (_, placement) in found.items()}


def _of_originals(model: nn.Module) -> dict[Parameter, Placement]:
    """Return how the tensors lie that parametrizations compute layers' parameters from: as the parameters would.

    The gradient reaches them through the layer's own sum. Those that a parametrization gives another shape, or cuts in
    several (weight_norm), are left out.
    """
    found = {}
    for module in model.modules():
        if not (isinstance(module, SaysPlacements) and parametrize.is_parametrized(module)):
            continue
        said = module.tp_placements()
        for name, computed in _parametrizations(module).items():
            original = getattr(computed, "original", None)
            # One that is not "unsafe" keeps the shape.
            if name in said and isinstance(original, Parameter) and not getattr(computed, "unsafe", True):
                found[original] = said[name]
    return found


def parametrizations_parameters(model: nn.Module) -> set[Parameter]:
    """Return what parametrizations of layers that say how they lie hold: originals, and parameters of their own."""
    parametrized = [m for m in model.modules() if isinstance(m, SaysPlacements) and parametrize.is_parametrized(m)]
    lists = [computed for module in parametrized for computed in _parametrizations(module).values()]
    return {parameter for computed in lists for parameter in computed.parameters()}


def _parametrizations(module: nn.Module) -> Mapping[str, nn.Module]:
    return dict(module.get_submodule("parametrizations").named_children())


def real(ranks: Communicator) -> Communicator:
    """Return the processes that a layer is made over; for a layer of exact mode, those that hold its shards."""
    return ranks.holders if isinstance(ranks, ShardCommunicator) else ranks
