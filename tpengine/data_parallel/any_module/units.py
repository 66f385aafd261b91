"""Units: the modules of a model whose weights are gathered, freed and reduced together, and the buckets they lie in.

A unit is a layer of a stack, or a child of the model beside the stacks. What no unit holds alone, such as parameters
of the model itself, or weights that two units share, belongs to the model as a whole, which is the last unit.

The decision a reader will question: a module is cut into units only where it holds a stack (ModuleList, ModuleDict,
Sequential). Elsewhere a module may read the weights of its children without calling them, as nn.MultiheadAttention
reads those of `out_proj`; no hook of a child would run then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import Parameter

from tpengine.layout.parameters import BucketLayout

_STACKS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# A child of fewer than 1/1000 of the weights' bytes is not worth a collective of its own.
_SMALLEST_SHARE = 1000


@dataclass(frozen=True)
class Unit:
    """Modules are known by name; the model itself is "".

    Attributes:
        name: of its module.
        module: whose forward needs the weights.
        trained, frozen: its buckets, by index.
    """

    name: str
    module: nn.Module
    trained: tuple[int, ...]
    frozen: tuple[int, ...]


def choose_units(model: nn.Module, chosen: Sequence[nn.Module] | None) -> list[nn.Module]:
    """Return the modules that are units, in the order in which forward uses them; the model is not among them.

    Args:
        model: any module.
        chosen: by its user, in the order of use; None for the layers of stacks and the children beside them, in the
            order of registration.

    Raises:
        ValueError: a chosen module is no part of the model, is the model, is given twice, or lies inside another one.
    """
    if chosen is None:
        smallest = sum(p.nbytes for p in model.parameters()) / _SMALLEST_SHARE
        return [unit for unit in dict.fromkeys(_layers(model)) if _num_bytes(unit) >= max(smallest, 1)]
    names = {module: name for name, module in model.named_modules()}
    for unit in chosen:
        if not names.get(unit):
            raise ValueError(
                f"units are modules inside the model: got a {type(unit).__name__} that is not: pass some of "
                "model.modules(), or leave units out"
            )
    inside = Counter(part for unit in chosen for part in unit.modules())
    twice = [names[unit] for unit in chosen if inside[unit] > 1]
    if twice:
        raise ValueError(
            f"a module lies in one unit only: {', '.join(dict.fromkeys(twice))} is given twice, or lies inside another "
            "one: pass the outer or the inner one"
        )
    return list(chosen)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of stacks, and the children beside the stacks, that lie in a module."""
    for child in module.children():
        if isinstance(child, _STACKS) or 2 * sum(map(_num_bytes, _stacks_in(child))) > _num_bytes(child):
            yield from _layers(child)
        else:
            yield child


def _stacks_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost stacks inside a module."""
    for child in module.children():
        if isinstance(child, _STACKS):
            yield child
        else:
            yield from _stacks_in(child)


def _num_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def lay_out(
    model: nn.Module, modules: Sequence[nn.Module], bucket_bytes: int, *, with_frozen: bool
) -> tuple[list[Unit], dict[int, BucketLayout]]:
    """Cut a model's parameters into buckets of one unit and dtype, all trained or all frozen.

    Args:
        model, modules: the units, of `choose_units`.
        bucket_bytes: a bucket is closed as soon as it holds at least so many; one parameter is never cut.
        with_frozen: frozen parameters lie in buckets too.

    Returns:
        The units, of which the last is the model itself; the buckets by index.
    """
    owner: dict[Parameter, nn.Module] = {}
    for module in modules:
        for parameter in module.parameters():
            owner[parameter] = model if parameter in owner else module
    uses = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    inside = Counter(p for module in modules for _, p in module.named_parameters(remove_duplicate=False))
    named = dict(model.named_parameters())
    of_unit: dict[nn.Module, dict[str, Parameter]] = {module: {} for module in (*modules, model)}
    for name, parameter in named.items():
        alone = uses[parameter] == inside[parameter]
        of_unit[owner.get(parameter, model) if alone else model][name] = parameter
    names = {module: name for name, module in model.named_modules()}
    layouts: dict[int, BucketLayout] = {}
    units = []
    for module, held in of_unit.items():
        indices: dict[bool, list[int]] = {True: [], False: []}
        for trained, layout in _cut(held, bucket_bytes):
            if trained or with_frozen:
                indices[trained].append(len(layouts))
                layouts[len(layouts)] = layout
        units.append(Unit(names[module], module, tuple(indices[True]), tuple(indices[False])))
    return units, layouts


def _cut(held: Mapping[str, Parameter], bucket_bytes: int) -> Iterator[tuple[bool, BucketLayout]]:
    """Yield whether a bucket is trained, and what lies in it."""
    kinds: dict[tuple[bool, torch.dtype], list[str]] = {}
    for name, parameter in held.items():
        kinds.setdefault((parameter.requires_grad, parameter.dtype), []).append(name)
    for (trained, _), members in kinds.items():
        names: list[str] = []
        for name in members:
            names.append(name)
            if sum(held[n].nbytes for n in names) >= bucket_bytes or name == members[-1]:
                yield trained, BucketLayout("dp", tuple(names), tuple(held[n].numel() for n in names))
                names = []


def check_unchanged(model: nn.Module, known: Collection[Parameter], frozen: Mapping[str, Parameter]) -> None:
    """Refuse a model that trains other parameters than those of construction.

    Raises:
        RuntimeError: which have been thawed, replaced or added.
    """
    elsewhere = {name: p for name, p in model.named_parameters() if p.requires_grad and p not in known}
    thawed = [name for name, parameter in elsewhere.items() if frozen.get(name) is parameter]
    if len(thawed) < len(elsewhere):
        raise RuntimeError(
            f"trained parameters must be those of construction: {sorted(elsewhere.keys() - set(thawed))} have been "
            "replaced or added since: call remove() and make a new DataParallel"
        )
    if thawed:
        raise RuntimeError(
            f"frozen parameters lie in no bucket: {thawed} have been thawed since: call remove() and make a new "
            "DataParallel"
        )
